"""The drafter's input stage: three taps through fc, embedding and state through eh_proj.

python profiling/ops/input_stage.py
"""

from __future__ import annotations

from collections.abc import Iterator

from ceiling import Case, Setup, main, size_of
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eagle4.ops import normed_linear


def cases(setup: Setup) -> Iterator[Case]:
    hidden = 576 if setup.is_small else 4096
    for name, parts in (("fc", 3), ("eh_proj", 2)):
        norms = [LlamaRMSNorm(hidden) for _ in range(parts)]
        linear = nn.Linear(parts * hidden, hidden, bias=False)
        nn.ModuleList([*norms, linear]).to(setup.device, setup.dtype).requires_grad_(False)
        for rows in (1, 4, 17, 64):
            taps = [setup.randn(rows, hidden) for _ in range(parts)]

            def run(impl: str, taps=taps, norms=norms, linear=linear):
                return normed_linear(taps, norms, linear, impl)

            yield Case(f"{name} rows {rows}", size_of(linear.weight, *taps), run)


if __name__ == "__main__":
    main("input_stage", cases)
