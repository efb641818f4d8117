"""How ranks meet that are late, leave, or make calls that the others do not: threads on one store."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from fastload.comm import tree
from fastload.comm.cache import ConnectionCache
from fastload.comm.group import join_in
from fastload.comm.rendezvous import ExpiringKeys
from fastload.comm.responses import Each, write_response
from fastload.comm.store import Member
from fastload.comm.tree import TreeState
from fastload.comm.world import Decisions, World
from fastload.errors import DeadlineExceeded, FastloadError, Interrupted, PeerError, PlanMismatch
from tests.drawn import draws

SHORT_S, LONG_S = 0.12, 30.0
MOST_KEPT = 8
NUM_KEYS_OF_A_CALL = 4  # responses, their count, progress, decision
_BITS = st.integers(1, 31)


@pytest.fixture(autouse=True, scope="module")
def deep_trees() -> Iterator[None]:
    """A tree of few ranks has some that are neither at its top nor at its bottom."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "_FANOUT", 2)
        yield


@dataclass(frozen=True)
class Op:
    """What the ranks do next, between two barriers.

    Attributes:
        kind: ``all`` make a call; or only ``some`` do; or some come ``late`` for it, or ``leave`` it. Or the
            group is made ``anew``: in the same namespace of the store, or in another one if its call is
            ``B``.
        who: Those some, as bits.
        call: Its name.
    """

    kind: str
    who: int
    call: str


def make(
    store: Any,
    rank: int,
    size: int,
    call: str,
    timeout_s: float,
    num_steps: int = 2,
    cache: ConnectionCache | None = None,
) -> list[int]:
    world = join_in(store, Member(rank, size), call=call, timeout_s=timeout_s, cache=cache)
    with world.ending():
        for number in range(num_steps):
            with world.step(f"{call}, step {number}") as step:
                step.answer(rank)
    return step.answers


def leave(store: Any, rank: int, size: int, call: str, cache: ConnectionCache | None) -> str:
    """Is interrupted before it answers; one that comes late hears of the others, and raises what they do."""
    join_in(store, Member(rank, size), call=call, timeout_s=LONG_S, cache=cache).leave(KeyboardInterrupt())
    return "left"


def end_of(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except FastloadError as error:
        return error


def follow(
    root: Any, rank: int, size: int, ops: Sequence[Op], barrier: threading.Barrier, in_tree: bool
) -> tuple[list[Any], list[ConnectionCache]]:
    """Does all operations, as one of the ranks; returns how each ended, and what each group cached."""
    ends: list[Any] = []
    store, groups = root, [ConnectionCache()]
    for number, op in enumerate(ops):
        cache = groups[-1] if in_tree else None
        chosen = bool(op.who >> rank & 1)
        short = partial(make, store, rank, size, op.call, SHORT_S, cache=cache)
        barrier.wait(60)
        if op.kind == "anew":
            groups[-1].close()
            groups.append(ConnectionCache())
            store = store if op.call == "A" else dist.PrefixStore(str(number), root)
            ends.append("anew")
        elif op.kind == "leave" and chosen:
            ends.append(end_of(partial(leave, store, rank, size, op.call, cache)))
        elif op.kind in ("all", "leave"):
            ends.append(end_of(partial(make, store, rank, size, op.call, LONG_S, cache=cache)))
        elif chosen is (op.kind == "some"):
            ends.append(end_of(short))
        barrier.wait(60)
        if op.kind == "late" and chosen:  # the others have given up
            ends.append(end_of(short))
        elif op.kind == "some" and not chosen:
            ends.append("elsewhere")
    return ends, groups


OPS = st.builds(Op, st.sampled_from(["all", "some", "late", "leave", "anew"]), _BITS, st.sampled_from("AB"))


@draws(16, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(2, 5), st.lists(OPS, max_size=5), st.booleans())
@example(2, [Op("some", 1, "A")], False)
@example(2, [Op("some", 1, "B")], True)
@example(3, [Op("some", 1, "A"), Op("some", 2, "B"), Op("all", 0, "A"), Op("some", 6, "A")], True)
@example(3, [Op("late", 2, "A"), Op("some", 2, "B"), Op("some", 4, "A")], False)
@example(3, [Op("all", 0, "A"), Op("late", 2, "A"), Op("some", 2, "B"), Op("some", 4, "A")], True)
@example(2, [Op("some", 1, "A"), Op("leave", 1, "A")], False)
@example(2, [Op("some", 1, "A"), Op("leave", 1, "A")], True)
@example(4, [Op("anew", 3, "B"), Op("some", 1, "A"), Op("leave", 13, "A")], True)
@example(3, [Op("some", 3, "A"), Op("leave", 4, "B"), Op("late", 5, "B")], False)
@example(3, [Op("all", 0, "B"), Op("some", 3, "A"), Op("leave", 4, "B"), Op("late", 5, "B")], True)
@example(3, [Op("some", 2, "A"), Op("anew", 0, "A"), Op("all", 0, "A"), Op("anew", 0, "A")], True)
@example(3, [Op("some", 1, "B"), Op("anew", 0, "B"), Op("some", 2, "B"), Op("anew", 0, "A")], True)
@example(2, [Op("some", 1, "A"), Op("anew", 1, "B")], False)
@example(2, [Op("some", 1, "A"), Op("some", 1, "A"), Op("anew", 1, "B")], False)
def test_ranks_meet_again_whatever_some_have_done(size: int, ops: list[Op], in_tree: bool) -> None:
    """A call that all make succeeds, whatever came before it; and nothing of it stays in the store."""
    ops = [*ops, Op("all", 0, "A"), Op("all", 0, "B")]
    store, barrier = dist.HashStore(), threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        each = list(pool.map(lambda rank: follow(store, rank, size, ops, barrier, in_tree), range(size)))
    last = [groups[-1] for _, groups in each]
    assert not in_tree or all(one.lasting(TreeState).links.are_intact() for one in last)
    for one in last:
        one.close()
    everyone = list(range(size))
    for op, ends in zip(ops, zip(*[ends for ends, _ in each], strict=True), strict=True):
        chosen = [rank for rank in everyone if op.who >> rank & 1]
        if op.kind == "all":
            assert list(ends) == [everyone] * size, (op, ends)
        elif 0 < len(chosen) < size and op.kind != "anew":
            assert everyone not in ends, (op, ends)
    # Of a tree the first rank keeps the last decisions.
    num_groups = len(each[0][1])
    # What failed calls have left goes with the next of all in their namespace, of which an old one has none.
    last_anew = max([number for number, op in enumerate(ops) if op.kind == "anew"], default=0)
    num_failed = sum({"some": 1, "late": 2, "leave": 1}.get(op.kind, 0) for op in ops[:last_anew])
    most = num_groups * (size + 1 + in_tree * MOST_KEPT) + num_failed * NUM_KEYS_OF_A_CALL
    assert store.num_keys() <= most, "more than the counters and the name is left"


class SlowStore(dist.Store):
    """Takes a while to answer the next request of one kind.

    Attributes:
        slow_s: Kind of request → seconds; removed once it has been made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slow_s: dict[str, float] = {}
        self._store = dist.HashStore()

    def _wait(self, kind: str) -> None:
        time.sleep(self.slow_s.pop(kind, 0.0))

    def set(self, key: str, value: str) -> None:
        self._wait("set")
        self._store.set(key, value)

    def append(self, key: str, value: str) -> None:
        self._wait("append")
        self._store.append(key, value)

    def check(self, keys: list[str]) -> bool:
        self._wait("check")
        return self._store.check(keys)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._wait("compare_set")
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)


@pytest.mark.parametrize("in_tree", [False, True], ids=["store", "tree"])
def test_a_store_that_is_slower_than_a_short_timeout_is_not_gone(in_tree: bool) -> None:
    """A busy machine may stop a thread for longer; its rank goes on where the others do."""
    size, store = 3, SlowStore()
    everyone = list(range(size))
    caches = [ConnectionCache() if in_tree else None for _ in everyone]
    with ThreadPoolExecutor(size) as pool:
        for kind in ("append", "check", "compare_set"):

            def call(rank: int, timeout_s: float) -> Any:
                return end_of(partial(make, store, rank, size, "A", timeout_s, cache=caches[rank]))

            ends = [call(2, SHORT_S)]  # what it had of a tree goes with that
            store.slow_s = {kind: 3 * SHORT_S}
            ends.append(call(2, SHORT_S))
            assert not store.slow_s
            for end in ends:
                assert isinstance(end, PeerError)
                assert set(end.failures) == {0, 1}, (kind, end)
            assert list(pool.map(partial(call, timeout_s=LONG_S), everyone)) == [everyone] * size, kind
    for one in filter(None, caches):
        one.close()


def wander(
    store: Any, rank: int, size: int, seed: int, cache: ConnectionCache | None
) -> list[tuple[tuple[int, int], Any]]:
    """Makes calls at random times, some for long, some late in their second step."""
    draw, calls = random.Random(seed * 10 + rank), []
    for number in range(6):
        time.sleep(draw.choice([0, 0, 0.01, 0.2]))
        own = (rank, number)

        def call(own: tuple[int, int] = own) -> Any:
            name, timeout_s = draw.choice("AAB"), draw.choice([0.05, 0.1, 0.3])
            world = join_in(store, Member(rank, size), call=name, timeout_s=timeout_s, cache=cache)
            with world.ending():
                with world.step("first") as first:
                    first.answer(own)
                time.sleep(draw.choice([0, 0, 0, 0.15]))
                with world.step("second") as second:
                    second.answer(own)
                assert second.answers == first.answers
            return first.answers

        calls.append((own, end_of(call)))
    return calls


@pytest.mark.parametrize("seed", range(6))
def test_all_return_from_a_call_or_none_does(seed: int) -> None:
    size, store = 2 + seed % 3, dist.HashStore()
    caches = [ConnectionCache() if seed >= 2 else None for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        walks = list(pool.map(lambda rank: wander(store, rank, size, seed, caches[rank]), range(size)))
    for one in filter(None, caches):
        one.close()
    ends = dict(end for walk in walks for end in walk)
    for own, end in ends.items():
        if isinstance(end, list):
            assert list(own) in end
            assert [ends[rank, number] for rank, number in end] == [end] * size
        else:
            assert isinstance(end, PeerError | PlanMismatch), end


@pytest.mark.parametrize("waits", [False, True], ids=["begun", "waiting"])
@pytest.mark.parametrize("in_tree", [False, True], ids=["store", "tree"])
def test_calls_of_other_threads_survive_one_that_only_some_ranks_make(in_tree: bool, waits: bool) -> None:
    """Such as a save in the background: begun by all before, with or without the others in its first step."""
    size, store = 3, dist.HashStore()
    everyone, barrier = list(range(size)), threading.Barrier(size)
    caches = [ConnectionCache() if in_tree else None for _ in everyone]

    def save(world: World) -> list[int]:
        with world.step() as step:
            step.answer(world.rank)
        return step.answers

    def follow(rank: int) -> tuple[Any, ...]:
        call = partial(make, store, rank, size, cache=caches[rank])
        first = call("first", LONG_S)
        saving = join_in(store, Member(rank, size), call="saving", timeout_s=LONG_S, cache=caches[rank])
        with ThreadPoolExecutor(1) as pool:
            saved = pool.submit(save, saving) if waits and rank else None
            if rank == 0:
                with pytest.raises(PeerError) as raised:
                    call("alone", SHORT_S)
                assert set(raised.value.failures) == {1, 2}
            barrier.wait(60)
            loaded = call("loading", LONG_S)
            ranks = (saved or pool.submit(save, saving)).result()
        saving.acknowledge()
        return first, loaded, ranks, call("last", LONG_S)

    with ThreadPoolExecutor(size) as pool:
        assert list(pool.map(follow, everyone)) == [(everyone,) * 4] * size
    for one in filter(None, caches):
        one.close()


def join_all(store: Any, size: int, timeout_s: float) -> list[World]:
    return [join_in(store, Member(rank, size), call="A", timeout_s=timeout_s) for rank in range(size)]


def test_a_call_that_only_one_rank_makes_says_so() -> None:
    store = dist.HashStore()
    with pytest.raises(
        PeerError,
        match=r"rank 1.*: DeadlineExceeded.*or did not make this call .as inside of `if rank == 0:`",
    ):
        make(store, 0, 2, "A", SHORT_S)
    with pytest.raises(PeerError, match=r"rank 0.*: DeadlineExceeded.*or did not make this call"):
        make(store, 1, 2, "A", SHORT_S)  # it goes on to the next one


def test_ranks_in_different_calls_are_told_at_once() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        began = time.monotonic()
        calls = [
            pool.submit(end_of, lambda rank=rank: make(store, rank, 3, "AAB"[rank], LONG_S))
            for rank in range(3)
        ]
        ends = [call.result() for call in calls]
    assert time.monotonic() - began < LONG_S / 2
    assert [type(end) for end in ends] == [PlanMismatch] * 3
    assert {str(end) for end in ends} == {"the ranks are out of step: ranks 0, 1 are A, rank 2 is B"}


def test_a_rank_that_dies_after_losing_patience_keeps_nobody() -> None:
    """It was to decide, and others wait for what it says; when it comes back it hears what they decided."""
    store = dist.HashStore()
    dead, other, _ = join_all(store, 3, SHORT_S)
    store.append(
        "1/0/responses", write_response(0, {"value": 0, "error": None, "node": Each(["x/"]), "call": "A"})
    )
    store.add("1/0/count", (1 << 40) + 1)
    with pytest.raises(PeerError) as raised, other.step():
        pass
    assert set(raised.value.failures) == {2}
    assert isinstance(raised.value.failures[2], DeadlineExceeded)
    assert not isinstance(raised.value.failures[2], Interrupted)
    del dead


def test_keys_expire_in_the_second_rotation() -> None:
    keys = ExpiringKeys()
    keys.add(["a"])
    assert keys.rotate() == []
    keys.add(["b"])
    assert keys.rotate() == ["a"]
    assert keys.rotate() == ["b"]
    assert keys.rotate() == []


def test_a_late_rank_tries_no_address_once_the_others_meet_in_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The address of a rank that accepts nobody any more; on another host, it may take seconds to fail."""
    store, caches = dist.HashStore(), [ConnectionCache() for _ in range(2)]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(make, store, 0, 2, "A", LONG_S, cache=caches[0])
        wait_for(lambda: store.check(["1/at/0"]))
        store.append("1/0/responses", "")  # as a rank does that cannot connect
        wait_for(lambda: store.check(["1/0/count"]))
        monkeypatch.setattr(tree, "connect", lambda *_: pytest.fail("it tries to connect"))
        assert make(store, 1, 2, "A", LONG_S, cache=caches[1]) == first.result() == [0, 1]
    for one in caches:
        one.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("in_tree", [False, True], ids=["store", "tree"])
@pytest.mark.parametrize("failing", ["fails", "does not come"])
def test_bytes_to_share_go_with_a_call_that_fails(failing: str, in_tree: bool) -> None:
    size, store = 3, dist.HashStore()
    caches = [ConnectionCache() if in_tree else None for _ in range(size)]

    def share(rank: int) -> Any:
        timeout_s = SHORT_S if failing == "does not come" else LONG_S
        world = join_in(store, Member(rank, size), call="A", timeout_s=timeout_s, cache=caches[rank])
        with world.together():
            with world.step("meeting"):
                pass
            if rank != 2 or failing == "fails":
                with world.step("sharing") as step:
                    if rank == 1:
                        step.answer(attach=b"some bytes")
                    if rank == 2:
                        raise ValueError("no")

    with ThreadPoolExecutor(size) as pool:
        ends = list(pool.map(lambda rank: end_of(partial(share, rank)), range(size)))
    assert [type(end) for end in ends[:2]] == [PeerError] * 2
    assert not store.check(["1/shared/1/count"])
    assert not store.check(["1/shared/1/part0"])
    for one in filter(None, caches):
        one.close()


def test_the_last_rank_to_close_deletes_the_decisions() -> None:
    size, store, num_decisions = 3, dist.HashStore(), 200

    def decide(rank: int) -> int:
        world = join_in(store, Member(rank, size, store_stays=True), call="A", timeout_s=LONG_S)
        decisions = [Decisions(world, name, "deciding") for name in ("one", "other")]
        for number in range(num_decisions):
            if rank == 0:
                decisions[0].post(number)
            assert decisions[0].take() == number
        num_keys = store.num_keys()
        for each in decisions:
            each.close()
        return num_keys

    with ThreadPoolExecutor(size) as pool:
        assert max(pool.map(decide, range(size))) > 64
    assert store.num_keys() <= 1  # the name of the namespace


def test_decisions_that_not_all_have_read_stay() -> None:
    store = dist.HashStore()
    members = [Member(rank, 2, store_stays=True) for rank in range(2)]
    worlds = [join_in(store, member, call="A", timeout_s=LONG_S) for member in members]
    first, second = (Decisions(world, "one", "deciding") for world in worlds)
    first.post("a")
    assert first.take() == "a"
    first.close()
    assert second.take() == "a"
    second.close()
    assert store.num_keys() <= 1
