"""Catches: rejected tokens or whole blocks put into a streamer (P3), tokens after EOS or after a
stop string, an end() that is missing (a reader waits for ever) or comes twice, streams of batches
in another shape or order than plain decoding's, text that differs from the returned ids (P2, P4).
"""

from __future__ import annotations

import threading

import pytest
import torch
from tiny import tiny_tokenizer
from transformers import (
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

from tests.engine.compare import (
    DRAFTERS,
    VOCAB,
    eagle,
    model_with,
    plain,
    prompt,
    shared_target,
)

NEW = 12


class Recording(BaseStreamer):
    """Everything that is put, and how often it ended; raises at a given put if asked."""

    def __init__(self, fail_at: int | None = None):
        self.puts: list[torch.Tensor] = []
        self.ends = 0
        self.fail_at = fail_at

    def put(self, value):
        assert not self.ends, "a token after the end"
        if len(self.puts) == self.fail_at:
            raise ConnectionError("the reader has gone")
        self.puts.append(value.clone())

    def end(self):
        self.ends += 1


def stream(generate, model, inputs, **kwargs):
    streamer = Recording()
    out = generate(model, inputs, streamer=streamer, **kwargs)
    assert streamer.ends == 1
    return out, streamer.puts


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("lengths", [[5], [6, 1, 4]])
def test_every_put_equals_plain_decodings(lengths, drafter):
    """The prompt once, then one 1-D step at a time, also when rows end in different steps."""
    inputs = prompt(lengths)
    model = model_with(drafter, shared_target(), inputs)
    produced = plain(model, inputs, max_new_tokens=NEW)[:, max(lengths) :]
    for eos in (None, [int(produced[0, 6]), int(produced[-1, 2])]):
        kwargs = dict(max_new_tokens=NEW, eos_token_id=eos, pad_token_id=0)
        _, wanted = stream(plain, model, inputs, **kwargs)
        out, puts = stream(eagle, model, inputs, **kwargs)
        assert [put.tolist() for put in puts] == [put.tolist() for put in wanted]
        assert puts[0].shape == inputs["input_ids"].shape
        assert all(put.shape == (len(lengths),) for put in puts[1:])
        assert torch.equal(torch.cat([puts[0], torch.stack(puts[1:], dim=1)], dim=1), out)


class AtLength(StoppingCriteria):
    def __init__(self, *lengths: int):
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids, scores, **kwargs):
        return (self.lengths == input_ids.shape[1]).expand(len(input_ids))


@pytest.mark.parametrize("drafter", ["oracle", "mixed"])
def test_rows_that_run_on_after_a_criterion_stream_in_order(drafter):
    inputs = prompt([6, 1, 4])
    model = model_with(drafter, shared_target(), inputs)
    kwargs = dict(max_new_tokens=NEW, stopping_criteria=StoppingCriteriaList([AtLength(9, 13, 7)]))
    _, wanted = stream(plain, model, inputs, **kwargs)
    _, puts = stream(eagle, model, inputs, **kwargs)
    assert [put.tolist() for put in puts] == [put.tolist() for put in wanted]


@pytest.mark.parametrize("skip_prompt", [False, True])
@pytest.mark.parametrize("drafter", ["oracle", "random"])
def test_text_streamer_prints_the_decoded_text(capsys, drafter, skip_prompt):
    tokenizer = tiny_tokenizer(VOCAB)
    inputs = prompt([5])
    model = model_with(drafter, shared_target(), inputs)
    streamer = TextStreamer(tokenizer, skip_prompt=skip_prompt)
    out = eagle(model, inputs, max_new_tokens=NEW, streamer=streamer)
    text = capsys.readouterr().out
    assert text == tokenizer.decode(out[0, 5 if skip_prompt else 0 :]) + "\n"


def test_text_iterator_streamer_from_another_thread():
    tokenizer = tiny_tokenizer(VOCAB)
    inputs = prompt([5])
    model = model_with("oracle", shared_target(), inputs)
    wanted = tokenizer.decode(plain(model, inputs, max_new_tokens=NEW)[0])
    streamer = TextIteratorStreamer(tokenizer, timeout=60)
    kwargs = dict(max_new_tokens=NEW, streamer=streamer)
    thread = threading.Thread(target=eagle, args=(model, inputs), kwargs=kwargs)
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == wanted
    assert len(pieces) > 4, "the text came in one block"


def test_a_text_streamer_refuses_batches_as_in_transformers():
    inputs = prompt([5, 3])
    model = model_with("oracle", shared_target(), inputs)
    for generate in (plain, eagle):
        with pytest.raises(ValueError, match="batch size 1"):
            generate(model, inputs, max_new_tokens=3, streamer=TextStreamer(tiny_tokenizer(VOCAB)))


class Failing(StoppingCriteria):
    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == self.length:
            raise RuntimeError("the criterion broke")
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("after", [1, 2, 5])
def test_the_stream_ends_once_when_a_criterion_raises(after):
    inputs = prompt([5])
    model = model_with("oracle", shared_target(), inputs)
    wanted = plain(model, inputs, max_new_tokens=NEW)[0, 5:].tolist()
    streamer = Recording()
    stop = StoppingCriteriaList([Failing(5 + after)])
    with pytest.raises(RuntimeError, match="criterion broke"):
        eagle(model, inputs, max_new_tokens=NEW, streamer=streamer, stopping_criteria=stop)
    assert streamer.ends == 1
    streamed = [int(put) for put in streamer.puts[1:]]
    assert streamed == wanted[: len(streamed)] and len(streamed) < after


@pytest.mark.parametrize("at", [1, 2, 6])
def test_the_stream_ends_once_when_the_streamer_raises(at):
    inputs = prompt([5])
    model = model_with("oracle", shared_target(), inputs)
    streamer = Recording(fail_at=at)
    with pytest.raises(ConnectionError):
        eagle(model, inputs, max_new_tokens=NEW, streamer=streamer)
    assert streamer.ends == 1 and len(streamer.puts) == at
    # The model is as good as new.
    out = eagle(model, inputs, max_new_tokens=NEW)
    assert out.tolist() == plain(model, inputs, max_new_tokens=NEW).tolist()


def test_the_stream_ends_when_the_prompt_is_refused():
    """A reader in another thread must not wait for a call that failed after the prompt was put."""
    inputs = prompt([5, 3])
    inputs["attention_mask"][0] = torch.tensor([1, 1, 0, 1, 1])
    model = model_with("random", shared_target(), prompt([5]))
    streamer = Recording()
    with pytest.raises(ValueError, match="attention_mask"):
        eagle(model, inputs, max_new_tokens=NEW, streamer=streamer)
    assert streamer.ends == 1
