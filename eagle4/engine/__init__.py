"""The engine: closes the loop from target to drafter and back. The only room that knows all others.

In: prompts, processors, stopping criteria and a policy. Out: token ids, statistics and a cache.
Always: a token is committed, streamed and counted in one place, one at a time.
"""

from .call import Request, Result
from .loop import run
from .prefix import Eagle4Cache
from .stats import SpeculationStats

__all__ = ["Eagle4Cache", "Request", "Result", "SpeculationStats", "run"]
