"""Judges one divergence between two greedy runs: a near tie, or something that is wrong.

In low precision the order of a sum depends on the shape of the call, so two correct ways to compute
the same logits differ a little, and where two tokens are almost equally good, the argmax flips.
That excuse has to be proved each time:

- *gap*: at the common prefix the logits are recomputed in fp32; the gap is the best logit minus the
  worse of the two tokens' logits. It is small only if both tokens are (nearly) the best one. A
  margin between the two alone would also excuse two equally bad tokens.
- *noise*: how far the run's own precision moves such a margin for no reason but the shape of the
  call. Plain forwards of the bare target over the same prefix in several shapes (all at once, in
  chunks, one token at a time); per position the spread of the margin between the two best tokens;
  the largest over the last positions before the divergence. At least one rounding step of the
  logits themselves: closer than that they cannot be told apart in this precision at all.

A divergence is a near tie iff gap <= noise.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch

CHUNKS = (1, 4, 16)


@dataclass(frozen=True, kw_only=True)
class Arbitration:
    """Logit differences at the common prefix. ``margin`` is first minus second, in fp32."""

    gap: float
    margin: float
    noise: float
    margins_by_shape: dict[str, float]

    @property
    def is_near_tie(self) -> bool:
        return self.gap <= self.noise


class Arbiter:
    """Recomputes logits with the bare target. The fp32 copy is made at the first divergence."""

    def __init__(self, target, window: int = 32):
        self.target = target
        self.window = window
        self._exact = target if _dtype(target) == torch.float32 else None

    def judge(self, prefix: Sequence[int], first: int, second: int) -> Arbitration:
        """Arbitrate between two next tokens after the same ``prefix`` of token ids."""
        ids = torch.tensor([list(prefix)], device=next(self.target.parameters()).device)
        exact_WV = one_pass_logits(self.exact, ids, self.window)
        shapes = {"all at once": one_pass_logits(self.target, ids, self.window)}
        for chunk in CHUNKS:
            shapes[f"{chunk} at a time"] = chunked_logits(self.target, ids, self.window, chunk)
        pair_W2 = exact_WV.topk(2, dim=-1).indices
        last_V, last_12 = exact_WV[-1], pair_W2.new_tensor([[first, second]])
        step = torch.finfo(_dtype(self.target)).eps * float(last_V[last_12].abs().max())
        noise = max(_spread(shapes, pair_W2), _spread(shapes, last_12), step)
        return Arbitration(
            gap=float(last_V.max() - torch.minimum(last_V[first], last_V[second])),
            margin=float(last_V[first] - last_V[second]),
            noise=noise,
            margins_by_shape={
                name: float(logits[-1, first] - logits[-1, second])
                for name, logits in shapes.items()
            },
        )

    @property
    def exact(self):
        """The target itself in fp32, else an fp32 copy of it: same weights, exact sums."""
        if self._exact is None:
            self._exact = copy.deepcopy(self.target).float()
        return self._exact


@torch.no_grad()
def one_pass_logits(model, ids: torch.Tensor, window: int) -> torch.Tensor:
    """fp32 logits ``[W, V]`` of the last ``W`` positions of ``ids [1, T]``, in one forward."""
    keep = min(window, ids.shape[1])
    logits = model(input_ids=ids, use_cache=False, **_keep(model, keep)).logits
    return logits[0, -keep:].float()


@torch.no_grad()
def chunked_logits(model, ids: torch.Tensor, window: int, chunk: int) -> torch.Tensor:
    """The same logits from a cache: a prefill, then ``chunk`` tokens per forward."""
    parameters = inspect.signature(model.forward).parameters
    # Transformers 5.24 renamed the argument; the old name warns there.
    name = "cache" if "cache" in parameters else "past_key_values"
    start = ids.shape[1] - min(window, ids.shape[1])
    pieces = ([ids[:, :start]] if start else []) + list(ids[:, start:].split(chunk, dim=1))
    cache, rows = None, []
    for index, piece in enumerate(pieces):
        is_prefill = bool(start) and index == 0
        keep = _keep(model, 1 if is_prefill else piece.shape[1])
        out = model(input_ids=piece, use_cache=True, **{name: cache}, **keep)
        cache = out.cache if "cache" in out else out.past_key_values
        if not is_prefill:
            rows.append(out.logits[0, -piece.shape[1] :].float())
    return torch.cat(rows)


def _keep(model, count: int) -> dict[str, int]:
    # Logits of the whole prompt would dominate time and memory with a large vocabulary.
    has_argument = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": count} if has_argument else {}


def _spread(shapes: dict[str, torch.Tensor], pair_W2: torch.Tensor) -> float:
    count = pair_W2.shape[0]
    margins = torch.stack(
        [logits[-count:].gather(1, pair_W2).diff(dim=1)[:, 0] for logits in shapes.values()]
    )
    return float((margins.amax(0) - margins.amin(0)).max())


def _dtype(model) -> torch.dtype:
    return next(model.parameters()).dtype
