"""Configurations: `Eagle4Config` rebuilds a drafter's weights, `SpeculativeConfig` steers a run.

Every key of `Eagle4Config` changes the structure or its arithmetic; unknown keys are errors.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from .rope import LLAMA_THETA, normalize_rope, rope_for_target
from .structure import check_structure, check_types, is_count

FORMAT_VERSION = 1
_DERIVED: Any = None  # what `Eagle4Config` derives from its other keys when it is not given


def default_tap_layers(num_target_layers: int) -> list[int]:
    """Outputs of target blocks ``[1, L//2 - 1, L - 4]`` (0-indexed, post-block), low to high.

    The rule that the public EAGLE-3 drafters share. It names three distinct blocks from 7 layers
    on; shallower targets get first, middle and last block, and targets of one or two layers every
    block once. A tap is never repeated: a copy adds parameters but no information.
    """
    if num_target_layers < 1:
        raise ValueError(f"num_target_layers must be at least 1, got {num_target_layers}")
    if num_target_layers >= 7:
        return [1, num_target_layers // 2 - 1, num_target_layers - 4]
    last = num_target_layers - 1
    return sorted({0, last // 2, last})


class Eagle4Config(PreTrainedConfig):
    """Structure of a drafter and of the target that it was made for.

    Two configurations are equal when these keys are, whatever folder they came from.

    Sizes: ``hidden_size`` H (equal to the target's when the embedding is shared),
    ``target_hidden_size`` of one tap, ``vocab_size`` V, ``draft_vocab_size`` rows of a reduced
    EAGLE-3 head (None: full vocabulary).

    Switches: ``fc_norm`` (one RMSNorm per tap before ``fc``), ``eh_proj`` (2H -> H input
    projection; False is the EAGLE-3 form with 2H-wide q/k/v), ``attn_norm`` (norm between
    ``eh_proj`` and attention; always False without ``eh_proj``), ``norm_output`` (the normalised
    output is the next step's state), ``use_rope`` (False: NoPE), ``sliding_window`` (None: full
    attention), ``candidate_rank`` (0: no low-rank head) and ``num_candidates``,
    ``own_embed_tokens`` / ``own_lm_head`` (False: borrowed from the target), ``num_experts`` (0:
    dense MLP only) with ``num_experts_per_tok``, ``moe_intermediate_size`` (None: the dense MLP's),
    ``norm_topk_prob``, ``routed_scaling_factor`` and ``moe_norm`` (see `drafter.moe`).

    ``tap_layers`` are 0-indexed target blocks whose outputs are read *after* the block and before
    the next norm, in the order of concatenation. Source: EAGLE-3, EAGLE-3.1, EAGLE-4 article.
    """

    model_type = "eagle4"

    hidden_size: int = 576
    intermediate_size: int = 2048
    num_attention_heads: int = 9
    num_key_value_heads: int = _DERIVED
    head_dim: int = _DERIVED
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192
    rope_parameters: dict[str, Any] = _DERIVED
    vocab_size: int = 49152
    draft_vocab_size: int | None = None
    target_hidden_size: int = _DERIVED
    num_target_layers: int = 30
    tap_layers: list[int] = _DERIVED
    fc_norm: bool = True
    eh_proj: bool = True
    attn_norm: bool = True
    norm_output: bool = True
    use_rope: bool = True
    sliding_window: int | None = 4096
    candidate_rank: int = 128
    num_candidates: int = 128
    own_embed_tokens: bool = False
    own_lm_head: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    moe_norm: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    tokenizer_fingerprint: str | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs):
        """``kwargs``: what is no field of this class or its base, as Transformers hands it on."""
        check_types(vars(self), FORMAT_VERSION)
        if unknown := sorted(set(kwargs) - _BASE_KEYS):
            raise ValueError(
                f"unknown drafter configuration keys {unknown}; "
                f"known are {sorted(structural_keys())}"
            )
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.draft_vocab_size == self.vocab_size:
            self.draft_vocab_size = None
        if self.tap_layers is None:
            self.tap_layers = default_tap_layers(self.num_target_layers)
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_theta": LLAMA_THETA}
        self.rope_parameters = normalize_rope(self.rope_parameters, self.max_position_embeddings)
        self.tap_layers = list(self.tap_layers)
        self.attn_norm = self.attn_norm and self.eh_proj
        self.tie_word_embeddings = kwargs.pop("tie_word_embeddings", False)
        # Before Transformers' own validation, whose errors are no ValueErrors.
        check_structure(self)
        super().__post_init__(**kwargs)

    def __eq__(self, other: object) -> bool:
        # The inherited comparison looks at the base class's fields only.
        return isinstance(other, Eagle4Config) and all(
            getattr(self, key) == getattr(other, key) for key in structural_keys()
        )

    @classmethod
    def for_target(cls, target_config: PreTrainedConfig, **overrides) -> Eagle4Config:
        """A drafter that shares the target's widths, RoPE, embedding and LM head.

        A target without RoPE (GPT-2) gets a drafter with Llama's. Raises `ValueError` for unknown
        override names.
        """
        text = target_config.get_text_config(decoder=True)
        hidden, heads = text.hidden_size, text.num_attention_heads
        inner = getattr(text, "intermediate_size", None)
        values: dict[str, Any] = dict(
            hidden_size=hidden,
            target_hidden_size=hidden,
            intermediate_size=inner if is_count(inner, 1) else 4 * hidden,
            num_attention_heads=heads,
            num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or hidden // heads,
            rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-5,
            max_position_embeddings=getattr(text, "max_position_embeddings", None) or 8192,
            rope_parameters=rope_for_target(text),
            vocab_size=text.vocab_size,
            candidate_rank=min(128, hidden),
            num_candidates=min(128, text.vocab_size),
            num_target_layers=text.num_hidden_layers,
        )
        return cls(**{**values, **overrides})


def structural_keys() -> set[str]:
    """Names of the keys that `Eagle4Config` accepts."""
    return set(Eagle4Config.__annotations__)


# What Transformers itself adds to every configuration; none of it changes a drafter.
_BASE_KEYS = set(PreTrainedConfig().to_dict()) | {
    *("model_type", "torch_dtype", "tie_word_embeddings", "use_cache", "attn_implementation"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "output_attentions", "name_or_path"),
    *("_attn_implementation", "_commit_hash", "_name_or_path"),
}


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How `generate(..., speculative=...)` speculates.

    ``harness``: depth, width, verified nodes and whether to speculate at all follow measured costs
    and acceptance, within the limits below; False: always these limits. ``profile``: a file written
    by `eagle4 profile`, used as it is and never refined (reproducible decisions); None: the one in
    the cache folder, measured when missing. ``request_class``: requests of one class share an
    acceptance calibration of their own.

    ``mode``: ``"auto"`` leaves the shape to the harness, ``"tree"`` always expands ``top_k`` nodes,
    ``"chain"`` drafts width 1. ``max_depth`` drafter levels, ``top_k`` children per node and
    frontier width, ``max_nodes`` nodes verified per sequence (at most 63: ancestor sets are 64-bit
    masks with the root).

    ``sampling`` matters with ``do_sample=True`` only: ``"coupled"`` gives the tokens of plain
    sampling with the same seed, ``"rejection"`` others of the same law, which repeat with the seed
    only where the shapes do (``harness=False`` or a ``profile``).
    Raises `ValueError` for values out of range.
    """

    mode: str = "auto"
    max_depth: int = 12
    top_k: int = 4
    max_nodes: int = 16
    sampling: str = "coupled"
    harness: bool = True
    profile: str | None = None
    request_class: str = ""

    def __post_init__(self):
        if not isinstance(self.harness, bool):
            raise ValueError(f"harness must be True or False, got {self.harness!r}")
        if not isinstance(self.profile, str | None):
            raise ValueError(f"profile must be the path of a file or None, got {self.profile!r}")
        if not isinstance(self.request_class, str):
            raise ValueError(f"request_class must be a string, got {self.request_class!r}")
        if self.mode not in ("auto", "tree", "chain"):
            raise ValueError(f"mode must be 'auto', 'tree' or 'chain', got {self.mode!r}")
        if self.sampling not in ("coupled", "rejection"):
            raise ValueError(f"sampling must be 'coupled' or 'rejection', got {self.sampling!r}")
        for name, low, high in (("max_depth", 1, 63), ("top_k", 1, 16), ("max_nodes", 1, 63)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")

    @property
    def width(self) -> int:
        return 1 if self.mode == "chain" else self.top_k

    @classmethod
    def parse(cls, value: Any) -> SpeculativeConfig | None:
        """From ``None``, ``"eagle4"``, a dict of fields or a `SpeculativeConfig`."""
        if value is None or isinstance(value, cls):
            return value
        if value == "eagle4":
            return cls()
        if isinstance(value, dict):
            known = {field.name for field in dataclasses.fields(cls)}
            unknown = sorted(set(value) - known)
            if unknown:
                raise ValueError(
                    f"unknown speculative fields {unknown}; allowed are {sorted(known)}"
                )
            return cls(**value)
        raise ValueError(
            f"speculative={value!r} is not understood; pass 'eagle4', None, a SpeculativeConfig "
            "or a dict of its fields"
        )
