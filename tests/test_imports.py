"""Catches: a room that imports a later or a sibling room, a public name that appears or vanishes,
`torch.compile` outside the one file that may use it.

The order is: base <- cache <- {target, drafter, tree, harness, verify} <- engine <- modeling
<- {training, evaluation}; base is every other module or room. The five in braces are strangers to
each other, and only programs (`cli`, `demo`, `__main__`) stand above all.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "eagle4"
BASE, TOP = 0, 6
STAGES = ("target", "drafter", "tree", "harness", "verify")
RANK = {
    "cache": 1,
    **dict.fromkeys(STAGES, 2),
    "engine": 3,
    "modeling": 4,
    "training": 5,
    "evaluation": 5,
    "cli": TOP,
    "demo": TOP,
    "__main__": TOP,
    "__init__": TOP,
}
PUBLIC = {"Eagle4ForCausalLM", "Eagle4Config", "Eagle4Drafter", "SpeculativeConfig"}
FILES = sorted(PACKAGE.rglob("*.py"))


def room(parts: tuple[str, ...]) -> str:
    """The first name under the package: a folder, or a module that is a room of its own."""
    return Path(parts[0]).stem


def imported_rooms(tree: ast.AST, parts: tuple[str, ...]) -> set[str]:
    """Rooms that a module at ``parts`` imports, at any depth of the file."""
    package = ("eagle4", *parts[:-1])
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            names = [[*base, alias.name] for alias in node.names]
        found |= {name[1] for name in names if name[0] == "eagle4" and len(name) > 1}
    return {"__init__" if name in PUBLIC else name for name in found}


def violation(importer: str, imported: str) -> str | None:
    """Why a room may not import another; None if it may."""
    low, high = RANK.get(imported, BASE), RANK.get(importer, BASE)
    if importer == imported or importer in ("cli", "__main__", "__init__"):
        return None
    if importer in STAGES and imported in STAGES:
        return "stages never import each other"
    return "imports point one way" if low > high or low == TOP else None


def test_rooms_import_in_one_direction_only():
    wrong = []
    for path in FILES:
        parts = path.relative_to(PACKAGE).parts
        for imported in imported_rooms(ast.parse(path.read_text()), parts):
            if reason := violation(room(parts), imported):
                wrong.append(f"{'/'.join(parts)} imports {imported}: {reason}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "parts", "rooms"),
    [
        ("from ..types import Tree", ("tree", "grow.py"), {"types"}),
        ("from .. import engine", ("tree", "grow.py"), {"engine"}),
        ("from ...ops.x import y", ("ops", "triton", "x.py"), {"ops"}),
        ("from .grow import grow", ("tree", "__init__.py"), {"tree"}),
        ("def f():\n    import eagle4.engine.loop", ("tree", "grow.py"), {"engine"}),
        ("from eagle4 import Eagle4Config", ("tree", "grow.py"), {"__init__"}),
        ("import torch", ("config.py",), set()),
    ],
)
def test_the_reader_of_imports_sees_every_form(source, parts, rooms):
    assert imported_rooms(ast.parse(source), parts) == rooms


@pytest.mark.parametrize(
    ("importer", "imported", "is_allowed"),
    [
        ("tree", "types", True),
        ("engine", "tree", True),
        ("evaluation", "modeling", True),
        ("cli", "training", True),
        ("tree", "verify", False),
        ("tree", "engine", False),
        ("config", "cache", False),
        ("modeling", "training", False),
        ("evaluation", "cli", False),
        ("engine", "__init__", False),
    ],
)
def test_the_law_itself(importer, imported, is_allowed):
    assert (violation(importer, imported) is None) == is_allowed


def test_the_package_exposes_four_names_and_the_demo():
    program = (
        "import eagle4, types; "
        "eagle4.demo.smollm2; "
        "print(sorted(eagle4.__all__)); "
        "print(sorted(n for n, v in vars(eagle4).items() "
        "if not n.startswith('_') and not isinstance(v, types.ModuleType)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    exported, public = done.stdout.splitlines()
    # `__all__` may also list the demo module.
    assert set(ast.literal_eval(exported)) - {"demo"} == PUBLIC
    assert set(ast.literal_eval(public)) <= PUBLIC


def test_compilation_has_one_home():
    users = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.compile":
                users.append("/".join(path.relative_to(PACKAGE).parts))
            elif isinstance(node, ast.ImportFrom) and node.module == "torch":
                if any(alias.name == "compile" for alias in node.names):
                    users.append("/".join(path.relative_to(PACKAGE).parts))
    assert set(users) <= {"engine/graphs.py"}, users
