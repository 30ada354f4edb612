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
    survival_ZOM = _survivals(drafted_ZM, child_ZBKJ, path_ZBH, min_width, horizons)
    worth_ZO = best_worth(survival_ZOM, token_ns_Z, verify_ns_ZR)
    gain_ZO = worth_ZO[:, 1:] - worth_ZO[:, :1] - offer_ns_ZO
    gain_Z = gain_ZO.amax(dim=1).clamp_min(0)
    # argmax is not the first of equals on every device; the first is the smallest index.
    place_O = torch.arange(gain_ZO.shape[1], device=gain_ZO.device)
    first_Z = torch.where(gain_ZO == gain_Z.unsqueeze(1), place_O, FORBIDDEN).amin(dim=1)
    num_widths = gain_ZO.shape[1] - len(horizons)
    width_Z = min_width + torch.where(first_Z < num_widths, first_Z, 0)
    return gain_Z, torch.where(gain_Z > 0, width_Z, 0)


def _survivals(
    drafted_ZM: torch.Tensor,
    child_ZBKJ: torch.Tensor,
    path_ZBH: torch.Tensor,
    min_width: int,
    horizons: tuple[int, ...],
) -> torch.Tensor:
    """``[Z, 1 + O, M + A]``: what is drafted, and what every offer adds; the first adds nothing."""
    most, levels, device = child_ZBKJ.shape[2], path_ZBH.shape[2], drafted_ZM.device
    num_widths = max(most - min_width + 1, 0)
    # Every offer takes the children of the first few frontier nodes and some of the line.
    offer_O1 = torch.arange(1 + num_widths + len(horizons), device=device).unsqueeze(1)
    wide_O1 = torch.where(offer_O1 > 0, offer_O1 + (min_width - 1), 0)
    wide_O1 = torch.where(offer_O1 > num_widths, 1, wide_O1)
    deep_O1 = torch.zeros_like(offer_O1)
    for i, horizon in enumerate(horizons):
        deep_O1 = torch.where(offer_O1 == 1 + num_widths + i, horizon - 1, deep_O1)
    takes_child_OK = torch.arange(most, device=device) < wide_O1
    takes_path_OH = torch.arange(levels, device=device) < deep_O1
    child_ZOBKJ = child_ZBKJ.unsqueeze(1) * takes_child_OK[:, None, :, None]
    path_ZOBH = path_ZBH.unsqueeze(1) * takes_path_OH.unsqueeze(1)
    drafted_ZOM = drafted_ZM.unsqueeze(1).expand(-1, len(offer_O1), -1)
    return torch.cat([drafted_ZOM, child_ZOBKJ.flatten(2), path_ZOBH.flatten(2)], dim=2)


def best_worth(
    survival_ZOM: torch.Tensor, token_ns_Z: torch.Tensor, verify_ns_ZR: torch.Tensor
) -> torch.Tensor:
    """int64 ``[Z, O]``: the largest net worth of each of O sets of nodes, at least 0.

    ``survival_ZOM`` int64 in 2^-30, any order, 0 for nothing; ``verify_ns_ZR``: cost with 0, 1, ...
    R - 1 nodes.
    """
    ordered_ZOM = survival_ZOM.sort(dim=2, descending=True).values
    return _net(ordered_ZOM, token_ns_Z, verify_ns_ZR).amax(dim=2).clamp_min(0)


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
    net_ZM = _net((key_ZM >> INDEX_BITS).unsqueeze(1), token_ns_Z, verify_ns_ZR)[:, 0]
    # argmax is not the first of equals on every device; the first is the smallest index.
    best_Z1 = net_ZM.amax(dim=1, keepdim=True)
    place_M = torch.arange(net_ZM.shape[1], device=net_ZM.device)
    last_Z1 = place_M.where(net_ZM == best_Z1, net_ZM.shape[1] - 1).amin(dim=1, keepdim=True)
    threshold_Z1 = torch.where(best_Z1 > 0, key_ZM.gather(1, last_Z1), torch.iinfo(torch.int64).max)
    least_ZB1 = kept_ZBM[..., -1:]
    return (key_ZBP >= threshold_Z1.unsqueeze(2)) & (key_ZBP >= least_ZB1)


def _net(
    ordered_ZOM: torch.Tensor, token_ns_Z: torch.Tensor, verify_ns_ZR: torch.Tensor
) -> torch.Tensor:
    count = min(ordered_ZOM.shape[2], verify_ns_ZR.shape[1] - 1)
    worth_ZOM = (ordered_ZOM[..., :count] * token_ns_Z[:, None, None]) >> BITS
    added_ZM = verify_ns_ZR[:, 1 : count + 1] - verify_ns_ZR[:, :1]
    net_ZOM = worth_ZOM.cumsum(dim=2) - added_ZM.unsqueeze(1)
    # Worthless nodes are never taken, even for free.
    return net_ZOM.masked_fill(worth_ZOM == 0, -1)
