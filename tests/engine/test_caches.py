"""Catches: K/V of rejected nodes that stay, accepted nodes compacted to the wrong slots (E4), draft
K/V computed from guessed features (E5), features attached to the wrong token, lengths that drift
from the committed tokens, slots that are not given back (L1).

After every round both caches are compared, slot by slot, with a fresh prefill of the committed
tokens: the target's with Transformers' own cache, the drafter's with one dense causal pass on true
features.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from scripted import Liar, Mixed, Oracle, ScriptedModel, continuations, small_drafter
from tiny import tiny_llama
from torch.nn import functional as F

from eagle4.cache import PageTable
from eagle4.config import SpeculativeConfig
from eagle4.engine.call import CACHE_KEYWORD
from eagle4.engine.drafting import EagleDraft
from eagle4.harness import FixedPolicy
from tests.engine.compare import VOCAB, eagle, plain, prompt, shared_target

TOLERANCE = dict(rtol=1e-4, atol=2e-5)


@torch.no_grad()
def true_features(target, taps: list[int], ids: torch.Tensor) -> torch.Tensor:
    """Outputs of the tapped blocks for every token, ``[T, taps, H]``, from a plain forward."""
    seen: dict[int, torch.Tensor] = {}

    def keep(tap, output):
        seen[tap] = (output[0] if isinstance(output, tuple) else output)[0]

    hooks = [
        target.model.layers[tap].register_forward_hook(lambda m, a, out, tap=tap: keep(tap, out))
        for tap in taps
    ]
    target(input_ids=ids.unsqueeze(0), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack([seen[tap] for tap in taps], dim=1)


@torch.no_grad()
def draft_prefill(drafter, features: torch.Tensor, ids: torch.Tensor):
    """Draft K/V of positions 0 .. T-2 from one dense causal pass: entry t pairs f_t with x_t+1."""
    kept = []

    def attend(query, key, value):
        kept.extend([key, value])
        groups = query.shape[1] // key.shape[1]
        wide = [t.repeat_interleave(groups, dim=1).transpose(0, 1) for t in (key, value)]
        mask = torch.ones(len(query), len(query), dtype=torch.bool).tril()
        window = drafter.config.sliding_window
        if window is not None:
            mask &= ~mask.tril(-window)
        out = F.scaled_dot_product_attention(query.transpose(0, 1), *wide, attn_mask=mask)
        return out.transpose(0, 1)

    drafter(drafter.fuse(features[:-1]), ids[1:], torch.arange(len(ids) - 1), attend)
    return kept


class Checked:
    """A draft that compares every live row's caches before and after the wrapped draft ran.

    ``catch_up`` runs the engine's own draft too, so that there is draft K/V to compare while a
    script dictates what is accepted.
    """

    def __init__(self, target, drafter, inner, catch_up: bool = True):
        # A copy, because the target itself is busy while the engine runs.
        self.target, self.drafter, self.inner = copy.deepcopy(target), drafter, inner
        self.catch_up = EagleDraft(drafter, FixedPolicy(SpeculativeConfig())) if catch_up else None
        self.rounds = 0

    def __call__(self, state, sequences, plan, depth_limit, stats):
        self.rounds += 1
        for sequence in state.sequences:
            self.check_target(state, sequence)
            self.check_features(state, sequence)
        if self.catch_up is not None:
            tree = self.catch_up(state, sequences, plan, depth_limit, stats)
            for sequence in sequences:
                assert sequence.draft_length == sequence.length - 1 and not sequence.num_pending
                self.check_draft(state, sequence)
            if self.inner is None:
                return tree
        return self.inner(state, sequences, plan, depth_limit, stats)

    def check_target(self, state, sequence) -> None:
        ids = state.tokens(sequence)
        assert sequence.kv_length == len(ids) - 1 == sequence.length - 1
        if sequence.kv_length == 0:
            return
        with torch.no_grad():
            out = self.target(input_ids=ids[None, :-1], use_cache=True)
        slots = torch.tensor(state.table.slots(sequence.index, 0, sequence.kv_length))
        for layer, wanted in enumerate(out.past_key_values.layers):
            key, value = (pool[slots].transpose(0, 1) for pool in state.target_pool.layers[layer])
            torch.testing.assert_close(key, wanted.keys[0], **TOLERANCE)
            torch.testing.assert_close(value, wanted.values[0], **TOLERANCE)

    def check_features(self, state, sequence) -> None:
        """Everything that the drafter has not seen yet is pending, in order."""
        assert sequence.draft_length + sequence.num_pending == sequence.kv_length
        if sequence.num_pending:
            ids = state.tokens(sequence)
            wanted = true_features(self.target, self.drafter.config.tap_layers, ids)
            mine = torch.cat(sequence.pending)
            torch.testing.assert_close(mine, wanted[sequence.draft_length : -1], **TOLERANCE)

    def check_draft(self, state, sequence) -> None:
        ids = state.tokens(sequence)
        features = true_features(self.target, self.drafter.config.tap_layers, ids)
        slots = torch.tensor(state.table.slots(sequence.index, 0, sequence.draft_length))
        for pool, wanted in zip(
            state.draft_pool.layers[0], draft_prefill(self.drafter, features, ids), strict=True
        ):
            torch.testing.assert_close(pool[slots], wanted, **TOLERANCE)


def checked_model(target, drafter, inner, catch_up: bool = True) -> ScriptedModel:
    model = ScriptedModel(target, None, drafter)  # binds the drafter
    model.draft = Checked(target, drafter, inner, catch_up)
    return model


def script(kind: str, known: list[list[int]]):
    if kind == "none":
        return None
    made = {"oracle": Oracle, "liar": Liar}
    if kind in made:
        return made[kind](known, VOCAB)
    return Mixed(known, VOCAB, right=[2, 0, 3][: len(known)])


@pytest.mark.parametrize("kind", ["none", "oracle", "liar", "mixed"])
@pytest.mark.parametrize(
    "lengths",
    [[1], [17], [6, 1, 3]],
)
def test_both_caches_equal_a_fresh_prefill_after_every_round(lengths, kind):
    target = shared_target(layers=3)
    inputs = prompt(lengths, extra=2)
    known = continuations(target, inputs, max_new_tokens=30)
    model = checked_model(target, small_drafter(target), script(kind, known))
    config = {"max_depth": 4, "top_k": 3, "max_nodes": 10}
    out = eagle(model, inputs, max_new_tokens=11, speculative=config)
    assert not model.last_speculation.fallbacks, model.last_speculation.fallbacks
    assert model.draft.rounds >= 2
    assert out.tolist() == plain(model, inputs, max_new_tokens=11).tolist()


@pytest.mark.parametrize("kind", ["none", "mixed"])
@pytest.mark.parametrize(
    "overrides",
    [{"eh_proj": False}, {"sliding_window": 5}, {"use_rope": False, "fc_norm": False}],
    ids=str,
)
def test_draft_caches_of_other_structures(overrides, kind):
    target = shared_target()
    inputs = prompt([9, 4])
    known = continuations(target, inputs, max_new_tokens=30)
    model = checked_model(target, small_drafter(target, **overrides), script(kind, known))
    eagle(model, inputs, max_new_tokens=12)
    assert not model.last_speculation.fallbacks, model.last_speculation.fallbacks


def test_with_small_pages_chunks_and_rows_that_finish(monkeypatch):
    monkeypatch.setattr("eagle4.engine.state.PageTable", functools.partial(PageTable, page_size=4))
    monkeypatch.setattr("eagle4.engine.loop._reserve", lambda call, sequence: None)
    monkeypatch.setattr("eagle4.engine.reference.PREFILL_CHUNK", 5)
    monkeypatch.setattr("eagle4.engine.drafting.CHUNK", 4)
    target = shared_target(layers=3)
    inputs = prompt([13, 2, 6])
    known = continuations(target, inputs, max_new_tokens=30)
    model = checked_model(target, small_drafter(target), script("mixed", known))
    eos = [known[0][13 + 4], known[1][2 + 9]]
    eagle(model, inputs, max_new_tokens=20, eos_token_id=eos, pad_token_id=0)
    assert not model.last_speculation.fallbacks, model.last_speculation.fallbacks


def test_features_wait_while_nobody_drafts_on_them():
    """A script that never catches up: all true features stay pending, in order."""
    target = shared_target(layers=3)
    inputs = prompt([6, 3])
    known = continuations(target, inputs, max_new_tokens=30)
    model = checked_model(target, small_drafter(target), script("mixed", known), catch_up=False)
    eagle(model, inputs, max_new_tokens=12)
    assert not model.last_speculation.fallbacks, model.last_speculation.fallbacks


def test_turns_that_continue_edit_and_switch_modes():
    """Reused prefixes are checked like fresh ones: after a second turn, an edit, a plain turn."""
    target = shared_target(layers=3)
    drafter = small_drafter(target)
    model = checked_model(target, drafter, None)
    inputs = prompt([9, 4])
    ids, mask, cache = inputs["input_ids"], inputs["attention_mask"], None
    for turn, speculative in enumerate(["eagle4", "eagle4", None, "eagle4", "eagle4"]):
        if turn == 3:
            ids = ids.clone()
            ids[0, 7] = ids[0, 7] % (VOCAB - 1) + 1
        out = eagle(
            model,
            {"input_ids": ids, "attention_mask": mask},
            max_new_tokens=5,
            speculative=speculative,
            return_dict_in_generate=True,
            **{CACHE_KEYWORD: cache},
        )
        assert not model.last_speculation.fallbacks, model.last_speculation.fallbacks
        ids, cache = torch.cat([out.sequences, out.sequences[:, -2:]], dim=1), out[CACHE_KEYWORD]
        mask = torch.cat([mask, mask.new_ones(2, ids.shape[1] - mask.shape[1])], dim=1)
    assert model.draft.rounds > 8


def test_a_cache_that_is_used_again_and_again_does_not_grow():
    target = shared_target()
    model = ScriptedModel(target, None)
    model.draft = EagleDraft(model.drafter, FixedPolicy(SpeculativeConfig()))
    inputs, cache, pages = prompt([9, 4]), None, []
    for turn in range(8):
        out = eagle(
            model,
            inputs,
            max_new_tokens=6,
            speculative="eagle4" if turn % 3 else None,
            return_dict_in_generate=True,
            **{CACHE_KEYWORD: cache},
        )
        cache = out[CACHE_KEYWORD]
        pages.append((cache.state.table.num_pages, cache.num_bytes if turn > 1 else 0))
    assert len(set(pages[2:])) == 1, pages


@pytest.mark.parametrize("kind", ["none", "oracle", "liar"])
def test_a_windowed_target_after_the_window_has_slid(kind):
    """Nodes are rolled back behind a window of 8 that has left the prompt (E1, E2)."""
    from transformers import MistralConfig, MistralForCausalLM

    base = tiny_llama(vocab=VOCAB, layers=2).config.to_dict()
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    keys += ("num_attention_heads", "num_key_value_heads", "initializer_range")
    torch.manual_seed(0)
    config = MistralConfig(
        **{key: base[key] for key in keys},
        sliding_window=8,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    target = MistralForCausalLM(config).eval()
    for lengths in ([20, 8], [6]):
        inputs = prompt(lengths)
        known = continuations(target, inputs, max_new_tokens=40)
        draft = script(kind, known)
        model = ScriptedModel(target, draft)
        if draft is None:
            model.draft = EagleDraft(model.drafter, FixedPolicy(SpeculativeConfig()))
        out = eagle(model, inputs, max_new_tokens=14)
        assert out.tolist() == plain(model, inputs, max_new_tokens=14).tolist()
        assert not model.last_speculation.fallbacks


def test_the_returned_cache_holds_the_committed_tokens_and_no_more_pages_than_it_needs():
    target = shared_target()
    inputs = prompt([70, 3])
    model = ScriptedModel(target, Oracle(continuations(target, inputs, max_new_tokens=40), VOCAB))
    out = eagle(model, inputs, max_new_tokens=10, return_dict_in_generate=True)
    state = out.past_key_values.state
    for sequence in state.sequences:
        assert sequence.kv_length == sequence.length - 1
        assert state.table.capacity(sequence.index) >= sequence.length
        assert state.table.capacity(sequence.index) <= 70 + 10 + 64 + 64
    assert out.past_key_values.get_seq_length() == 70 + 10 - 1
