"""The report: report.json with every value, report.md with tables of medians."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_check_parts.stages import Outcome

Table = Mapping[str, Mapping[str, Sequence[float]]]


class Report:
    """Writes the report, as often as there is something new.

    Args:
        out: Folder for it.
        kind: Of the device.
        size: Name of the sizes.
        outcomes: Those of all stages, which change meanwhile.
    """

    def __init__(self, out: Path, kind: str, size: str, outcomes: Sequence[Outcome]) -> None:
        self._out, self._outcomes = out, outcomes
        self._head = {"device": kind, "size": size, "began": time.strftime("%Y-%m-%d %H:%M:%S %Z")}
        self._began = time.monotonic()

    def write(self) -> None:
        """Writes both files; each is complete at any time."""
        head = {**self._head, "seconds": round(time.monotonic() - self._began, 1)}
        content = {**head, "stages": [outcome.to_dict() for outcome in self._outcomes]}
        _replace(self._out / "report.json", json.dumps(content, indent=1) + "\n")
        _replace(self._out / "report.md", "\n".join(self._lines(head)) + "\n")

    def _lines(self, head: Mapping[str, Any]) -> Iterator[str]:
        yield f"# GPU check on {head['device']}, sizes {head['size']}"
        yield ""
        yield f"Began {head['began']}, took {head['seconds']} s so far. Numbers are medians of the runs."
        yield ""
        yield "| stage | | result | s (limit) |"
        yield "|---|---|---|---|"
        for outcome in self._outcomes:
            stage, why = outcome.stage, f": {_cell(outcome.why)}" if outcome.why else ""
            seconds = f"{outcome.seconds:.1f} ({stage.limit_s:.0f})"
            yield f"| {stage.name} | {stage.title} | {outcome.state}{why} | {seconds} |"
        for outcome in self._outcomes:
            yield from _stage_lines(outcome)


def _stage_lines(outcome: Outcome) -> Iterator[str]:
    found = outcome.found
    if not any(found.values()):
        return
    yield ""
    yield f"## {outcome.stage.title}"
    if found["facts"]:
        yield ""
        yield "| | |"
        yield "|---|---|"
        yield from (f"| {name} | {_cell(value)} |" for name, value in found["facts"].items())
    if failed := [check for check in found["checks"] if not check["ok"]]:
        yield ""
        yield "| **failed** | |"
        yield "|---|---|"
        yield from (f"| {check['name']} | {_cell(check['detail'])} |" for check in failed)
    if passed := [check for check in found["checks"] if check["ok"]]:
        yield ""
        yield from (f"- ok: {check['name']}{_in_brackets(check['detail'])}" for check in passed)
    for title, table in found["tables"].items():
        yield ""
        yield from _table_lines(title, table)
    if found["skipped"]:
        yield ""
        yield from (f"- not run: {name}: {_cell(why)}" for name, why in found["skipped"].items())


def _table_lines(title: str, table: Table) -> Iterator[str]:
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    yield f"| {title} | {' | '.join(columns)} | runs |"
    yield "|---" * (len(columns) + 2) + "|"
    for name, row in table.items():
        cells = [_number(statistics.median(row[column])) if column in row else "" for column in columns]
        yield f"| {name} | {' | '.join(cells)} | {max(map(len, row.values()))} |"


def _number(value: float) -> str:
    if value == 0 or isinstance(value, int) or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - _magnitude(value))}f}"  # three digits that count


def _magnitude(value: float) -> int:
    return int(f"{abs(value):e}".partition("e")[2])


def _in_brackets(detail: str) -> str:
    return f" ({_cell(detail)})" if detail else ""


def _cell(value: Any) -> str:
    return str(value).strip().replace("|", "\\|").replace("\n", " ")


def _replace(path: Path, text: str) -> None:
    partial = path.with_name("running.partial")
    partial.write_text(text)
    os.replace(partial, path)
