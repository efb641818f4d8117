"""Intervals against published figures; the recommendation; the live controller."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import OptionError
from fastload.planning.cadence import (
    AdaptiveInterval,
    MeasuredSave,
    Recommendation,
    budget_interval_s,
    checkfreq_steps,
    daly_s,
    ettr,
    ettr_peak_s,
    job_mtbf_s,
    pccheck_steps,
    recommend,
    recoverable_probability,
    young_s,
)

HOUR_S = 3600.0
# Kokolis et al. (see `estimate.cadence`): 6.50 failures in 1000 node-days of 8 GPUs.
FAILURES_PER_HOST_S = 6.5 / 1000 / 86400
TRILLION_MTBF_S, TRILLION_STALL_S = job_mtbf_s(3072 // 8, FAILURES_PER_HOST_S), 13_800 / 273


@pytest.mark.parametrize(("gpus", "hours"), [(16_384, 1.80), (131_072, 0.225), (3072, 9.615)])
def test_published_times_between_failures(gpus: int, hours: float) -> None:
    assert job_mtbf_s(gpus // 8, FAILURES_PER_HOST_S) / HOUR_S == pytest.approx(hours, rel=0.002)


def test_young_and_daly_for_a_trillion_parameters() -> None:
    assert abs(TRILLION_STALL_S - 50.55) < 0.005
    assert young_s(TRILLION_STALL_S, TRILLION_MTBF_S) == pytest.approx(1870.7, abs=0.1)
    assert daly_s(TRILLION_STALL_S, TRILLION_MTBF_S) == pytest.approx(1837.2, abs=0.1)


def test_daly_where_saves_take_longer_than_failures() -> None:
    assert daly_s(200, 100) == daly_s(1000, 100) == 100
    assert daly_s(199.99, 100) == pytest.approx(200 * (1 + 1 / 3 + 1 / 9) - 200, rel=1e-3)


@pytest.mark.parametrize(("minutes", "ratio"), [(60, 0.684), (5, 0.932)])
def test_published_ettr(minutes: float, ratio: float) -> None:
    facts = {"stall_s": 0, "mtbf_s": job_mtbf_s(2000, FAILURES_PER_HOST_S), "restart_s": 300}
    assert ettr(minutes * 60, **facts) == pytest.approx(ratio, abs=0.0005)


def test_the_published_optimum_is_youngs() -> None:
    num_hosts, stall_s = 2000, 30.0
    published_s = math.sqrt(2 * stall_s / (num_hosts * FAILURES_PER_HOST_S))
    assert young_s(stall_s, job_mtbf_s(num_hosts, FAILURES_PER_HOST_S)) == pytest.approx(published_s)


@given(st.floats(0.01, 1000), st.floats(1e3, 1e7), st.floats(0, 0.9), st.floats(0.5, 2))
def test_no_interval_is_better_than_the_peak(
    stall_s: float, mtbf_s: float, share: float, factor: float
) -> None:
    facts = {"stall_s": stall_s, "mtbf_s": mtbf_s, "restart_s": share * mtbf_s}
    peak_s = ettr_peak_s(**facts)
    assert ettr(peak_s, **facts) >= ettr(factor * peak_s, **facts) - 1e-12
    assert peak_s <= young_s(stall_s, mtbf_s)


@pytest.mark.parametrize(
    ("checkpoint_s", "stall_s", "step_s", "steps"),
    [(60, 10, 5, 10), (61, 10, 5, 11), (10, 10, 5, 1), (0, 0, 5, 1), (0.4, 0.1, 0.1, 3)],
)
def test_checkfreq(checkpoint_s: float, stall_s: float, step_s: float, steps: int) -> None:
    assert checkfreq_steps(checkpoint_s=checkpoint_s, stall_s=stall_s, step_s=step_s) == steps


def test_the_budget_of_checkfreq() -> None:
    assert budget_interval_s(3.5, 0.035) == pytest.approx(100)


@pytest.mark.parametrize(
    ("concurrent_saves", "slowdown", "steps"), [(1, 1, 60), (2, 1, 30), (4, 1.05, 15), (99, 1, 1)]
)
def test_pccheck(concurrent_saves: int, slowdown: float, steps: int) -> None:
    found = pccheck_steps(write_s=60, step_s=1, concurrent_saves=concurrent_saves, slowdown=slowdown)
    assert found == steps == max(1, math.ceil(60 / (concurrent_saves * slowdown * 1)))


@pytest.mark.parametrize(("failures", "probability"), [(1, 1.0), (2, 0.933), (3, 0.80)])
def test_gemini(failures: int, probability: float) -> None:
    found = recoverable_probability(num_hosts=16, copies=2, failures=failures)
    assert found == pytest.approx(probability, abs=0.0005)


def test_more_copies_never_hurt_and_more_failures_never_help() -> None:
    rows = [
        [recoverable_probability(num_hosts=24, copies=copies, failures=failures) for failures in range(1, 25)]
        for copies in range(1, 5)
    ]
    for row in rows:
        assert row == sorted(row, reverse=True)
        assert all(0 <= probability <= 1 for probability in row)
    assert all(
        more >= fewer for few, many in itertools.pairwise(rows) for fewer, more in zip(few, many, strict=True)
    )


FACTS: dict[str, Any] = {"stall_s": 5.0, "background_s": 49.0, "mtbf_s": 28.8 * HOUR_S, "step_s": 6.0}


def test_recommended_is_the_peak_where_nothing_forbids_it() -> None:
    best = recommend(**FACTS)
    peak_s = ettr_peak_s(stall_s=5, mtbf_s=28.8 * HOUR_S, restart_s=300 + 49)
    assert best.interval_steps == round(peak_s / 6)
    assert best.interval_s == best.interval_steps * 6
    assert "peak of the ETTR curve" in best.why
    assert best.overhead == 5 / best.interval_s
    assert best.ettr == ettr(best.interval_s, stall_s=5, mtbf_s=28.8 * HOUR_S, restart_s=349)


@pytest.mark.parametrize(
    ("change", "steps", "words"),
    [
        ({"background_s": 7200.0}, 1200, "the save before has to be done: a save is written in 2 h"),
        ({"background_s": 7200.0, "concurrent_saves": 4}, 300, "at most 4 saves at once"),
        ({"budget": 0.001}, 834, "the budget: more often, stalls take more than 0.1 % of the time"),
        ({"stall_s": 0.0, "background_s": 0.0}, 1, "every step"),
        ({"stall_s": 0.0, "background_s": 6.0}, 1, "every step"),
        ({"stall_s": 0.0, "background_s": 6.1}, 2, "the save before has to be done"),
    ],
)
def test_what_decides(change: dict[str, Any], steps: int, words: str) -> None:
    best = recommend(**{**FACTS, **change})
    assert best.interval_steps == steps
    assert words in best.why


def test_without_the_time_of_a_step() -> None:
    best = recommend(**{**FACTS, "step_s": None})
    assert best.interval_steps is None
    assert best.interval_s == pytest.approx(recommend(**FACTS).interval_s, rel=0.01)
    with pytest.raises(OptionError, match="give the time of a step"):
        recommend(stall_s=0, background_s=0, mtbf_s=1e5)


times = st.floats(0, 1e4)


@given(stall_s=times, background_s=times, step_s=st.floats(0.01, 100), concurrent_saves=st.integers(1, 5))
def test_a_recommendation_keeps_every_bound(
    stall_s: float, background_s: float, step_s: float, concurrent_saves: int
) -> None:
    best = recommend(
        stall_s=stall_s,
        background_s=background_s,
        mtbf_s=1e6,
        step_s=step_s,
        concurrent_saves=concurrent_saves,
    )
    assert isinstance(best, Recommendation)
    assert best.interval_s * (1 + 1e-6) * concurrent_saves >= background_s
    assert best.overhead <= 0.035 * (1 + 1e-6)
    assert 0 <= best.ettr <= 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mtbf_s": 300.0}, "5 min, and 5.82 min to recover from each: the job makes no progress"),
        ({"mtbf_s": 0.0}, "mtbf_s=0.0: must be a number above 0"),
        ({"mtbf_s": float("nan")}, "mtbf_s=nan"),
        ({"stall_s": -1.0}, "stall_s=-1.0: must be a number, at least 0"),
        ({"background_s": float("inf")}, "background_s=inf"),
        ({"step_s": 0.0}, "step_s=0.0"),
        ({"budget": 0.0}, "budget=0.0"),
        ({"concurrent_saves": 0}, "concurrent_saves=0"),
        ({"restart_s": -5.0}, "restart_s=-5.0"),
    ],
)
def test_recommendations_that_cannot_be_made(change: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        recommend(**{**FACTS, **change})


def test_formulas_refuse_bad_numbers() -> None:
    for wrong in (
        lambda: job_mtbf_s(0, 1.0),
        lambda: job_mtbf_s(8, -1.0),
        lambda: young_s(-1, 10),
        lambda: daly_s(1, 0),
        lambda: ettr(0, stall_s=1, mtbf_s=1, restart_s=1),
        lambda: checkfreq_steps(checkpoint_s=1, stall_s=1, step_s=0),
        lambda: pccheck_steps(write_s=1, step_s=1, concurrent_saves=1, slowdown=0.035),
        lambda: recoverable_probability(num_hosts=4, copies=5, failures=1),
        lambda: recoverable_probability(num_hosts=4, copies=2, failures=5),
    ):
        with pytest.raises(OptionError):
            wrong()


# The controller


def controller(**change: Any) -> AdaptiveInterval:
    facts = {"mtbf_s": 1e5, "restart_s": 300.0, "budget": 0.035, "concurrent_saves": 1, "interval_steps": 10}
    return AdaptiveInterval(**{**facts, **change})


def fed(cadence: AdaptiveInterval, saves: list[MeasuredSave]) -> list[int]:
    steps = []
    for save in saves:
        cadence = cadence.measured(save)
        steps.append(cadence.interval_steps)
    return steps


SAVE = MeasuredSave(step_s=2.0, stall_s=5.0, background_s=40.0)


def test_the_first_save_sets_the_interval() -> None:
    cadence = controller()
    assert cadence.interval_steps == 10
    assert "nothing has been measured" in cadence.why
    after = cadence.measured(SAVE)
    assert after.interval_steps == recommend(stall_s=5, background_s=40, mtbf_s=1e5, step_s=2).interval_steps
    assert "ETTR" in after.why
    assert cadence.interval_steps == 10, "a controller is a value"


@given(st.lists(st.floats(0.95, 1.05), min_size=3, max_size=30))
def test_noise_changes_nothing(factors: list[float]) -> None:
    for bound in (SAVE, MeasuredSave(2.0, 0.01, 900.0), MeasuredSave(2.0, 60.0, 40.0)):
        saves = [
            MeasuredSave(bound.step_s, bound.stall_s * factor, bound.background_s * factor)
            for factor in factors
        ]
        assert len(set(fed(controller(), saves))) == 1


def test_one_odd_save_changes_nothing_and_a_drift_does() -> None:
    odd = MeasuredSave(2.0, 50.0, 4000.0)
    steps = fed(controller(), [SAVE] * 5 + [odd] + [SAVE] * 5)
    assert len(set(steps)) == 1
    slow = MeasuredSave(2.0, 5.0, 4000.0)
    drifted = fed(controller(), [SAVE] * 5 + [slow] * 5)
    assert drifted[4] == steps[0]
    assert drifted[-3] == drifted[-1] == math.ceil(1.2 * 4000 / 2), "after three saves, with some to spare"
    assert fed(controller(), [slow] * 5 + [SAVE] * 5)[-1] == steps[0], "and back"


def test_the_why_tells_what_was_measured() -> None:
    assert "a save is written in 66.7 min" in controller().measured(MeasuredSave(2.0, 0.0, 4000.0)).why
    assert "more than 3.5 %" in controller(mtbf_s=1e3).measured(MeasuredSave(2.0, 50.0, 0.0)).why


saves = st.builds(
    MeasuredSave, step_s=st.floats(0.01, 50), stall_s=st.floats(0, 100), background_s=st.floats(0, 5e3)
)


@given(st.lists(saves, max_size=20), st.integers(1, 4))
def test_deterministic_and_within_the_bounds(measured: list[MeasuredSave], concurrent_saves: int) -> None:
    first, second = (
        controller(concurrent_saves=concurrent_saves),
        controller(concurrent_saves=concurrent_saves),
    )
    for save in measured:
        first, second = first.measured(save), second.measured(save)
        assert first == second
        assert len(first.saves) <= 5
        middle = [
            sorted(getattr(save, name) for save in first.saves)
            for name in ("step_s", "stall_s", "background_s")
        ]
        if len(first.saves) % 2:
            step_s, stall_s, background_s = (values[len(values) // 2] for values in middle)
            interval_s = first.interval_steps * step_s * (1 + 1e-6)
            assert interval_s * concurrent_saves >= background_s, (
                "a save ends before its place is wanted again"
            )
            assert stall_s <= 0.035 * interval_s, "stalls stay within the budget"


def test_a_save_slower_than_failures_does_not_end_the_job() -> None:
    after = controller(mtbf_s=1000.0).measured(MeasuredSave(1.0, 5.0, 5000.0))
    assert after.interval_steps == 6000


@pytest.mark.parametrize(
    "save",
    [
        MeasuredSave(0.0, 1, 1),
        MeasuredSave(1, -1, 1),
        MeasuredSave(1, 1, float("nan")),
        MeasuredSave(float("inf"), 1, 1),
    ],
    ids=str,
)
def test_measurements_that_are_none(save: MeasuredSave) -> None:
    with pytest.raises(OptionError, match="_s="):
        controller().measured(save)


@pytest.mark.parametrize(
    "change",
    [{"mtbf_s": 0}, {"budget": -1}, {"interval_steps": 0}, {"concurrent_saves": 0}, {"mtbf_s": 100}],
    ids=str,
)
def test_controllers_that_cannot_be(change: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        controller(**change)
