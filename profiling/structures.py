"""EAGLE-3 and EAGLE-4 drafters trained on the same data for the same steps, side by side.

EAGLE-3: q/k/v that read 2H, raw recurrence, a reduced vocabulary of the most frequent tokens with
its own trained head. EAGLE-4: eh_proj, normalised feedback, the target's head behind a low-rank
candidate head. Reported: held-out accept length (chain), time of one drafter step and the head's
share of it, parameters.

    python profiling/structures.py                     # a small random target, a minute
    python profiling/structures.py --data runs/mine    # the demo target on stored features
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from eagle4 import Eagle4Config, Eagle4Drafter
from eagle4.training.candidates import fit_candidate_head
from eagle4.training.judge import EngineDecode, held_out_prompts
from eagle4.training.runs import split_held_out, supervised_counts
from eagle4.training.settings import CandidateConfig
from eagle4.training.sweep import median_us
from eagle4.training.trainer import Trainer

try:
    from warm_start import EAGLE3, setting
except ImportError:  # as a module
    from .warm_start import EAGLE3, setting

ROWS, TOP_K = 4, 4


def make_drafters(target, store, reduced: int) -> dict[str, Eagle4Drafter]:
    """Both structures, random, bound to the target."""
    taps = store.manifest["target"]["tap_layers"]
    small = {"candidate_rank": min(128, target.config.hidden_size // 4), "tap_layers": taps}
    torch.manual_seed(0)
    own = {"own_lm_head": True, "draft_vocab_size": reduced, "tap_layers": taps}
    drafters = {
        f"EAGLE-3, {reduced} tokens": Eagle4Config.for_target(target.config, **EAGLE3, **own),
        "EAGLE-4": Eagle4Config.for_target(target.config, **small),
    }
    made = {}
    for name, config in drafters.items():
        lent = target.get_input_embeddings(), target.get_output_embeddings()
        made[name] = Eagle4Drafter(config).bind(*lent)
        if config.draft_vocab_size is not None:
            keep_frequent(made[name], store, target)
    return made


@torch.no_grad()
def keep_frequent(drafter: Eagle4Drafter, store, target) -> None:
    """The reduced vocabulary: the most frequent supervised tokens, head rows from the target."""
    rows = drafter.config.draft_vocab_size
    count_V = supervised_counts(store, split_held_out(len(store), 0.05, 0)[0])
    kept = count_V.sort(descending=True, stable=True).indices[:rows].sort().values
    drafter.d2t.copy_(kept - torch.arange(len(kept)))
    drafter.t2d[kept] = True
    drafter.lm_head.weight.copy_(target.get_output_embeddings().weight[kept])


def measure(drafter: Eagle4Drafter) -> dict[str, float]:
    """Microseconds of a step for four rows, and of its head."""
    state = torch.randn(ROWS, drafter.config.hidden_size, dtype=drafter.dtype)
    token = torch.arange(ROWS)
    out = drafter(state, token, token + 40, lambda q, k, v: q)
    body = median_us(lambda: drafter(state, token, token + 40, lambda q, k, v: q))
    head = median_us(lambda: drafter.propose(out.head_RH, TOP_K))
    return {"body_us": round(body), "head_us": round(head), "head_share": head / (head + body)}


def compare(data: str | None, steps: int, folder: Path) -> dict[str, Any]:
    """Both structures: trained, judged, timed."""
    target, store, config = setting(data, folder, steps)
    reduced = target.config.vocab_size * 2 // 3
    found = {}
    for name, drafter in make_drafters(target, store, reduced).items():
        trainer = Trainer(drafter, store, folder / name, config)
        metrics = trainer.train()
        if drafter.config.candidate_rank:
            recall = fit_candidate_head(trainer, drafter, CandidateConfig(steps=100))
            metrics["recall_first"] = recall["trained"][0]
        prompts = held_out_prompts(store, trainer.held_out, 8)
        decode = EngineDecode(target, prompts, 48, config.eval_depths)
        found[name] = {
            "tau_chain": metrics["tau_chain"],
            "tau_walk": metrics["tau_walk"],
            "tau_measured": decode(drafter).accept_length,
            "recall_first": metrics.get("recall_first"),
            "parameters": sum(p.numel() for p in drafter.parameters()),
            **measure(drafter),
        }
    return {"steps": steps, "structures": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", help="folder of `eagle4 data` for the demo target")
    parser.add_argument("--steps", type=int, default=240)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = compare(args.data, args.steps, Path(folder))
    for name, row in found["structures"].items():
        print(name, {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
