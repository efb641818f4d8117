"""How often to save to the memory of hosts, and how often to storage: each where it pays. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastload.errors import OptionError
from fastload.estimate.cadence import DEFAULT_BUDGET, Recommendation, recommend, recoverable_probability
from fastload.estimate.units import require_not_negative, require_positive, require_whole

__all__ = ["DEFAULT_BEYOND_MEMORY", "Tier", "Tiers", "loss_probability", "mtbf_by_tier", "recommend_tiers"]

# Nothing published says it: power, the scheduler, a cancelled job. Without any, storage would be for nothing.
DEFAULT_BEYOND_MEMORY = 0.01

_MOST_MORE_HOSTS = 16  # that are lost before the first is replaced: more are as good as impossible


@dataclass(frozen=True, slots=True)
class Tier:
    """What one tier takes.

    Attributes:
        stall_s: Time that training stands still for a save.
        background_s: Time after that until the save counts: all its copies are there, or it is durable.
        restart_s: Time from a failure until training goes on from it.
    """

    stall_s: float
    background_s: float
    restart_s: float

    @property
    def lost_s(self) -> float:
        """Time that a failure costs, whatever the interval."""
        return self.restart_s + self.background_s


@dataclass(frozen=True, slots=True)
class Tiers:
    """How often to save where, and what comes of it.

    Attributes:
        memory: For memory.
        storage: For storage.
        loss_probability: Share of the failures after which memory is not whole, and storage is needed.
        ettr: Expected share of the wall clock that makes progress, with both.
        ettr_storage: The same with storage alone, saved to as often as is best then.
    """

    memory: Recommendation
    storage: Recommendation
    loss_probability: float
    ettr: float
    ettr_storage: float


def loss_probability(
    *,
    num_hosts: int,
    copies: int,
    mtbf_s: float,
    window_s: float,
    hosts_lost: int = 1,
    beyond_memory: float = DEFAULT_BEYOND_MEMORY,
) -> float:
    """Returns how likely a failure takes all copies of some part of what is in memory.

    A failure takes some hosts; until they are replaced and the copies made anew, more fail, each by itself:
    a Poisson number with mean (N - k)·W/(N·M). For the hosts that are lost then, see
    `cadence.recoverable_probability`, a lower bound, so this is an upper one. Some failures take all hosts.

    Args:
        num_hosts: Hosts N of the job.
        copies: Copies of every part, each on another host.
        mtbf_s: Mean time M between failures of the job.
        window_s: Time W from a failure until all copies are there again.
        hosts_lost: Hosts k that a failure takes.
        beyond_memory: Share of the failures that take all of them.

    Raises:
        OptionError: A number cannot be used, or there are more copies or lost hosts than hosts.
    """
    require_positive(mtbf_s=mtbf_s)
    require_not_negative(window_s=window_s)
    require_whole(num_hosts=num_hosts, copies=copies, hosts_lost=hosts_lost)
    if not 0 <= beyond_memory <= 1:
        raise OptionError(f"beyond_memory={beyond_memory!r}: must be a share, from 0 to 1")
    for count, what in ((copies, "copies"), (hosts_lost, "lost hosts")):
        if count > num_hosts:
            raise OptionError(f"{count} {what} need as many hosts, not {num_hosts}")
    mean = (num_hosts - hosts_lost) * window_s / (num_hosts * mtbf_s)
    recoverable, probability = 0.0, math.exp(-mean)
    for num_more in range(min(num_hosts - hosts_lost, _MOST_MORE_HOSTS) + 1):
        failures = hosts_lost + num_more
        recoverable += probability * recoverable_probability(
            num_hosts=num_hosts, copies=copies, failures=failures
        )
        probability *= mean / (num_more + 1)
    return max(0.0, 1 - (1 - beyond_memory) * recoverable)


def mtbf_by_tier(mtbf_s: float, loss_probability: float) -> tuple[float, float]:
    """Returns the mean times in seconds between failures that memory gets over, and that need storage.

    With these each tier has an interval of its own, as if there were no other: `Cadence`, too.
    """
    require_positive(mtbf_s=mtbf_s)
    share = loss_probability
    return (mtbf_s / (1 - share) if share < 1 else math.inf, mtbf_s / share if share > 0 else math.inf)


def recommend_tiers(
    *,
    memory: Tier,
    storage: Tier,
    mtbf_s: float,
    loss_probability: float,
    budget: float = DEFAULT_BUDGET,
    step_s: float | None = None,
) -> Tiers:
    """Recommends how often to save where.

    Each tier by `cadence.recommend`, for the failures after which it is used. Storage gets at most half of
    the budget, and memory what that leaves. The ETTR is that of `cadence.ettr`, with the loss of either tier
    by its share, and the stalls of both; a save that goes to both stalls once, so it may be a little higher.

    Args:
        memory: What a save to memory takes.
        storage: What one to storage takes.
        mtbf_s: Mean time between failures of the job.
        loss_probability: Share of them after which memory is not whole; see `loss_probability`.
        budget: Largest share of the time trained that may go into stalls.
        step_s: Time of a training step; None if it is not known.

    Raises:
        OptionError: A number cannot be used, one of the tiers is never used, or the job fails faster than it
            restarts.
    """
    require_positive(budget=budget)
    if not 0 < loss_probability < 1:
        which = "storage" if loss_probability <= 0 else "memory"
        raise OptionError(f"no failure is got over from {which}: there is nothing to save there for")
    of_memory_s, of_storage_s = mtbf_by_tier(mtbf_s, loss_probability)
    alone = _recommend(storage, mtbf_s, budget, step_s)
    rare = _recommend(storage, of_storage_s, budget / 2, step_s)
    often = _recommend(memory, of_memory_s, budget - rare.overhead, step_s)
    lost_s = (1 - loss_probability) * (memory.lost_s + often.interval_s / 2)
    lost_s += loss_probability * (storage.lost_s + rare.interval_s / 2)
    value = max(0.0, 1 - lost_s / mtbf_s) / (1 + often.overhead + rare.overhead)
    return Tiers(often, rare, loss_probability, value, alone.ettr)


def _recommend(tier: Tier, mtbf_s: float, budget: float, step_s: float | None) -> Recommendation:
    return recommend(
        stall_s=tier.stall_s,
        background_s=tier.background_s,
        mtbf_s=mtbf_s,
        restart_s=tier.restart_s,
        budget=budget,
        step_s=step_s,
    )
