"""Numbers of calls: the same on all ranks, in whatever order threads find out what they missed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.comm.meeting import Verdict
from fastload.comm.turns import Turn, Turns

ELSEWHERE = Verdict(1.0, ())


@settings(deadline=None)
@given(st.sets(st.integers(1, 8)), st.integers(1, 5), st.data())
def test_calls_that_the_others_made_put_off_all_that_come_after(
    used: set[int], num_calls: int, data: st.DataObject
) -> None:
    """A rank begins some calls while it knows nothing of those of the others, and looks back in any order."""

    def passed(turn: Turn) -> Verdict | None:
        return ELSEWHERE if turn.number in used else None

    turns = Turns()
    begun = [turns.begin(str(index)) for index in range(num_calls)]
    for turn in data.draw(st.permutations(begun)):
        turns.look_back(turn, passed)
    free = [number for number in range(1, 20) if number not in used]
    assert [turn.number for turn in begun] == free[:num_calls]
    begun.append(turns.begin("next"))
    turns.look_back(begun[-1], passed)
    assert begun[-1].number == free[num_calls]


@settings(deadline=None)
@given(st.sets(st.integers(1, 8)))
def test_threads_look_back_at_once(used: set[int]) -> None:
    turns = Turns()
    begun = [turns.begin(str(index)) for index in range(4)]

    def look_back(turn: Turn) -> None:
        turns.look_back(turn, lambda turn: ELSEWHERE if turn.number in used else None)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(look_back, reversed(begun)))
    free = [number for number in range(1, 20) if number not in used]
    assert [turn.number for turn in begun] == free[:4]


def test_a_call_that_is_over_keeps_its_number() -> None:
    turns = Turns()
    first, second = turns.begin("A"), turns.begin("B")
    turns.settle(first)
    turns.look_back(second, lambda turn: ELSEWHERE if turn.number < 4 else None)
    assert (first.number, second.number) == (1, 4)


def test_a_rank_that_is_too_late_for_a_call_goes_on_with_the_next() -> None:
    turns, late = Turns(), Verdict(1.0, (), missed=True)
    first, second = turns.begin("A"), turns.begin("B")
    turns.look_back(second, lambda turn: late if turn.number == 1 else None)
    assert (first.missed, second.missed) == (late, None)
    assert (first.number, second.number) == (1, 2)
