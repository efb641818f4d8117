"""Numbers of calls: the same on all ranks, in whatever order their threads learn of the end of an epoch."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.comm.tree import CallCounter, CallId, ExpiringKeys


def move(counter: CallCounter, epoch: int, num_void: int) -> None:
    """Moves to an epoch all calls that have not met, of which the first ones turn out to have."""
    unmet = counter.unmet(epoch)
    if unmet is not None:
        assert counter.advance(epoch, unmet, unmet[len(unmet) - num_void :])


@settings(deadline=None)
@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.integers(0, 3))
def test_ranks_number_their_calls_alike_after_one_that_only_one_of_them_made(
    num_met: int, num_open: int, num_known: int, num_extra: int
) -> None:
    """The others may begin some calls before they learn of it, and have met for some without knowing."""
    alone, other = CallCounter(), CallCounter()
    for counter in (alone, other):
        begun = [counter.begin("met") for _ in range(num_met)] + [
            counter.begin("open") for _ in range(num_open)
        ]
        for call in begun[: num_met if counter is alone else min(num_met, num_known)]:
            counter.settle(call)
    for _ in range(num_extra):
        alone.settle(alone.begin("alone"))
    late = [other.begin("late") for _ in range(2)]
    move(alone, 2, num_open)
    move(other, 2, num_open + 2)
    again = [alone.begin("late") for _ in range(2)]
    assert [call.id for call in again] == [call.id for call in late]
    assert late[0].id == CallId(2, num_open + 1)


def test_a_call_that_has_met_keeps_its_number() -> None:
    counter = CallCounter()
    first, second, third = (counter.begin(name) for name in "ABC")
    counter.settle(first)
    unmet = counter.unmet(3)
    assert unmet == [second, third]
    assert counter.advance(3, unmet, [third])
    assert (first.id, second.id, third.id) == (CallId(1, 1), CallId(1, 2), CallId(3, 1))
    assert second.has_met
    assert not third.has_met
    assert counter.begin("D").id == CallId(3, 2)


def test_what_begins_meanwhile_is_not_left_behind() -> None:
    counter = CallCounter()
    first = counter.begin("A")
    unmet = counter.unmet(2)
    assert unmet is not None
    second = counter.begin("B")
    assert not counter.advance(2, unmet, unmet), "another thread has begun a call"
    move(counter, 2, 2)
    assert (first.id, second.id) == (CallId(2, 1), CallId(2, 2))
    assert counter.unmet(2) is None
    assert counter.unmet(1) is None


def test_keys_expire_in_the_second_rotation() -> None:
    keys = ExpiringKeys()
    keys.add(["a"])
    assert keys.rotate() == []
    keys.add(["b"])
    assert keys.rotate() == ["a"]
    assert keys.rotate() == ["b"]
    assert keys.rotate() == []
