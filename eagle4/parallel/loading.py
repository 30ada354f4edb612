"""Load a target of which a rank reads, casts and keeps its own share only.

Transformers' loader (5.17 and later) reads no more of a DTensor parameter than its local shard,
also where it merges many tensors of a checkpoint into one parameter. So what the plan splits is a
DTensor while the weights arrive; `shard_target` makes plain tensors of the shards afterwards.
Embeddings, norms and repeated key/value heads are read whole.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from .linear import share_of
from .ranks import Ranks
from .target import output_share, parameter_axis, split_places

# Arguments of `from_pretrained` with which weights come from elsewhere, or are no plain tensors.
_OTHERWISE = ("quantization_config", "device_map", "state_dict", "gguf_file", "trust_remote_code")


def can_load_share(config: PreTrainedConfig, kwargs: dict[str, Any]) -> bool:
    """Whether `load_share` serves this configuration and these arguments of `from_pretrained`."""
    is_plain = getattr(config, "quantization_config", None) is None
    others = any(kwargs.get(name) for name in _OTHERWISE)
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and is_plain and not others


def load_share(
    source: Any, config: PreTrainedConfig, ranks: Ranks, *args: Any, **kwargs: Any
) -> PreTrainedModel:
    """``AutoModelForCausalLM.from_pretrained(source, ...)`` for `shard_target`, and nothing else.

    Until that has run the model cannot compute. Raises `ValueError` for sizes that do not divide.
    """
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    assert ranks.group is not None
    mesh = DeviceMesh.from_group(ranks.group, "cpu")  # where weights are read to

    def prepare(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        _read_shares(self, ranks, mesh)

    members = {"__init__": prepare, "__module__": kind.__module__}
    model = type(kind.__name__, (kind,), members).from_pretrained(source, *args, **kwargs)
    model.__class__ = kind
    return model


def _read_shares(model: PreTrainedModel, ranks: Ranks, mesh: DeviceMesh) -> None:
    """Turn what is split into DTensors; the model is empty still."""
    text = model.config.get_text_config(decoder=True)
    for style, (owner, name) in split_places(model, ranks.size):
        part = getattr(owner, name)
        if isinstance(part, nn.Parameter):
            if style != "first_only":
                _distribute(owner, name, mesh, *parameter_axis(part, style))
        elif style.startswith("colwise"):
            # Heads that several ranks repeat are no shards.
            share = output_share(name, part, style, text, ranks)
            if share == share_of(part.out_features, ranks):
                _distribute_rows(part, mesh)
        elif style.startswith("rowwise"):
            _distribute(part, "weight", mesh, 1)
    if not text.tie_word_embeddings:
        _distribute_rows(model.get_output_embeddings(), mesh)


def _distribute_rows(linear: Any, mesh: DeviceMesh) -> None:
    _distribute(linear, "weight", mesh, 0)
    if linear.bias is not None:
        _distribute(linear, "bias", mesh, 0)


def _distribute(
    owner: nn.Module, name: str, mesh: DeviceMesh, dim: int, num_groups: int = 1
) -> None:
    whole = getattr(owner, name)
    is_one = num_groups == 1
    placement = Shard(dim) if is_one else _StridedShard(dim, split_factor=num_groups)
    part = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    setattr(owner, name, nn.Parameter(part, requires_grad=whole.requires_grad))
