"""Bytes of every rank come to all ranks, and the store is asked no more often the more ranks there are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fastload.comm.rendezvous import GroupState, StoreRendezvous
from fastload.comm.store import Member
from fastload.comm.world import World
from fastload.errors import FastloadError


class CountedStore:
    """A client of a real store that counts what it has it fetch."""

    def __init__(self, port: int) -> None:
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False)
        self.num_gets = 0

    def get(self, key: str) -> bytes:
        self.num_gets += 1
        return bytes(self._store.get(key))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def gather(contents: list[bytes | Exception]) -> tuple[list[Any], list[int]]:
    """What each rank gets, or what it raises, and how often it fetched something."""
    size = len(contents)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(rank: int) -> tuple[Any, int]:
        store = CountedStore(server.port)
        member = Member(rank, size, None, "gone")
        world = World(StoreRendezvous(store, GroupState(), member, call="telling", timeout_s=60.0))
        content = contents[rank]
        try:
            with world.gathering_step("telling") as step:
                if isinstance(content, Exception):
                    raise content
                step.answer(content)
            got: Any = step.answers
            world.acknowledge()
        except FastloadError as error:
            got = error
        return got, store.num_gets

    with ThreadPoolExecutor(size) as threads:
        results = list(threads.map(run, range(size)))
    return [got for got, _ in results], [count for _, count in results]


def test_all_ranks_get_the_bytes_of_all() -> None:
    contents: list[Any] = [b"one", b"", b"one", b"\n[3]\n" * 2_000_000]
    got, _ = gather(contents)
    assert got == [contents] * 4


def test_more_ranks_ask_no_more_of_the_store_each() -> None:
    most = []
    for size in (3, 12):
        contents: list[Any] = [bytes([rank]) * 100 for rank in range(size)]
        got, counts = gather(contents)
        assert got == [contents] * size
        most.append(sorted(counts)[-2])  # but for the one that collects, or decides
    assert most[1] <= most[0] + 2, most


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_make_them_fails_all(failing: int) -> None:
    contents: list[Any] = [b"x", b"y", b"z"]
    contents[failing] = ValueError("no such thing")
    got, _ = gather(contents)
    assert all("no such thing" in str(error) for error in got), got


def test_what_a_rank_has_left_is_there_for_whoever_hears_of_it() -> None:
    """However they hear of it: not through the store, perhaps, where that would come later."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one, other = (
        StoreRendezvous(
            dist.TCPStore("127.0.0.1", server.port, is_master=False),
            GroupState(),
            Member(rank, 2, None, "gone"),
            call="leaving",
            timeout_s=20.0,
        )
        for rank in range(2)
    )
    for number in range(25):
        one.leave("leaving", f"place/{number}", bytes(4 << 20), limit_s=20)
        assert other.take("taking", f"place/{number}", keep=False, limit_s=20) is not None


@pytest.mark.parametrize("kind", ["tcp", "hash", "file"])
def test_many_names_are_taken_in_few_requests_and_missing_ones_are_none(kind: str, tmp_path: Path) -> None:
    store: Any = {
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store")),
    }[kind]()
    requests: list[str] = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            requests.append(name)
            return getattr(store, name)

    rank = StoreRendezvous(Counted(), GroupState(), Member(0, 2, None, "gone"), call="taking", timeout_s=20.0)
    names = [f"place/{number}" for number in range(100)]
    contents = [b"", *(bytes([number]) * number for number in range(1, 99)), bytes(9 << 20)]
    for name, content in zip(names, contents, strict=True):
        rank.leave("leaving", name, content, limit_s=20)
    requests.clear()
    assert rank.take_all("taking", names, limit_s=20) == contents
    assert kind == "file" or len(requests) <= 4 * 4, requests
    assert rank.take("taking", names[50], keep=False, limit_s=20) == contents[50]
    expected = [*contents[:50], None, *contents[51:]]
    assert rank.take_all("taking", names, limit_s=20) == expected
    assert rank.take_all("taking", [], limit_s=20) == []
