"""Recording launches on CUDA: the one place that captures graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class CudaRecorder:
    """CUDA graphs of one device, in one memory pool.

    Graphs share the memory of their intermediate results, so outputs have to be copied before
    another graph is replayed (`replay.Replayed` does that). All replays go to one stream.
    Without ``warms_up`` nothing runs but what is replayed: among ranks, one that runs a function
    once more than the others would wait for them in its collectives.
    """

    def __init__(self, device: torch.device, warms_up: bool = True):
        self.device = device
        self._warms_up = warms_up
        self._pool: Any = None

    def record(self, run: Callable[[], Any], fill: Callable[[], None]) -> tuple[Any, Callable]:
        """As `replay.Recorder` says. ``run`` has run directly before."""
        with torch.cuda.device(self.device):
            here = torch.cuda.current_stream()
            try:
                if self._warms_up:
                    self._warm_up(here, run, fill)
                if self._pool is None:
                    self._pool = torch.cuda.graph_pool_handle()
                graph = torch.cuda.CUDAGraph()
                # Other threads may go on calling CUDA.
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    out = run()
            finally:
                torch.cuda.set_stream(here)  # a capture that fails leaves its own in place
        return out, graph.replay

    def _warm_up(
        self, here: torch.cuda.Stream, run: Callable[[], Any], fill: Callable[[], None]
    ) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):  # workspaces of libraries belong to a stream
            fill()
            run()
        here.wait_stream(side)
