"""Traces of a load: every rank's spans, on one clock, also of a load that fails."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import fastload
from fastload import SaveOptions
from tests.checkpoints import assert_same_bits, load_reference, write_file
from tests.dist.harness import ranks
from tests.dist.test_save import SMALL, make_state

_APART_S = 1000.0
_TOLERANCE_S = 0.2  # of clocks compared through a store, on a busy machine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    write_file(path, [("a", "U8", (1_000_003,)), ("b", "F32", (300, 7))])
    return path


def be_a_host_of_its_own(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Gives each rank a host name and a clock that has nothing to do with those of the others."""
    real = time.perf_counter
    patch.setattr(socket, "gethostname", lambda: f"host{rank}")
    patch.setattr(time, "perf_counter", lambda: real() + _APART_S * rank)


def read_spans(file: Path) -> tuple[dict[int, str], dict[int, dict[str, list[Any]]]]:
    events = json.loads(file.read_text())
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    spans: dict[int, dict[str, list[Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            begin = event["ts"] / 1e6
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            spans.setdefault(event["pid"], {}).setdefault(event["name"], []).append(
                (begin, begin + event["dur"] / 1e6, event["args"])
            )
    return titles, spans


@pytest.mark.slow(but=["allgather"])
@ranks(3)
@pytest.mark.parametrize("strategy", ["allgather", "broadcast", "direct"])
def test_all_ranks_are_on_one_clock(rank: int, world: int, path: Path, tmp_path: Path, strategy: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        be_a_host_of_its_own(patch, rank)
        file = tmp_path / "trace.json"
        options = fastload.LoadOptions(strategy=strategy, chunk_bytes=50_000, timeout_s=30, trace=file)
        with fastload.open(path, options=options) as checkpoint:
            assert_same_bits(checkpoint.load(), load_reference(path))
            report = checkpoint.report
            if rank == 0:
                check_trace(file, report, world)
            checkpoint.load(names="b")  # a later load has a trace of its own
            if rank == 0:
                _, spans = read_spans(file)
                assert sum(span[2]["nbytes"] for own in spans.values() for span in own.get("read", [])) == (
                    8400 * (world if strategy == "direct" else 1)
                )


def check_trace(file: Path, report: Any, world: int) -> None:
    titles, spans = read_spans(file)
    assert titles == {rank: f"rank {rank} on host{rank}" for rank in range(world)}
    for rank, own in spans.items():
        ((begin, end, _),) = own["load"]
        for stage in set(own) - {"load"}:
            assert all(begin <= one[0] <= one[1] <= end for one in own[stage]), stage
        assert sum(one[2]["nbytes"] for one in own.get("read", [])) == report.ranks[rank].bytes_read
        assert len(own["place"]) == report.num_rounds
    begins = [own["load"][0][0] for own in spans.values()]
    assert max(begins) - min(begins) < 5.0, "clocks that were 1000 s apart"
    if report.strategy == "direct":
        return
    givers = {rank.rank for rank in report.ranks if rank.reader}
    for index in range(report.num_rounds):
        one_round = {
            rank: one for rank, own in spans.items() for one in own["exchange"] if one[2]["round"] == index
        }
        assert len(one_round) == world
        last_start = max(one_round[rank][0] for rank in givers)
        first_end = min(one[1] for one in one_round.values())
        assert last_start <= first_end + _TOLERANCE_S, "nobody can have a round before all have given to it"


@ranks(1, 3)
def test_a_load_that_fails_leaves_a_trace(rank: int, world: int, path: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    options = fastload.LoadOptions(strategy="allgather", chunk_bytes=50_000, timeout_s=20, trace=str(file))
    with fastload.open(path, options=options) as checkpoint:
        if rank == 0:
            os.truncate(path, 500_000)
        with pytest.raises(fastload.FastloadError, match="the file ends at 500000"):
            checkpoint.load()
    if rank == 0:
        titles, spans = read_spans(file)
        assert set(spans) == set(range(world))
        assert any("failed: StorageError" in title for title in titles.values())
        assert all(own["load"] for own in spans.values())


def interrupt(*_: int) -> None:
    raise KeyboardInterrupt


@ranks(2)
def test_a_traced_load_that_is_interrupted_says_so(rank: int, world: int, path: Path, tmp_path: Path) -> None:
    progress = interrupt if rank == 0 else None
    options = fastload.LoadOptions(trace=tmp_path / "trace.json", progress=progress, timeout_s=30)
    expected = KeyboardInterrupt if rank == 0 else fastload.PeerError
    with pytest.raises(expected, match="KeyboardInterrupt" if rank else None):
        fastload.load(path, options=options)


@ranks(2)
def test_a_trace_that_cannot_be_written_does_not_fail_the_load(
    rank: int, world: int, path: Path, tmp_path: Path
) -> None:
    options = fastload.LoadOptions(trace=tmp_path / "nowhere" / "trace.json", timeout_s=30)
    assert_same_bits(fastload.load(path, options=options), load_reference(path))


@ranks(2)
def test_all_ranks_trace_or_none(rank: int, world: int, path: Path, tmp_path: Path) -> None:
    options = fastload.LoadOptions(trace=tmp_path / "trace.json" if rank else None, timeout_s=20)
    with pytest.raises(fastload.PlanMismatch, match="trace: rank 0 None"):
        fastload.load(path, options=options)


@ranks(3)
def test_trace_of_a_save(rank: int, world: int, tmp_path: Path) -> None:
    options = SaveOptions(**{**SMALL.shared_values(), "trace": str(tmp_path / "trace.json")})
    fastload.async_save(make_state(), tmp_path / "step", options=options).wait(20)
    dist.barrier()
    events = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in events if event["ph"] == "X"]
    stages = {r: {span["name"] for span in spans if span["pid"] == r} for r in range(world)}
    assert stages[0] == {"save", "snapshot", "write", "commit"}
    assert stages[1] >= {"save", "snapshot"}
    whole = [span for span in spans if span["name"] == "save"]
    assert len(whole) == world
    commit = next(span for span in spans if span["name"] == "commit")
    writes = [span for span in spans if span["name"] == "write"]
    assert max(write["ts"] + write["dur"] for write in writes) <= commit["ts"]
