"""What a tree costs in a Gated DeltaNet layer, and which way of committing is cheaper.

    python profiling/ops/tree_gdn.py --nodes 16 --heads 32 --key-heads 16 --width 128

Per layer, medians of interleaved repetitions: verification in closed form and row by row; commit by
replay of the accepted path (what the engine does) and by selection, which has to write a state of
every node during verification and copies one of them. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import random
from functools import partial

import torch

from eagle4.engine.measure import interleaved
from eagle4.ops import TreePaths, advance_gdn_, tree_gdn
from eagle4.ops.tree_gdn import tree_gdn_reference
from eagle4.tree import ancestor_matrix


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--accepted", type=int, default=3)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=128, help="of keys and of values")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def select_(state: torch.Tensor, states: torch.Tensor, row: int) -> None:
    """Commit by selection."""
    state.copy_(states[:, row])


@torch.no_grad()
def main() -> None:
    args = options()
    torch.manual_seed(0)
    rng, rows = random.Random(0), args.nodes + 1
    parent = torch.tensor([[-1] + [rng.randrange(row) for row in range(1, rows)]])
    key = torch.nn.functional.normalize(torch.randn(1, rows, args.key_heads, args.width), dim=-1)
    value = torch.randn(1, rows, args.heads, args.width)
    decay, beta = -torch.rand(1, rows, args.heads), torch.rand(1, rows, args.heads)
    state = torch.randn(1, args.heads, args.width, args.width)
    inputs = [x.to(args.device) for x in (key, key, value, decay, beta, state)]
    state = inputs[-1]
    paths = TreePaths(ancestor_matrix(parent.to(args.device)))
    _, states = tree_gdn_reference(*inputs, parent)
    accepted = [x[:, : args.accepted].contiguous() for x in inputs[1:5]]
    scratch = state.clone()
    cases = {
        ("closed form", 0, 0): partial(tree_gdn, *inputs, paths),
        ("row by row, keeping states", 0, 0): partial(tree_gdn_reference, *inputs, parent),
        ("commit by replay", 0, 0): partial(advance_gdn_, scratch, *accepted),
        ("commit by selection", 0, 0): partial(select_, scratch, states, args.accepted),
    }
    if args.device != "cpu":
        cases["closed form, kernel", 0, 0] = partial(tree_gdn, *inputs, paths, impl="triton")
    synchronize = torch.cuda.synchronize if args.device != "cpu" else lambda: None
    taken = interleaved(cases, args.repeats, 60.0, synchronize=synchronize)
    medians = {key[0]: sorted(ns)[len(ns) // 2] / 1e3 for key, ns in taken.items()}
    for name, microseconds in medians.items():
        print(f"{name:>28}: {microseconds:9.1f} us a layer")
    size = state.numel() * 4
    print(f"state {size:,} bytes; states of all nodes {rows * size:,} bytes a layer")
    print(json.dumps({**vars(args), "torch": torch.__version__, "us": medians}))


if __name__ == "__main__":
    main()
