"""Catches: `transformers.pipeline` that gives other text with speculation than without, loses the
argument, breaks on batches, chats, stop sequences or streamers, or cannot load a saved pair.
"""

from __future__ import annotations

import pytest
import torch
from scripted import small_drafter
from tiny import tiny_llama, tiny_tokenizer
from transformers import TextStreamer, pipeline

from eagle4 import Eagle4ForCausalLM
from tests.engine.compare import piece_tokenizer

VOCAB = 48
TEXTS = ["w1 w5 w9 w2", "w7", "w3 w3 w8 w11 w30 w2 w6"]
GREEDY = dict(do_sample=False, max_new_tokens=9)


@pytest.fixture(scope="module")
def model() -> Eagle4ForCausalLM:
    target = tiny_llama(vocab=VOCAB, layers=2, bos_token_id=1, eos_token_id=2)
    return Eagle4ForCausalLM(target, small_drafter(target))


@pytest.fixture(scope="module")
def word_tokenizer():
    tokenizer = tiny_tokenizer(VOCAB)
    tokenizer.padding_side = "left"
    return tokenizer


@pytest.fixture(scope="module")
def pipes(model, word_tokenizer):
    """The pipeline of the target alone, and that of the pair."""
    return [
        pipeline("text-generation", model=part, tokenizer=word_tokenizer)
        for part in (model.target, model)
    ]


def assert_drafted(model) -> None:
    stats = model.last_speculation
    assert stats.rounds > stats.plain_rounds and not stats.fallbacks


@pytest.mark.parametrize("text", TEXTS)
def test_one_text(model, pipes, text):
    plain, pair = pipes
    wanted = plain(text, **GREEDY)
    assert pair(text, **GREEDY) == wanted
    assert pair(text, **GREEDY, speculative="eagle4") == wanted
    assert_drafted(model)
    kwargs = dict(**GREEDY, return_full_text=False)
    assert pair(text, speculative={"top_k": 2}, **kwargs) == plain(text, **kwargs)


@pytest.mark.parametrize("batch_size", [2, 3])
def test_batches_are_padded_on_the_left(model, pipes, batch_size):
    plain, pair = pipes
    got = pair(TEXTS, batch_size=batch_size, speculative="eagle4", **GREEDY)
    assert_drafted(model)
    assert got == plain(TEXTS, batch_size=batch_size, **GREEDY)
    assert got == plain(TEXTS, **GREEDY), "and equal to one at a time"


def test_chats(model, pipes):
    plain, pair = pipes
    chat = [{"role": "user", "content": "w4 w8 w15"}, {"role": "assistant", "content": "w16"}]
    chat += [{"role": "user", "content": "w23 w40"}]
    got = pair(chat, speculative="eagle4", **GREEDY)
    assert_drafted(model)
    assert got == plain(chat, **GREEDY)
    assert got[0]["generated_text"][-1]["role"] == "assistant"


def test_the_pipelines_own_defaults_sample(model, pipes):
    outs = []
    for speculative in (None, "eagle4", "eagle4"):
        torch.manual_seed(5)
        outs.append(pipes[1](TEXTS[0], max_new_tokens=12, speculative=speculative))
    assert outs[0] == outs[1] == outs[2]
    assert_drafted(model)
    seeded = [pipes[1](TEXTS, max_new_tokens=12, seed=3, speculative=s) for s in (None, "eagle4")]
    assert seeded[0] == seeded[1]
    torch.manual_seed(6)
    assert pipes[1](TEXTS[0], max_new_tokens=12) != outs[0]


def test_speculative_given_when_the_pipeline_is_made(model, word_tokenizer, pipes):
    pipe = pipeline(
        "text-generation", model=model, tokenizer=word_tokenizer, speculative="eagle4", **GREEDY
    )
    assert pipe(TEXTS[0]) == pipes[0](TEXTS[0], **GREEDY)
    assert_drafted(model)


def test_a_stop_sequence(model):
    tokenizer = piece_tokenizer(VOCAB)
    plain, pair = (
        pipeline("text-generation", model=part, tokenizer=tokenizer)
        for part in (model.target, model)
    )
    text = "abc ef dad"
    whole = plain(text, return_full_text=False, **GREEDY)[0]["generated_text"]
    kwargs = dict(stop_sequence=whole[2:4], **GREEDY)
    got = pair(text, speculative="eagle4", **kwargs)
    assert got == plain(text, **kwargs) != plain(text, **GREEDY)


def test_a_streamer(word_tokenizer, pipes, capsys):
    plain, pair = pipes
    wanted = plain(TEXTS[0], return_full_text=False, **GREEDY)[0]["generated_text"]
    streamer = TextStreamer(word_tokenizer, skip_prompt=True, skip_special_tokens=True)
    capsys.readouterr()
    pair(TEXTS[0], speculative="eagle4", streamer=streamer, **GREEDY)
    assert capsys.readouterr().out.strip() == wanted.strip()


def test_a_saved_pair_by_its_path(tmp_path, model, word_tokenizer, pipes):
    model.save_pretrained(tmp_path)
    word_tokenizer.save_pretrained(tmp_path)
    pipe = pipeline("text-generation", model=str(tmp_path))
    assert isinstance(pipe.model, Eagle4ForCausalLM)
    got = pipe(TEXTS, batch_size=2, speculative="eagle4", **GREEDY)
    assert_drafted(pipe.model)
    assert got == pipes[0](TEXTS, **GREEDY)


def test_returned_tensors(pipes):
    plain, pair = pipes
    kwargs = dict(return_tensors=True, **GREEDY)
    assert pair(TEXTS[0], speculative="eagle4", **kwargs) == plain(TEXTS[0], **kwargs)
