"""Training prompts about code and text, made from the documentation of Python's standard library.

    python examples/recipes/stdlib_prompts.py --limit 1500 > stdlib.jsonl
    eagle4 data --target smollm2 --prompts stdlib.jsonl --out runs/data

Two kinds, in equal parts: a documented signature to be completed, and a passage to be summarised,
explained, rewritten or asked about. The same Python version writes the same prompts.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

COMPLETE = ("Complete this Python function.", "Finish the code.", "Implement the function below.")
ASK = (
    "Summarize the following text in two sentences.",
    "Explain this to a beginner.",
    "Rewrite the following text in plain words.",
    "List the most important points of this text.",
    "Extract all names of functions and arguments from the text and return them as JSON.",
    "Write three questions about the following text and answer them.",
    "Write a short email to a colleague about this.",
    "What is the following text about, and when would I need it?",
    "Turn this description into a numbered list of steps.",
    "Give an example for what is described here.",
    "Compare this with how you would do it by hand.",
    "Write a poem about the following text.",
)


def documented_functions(source: str) -> Iterator[tuple[str, str]]:
    """Header and docstring of every function that has a docstring of some length."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            text = ast.get_docstring(node)
            if text and 80 <= len(text) <= 900 and text.isascii():
                yield f"def {node.name}({ast.unparse(node.args)}):", text


def prompts(rng: random.Random) -> Iterator[str]:
    """Every function of the library once, as code or as text."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for header, text in documented_functions(path.read_text(encoding="utf-8")):
            if rng.random() < 0.5:
                indented = text.replace("\n", "\n    ")
                yield f'{rng.choice(COMPLETE)}\n\n{header}\n    """{indented}"""\n'
            else:
                yield f"{rng.choice(ASK)}\n\n{text}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Prompts from the standard library.")
    parser.add_argument("--limit", type=int, default=1500, help="prompts at most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    found = sorted(set(prompts(rng)))
    rng.shuffle(found)
    for prompt in found[: args.limit]:
        row = {"messages": [{"role": "user", "content": prompt}]}
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
