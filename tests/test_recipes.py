"""Catches: a documented recipe that no longer runs, a target with scaled embeddings, alternating
windows and one KV head that training cannot serve. The recipe's own commands, on small sizes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import torch
from tiny import tiny_tokenizer
from zoo import VOCAB, build

from eagle4 import Eagle4Drafter, Eagle4ForCausalLM
from eagle4.cli import main

RECIPE = Path(__file__).resolve().parents[1] / "examples" / "recipes" / "gemma3-270m.md"
SMALL = {
    "data": "--synthesize 10 --max-new-tokens 40 --dtype float32 --temperatures 0",
    "train": "--steps 3 --set batch_size=2 --set num_anchors=6 --set num_depths=2 "
    "--set held_out_fraction=0.3 --set eval_every=2 --set decode_prompts=2 "
    "--set decode_tokens=12 --drafter-set candidate_rank=8 --drafter-set num_candidates=16 "
    "--candidate-set steps=3 --candidate-set num_runs=4 --candidate-set rows=16",
}
SWEEP = "--sweep 4,8 --set num_anchors=6 --set held_out_fraction=0.3 --candidate-set steps=0"


def commands() -> list[list[str]]:
    block = RECIPE.read_text().split("```bash\n")[1].split("```")[0]
    return [shlex.split(line)[1:] for line in block.strip().splitlines()]


def test_the_gemma_recipe_runs_at_small_scale(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    target = build("gemma3", num_key_value_heads=1, sliding_window=16, final_logit_softcapping=None)
    target.save_pretrained("gemma3-270m")
    tiny_tokenizer(VOCAB).save_pretrained("gemma3-270m")
    data, train, sweep = commands()
    assert [words[0] for words in (data, train, sweep)] == ["data", "train", "train"]
    assert main([*data, *shlex.split(SMALL["data"])]) == 0
    assert main([*train, *shlex.split(SMALL["train"]), "--dry-run"]) == 0
    dry = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (
        dry["dry_run"] and dry["seconds_per_step"] > 0 and not Path("runs/gemma3/drafter").exists()
    )
    assert main([*train, *shlex.split(SMALL["train"])]) == 0
    assert main([*sweep, *shlex.split(SWEEP)]) == 0
    points = json.loads(capsys.readouterr().out.splitlines()[-1])["sweep"]
    assert [point["rank"] for point in points] == [4, 8]
    drafter = Eagle4Drafter.from_pretrained("runs/gemma3/drafter")
    assert drafter.config.sliding_window == 512 and drafter.config.num_key_value_heads == 1
    assert "Taps after blocks" in Path("runs/gemma3/drafter/README.md").read_text()
    pair = Eagle4ForCausalLM.from_pretrained("gemma3-270m", drafter, dtype=torch.float32)
    ids = torch.tensor([[5, 9, 13]])
    options = {"max_new_tokens": 24, "do_sample": False}
    fast = pair.generate(ids, speculative={"harness": False}, **options)
    assert torch.equal(fast, pair.target.generate(ids, **options))
