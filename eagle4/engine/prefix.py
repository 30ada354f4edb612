"""`Eagle4Cache`: what a generation hands back as ``past_key_values``, and how the next one resumes.

A cache is reused by content: the longest common prefix of its tokens and the new prompt stays, the
rest is recomputed. So handing in the cache of an edited conversation is slow at worst, never wrong.
"""

from __future__ import annotations

import torch
from transformers import DynamicCache

from .state import Sequence, State


class Eagle4Cache:
    """Paged K/V of target and drafter, and recurrent state, with the tokens that they belong to.

    Passed back through ``generate(past_key_values=...)`` (or ``cache=...``) it is updated in place,
    as Transformers' caches are.
    """

    is_compileable = False

    def __init__(self, state: State):
        self.state = state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the ids buffer that have K/V, left padding included."""
        return max((s.pad + s.kv_length for s in self.state.sequences), default=0)

    @property
    def batch_size(self) -> int:
        return len(self.state.sequences)

    @property
    def num_columns(self) -> int:
        """Committed columns, left padding and the last token (which has no K/V) included."""
        return max((s.pad + s.length for s in self.state.sequences), default=0)

    def ids(self, num_columns: int, like: torch.Tensor) -> torch.Tensor:
        """The first ``num_columns`` columns of ids. Raises `ValueError` for another batch size."""
        if self.batch_size != len(like):
            raise ValueError(
                f"past_key_values holds {self.batch_size} sequences but the prompt has {len(like)} "
                "rows; pass the cache of the same batch, or none"
            )
        return self.state.ids_BT[:, :num_columns].to(like.device)

    @property
    def num_bytes(self) -> int:
        return self.state.target_pool.num_bytes + self.state.draft_pool.num_bytes

    def to_dynamic_cache(self) -> DynamicCache:
        """A Transformers cache of the same content for plain ``generate`` or `forward` calls.

        Every row gets `get_seq_length` columns with its K/V at the right end of its padding, as a
        left-padded batch has them. Raises `ValueError` when rows hold different numbers of tokens,
        and for targets with recurrent layers.
        """
        if self.state.target_pool.recurrent is not None:
            raise ValueError(
                "the state of recurrent layers has no Transformers form here; pass the "
                "Eagle4Cache itself as past_key_values, or none"
            )
        lengths = {s.pad + s.kv_length for s in self.state.sequences}
        if len(lengths) > 1:
            raise ValueError(
                f"rows hold {sorted(lengths)} columns; a Transformers cache needs one length"
            )
        cache = DynamicCache()
        for layer, pair in sorted(self.state.target_pool.layers.items()):
            key, value = (self._dense(tensor) for tensor in pair)
            cache.update(key, value, layer)
        return cache

    def _dense(self, pool_SHD: torch.Tensor) -> torch.Tensor:
        rows = []
        for sequence in self.state.sequences:
            slots = self.state.table.slots(sequence.index, 0, sequence.kv_length)
            kept = pool_SHD[torch.tensor(slots, device=pool_SHD.device, dtype=torch.int64)]
            padding = kept.new_zeros((sequence.pad, *kept.shape[1:]))
            rows.append(torch.cat([padding, kept]).transpose(0, 1))
        return torch.stack(rows)


def resume(cache: Eagle4Cache, state: State, needs_features: bool) -> None:
    """Take over the cache's pools and keep every row's longest common prefix.

    ``needs_features``: speculation needs taps (or draft K/V) for everything that is kept.
    The batch sizes must be equal, see `Eagle4Cache.ids`.
    """
    old = cache.state
    state.table, state.target_pool, state.draft_pool = old.table, old.target_pool, old.draft_pool
    recurrent = state.target_pool.recurrent
    for before, after in zip(old.sequences, state.sequences, strict=True):
        shared = _common_prefix(old.tokens(before), state.tokens(after))
        if recurrent is None:
            _keep(before, after, shared, needs_features)
            continue
        # Recurrent state exists at a few lengths only: the longest that everything else reaches.
        for length in recurrent.resumable(after.index):
            _keep(before, after, shared, needs_features, length)
            if after.kv_length == length:
                recurrent.restore(after.index, length)
                break
    cache.state = state


def _common_prefix(a: torch.Tensor, b: torch.Tensor) -> int:
    length = min(len(a), len(b))
    differs = (a[:length] != b[:length]).nonzero()
    return int(differs[0]) if len(differs) else length


def _keep(
    before: Sequence,
    after: Sequence,
    shared: int,
    needs_features: bool,
    most: int | None = None,
) -> None:
    """Cut lengths so that everything kept belongs to the first ``shared`` tokens.

    The last prompt token is always run again, because its logits are needed. A draft entry t also
    depends on token t + 1. ``most``: target entries to keep at most.
    """
    kv_length = min(before.kv_length, shared, after.length - 1)
    kv_length = kv_length if most is None else min(kv_length, most)
    draft_length = min(before.draft_length, max(shared - 1, 0), kv_length)
    features = torch.cat(before.pending) if before.pending else None
    first = before.draft_length  # position of the first pending feature
    if draft_length < first:
        features = None  # features of the entries between are gone
    if features is not None:
        features = features[: kv_length - draft_length]
    if needs_features:
        kv_length = draft_length + (0 if features is None else len(features))
    after.kv_length, after.draft_length = kv_length, draft_length
    after.forget()
    if features is not None and len(features):
        after.keep(features)
