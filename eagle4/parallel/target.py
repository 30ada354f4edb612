"""`shard_target`: keep one rank's share of a loaded Transformers causal LM, in place.

Blocks follow the family's plan (see `plan`); the LM head is split by vocabulary. Embeddings and
norms stay whole: they are a few rows of a forward and their outputs are needed on every rank.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from . import linear
from .plan import check_size, plan_of
from .ranks import Ranks
from .vocabulary import VocabShard

Place = tuple[nn.Module, str]  # a module and the name of one of its attributes


def shard_target(model: PreTrainedModel, ranks: Ranks) -> VocabShard:
    """Split ``model`` and return this rank's part of the vocabulary.

    Outside eagle4's own forwards the model still gives full logits. Raises `ValueError`, changing
    nothing, when the model cannot be split that way.
    """
    text = model.config.get_text_config(decoder=True)
    decoder = model.get_decoder()
    for style, (owner, attribute) in split_places(model, ranks.size):
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


def split_places(model: PreTrainedModel, size: int) -> list[tuple[str, Place]]:
    """What is split in ``size`` shares: styles and places, parameters before modules around them.

    Raises `ValueError` when the model cannot be split that way.
    """
    check_size(model.config, size)
    found = [
        (name, style, place)
        for pattern, style in plan_of(model.config).items()
        for name, place in _matches(model.get_decoder(), pattern)
    ]
    _check_kinds(model, found)
    found.sort(key=lambda entry: isinstance(getattr(*entry[2]), nn.Module))
    return [(style, place) for _, style, place in found]


def _matches(decoder: nn.Module, pattern: str) -> list[tuple[str, Place]]:
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
        if not (type(part) is nn.Linear or isinstance(part, nn.Parameter))
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
        share = output_share(name, module, style, text, ranks)
        linear.split_outputs(module, share)
        if style == "colwise_gather_output":
            setattr(owner, name, linear.Gathered(module, ranks, share))
    else:
        share = linear.share_of(module.in_features, ranks)
        slices = style == "rowwise_split_input"
        linear.split_inputs(owner, name, share, ranks, slices)


def output_share(
    name: str, module: nn.Linear, style: str, text: PreTrainedConfig, ranks: Ranks
) -> linear.Share:
    """The rows of a column-parallel linear that this rank keeps."""
    if style == "colwise" and name in ("k_proj", "v_proj"):
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        return linear.share_of_heads(heads, module.out_features // heads, ranks)
    return linear.share_of(module.out_features, ranks)


def _split_parameter(owner: nn.Module, name: str, style: str, ranks: Ranks) -> None:
    if style == "first_only":
        linear.keep_on_first(owner, name, ranks)
        return
    whole = getattr(owner, name)
    dim, num_groups = parameter_axis(whole, style)
    share = linear.share_of(whole.shape[dim] // num_groups, ranks)
    linear.split_parameter(owner, name, dim, share, num_groups)


def parameter_axis(whole: torch.Tensor, style: str) -> tuple[int, int]:
    """The dimension along which a bare parameter is split, and how many runs lie along it.

    ``[E, gate rows + up rows, in]`` is "packed_colwise": the same share of both halves.
    """
    dim = whole.ndim - (1 if style == "rowwise" else 2)
    return dim, 2 if style == "packed_colwise" else 1


def _count_heads(module: Any) -> None:
    """How many query heads share a key/value head here: it differs where those are repeated."""
    projections = [getattr(module, name, None) for name in ("q_proj", "k_proj")]
    if hasattr(module, "num_key_value_groups") and all(type(p) is nn.Linear for p in projections):
        query, key = projections
        module.num_key_value_groups = query.out_features // key.out_features  # type: ignore
