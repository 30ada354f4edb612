"""Which precision a device multiplies fast."""

from __future__ import annotations

import torch


def has_fast_bf16(device: str | torch.device) -> bool:
    """Whether bf16 matrix products are no slower than fp32 ones on this device.

    A CPU without bf16 instructions emulates them and is several times slower on the 16 rows of a
    verification, so there fp32 is the better default.
    """
    if torch.device(device).type != "cpu":
        return True
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return any("bf16" in name and bool(value) for name, value in capabilities.items())
