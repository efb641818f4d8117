"""Predicted loads in which ranks want different bytes: against the routes of real ones, and closed forms."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from fastload.planning.cluster import Cluster, Requests
from fastload.planning.parallel import Parallel, model_of_size
from fastload.planning.sharded import ShardedLoad, columns_of
from fastload.planning.simulate import STRATEGIES, Prediction
from fastload.transfer.messages import Routing, sharing_domains
from fastload.transfer.routed_plan import RoutedPlan, RoutedView

MB, GB = 10**6, 10**9
FREE: dict[str, Any] = {"rank_bytes_per_s": math.inf, "copy_bytes_per_s": math.inf, "message_s": 0.0}
JOBS = [
    Parallel(tp=2, pp=2, dp=3),
    Parallel(tp=4, dp=3, fsdp=True),
    Parallel(dp=6, pp=2, fsdp=True),
    Parallel(tp=12),
]


def load_of(nbytes: int, parallel: Parallel, *, ranks_per_host: int = 2, **world: Any) -> ShardedLoad:
    world = {"host_bytes_per_s": 1000 * GB, "storage_bytes_per_s": GB, "opening_s": 0.0, **FREE, **world}
    cluster = Cluster(num_hosts=parallel.num_ranks // ranks_per_host, ranks_per_host=ranks_per_host, **world)
    return ShardedLoad(model_of_size(nbytes, parallel), parallel, cluster)


def run(load: ShardedLoad, strategy: str = "allgather", **options: Any) -> Prediction:
    return load.predict(strategy, **{"staging_bytes": 256 << 20, "chunk_bytes": None, **options})


@pytest.mark.parametrize("parallel", JOBS, ids=str)
def test_what_moves_is_what_the_routes_of_a_load_say(parallel: Parallel) -> None:
    done = run(load_of(100 * MB, parallel), chunk_bytes=256 << 10)
    plan = done.plan
    assert isinstance(plan, RoutedPlan)
    assert plan.num_rounds <= 256  # each column is a round
    columns = columns_of(plan, 2)
    moved: dict[str, list[Counter[int]]] = {
        name: [Counter() for _ in columns] for name in ("read", "in", "out", "received")
    }
    routes = [RoutedView(plan, rank) for rank in plan.order]
    domains = sharing_domains([rank // 2 for rank in plan.order], plan.recipient_sets)
    routings = [Routing(rank, plan.order, domains) for rank in plan.order]
    for index in range(plan.num_rounds):
        for rank, own in enumerate(routes):
            host = rank // 2
            nbytes = sum(stretch.nbytes for stretch in own.reads(index))
            moved["read"][index][host] += nbytes
            moved["in"][index][host] += nbytes
            received = own.incoming(index)
            moved["received"][index][rank] += sum(message.nbytes for message in received)
            for message in (*own.outgoing(index), *received):
                route = routings[rank].route(message.reader, message.ranks)
                far = [target for target in route.targets if target // 2 != host]
                moved["out"][index][host] += message.nbytes * len(far)
                if route.source is not None and route.source // 2 != host:
                    moved["in"][index][host] += message.nbytes
    total = sum(sum(of_round.values()) for of_round in moved["received"])
    assert done.exchanged_bytes == pytest.approx(total, rel=0.001)
    for name, predicted in (
        ("read", [column.host_read for column in columns]),
        ("in", [column.host_in for column in columns]),
        ("out", [column.host_out for column in columns]),
    ):
        most = [max(of_round.values(), default=0) for of_round in moved[name]]
        assert sum(predicted) == pytest.approx(sum(most), rel=0.08, abs=MB), name
    assert sum(column.read for column in columns) == pytest.approx(100 * MB)


@pytest.mark.parametrize("parallel", JOBS, ids=str)
def test_storage_bound(parallel: Parallel) -> None:
    """All the time of storage, which is read once; the exchange of the last rounds comes on top."""
    load = load_of(20 * GB, parallel, opening_s=0.5)
    done = run(load)
    assert load.least_s == pytest.approx(20)
    assert 20.5 <= done.total_s < 20.5 * 1.02
    assert (done.storage_bytes, done.bound_by) == (20 * GB, "storage")


def test_network_bound() -> None:
    """Each host takes in what its ranks want, once."""
    parallel = Parallel(tp=2, pp=2, dp=4)
    load = load_of(10 * GB, parallel, storage_bytes_per_s=1000 * GB, host_bytes_per_s=100 * MB)
    done = run(load)
    assert load.held_bytes == pytest.approx([2.5 * GB] * 4, rel=0.01)
    assert load.least_s == pytest.approx(50, rel=0.01)  # a stage of the pipeline on each host
    assert 50 < done.total_s < 50 * 1.06
    assert done.bound_by == "host links"


def test_alone_each_rank_reads_what_it_wants() -> None:
    done = run(load_of(12 * GB, Parallel(dp=6, pp=2, fsdp=True)), "direct")
    assert done.storage_bytes == pytest.approx(12 * GB, rel=0.001)
    assert (done.exchanged_bytes, done.total_s) == (0, pytest.approx(12, rel=0.01))
    replicas = run(load_of(12 * GB, Parallel(dp=6, pp=2)), "direct")
    assert replicas.storage_bytes == 6 * 12 * GB
    assert replicas.total_s == pytest.approx(72, rel=0.01)


def test_slow_cores_placing_and_messages_are_named() -> None:
    parallel = Parallel(tp=2, pp=2, dp=3)
    for name, value, bound_by in (
        ("rank_bytes_per_s", 10 * MB, "the cores of a rank"),
        ("copy_bytes_per_s", 10 * MB, "placing"),
        ("message_s", 0.05, "messages"),
    ):
        done = run(load_of(GB, parallel, **{name: value}))
        assert (done.bound_by, done.total_s > 2 * 1.0) == (bound_by, True), name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fsdp", [False, True])
def test_a_world_that_nobody_here_owns(strategy: str, fsdp: bool) -> None:
    load = load_of(
        13_800 * GB, Parallel(tp=8, pp=64, dp=6, fsdp=fsdp), ranks_per_host=8,
        storage_bytes_per_s=273 * GB, host_bytes_per_s=50 * GB,
        rank_bytes_per_s=None, copy_bytes_per_s=None, message_s=None,
    )  # fmt: skip
    done = run(load, strategy)
    assert load.least_s == pytest.approx(13_800 / 273)
    assert done.total_s >= load.least_s
    assert len(done.timeline) < 1000
    for one in done.timeline:
        assert 0 <= one.begin_s <= one.end_s <= done.total_s * (1 + 1e-9)


@pytest.mark.parametrize(("in_flight", "seconds"), [(8, 1.0), (16, 0.5)])
def test_requests_in_flight_bound_the_reading(in_flight: int, seconds: float) -> None:
    """Each of 4 ranks reads 256 chunks of 1 MB, 31.25 ms each, as a fast store gives them."""
    requests = Requests(latency_s=0.02125, connection_bytes_per_s=100e6, in_flight=in_flight)
    load = load_of(4 * 256 * MB, Parallel(tp=4), storage_bytes_per_s=1000 * GB, requests=requests)
    done = run(load, chunk_bytes=MB)
    assert done.total_s - load.cluster.before_s == pytest.approx(seconds, rel=0.1)
    assert done.bound_by == "requests in flight"
