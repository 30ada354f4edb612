"""How good is the drafter now: simulated on held-out text, and measured in the engine.

Loss and accuracy keep improving where acceptance no longer does (trap J2), and a mismatch between
training and serving shows in neither (J1). So the engine decodes fixed held-out prompts with the
averaged weights, and the checkpoint that is kept is the last one whose measured accept length lies
within one standard error of the longest: a few prompts cannot rank closer ones, training can. What
a continued run began with is only given up for something longer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from statistics import stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ..drafter.model import Eagle4Drafter
from ..modeling import Eagle4ForCausalLM
from .distributed import full
from .features import FeatureStore
from .low_rank import has_updates, merged_state
from .metrics import evaluate
from .runs import assemble, held_out_runs
from .ttt import Runs

if TYPE_CHECKING:
    from .trainer import Trainer


class Measured(NamedTuple):
    """Mean accept length of decoded rounds, and the standard error of that mean."""

    accept_length: float
    error: float = 0.0


Decode = Callable[[Eagle4Drafter], Measured]
"""A drafter to its measured accept length."""


class EngineDecode:
    """Accept length of greedy decoding in the engine, a chain of ``depth`` nodes per round.

    Chains, and the full head, because that is what the simulated accept length describes. The
    drafter that is handed in is left as it is.
    """

    def __init__(
        self, target: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, depth: int
    ):
        if not prompts:
            raise ValueError("decoding needs at least one prompt")
        self.target, self.max_new_tokens, self.depth = target, max_new_tokens, depth
        width = max(map(len, prompts))
        self._ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
        self._mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])

    def __call__(self, drafter: Eagle4Drafter) -> Measured:
        config = copy.deepcopy(drafter.config)
        config.candidate_rank = 0
        served = Eagle4Drafter(config)
        state = drafter.state_dict()
        served.load_state_dict({name: state[name].clone() for name in served.state_dict()})
        pair = Eagle4ForCausalLM(self.target, served)
        shape = {"mode": "chain", "max_depth": self.depth, "harness": False}
        device = self.target.device
        with torch.autocast(device.type, enabled=False):
            pair.generate(
                self._ids.to(device),
                attention_mask=self._mask.to(device),
                speculative={**shape, "max_nodes": self.depth},
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        done = pair.last_speculation
        assert done is not None
        accepted = [n for round_B in done.accepted_per_round for n in round_B]
        error = stdev(accepted) / len(accepted) ** 0.5 if len(accepted) > 1 else 0.0
        return Measured(done.accept_length, error)


def held_out_prompts(store: FeatureStore, sequences: Sequence[int], count: int) -> list[list[int]]:
    """Tokens before the first supervised one, of held-out sequences spread over the store."""
    step = max(1, len(sequences) // max(1, count))
    prompts = []
    for index in list(sequences)[::step][:count]:
        first = int(store.field(index, "mask").nonzero()[0, 0])
        prompts.append(store.field(index, "ids")[: max(1, first)].tolist())
    return prompts


class Judge:
    """Evaluates a trainer's averaged weights and keeps the last of the best."""

    def __init__(self, trainer: Trainer, decode: Decode | None):
        self.trainer, self.decode = trainer, decode
        self._batches: list[Runs] | None = None

    @property
    def batches(self) -> list[Runs]:
        """Held-out runs, the same ones at every evaluation."""
        if self._batches is None:
            config, store = self.trainer.config, self.trainer.store
            runs = held_out_runs(store, self.trainer.held_out, config.num_anchors)
            # spread over the store: answers that finished early come first and are short
            runs = runs[:: max(1, len(runs) // config.eval_runs)][: config.eval_runs]
            parts = (
                assemble(store, runs[i : i + 8], config.num_anchors, config.eval_depths)
                for i in range(0, len(runs), 8)
            )
            device = next(iter(self.trainer.params.values())).device
            self._batches = [Runs(*(tensor.to(device) for tensor in part)) for part in parts]
        return self._batches

    def evaluate(self) -> dict[str, Any]:
        """Held-out metrics of the averaged weights; may save them. Empty without held-out data."""
        trainer, workers = self.trainer, self.trainer.workers
        if not self.batches:
            return {}
        trainer.swap_average()
        with torch.no_grad(), trainer.autocast():
            metrics = workers(partial(evaluate, batches=self.batches))
        drafter = whole_drafter(trainer.drafter)
        found = Measured(metrics["tau_chain"])
        if self.decode is not None:
            found = self.decode(drafter) if workers.is_main else Measured(0.0)
            found = Measured(*map(workers.agree, found))
            metrics |= {"tau_measured": found.accept_length, "tau_error": found.error}
        longest = max(trainer.state.best, found.accept_length)
        is_start = trainer.is_continued and trainer.state.kept == 0
        if found.accept_length + (0.0 if is_start else found.error) >= longest:
            trainer.state = trainer.state._replace(kept=trainer.state.step)
            if workers.is_main:
                drafter.save_pretrained(trainer.folder / "best")
        trainer.state = trainer.state._replace(best=longest)
        trainer.swap_average()
        record = {"step": trainer.state.step, "seconds": round(trainer.seconds)}
        trainer.log({**record, "held_out": metrics})
        return metrics


def whole_drafter(drafter: Eagle4Drafter) -> Eagle4Drafter:
    """The drafter itself, or a copy with whole, merged tensors of one that FSDP2 has divided or
    that has low-rank updates."""
    is_divided = any(isinstance(param, DTensor) for param in drafter.parameters())
    if not (is_divided or has_updates(drafter)):
        return drafter
    state = {name: full(value) for name, value in merged_state(drafter).items()}
    copied = Eagle4Drafter(drafter.config)
    copied.load_state_dict(state)
    copied.to(next(iter(state.values())).device)  # pyright: ignore
    return copied.bind(drafter.embedding, drafter.target_head)
