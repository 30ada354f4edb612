"""The probe: does an unlisted family take packed rows?

A small tree behind a prefix runs packed and must give the logits of plain forwards over its paths.
Siblings share a position, and a cousin stands between parent and child, so a family that counts
rows instead of reading ``position_ids`` fails. What a short probe cannot see is read from the
attention calls themselves: windows longer than the probe, and arguments that select keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..cache import KVPool, PageTable, Window, build_step
from .attention import AttentionCall, OutsideCallError
from .families import HARMLESS_ARGUMENTS, declared_windows, describe

if TYPE_CHECKING:
    from .adapter import TargetAdapter

# Nodes 0 -> 1 -> 3 and 0 -> 2: node 2 stands between 1 and its child.
_PARENT = (-1, 0, 0, 1)
_DEPTH = (0, 1, 1, 2)
_PATHS = ((0, 1, 3), (0, 2))
_SHORT = 8  # prefix of the probe
_LONG = 256  # windows up to this length are tried for real


@torch.no_grad()
def probe(target: TargetAdapter) -> None:
    """Raise `ValueError` when the packed forward of the target is not its plain forward."""
    name = describe(target.model)
    windows = declared_windows(target.config)
    prefix = max([_SHORT, *(window + 4 for window in windows if window and window <= _LONG)])
    vocab = target.config.vocab_size
    prefix_ids = torch.arange(prefix, device=target.device) % vocab
    node_ids = (prefix + 7 * torch.arange(len(_PARENT), device=target.device)) % vocab
    with target.evaluating():
        plain = _plain(target, prefix_ids, node_ids).float()
    calls: dict[int, AttentionCall] = {}
    try:
        packed = _packed(target, prefix_ids, node_ids, calls).float()
    except OutsideCallError as error:
        raise ValueError(
            f"{name} cannot be a target: it does not hand keyword arguments of its forward down to "
            "the attention function and the recurrent layers"
        ) from error
    except Exception as error:
        raise ValueError(
            f"{name} does not take packed rows: {type(error).__name__}: {error}"
        ) from error
    _check_calls(name, windows, calls)
    error = (packed - plain).abs().max() / plain.std().clamp_min(1e-6)
    limit = 1e-3 if target.dtype == torch.float32 else 0.5
    if not error <= limit:
        raise ValueError(
            f"{name} does not take packed rows: a packed forward differs from a plain one by "
            f"{error:.2g} standard deviations (limit {limit}); this family is not supported"
        )


def _plain(target: TargetAdapter, prefix_ids: torch.Tensor, node_ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[4, V]`` of the nodes, path by path."""
    rows: dict[int, torch.Tensor] = {}
    for path in _PATHS:
        ids = torch.cat([prefix_ids, node_ids[list(path)]]).unsqueeze(0)
        logits = target.model(input_ids=ids, use_cache=False).logits[0, -len(path) :]
        rows.update(zip(path, logits, strict=True))
    return torch.stack([rows[node] for node in range(len(_PARENT))])


def _packed(
    target: TargetAdapter,
    prefix_ids: torch.Tensor,
    node_ids: torch.Tensor,
    calls: dict[int, AttentionCall],
) -> torch.Tensor:
    """Logits ``[4, V]`` of the nodes in one packed forward behind the prefix."""
    device, prefix, nodes = target.device, len(prefix_ids), len(_PARENT)
    table, pool = PageTable(1), KVPool()
    table.ensure(0, prefix + nodes)
    pool.resize(table.num_slots)
    causal = torch.ones(prefix, prefix, dtype=torch.bool, device=device).tril()
    first = Window(0, 0, 0, torch.arange(prefix, device=device), causal)
    visible = torch.eye(nodes, dtype=torch.bool, device=device)
    for node, parent in enumerate(_PARENT):
        if parent >= 0:
            visible[node] |= visible[parent]
    tree = Window(0, prefix, 0, prefix + torch.tensor(_DEPTH, device=device), visible)
    with target.attached(with_taps=False):
        target.forward(prefix_ids, build_step(table, [first], device, is_prompt=True), pool)
        step = build_step(table, [tree], device)
        return target.forward(node_ids, step, pool, calls=calls).logits_RV


def _check_calls(name: str, windows: list[int | None], calls: dict[int, AttentionCall]) -> None:
    """Refuse what the probe is too short to see."""
    if not calls:
        raise ValueError(
            f"{name} does not take packed rows: its layers do not call the attention function "
            "that is registered with Transformers"
        )
    unknown = sorted(set().union(*(call.unknown for call in calls.values())) - HARMLESS_ARGUMENTS)
    if unknown:
        raise ValueError(
            f"{name} cannot be a target: its attention calls pass {unknown}, which eagle4 does "
            "not understand"
        )
    for layer, window in enumerate(windows):
        if window is not None and layer in calls and calls[layer].sliding_window != window:
            raise ValueError(
                f"{name} cannot be a target: its config declares a sliding window of {window} for "
                f"layer {layer}, but the attention call passes {calls[layer].sliding_window}, so "
                "drafted rows would see too far"
            )
