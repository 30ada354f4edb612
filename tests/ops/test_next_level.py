"""Catches: kernels that decide differently from the torch reference in one bit: ties, padding,
free or worthless nodes, counts at the limit. Runs under the Triton interpreter in a process of its
own (the interpreter is chosen when Triton is imported), and on a GPU where there is one.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle4.harness import device_policy
from eagle4.ops.next_level import best_worth, choose_nodes
from tests.harness.states import Shape, random_book, random_states


def compare(num_shapes: int, per_shape: int, seed: int, device: str = "cpu") -> int:
    """Compare ``impl="triton"`` with torch; returns the number of rounds."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(num_shapes):
        shape, book = Shape(rng), device_policy.device_book(random_book(rng), device)
        pool, frontier, probs, prices = (
            part.to(device)
            if isinstance(part, torch.Tensor)
            else type(part)(*(tensor.to(device) for tensor in part))
            for part in random_states(generator, shape, per_shape)
        )
        results = []
        for impl in ("torch", "triton"):
            level = device_policy.next_level(
                *(pool, frontier, probs, shape.depth, shape.max_depth, shape.min_width),
                *(shape.top_k, shape.max_nodes, book, prices),
                impl=impl,
            )
            chosen = device_policy.choose(pool, shape.max_nodes, prices, impl=impl)
            results.append((*level, chosen))
        for reference, kernel in zip(*results, strict=True):
            assert torch.equal(reference, kernel)
    return num_shapes * per_shape


def test_worth_and_choice_by_hand():
    half = 1 << 29
    survival = torch.tensor([[[half, half // 2, 0], [half, 1, 0]]])
    token, verify = torch.tensor([100]), torch.tensor([[0, 10, 20, 60, 100]])
    assert best_worth(survival.flatten(1), token, verify).tolist() == [80]
    chosen = choose_nodes(survival, token, verify, 2)
    assert chosen.tolist() == [[[True, False, False], [True, False, False]]]
    assert choose_nodes(survival, token, verify + torch.arange(5) * 99, 2).sum() == 0


def interpreted(program: str, timeout: int) -> str:
    """What a program prints under the interpreter."""
    root = Path(__file__).resolve().parents[2]
    path = f"{root}{os.pathsep}{root / 'tests'}"
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.ops.test_next_level import compare; {program}"],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=root,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_the_kernels_agree_under_the_interpreter():
    assert interpreted("print(compare(8, 2, 0))", timeout=300) == "16"


@pytest.mark.slow
def test_the_kernels_agree_under_the_interpreter_on_many_states():
    assert interpreted("print(compare(60, 8, 1))", timeout=1800) == "480"


@pytest.mark.parametrize("capability", [90, 100])
def test_the_kernels_compile_for_gpus_that_are_not_here(capability):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from eagle4.ops.triton import next_level as kernels

    pointers = {"int64": "*i64", "int32": "*i32", "int8": "*i8"}
    wide, narrow = pointers["int64"], pointers["int8"]
    offer = dict.fromkeys(("value_ptr", "token_ptr", "verify_ptr", "level_ptr"), wide)
    offer |= {"gain_ptr": wide, "width_ptr": wide, "code_ptr": pointers["int32"]}
    offer |= dict.fromkeys(("nodes", "rows", "widths"), "i32")
    sizes = {"MIN_WIDTH": 1, "WIDTH": 4, "FIRST": 2, "SECOND": 4, "PATH": 1 << 16, "BLOCK": 128}
    choose = dict.fromkeys(("survival_ptr", "token_ptr", "verify_ptr"), wide)
    choose |= {"chosen_ptr": narrow} | dict.fromkeys(("batch", "nodes", "rows"), "i32")
    limits = {"MAX_NODES": 16, "BATCH": 2, "NODES": 64}
    target = GPUTarget("cuda", capability, 32)
    for kernel, signature, constants in (
        (kernels._offer_kernel, offer, sizes),
        (kernels._choose_kernel, choose, limits),
    ):
        signature = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
        made = compile(ASTSource(kernel, signature, constants), target=target)
        assert made.asm["cubin"]


@pytest.mark.cuda
def test_the_kernels_agree_on_the_device():
    assert compare(200, 64, 1, "cuda") == 12_800
