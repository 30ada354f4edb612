"""Catches: a returned cache that gives other text when it is handed back (B7), that is trusted
although the conversation was edited, that is handed to another batch, that costs a full prefill
(E9), that differs from Transformers' own when it is converted, or that a foreign cache is taken
for.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from scripted import small_drafter
from transformers import DynamicCache

from eagle4 import Eagle4ForCausalLM
from eagle4.engine import Eagle4Cache
from eagle4.engine.call import CACHE_KEYWORD
from tests.engine.compare import VOCAB, count_target_rows, eagle, plain, prompt, shared_target

FIRST, SECOND = 9, 8
LENGTHS = {"one row": [6], "batch": [6, 2, 4]}


def eagle_model() -> Eagle4ForCausalLM:
    target = shared_target()
    return Eagle4ForCausalLM(target, small_drafter(target))


def cache_of(out) -> Any:
    return out[CACHE_KEYWORD]


def longer(inputs: dict[str, Any], sequences: torch.Tensor, extra: int = 5) -> dict[str, Any]:
    """The conversation so far and ``extra`` new user tokens on every row."""
    more = torch.randint(
        1, VOCAB, (len(sequences), extra), generator=torch.Generator().manual_seed(extra)
    )
    ids = torch.cat([sequences, more], dim=1)
    new = ids.shape[1] - inputs["input_ids"].shape[1]
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(ids), new, dtype=torch.long)], dim=1)
    return {"input_ids": ids, "attention_mask": mask}


def first_turn(model, lengths, speculative="eagle4", extra=1, **kwargs):
    inputs = prompt(lengths, extra=extra)
    kwargs = dict(max_new_tokens=FIRST, return_dict_in_generate=True) | kwargs
    out = eagle(model, inputs, speculative=speculative, **kwargs)
    return inputs, out


@pytest.mark.parametrize(
    "modes", [("eagle4", "eagle4"), ("eagle4", None), (None, "eagle4"), (None, None)]
)
@pytest.mark.parametrize("lengths", list(LENGTHS))
def test_full_ids_with_the_cache_equal_one_shot(lengths, modes):
    model = eagle_model()
    inputs, out = first_turn(model, LENGTHS[lengths], modes[0])
    whole = longer(inputs, out.sequences)
    wanted = plain(model, whole, max_new_tokens=SECOND)
    got = eagle(
        model, whole, max_new_tokens=SECOND, speculative=modes[1], **{CACHE_KEYWORD: cache_of(out)}
    )
    assert got.tolist() == wanted.tolist()
    assert not model.last_speculation.fallbacks


def test_three_turns_that_mix_modes():
    model = eagle_model()
    inputs, out = first_turn(model, [6, 3])
    cache = cache_of(out)
    for turn, mode in enumerate([None, "eagle4", None, "eagle4", "eagle4"]):
        inputs = longer(inputs, out.sequences, extra=2 + turn)
        wanted = plain(model, inputs, max_new_tokens=SECOND)
        out = eagle(
            model,
            inputs,
            max_new_tokens=SECOND,
            speculative=mode,
            return_dict_in_generate=True,
            **{CACHE_KEYWORD: cache},
        )
        assert out.sequences.tolist() == wanted.tolist()
        assert cache_of(out) is cache, "the cache is updated in place, as Transformers' are"


@pytest.mark.parametrize("name", ["past_key_values", CACHE_KEYWORD])
def test_both_names_of_the_argument(name):
    model = eagle_model()
    inputs, out = first_turn(model, [6])
    whole = longer(inputs, out.sequences)
    got = eagle(model, whole, max_new_tokens=SECOND, **{name: out.past_key_values})
    assert got.tolist() == plain(model, whole, max_new_tokens=SECOND).tolist()


@pytest.mark.parametrize("speculative", ["eagle4", None])
@pytest.mark.parametrize("lengths", list(LENGTHS))
def test_new_ids_with_the_full_mask_behave_as_in_transformers(lengths, speculative):
    """Only the passed ids come back, and length rules and processors count from them."""
    model = eagle_model()
    inputs, out = first_turn(model, LENGTHS[lengths])
    theirs = plain(model, inputs, max_new_tokens=FIRST, return_dict_in_generate=True)
    whole = longer(inputs, out.sequences)
    # The cache lacks the last token, so Transformers needs it among the new ones.
    known = out.sequences.shape[1] - 1
    new = {"input_ids": whole["input_ids"][:, known:], "attention_mask": whole["attention_mask"]}
    end = int(plain(model, whole, max_new_tokens=SECOND)[0, -4])
    for rules in (
        {},
        dict(repetition_penalty=1.5, min_new_tokens=6, eos_token_id=end, pad_token_id=0),
    ):
        kwargs = dict(max_new_tokens=SECOND, **rules)
        cache = copy.deepcopy(cache_of(theirs))
        wanted = plain(model, new, **kwargs, **{CACHE_KEYWORD: cache})
        mine = copy.deepcopy(cache_of(out))
        got = eagle(model, new, speculative=speculative, **kwargs, **{CACHE_KEYWORD: mine})
        assert got.tolist() == wanted.tolist()
    one_shot = plain(model, whole, max_new_tokens=SECOND)
    got = eagle(
        model, new, speculative=speculative, max_new_tokens=SECOND, **{CACHE_KEYWORD: cache_of(out)}
    )
    assert got.tolist() == one_shot[:, known:].tolist()


@pytest.mark.parametrize("cut", [0, 1, 4, 7, 12])
@pytest.mark.parametrize("speculative", ["eagle4", None])
def test_an_edited_conversation_is_recomputed_from_the_edit(monkeypatch, cut, speculative):
    model = eagle_model()
    inputs, out = first_turn(model, [7], extra=0)
    ids = longer(inputs, out.sequences)["input_ids"]
    ids[0, cut] = ids[0, cut] % (VOCAB - 1) + 1
    rows = count_target_rows(monkeypatch)
    got = eagle(
        model,
        {"input_ids": ids},
        max_new_tokens=SECOND,
        speculative=speculative,
        **{CACHE_KEYWORD: cache_of(out)},
    )
    # Speculation needs one row more: a draft entry depends on the token behind it.
    assert ids.shape[1] - cut <= rows[0] <= ids.shape[1] - max(cut - 1, 0)
    assert got.tolist() == plain(model, {"input_ids": ids}, max_new_tokens=SECOND).tolist()


@pytest.mark.parametrize("keep", [1, 5, 8, 15])
def test_a_shorter_prompt_than_the_cache(keep):
    """Regenerate from an earlier point, or the same prompt again."""
    model = eagle_model()
    inputs, out = first_turn(model, [7], extra=0)
    ids = out.sequences[:, :keep]
    for speculative in ("eagle4", None, "eagle4"):
        got = eagle(
            model,
            {"input_ids": ids},
            max_new_tokens=SECOND,
            speculative=speculative,
            **{CACHE_KEYWORD: cache_of(out)},
        )
        assert got.tolist() == plain(model, {"input_ids": ids}, max_new_tokens=SECOND).tolist()


@pytest.mark.parametrize("speculative", ["eagle4", None])
def test_reuse_saves_the_rows_of_the_prefix(monkeypatch, speculative):
    """For target and drafter: only the last token of the first turn and the new ones are run."""
    model = eagle_model()
    inputs, out = first_turn(model, [30], speculative)
    whole = longer(inputs, out.sequences)
    rows = count_target_rows(monkeypatch)
    kwargs = dict(max_new_tokens=SECOND, speculative=speculative)
    eagle(model, whole, **kwargs, **{CACHE_KEYWORD: cache_of(out)})
    assert rows[0] == 1 + 5
    rows.clear()
    eagle(model, whole, **kwargs)
    assert rows[0] == 30 + FIRST + 5


def test_a_batch_in_which_a_row_ended_early():
    """Transformers pads the finished row, and the padding is part of the next prompt."""
    model = eagle_model()
    inputs = prompt([6, 3])
    produced = plain(model, inputs, max_new_tokens=FIRST)[:, 6:]
    eos = next(int(t) for t in produced[0, 1:] if t not in produced[1])
    rules = dict(eos_token_id=eos, pad_token_id=0)
    inputs, out = first_turn(model, [6, 3], extra=0, **rules)
    assert (out.sequences[0, -3:] == 0).all()
    whole = longer(inputs, out.sequences)
    wanted = plain(model, whole, max_new_tokens=SECOND)
    got = eagle(model, whole, max_new_tokens=SECOND, **{CACHE_KEYWORD: cache_of(out)})
    assert got.tolist() == wanted.tolist()


@pytest.mark.parametrize("speculative", ["eagle4", None])
def test_another_batch_size_is_refused_and_the_cache_survives(speculative):
    model = eagle_model()
    inputs, out = first_turn(model, [6, 3])
    cache = cache_of(out)
    for rows in (1, 3):
        with pytest.raises(ValueError, match="past_key_values holds 2 sequences"):
            eagle(
                model,
                prompt([4] * rows),
                max_new_tokens=3,
                speculative=speculative,
                **{CACHE_KEYWORD: cache},
            )
    whole = longer(inputs, out.sequences)
    got = eagle(model, whole, max_new_tokens=SECOND, **{CACHE_KEYWORD: cache})
    assert got.tolist() == plain(model, whole, max_new_tokens=SECOND).tolist()


def test_masks_that_no_cache_covers_are_refused():
    model = eagle_model()
    inputs, out = first_turn(model, [6], extra=0)
    ids = prompt([3])["input_ids"]
    known = out.sequences.shape[1]
    for covered, cache in ((20, None), (known + 3 + 1, cache_of(out)), (known + 40, cache_of(out))):
        mask = torch.ones(1, covered, dtype=torch.long)
        with pytest.raises(ValueError, match=f"attention_mask covers {covered} tokens"):
            eagle(
                model,
                {"input_ids": ids, "attention_mask": mask},
                max_new_tokens=3,
                **{CACHE_KEYWORD: cache},
            )


def test_a_cache_after_a_failed_call_is_still_right():
    """A criterion breaks in mid-block; the cache it was working on is handed in again."""
    from transformers import StoppingCriteriaList

    from tests.engine.test_streaming import Failing

    model = eagle_model()
    inputs, out = first_turn(model, [6], extra=0)
    whole = longer(inputs, out.sequences)
    stop = StoppingCriteriaList([Failing(whole["input_ids"].shape[1] + 4)])
    with pytest.raises(RuntimeError):
        eagle(
            model,
            whole,
            max_new_tokens=SECOND,
            stopping_criteria=stop,
            **{CACHE_KEYWORD: cache_of(out)},
        )
    got = eagle(model, whole, max_new_tokens=SECOND, **{CACHE_KEYWORD: cache_of(out)})
    assert got.tolist() == plain(model, whole, max_new_tokens=SECOND).tolist()


# -- Transformers' own caches ----------------------------------------------------------------------


@pytest.mark.parametrize("lengths", list(LENGTHS))
def test_converted_cache_equals_transformers_own_and_continues_there(lengths):
    model = eagle_model()
    inputs, out = first_turn(model, LENGTHS[lengths])
    theirs = cache_of(plain(model, inputs, max_new_tokens=FIRST, return_dict_in_generate=True))
    mine = cache_of(out).to_dynamic_cache()
    assert mine.get_seq_length() == theirs.get_seq_length() == cache_of(out).get_seq_length()
    kept = longer(inputs, out.sequences, extra=0)["attention_mask"][:, :-1].bool()
    assert len(mine.layers) == len(theirs.layers)
    for a, b in zip(mine.layers, theirs.layers, strict=True):
        for x, y in ((a.keys, b.keys), (a.values, b.values)):
            assert x.shape == y.shape
            # Padding columns hold what nobody may read.
            rows = [t.transpose(1, 2)[kept] for t in (x, y)]
            torch.testing.assert_close(*rows, rtol=1e-4, atol=2e-5)
    whole = longer(inputs, out.sequences)
    wanted = plain(model, whole, max_new_tokens=SECOND)
    assert plain(model, whole, max_new_tokens=SECOND, **{CACHE_KEYWORD: mine}).tolist() == (
        wanted.tolist()
    )


def test_rows_of_different_lengths_cannot_be_converted():
    model = eagle_model()
    inputs = prompt([6, 3])
    eos = int(plain(model, inputs, max_new_tokens=FIRST)[0, 6 + 2])
    _, out = first_turn(model, [6, 3], eos_token_id=eos, pad_token_id=0)
    with pytest.raises(ValueError, match="one length"):
        cache_of(out).to_dynamic_cache()


def test_a_foreign_cache_is_refused_with_speculation_and_served_without():
    model = eagle_model()
    inputs = prompt([6])
    out = plain(model, inputs, max_new_tokens=FIRST, return_dict_in_generate=True)
    whole = longer(inputs, out.sequences)
    with pytest.raises(ValueError, match=f"{CACHE_KEYWORD} is a DynamicCache"):
        eagle(model, whole, max_new_tokens=3, **{CACHE_KEYWORD: cache_of(out)})
    with pytest.raises(ValueError, match="DynamicCache"):
        eagle(model, inputs, max_new_tokens=3, **{CACHE_KEYWORD: DynamicCache()})
    got = eagle(
        model, whole, max_new_tokens=SECOND, speculative=None, **{CACHE_KEYWORD: cache_of(out)}
    )
    assert got.tolist() == plain(model, whole, max_new_tokens=SECOND).tolist()


def test_our_cache_is_refused_by_name_where_transformers_decodes():
    model = eagle_model()
    inputs, out = first_turn(model, [6])
    assert isinstance(cache_of(out), Eagle4Cache)
    whole = longer(inputs, out.sequences)
    for own in (dict(do_sample=True, num_beams=2), dict(num_beams=2)):
        with pytest.raises(ValueError, match="to_dynamic_cache"):
            model.generate(**whole, max_new_tokens=3, **own, **{CACHE_KEYWORD: cache_of(out)})
