"""`Eagle4Drafter`: features and tokens in, candidate tokens out.

For position t with target features f_t and the following token x_{t+1}:
``g = fc([norm_i(f_i)])``, one decoder layer over ``(embed(x_{t+1}), g)``, final norm, head. The
state that a drafted token hands to its children is the normalised output (``norm_output``) or the
raw output (EAGLE-3).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..config import Eagle4Config
from ..ops import normed_linear
from ..types import Candidates
from .block import Attend, DraftBlock, DraftRotaryEmbedding, Rotary
from .head import BorrowedHead, propose_candidates, propose_full

if TYPE_CHECKING:
    from .sharded import SharedHeads


class DraftOutput(NamedTuple):
    """What one drafter step leaves behind for every row."""

    head_RH: torch.Tensor  # normalised output: input of the LM head
    state_RH: torch.Tensor  # recurrent input of the children


class Eagle4Drafter(PreTrainedModel):
    """A one-layer drafter. `bind` lends it the target's embedding and LM head."""

    config: Eagle4Config
    config_class = Eagle4Config
    base_model_prefix = ""
    main_input_name = "input_ids"
    _no_split_modules = ["DraftBlock"]
    _supports_sdpa = True
    # only with a reduced vocabulary: offsets (target id - draft id), and the mask of reached ids
    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: Eagle4Config):
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        taps, tap_width = len(config.tap_layers), config.target_hidden_size
        self.fc = nn.Linear(taps * tap_width, hidden, bias=False)
        self.fc_norm = (
            nn.ModuleList(LlamaRMSNorm(tap_width, eps) for _ in range(taps))
            if config.fc_norm
            else None
        )
        self.layers = nn.ModuleList([DraftBlock(config)])
        self.norm = LlamaRMSNorm(hidden, eps)
        if config.own_embed_tokens:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        if config.own_lm_head:
            rows = config.draft_vocab_size or config.vocab_size
            self.lm_head = nn.Linear(hidden, rows, bias=False)
        if config.candidate_rank:
            self.efficient_lm_head_down_proj = nn.Linear(hidden, config.candidate_rank, bias=False)
            self.efficient_lm_head = nn.Linear(config.candidate_rank, config.vocab_size, bias=False)
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self._rotary = DraftRotaryEmbedding(config) if config.use_rope else None
        self._borrowed: BorrowedHead | None = None
        self.shared: SharedHeads | None = None  # set by `sharded.shard_drafter`
        self.post_init()

    def bind(self, embed_tokens: nn.Module, lm_head: nn.Module) -> Eagle4Drafter:
        """Borrow the target's embedding and LM head for what this drafter does not own."""
        object.__setattr__(self, "_borrowed", BorrowedHead(embed_tokens, lm_head))
        return self

    @property
    def embedding(self) -> nn.Module:
        return self.embed_tokens if self.config.own_embed_tokens else self._lender().embed_tokens

    @property
    def head(self) -> nn.Module:
        return self.lm_head if self.config.own_lm_head else self._lender().lm_head

    @property
    def target_head(self) -> nn.Module:
        """The target's LM head, also for a drafter with its own: training is taught by it."""
        return self._lender().lm_head

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings ``[..., H]``; a borrowed table gets no gradient, it belongs to the target."""
        found = self.embedding(input_ids)
        return found if self.config.own_embed_tokens else found.detach()

    def _lender(self) -> BorrowedHead:
        if self._borrowed is None:
            raise ValueError(
                "this drafter borrows the target's embedding and LM head; attach it with "
                "Eagle4ForCausalLM(target, drafter) or call drafter.bind(embed_tokens, lm_head)"
            )
        return self._borrowed

    def fuse(self, features_RTH: torch.Tensor) -> torch.Tensor:
        """Taps ``[..., T, H_target]``, low to high, to the drafter's input state ``[..., H]``."""
        return normed_linear(features_RTH.unbind(-2), list(self.fc_norm or ()), self.fc)

    def rotary(self, like: torch.Tensor, position: torch.Tensor) -> Rotary:
        """Cosine and sine ``[..., D]`` for integer positions; None without RoPE."""
        if self._rotary is None:
            return None
        flat = position.reshape(1, -1)
        cos, sin = self._rotary(like, flat)
        return cos.view(*position.shape, -1), sin.view(*position.shape, -1)

    def forward(
        self,
        state: torch.Tensor,
        input_ids: torch.Tensor,
        position: torch.Tensor,
        attend: Attend,
    ) -> DraftOutput:
        """One step for rows of any leading shape.

        ``state [..., H]`` from `fuse` or from the parent's `DraftOutput`, ``input_ids [...]`` the
        token that follows it, ``position [...]`` its absolute position, ``attend`` the attention
        over committed and ancestor rows.
        """
        embed = self.embed(input_ids).to(state.dtype)
        rotary = self.rotary(state, position)
        out, normed = self.layers[0](state, embed, rotary, attend, self.norm)
        return DraftOutput(normed, normed if self.config.norm_output else out)

    @property
    def num_proposable(self) -> int:
        """The most distinct tokens that `propose` can return per row."""
        rows = self.config.draft_vocab_size or self.config.vocab_size
        return min(rows, self.config.num_candidates) if self.config.candidate_rank else rows

    @property
    def num_heads(self) -> tuple[int, int]:
        """Query and key/value heads that this process computes: all, or a split drafter's share."""
        attention, width = cast(DraftBlock, self.layers[0]).self_attn, self.config.head_dim
        return attention.q_proj.out_features // width, attention.k_proj.out_features // width

    def propose(self, head_RH: torch.Tensor, top_k: int) -> Candidates:
        """Best ``top_k`` next tokens of every row with the reported log-probabilities."""
        heads = self.shared
        if self.config.candidate_rank:
            propose = propose_candidates if heads is None else heads.propose_candidates
            return propose(
                self.head,
                self.efficient_lm_head_down_proj,
                self.efficient_lm_head,
                head_RH,
                self.config.num_candidates,
                top_k,
            )
        propose = propose_full if heads is None else heads.propose_full
        found = propose(self.head, head_RH, top_k)
        if self.config.draft_vocab_size is not None:
            return found._replace(token_RK=found.token_RK + self.d2t[found.token_RK])
        return found

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike, *, dtype=None, device=None, **kwargs):
        """Load a folder or hub id in the EAGLE-3, 3.1 or EAGLE-4 layout. See `checkpoint.load`."""
        from .checkpoint import load

        return load(path, dtype=dtype, device=device, **kwargs)

    def save_pretrained(self, path: str | os.PathLike, **kwargs) -> None:
        """Write the EAGLE-4 serving layout atomically. See `checkpoint.save`."""
        from .checkpoint import save

        save(self, path, **kwargs)
