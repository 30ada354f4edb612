"""Every kernel launch of `eagle4.ops.triton` as the operators make it for models of real size.

Launchers run on meta tensors with the launch itself replaced, so what is compiled ahead of time is
what would run: the same constants, the same number of warps, the same specialisation.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from triton.runtime.jit import JITFunction

import eagle4.ops.triton
from eagle4.ops import PagedView
from eagle4.types import Candidates, Tree

OPTIONS = ("num_warps", "num_stages", "launch_pdl")
POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
}


class Launch(NamedTuple):
    """One launch: what `triton.compiler.ASTSource` and `triton.compile` need to know."""

    kernel: JITFunction
    signature: dict[str, str]
    constants: dict[str, Any]
    attrs: dict[tuple[int], list]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


def modules() -> list[Any]:
    names = [found.name for found in pkgutil.iter_modules(eagle4.ops.triton.__path__)]
    return [importlib.import_module(f"eagle4.ops.triton.{name}") for name in names]


def all_kernels() -> set[str]:
    """Names of everything that is launched."""
    return {
        name
        for module in modules()
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }


def describe(kernel: JITFunction, args: tuple, kwargs: dict[str, Any]) -> Launch:
    """What the just-in-time compiler would make of these arguments."""
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    assert set(values) == set(kernel.arg_names), kernel.fn.__name__
    signature, constants, attrs = {}, {}, {}
    for index, param in enumerate(kernel.params):
        value = values[param.name]
        if param.is_constexpr or (type(value) is int and value == 1):
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = POINTERS[value.dtype]
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32" if abs(value) < 1 << 31 else "i64"
        is_aligned = isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0)
        if signature[param.name] != "constexpr" and is_aligned:
            attrs[(index,)] = [["tt.divisibility", 16]]
    return Launch(kernel, signature, constants, attrs, options)


@contextmanager
def recorded(found: list[Launch]) -> Iterator[None]:
    """Inside, launches are noted instead of made."""

    class Recorder:
        def __init__(self, kernel: JITFunction):
            self.kernel = kernel

        def __getitem__(self, grid):
            assert all(int(size) > 0 for size in grid)
            return lambda *args, **kwargs: found.append(describe(self.kernel, args, kwargs))

    saved = [
        (module, name, getattr(module, name))
        for module in modules()
        for name in ("wrap_triton", "opaque")
        if hasattr(module, name)
    ]
    for module, name, _ in saved:
        setattr(module, name, Recorder)
    try:
        yield
    finally:
        for module, name, value in saved:
            setattr(module, name, value)


def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attention(width: int, groups: int, dtype: torch.dtype, rows: int = 17, **options) -> None:
    """``rows`` rows of 2 sequences with 32k tokens of context, in parts and in one."""
    from eagle4.ops.triton.paged_attention import paged_attention

    heads = 8
    pool = empty(1 << 20, heads, width, dtype=dtype)
    words = -(-rows // 64)
    view = PagedView(empty(2, 512), empty(2), empty(2, rows, words), empty(2, rows), empty(2, rows))
    query = empty(2, rows, heads * groups, width, dtype=dtype)
    if options.pop("has_sinks", False):
        options["sinks_H"] = empty(heads * groups, dtype=dtype)
    for splits in (1, 16):
        paged_attention(query, pool, pool, view, 64, num_splits=splits, **options)


def head(dtype: torch.dtype, vocab: int = 151_936, hidden: int = 4096) -> None:
    from eagle4.ops.triton.candidate_head import best_candidates, exact_logits

    low, up = empty(4, 128, dtype=dtype), empty(vocab, 128, dtype=dtype)
    best_candidates(low, up, 128)
    weight, rows = empty(vocab, hidden, dtype=dtype), empty(4, hidden, dtype=dtype)
    for bias in (None, empty(vocab, dtype=dtype)):
        exact_logits(weight, bias, rows, empty(4, 128))


def drafter(dtype: torch.dtype, hidden: int = 4096) -> None:
    """Input stage, linears and, split, sums; move_rows and small_linear launch by themselves."""
    from eagle4.ops.sum_add_norm import Peers
    from eagle4.ops.triton import small_gemm
    from eagle4.ops.triton.input_stage import normed_linear
    from eagle4.ops.triton.sum_add_norm import sum_add_norm

    for parts, rows in ((3, 17), (2, 4)):
        part, gain = empty(rows, hidden, dtype=dtype), empty(hidden, dtype=dtype)
        weight = empty(hidden, parts * hidden, dtype=dtype)
        normed_linear([part] * parts, [gain] * parts, weight, 1e-6)
    for world in (2, 8):
        sum_add_norm(part, part, gain, 1e-6, Peers(part, empty(world), 3))
    normed_linear([part] * 3, [], empty(hidden, 3 * hidden, dtype=dtype), 0.0)
    saved, small_gemm._has_pdl = small_gemm._has_pdl, lambda device: True
    try:
        for rows, bias in ((4, None), (64, empty(hidden, dtype=dtype))):
            tensors = empty(rows, hidden, dtype=dtype), empty(hidden, hidden, dtype=dtype)
            small_gemm._small_linear._init_fn(*tensors, bias)
    finally:
        small_gemm._has_pdl = saved


def tree(top_k: int = 4, nodes: int = 16, capacity: int = 180) -> None:
    from eagle4.ops.triton import move_rows
    from eagle4.ops.triton.accept_walk import accept_walk
    from eagle4.ops.triton.ancestors import ancestor_words
    from eagle4.ops.triton.grow_level import grow_level
    from eagle4.ops.triton.prune import prune

    def columns(width: int) -> Tree:
        score = empty(2, width, dtype=torch.float32)
        return Tree(empty(2, width), empty(2, width), empty(2, width), score, empty(2))

    children = empty(2 * top_k, top_k)
    logp = empty(2 * top_k, top_k, dtype=torch.float32)
    grow_level(columns(capacity), empty(2, top_k), Candidates(children, logp), top_k)
    prune(columns(capacity), nodes, empty(2))
    ancestor_words(empty(2, nodes))
    matrix = empty(2, nodes, nodes, dtype=torch.bool)
    accept_walk(columns(nodes), matrix, empty(2, nodes + 1))
    pools = [empty(4096, 8, 128, dtype=torch.bfloat16)] * 4
    for moves in (16, 64):
        move_rows._move_rows._init_fn(pools, empty(4, 2), empty(moves), empty(moves))


def sampling(vocab: int = 151_936) -> None:
    from eagle4.ops.triton.coupled import coupled_rows
    from eagle4.ops.triton.rejection import rejection_rows

    score, law = empty(34, vocab, dtype=torch.float32), empty(34, 128, dtype=torch.float64)
    coupled_rows(score, empty(34))
    rejection_rows(score, empty(34), empty(34), empty(34, 4), empty(34, 128), law)


def policy(batch: int = 2, nodes: int = 64) -> None:
    from eagle4.ops.triton.next_level import best_offer, choose_nodes

    costs = empty(1), empty(1, 257), empty(1, 9)
    drafted, children = empty(1, batch * 16), empty(1, batch, 4, 4)
    best_offer(drafted, children, empty(1, batch, 3), *costs, 1, (2, 4))
    choose_nodes(empty(1, batch, nodes), *costs[:2], 16)


def usual_launches() -> list[Launch]:
    """Every kernel in bf16 (where it has a choice), at the sizes of an 8B target."""
    found: list[Launch] = []
    with recorded(found):
        attention(128, 4, torch.bfloat16)
        head(torch.bfloat16)
        drafter(torch.bfloat16)
        tree()
        sampling()
        policy()
    return unique(found)


def more_launches() -> list[Launch]:
    """Other widths, groups, precisions and options."""
    found: list[Launch] = []
    with recorded(found):
        for width in (64, 128, 256):
            for groups in (1, 3, 8):
                for dtype in (torch.bfloat16, torch.float32):
                    attention(width, groups, dtype)
                    attention(width, groups, dtype, rows=1)
        attention(192, 1, torch.bfloat16, 65)
        everything = {"sliding_window": 4096, "softcap": 30.0, "has_sinks": True}
        attention(128, 8, torch.bfloat16, 512, **everything)
        attention(64, 8, torch.float32, 4, **everything)
        for dtype in (torch.bfloat16, torch.float32):
            head(dtype, 49_152, 576)
            head(dtype, 262_144, 2560)
            drafter(dtype, 576)
            drafter(dtype, 5120)
        tree(1, 1, 4)
        tree(8, 63, 712)
        tree(10, 64, 2048)
        sampling(49_152)
        policy(1, 16)
        policy(16, 180)
    return unique(found)


def unique(launches: list[Launch]) -> list[Launch]:
    found = {str((launch.name, *launch[1:])): launch for launch in launches}
    return list(found.values())
