"""The training loop: AdamW on the unrolled drafter, held-out metrics, atomic checkpoints.

A step is a function of (weights, optimiser state, seed, step, data position): column sampling and
data order use generators seeded by those, so a resumed run continues bit for bit. The embedding and
the LM head belong to the target and stay frozen.

With ``max_minutes`` the schedule follows the clock instead of the step count, whichever is further
along; such a run resumes, but not bit for bit.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ..drafter.model import Eagle4Drafter
from ..ops import has_fast_bf16
from .features import FeatureStore
from .losses import Columns, depth_weights, row_weights, sample_columns, soft_cross_entropy
from .metrics import evaluate
from .optim import build_optimizer
from .runs import RunSampler, assemble, held_out_runs, split_held_out
from .settings import TrainConfig
from .state import TrainState, load_state, save_state
from .ttt import Runs, unroll

logger = logging.getLogger(__name__)


class Trainer:
    """Trains a bound drafter on a feature store; everything it writes is inside ``folder``."""

    def __init__(
        self,
        drafter: Eagle4Drafter,
        store: FeatureStore,
        folder: str | os.PathLike,
        config: TrainConfig | None = None,
        is_continued: bool = False,
    ):
        if drafter.config.own_lm_head:
            raise ValueError(
                "training scores teacher and student with the target's LM head; a drafter with "
                "own_lm_head=True (such as a reduced-vocabulary EAGLE-3 one) cannot be trained"
            )
        self.drafter, self.store, self.folder = drafter, store, Path(folder)
        self.config = config or TrainConfig()
        self.is_continued = is_continued
        self.folder.mkdir(parents=True, exist_ok=True)
        self.params = {n: p for n, p in drafter.named_parameters() if not _is_frozen(n)}
        for name, param in drafter.named_parameters():
            param.requires_grad_(name in self.params)
        self.optimizer = build_optimizer(self.params, self.config)
        self.ema = {n: p.detach().clone() for n, p in self.params.items()}
        train, held_out = split_held_out(
            len(store), self.config.held_out_fraction, self.config.seed
        )
        self.sampler = RunSampler(
            store, train, self.config.num_anchors, self.config.batch_size, self.config.seed
        )
        self.held_out = held_out
        self.frequent = frequent_tokens(store, train, self.config.num_frequent)
        self._device = next(iter(self.params.values())).device
        self._is_bf16 = self.config.precision == "bfloat16" or (
            self.config.precision == "auto" and has_fast_bf16(self._device)
        )
        self.weight_K = depth_weights(self.config.num_depths, self.config.depth_decay)
        self.state = TrainState()
        self._started = time.monotonic()

    # -- schedule --------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Training time so far, over all resumptions."""
        return self.state.seconds + time.monotonic() - self._started

    @property
    def progress(self) -> float:
        """0 at the start, 1 at the end of the run."""
        done = self.state.step / self.config.steps
        if self.config.max_minutes is not None:
            done = max(done, self.seconds / (60 * self.config.max_minutes))
        return min(1.0, done)

    def lr_scale(self, progress: float) -> float:
        """Linear warm-up, then a cosine to ``final_lr_fraction``."""
        warm, low = self.config.warmup_fraction, self.config.final_lr_fraction
        if progress < warm:
            return max(progress, 0.5 / self.config.steps) / warm
        phase = (progress - warm) / max(1e-9, 1 - warm)
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * phase))

    # -- one step --------------------------------------------------------------------------------

    def columns(self, runs: Runs, progress: float) -> Columns | None:
        """Vocabulary of this step's loss; None is all of it."""
        config, vocab = self.config, self.drafter.config.vocab_size
        if progress >= 1 - config.full_vocab_fraction:
            return None
        if config.num_frequent + config.num_sampled >= vocab:
            return None
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + self.state.step)
        fixed = torch.cat([self.frequent, runs.token_BKM.flatten(), runs.token_N])
        return sample_columns(fixed, config.num_sampled, vocab, generator)

    def loss(self, runs: Runs, columns: Columns | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Scalar loss and mean loss of every depth."""
        head_BKMH = unroll(self.drafter, runs)
        weight_BKM = row_weights(runs.valid_BKM, self.weight_K)
        total, loss_BKM = soft_cross_entropy(
            head_BKMH, runs.teacher_BJH, self.drafter.head, weight_BKM, columns
        )
        count_K = runs.valid_BKM.sum((0, 2)).clamp_min(1)
        return total, (loss_BKM * runs.valid_BKM).sum((0, 2)) / count_K

    def step(self) -> dict[str, Any]:
        """One optimiser step; returns what to log."""
        config, progress = self.config, self.progress
        batch, following = self.sampler.next(self.state.position)
        runs = assemble(self.store, batch, config.num_anchors, config.num_depths)
        scale = self.lr_scale(progress)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * scale
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            total, loss_K = self.loss(runs, self.columns(runs, progress))
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.params.values(), config.clip_norm)
        if torch.isfinite(total) and torch.isfinite(norm):
            with self._autocast():  # Muon's products
                self.optimizer.step()
            self._average()
        else:
            self._skip(batch)
        self.state = self.state._replace(step=self.state.step + 1, position=following)
        return {"loss": float(total.detach()), "norm": float(norm), "depth_loss": loss_K.tolist()}

    def _autocast(self):
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._is_bf16)

    @torch.no_grad()
    def _average(self) -> None:
        # a short run must not remember its random start
        decay = min(self.config.ema_decay, (1 + self.state.step) / (10 + self.state.step))
        for name, param in self.params.items():
            self.ema[name].lerp_(param, 1 - decay)

    def _skip(self, batch) -> None:
        self.state = self.state._replace(skipped=self.state.skipped + 1)
        logger.warning("non-finite loss or gradient in step %d, skipped", self.state.step)
        if self.state.skipped > self.config.max_skipped:
            raise RuntimeError(
                f"{self.state.skipped} training steps were not finite (last sequences "
                f"{[index for index, _ in batch]}); check the features or lower lr"
            )

    # -- the loop --------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Run (or resume) to the end; returns the last metrics. Leaves the average in place."""
        self.resume()
        bar = tqdm(total=self.config.steps, initial=self.state.step, mininterval=10, desc="train")
        held_out = self._held_out_batches()
        if self.is_continued and held_out and self.state.step == 0:
            self.evaluate(held_out)  # what has to be beaten
        while self.progress < 1:
            logged = self.step()
            bar.update()
            bar.set_postfix(loss=f"{logged['loss']:.3f}", tau=f"{self.state.best_tau:.2f}")
            self._log({"step": self.state.step, "seconds": round(self.seconds), **logged})
            if held_out and self.state.step % self.config.eval_every == 0:
                self.evaluate(held_out)
            if self.state.step % self.config.checkpoint_every == 0:
                self.save()
        bar.close()
        self.save()
        metrics = self.evaluate(held_out) if held_out else {}
        self._swap_average()
        return metrics

    def _held_out_batches(self) -> list[Runs]:
        config = self.config
        runs = held_out_runs(self.store, self.held_out, config.num_anchors)
        # spread over the store: answers that finished early come first and are short
        runs = runs[:: max(1, len(runs) // config.eval_runs)][: config.eval_runs]
        return [
            assemble(self.store, runs[i : i + 8], config.num_anchors, config.eval_depths)
            for i in range(0, len(runs), 8)
        ]

    def evaluate(self, batches: list[Runs]) -> dict[str, Any]:
        """Held-out metrics of the averaged weights; saves the best by chain accept length."""
        self._swap_average()
        with self._autocast():
            metrics = evaluate(self.drafter, batches)
        if metrics["tau_chain"] > self.state.best_tau:
            self.state = self.state._replace(best_tau=metrics["tau_chain"])
            self.drafter.save_pretrained(self.folder / "best")
        self._swap_average()
        self._log({"step": self.state.step, "seconds": round(self.seconds), "held_out": metrics})
        return metrics

    @torch.no_grad()
    def _swap_average(self) -> None:
        if self.config.ema_decay:
            for name, param in self.params.items():
                param.data, self.ema[name] = self.ema[name], param.data

    def _log(self, record: dict[str, Any]) -> None:
        with open(self.folder / "log.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")

    # -- files -----------------------------------------------------------------------------------

    def save(self) -> None:
        state = self.state._replace(seconds=self.seconds)
        save_state(self.folder, state, self.params, self.ema, self.optimizer, self.config)

    def resume(self) -> bool:
        """Continue from the folder's checkpoint, if there is one."""
        found = load_state(self.folder, self.params, self.ema, self.optimizer, self.config)
        self._started = time.monotonic()
        if found is None:
            return False
        self.state = found
        return True


def frequent_tokens(store: FeatureStore, sequences: list[int], count: int) -> torch.Tensor:
    """The most frequent supervised tokens of some sequences, most frequent first."""
    total = torch.zeros(store.manifest["target"]["vocab_size"], dtype=torch.int64)
    for index in sequences:
        ids, mask = store.field(index, "ids").long(), store.field(index, "mask")
        total += torch.bincount(ids[mask], minlength=len(total))
    return total.sort(descending=True, stable=True).indices[:count]


def _is_frozen(name: str) -> bool:
    return name.startswith(("embed_tokens", "lm_head", "efficient_lm_head"))
