"""How often to save: what is published on it, one recommendation, and the core of a live controller. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median

from fastload.errors import OptionError
from fastload.estimate.units import format_duration, require_not_negative, require_positive, require_whole

__all__ = [
    "DEFAULT_BUDGET",
    "DEFAULT_FAILURES_PER_HOST_S",
    "DEFAULT_RESTART_S",
    "Cadence",
    "Recommendation",
    "Save",
    "budget_interval_s",
    "checkfreq_steps",
    "daly_s",
    "ettr",
    "ettr_peak_s",
    "job_mtbf_s",
    "pccheck_steps",
    "recommend",
    "recoverable_probability",
    "young_s",
]

# Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025:
# 6.50 failures in 1000 node-days of 8 GPUs, 5 minutes to restart.
DEFAULT_FAILURES_PER_HOST_S = 6.5 / 1000 / 86400
DEFAULT_RESTART_S = 300.0
DEFAULT_BUDGET = 0.035  # Mohan et al., "CheckFreq", FAST 2021

_ROUNDING = 1e-9  # 3.0000000001 steps are 3
_WINDOW = 5  # saves that count; odd, so that the median is one of them
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
        stall_s: Time δ that training stands still for a save.
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
        stall_s: Time δ that training stands still for a save.
        mtbf_s: Mean time M between failures.
    """
    first = young_s(stall_s, mtbf_s)
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def ettr(interval_s: float, *, stall_s: float, mtbf_s: float, restart_s: float) -> float:
    """Returns the expected training time ratio: the share of the wall clock that makes progress.

    ``(1 - N·r_f·(u₀ + Δt/2)) / (1 + w/Δt)``, with N·r_f = 1/mtbf; 0 where that is negative. Kokolis et al.,
    "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025.

    Args:
        interval_s: Time Δt between saves.
        stall_s: Time w that training stands still for a save.
        mtbf_s: Mean time between failures.
        restart_s: Time u₀ from a failure until training goes on.
    """
    require_positive(interval_s=interval_s, mtbf_s=mtbf_s)
    require_not_negative(stall_s=stall_s, restart_s=restart_s)
    return max(0.0, 1 - (restart_s + interval_s / 2) / mtbf_s) / (1 + stall_s / interval_s)


def ettr_peak_s(*, stall_s: float, mtbf_s: float, restart_s: float) -> float:
    """Returns the interval in seconds at which `ettr` is highest: -w + √(w² + 2w(M - u₀)).

    Where the derivative is 0. For w ≪ M it is close to the published Δt* = √(2w/(N·r_f)), Young's interval.

    Args:
        stall_s: Time w that training stands still for a save.
        mtbf_s: Mean time M between failures.
        restart_s: Time u₀ from a failure until training goes on.

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
            f"a failure every {format_duration(mtbf_s)} and {format_duration(lost_s)} to get over each: "
            "the job never gets on"
        )


def _peak_s(stall_s: float, mtbf_s: float, lost_s: float) -> float:
    return math.sqrt(stall_s**2 + 2 * stall_s * max(0.0, mtbf_s - lost_s)) - stall_s


def checkfreq_steps(*, checkpoint_s: float, stall_s: float, step_s: float) -> int:
    """Returns the least interval in steps at which one save is done before the next: ⌈(t_c - stall)/t_step⌉.

    At least 1. Mohan et al., "CheckFreq: Frequent, Fine-Grained DNN Checkpointing", FAST 2021.

    Args:
        checkpoint_s: Time t_c of a whole save, the stall included.
        stall_s: The part of it that training stands still for.
        step_s: Time of a training step.
    """
    require_not_negative(checkpoint_s=checkpoint_s, stall_s=stall_s)
    require_positive(step_s=step_s)
    return _whole_steps(checkpoint_s - stall_s, step_s)


def budget_interval_s(stall_s: float, budget: float) -> float:
    """Returns the least interval in seconds at which stalls stay within a share of the time trained.

    Mohan et al., "CheckFreq", FAST 2021: back off when the overhead is above the budget (3.5 %).

    Args:
        stall_s: Time that training stands still for a save.
        budget: Largest stall ÷ interval, such as 0.035.
    """
    require_not_negative(stall_s=stall_s)
    require_positive(budget=budget)
    return stall_s / budget


def pccheck_steps(*, write_s: float, step_s: float, saves_in_flight: int, slowdown: float) -> int:
    """Returns the least interval in steps with several saves in flight: ⌈T_w/(N·q·t)⌉, at least 1.

    Strati et al., "PCcheck: Persistent Concurrent Checkpointing for ML", ASPLOS 2025.

    Args:
        write_s: Time T_w until a save is durable.
        step_s: Time t of a training step.
        saves_in_flight: Saves N that may be under way at once.
        slowdown: Time that training may take q, with 1 for as long as without saves, 1.035 for 3.5 % more.

    Raises:
        OptionError: A number cannot be used.
    """
    require_not_negative(write_s=write_s)
    require_positive(step_s=step_s)
    require_whole(saves_in_flight=saves_in_flight)
    if not (math.isfinite(slowdown) and slowdown >= 1):
        raise OptionError(f"slowdown={slowdown!r}: must be a number, at least 1")
    return _whole_steps(write_s, saves_in_flight * slowdown * step_s)


def recoverable_probability(*, num_hosts: int, copies: int, failures: int) -> float:
    """Returns a lower bound on how likely copies in the memory of peers survive.

    ``1 - N·C(N-m, k-m)/(m·C(N, k))`` for m copies on groups of m hosts when k of N hosts fail at once; 1
    for k < m. Wang et al., "Gemini: Fast Failure Recovery in Distributed Training with In-Memory
    Checkpoints", SOSP 2023, corollary 1.

    Args:
        num_hosts: Hosts N.
        copies: Copies m of every part, each on another host of its group.
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
class Recommendation:
    """How often to save, and why.

    Attributes:
        interval_s: Time trained between saves, in seconds.
        interval_steps: The same in steps; None where the time of a step is not known.
        why: What decided, in words.
        overhead: Stall ÷ interval.
        ettr: Expected share of the wall clock that makes progress, see `recommend`.
    """

    interval_s: float
    interval_steps: int | None
    why: str
    overhead: float
    ettr: float


def recommend(
    *,
    stall_s: float,
    background_s: float,
    mtbf_s: float,
    restart_s: float = DEFAULT_RESTART_S,
    budget: float = DEFAULT_BUDGET,
    saves_in_flight: int = 1,
    step_s: float | None = None,
) -> Recommendation:
    """Recommends one interval: the peak of the ETTR curve, unless saves or stalls would be too many.

    Not shorter than what lets a save end before its place is wanted again (`checkfreq_steps`; with several
    in flight `pccheck_steps` without a slowdown), nor than what keeps stalls within the budget. A failure
    loses what was trained since the last *durable* save began, so the time in the background counts with
    the restart when the ETTR is worked out.

    Args:
        stall_s: Time that training stands still for a save.
        background_s: Time after that until the save is durable; 0 if saves are not asynchronous.
        mtbf_s: Mean time between failures of the job.
        restart_s: Time from a failure until training goes on.
        budget: Largest stall ÷ interval.
        saves_in_flight: Saves that may be under way at once.
        step_s: Time of a training step; None if it is not known.

    Raises:
        OptionError: A number cannot be used, or the job fails faster than it restarts.
    """
    require_positive(mtbf_s=mtbf_s, budget=budget, **({} if step_s is None else {"step_s": step_s}))
    require_not_negative(stall_s=stall_s, background_s=background_s, restart_s=restart_s)
    require_whole(saves_in_flight=saves_in_flight)
    _require_progress(mtbf_s, restart_s + background_s)
    return _recommend(
        stall_s, background_s, mtbf_s, restart_s + background_s, budget, saves_in_flight, step_s, spare=1
    )


def _recommend(
    stall_s: float,
    background_s: float,
    mtbf_s: float,
    lost_s: float,
    budget: float,
    saves_in_flight: int,
    step_s: float | None,
    *,
    spare: float,
) -> Recommendation:
    """Does what `recommend` says, with bounds that are kept with so much to spare."""
    peak_s = _peak_s(stall_s, mtbf_s, lost_s)
    room_s, affordable_s = spare * background_s / saves_in_flight, spare * budget_interval_s(stall_s, budget)
    candidates = (
        (peak_s, "the peak of the ETTR curve: more often costs more in stalls than it saves in lost work"),
        (affordable_s, f"the budget: more often, stalls take more than {budget * 100:.3g} % of the time"),
        (room_s, _room(background_s, saves_in_flight)),
    )
    interval_s, why = max(candidates, key=lambda candidate: candidate[0])
    if interval_s > peak_s > 0:
        why += f" (the ETTR would be highest at {format_duration(peak_s)})"
    interval_steps = None
    if step_s is not None:
        interval_steps = max(_whole_steps(max(room_s, affordable_s), step_s), round(peak_s / step_s))
        interval_s = interval_steps * step_s
        if interval_steps == 1:
            why = "every step: no more often is possible"
    elif interval_s == 0:
        raise OptionError("saves that take no time can be had at every step: say how long a step takes")
    value = ettr(interval_s, stall_s=stall_s, mtbf_s=mtbf_s, restart_s=lost_s)
    return Recommendation(interval_s, interval_steps, why, stall_s / interval_s, value)


def _room(background_s: float, saves_in_flight: int) -> str:
    written = f"a save is written in {format_duration(background_s)}"
    if saves_in_flight == 1:
        return f"the save before has to be done: {written}"
    return f"{saves_in_flight} saves in flight are the most: {written}"


@dataclass(frozen=True, slots=True)
class Save:
    """What one save took, as measured on one rank.

    Attributes:
        step_s: Mean time of a training step since the save before, stalls left out.
        stall_s: Time that training stood still for it.
        background_s: Time after that until it was durable.
    """

    step_s: float
    stall_s: float
    background_s: float


@dataclass(frozen=True, slots=True)
class Cadence:
    """A controller of the interval between saves. A value: the same measurements give the same interval.

    So all ranks agree if all of them are fed what one rank measured. The median of the last few saves
    counts, and the interval stays as it is while what is best is near it: one odd save changes nothing, a
    drift does.

    Attributes:
        mtbf_s: Mean time between failures of the job.
        restart_s: Time from a failure until training goes on.
        budget: Largest stall ÷ interval.
        saves_in_flight: Saves that may be under way at once.
        interval_steps: Steps between saves: what to start with, then what was worked out.
        why: What decided it, in words.
        saves: The measurements that count.
    """

    mtbf_s: float
    restart_s: float
    budget: float
    saves_in_flight: int
    interval_steps: int
    why: str = "nothing has been measured yet"
    saves: tuple[Save, ...] = ()

    def __post_init__(self) -> None:
        require_positive(mtbf_s=self.mtbf_s, budget=self.budget)
        require_not_negative(restart_s=self.restart_s)
        require_whole(saves_in_flight=self.saves_in_flight, interval_steps=self.interval_steps)
        _require_progress(self.mtbf_s, self.restart_s)

    def measured(self, save: Save) -> Cadence:
        """Returns the controller after one more save.

        Raises:
            OptionError: What was measured is no time.
        """
        require_positive(step_s=save.step_s)
        require_not_negative(stall_s=save.stall_s, background_s=save.background_s)
        saves = (*self.saves, save)[-_WINDOW:]
        background_s = median(save.background_s for save in saves)
        best = _recommend(
            median(save.stall_s for save in saves),
            background_s,
            self.mtbf_s,
            self.restart_s + background_s,
            self.budget,
            self.saves_in_flight,
            median(save.step_s for save in saves),
            spare=_DEAD_BAND,  # so that the bounds hold anywhere inside of the dead band
        )
        steps = best.interval_steps
        assert steps is not None
        near = steps <= self.interval_steps * _DEAD_BAND and self.interval_steps <= steps * _DEAD_BAND
        if self.saves and near:
            return replace(self, saves=saves)
        return replace(self, saves=saves, interval_steps=steps, why=best.why)
