"""Start an EAGLE-4 drafter from a trained one: EAGLE-3, EAGLE-3.1, dense EAGLE-4, or the same form.

What both have is copied. The rest is derived so that the new drafter computes, on measured inputs,
nearly what the old one computes at depth 0:

- ``fc_norm`` is new: its weight is the root mean square of the tap, so norm and ``fc`` together
  keep their scale.
- ``eh_proj`` is new: with x = [norm_e(embed); norm_h(g)] and C the mean of x x^T, EAGLE-3 needs
  q, k, v = W x and the residual g ~ R x. Both are read from H numbers now: the subspace that keeps
  most of ``C^(1/2) (W^T W + R^T R) C^(1/2)`` (each part scaled to 1), in the basis in which the
  numbers themselves are the best prediction of g; then W' is the regression of W x on them.
  ``attn_norm`` gets their root mean square.
- a reduced head's rows are scattered to their tokens; the others take the target's rows, scaled to
  the same mean norm.
- experts start with a zero output, so a MoE drafter begins as its dense part.

Nothing is partial: what does not fit is reported together, and the drafter is left as it was.
Sources: FACTS of public warm starts (TorchSpec, NeMo); the factorisation is our own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

import torch

from ..config import Eagle4Config, structural_keys
from ..drafter.block import DraftBlock
from ..drafter.model import Eagle4Drafter
from .heads import kept_tokens
from .ttt import Runs

_RIDGE = 1e-4
_FLOOR = 0.3  # least share of the root mean square of a direction's amplitude in the residual
_SAME = (
    *("hidden_size", "target_hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "vocab_size", "tap_layers"),
    *("num_target_layers", "attention_bias", "mlp_bias"),
)


class Inputs(NamedTuple):
    """Second moments of a trained drafter's inputs at depth 0, float64."""

    tap_rms_T: torch.Tensor  # root mean square of every tap
    moment_XX: torch.Tensor  # mean of x x^T, X = 2H
    cross_HX: torch.Tensor  # mean of g x^T


@torch.no_grad()
def measure_inputs(source: Eagle4Drafter, batches: Iterable[Runs]) -> Inputs:
    """Moments over all context slots. Raises `ValueError` without any."""
    block, rows = cast(DraftBlock, source.layers[0]), 0
    taps = moment = cross = torch.zeros((), dtype=torch.float64)
    for runs in batches:
        features_NTH = runs.feature_NTH.to(source.dtype)
        state_NH = source.fuse(features_NTH)
        embed_NH = source.embed(runs.token_N).to(state_NH.dtype)
        x_NX = torch.cat([block.input_layernorm(embed_NH), block.hidden_norm(state_NH)], dim=-1)
        x_NX, state_NH = x_NX.double(), state_NH.double()
        taps = taps + features_NTH.double().square().mean(-1).sum(0)
        moment, cross = moment + x_NX.T @ x_NX, cross + state_NH.T @ x_NX
        rows += len(x_NX)
    if not rows:
        raise ValueError("a warm start measures its inputs on features; there are none")
    return Inputs((taps / rows).sqrt(), moment / rows, cross / rows)


@torch.no_grad()
def warm_start(
    drafter: Eagle4Drafter, source: Eagle4Drafter, batches: Iterable[Runs]
) -> Eagle4Drafter:
    """Fill ``drafter`` from ``source``; both bound to the target, ``batches`` of its features.

    Raises `ValueError`, and changes nothing, when the two cannot be mapped.
    """
    check_structures(drafter.config, source.config)
    inputs = measure_inputs(source, batches) if _needs_inputs(drafter, source) else None
    old, wanted = source.state_dict(), drafter.state_dict()
    new = {name: old[name] for name in wanted if name in old}
    # New experts, and a candidate head of another rank, begin as they are.
    own = {n: v for n, v in wanted.items() if n.startswith(("layers.0.moe", "efficient_lm_head"))}
    new |= {n: v for n, v in own.items() if n not in old or old[n].shape != v.shape}
    if inputs is not None and drafter.config.fc_norm and not source.config.fc_norm:
        for i, rms in enumerate(inputs.tap_rms_T):
            new[f"fc_norm.{i}.weight"] = torch.full_like(wanted[f"fc_norm.{i}.weight"], float(rms))
    if inputs is not None and drafter.config.eh_proj and not source.config.eh_proj:
        new |= narrow_projections(old, inputs, bool(drafter.config.attn_norm))
    if drafter.config.own_lm_head and "lm_head.weight" in wanted:
        new["lm_head.weight"] = full_head(source)
    if drafter.config.own_embed_tokens:
        new["embed_tokens.weight"] = cast(torch.Tensor, source.embedding.weight)
    _check(new, wanted)
    drafter.load_state_dict(new, strict=True)
    return drafter


def check_structures(wanted: Eagle4Config, found: Eagle4Config) -> None:
    """Raises `ValueError` listing everything that no mapping bridges."""
    wrong = [
        f"{key}: {getattr(found, key)!r} cannot become {getattr(wanted, key)!r}"
        for key in _SAME
        if getattr(found, key) != getattr(wanted, key)
    ]
    for key in ("fc_norm", "eh_proj", "attn_norm", "num_experts"):
        has, needs = getattr(found, key), getattr(wanted, key)
        if has and has != needs:
            wrong.append(f"{key}: {has!r} cannot become {needs!r}")
    if found.eh_proj and wanted.attn_norm and not found.attn_norm:
        wrong.append("attn_norm: a drafter that has eh_proj without it cannot get it")
    if wanted.draft_vocab_size not in (None, found.draft_vocab_size):
        wrong.append(
            f"draft_vocab_size: {found.draft_vocab_size!r} cannot become "
            f"{wanted.draft_vocab_size!r}; a vocabulary is only ever widened"
        )
    if found.own_lm_head and not wanted.own_lm_head:
        wrong.append(
            "own_lm_head: the drafter's states belong to its own head; set own_lm_head=True"
        )
    if wrong:
        raise ValueError("this drafter cannot start from that one:\n- " + "\n- ".join(wrong))


def goal_config(source: Eagle4Config, **overrides) -> Eagle4Config:
    """What a drafter is trained on as: an EAGLE-4 one as it is, others in the EAGLE-4 form.

    The EAGLE-4 form of an EAGLE-3 drafter keeps its sizes, RoPE and head (over all tokens) and gets
    tap norms, eh_proj, normalised feedback, a window and a candidate head.
    """
    values = {key: getattr(source, key) for key in structural_keys()}
    if not source.eh_proj:
        values |= {"fc_norm": True, "eh_proj": True, "attn_norm": True, "norm_output": True}
        values |= {"draft_vocab_size": None, "sliding_window": source.sliding_window or 4096}
        values |= {"candidate_rank": source.candidate_rank or min(128, source.hidden_size)}
    return Eagle4Config(**{**values, **overrides})


def narrow_projections(
    old: dict[str, torch.Tensor], inputs: Inputs, has_norm: bool
) -> dict[str, torch.Tensor]:
    """``eh_proj``, ``attn_norm`` and q/k/v of width H for q/k/v of width 2H."""
    names = [f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    weight_NX = torch.cat([old[name].double() for name in names])
    moment_XX, cross_HX = inputs.moment_XX, inputs.cross_HX
    hidden = cross_HX.shape[0]
    value_X, basis_XX = torch.linalg.eigh(moment_XX)
    # directions that no input has must stay invertible
    value_X = value_X.clamp_min(1e-9 * float(value_X.max())).sqrt()
    root_XX = (basis_XX * value_X) @ basis_XX.T
    inverse_XX = (basis_XX / value_X) @ basis_XX.T
    parts = [weight_NX @ root_XX, cross_HX @ inverse_XX]  # of q, k, v and of the residual
    gram_XX = sum(part.T @ part / part.square().sum() for part in parts)
    kept_XH = torch.linalg.eigh(gram_XX)[1][:, -hidden:]
    # z = kept^T C^(-1/2) x has unit covariance, so E[g z^T] z predicts g best; directions that g
    # does not need are kept audible for q, k and v
    left_HH, value_H, right_HH = torch.linalg.svd(cross_HX @ inverse_XX @ kept_XH)
    value_H = value_H.clamp_min(float(_FLOOR * value_H.square().mean().sqrt()))
    project_HX = (left_HH * value_H) @ right_HH @ kept_XH.T @ inverse_XX
    inner_HH = project_HX @ moment_XX @ project_HX.T
    rms = (inner_HH.trace() / hidden).sqrt()
    ridge_HH = _RIDGE * inner_HH.trace() / hidden * torch.eye(hidden, dtype=torch.float64)
    narrow_NH = torch.linalg.solve(inner_HH + ridge_HH, project_HX @ moment_XX @ weight_NX.T).T
    sizes = [len(old[name]) for name in names]
    new = dict(zip(names, narrow_NH.split(sizes), strict=True))
    new["layers.0.eh_proj.weight"] = project_HX
    if has_norm:
        new["layers.0.attn_norm.weight"] = rms.expand(hidden)
    dtype = old[names[0]].dtype
    return {name: value.to(dtype).contiguous() for name, value in new.items()}


def full_head(source: Eagle4Drafter) -> torch.Tensor:
    """The source's head over the whole vocabulary."""
    own = cast(torch.Tensor, source.head.weight)
    kept = kept_tokens(source)
    if kept is None:
        return own
    target = cast(torch.Tensor, source.target_head.weight).to(own)
    scale = own.norm(dim=1).mean() / target[kept].norm(dim=1).mean()
    return (target * scale).index_copy(0, kept, own)


def _needs_inputs(drafter: Eagle4Drafter, source: Eagle4Drafter) -> bool:
    pairs = ("fc_norm", "eh_proj")
    return any(getattr(drafter.config, k) and not getattr(source.config, k) for k in pairs)


def _check(new: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    missing = sorted(set(wanted) - set(new))
    wrong = [
        f"{name} has shape {list(value.shape)} instead of {list(wanted[name].shape)}"
        for name, value in new.items()
        if name in wanted and value.shape != wanted[name].shape
    ]
    wrong += [f"{n} is not finite" for n, v in new.items() if not v.isfinite().all()]
    if missing or wrong:
        raise ValueError(f"the warm start does not fit: missing {missing}; wrong {wrong}")
