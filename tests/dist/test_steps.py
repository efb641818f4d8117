"""Steps of all ranks: whatever happens in the block of one of them, all go on or all raise."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from fastload.comm.group import join
from fastload.comm.responses import Each
from fastload.comm.world import World
from fastload.errors import (
    CheckpointError,
    FastloadError,
    Interrupted,
    OptionError,
    PeerError,
    PlanMismatch,
    StorageError,
    WorldError,
)
from tests.dist.faults import PATIENT_S, SLACK_S, TOLD_S
from tests.dist.harness import ranks


def joined() -> World:
    return join(call="taking steps", timeout_s=PATIENT_S)


def meets_again(rank: int, size: int) -> None:
    world = joined()
    with world.step(f"as rank {rank} calls it") as step:
        step.answer(rank)
    assert step.answers == list(range(size))
    world.acknowledge()


def in_a_step(world: World, act: Callable[[], object], *, is_long: bool = False) -> None:
    with world.together(), world.step("acting", is_long=is_long) as step:
        step.answer(act())


def fails(error: BaseException | None) -> None:
    try:
        if error is not None:
            raise error
    finally:
        del error  # else error → traceback → frame → error would keep all their memory alive


@ranks(1, 3)
def test_answers_come_to_all_ranks(rank: int, world: int) -> None:
    group = joined()
    for is_long in (False, True):
        with group.step(f"as rank {rank} calls it", is_long=is_long) as step:
            step.answer({"rank": rank, "same": [1, None], "own": Each([rank, "x"])})
        first = step.answers[0]
        assert [one["rank"] for one in step.answers] == list(range(world))
        assert all(one["same"] == [1, None] for one in step.answers)
        assert [column.values() for column in first["own"]] == [list(range(world)), ["x"] * world]
    group.acknowledge()


@pytest.mark.parametrize("in_store", [False, True], ids=["tree", "store"])
@ranks(2)
def test_answers_may_be_longer_than_a_value_of_the_store(rank: int, world: int, in_store: bool) -> None:
    """As the addresses that thousands of ranks exchange are."""
    group = joined()
    if in_store:
        group.rendezvous.disconnect()
    for length in (2 << 20, 5 << 20) if not in_store else (3 << 20,):
        with group.step("exchanging addresses") as step:
            step.answer(str(rank) * length)
        assert step.answers == ["0" * length, "1" * length]
    group.acknowledge()


@ranks(1, 3)
def test_a_rank_that_does_not_answer_fails_those_who_ask_for_answers(rank: int, world: int) -> None:
    group = joined()
    with group.step("only meeting"):
        pass
    with group.step("answering in part") as step:
        if rank != world - 1:
            step.answer(rank)
    with pytest.raises(WorldError, match="answering in part: not all ranks have answered"):
        _ = step.answers
    with pytest.raises(WorldError, match="answering in part: no rank has attached bytes"):
        _ = step.attachment
    group.acknowledge()


@ranks(1, 3)
def test_an_exception_on_one_rank_is_raised_on_all(rank: int, world: int) -> None:
    for is_long in (False, True):
        own = ZeroDivisionError("mine")
        expected = (
            r"^mine$"
            if world == 1
            else r"acting failed on 1 of 3 ranks .*: rank 2 .*: ZeroDivisionError: mine"
        )
        with pytest.raises(PeerError if world > 1 else ZeroDivisionError, match=expected) as raised:
            in_a_step(joined(), lambda own=own: fails(own) if rank == world - 1 else None, is_long=is_long)
        error = raised.value
        if world == 1:
            assert error is own
        else:
            assert isinstance(error, PeerError)
            assert error.failures.keys() == {2}
            assert error.__cause__ is (own if rank == 2 else None)
        assert error.__context__ is None
    meets_again(rank, world)


@ranks(1, 3)
def test_each_rank_raises_its_own_of_errors_that_are_the_same(rank: int, world: int) -> None:
    own = OptionError("no such option")
    with pytest.raises(OptionError) as raised:
        in_a_step(joined(), lambda: fails(own))
    assert raised.value is own
    meets_again(rank, world)


@ranks(3)
def test_all_causes_are_told(rank: int, world: int) -> None:
    with pytest.raises(PeerError) as raised:
        in_a_step(joined(), lambda: fails(StorageError(f"disk {rank}")) if rank else None)
    assert {rank: str(error) for rank, error in raised.value.failures.items()} == {
        1: ": disk 1",
        2: ": disk 2",
    }


@ranks(3)
def test_the_first_rank_that_finds_damage_speaks_for_all(rank: int, world: int) -> None:
    own = CheckpointError(f"damaged, as rank {rank} sees it")
    with pytest.raises(CheckpointError, match="as rank 1 sees it") as raised:
        in_a_step(joined(), lambda: fails(own) if rank else None)
    assert (raised.value is own) == (rank == 1)
    assert raised.value.__context__ is None
    meets_again(rank, world)


@ranks(3)
def test_an_interrupt_answers_nothing_and_the_others_are_told(rank: int, world: int) -> None:
    for is_long in (False, True):
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt if rank == 1 else PeerError) as raised:
            in_a_step(joined(), lambda: fails(KeyboardInterrupt()) if rank == 1 else None, is_long=is_long)
        assert time.monotonic() - began < TOLD_S
        if isinstance(raised.value, PeerError):
            assert raised.value.failures.keys() == {1}
            assert "KeyboardInterrupt" in str(raised.value)
    meets_again(rank, world)


def raise_between(world: World, error: Exception | None) -> None:
    with world.together():
        with world.step("the first one") as step:
            step.answer()
        fails(error)
        with world.step("the next one") as step:
            step.answer()


@ranks(1, 3)
def test_an_exception_between_steps_is_told_to_the_others(rank: int, world: int) -> None:
    victim = world // 2
    began = time.monotonic()
    with pytest.raises(StorageError if rank == victim else PeerError, match="no disk") as raised:
        raise_between(joined(), StorageError("no disk") if rank == victim else None)
    assert time.monotonic() - began < TOLD_S
    if isinstance(raised.value, PeerError):
        assert raised.value.failures.keys() == {victim}
    meets_again(rank, world)


@ranks(3)
def test_ranks_that_all_raise_between_steps_meet_again(rank: int, world: int) -> None:
    with pytest.raises(StorageError, match=f"disk {rank}"):
        raise_between(joined(), StorageError(f"disk {rank}"))
    meets_again(rank, world)


def take_steps(world: World, *, num_before: int, skips: bool) -> None:
    with world.together():
        for number in range(num_before):
            with world.step(f"step {number}") as step:
                step.answer()
        if not skips:
            with world.step("the same text") as step:
                step.answer()
        with world.step("the same text") as step:
            step.answer()


@ranks(3)
def test_a_rank_that_skips_a_step_does_not_get_the_answers_of_another_one(rank: int, world: int) -> None:
    place = r"at tests\.dist\.test_steps:\d+"
    for num_before in (0, 1):
        with pytest.raises(PlanMismatch, match=rf"out of step: ranks 0, 2 are {place}, rank 1 is {place}$"):
            take_steps(joined(), num_before=num_before, skips=rank == 1)
    meets_again(rank, world)


@ranks(1, 3)
def test_a_value_that_is_no_json_is_told_to_all(rank: int, world: int) -> None:
    with pytest.raises(
        PeerError if world > 1 else OptionError, match=r"returned a value that is not JSON: .*set"
    ):
        in_a_step(joined(), lambda: {1, 2} if rank == world - 1 else 1)
    meets_again(rank, world)


@ranks(1, 3)
def test_the_bytes_that_one_rank_attaches_come_to_all(rank: int, world: int) -> None:
    group = joined()
    for data in (b"", b"some bytes", bytes(5 << 20)):
        with group.step("attaching") as step:
            if rank == world - 1:
                step.answer("attached", attach=data)
            else:
                step.answer("nothing")
        assert step.attachment == data
        assert step.answers == ["nothing"] * (world - 1) + ["attached"]
    group.acknowledge()


def gather(world: World, make: Callable[[], Any]) -> list[bytes]:
    with world.together(), world.gathering_step("gathering") as step:
        step.answer(make())
    return step.answers


@ranks(1, 3)
def test_bytes_of_all_ranks_are_gathered(rank: int, world: int) -> None:
    group = joined()
    for made in (
        [b"same"] * world,
        [bytes([one]) * 3 for one in range(world)],
        [b"first", *[b""] * (world - 1)],
    ):
        assert gather(group, partial(made.__getitem__, rank)) == made
    group.acknowledge()
    with pytest.raises(PeerError if world > 1 else ValueError, match="no bytes"):
        gather(joined(), lambda: fails(ValueError("no bytes")) if rank == world - 1 else b"")
    meets_again(rank, world)


def await_failure(world: World) -> None:
    deadline = time.monotonic() + PATIENT_S + SLACK_S
    while not world.peer_failed():
        assert time.monotonic() < deadline, "nobody told this rank"
        time.sleep(0.01)
    raise Interrupted("another rank failed")


@ranks(3)
def test_a_long_step_tells_of_a_failure_at_once(rank: int, world: int) -> None:
    group = joined()
    with pytest.raises(PeerError) as raised:
        in_a_step(
            group, lambda: fails(StorageError("no disk")) if rank == 1 else await_failure(group), is_long=True
        )
    assert raised.value.failures.keys() == {1}


def take_another(world: World) -> None:
    with world.step("another one"):
        pass


@ranks(1, 2)
def test_steps_do_not_nest(rank: int, world: int) -> None:
    group = joined()
    with pytest.raises(
        AssertionError if world == 1 else PeerError, match="a step in the block of another one"
    ):
        in_a_step(group, lambda: take_another(group))
    meets_again(rank, world)


class Large:
    """Stands for buffers."""


def fail_with_large(world: World, make: Callable[[], Exception | None], is_long: bool) -> weakref.ref[Large]:
    """Fails in a block, next to an object; returns a reference to it, once the error is gone."""
    made: list[weakref.ref[Large]] = []

    def act() -> None:
        large = Large()
        made.append(weakref.ref(large))
        with world.together(), world.step("acting", is_long=is_long) as step:
            fails(make())
            step.answer(1)

    with suppress(FastloadError, ValueError):
        act()
    return made[0]


@ranks(1, 3)
def test_a_failed_step_keeps_nothing(rank: int, world: int) -> None:
    """Without the garbage collector, so that a cycle of an error and its traceback is found."""
    gc.collect()
    gc.disable()
    makes: list[Callable[[], Exception | None]] = [
        lambda: OptionError("the same"),
        lambda: ValueError("one") if rank == world - 1 else None,
        lambda: CheckpointError(f"as rank {rank} sees it"),
        lambda: StorageError(f"disk {rank}"),
    ]
    for make in makes:
        for is_long in (False, True):
            kept = fail_with_large(joined(), make, is_long)
            assert kept() is None, gc.get_referrers(kept())
