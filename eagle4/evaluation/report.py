"""Results as Markdown for people and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .lossless import Divergence, LosslessReport

Summary = Mapping[str, Mapping[str, Any]]


def benchmark_markdown(result: Mapping[str, Any]) -> str:
    """Tables of a benchmark result (`summary`, `setup`, `environment`)."""
    parts = [
        "# Benchmark",
        _setup_lines(result),
        "## Speed",
        _speed_table(result["summary"]["all"]),
    ]
    depths = _depth_table(result["summary"]["all"])
    if depths:
        parts += ["## Acceptance by depth", depths]
    if len(result["summary"]) > 1:
        parts += ["## By category", _category_table(result["summary"])]
    parts.append(
        "Tokens/s: all new tokens / all seconds, prefill included. Ratios: medians of per-prompt "
        "paired quotients. Accept length: committed tokens per target verification, bonus included."
    )
    return "\n\n".join(parts) + "\n"


def lossless_markdown(result: Mapping[str, Any], report: LosslessReport) -> str:
    """The verdict, the counts per pair and every divergence."""
    verdict = "passed" if report.is_ok else "FAILED"
    pairs = [
        [f"{a} = {b}", report.compared[a, b], report.equal[a, b], *_kinds(report, (a, b))]
        for a, b in report.compared
    ]
    parts = [
        f"# Losslessness check: {verdict}",
        _setup_lines(result),
        markdown_table(["pair", "answers", "equal", "near ties", "unexplained"], pairs),
    ]
    if report.idle_arms:
        parts.append(f"Nothing was proved for {report.idle_arms}: no drafted node was verified.")
    if report.divergences:
        head = ["prompt", "turn", "pair", "token", "texts", "verdict", "fp32 gap", "noise"]
        parts += ["## Divergences", markdown_table(head, map(_divergence_row, report.divergences))]
    return "\n\n".join(parts) + "\n"


def lossless_record(report: LosslessReport) -> dict[str, Any]:
    """The report as plain values for JSON."""
    return {
        "ok": report.is_ok,
        "tokens": report.tokens,
        "pairs": {
            f"{a} = {b}": {"compared": count, "equal": report.equal[a, b]}
            for (a, b), count in report.compared.items()
        },
        "near_ties": len(report.divergences) - len(report.unexplained),
        "unexplained": len(report.unexplained),
        "idle_arms": report.idle_arms,
        "speculation": report.speculation,
        "divergences": [asdict(divergence) for divergence in report.divergences],
    }


def write_files(prefix: str | Path, result: Mapping[str, Any], markdown: str) -> list[Path]:
    """``prefix.json`` and ``prefix.md``; folders are created."""
    prefix = Path(prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    paths = [prefix.with_name(prefix.name + suffix) for suffix in (".json", ".md")]
    paths[0].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(markdown, encoding="utf-8")
    return paths


def markdown_table(head: Sequence[str], rows) -> str:
    """A table whose columns line up also as plain text."""
    table = [[_cell_text(value) for value in row] for row in (head, *rows)]
    widths = [max(3, *(len(row[i]) for row in table)) for i in range(len(head))]
    lines = [
        "| " + " | ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)) + " |"
        for row in table
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _cell_text(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "\\n")


def _setup_lines(result: Mapping[str, Any]) -> str:
    facts = {**result["setup"], **result["environment"]}
    facts["versions"] = ", ".join(f"{k} {v}" for k, v in facts["versions"].items())
    return "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in facts.items())


def _speed_table(arms: Summary) -> str:
    ratios = [key for key in next(iter(arms.values())) if key.startswith("ratio_to_")]
    equals = [key for key in next(iter(arms.values())) if key.startswith("cells_equal_to_")]
    head = ["arm", "tokens/s", *(key.replace("ratio_to_", "x ") for key in ratios)]
    head += ["accept length", "target calls", "tokens"]
    head += [key.replace("cells_equal_to_", "same text as ") for key in equals]
    rows = [
        [arm, s["tokens_per_s"], *(f"{s[key]:.2f}" for key in ratios)]
        + [s.get("accept_length", ""), s.get("target_calls", ""), s["tokens"]]
        + [f"{s[key]}/{s['cells']}" for key in equals]
        for arm, s in arms.items()
    ]
    return markdown_table(head, rows)


def _depth_table(arms: Summary) -> str:
    rows = {
        arm: summary["acceptance_by_depth"]
        for arm, summary in arms.items()
        if summary.get("acceptance_by_depth")
    }
    if not rows:
        return ""
    deepest = max(map(len, rows.values()))
    head = ["arm", *(f"depth {d}" for d in range(1, deepest + 1))]
    return markdown_table(
        head, ([arm, *row, *[""] * (deepest - len(row))] for arm, row in rows.items())
    )


def _category_table(summary: Mapping[str, Summary]) -> str:
    arms = list(summary["all"])
    head = ["category", *(f"{arm} tok/s" for arm in arms), *(f"{arm} accept" for arm in arms)]
    rows = (
        [group, *(arm["tokens_per_s"] for arm in of.values())]
        + [arm.get("accept_length", "") for arm in of.values()]
        for group, of in summary.items()
    )
    return markdown_table(head, rows)


def _kinds(report: LosslessReport, pair: tuple[str, str]) -> tuple[int, int]:
    explained = [d.is_explained for d in report.divergences if d.arms == pair]
    return sum(explained), len(explained) - sum(explained)


def _divergence_row(divergence: Divergence) -> list[Any]:
    judged = divergence.arbitration
    return [
        divergence.prompt_id,
        divergence.turn,
        " = ".join(divergence.arms),
        divergence.position,
        " / ".join(repr(text) for text in divergence.texts),
        divergence.kind,
        f"{judged.gap:.2e}" if judged else "",
        f"{judged.noise:.2e}" if judged else "",
    ]
