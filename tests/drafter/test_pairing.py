"""Catches: a drafter of another target that loads and drafts nonsense, a fingerprint that changes
between two loads of the same tokenizer, a mismatch that is hidden behind the first one.
"""

from __future__ import annotations

import pytest
import tiny
from transformers import AutoTokenizer, GPT2Config, LlamaConfig

from eagle4.config import Eagle4Config
from eagle4.drafter.pairing import check_pair, tokenizer_fingerprint

TARGET = dict(vocab_size=96, hidden_size=32, num_hidden_layers=8, num_attention_heads=4)


def pair(**overrides):
    target = LlamaConfig(**TARGET)
    return Eagle4Config.for_target(target, **overrides), target


def test_a_drafter_made_for_the_target_fits():
    check_pair(*pair())
    check_pair(*pair(own_embed_tokens=True, own_lm_head=True, hidden_size=64))
    gpt2 = GPT2Config(n_embd=48, n_head=4, n_layer=5, vocab_size=70)
    check_pair(Eagle4Config.for_target(gpt2), gpt2)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"target_hidden_size": 40}, ["features", "40", "32"]),
        ({"hidden_size": 64, "own_lm_head": True}, ["borrowed embedding", "64", "32"]),
        ({"hidden_size": 64, "own_embed_tokens": True}, ["borrowed LM head", "64", "32"]),
        ({"vocab_size": 97}, ["vocabulary", "97", "96"]),
        ({"num_target_layers": 12, "tap_layers": [1, 2, 3]}, ["layers", "12", "8"]),
        ({"num_target_layers": 12, "tap_layers": [1, 5, 9]}, ["tap layers", "[9]", "0..7"]),
    ],
    ids=str,
)
def test_every_mismatch_says_what_is_needed_and_what_is_there(overrides, words):
    with pytest.raises(ValueError) as error:
        check_pair(*pair(**overrides))
    for word in words:
        assert word in str(error.value)


def test_all_mismatches_are_reported_together():
    overrides = {"vocab_size": 5, "target_hidden_size": 7, "num_target_layers": 30}
    with pytest.raises(ValueError) as error:
        check_pair(*pair(**overrides, tokenizer_fingerprint="x" * 64), tiny.tiny_tokenizer())
    for word in ("vocabulary", "features", "number of target layers", "tap layers", "fingerprint"):
        assert word in str(error.value)


def test_the_tokenizer_is_checked_only_when_both_sides_know_it(tokenizer):
    own = tokenizer_fingerprint(tokenizer)
    check_pair(*pair(tokenizer_fingerprint=own), tokenizer)
    check_pair(*pair(tokenizer_fingerprint="0" * 64))
    check_pair(*pair(), tokenizer)
    with pytest.raises(ValueError, match="tokenizer fingerprint"):
        check_pair(*pair(tokenizer_fingerprint="0" * 64), tokenizer)


def test_the_fingerprint_survives_saving_and_a_new_padding_token(tmp_path):
    tokenizer = tiny.tiny_tokenizer()
    before = tokenizer_fingerprint(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_fingerprint(AutoTokenizer.from_pretrained(tmp_path)) == before
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    tokenizer.chat_template = None
    assert tokenizer_fingerprint(tokenizer) == before
    assert len(before) == 64


def test_the_fingerprint_sees_ids_tokens_and_special_ids():
    before = tokenizer_fingerprint(tiny.tiny_tokenizer())
    longer = tiny.tiny_tokenizer(97)
    added = tiny.tiny_tokenizer()
    added.add_tokens(["new"])
    other_end = tiny.tiny_tokenizer()
    other_end.eos_token = "w3"
    swapped = tiny.tiny_tokenizer()
    vocabulary = swapped.get_vocab()
    vocabulary["w1"], vocabulary["w2"] = vocabulary["w2"], vocabulary["w1"]
    swapped.get_vocab = lambda: vocabulary
    prints = [tokenizer_fingerprint(t) for t in (longer, added, other_end, swapped)]
    assert len({before, *prints}) == 5
