"""The interval that is worked out while training runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import OptionError
from fastload.planning.cadence import Tier, loss_probability, recommend_tiers, young_s
from fastload.training import interval
from fastload.training.interval import IntervalController, IntervalPolicy, controller_of


def auto(
    num_hosts: int = 1,
    memory_copies: int | None = None,
    *,
    mtbf_s: float = 100_000,
    restart_s: float = 300,
    budget: float = 0.035,
    **more: Any,
) -> IntervalController:
    policy = IntervalPolicy(
        every="auto", mtbf_s=mtbf_s, restart_s=restart_s, budget=budget, memory_copies=memory_copies, **more
    )
    return controller_of(policy, num_hosts)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(interval, "time", SimpleNamespace(monotonic=lambda: self.now))

    def train(self, pace: IntervalController, steps: int, step_s: float) -> None:
        for _ in range(steps):
            self.now += step_s
            pace.step_done()

    def save(
        self, pace: IntervalController, stall_s: float, background_s: float, *, memory: bool = False
    ) -> None:
        def save() -> Any:
            self.now += stall_s
            return SimpleNamespace(done=lambda: True, report=SimpleNamespace(background_s=background_s))

        pace.measure(save, to_tier=memory)
        pace.step_done()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_first_saves_come_after_a_few_steps_to_be_measured(clock: Clock) -> None:
    pace = auto()
    assert pace.storage_s is None
    clock.train(pace, 12, 2.0)
    assert pace.storage_s == pytest.approx(20.0)


def test_nothing_is_due_while_the_first_save_is_written(clock: Clock) -> None:
    """It may take longer than a few steps, and the next one would wait for it."""
    for memory in (False, True):
        pace = auto(16, 2)
        first = SimpleNamespace(done=lambda: False, report=None)
        clock.train(pace, 12, 2.0)
        pace.measure(lambda first=first: first, to_tier=memory)
        clock.train(pace, 12, 2.0)
        found = [pace.storage_s, pace.memory_s]
        assert found == pytest.approx([20.0, None] if memory else [None, 20.0])
        first.done = lambda: True  # it has failed: the next one is tried
        clock.train(pace, 1, 2.0)
        assert (pace.storage_s, pace.memory_s) == pytest.approx((20.0, 20.0))


def test_young_s_interval_once_a_save_was_measured(clock: Clock) -> None:
    pace = auto()
    clock.train(pace, 12, 2.0)
    clock.save(pace, 5.0, 30.0)
    assert pace.storage_s == pytest.approx((2 * 5.0 * 100_000) ** 0.5, rel=0.1)  # 1000 s


def test_a_stall_is_no_step_and_the_budget_is_kept(clock: Clock) -> None:
    pace = auto(mtbf_s=1000, restart_s=0, budget=0.02)
    clock.train(pace, 50, 1.0)
    clock.save(pace, 4.0, 1.0)
    assert pace.storage_s is not None
    assert pace.storage_s >= 4.0 / 0.02
    clock.train(pace, 3, 1.0)
    assert pace.storage_s % 1.0 == pytest.approx(0.0)  # the median step is still one second


def test_the_interval_follows_a_drift_but_not_one_odd_save(clock: Clock) -> None:
    pace = auto()
    clock.train(pace, 50, 1.0)
    for _ in range(5):
        clock.save(pace, 1.0, 5.0)
    steady = pace.storage_s
    clock.save(pace, 60.0, 5.0)
    assert pace.storage_s == steady
    for _ in range(5):
        clock.save(pace, 9.0, 5.0)
    assert steady is not None
    assert pace.storage_s == pytest.approx(3 * steady, rel=0.2)


def test_each_tier_is_for_the_failures_that_it_is_there_for(clock: Clock) -> None:
    """16 hosts with 2 copies: memory gets over all but 1 in 100 failures, and the odd pair of partners."""
    pace = auto(16, 2)
    assert (pace.storage_s, pace.memory_s) == (None, None)
    clock.train(pace, 12, 2.0)
    assert (pace.storage_s, pace.memory_s) == pytest.approx((20.0, 20.0))
    clock.save(pace, 0.5, 10.0, memory=True)
    clock.save(pace, 5.0, 30.0)
    advice = recommend_tiers(
        memory=Tier(0.5, 10.0, 300.0),
        storage=Tier(5.0, 30.0, 300.0),
        mtbf_s=100_000,
        loss_probability=loss_probability(num_hosts=16, copies=2, mtbf_s=100_000, window_s=310.0),
        step_s=2.0,
    )
    assert pace.memory_s == pytest.approx(advice.memory.interval_s)
    assert pace.storage_s == pytest.approx(advice.storage.interval_s)
    assert pace.storage_s > 9 * young_s(5.0, 100_000), "storage is for 1 in 100 failures"


@given(
    st.floats(0.001, 5.0), st.floats(0.0, 60.0), st.floats(0.001, 20.0), st.floats(0.0, 600.0),
    st.integers(1, 64), st.integers(1, 4), st.floats(0.01, 0.2),
)  # fmt: skip
def test_the_budget_is_that_of_both_tiers(
    stall: float, background: float, stall_storage: float, written: float, num_hosts: int, copies: int,
    budget: float,
) -> None:  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        pace = auto(num_hosts, copies, mtbf_s=20_000, budget=budget)
        clock.train(pace, 12, 1.0)
        for _ in range(2):
            clock.save(pace, stall_storage, written)
            clock.save(pace, stall, background, memory=True)
        assert pace.storage_s is not None
        assert pace.memory_s is not None
        assert stall / pace.memory_s + stall_storage / pace.storage_s <= budget * (1 + 1e-9)
        assert pace.memory_s >= background * (1 - 1e-9), "at most one save to memory is in progress"


def test_memory_with_one_copy_and_memory_with_an_interval_of_its_own(clock: Clock) -> None:
    """Nobody knows how many failures leave the hosts alone: both tiers are there for all of them."""
    for num_hosts, copies in ((1, 2), (16, 1)):
        pace = auto(num_hosts, copies)
        clock.train(pace, 12, 2.0)
        clock.save(pace, 5.0, 30.0)
        clock.save(pace, 5.0, 30.0, memory=True)
        assert pace.storage_s == pytest.approx(1000.0, rel=0.1)
        assert pace.memory_s == pytest.approx(1000.0, rel=0.1)
    for seconds in (None, 7.0):
        own = {"memory_every_steps": 50} if seconds is None else {"memory_every_seconds": seconds}
        pace = auto(16, 2, **own)
        clock.train(pace, 12, 2.0)
        clock.save(pace, 5.0, 30.0, memory=True)
        clock.save(pace, 5.0, 30.0)
        assert pace.memory_s == seconds
        assert pace.storage_s is not None
        assert pace.storage_s > 9 * young_s(5.0, 100_000), "the failures it is for are as rare"


def test_what_was_asked_for_is_checked() -> None:
    assert IntervalController(IntervalPolicy()).storage_s == 1800
    assert IntervalController(IntervalPolicy(every_steps=5)).storage_s is None
    given = IntervalController(IntervalPolicy(every_seconds=5.0))
    assert (given.storage_s, given.memory_s) == (5.0, None)
    for wrong in [
        {"every": "auto"}, {"every": "auto", "every_seconds": 5.0, "mtbf_s": 9e4},
        {"every": "often", "mtbf_s": 9e4}, {"every_seconds": -1.0}, {"every": "auto", "mtbf_s": -9e4},
        {"every": "auto", "mtbf_s": 9e4, "budget": 0.0}, {"every_steps": 0}, {"memory_every_steps": 5},
        {"memory_copies": 2}, {"memory_copies": 0, "memory_every_steps": 5},
    ]:  # fmt: skip
        with pytest.raises(OptionError):
            IntervalPolicy(**wrong)


def test_auto_without_its_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.ext.EXTENSIONS", {})
    with pytest.raises(OptionError, match="every='auto' needs the extension 'auto', which is not installed"):
        auto()
    assert IntervalPolicy(every_steps=5).every_seconds is None


def test_a_wait_for_an_earlier_save_is_neither_a_step_nor_the_cost_of_a_save(clock: Clock) -> None:
    waits, alone = auto(mtbf_s=10_000), auto(mtbf_s=10_000)
    for pace in (waits, alone):
        for _ in range(30):
            clock.train(pace, 3, 1.0)
            if pace is waits:
                pace.pause(lambda: setattr(clock, "now", clock.now + 50.0))
            clock.save(pace, 0.5, 10.0)
    assert waits.storage_s == alone.storage_s
