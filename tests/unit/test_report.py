"""The stopwatch of several threads, and what a report adds up."""

from __future__ import annotations

import json
import pickle
import threading

import pytest

from fastload.base import stopwatch
from fastload.base.stopwatch import Stopwatch
from fastload.comm.responses import Each, Reports, join_responses, read_responses, write_response
from fastload.report import LoadReport, RankReport, SaveRankReport, SaveReport


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stopwatch, "time", clock)
    return clock


def test_time_with_work_under_way_counts_once(clock: Clock) -> None:
    watch = Stopwatch()
    clock.now += 5
    assert watch.seconds == 0
    with watch:
        clock.now += 1
        with watch:
            clock.now += 2
            assert watch.seconds == 3
        clock.now += 4
    clock.now += 50
    assert watch.seconds == 7
    watch.start()
    clock.now += 1
    watch.start()
    watch.stop()
    clock.now += 1
    watch.stop()
    assert watch.seconds == 9


def test_an_error_stops_the_watch(clock: Clock) -> None:
    watch = Stopwatch()

    def fail() -> None:
        with watch:
            clock.now += 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    clock.now += 1
    assert watch.seconds == 1


def test_work_of_overlapping_threads_counts_once(clock: Clock) -> None:
    watch = Stopwatch()
    inside, leave = threading.Barrier(4), threading.Barrier(4)

    def work() -> None:
        with watch:
            inside.wait(10)
            leave.wait(10)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    inside.wait(10)
    clock.now += 2
    leave.wait(10)
    for thread in threads:
        thread.join(10)
    clock.now += 2
    assert watch.seconds == 2


def make_report(bytes_wanted: int, *ranks: RankReport) -> LoadReport:
    return LoadReport(
        url="u", strategy="allgather", why="w", transport="t", why_transport="x", bytes_wanted=bytes_wanted,
        num_tensors=1, chunk_bytes=4, num_rounds=2, depth=1, ranks=ranks,
    )  # fmt: skip


def test_totals() -> None:
    one = RankReport(rank=0, host="a", reader=True, bytes_read=6, header_bytes_read=100, total_s=1.0)
    two = RankReport(rank=1, host="b", reader=True, bytes_read=4, total_s=2.5)
    whole = make_report(8, one, two)
    assert (whole.bytes_read, whole.total_s, whole.read_amplification) == (10, 2.5, 1.25)
    assert make_report(0, one).read_amplification == 1.0
    assert make_report(0).total_s == 0.0
    text = json.loads(json.dumps(whole.to_dict()))
    assert (text["bytes_read"], text["read_amplification"], text["strategy"]) == (10, 1.25, "allgather")
    assert [rank["header_bytes_read"] for rank in text["ranks"]] == [100, 0]


def test_reports_of_all_ranks_are_read_as_they_were_told() -> None:
    """Of seconds four digits, and what follows from others is not told."""
    own = [
        RankReport(
            rank=rank, host=f"h{rank // 2}", reader=True, read_s=1.23456, exchange_s=1.0, total_s=2.0 + rank
        )
        for rank in range(4)
    ]
    tables = [write_response(one.rank, {"value": {"report": Each(one.pack())}}) for one in own]
    ((answer, _),) = read_responses(join_responses(tables), len(own))
    assert answer is not None
    reports = Reports(RankReport, answer["value"]["report"])
    assert [(one.rank, one.host, one.read_s, one.total_s) for one in reports] == [
        (0, "h0", 1.235, 2.0), (1, "h0", 1.235, 3.0), (2, "h1", 1.235, 4.0), (3, "h1", 1.235, 5.0),
    ]  # fmt: skip
    assert (reports[0].exposed_s, reports[0].overlapped_s) == pytest.approx((0.765, 0.235))
    assert (reports[3].exposed_s, reports[3].overlapped_s, len(reports)) == (pytest.approx(3.765), 0.0, 4)
    assert reports == pickle.loads(pickle.dumps(reports)) == tuple(reports) != own[:1]


def test_printed_it_is_a_table() -> None:
    rank = RankReport(rank=0, host="a", reader=True, bytes_read=3_000_000, total_s=1.5)
    loaded = LoadReport(
        url="/ckpt",
        strategy="direct",
        why="one rank",
        transport="none",
        why_transport="",
        bytes_wanted=2_000_000,
        num_tensors=1,
        chunk_bytes=1,
        num_rounds=1,
        depth=1,
        ranks=[rank],
    )
    assert str(loaded).splitlines() == [
        "/ckpt: 1 tensor, 2 MB",
        "direct: one rank",
        "1.50 s, 1.33 MB/s on 1 rank; read from storage: 3 MB = 1.50 × the checkpoint",
        "1 round of 1 B chunks, 1 in flight; exchange: none",
        "read nothing from storage",
        "reading, exchange and placing overlap; the rest of the total is waiting",
        "",
        "rank  host  read  received  network  reading  exchange  placing   total  staging",
        "   0  a     3 MB       0 B      0 B   0.00 s    0.00 s   0.00 s  1.50 s      0 B",
    ]
    own = SaveRankReport(
        rank=0, host="a", bytes_written=7, stall_s=0.25, snapshot_s=0, write_s=1, flush_s=0, commit_s=0,
        total_s=2, peak_staging_bytes=0,
    )  # fmt: skip
    saved = SaveReport(
        url="/ckpt", nbytes=7000, num_tensors=1, num_files=1, block_bytes=1, num_writers=1, num_copies=1,
        tier="memory", step=7, ranks=[own],
    )  # fmt: skip
    assert str(saved).splitlines() == [
        "/ckpt, step 7: 1 tensor, 7 kB in 1 file, to memory",
        "2.00 s until it was durable, 3.5 kB/s; training waited 0.25 s; 1 writer",
        "",
        "rank  host  written  sent   stall  snapshot  waiting  writing   flush  commit   total  staging",
        "   0  a         7 B   0 B  0.25 s    0.00 s   0.00 s   1.00 s  0.00 s  0.00 s  2.00 s      0 B",
    ]


def test_printed_it_has_a_line_for_each_of_the_slowest_ranks_and_what_went_wrong() -> None:
    ranks = [
        RankReport(rank=rank, host="a", reader=True, total_s=1.0 + rank, note="stopped" if rank == 3 else "")
        for rank in range(20)
    ]
    lines = str(make_report(8, *ranks)).splitlines()
    assert "the 16 slowest of 20:" in lines
    assert [line.split()[0] for line in lines if line.endswith("0 B")] == [str(rank) for rank in range(4, 20)]
    assert lines[-1] == "rank 3 on a stopped"


def test_without_the_extension_a_report_prints_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.ext.EXTENSIONS", {})
    assert str(make_report(8)).startswith("LoadReport(url='u'")
