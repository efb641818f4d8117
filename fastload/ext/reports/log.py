"""One line of the log for each load, save, restore, stage and deletion."""

from __future__ import annotations

import logging
from typing import Any

from fastload.base.units import format_bytes
from fastload.comm.observers import Event
from fastload.report import LoadReport, SaveReport


def log_event(event: Event) -> None:
    """Logs an event that went well: at level INFO on rank 0, and the phases of each rank at DEBUG.

    The logger is named after the event: ``fastload.save``.
    """
    if "error" in event.facts:
        return  # which the caller gets, or the logger of saves in the background has
    logger = logging.getLogger(f"fastload.{event.name}")
    if event.rank == 0 and (line := _line(event)):
        logger.info("%s", line)
    if logger.isEnabledFor(logging.DEBUG) and (phases := _phases(event)):
        logger.debug("%s", phases)


def _line(event: Event) -> str:
    facts, report = event.facts, event.facts.get("report")  # of a staging that of another extension
    if isinstance(report, SaveReport):
        step = f"step {report.step}" if report.step is not None else report.url
        moved = _moved(report.nbytes, report.total_s)
        return f"saved {step} to {report.tier}: {moved}; training waited {report.stall_s:.2f} s"
    if isinstance(report, LoadReport) and event.name == "redistribute":
        return f"redistributed {_moved(report.bytes_wanted, report.total_s)}; {report.transport}"
    if isinstance(report, LoadReport):
        return (
            f"loaded {report.url} from {report.source}: {_moved(report.bytes_wanted, report.total_s)};"
            f" {report.strategy}, read {report.read_amplification:.2f} ×"
        )
    if report is not None:
        return (
            f"staged {report.url} to {report.path}: {_moved(report.nbytes, report.total_s)};"
            f" read {report.read_amplification:.2f} ×"
        )
    if event.name == "restore":
        why = f"; {facts['why']}" if facts["why"] else ""
        return f"restored step {facts['step']} from {facts['source']} in {event.seconds:.2f} s{why}"
    if event.name == "delete":
        size = format_bytes(facts["nbytes"])
        return f"deleted step {facts['step']}, {facts['url']}: {size} in {event.seconds:.2f} s"
    return ""


def _moved(nbytes: int, seconds: float) -> str:
    rate = format_bytes(nbytes / seconds if seconds else 0.0)
    return f"{format_bytes(nbytes)} in {seconds:.2f} s, {rate}/s"


def _phases(event: Event) -> str:
    """Returns the seconds of each phase on this rank."""
    report: Any = event.facts.get("report")
    if report is None:
        return ""
    own = vars(report.ranks[event.rank])
    times = [f"{name[:-2]} {value:.3f} s" for name, value in own.items() if name.endswith("_s")]
    return f"rank {event.rank} of {report.url}: {', '.join(times)}"
