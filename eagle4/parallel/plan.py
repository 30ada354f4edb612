"""Which module of a target is split how: Transformers' own plan, read as a table.

Transformers publishes a plan per family (``config.base_model_tp_plan``). We take it as data and
apply it ourselves to plain tensors, because Transformers' own application (5.24)

- shards only while it loads a checkpoint, not a model that is already there;
- leaves DTensor weights behind replaced forwards, which packed CPU weights cannot take over;
- gives up where key/value heads are fewer than ranks, and only in the first forward;
- gathers full logits on every rank in every step.

A style that is not understood here is an error, never ignored. `OWN_PLANS` serves families for
which Transformers has no usable plan.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

# Styles that change nothing at inference: gradients only, or tables that stay whole here.
_WHOLE = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "embedding_rowwise")
_WHOLE += ("embedding_colwise", "replicate")
STYLES = frozenset(
    {
        *("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input"),
        *("packed_colwise", "moe_tp_experts", "first_only"),
        *_WHOLE,
    }
)
_OLD_NAMES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}

# Of a bare parameter "colwise" splits the last dimension but one and "rowwise" the last;
# "first_only" is what rank 0 alone adds.
OWN_PLANS: dict[str, dict[str, str]] = {
    "gpt_oss": {
        **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.self_attn.sinks": "rowwise",
        # Gates and ups alternate in the last dimension, so an even slice holds pairs.
        "layers.*.mlp.experts.gate_up_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
        "layers.*.mlp.experts.down_proj": "colwise",
        "layers.*.mlp.experts.down_proj_bias": "first_only",
        "layers.*.mlp.experts": "moe_tp_experts",
    },
}
_HEADS = ("q_proj", "k_proj", "v_proj", "query_key_value", "qkv_proj")


def plan_of(config: PreTrainedConfig) -> dict[str, str]:
    """Styles by module pattern (``*`` for a layer number), relative to the decoder.

    Modules that stay whole are left out. Raises `ValueError` for a family without a plan, or with
    one that is not understood.
    """
    text = config.get_text_config(decoder=True)
    plan = OWN_PLANS.get(text.model_type) or getattr(text, "base_model_tp_plan", None) or {}
    plan = {name: _OLD_NAMES.get(style, style) for name, style in plan.items()}
    unknown = sorted(set(plan.values()) - STYLES)
    if unknown:
        raise ValueError(
            f"the tensor-parallel plan of {text.model_type} uses {unknown}, which eagle4 does not "
            f"understand; known are {sorted(STYLES)}"
        )
    plan = {name: style for name, style in plan.items() if style not in _WHOLE}
    if not plan:
        raise ValueError(
            f"there is no tensor-parallel plan for {text.model_type}; use tp_size=1, or a family "
            "for which Transformers has one"
        )
    return plan


def check_size(config: PreTrainedConfig, tp_size: int) -> None:
    """Raise `ValueError` when a target of this config cannot be split in ``tp_size`` shares.

    Needs no weights, so it comes before loading. Sizes need not be powers of two.
    """
    if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1:
        raise ValueError(f"tp_size must be a positive integer, got {tp_size!r}")
    text = config.get_text_config(decoder=True)
    plan = plan_of(config)
    if tp_size == 1 or _fits(text, plan, tp_size):
        return
    allowed = [n for n in range(1, _num_heads(text)[0] + 1) if _fits(text, plan, n)]
    heads, kv_heads = _num_heads(text)
    raise ValueError(
        f"tp_size={tp_size} cannot split this {text.model_type} with {heads} attention heads, "
        f"{kv_heads} key/value heads, an MLP of {_inner_size(text)} and {text.vocab_size} tokens; "
        f"allowed are {allowed}"
    )


def fits_heads(num_heads: int, num_kv_heads: int, size: int) -> bool:
    """Whether attention splits by heads; key/value heads may be repeated on several ranks."""
    return num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)


def _fits(text: PreTrainedConfig, plan: dict[str, str], size: int) -> bool:
    # Only heads that are computed where they are used must fall on rank boundaries.
    by_heads = {n.rsplit(".", 1)[-1] for n, s in plan.items() if s == "colwise"} & set(_HEADS)
    heads, kv_heads = _num_heads(text)
    if "query_key_value" in by_heads or "qkv_proj" in by_heads:
        kv_heads = heads
    step = -(-text.vocab_size // size)
    return (
        (not by_heads or fits_heads(heads, kv_heads, size))
        and _inner_size(text) % size == 0
        and step * (size - 1) < text.vocab_size
    )


def _num_heads(text: PreTrainedConfig) -> tuple[int, int]:
    heads = text.num_attention_heads
    return heads, getattr(text, "num_key_value_heads", None) or heads


def _inner_size(text: PreTrainedConfig) -> int:
    """The MLP's width; of the experts where there are any."""
    inner = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
    return inner or 4 * text.hidden_size
