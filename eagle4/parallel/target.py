"""`shard_target`: keep one rank's share of a loaded Transformers causal LM, in place.

Blocks follow the family's plan (see `plan`); the LM head is split by vocabulary. Embeddings and
norms stay whole: they are a few rows of a forward and their outputs are needed on every rank.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from . import linear
from .plan import check_size, plan_of
from .ranks import Ranks
from .vocabulary import VocabShard


def shard_target(model: PreTrainedModel, ranks: Ranks) -> VocabShard:
    """Split ``model`` and return this rank's part of the vocabulary.

    Outside eagle4's own forwards the model still gives full logits. Raises `ValueError`, changing
    nothing, when the model cannot be split that way.
    """
    check_size(model.config, ranks.size)
    text = model.config.get_text_config(decoder=True)
    decoder = model.get_decoder()
    found = [
        (name, style, place)
        for pattern, style in plan_of(model.config).items()
        for name, place in _matches(decoder, pattern)
    ]
    _check_kinds(model, found)
    # Parameters come before the modules around them, which are replaced.
    found.sort(key=lambda entry: isinstance(getattr(*entry[2]), nn.Module))
    for _, style, (owner, attribute) in found:
        part = getattr(owner, attribute)
        if isinstance(part, nn.Parameter):
            _split_parameter(owner, attribute, style, ranks)
        else:
            _split_module(owner, attribute, style, text, ranks)
    for module in decoder.modules():
        _count_heads(module)
    head: Any = model.get_output_embeddings()
    vocab = VocabShard(ranks, head.out_features)
    vocab.split_head(head)
    vocab.gather_outside(head)
    return vocab


def _matches(decoder: nn.Module, pattern: str) -> list[tuple[str, tuple[nn.Module, str]]]:
    """Modules and parameters whose name is the pattern with layer numbers for ``*``."""
    wanted = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    modules = dict(decoder.named_modules())
    names = [*modules, *(name for name, _ in decoder.named_parameters())]
    places = []
    for name in names:
        if wanted.fullmatch(name):
            owner, _, attribute = name.rpartition(".")
            places.append((name, (modules[owner], attribute)))
    return places


def _check_kinds(model: PreTrainedModel, found: list) -> None:
    """A plan that names no block, or what cannot be sliced, was made for another structure."""
    parts = {name: getattr(*place) for name, style, place in found if style != "moe_tp_experts"}
    head: Any = model.get_output_embeddings()
    parts["the LM head"] = head
    wrong = [
        f"{name} is a {type(part).__name__}"
        for name, part in parts.items()
        if type(part) not in (nn.Linear, nn.Parameter)
    ]
    size = model.config.get_text_config(decoder=True).vocab_size
    if not wrong and head.out_features < size:
        raise ValueError("this model is split already; load it again to split it otherwise")
    if not found or wrong:
        raise ValueError(
            f"the tensor-parallel plan of {type(model).__name__} does not fit it: "
            f"{'; '.join(wrong) or 'it names no module of it'}; use tp_size=1"
        )


def _split_module(
    owner: nn.Module, name: str, style: str, text: PreTrainedConfig, ranks: Ranks
) -> None:
    module = getattr(owner, name)
    if style == "moe_tp_experts":
        setattr(owner, name, linear.Summed(module, ranks))
    elif style.startswith("colwise"):
        share = _output_share(name, module, style, text, ranks)
        linear.split_outputs(module, share)
        if style == "colwise_gather_output":
            setattr(owner, name, linear.Gathered(module, ranks, share))
    else:
        share = linear.share_of(module.in_features, ranks)
        slices = style == "rowwise_split_input"
        linear.split_inputs(owner, name, share, ranks, slices)


def _output_share(
    name: str, module: nn.Linear, style: str, text: PreTrainedConfig, ranks: Ranks
) -> linear.Share:
    if style == "colwise" and name in ("k_proj", "v_proj"):
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        return linear.share_of_heads(heads, module.out_features // heads, ranks)
    return linear.share_of(module.out_features, ranks)


def _split_parameter(owner: nn.Module, name: str, style: str, ranks: Ranks) -> None:
    whole = getattr(owner, name)
    if style == "first_only":
        linear.keep_on_first(owner, name, ranks)
    elif style == "packed_colwise":
        _split_pair(owner, name, ranks)
    else:
        dim = whole.ndim - (1 if style == "rowwise" else 2)
        linear.split_parameter(owner, name, dim, linear.share_of(whole.shape[dim], ranks))


def _split_pair(owner: nn.Module, name: str, ranks: Ranks) -> None:
    """``[E, gate rows + up rows, in]``: the same share of both halves."""
    whole = getattr(owner, name)
    halves = whole.detach().unflatten(-2, (2, -1))
    share = linear.share_of(halves.shape[-2], ranks)
    kept = halves[..., share.first : share.last, :].flatten(-3, -2).clone()
    setattr(owner, name, nn.Parameter(kept, requires_grad=whole.requires_grad))


def _count_heads(module: Any) -> None:
    """How many query heads share a key/value head here: it differs where those are repeated."""
    projections = [getattr(module, name, None) for name in ("q_proj", "k_proj")]
    if hasattr(module, "num_key_value_groups") and all(type(p) is nn.Linear for p in projections):
        query, key = projections
        module.num_key_value_groups = query.out_features // key.out_features  # type: ignore
