"""Catches: a subcommand that does not run, an error without advice or with the wrong exit status, a
last line that no program can read, a failed check that exits with 0."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

from eagle4 import Eagle4Config, Eagle4Drafter
from eagle4.cli import common, main, measure
from eagle4.cli.parser import build_parser

COMMANDS = ("generate", "chat", "data", "train", "convert", "profile", "bench", "check")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Arguments that name a tiny target and a random drafter on disk, in fp32: in bf16 a random
    model's near ties may fall either way."""
    root = tmp_path_factory.mktemp("models")
    target = tiny.tiny_llama()
    target.save_pretrained(root / "target")
    tiny.tiny_tokenizer().save_pretrained(root / "target")
    torch.manual_seed(0)
    config = Eagle4Config.for_target(target.config, candidate_rank=8, num_candidates=16)
    Eagle4Drafter(config).save_pretrained(root / "drafter")
    parts = ["--target", str(root / "target"), "--drafter", str(root / "drafter")]
    return [*parts, "--dtype", "float32"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"question_id": i, "category": "c", "turns": [f"w{i} w9", "w3"]} for i in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return ["--prompts", str(path), "--max-new-tokens", "6"]


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_and_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert f"example:\n  eagle4 {command}" in text


def test_the_examples_in_the_help_parse(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        example = capsys.readouterr().out.split("example:\n")[1].strip()
        assert build_parser().parse_args(shlex.split(example)[1:]).command == command


def test_generate_prints_the_answer_and_the_numbers(folders, capsys):
    assert main(["generate", *folders, "--prompt", "w1 w2", "--max-new-tokens", "5"]) == 0
    speculative = capsys.readouterr()
    assert "target calls" in speculative.err and speculative.out.strip()
    main(["generate", *folders, "--prompt", "w1 w2", "--max-new-tokens", "5", "--plain"])
    assert capsys.readouterr().out == speculative.out


def test_raw_text_skips_the_chat_template(folders, capsys):
    main(["generate", *folders, "--prompt", "w1 w2", "--max-new-tokens", "5", "--raw"])
    raw = capsys.readouterr().out
    main(["generate", *folders, "--prompt", "w1 w2", "--max-new-tokens", "5"])
    assert raw != capsys.readouterr().out


def test_chat_keeps_the_conversation(folders, monkeypatch, capsys):
    lines = iter(["w1", "w2", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert main(["chat", *folders, "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().err.count("target calls") == 2


def test_bench_writes_files_and_one_json_line(folders, prompts, tmp_path, capsys):
    out = str(tmp_path / "results" / "bench")
    assert main(["bench", *folders, *prompts, "--turns", "2", "--out", out]) == 0
    line = last_line(capsys)
    assert line["command"] == "bench" and set(line["arms"]) == {"transformers", "plain", "eagle4"}
    assert line["arms"]["eagle4"]["cells_equal_to_plain"] == line["arms"]["eagle4"]["cells"] == 6
    assert line["arms"]["eagle4"]["accept_length"] >= 1.0
    record = json.loads((tmp_path / "results" / "bench.json").read_text())
    assert len(record["cells"]) == 6 and record["environment"]["versions"]["torch"]
    assert "accept length" in (tmp_path / "results" / "bench.md").read_text()


@pytest.mark.parametrize("mode", ["on", "off"])
def test_compile_reaches_the_model_and_the_record(mode, folders, prompts, tmp_path, monkeypatch):
    compiled = []

    def compile(function, **kwargs):
        compiled.append(function.__name__)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    out, arms = str(tmp_path / "bench"), ["--arms", "plain,eagle4"]
    assert main(["bench", *folders, *prompts, *arms, "--compile", mode, "--out", out]) == 0
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["setup"]["compile"] == mode
    assert set(compiled) == ({"draft", "propose", "run_blocks"} if mode == "on" else set())


def test_check_passes_on_equal_output(folders, prompts, capsys):
    arms = ["--arms", "transformers,plain,eagle4,chain"]
    assert main(["check", *folders, *prompts, *arms, "--batch-size", "2"]) == 0
    line = last_line(capsys)
    assert line["ok"] and line["unexplained"] == 0
    assert line["pairs"]["plain = eagle4"] == {"compared": 3, "equal": 3}
    assert len(line["pairs"]) == 6


def test_check_fails_on_a_wrong_token(folders, prompts, monkeypatch, capsys):
    def broken_arms(*args):
        arms = real(*args)
        honest = arms["eagle4"]

        def wrong(inputs, max_new_tokens):
            run = honest(inputs, max_new_tokens)
            return run._replace(tokens=[[(row[0] + 1) % 96, *row[1:]] for row in run.tokens])

        return {**arms, "eagle4": wrong}

    real = measure.make_arms
    monkeypatch.setattr(measure, "make_arms", broken_arms)
    assert main(["check", *folders, *prompts]) == 1
    line = last_line(capsys)
    assert not line["ok"] and line["unexplained"] == 6


def test_check_of_sampled_decoding(folders, prompts, capsys):
    sampled = ["--temperature", "0.8", "--seed", "4", "--dtype", "float32"]
    arms = ["--arms", "plain,eagle4,chain"]
    assert main(["check", *folders, *prompts, *sampled, *arms]) == 0
    line = last_line(capsys)
    assert line["ok"] and len(line["pairs"]) == 3
    assert main(["check", *folders, *prompts, *sampled]) == 2
    assert "shared noise" in capsys.readouterr().err


def test_from_prompts_to_a_drafter_that_generates(folders, tmp_path, capsys):
    prompts = tmp_path / "train.jsonl"
    rows = [{"conversations": [{"role": "user", "content": f"w{i} w{i + 3}"}]} for i in range(8)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    data, run = str(tmp_path / "data"), str(tmp_path / "run")
    words = ["data", *folders[:2], "--prompts", str(prompts), "--out", data]
    words += ["--max-new-tokens", "24", "--limit", "6", "--batch-size", "3"]
    assert main(words) == 0
    first = last_line(capsys)
    # answers of fewer than four tokens teach nothing and are left out
    assert 4 <= first["num_sequences"] <= 6 and first["unusable"] == 0
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert manifest["statistics"]["sequences"] == first["num_sequences"]
    assert main(words) == 0 and last_line(capsys) == first, "a second call finds everything there"

    words = ["train", *folders[:2], "--data", data, "--out", run, "--steps", "2"]
    for setting in ("batch_size=2", "num_anchors=4", "num_depths=2", "held_out_fraction=0.2"):
        words += ["--set", setting]
    for setting in ("intermediate_size=48", "candidate_rank=8", "num_candidates=16"):
        words += ["--drafter-set", setting]
    assert main(words) == 0
    trained = last_line(capsys)["out"]
    words = ["train", *folders[:2], "--data", data, "--out", run + "2", "--init", trained]
    assert main([*words, "--steps", "1", "--set", "num_anchors=4", "--set", "lr=0.0001"]) == 0
    assert Path(last_line(capsys)["out"]).is_dir()
    bare = str(tmp_path / "bare")
    words = ["data", *folders[:2], "--prompts", str(prompts), "--out", bare, "--no-features"]
    assert main([*words, "--max-new-tokens", "24", "--limit", "6"]) == 0
    assert last_line(capsys)["num_sequences"] >= 4 and not (tmp_path / "bare/features").exists()
    words = ["train", *folders[:2], "--data", bare, "--out", run + "3", "--init", trained]
    words += ["--steps", "1", "--set", "num_anchors=4"]
    assert main(words) == 2 and "not a feature store" in capsys.readouterr().err
    assert main([*words, "--online"]) == 0 and Path(last_line(capsys)["out"]).is_dir()
    assert Eagle4Drafter.from_pretrained(trained).config.intermediate_size == 48
    words = ["generate", *folders[:2], "--drafter", trained, "--prompt", "w1", "--max-new-tokens"]
    assert main([*words, "4"]) == 0


def test_an_eagle3_drafter_is_converted_and_trained_on(folders, tmp_path, capsys):
    target = tiny.tiny_llama()
    torch.manual_seed(0)
    eagle3 = {"eh_proj": False, "fc_norm": False, "norm_output": False, "candidate_rank": 0}
    config = Eagle4Config.for_target(target.config, **eagle3)
    Eagle4Drafter(config).save_pretrained(tmp_path / "mine")
    convert = ["convert", "--drafter", str(tmp_path / "mine"), "--layout", "eagle3"]
    assert main([*convert, "--out", str(tmp_path / "theirs")]) == 2
    assert "--target" in capsys.readouterr().err
    assert main([*convert, "--out", str(tmp_path / "theirs"), *folders[:2]]) == 0
    found = Eagle4Drafter.from_pretrained(tmp_path / "theirs")
    assert found.config.own_lm_head and not found.config.eh_proj
    data = ["data", *folders[:2], "--synthesize", "6", "--max-new-tokens", "20"]
    assert main([*data, "--temperatures", "0.8", "--out", str(tmp_path / "data")]) == 0
    words = [
        "train",
        *folders[:2],
        "--data",
        str(tmp_path / "data"),
        "--out",
        str(tmp_path / "run"),
    ]
    for setting in ("num_anchors=4", "held_out_fraction=0.3", "decode_prompts=1"):
        words += ["--set", setting]
    words += ["--candidate-set", "steps=1", "--candidate-set", "num_runs=2", "--steps", "1"]
    assert main([*words, "--init", str(tmp_path / "theirs")]) == 0
    trained = Eagle4Drafter.from_pretrained(tmp_path / "run" / "drafter").config
    assert trained.eh_proj and trained.fc_norm and trained.own_lm_head and trained.candidate_rank


def test_convert_round_trip(folders, tmp_path, capsys):
    out = tmp_path / "converted"
    assert main(["convert", "--drafter", folders[3], "--out", str(out)]) == 0
    assert last_line(capsys)["parameters"] > 0
    before = Eagle4Drafter.from_pretrained(folders[3]).state_dict()
    after = Eagle4Drafter.from_pretrained(out).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "--target", "nowhere"], "--drafter"),
        (["bench", "--prompts", "missing.jsonl"], "missing.jsonl"),
        (["bench", "--arms", "plain,magic"], "magic"),
        (["bench", "--limit", "0"], "--limit"),
        (["bench", "--repeats", "0"], "repeats"),
        (["check", "--arms", "eagle4"], "two arms"),
        (["check", "--max-depth", "0"], "max_depth"),
        (["generate", "--prompt", "w1", "--dtype", "float7"], "float7"),
        (["data", "--out", "x", "--target", "nowhere"], "--synthesize"),
        (["train", "--target", "nowhere", "--data", "missing", "--out", "x"], "missing"),
        (["train", "--target", "x", "--data", "x", "--out", "x", "--set", "stepz=3"], "stepz"),
        (["convert", "--drafter", "missing", "--out", "x"], "missing"),
        (["data", "--out", "x", "--prompts", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_mistakes_are_one_line_and_status_2(folders, arguments, message, capsys):
    is_complete = "--target" in arguments or arguments[0] == "convert"
    status = main([arguments[0], *([] if is_complete else folders), *arguments[1:]])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert status == 2 and not Path("x").exists()
    assert error.startswith(f"eagle4 {arguments[0]}: error: ") and message in error


def test_usage_errors_are_status_2(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--mode", "forest"])
    assert stop.value.code == 2 and "forest" in capsys.readouterr().err


def test_verbose_shows_the_traceback(folders):
    with pytest.raises(ValueError):
        main(["-v", "bench", *folders, "--limit", "0"])


def test_the_demo_words_name_the_demo_parts(monkeypatch, tmp_path):
    monkeypatch.setattr(common.demo, "drafter_path", lambda: tmp_path / "shipped")
    args = build_parser().parse_args(["bench"])
    assert common.drafter_source(args) == str(tmp_path / "shipped")
    args = build_parser().parse_args(["bench", "--target", "other", "--drafter", "smollm2"])
    assert common.drafter_source(args) == str(tmp_path / "shipped")


def test_python_dash_m_runs_it():
    done = subprocess.run(
        [sys.executable, "-m", "eagle4", "--help"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0 and "bench" in done.stdout
