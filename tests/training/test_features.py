"""Can catch: a store of another target read as ours, short captures, taps read before the block,
a norm missing before the head, an interrupted writer that loses or repeats sequences."""

import json

import pytest
import torch

from eagle4.training.extract import build_store, check_head, extract
from eagle4.training.features import (
    FeatureSequence,
    FeatureStore,
    FeatureWriter,
    target_identity,
)
from tests.training.small import HIDDEN, TAPS, VOCAB, tiny_store, tiny_target


def sequences(count, bad=()):
    generator = torch.Generator().manual_seed(3)
    for i in range(count):
        ids = torch.randint(1, VOCAB, (9 + i,), generator=generator)
        yield ids, torch.arange(len(ids)) >= 4, {"index": i, "bad": i in bad}


def test_round_trip_and_statistics(tmp_path):
    target = tiny_target()
    identity = target_identity(target.config, TAPS, "abc")
    with FeatureWriter(tmp_path, identity, shard_size=3) as writer:
        build_store(target, TAPS, writer, sequences(7))
    store = FeatureStore(tmp_path, expect=identity)
    assert len(store) == 7 and len(store.manifest["shards"]) == 3
    assert store.manifest["num_tokens"] == sum(9 + i for i in range(7))
    assert store.manifest["num_supervised"] == sum(5 + i for i in range(7))
    for i, (ids, mask, info) in enumerate(sequences(7)):
        found = store[i]
        taps, last = extract(target, TAPS, ids)
        assert torch.equal(found.ids.long(), ids) and torch.equal(found.mask, mask)
        assert torch.equal(found.taps, taps) and torch.equal(found.last, last)
        assert found.taps.shape == (len(ids) - 1, len(TAPS), HIDDEN) and store.info(i) == info


def test_taps_are_block_outputs_and_last_reproduces_the_logits(tmp_path):
    target = tiny_target()
    ids = torch.randint(1, VOCAB, (12,))
    hooks = [len(block._forward_hooks) for block in target.model.layers]
    taps, last = extract(target, [0, 1], ids)
    assert hooks == [len(block._forward_hooks) for block in target.model.layers]
    out = target(ids[None, :-1], output_hidden_states=True)
    for i, layer in enumerate([0, 1]):
        wanted = out.hidden_states[layer + 1][0]
        torch.testing.assert_close(taps[:, i].float(), wanted, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(target.lm_head(last.float()), out.logits[0], rtol=5e-2, atol=5e-2)


def test_a_model_that_changes_its_logits_is_refused():
    target = tiny_target()
    check_head(target, torch.arange(1, 9))
    target.lm_head.register_forward_hook(lambda module, args, output: None)
    plain = target.forward
    target.forward = lambda *args, **kwargs: _scaled(plain(*args, **kwargs))
    with pytest.raises(ValueError, match="changes its logits after the head"):
        check_head(target, torch.arange(1, 9))


def _scaled(output):
    output.logits = 30 * torch.tanh(output.logits / 30) * 0.5
    return output


@pytest.mark.parametrize(
    "change",
    [
        {"tap_layers": [0, 1]},
        {"tokenizer_fingerprint": "other"},
        {"hidden_size": 7},
        {"model_type": "qwen3"},
    ],
)
def test_another_target_is_refused_by_name(tmp_path, change):
    store = tiny_store(tmp_path, tiny_target(), num_sequences=1)
    wanted = {**store.manifest["target"], **change}
    (name,) = change
    with pytest.raises(ValueError, match=name):
        FeatureStore(tmp_path, expect=wanted)
    with pytest.raises(ValueError, match=name):
        FeatureWriter(tmp_path, wanted)


def test_stores_of_one_target_are_read_one_after_the_other(tmp_path):
    target = tiny_target()
    parts = [
        tiny_store(tmp_path / name, target, num_sequences=n) for name, n in (("a", 3), ("b", 2))
    ]
    whole = FeatureStore(tmp_path / "a", tmp_path / "b")
    assert len(whole) == 5
    for i, (part, index) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]):
        for found, stored in zip(whole[i], parts[part][index], strict=True):
            assert torch.equal(found, stored)
        assert whole.info(i) == parts[part].info(index)
    for name in ("num_sequences", "num_tokens", "num_supervised"):
        assert whole.manifest[name] == sum(part.manifest[name] for part in parts)


def test_stores_of_two_targets_are_refused(tmp_path):
    tiny_store(tmp_path / "a", tiny_target(), num_sequences=1)
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    manifest["target"]["hidden_size"] = 7
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"b was made for another target \(hidden_size"):
        FeatureStore(tmp_path / "a", tmp_path / "b")


def test_broken_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match="no manifest.json"):
        FeatureStore(tmp_path)
    store = tiny_store(tmp_path / "a", tiny_target(), num_sequences=1)
    (tmp_path / "a" / store.manifest["shards"][0]["file"]).unlink()
    with pytest.raises(ValueError, match="missing"):
        FeatureStore(tmp_path / "a")[0]
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    (tmp_path / "a" / "manifest.json").write_text(json.dumps({**manifest, "format_version": 9}))
    with pytest.raises(ValueError, match="format 9"):
        FeatureStore(tmp_path / "a")


def test_short_captures_and_empty_masks_are_refused(tmp_path):
    identity = target_identity(tiny_target().config, TAPS, None)
    writer = FeatureWriter(tmp_path, identity)
    ids, taps, last = torch.arange(6), torch.zeros(5, 3, HIDDEN), torch.zeros(5, HIDDEN)
    mask = torch.ones(6, dtype=torch.bool)
    with pytest.raises(ValueError, match="needs 5"):
        writer.add(FeatureSequence(ids, taps[:4], last, mask))
    with pytest.raises(ValueError, match="supervised"):
        writer.add(FeatureSequence(ids, taps, last, ~mask))


def test_interrupted_build_continues(tmp_path):
    target = tiny_target()
    identity = target_identity(target.config, TAPS, None)

    def failing():
        for i, item in enumerate(sequences(8)):
            if i == 5:
                raise KeyboardInterrupt
            yield item

    with pytest.raises(KeyboardInterrupt):
        with FeatureWriter(tmp_path, identity, shard_size=3) as writer:
            build_store(target, TAPS, writer, failing())
    assert len(FeatureStore(tmp_path)) == 3
    with FeatureWriter(tmp_path, identity, shard_size=3) as writer:
        build_store(target, TAPS, writer, sequences(8))
    store = FeatureStore(tmp_path)
    assert [store.info(i)["index"] for i in range(len(store))] == list(range(8))


def test_non_finite_features_are_left_out_and_counted(tmp_path):
    target = tiny_target()
    identity = target_identity(target.config, TAPS, None)
    target.model.embed_tokens.weight.data[VOCAB - 1] = float("nan")
    items = [(ids.clamp_max(VOCAB - 2), mask, info) for ids, mask, info in sequences(5)]
    items[2][0][3] = VOCAB - 1
    with FeatureWriter(tmp_path, identity, shard_size=2) as writer:
        assert build_store(target, TAPS, writer, items) == 1
        assert writer.num_done == 5
    assert [FeatureStore(tmp_path).info(i)["index"] for i in range(4)] == [0, 1, 3, 4]
