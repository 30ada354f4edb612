"""One prepared request from its policy to its result: what a call of `generate` runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from ..config import SpeculativeConfig
from ..drafter import Eagle4Drafter
from ..harness import HarnessPolicy, Policy
from ..ops import PackedLinears
from ..target import TargetAdapter
from . import together
from .call import Request, Result
from .drafting import Draft, EagleDraft
from .graphs import Graphs
from .home import HarnessHome
from .loop import run
from .on_device import DeviceDraft
from .speculation import policy_and_draft
from .warmup import warm_up


def answer(
    request: Request,
    config: SpeculativeConfig | None,
    target: TargetAdapter,
    drafter: Eagle4Drafter | None,
    packed: PackedLinears | None,
    home: HarnessHome,
    graphs: Graphs,
    choose: Callable[..., tuple[Policy | None, Draft | None]] = policy_and_draft,
) -> tuple[Result, HarnessPolicy | None]:
    """The result and, if it decided the rounds, the harness.

    ``packed`` are the drafter's weights; ``choose`` is `policy_and_draft` or a stand-in. Without
    ``config`` or ``drafter`` decoding is plain.
    """
    if graphs.replays is not None:
        graphs.replays.check(target.model, *([] if drafter is None else [drafter]))
    with packed.active() if packed is not None else nullcontext():
        policy, draft = choose(config, request, home, target, drafter, graphs)
        own = drafter if isinstance(draft, EagleDraft) else None
        # With shared noise the host ranks the candidates of every level.
        limits = draft.limits if isinstance(draft, DeviceDraft) and not request.sampler else None
        warm_up(graphs, target, own, len(request.pads), limits)
        with together.counted(target.vocab) as exchanged:
            result = run(request, target, policy, draft, graphs)
            if isinstance(policy, HarnessPolicy):
                policy.finish()  # ranks may have measured times to exchange
    result.stats.exchange = exchanged
    if not isinstance(policy, HarnessPolicy):
        return result, None
    home.settle(policy)
    result.stats.harness = policy.report.to_dict()
    return result, policy
