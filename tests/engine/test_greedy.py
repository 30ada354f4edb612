"""Catches: any token that differs from plain Transformers in greedy fp32 (A1, A2, A3), whatever
the tree, the drafter, the batch, the padding (C1, C2), the remaining budget (B3, B5), the page
layout and the chunks of the prompt (O4); a row that depends on its neighbours or still costs when
it is finished; an accepted path that gets shorter when the tree grows (E4).
"""

from __future__ import annotations

import functools
import random

import pytest
import torch
from scripted import Oracle, ScriptedModel, continuations, small_drafter
from tiny import tiny_llama
from transformers import GPT2Config, GPT2LMHeadModel

from eagle4 import Eagle4ForCausalLM, SpeculativeConfig
from eagle4.cache import PageTable
from tests.engine.compare import (
    DRAFTERS,
    VOCAB,
    assert_identical,
    count_target_rows,
    eagle,
    model_with,
    plain,
    prompt,
    shared_target,
)

PROMPTS = [[1], [2], [17], [1, 17, 2], [5, 3, 9], [2, 2, 2]]


def random_config(source: random.Random) -> SpeculativeConfig:
    return SpeculativeConfig(
        mode=source.choice(["auto", "tree", "chain"]),
        max_depth=source.randint(1, 6),
        top_k=source.randint(1, 4),
        max_nodes=source.randint(1, 16),
    )


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("seed", range(12))
def test_random_trees(seed, drafter):
    source = random.Random(seed)
    inputs = prompt(PROMPTS[seed % len(PROMPTS)], extra=source.randint(0, 5), seed=seed)
    target = shared_target(seed=seed % 2)
    new = source.randint(9, 18)
    model = model_with(drafter, target, inputs, new)
    stats = assert_identical(model, inputs, max_new_tokens=new, speculative=random_config(source))
    accepted = sum(map(sum, stats.accepted_per_round))
    if drafter == "oracle":
        assert accepted > 0
    elif drafter == "liar":
        assert accepted == 0


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 6])
def test_budgets_around_the_depth(new, drafter):
    """Depth 4: the budget ends before, at, and just behind a full block; the plan shrinks to it."""
    inputs = prompt([6, 2])
    model = model_with(drafter, shared_target(), inputs)
    config = {"max_depth": 4, "top_k": 2, "max_nodes": 8}
    stats = assert_identical(model, inputs, max_new_tokens=new, speculative=config)
    assert stats.new_tokens == 2 * new
    assert len(stats.acceptance_by_depth) <= max(0, min(4, new - 2)), "drafted past the budget"
    by_length = assert_identical(model, inputs, max_length=6 + new, speculative=config)
    assert by_length.accepted_per_round == stats.accepted_per_round


def test_a_prompt_at_max_length_is_refused_as_in_transformers():
    inputs = prompt([6])
    model = model_with("oracle", shared_target(), inputs)
    for generate in (plain, eagle):
        with pytest.raises(ValueError, match="max_length"):
            generate(model, inputs, max_length=6)


@pytest.mark.parametrize("drafter", ["random", "mixed"])
def test_left_padding_changes_neither_text_nor_acceptance(drafter):
    model = model_with(drafter, shared_target(), prompt([7]))
    seen = []
    for extra in range(6):
        inputs = prompt([7], extra=extra)
        stats = assert_identical(model, inputs, max_new_tokens=12)
        seen.append((stats.accepted_per_round, stats.nodes_drafted))
    assert all(entry == seen[0] for entry in seen)


@pytest.mark.parametrize("drafter", ["random", "mixed"])
def test_a_row_does_not_depend_on_its_neighbours(drafter):
    """Text and acceptance of every row of a batch equal its solo run."""
    inputs = prompt([9, 1, 3])
    target = shared_target()
    together = model_with(drafter, target, inputs)
    out = eagle(together, inputs, max_new_tokens=14)
    accepted = together.last_speculation.accepted_per_round
    for row in range(3):
        kept = inputs["attention_mask"][row].bool()
        alone = {name: value[row : row + 1, kept] for name, value in inputs.items()}
        model = together
        if drafter == "mixed":
            model = model_with(drafter, target, alone)
            model.draft.right = [together.draft.right[row]]
        solo = eagle(model, alone, max_new_tokens=14)
        assert solo[0].tolist() == out[row, -solo.shape[1] :].tolist()
        mine = [entry for (entry,) in model.last_speculation.accepted_per_round]
        # Rows finish in different rounds, so a round lists the rows that were still live, in order.
        assert mine == _column(accepted, together, inputs, row)


def _column(accepted, model, inputs, row: int) -> list[int]:
    """What one row accepted, from per-round lists of the live rows."""
    left = [13] * 3  # tokens after the prefill's
    mine = []
    for entries in accepted:
        live = [i for i in range(3) if left[i] > 0]
        for i, entry in zip(live, entries, strict=True):
            if i == row:
                mine.append(entry)
            left[i] -= min(entry + 1, left[i])
    return mine


def test_a_finished_row_costs_nothing_more(monkeypatch):
    """Rows run through the target: a batch costs what its rows cost alone, whenever they end."""
    inputs = prompt([4, 6, 3])
    target = shared_target()
    known = continuations(target, inputs, max_new_tokens=30)
    eos = known[1][6 + 2]  # ends row 1 early
    rows = count_target_rows(monkeypatch)
    for speculative in (None, "eagle4"):
        model = ScriptedModel(target, Oracle(known, VOCAB))
        stops = dict(max_new_tokens=20, eos_token_id=eos, pad_token_id=0, speculative=speculative)
        together = eagle(model, inputs, **stops)
        assert (together[1, -8:] == 0).all(), "row 1 was meant to end early"
        total, solo = sum(rows), 0
        rows.clear()
        for row in range(3):
            kept = inputs["attention_mask"][row].bool()
            alone = {name: value[row : row + 1, kept] for name, value in inputs.items()}
            eagle(ScriptedModel(target, Oracle([known[row]], VOCAB)), alone, **stops)
            solo += sum(rows)
            rows.clear()
        assert total == solo


def test_shrinking_batches_and_reuse():
    """Rows end one by one; the next call on the same model starts clean (E8)."""
    inputs = prompt([4, 6, 3, 8])
    target = shared_target()
    model = Eagle4ForCausalLM(target, small_drafter(target))
    known = continuations(target, inputs, max_new_tokens=24)
    eos = [row[len(row) - 24 + 5 * i + 2] for i, row in enumerate(known)]
    for _ in range(2):
        assert_identical(model, inputs, max_new_tokens=24, eos_token_id=eos, pad_token_id=0)
        assert_identical(model, prompt([3, 3]), max_new_tokens=9)


@pytest.mark.parametrize("drafter", ["random", "mixed"])
def test_small_pages_and_chunks(monkeypatch, drafter):
    """Pages of 4 slots taken on demand interleave the rows; prompts run in chunks of 3."""
    inputs = prompt([13, 1, 6])
    target = shared_target()
    whole = assert_identical(model_with(drafter, target, inputs), inputs, max_new_tokens=16)
    monkeypatch.setattr("eagle4.engine.state.PageTable", functools.partial(PageTable, page_size=4))
    monkeypatch.setattr("eagle4.engine.loop._reserve", lambda call, sequence: None)
    monkeypatch.setattr("eagle4.engine.reference.PREFILL_CHUNK", 3)
    monkeypatch.setattr("eagle4.engine.drafting.CHUNK", 3)
    parts = assert_identical(model_with(drafter, target, inputs), inputs, max_new_tokens=16)
    assert parts.accepted_per_round == whole.accepted_per_round
    assert parts.target_calls > whole.target_calls


@pytest.mark.parametrize("length", [62, 63, 64, 65])
def test_around_a_page(length):
    model = Eagle4ForCausalLM(shared_target(), small_drafter(shared_target()))
    assert_identical(model, prompt([length, 3]), max_new_tokens=8)


@pytest.mark.parametrize("drafter", ["random", "oracle"])
def test_generation_past_the_context(drafter):
    """Transformers only warns at the end of the context; drafts stop there, decoding does not."""
    target = tiny_llama(vocab=VOCAB, layers=2, max_position_embeddings=24)
    inputs = prompt([18, 5])
    model = model_with(drafter, target, inputs)
    assert_identical(model, inputs, max_new_tokens=14)


def test_drafts_end_where_learned_positions_end():
    """GPT-2 has no embedding behind its context: a node there would fail the request."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB, n_positions=24, n_embd=32, n_layer=2, n_head=4)
    sizes |= dict(tie_word_embeddings=False)
    tokens = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    target = GPT2LMHeadModel(GPT2Config(**sizes, **tokens, initializer_range=0.3)).eval()
    inputs = prompt([18])
    produced = target.generate(**inputs, do_sample=False, max_new_tokens=6)[0, 18:].tolist()
    eos = produced[-1]
    assert eos not in produced[:4], "the text was meant to end near the end of the context"
    model = model_with("random", target, inputs)
    # The budget alone would allow nodes behind the context.
    kwargs = dict(max_new_tokens=20, eos_token_id=eos, pad_token_id=0)
    stats = assert_identical(model, inputs, **kwargs, speculative={"mode": "chain"})
    assert len(stats.acceptance_by_depth) == 5


def test_ties_break_as_in_plain_decoding():
    """Two rows of the LM head are equal: the argmax is the first of them, drafted or not."""
    target = tiny_llama(vocab=VOCAB, layers=2)
    with torch.no_grad():
        for token in range(1, VOCAB, 2):
            target.lm_head.weight[token] = target.lm_head.weight[token - 1]
    inputs = prompt([5, 2])
    for drafter in DRAFTERS:
        assert_identical(model_with(drafter, target, inputs), inputs, max_new_tokens=10)


def test_a_bigger_tree_never_accepts_less_in_the_first_round():
    inputs = prompt([7])
    target = shared_target()
    model = Eagle4ForCausalLM(target, small_drafter(target))
    first = []
    for max_nodes in (1, 2, 4, 8, 16, 32):
        config = SpeculativeConfig(max_depth=4, top_k=4, max_nodes=max_nodes)
        stats = assert_identical(model, inputs, max_new_tokens=8, speculative=config)
        first.append(stats.accepted_per_round[0][0])
    assert first == sorted(first)


@pytest.mark.parametrize(
    "overrides", [{"eh_proj": False}, {"sliding_window": 6}, {"use_rope": False}]
)
def test_drafters_of_every_structure(overrides):
    target = shared_target()
    model = Eagle4ForCausalLM(target, small_drafter(target, **overrides))
    assert_identical(model, prompt([9, 2]), max_new_tokens=12)


def test_more_children_asked_for_than_the_drafter_can_propose():
    target = shared_target()
    model = Eagle4ForCausalLM(target, small_drafter(target, num_candidates=3))
    assert_identical(model, prompt([5]), max_new_tokens=8, speculative={"top_k": 8})
