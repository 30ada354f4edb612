"""Low-rank updates of a trained drafter: ``W + B A`` with W frozen, in every linear layer.

Little data then moves ``rank * (in + out)`` numbers per layer instead of all of them (LoRA, Hu et
al. 2021, arXiv 2106.09685). B starts at 0, so the start is the drafter itself. Checkpoints of a run
keep A and B; drafters that it writes have plain, merged weights.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..drafter.model import Eagle4Drafter

_INSIDE = ".parametrizations."


class LowRank(nn.Module):
    """What is added to a weight ``[N, K]``."""

    def __init__(self, weight_NK: torch.Tensor, rank: int, generator: torch.Generator):
        super().__init__()
        rows, columns = weight_NK.shape
        drawn_RK = torch.randn(rank, columns, generator=generator) * columns**-0.5
        self.down_RK = nn.Parameter(drawn_RK.to(weight_NK))
        self.up_NR = nn.Parameter(torch.zeros_like(weight_NK[:, :1]).repeat(1, rank))

    def forward(self, weight_NK: torch.Tensor) -> torch.Tensor:
        # in full precision, so that training uses exactly the weights that are written
        with torch.autocast(weight_NK.device.type, enabled=False):
            return torch.addmm(weight_NK, self.up_NR, self.down_RK)


def add_low_rank(drafter: Eagle4Drafter, rank: int, seed: int) -> None:
    """Give every linear layer but the candidate head's an update of ``rank``, which does nothing
    yet."""
    generator = torch.Generator().manual_seed(seed)
    for name, module in list(drafter.named_modules()):
        if isinstance(module, nn.Linear) and not name.startswith("efficient_lm_head"):
            update = LowRank(module.weight.detach(), rank, generator)
            # checking would compute a weight to see that its shape stays
            parametrize.register_parametrization(module, "weight", update, unsafe=True)


def is_update(name: str) -> bool:
    """Whether a parameter belongs to an update, and not to what is updated."""
    return _INSIDE in name and not name.endswith(".original")


def has_updates(drafter: Eagle4Drafter) -> bool:
    return any(is_update(name) for name, _ in drafter.named_parameters())


def merged_state(drafter: Eagle4Drafter) -> dict[str, torch.Tensor]:
    """The drafter's state with plain weights; of one without updates its own."""
    state = {name: value for name, value in drafter.state_dict().items() if _INSIDE not in name}
    for name, module in drafter.named_modules():
        if isinstance(module, nn.Linear) and parametrize.is_parametrized(module):
            state[f"{name}.weight"] = module.weight.detach()
    return state
