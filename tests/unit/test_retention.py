"""What is kept, as the rules say, whatever order things come in."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import OptionError
from fastload.training.retention import Point, Retention, SavedCheckpoint, branch_for, expendable

rules = st.builds(
    Retention,
    keep_last=st.none() | st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 10),
    keep_every_seconds=st.none() | st.floats(0.5, 50),
    best=st.none() | st.sampled_from([("loss", "min"), ("loss", "max")]),
)
measured = st.none() | st.floats(allow_nan=True, allow_infinity=True)
runs = st.lists(st.tuples(st.integers(1, 5), st.floats(0.01, 20), measured), max_size=30)


def history(run: list[tuple[int, float, float | None]]) -> list[SavedCheckpoint]:
    step, now, saved = 0, 0.0, []
    for steps, seconds, loss in run:
        step, now = step + steps, now + seconds
        saved.append(SavedCheckpoint(step, now, {"loss": loss} if loss is not None else {}))
    return saved


def steps_after(retention: Retention, saved: list[SavedCheckpoint]) -> list[SavedCheckpoint]:
    gone = expendable(retention, saved, needed=())
    return [one for one in saved if one.step not in gone]


@given(rules, runs)
def test_every_rule_is_kept_and_nothing_else(retention: Retention, run: Any) -> None:
    saved = history(run)
    kept = {one.step for one in steps_after(retention, saved)}
    if retention.keep_last is None:
        assert len(kept) == len(saved)
        return
    last = {one.step for one in saved[-retention.keep_last :]}
    multiples = {one.step for one in saved if retention.keep_every and one.step % retention.keep_every == 0}
    assert last | multiples <= kept
    losses = {
        one.step: one.metrics["loss"] for one in saved if not math.isnan(one.metrics.get("loss", math.nan))
    }
    best = {step for step in kept - last - multiples if retention.best and step in losses}
    if retention.best and losses:
        pick = min if retention.best[1] == "min" else max
        wanted = max(step for step, loss in losses.items() if loss == pick(losses.values()))
        assert wanted in kept
        best &= {wanted}
    spaced = sorted(kept - last - multiples - best)
    if retention.keep_every_seconds is None:
        assert spaced == []
    times = {one.step: one.saved_s for one in saved}
    assert all(times[b] - times[a] > 0 for a, b in itertools.pairwise(spaced))


@given(st.floats(0.5, 50), runs)
def test_one_in_so_many_seconds(seconds: float, run: Any) -> None:
    saved = history(run)
    kept = steps_after(Retention(keep_last=1, keep_every_seconds=seconds), saved)
    chain = kept if not kept or len(kept) == 1 else kept[:-1]
    assert kept[:1] == saved[:1], "the first is the anchor of all others"
    assert all(b.saved_s >= a.saved_s + seconds for a, b in itertools.pairwise(chain))
    for one in saved:  # no gap that is wider than it has to be
        before = [other for other in chain if other.saved_s <= one.saved_s]
        assert one in kept or one.saved_s < before[-1].saved_s + seconds


@given(rules, runs)
def test_pruning_after_each_save_ends_where_pruning_once_does(retention: Retention, run: Any) -> None:
    saved = history(run)
    left: list[SavedCheckpoint] = []
    for one in saved:
        left = steps_after(retention, [*left, one])
    once = steps_after(retention, saved)
    if retention.best is None:
        assert left == once
    assert {one.step for one in once} <= {one.step for one in left}
    assert steps_after(retention, once) == once, "a second time there is nothing to do"


@given(rules, runs, st.integers(0, 100), st.randoms())
def test_order_does_not_matter_and_what_is_needed_stays(
    retention: Retention, run: Any, needed: int, random: Any
) -> None:
    saved = history(run)
    gone = expendable(retention, saved, needed=(needed,))
    shuffled = random.sample(saved, len(saved))
    assert expendable(retention, shuffled, needed=(needed,)) == gone == sorted(gone)
    assert needed not in gone
    assert not saved or saved[-1].step not in gone


@given(st.lists(st.integers(0, 6), max_size=30), st.integers(1, 4))
def test_the_order_is_that_of_the_saves_whatever_the_steps(steps: list[int], keep_last: int) -> None:
    """Runs go back, and other ones begin; a save of a step that is there replaces it."""
    saved: dict[int, SavedCheckpoint] = {}
    for step in steps:
        newest = max((one.point for one in saved.values()), default=None)
        saved[step] = SavedCheckpoint(step, branch=branch_for(step, newest))
        assert newest is None or saved[step].point >= newest
    order = [step for number, step in enumerate(steps) if step not in steps[number + 1 :]]
    assert sorted(saved, key=lambda step: saved[step].point) == order
    gone = expendable(Retention(keep_last=keep_last), list(saved.values()), needed=())
    assert gone == order[:-keep_last]


@given(rules, runs.filter(lambda run: len(run) > 1))
def test_what_is_to_be_written_in_any_case_is_what_would_be_kept(retention: Retention, run: Any) -> None:
    """Although something newer is there; and of all that was written, the best one is enough to know that."""
    saved = history(run)
    kept = steps_after(replace(retention, keep_last=1, keep_every_seconds=None), saved)
    best = None
    for number, one in enumerate(saved[:-1]):
        assert retention.requires(one, saved[:number] + saved[number + 1 :]) == (one in kept)
        known = [best] if best is not None else []
        assert retention.requires(one, known) == retention.requires(one, saved[:number])
        best = retention.best_of(one, best)


def test_a_run_that_never_goes_back_has_one_branch() -> None:
    assert branch_for(0, None) == 0
    assert [branch_for(step, Point(0, 7)) for step in (6, 7, 8)] == [1, 0, 0]


def test_the_best_of_equals_is_the_latest() -> None:
    saved = [
        SavedCheckpoint(step, step, {"loss": loss})
        for step, loss in enumerate([2.0, 1.0, math.nan, 1.0, 3.0, 4.0])
    ]
    rule = Retention(keep_last=1, best=("loss", "min"))
    assert expendable(rule, saved, needed=()) == [0, 1, 2, 4]
    assert expendable(Retention(keep_last=1, best=("loss", "max")), saved, needed=()) == [0, 1, 2, 3, 4]
    later = SavedCheckpoint(1, 9.0, {"loss": 1.0}, branch=1)
    again = [saved[0], saved[3], later, SavedCheckpoint(2, 10.0, branch=1)]
    assert expendable(rule, again, needed=()) == [0, 3], "1 was saved after 3"


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_last": 0},
        {"keep_last": True},
        {"keep_every": 1.5},
        {"keep_every_seconds": 0},
        {"keep_every_seconds": math.inf},
        {"best": "loss"},
        {"best": ("loss", "least")},
    ],
)
def test_what_cannot_be_a_rule(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        Retention(**wrong)
