"""Net worth of the best nodes of a batch, and which they are: sorted, priced, cut. Integers only.

    net(n) = sum of the n largest (survival * token_ns >> 30) - (verify_ns[n] - verify_ns[0])

These are the torch references; `ops.triton.next_level` has the kernels. A leading ``Z`` counts
independent rounds. Source: DESIGN.md section 7; the readable form is `harness.policy`.
"""

from __future__ import annotations

import torch

BITS = 30
INDEX_BITS = 20  # nodes of a batch at most: 2^20; survivals take 31 more bits


def best_worth(
    survival_ZM: torch.Tensor, token_ns_Z: torch.Tensor, verify_ns_ZR: torch.Tensor
) -> torch.Tensor:
    """int64 ``[Z]``: the largest net worth, at least 0.

    ``survival_ZM`` int64 in 2^-30, any order, 0 for nothing; ``verify_ns_ZR``: cost with 0, 1, ...
    R - 1 nodes. All int64.
    """
    ordered_ZM = survival_ZM.sort(dim=1, descending=True).values
    return _net(ordered_ZM, token_ns_Z, verify_ns_ZR).amax(dim=1).clamp_min(0)


def choose_nodes(
    survival_ZBP: torch.Tensor,
    token_ns_Z: torch.Tensor,
    verify_ns_ZR: torch.Tensor,
    max_nodes: int,
) -> torch.Tensor:
    """bool ``[Z, B, P]``: the nodes that maximise net worth, at most ``max_nodes`` per sequence.

    Ties go to the earlier sequence, then to the earlier node; the smallest of equally good sets.
    """
    rounds, batch, nodes = survival_ZBP.shape
    order_M = torch.arange(batch * nodes, device=survival_ZBP.device).flip(0).view(batch, nodes)
    # Unique keys, best first: descending survival, then ascending place.
    key_ZBP = (survival_ZBP << INDEX_BITS) | order_M
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
