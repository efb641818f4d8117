"""Intervals between saves: published rules, a recommendation, and an adaptive interval. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from statistics import median

from fastload.base.units import format_duration, require_not_negative, require_positive, require_whole
from fastload.errors import OptionError

# Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025:
# 5 minutes to restart.
DEFAULT_RESTART_S = 300.0
DEFAULT_BUDGET = 0.035  # Mohan et al., "CheckFreq", FAST 2021

# An assumption, since no number is published: loss of power, the scheduler, a cancelled job.
DEFAULT_BEYOND_MEMORY = 0.01

_MOST_MORE_HOSTS = 16  # lost before the first is replaced; more are practically impossible
_ROUNDING = 1e-9  # 3.0000000001 steps are 3
_WINDOW = 5  # saves that count; odd, so the median is one of them
_DEAD_BAND = 1.2


def job_mtbf_s(num_hosts: int, failures_per_host_s: float) -> float:
    """Returns the mean time between failures of a job in seconds: 1/(N·r_f).

    Args:
        num_hosts: Hosts N of the job, any of which ends it.
        failures_per_host_s: Failures r_f of one host in a second.
    """
    require_whole(num_hosts=num_hosts)
    require_positive(failures_per_host_s=failures_per_host_s)
    return 1 / (num_hosts * failures_per_host_s)


def young_s(stall_s: float, mtbf_s: float) -> float:
    """Returns Young's interval in seconds, √(2δM).

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.

    Args:
        stall_s: Time δ that training waits for a save.
        mtbf_s: Mean time M between failures.
    """
    require_not_negative(stall_s=stall_s)
    require_positive(mtbf_s=mtbf_s)
    return math.sqrt(2 * stall_s * mtbf_s)


def daly_s(stall_s: float, mtbf_s: float) -> float:
    """Returns Daly's interval in seconds: √(2δM)·[1 + ⅓√(δ/2M) + ⅑·δ/2M] - δ if δ < 2M, else M.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3),
    2006, equation 37.

    Args:
        stall_s: Time δ that training waits for a save.
        mtbf_s: Mean time M between failures.
    """
    first = young_s(stall_s, mtbf_s)
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def ettr(interval_s: float, *, stall_s: float, mtbf_s: float, restart_s: float) -> float:
    """Returns the expected training time ratio: the share of wall time that makes progress.

    ``(1 - N·r_f·(u₀ + Δt/2)) / (1 + w/Δt)``, with N·r_f = 1/mtbf; 0 where that is negative. Kokolis et al.,
    "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025.

    Args:
        interval_s: Time Δt between saves.
        stall_s: Time w that training waits for a save.
        mtbf_s: Mean time between failures.
        restart_s: Time u₀ from a failure until training continues.
    """
    require_positive(interval_s=interval_s, mtbf_s=mtbf_s)
    require_not_negative(stall_s=stall_s, restart_s=restart_s)
    return max(0.0, 1 - (restart_s + interval_s / 2) / mtbf_s) / (1 + stall_s / interval_s)


def ettr_peak_s(*, stall_s: float, mtbf_s: float, restart_s: float) -> float:
    """Returns the interval in seconds at which `ettr` is highest: -w + √(w² + 2w(M - u₀)).

    Where the derivative is 0. For w ≪ M it is close to the published Δt* = √(2w/(N·r_f)), Young's interval.

    Args:
        stall_s: Time w that training waits for a save.
        mtbf_s: Mean time M between failures.
        restart_s: Time u₀ from a failure until training continues.

    Raises:
        OptionError: The job fails faster than it restarts.
    """
    require_positive(mtbf_s=mtbf_s)
    require_not_negative(stall_s=stall_s, restart_s=restart_s)
    _require_progress(mtbf_s, restart_s)
    return _peak_s(stall_s, mtbf_s, restart_s)


def _require_progress(mtbf_s: float, lost_s: float) -> None:
    if lost_s >= mtbf_s:
        raise OptionError(
            f"a failure every {format_duration(mtbf_s)}, and {format_duration(lost_s)} to recover from each: "
            "the job makes no progress"
        )


def _peak_s(stall_s: float, mtbf_s: float, lost_s: float) -> float:
    return math.sqrt(stall_s**2 + 2 * stall_s * max(0.0, mtbf_s - lost_s)) - stall_s


def checkfreq_steps(*, checkpoint_s: float, stall_s: float, step_s: float) -> int:
    """Returns the least interval in steps at which one save is done before the next: ⌈(t_c - stall)/t_step⌉.

    At least 1. Mohan et al., "CheckFreq: Frequent, Fine-Grained DNN Checkpointing", FAST 2021.

    Args:
        checkpoint_s: Time t_c of a save, the stall included.
        stall_s: The part of it that training waits for.
        step_s: Time of a training step.
    """
    require_not_negative(checkpoint_s=checkpoint_s, stall_s=stall_s)
    require_positive(step_s=step_s)
    return _whole_steps(checkpoint_s - stall_s, step_s)


def budget_interval_s(stall_s: float, budget: float) -> float:
    """Returns the least interval in seconds at which stalls stay within a share of the time trained.

    Mohan et al., "CheckFreq", FAST 2021: back off when the overhead is above the budget (3.5 %).

    Args:
        stall_s: Time that training waits for a save.
        budget: Largest stall ÷ interval, such as 0.035.
    """
    require_not_negative(stall_s=stall_s)
    require_positive(budget=budget)
    return stall_s / budget


def pccheck_steps(*, write_s: float, step_s: float, concurrent_saves: int, slowdown: float) -> int:
    """Returns the least interval in steps with several saves at once: ⌈T_w/(N·q·t)⌉, at least 1.

    Strati et al., "PCcheck: Persistent Concurrent Checkpointing for ML", ASPLOS 2025.

    Args:
        write_s: Time T_w until a save is durable.
        step_s: Time t of a training step.
        concurrent_saves: Saves N that may be under way at once.
        slowdown: Largest slowdown q of the training, such as 1.035 for 3.5 %.

    Raises:
        OptionError: A number is invalid.
    """
    require_not_negative(write_s=write_s)
    require_positive(step_s=step_s)
    require_whole(concurrent_saves=concurrent_saves)
    if not (math.isfinite(slowdown) and slowdown >= 1):
        raise OptionError(f"slowdown={slowdown!r}: must be a number, at least 1")
    return _whole_steps(write_s, concurrent_saves * slowdown * step_s)


def recoverable_probability(*, num_hosts: int, copies: int, failures: int) -> float:
    """Returns a lower bound of the probability that copies in the memory of peers survive.

    ``1 - N·C(N-m, k-m)/(m·C(N, k))`` for m copies on groups of m hosts when k of N hosts fail at once; 1
    for k < m. Wang et al., "Gemini: Fast Failure Recovery in Distributed Training with In-Memory
    Checkpoints", SOSP 2023, corollary 1.

    Args:
        num_hosts: Hosts N.
        copies: Copies m of every share, each on another host of its group.
        failures: Hosts k that fail at once.

    Raises:
        OptionError: There are more copies or failures than hosts.
    """
    require_whole(num_hosts=num_hosts, copies=copies, failures=failures)
    for count, what in ((copies, "copies"), (failures, "failures")):
        if count > num_hosts:
            raise OptionError(f"{count} {what} need as many hosts, not {num_hosts}")
    if failures < copies:
        return 1.0
    lost = num_hosts * math.comb(num_hosts - copies, failures - copies)
    return max(0.0, 1 - lost / (copies * math.comb(num_hosts, failures)))


def _whole_steps(interval_s: float, step_s: float) -> int:
    return max(1, math.ceil(interval_s / step_s - _ROUNDING))


@dataclass(frozen=True, slots=True)
class Tier:
    """The costs of saves to storage, or to the memory of hosts.

    Attributes:
        stall_s: Time that training waits for a save.
        background_s: Time after that until the save counts: it is durable, or all copies have arrived.
        restart_s: Time from a failure until training continues.
    """

    stall_s: float
    background_s: float
    restart_s: float

    @property
    def lost_s(self) -> float:
        """Time that a failure costs, whatever the interval."""
        return self.restart_s + self.background_s


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommended interval, with the reason.

    Attributes:
        interval_s: Time trained between saves, in seconds.
        interval_steps: The same in steps; None if the time of a step is unknown.
        why: Description of the reason.
        overhead: Stall ÷ interval.
        ettr: Expected share of wall time that makes progress, see `recommend`.
    """

    interval_s: float
    interval_steps: int | None
    why: str
    overhead: float
    ettr: float

    def __str__(self) -> str:
        steps = "" if self.interval_steps is None else f" ({self.interval_steps:,} steps)"
        return f"{format_duration(self.interval_s)}{steps}"


def recommend(
    *,
    stall_s: float,
    background_s: float,
    mtbf_s: float,
    restart_s: float = DEFAULT_RESTART_S,
    budget: float = DEFAULT_BUDGET,
    concurrent_saves: int = 1,
    step_s: float | None = None,
) -> Recommendation:
    """Recommends an interval: the peak of the ETTR curve, unless that is too short.

    The interval is long enough for a save to end before the next one (`checkfreq_steps`; with concurrent
    saves `pccheck_steps` without a slowdown), and for the budget of stalls. A failure loses the work since
    the last *durable* save began, so the ETTR counts the time in the background as part of the restart.

    Args:
        stall_s: Time that training waits for a save.
        background_s: Time after that until the save is durable; 0 if saves are not asynchronous.
        mtbf_s: Mean time between failures of the job.
        restart_s: Time from a failure until training continues.
        budget: Largest stall ÷ interval.
        concurrent_saves: Saves that may be under way at once.
        step_s: Time of a training step; None if it is unknown.

    Raises:
        OptionError: A number is invalid, or the job fails faster than it restarts.
    """
    require_positive(mtbf_s=mtbf_s, budget=budget, **({} if step_s is None else {"step_s": step_s}))
    require_not_negative(stall_s=stall_s, background_s=background_s, restart_s=restart_s)
    require_whole(concurrent_saves=concurrent_saves)
    tier = Tier(stall_s, background_s, restart_s)
    _require_progress(mtbf_s, tier.lost_s)
    return _recommend(tier, mtbf_s, budget, concurrent_saves, step_s)


def _recommend(
    tier: Tier,
    mtbf_s: float,
    budget: float,
    concurrent_saves: int,
    step_s: float | None,
    *,
    margin: float = 1.0,
) -> Recommendation:
    """Computes `recommend`, with lower bounds multiplied by `margin`."""
    peak_s = _peak_s(tier.stall_s, mtbf_s, tier.lost_s)
    budget_s = margin * budget_interval_s(tier.stall_s, budget)
    written_s = margin * tier.background_s / concurrent_saves
    written = f"a save is written in {format_duration(tier.background_s)}"
    candidates = (
        (peak_s, "the peak of the ETTR curve: more often costs more in stalls than it saves in lost work"),
        (budget_s, f"the budget: more often, stalls take more than {budget * 100:.3g} % of the time"),
        (
            written_s,
            f"the save before has to be done: {written}"
            if concurrent_saves == 1
            else f"at most {concurrent_saves} saves at once: {written}",
        ),
    )
    interval_s, why = max(candidates, key=lambda candidate: candidate[0])
    if interval_s > peak_s > 0:
        why += f" (the ETTR would be highest at {format_duration(peak_s)})"
    interval_steps = None
    if step_s is not None:
        interval_steps = max(_whole_steps(max(written_s, budget_s), step_s), round(peak_s / step_s))
        interval_s = interval_steps * step_s
        if interval_steps == 1:
            why = "every step: no more often is possible"
    elif interval_s == 0:
        raise OptionError("saves that take no time are possible at every step: give the time of a step")
    value = ettr(interval_s, stall_s=tier.stall_s, mtbf_s=mtbf_s, restart_s=tier.lost_s)
    return Recommendation(interval_s, interval_steps, why, tier.stall_s / interval_s, value)


@dataclass(frozen=True, slots=True)
class Tiers:
    """The recommended intervals of both tiers.

    Attributes:
        memory: The interval for memory.
        storage: The interval for storage.
        loss_probability: Share of failures after which memory is incomplete and storage is needed.
        ettr: Expected share of wall time that makes progress, with both tiers.
        ettr_storage: The same with storage alone and its best interval.
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
    """Returns an upper bound of the probability that a failure loses all copies of some share in memory.

    A failure takes some hosts. Until they are replaced and have new copies, more hosts fail independently: a
    Poisson number with mean (N - k)·W/(N·M). `recoverable_probability` gives the probability for all lost
    hosts. Some failures take all hosts.

    Args:
        num_hosts: Hosts N of the job.
        copies: Copies of every share, each on another host.
        mtbf_s: Mean time M between failures of the job.
        window_s: Time W from a failure until all copies exist again.
        hosts_lost: Hosts k that a failure takes.
        beyond_memory: Share of the failures that take all of them.

    Raises:
        OptionError: A number is invalid, or there are more copies or lost hosts than hosts.
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
    """Returns the mean seconds between failures that memory survives, and between those that need storage.

    With these, the interval of each tier is computed independently, also by `AdaptiveInterval`.
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
    """Recommends an interval for each tier.

    Each is computed by `recommend`, for the failures after which the tier is used. Storage gets at most half
    of the budget, and memory the rest. The ETTR is that of `ettr`, with the losses of both tiers by their
    shares of failures, and the stalls of both. It may be a little higher, since a save to both stalls once.

    Args:
        memory: Costs of a save to memory.
        storage: Costs of a save to storage.
        mtbf_s: Mean time between failures of the job.
        loss_probability: Share of them after which memory is incomplete; see `loss_probability`.
        budget: Largest share of the training time in stalls.
        step_s: Time of a training step; None if it is unknown.

    Raises:
        OptionError: A number is invalid, one of the tiers is never used, or the job fails faster than it
            restarts.
    """
    require_positive(budget=budget)
    if not 0 < loss_probability < 1:
        which = "storage" if loss_probability <= 0 else "memory"
        raise OptionError(f"no failure is restored from {which}: saves there are useless")
    of_memory_s, of_storage_s = mtbf_by_tier(mtbf_s, loss_probability)

    def best(tier: Tier, mtbf_s: float, budget: float) -> Recommendation:
        return recommend(**asdict(tier), mtbf_s=mtbf_s, budget=budget, step_s=step_s)

    alone = best(storage, mtbf_s, budget)
    rare = best(storage, of_storage_s, budget / 2)
    often = best(memory, of_memory_s, budget - rare.overhead)
    lost_s = (1 - loss_probability) * (memory.lost_s + often.interval_s / 2)
    lost_s += loss_probability * (storage.lost_s + rare.interval_s / 2)
    value = max(0.0, 1 - lost_s / mtbf_s) / (1 + often.overhead + rare.overhead)
    return Tiers(often, rare, loss_probability, value, alone.ettr)


@dataclass(frozen=True, slots=True)
class MeasuredSave:
    """The times of one save, as measured on one rank.

    Attributes:
        step_s: Mean time of a training step since the previous save, without stalls.
        stall_s: Time that training waited for it.
        background_s: Time after that until it was durable.
    """

    step_s: float
    stall_s: float
    background_s: float


@dataclass(frozen=True, slots=True)
class AdaptiveInterval:
    """An interval between saves that adapts to their cost. The same measurements give the same interval.

    So all ranks agree if they use the measurements of one rank. The median of the last few saves counts, and
    the interval stays while the best one is near it: an outlier changes nothing, a drift does.

    Attributes:
        mtbf_s: Mean time between failures of the job.
        restart_s: Time from a failure until training continues.
        budget: Largest stall ÷ interval.
        concurrent_saves: Saves that may be under way at once.
        interval_steps: Steps between saves: first the initial value, then the computed one.
        why: Description of the reason.
        saves: The measurements that count.
    """

    mtbf_s: float
    restart_s: float
    budget: float
    concurrent_saves: int
    interval_steps: int
    why: str = "nothing has been measured yet"
    saves: tuple[MeasuredSave, ...] = ()

    def __post_init__(self) -> None:
        require_positive(mtbf_s=self.mtbf_s, budget=self.budget)
        require_not_negative(restart_s=self.restart_s)
        require_whole(concurrent_saves=self.concurrent_saves, interval_steps=self.interval_steps)
        _require_progress(self.mtbf_s, self.restart_s)

    def measured(self, save: MeasuredSave) -> AdaptiveInterval:
        """Returns the interval after one more save.

        Raises:
            OptionError: A measured time is invalid.
        """
        require_positive(step_s=save.step_s)
        require_not_negative(stall_s=save.stall_s, background_s=save.background_s)
        saves = (*self.saves, save)[-_WINDOW:]
        medians = (median(save.stall_s for save in saves), median(save.background_s for save in saves))
        tier = Tier(*medians, self.restart_s)
        best = _recommend(
            tier,
            self.mtbf_s,
            self.budget,
            self.concurrent_saves,
            median(save.step_s for save in saves),
            margin=_DEAD_BAND,  # so that the bounds hold anywhere within the dead band
        )
        steps = best.interval_steps
        assert steps is not None
        near = steps <= self.interval_steps * _DEAD_BAND and self.interval_steps <= steps * _DEAD_BAND
        if self.saves and near:
            return replace(self, saves=saves)
        return replace(self, saves=saves, interval_steps=steps, why=best.why)
