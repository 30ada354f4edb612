"""Fill a feature store from token ids: one plain forward of the unmodified target per sequence.

Hooks read the tapped blocks after the block; the last state is what the target gives its LM head.
Before anything is stored, the head applied to that state must reproduce the target's logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from tqdm.auto import tqdm

from ..ops import PackedLinears
from ..parallel import Ranks
from .features import FeatureSequence, FeatureWriter


@contextmanager
def tapped(target: Any, tap_layers: Sequence[int]) -> Iterator[list[torch.Tensor]]:
    """Inside the block every forward leaves the outputs of the tapped blocks in the list."""
    blocks = target.get_decoder().layers
    found: list[torch.Tensor] = [torch.empty(0)] * len(tap_layers)

    def hook(slot: int):
        def keep(module, args, output):
            found[slot] = output[0] if isinstance(output, tuple) else output

        return keep

    handles = [blocks[t].register_forward_hook(hook(i)) for i, t in enumerate(tap_layers)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def extract(
    target: Any, tap_layers: Sequence[int], ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``taps [n-1, T, H]`` and ``last [n-1, H]`` of one sequence, bfloat16 on the CPU."""
    with tapped(target, tap_layers) as found:
        inputs = ids[None, :-1].long().to(target.device)
        last = target.get_decoder()(input_ids=inputs, use_cache=False).last_hidden_state[0]
    taps = torch.stack([tap[0] for tap in found], dim=1)
    return taps.to("cpu", torch.bfloat16), last.to("cpu", torch.bfloat16)


@torch.no_grad()
def check_head(target: Any, ids: torch.Tensor) -> None:
    """Raises `ValueError` unless the LM head on the decoder's last state gives the logits.

    Models that scale or cap their logits fail here instead of teaching something wrong.
    """
    inputs = ids[None, :-1].long().to(target.device)
    wanted = target(input_ids=inputs, use_cache=False).logits.float()
    last = target.get_decoder()(input_ids=inputs, use_cache=False).last_hidden_state
    found = target.get_output_embeddings()(last).float()
    error, scale = (found - wanted).abs().max(), wanted.abs().max()
    if not error <= 1e-3 * scale:
        raise ValueError(
            f"{type(target).__name__}: the LM head on the last hidden state differs from the "
            f"model's logits by up to {error:.3g} (largest logit {scale:.3g}); the model changes "
            "its logits after the head, which training does not support"
        )


def build_store(
    target: Any,
    tap_layers: Sequence[int],
    writer: FeatureWriter | None,
    sequences: Iterable[tuple[torch.Tensor, torch.Tensor, dict]],
    total: int | None = None,
    ranks: Ranks | None = None,
) -> int:
    """Extract ``(ids, mask, info)`` sequences into a writer; returns how many were unusable.

    Sequences that the writer already holds are skipped by their order, so that an interrupted
    build continues. Sequences with non-finite features are counted and left out; more than one in
    twenty of them is an error.

    ``ranks``: those of a split target. All of them call this; sequences and writer (None on the
    others) are rank 0's.
    """
    done, bad = 0 if writer is None else writer.num_done, 0
    todo = islice(sequences, done, None)
    todo = todo if ranks is None else ranks.follow(todo)
    bar = tqdm(todo, total=total, initial=done, desc="features", mininterval=5)
    with PackedLinears(target).active():
        for i, (ids, mask, info) in enumerate(bar, 1):
            if i == 1:
                check_head(target, ids)
            taps, last = extract(target, tap_layers, ids)
            if writer is None:
                continue
            if taps.isfinite().all() and last.isfinite().all():
                writer.add(FeatureSequence(ids.int(), taps, last, mask.bool()), info)
                continue
            bad += 1
            writer.drop()
            if bad > 20 and bad > 0.05 * i:
                raise ValueError(f"{bad} of {i} sequences have non-finite features")
    if writer is not None:
        writer.flush()
    return bad
