"""The simulation against closed forms, and in worlds that nobody here owns."""

from __future__ import annotations

import math
import re
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import OptionError
from fastload.formats.manifest import TensorEntry
from fastload.planning.cluster import Cluster, Requests
from fastload.planning.simulate import STRATEGIES, Prediction, ReplicatedLoad
from tests.drawn import draws

MB, GB = 10**6, 10**9
FREE: dict[str, Any] = {"rank_bytes_per_s": math.inf, "copy_bytes_per_s": math.inf, "message_s": 0.0}


def run(
    nbytes: int,
    strategy: str,
    *,
    staging_bytes: int = 256 << 20,
    chunk_bytes: int | None = None,
    **world: Any,
) -> Prediction:
    world = {"ranks_per_host": 1, "opening_s": 0.0, "agreeing_s": 0.0, **FREE, **world}
    wanted = [TensorEntry("all", "U8", (nbytes,), 0, 0, nbytes)]
    load = ReplicatedLoad(wanted, Cluster(**world))
    return load.predict(strategy, staging_bytes=staging_bytes, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("hosts", [2, 4, 8])
@pytest.mark.parametrize("strategy", ["allgather", "broadcast"])
def test_storage_bound(hosts: int, strategy: str) -> None:
    """All the time of storage, the opening, and the exchange of the last rounds."""
    done = run(
        GB, strategy, num_hosts=hosts, host_bytes_per_s=500 * MB, storage_bytes_per_s=50 * MB, opening_s=0.25
    )
    assert 20.25 < done.total_s < 20.25 * 1.02
    assert done.bound_by == "storage"
    assert done.storage_bytes == GB
    reads = [one for one in done.timeline if one.stage == "read"]
    assert reads[0].begin_s == 0.25
    assert reads[-1].end_s == pytest.approx(20.25)


def test_network_bound() -> None:
    """Every byte enters each host once, read or received; the first read and the last lap come on top."""
    done = run(GB, "allgather", num_hosts=4, host_bytes_per_s=100 * MB, storage_bytes_per_s=math.inf,
               host_storage_bytes_per_s=1000 * MB)  # fmt: skip
    assert 10.0 < done.total_s < 10.0 * 1.05
    assert done.bound_by == "host links"


def test_bound_by_the_cores_and_by_placing() -> None:
    fast = {"num_hosts": 2, "host_bytes_per_s": 50 * GB, "storage_bytes_per_s": 50 * GB}
    cores = run(GB, "allgather", **{**fast, "rank_bytes_per_s": 100 * MB})
    assert (10.0 < cores.total_s < 10.5, cores.bound_by) == (True, "the cores of a rank")
    placing = run(GB, "allgather", **{**fast, "copy_bytes_per_s": 200 * MB})
    assert (5.0 < placing.total_s < 5.25, placing.bound_by) == (True, "placing")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_only_reads(strategy: str) -> None:
    done = run(GB, strategy, num_hosts=1, host_bytes_per_s=200 * MB, storage_bytes_per_s=100 * MB)
    assert done.decision.strategy == "direct"
    assert done.total_s == pytest.approx(10.0)
    assert {one.stage for one in done.timeline} == {"read"}


def test_direct_reads_all_for_every_rank() -> None:
    shared = run(
        GB, "direct", num_hosts=4, ranks_per_host=2, host_bytes_per_s=GB, storage_bytes_per_s=100 * MB
    )
    assert shared.total_s == pytest.approx(80.0)
    assert shared.storage_bytes == 8 * GB
    own = run(GB, "direct", num_hosts=4, host_bytes_per_s=GB, host_storage_bytes_per_s=100 * MB)
    assert own.total_s == pytest.approx(10.0)
    link = run(
        GB, "direct", num_hosts=4, ranks_per_host=2, host_bytes_per_s=100 * MB, storage_bytes_per_s=9 * GB
    )
    assert link.total_s == pytest.approx(20.0)


def test_a_share_of_storage_for_each_host() -> None:
    for hosts in (2, 4, 8):
        done = run(GB, "allgather", num_hosts=hosts, host_bytes_per_s=GB, host_storage_bytes_per_s=25 * MB)
        assert 40 / hosts < done.total_s < 40 / hosts * 1.06


def test_a_chunk_on_its_way_around_the_ring_takes_every_hop() -> None:
    """One round, one reader: read it, and pass it on from host to host as a whole."""
    done = run(8 * MB, "broadcast", num_hosts=5, host_bytes_per_s=80 * MB, storage_bytes_per_s=40 * MB,
               chunk_bytes=8 * MB, message_s=0.001)  # fmt: skip
    assert done.total_s == pytest.approx(0.2 + 4 * 0.1 + 4 * 0.001)
    assert [one.stage for one in done.timeline] == ["read", "exchange", "place"]


rates = st.floats(1e6, 1e11)


@draws(60)
@given(
    nbytes=st.integers(1, 10**10),
    strategy=st.sampled_from(STRATEGIES),
    hosts=st.integers(1, 6),
    ranks=st.integers(1, 3),
    storage=rates,
    share=rates,
    link=rates,
    faster=st.sampled_from(["storage_bytes_per_s", "host_storage_bytes_per_s", "host_bytes_per_s"]),
    factor=st.floats(1.0, 50.0),
)
def test_faster_links_are_never_slower_and_nothing_beats_the_links(
    nbytes: int, strategy: str, hosts: int, ranks: int, storage: float, share: float, link: float,
    faster: str, factor: float,
) -> None:  # fmt: skip
    world: dict[str, Any] = {"num_hosts": hosts, "ranks_per_host": ranks, "storage_bytes_per_s": storage,
                             "host_storage_bytes_per_s": share, "host_bytes_per_s": link}  # fmt: skip
    world |= {"rank_bytes_per_s": None, "copy_bytes_per_s": None, "message_s": None}
    before = run(nbytes, strategy, **world)
    after = run(nbytes, strategy, **{**world, faster: world[faster] * factor})
    assert after.total_s <= before.total_s * 1.02 + 1e-6  # rounds may fall into step worse, by a little
    cluster = Cluster(**world)
    least_s = max(nbytes / cluster.all_clients_bytes_per_s, nbytes / link if hosts > 1 else 0.0)
    assert before.total_s >= least_s * (1 - 1e-6)
    for one in before.timeline:
        assert 0 <= one.begin_s <= one.end_s <= before.total_s * (1 + 1e-9)


def test_extrapolation_agrees_with_the_closed_form() -> None:
    done = run(100 * GB, "allgather", num_hosts=4, host_bytes_per_s=GB, storage_bytes_per_s=100 * MB,
               chunk_bytes=MB)  # fmt: skip
    assert done.plan.num_rounds == 25_000
    assert done.total_s == pytest.approx(1000, rel=0.001)
    assert done.timeline[-1].first_round == 24_999


def a_world_that_nobody_here_owns(strategy: str, *, nccl: bool) -> Prediction:
    done = run(
        13_800 * GB, strategy, num_hosts=2048, ranks_per_host=8, nccl=nccl, host_bytes_per_s=50 * GB,
        storage_bytes_per_s=1000 * GB, rank_bytes_per_s=None, copy_bytes_per_s=None, message_s=None,
    )  # fmt: skip
    assert done.total_s >= 13_800 / 50
    assert len(done.timeline) < 50_000
    return done


def test_a_world_that_nobody_here_owns() -> None:
    began = time.process_time()
    for strategy in STRATEGIES:
        a_world_that_nobody_here_owns(strategy, nccl=False)
    assert time.process_time() - began < 10


@pytest.mark.slow
def test_a_large_world_takes_little_memory() -> None:
    tracemalloc.start()
    a_world_that_nobody_here_owns("allgather", nccl=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200 * MB


@pytest.mark.parametrize(
    ("hosts", "nbytes", "storage"),
    [
        *((hosts, 140 * GB, 50 * GB) for hosts in (8, 13, 32, 127, 128, 512, 2048)),
        (384, 13_800 * GB, 273 * GB),
    ],
)
def test_it_does_not_matter_how_many_ranks_there_are(hosts: int, nbytes: int, storage: int) -> None:
    """With default options, the time of the links and of storage, which are as fast, and 10 % at most.

    What the ranks take to agree is in it.
    """
    done = run(
        nbytes, "allgather", num_hosts=hosts, ranks_per_host=8, nccl=True, opening_s=0.15,
        agreeing_s=None, host_bytes_per_s=50 * GB,
        storage_bytes_per_s=storage, rank_bytes_per_s=None, copy_bytes_per_s=None, message_s=None,
    )  # fmt: skip
    least_s = nbytes / (50 * GB)
    assert least_s < done.total_s <= 1.10 * least_s
    assert done.limits["host links"] * done.plan.num_rounds < 1.05 * least_s


def test_what_ranks_take_to_agree_grows_no_faster_than_they_do() -> None:
    before_s = [
        Cluster(num_hosts=hosts, ranks_per_host=8, host_bytes_per_s=GB, storage_bytes_per_s=GB).before_s
        for hosts in (1, 32, 512, 2048)
    ]
    assert 0.15 < before_s[0] < 0.16
    assert before_s[1] < 0.17
    assert before_s[2] < 0.17
    assert before_s[3] - 0.15 < 4.5 * (before_s[2] - 0.15)


@pytest.mark.parametrize(("hosts", "nccl", "hops"), [(16, False, 15), (2048, False, 16), (2048, True, 24)])
def test_what_goes_which_way(hosts: int, nccl: bool, hops: int) -> None:
    done = run(
        GB, "allgather", num_hosts=hosts, ranks_per_host=4, nccl=nccl, host_bytes_per_s=GB,
        storage_bytes_per_s=GB,
    )  # fmt: skip
    outer, inner = done.levels
    assert (outer.nbytes, outer.num_hops) == (GB * (hosts - 1), hops)
    assert inner.nbytes == GB * hosts * 3
    assert done.exchanged_bytes == outer.nbytes + inner.nbytes == GB * (4 * hosts - 1)


def test_reads_ahead_keep_storage_busy() -> None:
    """Where readers take turns."""
    world: dict[str, Any] = {"num_hosts": 256, "ranks_per_host": 1, "host_bytes_per_s": 10 * GB}
    done = run(100 * GB, "allgather", **world, storage_bytes_per_s=5 * GB)
    assert done.plan.num_windows > 1
    assert 20.0 < done.total_s < 20.0 * 1.05


@pytest.mark.parametrize(
    "bad",
    [
        {"num_hosts": 0}, {"ranks_per_host": 0}, {"host_bytes_per_s": 0.0}, {"host_bytes_per_s": math.nan},
        {"storage_bytes_per_s": -1.0}, {"rank_bytes_per_s": 0.0}, {"opening_s": -1.0},
        {"message_s": math.nan},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_worlds(bad: dict[str, Any]) -> None:
    world: dict[str, Any] = {"num_hosts": 2, "ranks_per_host": 1, "host_bytes_per_s": 1e9}
    ((name, _),) = bad.items()
    with pytest.raises(OptionError, match=f"^{name}="):
        Cluster(**{**world, "storage_bytes_per_s": 1e9, **bad})
    with pytest.raises(OptionError, match="rate of storage"):
        Cluster(**world)


def limited(nbytes: int, requests: Requests, strategy: str = "allgather", **more: Any) -> Prediction:
    world = {"num_hosts": 1, "host_bytes_per_s": 100 * GB, "storage_bytes_per_s": 100 * GB}
    return run(nbytes, strategy, **{**world, "requests": requests, "chunk_bytes": 8 * MB, **more})


@pytest.mark.parametrize(("in_flight", "turns"), [(1, 64), (4, 16), (32, 2), (64, 1), (100, 1)])
def test_requests_in_flight_share_the_latency(in_flight: int, turns: int) -> None:
    """64 chunks of 8 MB, each 50 ms and 0.16 s; opening takes three requests, one after the other."""
    asked = Requests(latency_s=0.05, connection_bytes_per_s=50e6, in_flight=in_flight)
    done = limited(512 * MB, asked)
    assert done.total_s == pytest.approx(3 * 0.05 + turns * 0.21, rel=0.01)
    assert done.bound_by == "requests in flight"


def test_a_storage_that_is_slow_enough_hides_the_latency() -> None:
    asked = Requests(latency_s=0.05, connection_bytes_per_s=50e6)
    done = limited(GB, asked, storage_bytes_per_s=100 * MB)
    assert done.total_s == pytest.approx(10.0 + 4 * 0.05, rel=0.01)
    assert done.bound_by == "storage"


def test_memory_bounds_the_requests_in_flight() -> None:
    """A chunk takes 0.2 s; 16 of them fit into the memory of each of four ranks, or 32."""
    asked = Requests(latency_s=0.04, connection_bytes_per_s=50e6, in_flight=32)
    fewer, more = (
        limited(8 * GB, asked, num_hosts=4, staging_bytes=staging * MB).total_s for staging in (128, 256)
    )
    assert fewer == pytest.approx(0.12 + 250 / 16 * 0.2, rel=0.05)
    assert more == pytest.approx(0.12 + 250 / 32 * 0.2, rel=0.05)


def test_latency_costs_nothing_that_is_not_there() -> None:
    plain = run(GB, "allgather", num_hosts=4, host_bytes_per_s=GB, storage_bytes_per_s=100 * MB)
    asked = Requests(latency_s=1e-9)
    same = run(
        GB, "allgather", num_hosts=4, host_bytes_per_s=GB, storage_bytes_per_s=100 * MB, requests=asked
    )
    assert same.total_s == pytest.approx(plain.total_s, rel=0.02)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"latency_s": -1.0}, "latency_s=-1.0"),
        ({"connection_bytes_per_s": 0.0}, "connection_bytes_per_s=0.0"),
        ({"in_flight": 0}, "in_flight=0"),
    ],
)
def test_requests_out_of_range(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=re.escape(says)):
        Requests(**given)
