"""Ranks of one host share memory: what comes from other hosts comes in once, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastload
from fastload.comm import shared_memory
from fastload.comm.cache import cache_of
from fastload.comm.hosts import Listener, connect_unix, greet
from tests.dist import faults
from tests.dist.faults import NUM_BYTES, checkpoint, fastload_threads, is_intact, options, outcome_of
from tests.dist.harness import ranks, run_ranks

PATIENT_S = 30.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "x.safetensors")


def load(path: Path, **given: Any) -> tuple[dict[str, torch.Tensor], fastload.LoadReport]:
    reports: list[fastload.LoadReport] = []
    loaded = fastload.load(path, options=options(timeout_s=PATIENT_S, on_report=reports.append, **given))
    return loaded, reports[0]


def require_once_into_each_host(report: fastload.LoadReport, transport: str) -> None:
    """Each byte that ranks of a host have not read has come in to one of them."""
    read: Counter[str] = Counter()
    came_in: Counter[str] = Counter()
    for own in report.ranks:
        read[own.host] += own.bytes_read
        came_in[own.host] += own.bytes_in
        assert own.bytes_read + own.bytes_received == NUM_BYTES
    assert report.transport == transport
    assert {host: NUM_BYTES - nbytes for host, nbytes in read.items()} == came_in


@pytest.mark.slow(but=["5-ranks"])
@ranks(4, 5, ranks_per_host=2)
def test_each_byte_enters_each_host_once(rank: int, world: int, path: Path) -> None:
    for _ in range(2):
        loaded, report = load(path)
        assert is_intact(loaded)
        require_once_into_each_host(report, "gloo + shared memory")
        rails = [own.bytes_in for own in report.ranks[:2]]  # of the first host: both take in
        assert min(rails) > 0.3 * max(rails)


@ranks(3)
def test_on_one_host_nothing_goes_through_sockets(rank: int, world: int, path: Path) -> None:
    made = []
    real = shared_memory.HostLink
    pytest.MonkeyPatch().setattr(shared_memory, "HostLink", lambda *a, **k: made.append(1) or real(*a, **k))
    for strategy in ("allgather", "broadcast", "allgather", "broadcast"):
        loaded, report = load(path, strategy=strategy)
        assert is_intact(loaded)
        require_once_into_each_host(report, "shared memory")
    assert len(made) == 1  # the others use what was kept


@ranks(4, ranks_per_host=2)
def test_a_rank_that_has_kept_nothing_meets_the_others_anew(rank: int, world: int, path: Path) -> None:
    made = []
    real = shared_memory.Listener
    pytest.MonkeyPatch().setattr(shared_memory, "Listener", lambda kind: made.append(1) or real(kind))
    for victim in (None, None, 0, 3):
        if rank == victim:
            cache_of(dist.group.WORLD).clear()
        assert is_intact(load(path)[0])
    assert len(made) == 3  # none where all have cached the connections


@pytest.mark.slow
@ranks(18, ranks_per_host=1)
def test_many_hosts_pass_chunks_on_along_trees(rank: int, world: int, path: Path) -> None:
    loaded, report = load(path, chunk_bytes=NUM_BYTES // 18 // 2)
    assert is_intact(loaded)
    require_once_into_each_host(report, "gloo")


def load_without_memory(rank: int, world: int, path: Path) -> None:
    if rank == 1:
        pytest.MonkeyPatch().delattr(os, "memfd_create")
    loaded, report = load(path)
    assert is_intact(loaded)
    assert report.transport == "gloo + shared memory"  # ranks 0 and 2, and rank 1
    assert [own.bytes_in > 0 for own in report.ranks] == [True, True, False]  # for its host, rank 0 takes in


def test_a_rank_that_cannot_share_memory_is_like_a_host_of_its_own(path: Path) -> None:
    run_ranks(load_without_memory, 3, path=path)


@pytest.mark.slow(but=["0-3"])
@ranks(3)
@pytest.mark.parametrize("victim", [0, 1])
def test_memory_that_a_rank_cannot_have(rank: int, world: int, path: Path, victim: int) -> None:
    def refuse(file: int, nbytes: int) -> torch.Tensor:
        raise MemoryError("cannot share that much")

    descriptors = []
    for _ in range(3):
        with pytest.MonkeyPatch.context() as patch:
            if rank == victim:
                patch.setattr(shared_memory, "_map", refuse)
            end = outcome_of(lambda: fastload.load(path, options=options(timeout_s=PATIENT_S)))
        assert end.causes == {victim: "MemoryError"}
        assert fastload_threads() == []
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert descriptors[2] <= descriptors[1]
    assert is_intact(load(path)[0])


def die_in_the_middle(rank: int, world: int, path: Path) -> None:
    faults.strike(pytest.MonkeyPatch(), "middle", lambda: faults.die(signal.SIGKILL))
    load(path)


def test_nothing_stays_when_all_are_killed(path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    run_ranks(die_in_the_middle, 3, dies=dict.fromkeys(range(3), signal.SIGKILL), path=path)
    left = set(os.listdir("/dev/shm")) - before
    # Others on this machine may use it meanwhile.
    assert [name for name in left if name.startswith(("fastload", "torch_", "psm_", "sem."))] == []


# Who connects


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_only_ranks_that_know_the_secret_are_accepted(kind: socket.SocketKind) -> None:
    listener = Listener(kind)
    accepted: dict[int, socket.socket] = {}
    waiting = threading.Thread(target=lambda: accepted.update(listener.accept([1, 2], lambda: 1.0)))
    waiting.start()
    strangers = []
    wrong = b"0" * len(listener.secret)
    for greeting in (
        b"",
        b"1",
        wrong + struct.pack("!I", 1),
        listener.secret.encode() + struct.pack("!I", 7),
    ):
        strangers.append(connect_unix(listener.name, kind))
        strangers[-1].sendall(greeting)
        strangers[-1].shutdown(socket.SHUT_WR)
    ranks_of_job = {rank: connect_unix(listener.name, kind) for rank in (1, 2)}
    for rank, link in ranks_of_job.items():
        greet(link, listener.secret, rank, lambda: 1.0)
    waiting.join(20)
    listener.close()
    assert accepted.keys() == {1, 2}
    for rank, link in ranks_of_job.items():
        link.sendall(b"x")
        assert accepted[rank].recv(10) == b"x"
    for stranger in strangers:
        stranger.settimeout(20)
        assert stranger.recv(10) == b"", "closed"
    with pytest.raises(ConnectionRefusedError):
        connect_unix(listener.name, kind)
    for link in (*strangers, *ranks_of_job.values(), *accepted.values()):
        link.close()
