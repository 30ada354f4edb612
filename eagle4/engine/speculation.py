"""Which policy and which draft serve a call."""

from __future__ import annotations

import dataclasses

from ..config import SpeculativeConfig
from ..drafter import Eagle4Drafter
from ..harness import FixedPolicy, Policy
from ..target import TargetAdapter
from .adaptive import AdaptiveDraft
from .call import Request
from .drafting import Draft, EagleDraft
from .drawing import TemplateDraft
from .graphs import Graphs
from .home import HarnessHome
from .on_device import DeviceDraft


def policy_and_draft(
    config: SpeculativeConfig | None,
    request: Request,
    home: HarnessHome,
    target: TargetAdapter,
    drafter: Eagle4Drafter | None,
    graphs: Graphs,
) -> tuple[Policy | None, Draft | None]:
    """Policy and draft of one call; (None, None) decodes plainly.

    Raises what `HarnessHome.policy` raises for a profile that cannot be used.
    """
    if config is None or drafter is None:
        return None, None
    is_drawn = request.sampler is not None and config.sampling == "rejection"
    if request.sampler is not None and not config.request_class:
        # What a draft probability means differs from greedy decoding.
        config = dataclasses.replace(config, request_class="sampled")
    if config.harness:
        most = len(request.pads) * (request.max_length - request.input_ids.shape[1])
        policy = home.policy(config, target, drafter, most, graphs)
        if policy is not None:
            adaptive = DeviceDraft if graphs.decides_on(target.device) else AdaptiveDraft
            draft = TemplateDraft if is_drawn else adaptive
            return policy, draft(drafter, policy)
    policy = FixedPolicy(config)
    draft = TemplateDraft if is_drawn else EagleDraft
    return policy, draft(drafter, policy)
