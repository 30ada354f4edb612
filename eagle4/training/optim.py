"""AdamW, or Muon for matrices with AdamW for the rest.

Muon: momentum, then the nearest orthogonal matrix by five Newton-Schulz steps (Jordan et al. 2024),
scaled by 0.2 sqrt(max(rows, columns)) so that an update has AdamW's root mean square (Liu et al.
2025) and one learning rate serves both. torch's own Muon iterates in bfloat16, which CPUs without
bfloat16 arithmetic run several times slower than float32; here it runs in the parameter's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .distributed import full, like

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Newton-Schulz towards U V^T of the matrix's singular value decomposition."""
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class MuonAdamW(torch.optim.Optimizer):
    """One optimiser with per-group ``kind``: ``"muon"`` for matrices or ``"adamw"``."""

    def __init__(self, groups: list[dict], betas: tuple[float, float], weight_decay: float):
        super().__init__(groups, dict(betas=betas, weight_decay=weight_decay, eps=1e-8))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            update = self._muon if group["kind"] == "muon" else self._adamw
            for param in group["params"]:
                if param.grad is not None:
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.add_(update(param, param.grad, group), alpha=-group["lr"])

    def _muon(self, param: torch.Tensor, grad: torch.Tensor, group: dict) -> torch.Tensor:
        state = self.state[param]
        if not state:
            state["momentum"] = torch.zeros_like(param)
        momentum = state["momentum"].lerp_(grad, 0.05)
        # a matrix is orthogonalised as a whole, also where FSDP2 has divided it
        nesterov = full(grad.lerp(momentum, 0.95))
        return like(orthogonalise(nesterov).mul_(0.2 * max(param.shape) ** 0.5), param)

    def _adamw(self, param: torch.Tensor, grad: torch.Tensor, group: dict) -> torch.Tensor:
        state, (beta1, beta2) = self.state[param], group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["first"] = torch.zeros_like(param)
            state["second"] = torch.zeros_like(param)
        state["step"] += 1
        first = state["first"].lerp_(grad, 1 - beta1)
        second = state["second"].lerp_(grad.square(), 1 - beta2)
        count = float(state["step"])
        denominator = (second / (1 - beta2**count)).sqrt_().add_(group["eps"])
        return first.div(denominator).div_(1 - beta1**count)


def build_optimizer(params: Mapping[str, torch.Tensor], config) -> MuonAdamW:
    """Groups of ``params`` for ``config.optimizer`` ``"muon"`` or ``"adamw"``."""
    use_muon = config.optimizer == "muon"
    muon = [p for p in params.values() if p.ndim == 2 and use_muon]
    rest = [p for p in params.values() if not (p.ndim == 2 and use_muon)]
    groups = [
        dict(params=chosen, kind=kind, lr=config.lr, peak_lr=config.lr)
        for kind, chosen in (("muon", muon), ("adamw", rest))
        if chosen
    ]
    return MuonAdamW(groups, config.betas, config.weight_decay)
