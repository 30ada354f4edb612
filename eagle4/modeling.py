"""`Eagle4ForCausalLM`: a target and its drafter behind Transformers' own `generate`.

`GenerationMixin.generate` prepares everything (config, processors, criteria, expansion, streaming
of the prompt) and calls `_sample`; that is where the engine takes over. What the engine cannot
honour is refused before the first forward when speculation was asked for, and served by
Transformers otherwise.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from .config import SpeculativeConfig
from .drafter import Eagle4Drafter
from .engine import Eagle4Cache, SpeculationStats, requests, together
from .engine.answer import answer, policy_and_draft
from .engine.call import CACHE_KEYWORD, Eagle4Output
from .engine.graphs import CompileMode, Graphs, is_compiled
from .engine.home import HarnessHome
from .engine.launch import LaunchMode, OwnGraphs, check_modes
from .engine.loading import bind_pair, build_pair, load_drafter, load_target
from .harness import HarnessPolicy
from .ops import PackedLinears
from .pair import Eagle4PairConfig, check_complete, is_pair, speculative_defaults
from .parallel import Ranks
from .parallel.launch import start
from .shell import TargetShell
from .target import TargetAdapter

_ENGINE_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class Eagle4ForCausalLM(TargetShell):
    """A causal LM with an attached EAGLE-4 drafter.

    ``Eagle4ForCausalLM(target, drafter, tokenizer=None)`` takes loaded parts; `from_pretrained`
    takes parts, ids or folders. The drafter moves to the target's device and dtype; None: every
    call decodes plainly. ``compile`` is "auto" (on accelerators), "on" or "off", also as the
    attribute ``compile_mode``; ``generate(disable_compile=True)`` turns it off for one call.
    ``launch`` is "auto" (now: "direct"), "direct" or "graphs" (on CUDA), also as ``launch_mode``.
    Raises `ValueError` when the target cannot verify packed rows or the pair does not fit together.
    """

    config_class = Eagle4PairConfig
    _speculation = staticmethod(policy_and_draft)  # where scripted drafts come in

    def __init__(
        self,
        target: PreTrainedModel | Eagle4PairConfig,
        drafter: Eagle4Drafter | None = None,
        tokenizer: Any = None,
        compile: CompileMode = "auto",
        launch: LaunchMode = "auto",
    ):
        check_modes(compile, launch)
        if isinstance(target, Eagle4PairConfig):  # Transformers builds from a config
            config = target
            target, drafter = build_pair(config)
        else:
            config = Eagle4PairConfig.of(target, drafter)
        super().__init__(config)
        self.target, self.drafter = target, drafter
        self.last_speculation: SpeculationStats | None = None
        self.last_harness: HarnessPolicy | None = None
        self.ranks: Ranks | None = None
        self.compile_mode, self.launch_mode = compile, launch
        self._home = HarnessHome()
        self.post_init()
        self.generation_config = speculative_defaults(target.generation_config)
        self._attach(tokenizer)

    def _attach(self, tokenizer: Any) -> None:
        bind_pair(self.target, self.drafter, tokenizer)
        self._packed = None if self.drafter is None else PackedLinears(self.drafter)
        self._adapter, self._graphs = None, OwnGraphs()

    @property
    def adapter(self) -> TargetAdapter:
        """The packed view of the target; built at first use, once the weights are in place."""
        if self._adapter is None:
            taps = None if self.drafter is None else self.drafter.config.tap_layers
            self._adapter = TargetAdapter(self.target, taps)
        return self._adapter

    def shard(self, ranks: Ranks) -> Eagle4ForCausalLM:
        """Keep this rank's share of both models, in place, on its device.

        From then on every rank calls `generate` with the same arguments and gets the same result;
        only rank 0 feeds a streamer. Raises `ValueError` for sizes that do not divide and for a
        model that is split already.
        """
        together.split(self.adapter, self.drafter, ranks)
        self._packed = None if self.drafter is None else PackedLinears(self.drafter)
        self.to(ranks.device)  # type: ignore
        self.ranks, self._home, self._graphs = ranks, HarnessHome(ranks), OwnGraphs()
        return self

    # -- loading and saving ----------------------------------------------------------------------

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        target: str | os.PathLike | PreTrainedModel,
        drafter: str | os.PathLike | Eagle4Drafter | None = None,
        *args,
        tokenizer: Any = None,
        dtype: Any = None,
        device: Any = None,
        tp_size: int | None = None,
        compile: CompileMode = "auto",
        launch: LaunchMode = "auto",
        **kwargs,
    ) -> Eagle4ForCausalLM:
        """Target and drafter from loaded parts, hub ids or folders.

        A single folder written by `save_pretrained` holds both. ``dtype`` and ``device`` apply to
        both parts; other keyword arguments go to the target's own `from_pretrained`. ``tp_size``:
        split both over so many processes (`torchrun --nproc-per-node N ...`); the device is then
        ``"cpu"`` or ``"cuda"``. Sizes that do not divide are refused before anything is loaded, and
        of a target that is not loaded yet every process reads its share only.
        """
        check_modes(compile, launch)
        kwargs["dtype"] = "auto" if dtype is None else dtype
        ranks = None
        if tp_size not in (None, 1):
            ranks, device = start(target, tp_size, device, kwargs), None
        if is_pair(target, drafter, kwargs):
            model = cls._load_pair(target, *args, tokenizer=tokenizer, **kwargs)
            model.compile_mode, model.launch_mode = compile, launch
        else:
            loaded = load_target(target, *args, ranks=ranks, **kwargs)
            model = cls(loaded, load_drafter(drafter, loaded), tokenizer, compile, launch)
        if device is not None:
            model.to(device)
        return model if ranks is None else model.shard(ranks)

    @classmethod
    def _load_pair(cls, source: Any, *args, tokenizer: Any, **kwargs):
        kwargs["output_loading_info"] = True
        model, info = super().from_pretrained(source, *args, **kwargs)  # type: ignore
        check_complete(source, info)
        # What was loaded for the whole holds for the target alone, too.
        model.target.generation_config = copy.deepcopy(model.generation_config)
        model.generation_config = speculative_defaults(model.generation_config)
        model._attach(tokenizer)
        return model

    def save_pretrained(self, *args, **kwargs):
        """Transformers' own; a `SpeculativeConfig` among the defaults is written as its fields.

        Raises `ValueError` for a model of which this process holds only a share.
        """
        if self.ranks is not None:
            raise ValueError("this process holds one share of the model; save it before splitting")
        value = getattr(self.generation_config, "speculative", None)
        if isinstance(value, SpeculativeConfig):
            self.generation_config.speculative = requests.serialise(value)  # type: ignore
        return super().save_pretrained(*args, **kwargs)

    # -- generation ------------------------------------------------------------------------------

    def generate(self, inputs=None, generation_config=None, *args, **kwargs):  # type: ignore[override]
        """Transformers' `generate` with two more arguments, ``speculative`` and ``seed``.

        ``speculative``: ``"eagle4"``, None (plain decoding in the same engine), a
        `SpeculativeConfig` or a dict of its fields; without the argument,
        ``generation_config.speculative`` decides. ``seed`` (for ``do_sample=True``): an integer,
        or a list with one for every returned sequence; without it one is drawn from torch's
        default generator, so that `torch.manual_seed` governs. Raises `ValueError`, naming the
        argument, for what cannot be honoured. Statistics are in ``out.speculation`` (with
        ``return_dict_in_generate=True``) and in ``model.last_speculation``.
        """
        speculative = requests.resolve(self, generation_config, kwargs)
        seed = requests.resolve_seed(generation_config, kwargs)
        requests.check_arguments(self, speculative, inputs, generation_config, kwargs)
        if "past_key_values" in kwargs:
            kwargs[CACHE_KEYWORD] = kwargs.pop("past_key_values")
        self.last_speculation = None
        if self.ranks is not None and not self.ranks.is_first and kwargs.get("streamer"):
            kwargs["streamer"] = together.Silent()
        settings = {"speculative": requests.serialise(speculative), "seed": seed}
        generation_config = requests.carry(self, generation_config, kwargs, settings)
        return super().generate(inputs, generation_config, *args, **kwargs)  # type: ignore

    def _validate_generation_mode(self, mode, generation_config, mode_kwargs) -> None:
        super()._validate_generation_mode(mode, generation_config, mode_kwargs)  # type: ignore
        if generation_config.speculative and mode not in _ENGINE_MODES:
            raise ValueError(f"{mode.value} cannot be combined with speculative=")
        if generation_config.seed is not None and mode not in _ENGINE_MODES:
            raise ValueError(f"seed cannot be combined with {mode.value}; use torch.manual_seed")

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, mode, *args):
        """The engine owns its cache; Transformers makes one only for its own decoding."""
        is_ours = mode in _ENGINE_MODES
        if not (is_ours and requests.uses_engine(generation_config, model_kwargs)):
            requests.check_foreign(model_kwargs)
            super()._prepare_cache_for_generation(  # type: ignore
                generation_config, model_kwargs, mode, *args
            )

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor,
        stopping_criteria,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer=None,
        tokenizer=None,
        **model_kwargs,
    ):
        prepared = (input_ids, logits_processor, stopping_criteria, generation_config)
        if synced_gpus or not requests.uses_engine(
            generation_config, model_kwargs, logits_processor
        ):
            requests.check_drawing(generation_config, is_split=self.ranks is not None)
            return super()._sample(  # type: ignore
                *prepared, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs
            )
        config = SpeculativeConfig.parse(generation_config.speculative or None)  # type: ignore
        try:
            request = requests.build(self.target, *prepared, streamer, model_kwargs)
            request = together.agree(request, config, generation_config, self.adapter.vocab)
            pair = self.adapter, self.drafter, self._packed, self._home
            graphs = self.graphs(generation_config.disable_compile)
            result, harness = answer(request, config, *pair, graphs, self._speculation)
        finally:
            # Also after an error, so that nobody waits for the rest of a stream.
            if streamer is not None:
                streamer.end()
        self.last_speculation, self.last_harness = result.stats, harness or self.last_harness
        if generation_config.return_dict_in_generate:
            return result.as_output(with_cache=bool(generation_config.use_cache))
        return result.sequences

    def graphs(self, disable_compile: bool = False) -> Graphs:
        """The functions that a call's rounds run. Raises `ValueError` for graphs off CUDA."""
        compiled = not disable_compile and is_compiled(self.compile_mode, self.device)
        return self._graphs.graphs(compiled, self.launch_mode, self.device, self.ranks is None)


AutoModelForCausalLM.register(Eagle4PairConfig, Eagle4ForCausalLM, exist_ok=True)

__all__ = ["Eagle4Cache", "Eagle4ForCausalLM", "Eagle4Output"]
