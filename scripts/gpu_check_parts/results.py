"""What a stage has found so far: one line of JSON each, so that nothing is lost if the stage is ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Found = dict[str, Any]


class Results:
    """Writes findings of one stage; several processes may write to one file.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def fact(self, name: str, value: Any) -> None:
        """Notes something about the machine or the setting."""
        self._write(fact=name, value=value)

    def check(self, name: str, ok: bool, detail: object = "") -> None:
        """Notes whether something is as it should be; a stage with one that is not has failed."""
        self._write(check=name, ok=bool(ok), detail=str(detail))

    def skip(self, name: str, why: object) -> None:
        """Notes what cannot run here."""
        self._write(skip=name, why=_first_line(why))

    def value(self, table: str, row: str, **columns: float) -> None:
        """Notes one run of a measurement; the report has the median of all runs of a row."""
        self._write(table=table, row=row, columns=columns)

    def _write(self, **line: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read_results(path: Path) -> Found:
    """Returns the findings in a file: facts, checks, skipped, and tables by title, row and column."""
    found: Found = {"facts": {}, "checks": [], "skipped": {}, "tables": {}}
    written = path.read_text() if path.exists() else ""
    for text in written.split("\n")[:-1]:  # the last line is not complete if its writer was killed
        line = json.loads(text)
        if "fact" in line:
            found["facts"][line["fact"]] = line["value"]
        elif "check" in line:
            found["checks"].append({"name": line["check"], "ok": line["ok"], "detail": line["detail"]})
        elif "skip" in line:
            found["skipped"][line["skip"]] = line["why"]
        else:
            row = found["tables"].setdefault(line["table"], {}).setdefault(line["row"], {})
            for column, value in line["columns"].items():
                row.setdefault(column, []).append(value)
    return found


def _first_line(why: object) -> str:
    text = str(why).strip() or repr(why)
    return text.splitlines()[0]
