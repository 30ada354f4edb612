"""Net worth of the best nodes of a batch: sorted, priced, cut. Integers only.

    net(n) = sum of the n largest (survival * token_ns >> 30) - (verify_ns[n] - verify_ns[0])

`best_offer` compares what several ways of drafting another level would add to the largest net
worth, `choose_nodes` says which nodes reach it. The torch functions are the specification;
`ops.triton.next_level` holds the kernels, which must agree bit for bit. A
leading ``Z`` counts independent rounds. Source: DESIGN.md section 7; readable: `harness.policy`.
"""

from __future__ import annotations

import torch

from .dispatch import wants_triton
from .sizes import power_of_2

BITS = 30
INDEX_BITS = 20  # nodes of a batch at most: 2^20; survivals take 31 more bits
MOST_BLOCK = 8192  # nodes that one kernel program sorts
FORBIDDEN = 1 << 60  # ns, more than any offer is worth


def best_offer(
    drafted_ZM: torch.Tensor,
    child_ZBKJ: torch.Tensor,
    path_ZBH: torch.Tensor,
    token_ns_Z: torch.Tensor,
    verify_ns_ZR: torch.Tensor,
    offer_ns_ZO: torch.Tensor,
    min_width: int,
    horizons: tuple[int, ...],
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first of the best offers: gain in nanoseconds and width, int64 ``[Z]``; 0, 0 for none.

    ``drafted_ZM``: survivals of drafted nodes; ``child_ZBKJ``: expected survivals of the children
    of K frontier nodes; ``path_ZBH``: of the best child's line, one entry per level from the second
    on. Offers in order: widths ``min_width..K`` for one level, then ``horizons`` levels along the
    line at ``min_width``. ``offer_ns_ZO``: what the levels of every offer cost; `FORBIDDEN` for one
    that must not be made. All int64, survivals in 2^-30.
    """
    nodes = drafted_ZM.shape[1] + child_ZBKJ[0].numel() + path_ZBH[0].numel()
    if wants_triton(impl, drafted_ZM, fits=lambda: nodes <= MOST_BLOCK):
        from .triton.next_level import best_offer as kernel

        return kernel(
            *(drafted_ZM, child_ZBKJ, path_ZBH, token_ns_Z, verify_ns_ZR, offer_ns_ZO),
            min_width,
            horizons,
        )
    now_Z = best_worth(drafted_ZM, token_ns_Z, verify_ns_ZR)
    gain_Z = width_Z = torch.zeros_like(token_ns_Z)
    offers = [
        (width, child_ZBKJ[:, :, :width].flatten(1))
        for width in range(min_width, child_ZBKJ.shape[2] + 1)
    ]
    for horizon in horizons:
        line = torch.cat([child_ZBKJ[:, :, 0], path_ZBH[..., : horizon - 1]], dim=-1)
        offers.append((min_width, line.flatten(1)))
    for number, (width, added_ZM) in enumerate(offers):
        both_ZM = torch.cat([drafted_ZM, added_ZM], dim=1)
        offer_Z = best_worth(both_ZM, token_ns_Z, verify_ns_ZR) - now_Z
        offer_Z = offer_Z - offer_ns_ZO[:, number]
        is_better_Z = offer_Z > gain_Z
        gain_Z = torch.where(is_better_Z, offer_Z, gain_Z)
        width_Z = torch.where(is_better_Z, width, width_Z)
    return gain_Z, width_Z


def best_worth(
    survival_ZM: torch.Tensor, token_ns_Z: torch.Tensor, verify_ns_ZR: torch.Tensor
) -> torch.Tensor:
    """int64 ``[Z]``: the largest net worth, at least 0.

    ``survival_ZM`` int64 in 2^-30, any order, 0 for nothing; ``verify_ns_ZR``: cost with 0, 1, ...
    R - 1 nodes.
    """
    ordered_ZM = survival_ZM.sort(dim=1, descending=True).values
    return _net(ordered_ZM, token_ns_Z, verify_ns_ZR).amax(dim=1).clamp_min(0)


def choose_nodes(
    survival_ZBP: torch.Tensor,
    token_ns_Z: torch.Tensor,
    verify_ns_ZR: torch.Tensor,
    max_nodes: int,
    impl: str = "auto",
) -> torch.Tensor:
    """bool ``[Z, B, P]``: the nodes that maximise net worth, at most ``max_nodes`` per sequence.

    Ties go to the earlier sequence, then to the earlier node; the smallest of equally good sets.
    Raises `ValueError` for more than 2^20 nodes.
    """

    if survival_ZBP[0].numel() > 1 << INDEX_BITS:
        raise ValueError(f"{survival_ZBP[0].numel()} nodes of a batch; at most 2^{INDEX_BITS} fit")

    def fits() -> bool:
        _, batch, nodes = survival_ZBP.shape
        return power_of_2(batch) * power_of_2(nodes) <= MOST_BLOCK

    if wants_triton(impl, survival_ZBP, fits=fits):
        from .triton.next_level import choose_nodes as kernel

        return kernel(survival_ZBP, token_ns_Z, verify_ns_ZR, max_nodes)
    _, batch, nodes = survival_ZBP.shape
    order_BP = torch.arange(batch * nodes, device=survival_ZBP.device).flip(0).view(batch, nodes)
    # Unique keys, best first: descending survival, then ascending place.
    key_ZBP = (survival_ZBP << INDEX_BITS) | order_BP
    kept_ZBM = key_ZBP.topk(min(max_nodes, nodes), dim=2).values
    key_ZM = kept_ZBM.flatten(1).sort(dim=1, descending=True).values
    net_ZM = _net(key_ZM >> INDEX_BITS, token_ns_Z, verify_ns_ZR)
    # argmax is not the first of equals on every device; the first is the smallest index.
    best_Z1 = net_ZM.amax(dim=1, keepdim=True)
    place_M = torch.arange(net_ZM.shape[1], device=net_ZM.device)
    last_Z1 = place_M.where(net_ZM == best_Z1, net_ZM.shape[1] - 1).amin(dim=1, keepdim=True)
    threshold_Z1 = torch.where(best_Z1 > 0, key_ZM.gather(1, last_Z1), torch.iinfo(torch.int64).max)
    least_ZB1 = kept_ZBM[..., -1:]
    return (key_ZBP >= threshold_Z1.unsqueeze(2)) & (key_ZBP >= least_ZB1)


def _net(
    ordered_ZM: torch.Tensor, token_ns_Z: torch.Tensor, verify_ns_ZR: torch.Tensor
) -> torch.Tensor:
    count = min(ordered_ZM.shape[1], verify_ns_ZR.shape[1] - 1)
    worth_ZM = (ordered_ZM[:, :count] * token_ns_Z.unsqueeze(1)) >> BITS
    added_ZM = verify_ns_ZR[:, 1 : count + 1] - verify_ns_ZR[:, :1]
    net_ZM = worth_ZM.cumsum(dim=1) - added_ZM
    # Worthless nodes are never taken, even for free.
    return net_ZM.masked_fill(worth_ZM == 0, -1)
