"""What planning a large sharded load costs, in lines that Python runs: other work cannot change it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import prod
from types import FrameType
from typing import Any

import pytest

from fastload.planning.parallel import Cut, Model, Parallel, requests_of
from fastload.transfer.demand import RankRequests, SharingGroups
from fastload.transfer.routed_plan import RoutedView, plan_routes

MIB = 1 << 20
SHAPES = [((4096, 1024), 0), ((1024, 4096), 1), ((1024,), None)]
JOB = Parallel(tp=4, pp=2, dp=16, fsdp=True)  # 128 ranks, no two of which want the same


def model_of(num_tensors: int) -> Model:
    tensors = []
    for layer in range(num_tensors // 3):
        for index, (shape, dim) in enumerate(SHAPES):
            nbytes = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            tensors.append(Cut(layer, index << 24, nbytes, shape, dim, layer))
    return Model(tensors, num_tensors // 3)


def plan_from(packed: Sequence[bytes], model: Model) -> RoutedView:
    """What each rank does with what the ranks have told each other."""
    sharing = SharingGroups(model.tensors, RankRequests.unpack(packed), 0)
    ranks = tuple(range(JOB.num_ranks))
    plan = plan_routes(sharing, ranks, order=ranks, staging_bytes=1 << 28, chunk_bytes=None)
    return RoutedView(plan, 5)


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize(
    ("staging", "job", "num_first"),
    [
        (48, Parallel(tp=8, pp=2, dp=6), 1),
        (64, Parallel(tp=8, pp=2, dp=6), 1),
        (64, Parallel(tp=2, pp=8, dp=6), 6),
    ],
)
def test_blocks_of_many_readers_fit_since_they_read_at_different_times(
    staging: int, job: Parallel, num_first: int, contiguous: bool
) -> None:
    """Half of the ranks would send a block of 1 MiB to a rank at once, if they all did.

    With more in the first layer, as embeddings are, all ranks help to read what few want.
    """
    shapes = [((8192, 4096), 0), ((4096, 8192), 1), ((4096,), None)]
    tensors, offset = [], 0
    for layer in [0] * num_first + [*range(1, 16)]:
        for shape, dim in shapes:
            tensors.append(Cut(0, offset, 2 * prod(shape), shape, dim, layer))
            offset += 2 * prod(shape)
    model, ranks = Model(tensors, 16), tuple(range(job.num_ranks))
    sharing = SharingGroups(model.tensors, requests_of(model, job), MIB, contiguous=contiguous)
    plan = plan_routes(sharing, ranks, order=ranks, staging_bytes=staging * MIB, chunk_bytes=None)
    assert plan.num_rounds > 10
    assert plan.depth * plan.buffer_bytes <= staging * MIB
    for rank in (0, 47, 95):
        view = RoutedView(plan, rank)
        for index in range(plan.num_rounds):
            come = sum(message.nbytes for message in view.incoming(index))
            assert come + sum(each.nbytes for each in view.reads(index)) <= plan.buffer_bytes


def lines_of(work: Callable[[], object]) -> int:
    """How many lines Python runs, one for each turn of a loop at least."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_more_tensors_cost_the_same_however_many_ranks_want_parts_of_them() -> None:
    lines = []
    for num_tensors in (600, 1800):
        model = model_of(num_tensors)
        requests = requests_of(model, JOB)
        assert len(requests.distinct) == JOB.num_ranks
        packed = [requests.of(rank).packed for rank in range(JOB.num_ranks)]
        lines.append(lines_of(lambda packed=packed, model=model: plan_from(packed, model)))
    assert (lines[1] - lines[0]) / 1200 < 30, lines  # of one tensor; it was at least 4 for each rank


def test_ranks_that_want_parts_of_the_same_tensors_share_what_they_say_of_them() -> None:
    model = model_of(600)
    packed = [request.packed for request in requests_of(model, JOB).distinct]
    requests = RankRequests.unpack(packed)
    assert [request.packed for request in requests.distinct] == packed
    assert len({id(request.tensors) for request in requests.distinct}) == JOB.pp
    assert len({id(request.codes) for request in requests.distinct}) == JOB.pp
