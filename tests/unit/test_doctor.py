"""What facts of a site come to, and whether each trouble is named with what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from fastload.formats.manifest import FileEntry
from fastload.planning.doctor.examine import HostRate, Opening, Site
from fastload.planning.doctor.facts import Facts, NameLookup, PathFacts
from fastload.planning.doctor.findings import Finding, findings
from fastload.planning.doctor.latency import Answers, measure_answers
from fastload.storage import Storage

GIB = 1 << 30
NFS = PathFacts(kind="nfs4", exists=True, is_folder=True, readable=True, writable=True, free_bytes=9 * GIB)
OPENING = Opening(
    "/data/llama",
    is_local=True,
    format="safetensors",
    nbytes=GIB,
    num_files=4,
    strategy="allgather",
    why="all ranks read through one storage system",
)


def facts(rank: int) -> Facts:
    host = f"host{rank // 2}"
    return Facts(
        host=host,
        machine=f"{host} of its own",
        versions={"fastload-torch": "1.0", "torch": "2.13.0", "numpy": "2.4"},
        backends=["gloo", "nccl"],
        gpus=["H200", "H200"],
        interface="eth0 (10.0.0.1)",
        speed_mbits=100_000,
        infiniband=[],
        lookups=[NameLookup(f"address of {host}", "10.0.0.1", 0.001)],
        open_files=(65536, 65536),
        locked_bytes=-1,
        memory_bytes=(64 * GIB, 60 * GIB),
        shm_bytes=(32 * GIB, 32 * GIB),
        path=NFS,
    )


SITE = Site(
    facts=[facts(rank) for rank in range(4)],
    launcher="torchrun",
    met_s=0.1,
    clocks_s=[0.0, 0.0, 0.002, 0.002],
    rates=[HostRate("host0", "host1", 3e9), HostRate("host1", "host0", 3e9)],
    opening=OPENING,
    staging_bytes=GIB // 4,
)


def with_rank(rank: int, **fields: Any) -> Site:
    """The site, but for what one rank finds."""
    changed = [replace(one, **fields) if number == rank else one for number, one in enumerate(SITE.facts)]
    return replace(SITE, facts=changed)


def with_all(**fields: Any) -> Site:
    return replace(SITE, facts=[replace(one, **fields) for one in SITE.facts])


def test_a_site_without_trouble() -> None:
    found = findings(SITE)
    assert [one.level for one in found] == ["ok"] * len(found)
    shown = {one.subject: one.found for one in found}
    assert shown["ranks"] == "4 ranks on 2 hosts, by torchrun; they met in 100 ms"
    assert shown["GPUs"] == "2 × H200"
    assert shown["interface"] == "eth0 at 100 Gbit/s"
    assert shown["between hosts"].startswith("3 GB/s over one connection")
    assert shown["file system"] == "nfs4, shared by hosts"
    assert shown["checkpoint"] == "/data/llama: 1.07 GB in 4 files (safetensors)"
    assert shown["how it is read"] == "allgather: all ranks read through one storage system"


UNSEEN = replace(OPENING, format="", problem="/data/llama: no such checkpoint on any host", is_missing=True)
TROUBLES: dict[str, tuple[Callable[[], Site], Finding]] = {
    "another torch": (
        lambda: with_rank(3, versions={**SITE.facts[0].versions, "torch": "2.6.0"}),
        Finding(
            "versions", "torch: 2.13.0 on 3 ranks: 0, 1, 2; 2.6.0 on rank 3 (host1)", "problem", "the same"
        ),
    ),
    "no numpy": (
        lambda: with_rank(0, versions={"fastload-torch": "1.0", "torch": "2.13.0"}),
        Finding("versions", "numpy: not installed on rank 0 (host0); 2.4 on 3 ranks", "note", "the same"),
    ),
    "loopback": (
        lambda: with_rank(2, interface="lo (127.0.0.1)"),
        Finding("interface", "on host1 the others cannot reach it", "problem", "GLOO_SOCKET_IFNAME"),
    ),
    "a slow link": (
        lambda: replace(SITE, rates=[*SITE.rates, HostRate("host2", "host1", 1e8)]),
        Finding("between hosts", "slowest 100 MB/s, from host1 to host2", "problem", "host1 → host2"),
    ),
    "a firewall": (
        lambda: replace(SITE, rates=[SITE.rates[0], HostRate("host1", "host0", 0.0, "timed out")]),
        Finding("between hosts", "nothing from host0 to host1: timed out", "problem", "firewall"),
    ),
    "a slow name server": (
        lambda: with_rank(1, lookups=[NameLookup("name of 10.0.0.1", "", 5.01)]),
        Finding("name lookups", "5.01 s (name of 10.0.0.1), on host0", "problem", "/etc/hosts"),
    ),
    "a host without an address": (
        lambda: with_rank(0, lookups=[NameLookup("address of host0", "", 0.001)]),
        Finding("name lookups", "host0: the host's own name has no address", "problem", "/etc/hosts"),
    ),
    "a clock that is wrong": (
        lambda: replace(SITE, clocks_s=[0.0, 0.0, -90.0, 0.0]),
        Finding("clocks", "at most 90 s from that of rank 0, on host1", "problem", "chrony"),
    ),
    "little memory": (
        lambda: with_rank(2, memory_bytes=(64 * GIB, GIB // 4)),
        Finding("host memory", "256 MiB of 64 GiB free on host1", "problem", "FASTLOAD_STAGING_BYTES"),
    ),
    "memory for shards only": (
        lambda: with_rank(2, memory_bytes=(64 * GIB, 2 * GIB)),
        Finding("host memory", "2 GiB of 64 GiB free on host1", "note", "onto GPUs, or into shards"),
    ),
    "a container's shm": (
        lambda: with_all(shm_bytes=(64 << 20, 64 << 20)),
        Finding("/dev/shm", "64 MiB of 64 MiB", "note", "--ipc=host"),
    ),
    "few open files": (
        lambda: with_rank(1, open_files=(256, 4096)),
        Finding("open files", "256 (at most 4,096) on rank 1 (host0)", "problem", "ulimit -n 65536"),
    ),
    "InfiniBand without locked memory": (
        lambda: with_all(infiniband=["mlx5_0"], locked_bytes=8 << 20),
        Finding("locked memory", "8 MiB", "problem", "ulimit -l unlimited"),
    ),
    "fewer GPUs than ranks": (
        lambda: with_all(machine="one", gpus=["A", "A"]),
        Finding("GPUs", "2 × A", "problem", "no more ranks than GPUs"),
    ),
    "hosts of one name": (
        lambda: with_all(host="localhost"),
        Finding("hosts", "2 machines, or containers, have 1 name: localhost", "note", "host name of its own"),
    ),
    "a mounted bucket": (
        lambda: with_all(path=replace(NFS, kind="fuse.rclone", client="rclone")),
        Finding("file system", "a bucket that rclone mounts", "note", "s3://"),
    ),
    "a mount that hangs": (
        lambda: with_rank(2, path=PathFacts(kind="nfs4", problem="did not end within 10.0 s")),
        Finding("file system", "did not end within 10.0 s on rank 2 (host1)", "problem", "dmesg"),
    ),
    "not mounted on a host": (
        lambda: with_rank(2, path=PathFacts(kind="ext4")),
        Finding("path", "nothing is at /data/llama on rank 2 (host1)", "note", "mount the same place"),
    ),
    "not to be read": (
        lambda: with_rank(3, path=replace(NFS, readable=False)),
        Finding("path", "/data/llama cannot be read on rank 3 (host1)", "problem", "chmod"),
    ),
    "another checkpoint": (
        lambda: replace(SITE, opening=replace(OPENING, notes={3: "does not see /data/llama"})),
        Finding("how it is read", "rank 3 on host1 does not see /data/llama", "note", "mounts"),
    ),
    "a broken checkpoint": (
        lambda: replace(SITE, opening=replace(OPENING, format="", problem="ManifestError: lies")),
        Finding("checkpoint", "ManifestError: lies", "problem", "fastload inspect"),
    ),
    "nothing there": (
        lambda: replace(with_all(path=PathFacts(kind="ext4")), opening=UNSEEN),
        Finding("checkpoint", "no such checkpoint", "problem", "mounted"),
    ),
    "a place that is read-only": (
        lambda: replace(with_all(path=replace(NFS, writable=False)), opening=UNSEEN),
        Finding("checkpoint", "not writable on 4 ranks: 0, 1, 2, 3", "problem", "owner, mode"),
    ),
}


@pytest.mark.parametrize("name", list(TROUBLES))
def test_each_trouble_is_told_once_with_what_to_do(name: str) -> None:
    make, expected = TROUBLES[name]
    found = [one for one in findings(make()) if one.level != "ok"]
    fitting = [one for one in found if expected.found in one.found and expected.advice in one.advice]
    assert [(one.subject, one.level) for one in fitting] == [(expected.subject, expected.level)], found
    assert len(found) == 1


def test_what_requests_leave_for_loads() -> None:
    answers = Answers(latency_s=0.05, connection_bytes_per_s=80e6)
    shown = {one.subject: one for one in findings(replace(SITE, opening=replace(OPENING, answers=answers)))}
    assert shown["requests"].found == (
        "50 ms to the first byte, then 80 MB/s over one connection: "
        "a rank reads at most 13.9 GB/s with 256 requests in flight"
    )
    small = replace(OPENING, answers=Answers(0.05, 0.0))
    shown = {one.subject: one for one in findings(replace(SITE, opening=small))}
    assert shown["requests"].found == "50 ms to the first byte"


class SlowStorage:
    """Storage whose clock is not that of the machine."""

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self.now_s = 0.0
        self.read_bytes: list[int] = []
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s

    def read_into(self, name: str, offset: int, buffers: list[memoryview], version: str) -> None:
        assert (name, offset, version) == ("model", 0, "v1")
        nbytes = sum(map(len, buffers))
        self.read_bytes.append(nbytes)
        connecting_s = 0.1 if len(self.read_bytes) == 1 else 0.0
        self.now_s += connecting_s + self._latency_s + (nbytes - 1) / self._bytes_per_s


@pytest.mark.parametrize(
    ("nbytes", "rate", "longest"), [(GIB, 60e6, 8 << 20), (GIB, 1e6, 1 << 20), (1000, 60e6, 1)]
)
def test_requests_of_one_connection_are_measured(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, rate: float, longest: int
) -> None:
    storage = SlowStorage(0.04, rate)
    monkeypatch.setattr("fastload.planning.doctor.latency.time.perf_counter", lambda: storage.now_s)
    found = measure_answers(cast(Storage, storage), FileEntry("model", nbytes, "v1", ""))
    assert found.latency_s == pytest.approx(0.04)
    assert found.connection_bytes_per_s == pytest.approx(rate if nbytes == GIB else 0.0, rel=1e-3)
    assert max(storage.read_bytes) == longest
