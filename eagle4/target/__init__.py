"""The target: an unforked Transformers causal LM, run over packed rows.

In: token rows with an `AttentionStep`. Out: logits of the asked rows and the taps of every row.
Always: outside `TargetAdapter.attached` the model is exactly what the user handed over.
Attention layers come in through Transformers' registry, recurrent mixers through `mixers`.
"""

from .adapter import TargetAdapter, TargetOutput
from .families import check_target

__all__ = ["TargetAdapter", "TargetOutput", "check_target"]
