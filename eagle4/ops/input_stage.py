"""The drafter's input stage: RMS-normed parts side by side through one projection.

``fc([norm_low(f_low); norm_mid(f_mid); norm_high(f_high)])`` and
``eh_proj([norm_e(embed); norm_h(state)])``. A norm's 1 / RMS is one number per row and part, so the
kernel accumulates every part's product with the gains already multiplied in and scales it once at
the end: parts are read once and the concatenation is never written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .dispatch import is_stock, wants_triton

MOST_PARTS = 4
MOST_ROWS = 256


def normed_linear(
    parts: Sequence[torch.Tensor],
    norms: Sequence[nn.Module],
    linear: nn.Linear,
    impl: str = "auto",
) -> torch.Tensor:
    """``linear(cat([norm(part) ...]))``: parts ``[..., W]`` of one shape to ``[..., N]``.

    ``norms``: one per part with ``weight [W]`` and ``variance_epsilon`` (Llama's RMSNorm), or none
    at all for bare parts. ``linear`` has no bias. The kernel takes at most 4 parts and 256 rows.
    """

    def fits() -> bool:
        is_few = 0 < parts[0].numel() <= MOST_ROWS * parts[0].shape[-1]
        is_same = all(part.dtype == linear.weight.dtype for part in parts)
        is_plain = is_stock(linear) and linear.bias is None
        return len(parts) <= MOST_PARTS and is_few and is_same and is_plain

    if wants_triton(impl, parts[0], linear.weight, fits=fits):
        from .triton.input_stage import normed_linear as kernel

        gains = [norm.weight for norm in norms]
        eps = norms[0].variance_epsilon if norms else 0.0
        return kernel(parts, gains, linear.weight, float(eps))  # type: ignore[arg-type]
    found = [norm(part) for norm, part in zip(norms, parts, strict=True)] if norms else parts
    return linear(torch.cat(list(found), dim=-1))
