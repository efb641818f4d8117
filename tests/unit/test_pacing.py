"""The interval that is worked out while training runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastload.errors import OptionError
from fastload.training import pacing
from fastload.training.pacing import Pace, Rhythm, Steady


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(pacing, "time", SimpleNamespace(monotonic=lambda: self.now))

    def train(self, pace: Pace, steps: int, step_s: float) -> None:
        for _ in range(steps):
            self.now += step_s
            pace.stepped()

    def save(self, pace: Pace, stall_s: float, background_s: float) -> None:
        def save() -> Any:
            self.now += stall_s
            report = SimpleNamespace(total_s=stall_s + background_s + 3.0, stall_s=stall_s, waited_s=3.0)
            return SimpleNamespace(done=lambda: True, report=report)

        pace.saving(save)
        pace.stepped()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_first_saves_come_after_a_few_steps_to_be_measured(clock: Clock) -> None:
    pace = Pace(mtbf_s=100_000, restart_s=300, budget=0.035)
    assert pace.interval_s is None
    clock.train(pace, 12, 2.0)
    assert pace.interval_s == pytest.approx(20.0)


def test_young_s_interval_once_a_save_was_measured(clock: Clock) -> None:
    pace = Pace(mtbf_s=100_000, restart_s=300, budget=0.035)
    clock.train(pace, 12, 2.0)
    clock.save(pace, 5.0, 30.0)
    assert pace.interval_s == pytest.approx((2 * 5.0 * 100_000) ** 0.5, rel=0.1)  # 1000 s


def test_a_stall_is_no_step_and_the_budget_is_kept(clock: Clock) -> None:
    pace = Pace(mtbf_s=1000, restart_s=0, budget=0.02)
    clock.train(pace, 50, 1.0)
    clock.save(pace, 4.0, 1.0)
    assert pace.interval_s is not None
    assert pace.interval_s >= 4.0 / 0.02
    clock.train(pace, 3, 1.0)
    assert pace.interval_s % 1.0 == pytest.approx(0.0)  # the median step is still one second


def test_the_interval_follows_a_drift_but_not_one_odd_save(clock: Clock) -> None:
    pace = Pace(mtbf_s=100_000, restart_s=300, budget=0.035)
    clock.train(pace, 50, 1.0)
    for _ in range(5):
        clock.save(pace, 1.0, 5.0)
    steady = pace.interval_s
    clock.save(pace, 60.0, 5.0)
    assert pace.interval_s == steady
    for _ in range(5):
        clock.save(pace, 9.0, 5.0)
    assert steady is not None
    assert pace.interval_s == pytest.approx(3 * steady, rel=0.2)


def test_what_was_asked_for_is_checked() -> None:
    assert isinstance(Rhythm(None, 5.0, None, 300.0, 0.035).start(), Steady)
    assert isinstance(Rhythm("auto", None, 9e4, 300.0, 0.035).start(), Pace)
    for every, seconds, mtbf_s, budget in [
        ("auto", None, None, 0.1), ("auto", 5.0, 9e4, 0.1), ("often", None, 9e4, 0.1),
        (None, -1.0, None, 0.1), ("auto", None, -9e4, 0.1), ("auto", None, 9e4, 0.0),
    ]:  # fmt: skip
        with pytest.raises(OptionError):
            Rhythm(every, seconds, mtbf_s, 300.0, budget)
