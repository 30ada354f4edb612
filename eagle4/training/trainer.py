"""The training loop: the unrolled drafter's loss, an optimiser step, held-out metrics, checkpoints.

A step is a function of (weights, optimiser state, seed, step, data position): column sampling and
data order use generators seeded by those, so a resumed run continues bit for bit on a CPU. A step's
runs are shared out to processes and micro-batches and weighted by the counts of the whole step, so
neither changes what is computed. What the target lends stays frozen.

With ``max_minutes`` the schedule follows the clock instead of the step count, whichever is further
along; such a run resumes, but not bit for bit.
"""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import parametrize
from tqdm.auto import tqdm

from ..drafter.model import Eagle4Drafter
from ..ops import has_fast_bf16
from .distributed import Workers, full
from .features import FeatureStore
from .heads import Columns, sample_columns
from .jsonl import append_row, drop_cut_line
from .judge import Decode, Judge
from .losses import depth_weights
from .low_rank import add_low_rank, is_update
from .optim import build_optimizer
from .routing import Routing
from .runs import RunSampler, split_held_out, supervised_counts
from .schedule import lr_scale
from .settings import TrainConfig
from .state import TrainState, load_state, save_state
from .step import Scored, count_valid, micro_batches, run_loss

logger = logging.getLogger(__name__)


class Trainer:
    """Trains a bound drafter on a feature store; everything it writes is inside ``folder``.

    ``is_continued``: the weights mean something already, so they are judged before the first step.
    ``decode``: measures the accept length of a drafter in the engine, see `judge.EngineDecode`.
    """

    def __init__(
        self,
        drafter: Eagle4Drafter,
        store: FeatureStore,
        folder: str | os.PathLike,
        config: TrainConfig | None = None,
        is_continued: bool = False,
        decode: Decode | None = None,
    ):
        self.store, self.folder = store, Path(folder)
        self.config = config = config or TrainConfig()
        self.is_continued = is_continued
        self.folder.mkdir(parents=True, exist_ok=True)
        self._device = next(drafter.parameters()).device
        self.workers = Workers(self._device, config.trackers, self.folder)
        if config.lora_rank:
            if not is_continued:
                raise ValueError("lora_rank is for a trained drafter; start from one (init)")
            add_low_rank(drafter, config.lora_rank, config.seed)
        for name, param in drafter.named_parameters():
            is_chosen = is_update(name) or not config.lora_rank
            param.requires_grad_(is_chosen and not _is_frozen(name, config.freeze))
        self.workers.wrap(drafter, config.sharding)
        self.drafter = drafter
        self.params = {n: p for n, p in drafter.named_parameters() if p.requires_grad}
        if not self.params:
            raise ValueError(f"freeze={list(config.freeze)} leaves nothing to train")
        self.optimizer = build_optimizer(self.params, config)
        self.ema = {n: p.detach().clone() for n, p in self.params.items()}
        train, self.held_out = split_held_out(len(store), config.held_out_fraction, config.seed)
        self.sampler = RunSampler(store, train, config.num_anchors, config.batch_size, config.seed)
        count_V = supervised_counts(store, train)
        self.frequent = count_V.sort(descending=True, stable=True).indices[: config.num_frequent]
        self._is_bf16 = config.precision == "bfloat16" or (
            config.precision == "auto" and has_fast_bf16(self._device)
        )
        self.weight_K = depth_weights(config.num_depths, config.depth_decay)
        self.routing = Routing(drafter, config.balance_rate)
        self.judge = Judge(self, decode)
        self.state = TrainState()
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Training time so far, over all resumptions."""
        return self.state.seconds + time.monotonic() - self._started

    @property
    def progress(self) -> float:
        """0 at the start, 1 at the end of the run; the same on every process."""
        done = self.state.step / self.config.steps
        if self.config.max_minutes is not None:
            clock = self.seconds / (60 * self.config.max_minutes)
            done = max(done, self.workers.agree(clock))
        return min(1.0, done)

    def columns(self, batch: list[tuple[int, int]], progress: float) -> Columns | None:
        """Vocabulary of this step's loss, the same for all its parts; None is all of it."""
        config, vocab = self.config, self.drafter.config.vocab_size
        is_small = config.num_frequent + config.num_sampled >= vocab
        is_reduced = self.drafter.config.draft_vocab_size is not None
        if progress >= 1 - config.full_vocab_fraction or is_small or is_reduced:
            return None
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + self.state.step)
        own = [self.store.field(index, "ids").long() for index, _ in batch]
        fixed = torch.cat([self.frequent, *own])
        return sample_columns(fixed, config.num_sampled, vocab, generator)

    def step(self) -> dict[str, Any]:
        """One optimiser step; returns what to log."""
        config, progress = self.config, self.progress
        batch, following = self.sampler.next(self.state.position)
        scale = lr_scale(config, progress)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * scale
        self.optimizer.zero_grad(set_to_none=True)
        scored = self._gradients(batch, progress)
        norm = full(torch.nn.utils.clip_grad_norm_(self.params.values(), config.clip_norm))
        rates = scored.rates()
        if torch.isfinite(scored.total) and torch.isfinite(norm):
            with self.autocast():  # Muon's products
                self.optimizer.step()
            self._average()
            self.state = self.state._replace(overlap=tuple(rates["overlap"]))
        else:
            self._skip(batch)
        self.state = self.state._replace(step=self.state.step + 1, position=following)
        logged = {"loss": float(scored.total), "norm": float(norm), "lr": config.lr * scale}
        return {**logged, **rates, **self.routing.after_step(self.workers)}

    def _gradients(self, batch: list[tuple[int, int]], progress: float) -> Scored:
        """Forward and backward over this process's share; sums over all processes."""
        config, workers = self.config, self.workers
        share = (workers.rank, workers.world, config, self._device, self.state.step)
        parts = micro_batches(self.store, batch, *share)
        count_K = workers.total(count_valid(parts))
        scored = Scored.zeros(config.num_depths, count_K)
        columns = self.columns(batch, progress)
        for i, runs in enumerate(parts):
            compute = partial(
                run_loss,
                runs=runs,
                columns=columns,
                weight_K=self.weight_K,
                count_K=count_K,
                config=config,
                overlap=self.state.overlap,
            )
            with workers.accumulating(i == len(parts) - 1), parametrize.cached():
                with self.autocast():
                    found = workers(compute)
                (found.total * workers.world).backward()
            scored = scored.plus(found, runs)
        return scored.over(workers)

    def autocast(self):
        """bf16 products where the settings ask for them."""
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._is_bf16)

    @torch.no_grad()
    def _average(self) -> None:
        # a short run must not remember its random start
        decay = min(self.config.ema_decay, (1 + self.state.step) / (10 + self.state.step))
        for name, param in self.params.items():
            self.ema[name].lerp_(param, 1 - decay)

    def _skip(self, batch: list[tuple[int, int]]) -> None:
        self.state = self.state._replace(skipped=self.state.skipped + 1)
        logger.warning("non-finite loss or gradient in step %d, skipped", self.state.step)
        if self.state.skipped > self.config.max_skipped:
            raise RuntimeError(
                f"{self.state.skipped} training steps were not finite (last sequences "
                f"{[index for index, _ in batch]}); check the features or lower lr"
            )

    def train(self) -> dict[str, Any]:
        """Run (or resume) to the end; returns the last metrics. Leaves the average in place."""
        self.resume()
        if self.workers.trackers:
            self.workers.accelerator.init_trackers("eagle4")
        bar = tqdm(
            total=self.config.steps,
            initial=self.state.step,
            mininterval=10,
            desc="train",
            disable=not self.workers.is_main,
        )
        if self.is_continued and self.state.step == 0:
            self.judge.evaluate()  # what has to be beaten
        while self.progress < 1:
            logged = self.step()
            bar.update()
            bar.set_postfix(loss=f"{logged['loss']:.3f}", best=f"{self.state.best:.2f}")
            self.log({"step": self.state.step, "seconds": round(self.seconds), **logged})
            if self.state.step % self.config.eval_every == 0:
                self.judge.evaluate()
            if self.state.step % self.config.checkpoint_every == 0:
                self.save()
        bar.close()
        self.save()
        metrics = self.judge.evaluate()
        self.swap_average()
        return metrics

    @torch.no_grad()
    def swap_average(self) -> None:
        """Exchange the weights and their average."""
        if self.config.ema_decay:
            for name, param in self.params.items():
                held = param.detach().clone()
                param.copy_(self.ema[name])
                self.ema[name].copy_(held)

    def log(self, record: dict[str, Any]) -> None:
        """Append to ``log.jsonl`` and tell the trackers."""
        if self.workers.is_main:
            append_row(self.folder / "log.jsonl", record)
            numbers = {k: float(v) for k, v in record.items() if isinstance(v, (int, float))}
            self.workers.log(numbers, self.state.step)

    def save(self) -> None:
        """Write a checkpoint; every process takes part, the main one writes."""
        state = self.state._replace(seconds=self.seconds)
        tensors = (self.params, self.ema, self.routing.tensors())
        save_state(self.folder, state, *tensors, self.optimizer, self.config, self.workers.is_main)

    def resume(self) -> bool:
        """Continue from the folder's checkpoint, if there is one."""
        tensors = (self.params, self.ema, self.routing.tensors())
        found = load_state(self.folder, *tensors, self.optimizer, self.config)
        self._started = time.monotonic()
        if self.workers.is_main:
            drop_cut_line(self.folder / "log.jsonl")
        self.state = found or self.state
        return found is not None


def _is_frozen(name: str, freeze: tuple[str, ...]) -> bool:
    return name.startswith(("embed_tokens", "efficient_lm_head", *freeze))
