"""Catches: a closed form that is not the recurrence (siblings that see each other, a parent that is
not the row before, decays along the wrong way), gates near 0 and 1 that cost precision or give NaN,
rows or states that are read though nobody asked for them; a kernel that differs from torch. The
kernel runs under the Triton interpreter in a process of its own, and on a GPU where there is one.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import interpreted
import pytest
import torch

from eagle4.ops import TreePaths, advance_gdn_, tree_gdn
from eagle4.ops.tree_gdn import tree_gdn_reference
from eagle4.tree import ancestor_matrix

BATCH, GROUPS, HEADS, KEY, VALUE = 4, 2, 4, 8, 12


class Case(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor | None
    state: torch.Tensor
    parent: torch.Tensor

    @property
    def paths(self):
        return TreePaths(ancestor_matrix(self.parent))

    @property
    def inputs(self):
        return self.query, self.key, self.value, self.decay, self.beta, self.state

    def closed(self, impl: str = "torch") -> torch.Tensor:
        return tree_gdn(*self.inputs, self.paths, impl=impl)

    def recurrence(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return tree_gdn_reference(*self.inputs[:-1], self.state.to(dtype), self.parent)


def parents(kind: str, rows: int, rng: random.Random) -> list[int]:
    """Row 0 is the root; chains are as deep as they are long."""
    if kind == "chain":
        return list(range(-1, rows - 1))
    if kind == "star":
        return [-1] + [0] * (rows - 1)
    if kind == "forest":  # several rows that continue the committed state
        return [rng.randrange(-1, row) if row else -1 for row in range(rows)]
    return [-1] + [rng.randrange(row) for row in range(1, rows)]


def make(
    kind: str, rows: int, seed: int, gates: str = "any", has_beta: bool = True, batch: int = BATCH
) -> Case:
    """Random inputs; keys of length 1 that are often alike, as trained ones are."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    parent = torch.tensor([parents(kind, rows, rng) for _ in range(batch)])

    def normal(*shape):
        return torch.randn(shape, generator=g)

    shape = (batch, rows, HEADS)
    key = normal(batch, rows, GROUPS, KEY) + 2 * normal(batch, 1, GROUPS, KEY)
    open_, closed = -1e-7 * torch.rand(shape, generator=g), -torch.rand(shape, generator=g) * 1e6
    decay = {
        "any": -torch.empty(shape).exponential_(2.0, generator=g),
        "open": open_,
        "closed": closed,
        "mixed": torch.where(torch.rand(shape, generator=g) < 0.3, closed, open_),
        "shut": torch.where(torch.rand(shape, generator=g) < 0.3, -torch.inf, open_),
    }[gates]
    return Case(
        normal(batch, rows, GROUPS, KEY),
        key / key.norm(dim=-1, keepdim=True),
        normal(batch, rows, HEADS, VALUE),
        decay,
        torch.rand(shape, generator=g) * 1.9 if has_beta else None,
        normal(batch, HEADS, KEY, VALUE),
        parent,
    )


def excess(case: Case, found: torch.Tensor) -> float:
    """Error against float64, in units of what the float32 recurrence may err itself."""
    exact, _ = case.recurrence(torch.float64)
    single, _ = case.recurrence(torch.float32)
    scale = exact.abs().amax()
    own = (single - exact).abs().amax()
    return float((found - exact).abs().amax() / torch.maximum(own, scale * 2**-22))


KINDS = ("tree", "chain", "star", "forest")


def test_a_thousand_trees_are_the_recurrence():
    worst, trees = 0.0, 0
    for seed in range(250):
        kind = KINDS[seed % len(KINDS)]
        rows = 17 if seed < 8 else random.Random(seed).randint(1, 17)
        case = make(kind, rows, seed, has_beta=seed % 5 > 0)
        worst = max(worst, excess(case, case.closed()))
        trees += BATCH
    print(f"{trees} trees, largest error {worst:.1f} x that of the float32 recurrence")
    assert trees == 1000 and worst < 4


@pytest.mark.parametrize("gates", ["open", "closed", "mixed", "shut"])
@pytest.mark.parametrize("has_beta", [True, False])
def test_gates_near_0_and_1(gates, has_beta):
    for seed, kind in enumerate(KINDS):
        case = make(kind, 17, seed, gates, has_beta)
        out = case.closed()
        assert torch.isfinite(out).all()
        assert excess(case, out) < 16


def test_a_path_does_not_see_the_other_branches():
    case = make("tree", 12, 3)
    ancestors = ancestor_matrix(case.parent)
    row = 11
    loud = [x.clone() for x in case.inputs[:5]]
    for x in loud:
        x[~ancestors[:, row]] = 1e3
    loud[3][~ancestors[:, row]] = -1e3  # decays are not positive
    out = tree_gdn(*loud, case.state, case.paths)
    assert torch.allclose(out[:, row], case.closed()[:, row], atol=1e-6, rtol=1e-5)


def test_only_the_named_states_are_read():
    case = make("tree", 9, 4)
    slots = torch.tensor([6, 1, 0, 3])
    pool = torch.full((8, HEADS, KEY, VALUE), torch.nan)
    pool[slots] = case.state
    before = pool.clone()
    found = tree_gdn(*case.inputs[:5], pool, case.paths, slots)
    assert torch.equal(found, case.closed())
    assert torch.equal(pool.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("has_beta", [True, False])
def test_a_chain_runs_into_the_state(rows, has_beta):
    case = make("chain", rows, rows, has_beta=has_beta)
    exact, states = case.recurrence(torch.float64)
    state = case.state.clone()
    query, *rest, _, _ = case
    out = advance_gdn_(state, *rest, query)
    assert torch.allclose(out.double(), exact, atol=2e-5, rtol=1e-5)
    assert torch.allclose(state.double(), states[:, -1], atol=2e-5, rtol=1e-5)
    silent = case.state.clone()
    assert advance_gdn_(silent, *rest) is None and torch.equal(silent, state)


def test_empty_rows_change_nothing():
    case = make("chain", 3, 5)
    state, zeros = case.state.clone(), torch.zeros_like
    advance_gdn_(state, case.key, zeros(case.value), zeros(case.decay), zeros(case.beta))
    assert torch.equal(state, case.state)


def test_inputs_in_bf16_are_computed_in_float32():
    case = make("tree", 9, 6)
    low = [x.bfloat16() for x in case.inputs[:5]]
    wanted = tree_gdn(*(x.float() for x in low), case.state, case.paths)
    assert torch.equal(tree_gdn(*low, case.state, case.paths), wanted)


# -- the kernel ----------------------------------------------------------------------------------


def compare(cases: int, batch: int, device: str = "cpu") -> float:
    """Largest excess of the kernel over random cases, extreme gates among them."""
    worst = 0.0
    for seed in range(cases):
        rng = random.Random(seed)
        gates = rng.choice(["any", "mixed", "shut"])
        case = make(KINDS[seed % 4], rng.randint(1, 20), seed, gates, seed % 3 > 0, batch)
        moved = Case(*(x if x is None else x.to(device) for x in case))
        out = moved.closed("triton").cpu()
        assert torch.isfinite(out).all()
        worst = max(worst, excess(case, out))
    return worst


def test_the_kernel_agrees_under_the_interpreter():
    program = "from tests.ops.test_tree_gdn import compare; print(compare(6, 1))"
    assert float(interpreted.output(program)) < 16


@pytest.mark.parametrize(
    ("capability", "rows"),
    [
        (90, 32),
        (100, 16),
        pytest.param(90, 64, marks=pytest.mark.slow),
        pytest.param(100, 64, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_compiles_for_gpus_that_are_not_here(capability, rows):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from eagle4.ops.triton.tree_gdn import _tree_gdn_kernel as kernel

    float32 = ("query", "key", "decay", "beta", "state", "out")
    signature = {f"{name}_ptr": "*fp32" for name in float32}
    signature |= {"value_ptr": "*bf16", "slot_ptr": "*i64", "bits_ptr": "*i64"}
    signature |= dict.fromkeys(("rows", "heads", "groups", "key_width", "value_width"), "i32")
    constants = {"HAS_BETA": True, "ROWS": rows, "KEY": 128, "BLOCK_V": 32}
    signature = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    made = compile(
        ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32)
    )
    assert made.asm["cubin"]


def test_a_tree_that_does_not_fit_into_a_program_is_refused():
    case = make("chain", 65, 0)
    with pytest.raises(ValueError, match="65 rows .* at most 64"):
        case.closed("triton")


@pytest.mark.cuda
def test_the_kernel_agrees_on_the_device():
    assert compare(200, 4, "cuda") < 16
