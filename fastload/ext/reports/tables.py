"""Reports as tables, as the command line prints them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fastload.base.units import count, format_bytes
from fastload.report import LoadReport, SaveReport, VerifyReport

_MAX_RANKS = 16  # in print(report), which every rank of a job may do

_Column = tuple[str, Callable[[Any], str]]


def table(report: Any, *, is_complete: bool = False, sharded: bool = False) -> str:
    """Returns a report as a table, with a line for each rank.

    Args:
        report: The report of a load, save, staging or verification.
        is_complete: Whether all ranks have a line; else the slowest ones.
        sharded: Whether each rank has loaded its parts of the tensors.
    """
    if isinstance(report, LoadReport):
        lines = _load(report, "in parts on" if sharded else "on each of" if len(report.ranks) > 1 else "on")
        columns = _LOAD
    elif isinstance(report, SaveReport):
        lines, columns = _save(report), _SAVE
    elif isinstance(report, VerifyReport):
        return "\n".join(_verify(report))
    else:
        lines, columns = _stage(report), _STAGE
    ranks = [own for own in report.ranks if getattr(own, "leads", True)]
    shown = ranks
    if len(ranks) > _MAX_RANKS and not is_complete:
        shown = sorted(sorted(ranks, key=lambda own: -own.total_s)[:_MAX_RANKS], key=lambda own: own.rank)
        lines = [*lines, f"the {_MAX_RANKS} slowest of {len(ranks)}:"]
    return "\n".join([*lines, "", *_rows(columns, shown), "", *_notes(report)]).rstrip()


def _rows(columns: Sequence[_Column], ranks: Iterable[Any]) -> list[str]:
    cells = [[head for head, _ in columns], *([show(own) for _, show in columns] for own in ranks)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_left = [head == "host" for head, _ in columns]
    return [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, is_left, strict=True)
        ).rstrip()
        for row in cells
    ]


def _size(name: str, head: str) -> _Column:
    return head, lambda own: format_bytes(getattr(own, name))


def _time(name: str, head: str) -> _Column:
    return head, lambda own: f"{getattr(own, name):.2f} s"


_RANK: tuple[_Column, ...] = ("rank", lambda own: str(own.rank)), ("host", lambda own: str(own.host))
_LOAD: tuple[_Column, ...] = (
    *_RANK,
    ("read", lambda own: format_bytes(own.bytes_read) if own.reader else "–"),
    _size("bytes_received", "received"),
    _size("bytes_in", "network"),
    _time("read_s", "reading"),
    _time("exchange_s", "exchange"),
    _time("place_s", "placing"),
    _time("total_s", "total"),
    _size("peak_staging_bytes", "staging"),
)
_SAVE: tuple[_Column, ...] = (
    *_RANK,
    _size("bytes_written", "written"),
    _size("bytes_sent", "sent"),
    _time("stall_s", "stall"),
    _time("snapshot_s", "snapshot"),
    _time("waited_s", "waiting"),
    _time("write_s", "writing"),
    _time("flush_s", "flush"),
    _time("commit_s", "commit"),
    _time("total_s", "total"),
    _size("peak_staging_bytes", "staging"),
)
_STAGE: tuple[_Column, ...] = (
    _RANK[1],
    _size("bytes_kept", "kept"),
    _size("bytes_read", "read"),
    _size("bytes_fed", "fed"),
    _size("bytes_received", "received"),
    _size("bytes_written", "written"),
    _time("read_s", "reading"),
    _time("exchange_s", "exchange"),
    _time("write_s", "writing"),
    _time("total_s", "total"),
)


def _load(report: LoadReport, where: str) -> list[str]:
    verified = f", verified: {format_bytes(report.bytes_verified)}" if report.bytes_verified else ""
    is_for_itself = report.strategy == "direct" and len(report.ranks) > 1
    read = "read by each rank for itself" if is_for_itself else "read from storage"
    source = "" if report.source == "storage" else f", from {report.source}"
    return [
        f"{report.url}: {count(report.num_tensors, 'tensor')}, {format_bytes(report.bytes_wanted)}{source}",
        f"{report.strategy}: {report.why}",
        f"{report.total_s:.2f} s, {_rate(report.bytes_wanted, report.total_s)} {where} "
        f"{count(len(report.ranks), 'rank')}; {read}: {format_bytes(report.bytes_read)} = "
        f"{report.read_amplification:.2f} × the checkpoint{_supplied(report)}{verified}",
        f"{count(report.num_rounds, 'round')} of {format_bytes(report.chunk_bytes)} chunks, "
        f"{report.depth} in flight; exchange: {report.transport}",
        _reads(report),
        "reading, exchange and placing overlap; the rest of the total is waiting",
    ]


def _save(report: SaveReport) -> list[str]:
    step = f", step {report.step}" if report.step is not None else ""
    copies = f", {report.num_copies} copies" if report.num_copies > 1 else ""
    lines = [
        f"{report.url}{step}: {count(report.num_tensors, 'tensor')}, {format_bytes(report.nbytes)} in "
        f"{count(report.num_files, 'file')}, to {report.tier}{copies}",
        f"{report.total_s:.2f} s until it was durable, {_rate(report.nbytes, report.total_s)}; "
        f"training waited {report.stall_s:.2f} s; {count(report.num_writers, 'writer')}",
    ]
    if report.base:
        lines.append(f"a delta of {report.base}")
    if report.why_complete:
        lines.append(f"complete: {report.why_complete}")
    return lines + [f"in place of {url}" for url in report.came_instead_of]


def _stage(report: Any) -> list[str]:  # the class is that of another extension
    return [
        f"{report.url}: {format_bytes(report.nbytes)} in {count(report.num_files, 'file')}, "
        f"at {report.path} of {count(report.num_hosts, 'host')}",
        f"{report.total_s:.2f} s, {_rate(report.nbytes, report.total_s)} on each host; "
        f"read from there: {format_bytes(report.bytes_read)} = {report.read_amplification:.2f} × the "
        f"checkpoint{_supplied(report)}; digest {report.digest}",
    ]


def _verify(report: VerifyReport) -> list[str]:
    blocks = f"{count(report.num_blocks, 'block')}, " if report.num_blocks else ""
    files, ranks = count(report.num_files, "file"), count(len(report.ranks), "rank")
    return [
        f"{report.url}: {report.outcome}: {blocks}{format_bytes(report.nbytes)} in {files}",
        f"{report.total_s:.2f} s on {ranks}, {_rate(report.bytes_verified, report.total_s)} together",
    ]


def _rate(nbytes: int, seconds: float) -> str:
    return f"{format_bytes(nbytes / seconds if seconds else 0.0)}/s"


def _supplied(report: Any) -> str:
    return f", from sources: {format_bytes(report.bytes_supplied)}" if report.bytes_supplied else ""


def _reads(report: LoadReport) -> str:
    """Returns how storage was read, and what took longest."""
    num_reads = sum(own.num_reads for own in report.ranks)
    readers = [own for own in report.ranks if own.num_reads]
    if not readers:
        return "read nothing from storage"
    first_byte_s = sum(own.first_byte_s * own.num_reads for own in readers) / num_reads
    after = f", first byte after {1000 * first_byte_s:.0f} ms" if first_byte_s else ""
    in_flight = sum(own.reads_in_flight for own in readers) / len(readers)
    return (
        f"{count(num_reads, 'read')}, {in_flight:.0f} in flight on each reader{after}; limit: {report.limit}"
    )


def _notes(report: Any) -> list[str]:
    """Returns what kept ranks and sources from delivering."""
    notes = []
    for own in report.ranks:
        if note := getattr(own, "note", ""):
            notes.append(f"rank {own.rank} on {own.host} {note}")
        if problems := getattr(own, "problems", ""):
            notes.append(f"rank {own.rank} on {own.host}: {problems}")
    return notes
