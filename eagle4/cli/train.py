"""`eagle4 data`, `eagle4 train` and `eagle4 convert`: everything that makes a drafter."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from transformers import AutoConfig

from ..drafter import Eagle4Drafter


def convert(args: Namespace) -> int:
    """Load a drafter in any dialect and write it in this library's layout."""
    options: dict[str, Any] = {
        "tap_convention": args.tap_convention,
        "norm_output_means": args.norm_output_means,
    }
    if args.target is not None:
        options["target_config"] = AutoConfig.from_pretrained(args.target)
    drafter = Eagle4Drafter.from_pretrained(args.drafter, dtype=args.dtype, **options)
    drafter.save_pretrained(args.out)
    count = sum(parameter.numel() for parameter in drafter.parameters())
    print(json.dumps({"command": "convert", "out": args.out, "parameters": count}))
    return 0
