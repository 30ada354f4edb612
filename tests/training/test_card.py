"""Can catch: a card that says another structure, data or number than the run's, or that overwrites
a card that somebody wrote."""

from eagle4.training.card import card_text, write_card
from eagle4.training.settings import TrainConfig
from tests.training.small import tiny_drafter, tiny_store, tiny_target

METRICS = {
    "tau_chain": 2.345,
    "tau_walk": 2.1,
    "tau_measured": 2.05,
    "tau_top4": 3.0,
    "candidate_recall": {"weighted": [0.99, 0.97], "trained": [0.995, 0.993]},
    "steps": 77,
    "train_seconds": 600,
}


def test_the_card_says_what_the_run_was(tmp_path):
    target = tiny_target()
    store = tiny_store(tmp_path / "store", target)
    drafter = tiny_drafter(target, num_experts=4, candidate_rank=4, num_candidates=8)
    text = card_text(target, drafter, store, TrainConfig(lr=0.5), METRICS)
    assert text.startswith("---\nbase_model: ") and "library_name: eagle4" in text
    for part in ("Taps after blocks 0, 1, 2", "4 experts, 2 per token", "rank 4 with 8"):
        assert part in text, part
    assert f"{store.manifest['num_tokens']} tokens" in text
    assert "77 steps (10 minutes); settings: --set lr=0.5" in text
    for part in ("| 2.35 |", "| 2.05 |", "| 0.9930 or more |"):
        assert part in text, part


def test_a_written_card_stays(tmp_path):
    target = tiny_target()
    store = tiny_store(tmp_path / "store", target, num_sequences=1)
    drafter = tiny_drafter(target)
    path = write_card(tmp_path, target, drafter, store, TrainConfig(), {})
    path.write_text("mine")
    write_card(tmp_path, target, drafter, store, TrainConfig(), {})
    assert path.read_text() == "mine"


def test_a_local_path_stays_local(tmp_path):
    target = tiny_target()
    store = tiny_store(tmp_path / "store", target, num_sequences=1)
    (tmp_path / "my-model").mkdir()
    target.config._name_or_path = str(tmp_path / "my-model")
    text = card_text(target, tiny_drafter(target), store, TrainConfig(), {})
    assert "base_model: my-model\n" in text and str(tmp_path) not in text
