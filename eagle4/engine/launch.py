"""What ``compile`` and ``launch`` mean: which `Graphs` serve a model's calls.

compile   "auto" (on accelerators), "on", "off"
launch    "direct": the host launches every operation; "graphs": CUDA graphs are recorded and
          replayed; "auto": directly, until graphs have been measured on hardware
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from .graphs import EAGER, STATIC, Graphs, check_mode
from .recorder import CudaRecorder
from .replay import Replays

LaunchMode = Literal["auto", "direct", "graphs"]
RECORDED = ("cuda",)  # types of devices whose launches can be recorded


def check_modes(compile: str, launch: str) -> None:
    """Raise `ValueError` on an unknown mode."""
    check_mode(compile)
    if launch not in get_args(LaunchMode):
        raise ValueError(f"launch must be one of {get_args(LaunchMode)}, got {launch!r}")


def is_replayed(launch: str, device: torch.device) -> bool:
    """What ``launch`` means on a device. Raises `ValueError` where there are no graphs."""
    if launch == "graphs" and device.type not in RECORDED:
        raise ValueError(
            f"launch='graphs' replays CUDA graphs, but the model is on {device}; move it to a CUDA "
            "device, or pass launch='direct' (or 'auto')"
        )
    return launch == "graphs"


class OwnGraphs:
    """The functions of one model, for every way to run them that was asked for."""

    def __init__(self) -> None:
        self.made: dict[tuple[bool, torch.device | None], Graphs] = {}

    def graphs(
        self, compiled: bool, launch: str, device: torch.device, falls_back: bool = True
    ) -> Graphs:
        """Those for one call; ``falls_back`` as in `Graphs`. Raises what `is_replayed` raises."""
        where = device if is_replayed(launch, device) else None
        if not compiled and where is None:
            return EAGER
        if (compiled, where) not in self.made:
            replays = None
            if where is not None:
                recorder = CudaRecorder(where, warms_up=falls_back)
                replays = Replays(recorder, STATIC, falls_back)
            self.made[compiled, where] = Graphs(compiled, falls_back, replays)
        return self.made[compiled, where]
