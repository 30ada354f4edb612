"""Small shared targets, prompts and scripted models for the engine's tests.

The targets are built once and shared: nothing may change them (`test_modeling` shows that).
"""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
from scripted import Liar, Mixed, Oracle, ScriptedModel, continuations, small_drafter
from tiny import tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from eagle4 import Eagle4ForCausalLM

VOCAB = 24
DRAFTERS = ("random", "oracle", "liar", "mixed")


@functools.cache
def shared_target(vocab: int = VOCAB, layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    return tiny_llama(vocab=vocab, layers=layers, seed=seed)


def prompt(lengths: list[int], extra: int = 0, seed: int = 0, vocab: int = VOCAB) -> dict[str, Any]:
    """Left-padded prompts of these lengths with ``extra`` more padding columns on every row."""
    source = random.Random(f"{lengths}{seed}")
    longest = max(lengths) + extra
    rows = [[source.randrange(1, vocab) for _ in range(length)] for length in lengths]
    ids = [[0] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def model_with(
    drafter: str, target: LlamaForCausalLM, inputs: dict[str, Any], new: int = 40, **kwargs: Any
) -> Eagle4ForCausalLM:
    """A model that drafts at random, always right, never right, or right up to a depth per row.

    ``kwargs`` are those that change which tokens follow (processors), not those that stop.
    """
    if drafter == "random":
        return Eagle4ForCausalLM(target, small_drafter(target))
    # Room for the deepest draft behind the last token that a test asks for.
    known = continuations(target, inputs, max_new_tokens=new + 8, **kwargs)
    vocab = target.config.vocab_size
    if drafter == "oracle":
        return ScriptedModel(target, Oracle(known, vocab))
    if drafter == "liar":
        return ScriptedModel(target, Liar(known, vocab))
    return ScriptedModel(target, Mixed(known, vocab, right=[2, 0, 3, 1][: len(known)]))


def plain(model: Eagle4ForCausalLM, inputs: dict[str, Any], **kwargs: Any):
    """Transformers' own greedy decoding of the same target."""
    return model.target.generate(**inputs, do_sample=False, **kwargs)


def eagle(model: Eagle4ForCausalLM, inputs: dict[str, Any], **kwargs: Any):
    """The same call with speculation."""
    kwargs.setdefault("speculative", "eagle4")
    return model.generate(**inputs, do_sample=False, **kwargs)


def assert_identical(model: Eagle4ForCausalLM, inputs: dict[str, Any], **kwargs: Any):
    """Speculative ids equal plain Transformers' ids; returns the statistics."""
    speculative = kwargs.pop("speculative", "eagle4")
    wanted = plain(model, inputs, **kwargs)
    got = eagle(model, inputs, speculative=speculative, **kwargs)
    assert got.tolist() == wanted.tolist()
    stats = model.last_speculation
    assert stats is not None and not stats.fallbacks, stats.fallbacks
    return stats


def count_target_rows(monkeypatch) -> list[int]:
    """Rows of every packed target forward from now on."""
    from eagle4.target import TargetAdapter

    rows: list[int] = []
    forward = TargetAdapter.forward

    def counted(self, token_R, *args, **kwargs):
        rows.append(len(token_R))
        return forward(self, token_R, *args, **kwargs)

    monkeypatch.setattr(TargetAdapter, "forward", counted)
    return rows


def piece_tokenizer(vocab: int = VOCAB) -> PreTrainedTokenizerFast:
    """Byte-level pieces of one to three letters, with and without a space before them."""
    alphabet = list("abcdefĠ")
    merges = [("a", "b"), ("c", "d"), ("Ġ", "a"), ("e", "f"), ("b", "c"), ("ab", "c"), ("Ġ", "cd")]
    merges += [("f", "a"), ("Ġ", "Ġ"), ("d", "e"), ("Ġ", "ef"), ("d", "Ġ"), ("fa", "b"), ("e", "e")]
    tokens = ["<pad>", *alphabet, *("".join(pair) for pair in merges)]
    tokens += [f"<{i}>" for i in range(vocab - len(tokens))]
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>")
