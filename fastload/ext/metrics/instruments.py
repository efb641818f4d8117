"""The instruments, and what each event records on them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from fastload.base.version import __version__
from fastload.comm.observers import Event
from fastload.report import LoadReport, ReadReport, SaveReport

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600)
_BYTES = tuple(10.0**power for power in range(6, 15))
_TIMES = (1.0, 1.01, 1.05, 1.1, 1.25, 1.5, 2, 4, 8, 16, 64)

HISTOGRAMS = {
    "fastload.load.duration": ("s", SECONDS, "Time of a load, until all tensors are in place."),
    "fastload.load.size": ("By", _BYTES, "Bytes of the requested tensors of a load, each counted once."),
    "fastload.load.read_amplification": ("1", _TIMES, "Bytes that a load read from storage over its size."),
    "fastload.save.duration": ("s", SECONDS, "Time from the call of a save until it is durable."),
    "fastload.save.stall.duration": ("s", SECONDS, "Time that training waited for a save, and those before."),
    "fastload.save.size": ("By", _BYTES, "Bytes of a saved checkpoint."),
    "fastload.restore.duration": ("s", SECONDS, "Time of a restore, with the search for the newest."),
    "fastload.redistribute.duration": ("s", SECONDS, "Time of a redistribution."),
    "fastload.redistribute.size": ("By", _BYTES, "Bytes of the redistributed tensors, each counted once."),
    "fastload.stage.duration": ("s", SECONDS, "Time of a staging, until every host has its copy."),
    "fastload.stage.size": ("By", _BYTES, "Bytes of a staged checkpoint."),
    "fastload.stage.read_amplification": ("1", _TIMES, "Bytes that a staging read over its size."),
}
"""Name → unit, bounds of the buckets, description."""

COUNTERS = {
    "fastload.load.io": ("By", "Bytes that loads read from storage."),
    "fastload.load.supplied": ("By", "Bytes that loads got from peers and other sources than storage."),
    "fastload.load.retries": ("{retry}", "Reads of loads that were repeated."),
    "fastload.restore.fallbacks": (
        "{checkpoint}",
        "Damaged checkpoints that restores passed over.",
    ),
    "fastload.stage.io": ("By", "Bytes that stagings read from their source."),
    "fastload.stage.supplied": ("By", "Bytes that stagings got from peers and other sources."),
    "fastload.stage.retries": ("{retry}", "Reads of stagings that were repeated."),
}
"""Name → unit, description."""

AGE, GOODPUT = "fastload.checkpoint.age", "fastload.goodput"

Attributes = Mapping[str, str | int]


class Meter:
    """Records events.

    Args:
        each_rank: Whether each rank records its own part; else rank 0 records those of all ranks.
    """

    def __init__(self, *, each_rank: bool) -> None:
        self._each_rank = each_rank
        meter = metrics.get_meter("fastload", __version__)
        self._histograms = {
            name: meter.create_histogram(name, unit, text, explicit_bucket_boundaries_advisory=bounds)
            for name, (unit, bounds, text) in HISTOGRAMS.items()
        }
        self._counters = {
            name: meter.create_counter(name, unit, text) for name, (unit, text) in COUNTERS.items()
        }
        self._training = _Training()
        meter.create_observable_gauge(
            AGE, [self._training.age], "s", "Age of the newest durable state: the work that a failure costs."
        )
        meter.create_observable_gauge(
            GOODPUT, [self._training.goodput], "1", "Part of the time that training did not wait for saves."
        )

    def record(self, event: Event) -> None:
        """Records an event, unless another rank does."""
        if event.rank and not self._each_rank:
            return
        facts, attributes = event.facts, self._attributes(event)
        report, error = facts.get("report"), facts.get("error")
        self._training.note(event, attributes)
        if error is not None:
            if f"fastload.{event.name}.duration" in self._histograms:
                self._measure(f"{event.name}.duration", event.seconds, attributes)
        elif isinstance(report, SaveReport):
            self._record_save(report, event, attributes)
        elif isinstance(report, ReadReport):
            self._record_reads(report, event, attributes)
        elif event.name == "restore":
            self._measure("restore.duration", event.seconds, attributes)
            self._count("restore.fallbacks", facts["num_damaged"], attributes)

    def _attributes(self, event: Event) -> dict[str, str | int]:
        report, facts = event.facts.get("report"), event.facts
        attributes: dict[str, str | int] = {"fastload.rank": event.rank} if self._each_rank else {}
        if (error := facts.get("error")) is not None:
            attributes["error.type"] = type(error).__name__
        if isinstance(report, LoadReport):
            attributes["fastload.strategy"] = report.strategy
        tier = getattr(report, "tier", None) or getattr(report, "source", None)
        tier = tier or facts.get("tier") or facts.get("source")
        if tier and event.name != "redistribute":
            attributes["fastload.tier"] = tier
        return attributes

    def _record_save(self, report: SaveReport, event: Event, attributes: Attributes) -> None:
        own = report.ranks[event.rank]
        each = self._each_rank
        self._measure("save.duration", own.total_s if each else report.total_s, attributes)
        self._measure("save.stall.duration", own.stall_s if each else report.stall_s, attributes)
        self._measure("save.size", own.bytes_written if each else report.nbytes, attributes)

    def _record_reads(self, report: ReadReport, event: Event, attributes: Attributes) -> None:
        """Records a load, a staging or a redistribution."""
        ranks = report.ranks[event.rank : event.rank + 1] if self._each_rank else report.ranks
        name = event.name
        self._measure(f"{name}.duration", max(own.total_s for own in ranks), attributes)
        if event.rank == 0:  # of all ranks
            self._measure(f"{name}.size", report.num_bytes(), attributes)
        if name == "redistribute":
            return
        self._count(f"{name}.io", sum(own.bytes_read for own in ranks), attributes)
        self._count(f"{name}.supplied", sum(own.bytes_supplied for own in ranks), attributes)
        self._count(f"{name}.retries", sum(own.retries for own in ranks), attributes)
        if event.rank == 0:
            self._measure(f"{name}.read_amplification", report.read_amplification, attributes)

    def _measure(self, name: str, value: float, attributes: Attributes) -> None:
        self._histograms[f"fastload.{name}"].record(value, attributes)

    def _count(self, name: str, number: int, attributes: Attributes) -> None:
        self._counters[f"fastload.{name}"].add(number, attributes)


class _Training:
    """The training as its manager sees it: when the newest durable state was taken, and what was waited."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0  # managers
        self._taken = 0.0
        self._opened = 0.0
        self._waited_s = 0.0
        self._attributes: dict[str, str | int] = {}

    def note(self, event: Event, attributes: Attributes) -> None:
        """Notes what changes the gauges."""
        now = time.monotonic()
        report = event.facts.get("report")
        with self._lock:
            if event.name == "manage":
                self._num_open += 1
                if self._num_open == 1:
                    self._opened = self._taken = now
                    self._waited_s = 0.0
                    self._attributes = dict(attributes)
            elif event.name == "close":
                self._num_open = max(0, self._num_open - 1)
            elif event.name == "restore" and "error" not in event.facts:
                self._taken = now
                self._waited_s += event.seconds
            elif isinstance(report, SaveReport):
                self._waited_s += report.ranks[event.rank].stall_s
                if report.tier == "storage":
                    self._taken = max(self._taken, now - report.ranks[event.rank].total_s)

    def age(self, options: CallbackOptions) -> Iterable[Observation]:
        """Seconds of work that would be lost; nothing without a manager."""
        with self._lock:
            if self._num_open:
                yield Observation(time.monotonic() - self._taken, self._attributes)

    def goodput(self, options: CallbackOptions) -> Iterable[Observation]:
        """Part of the time since the manager opened; nothing without one."""
        with self._lock:
            if self._num_open:
                passed_s = max(time.monotonic() - self._opened, 1e-9)
                yield Observation(max(0.0, 1 - self._waited_s / passed_s), self._attributes)
