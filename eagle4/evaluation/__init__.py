"""Measuring: prompts in, tokens per second and proofs of equality out.

In: a model, its bare target, a tokenizer and a prompt file.
Out: a benchmark (`run_benchmark`) or a losslessness report (`check_lossless`), as JSON and
Markdown.
Always: the arms run in one process on the same prompts, interleaved; a number carries its
hardware, versions, commit and command.
"""

from .benchmark import run_benchmark
from .lossless import check_lossless
from .prompts import load_prompts

__all__ = ["check_lossless", "load_prompts", "run_benchmark"]
