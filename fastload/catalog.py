"""The checkpoints of one run: directories of one root, each named after its step."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from fastload.errors import CheckpointError
from fastload.formats.record import MAX_RECORD_BYTES, parse
from fastload.retention import Saved
from fastload.storage import RECORD_NAME, PatientStorage, Target, open_storage, open_target

__all__ = ["Catalog", "Entry", "Summary", "metadata_of", "metrics_of"]

_NAME = re.compile(r"step_(\d{8,18})")
_STEP, _METRICS = "step", "metrics"


@dataclass(frozen=True, slots=True)
class Entry:
    """What a listing says of one checkpoint.

    Attributes:
        step: Its step.
        complete: Whether it has a commit record.
        saved_s: When that was written, in seconds since 1970.
    """

    step: int
    complete: bool
    saved_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What the commit record says of one checkpoint.

    Attributes:
        nbytes: Size of its files in bytes, without the record.
        num_files: How many there are.
        metadata: Text that was attached.
    """

    nbytes: int
    num_files: int
    metadata: Mapping[str, str]


class Catalog:
    """Finds and removes the checkpoints below a root; what is named in another way is no business of it.

    Args:
        root: A local directory or a URL; it need not exist yet.
        storage_options: As for `fastload.load`.
        timeout_s: Longest time in seconds for one request.
        retries: Further attempts after a transient error.
    """

    def __init__(
        self, root: str, storage_options: Mapping[str, Any] | None, *, timeout_s: float, retries: int
    ) -> None:
        self.root = root.rstrip("/") or "/"
        self._storage_options = storage_options
        self._timeout_s = timeout_s
        self._retries = retries
        self._complete: dict[int, Entry] = {}

    def path(self, step: int) -> str:
        """Returns where the checkpoint of a step is, or would be."""
        return f"{self.root}/step_{step:08d}"

    @property
    def shared(self) -> bool:
        """Whether all hosts see the same below the root, as far as storage can tell."""
        with closing(self._open(self.root)) as storage:
            return storage.shared

    def entries(self) -> list[Entry]:
        """Lists the checkpoints, by ascending step; those that have no record as well.

        That one is complete is asked once only: it stays so until it is gone.
        """
        with closing(self._open(self.root)) as storage:
            names = [match for name in storage.folders() if (match := _NAME.fullmatch(name))]
        steps = sorted(int(name[1]) for name in names if self.path(int(name[1])).endswith(f"/{name[0]}"))
        known = {step: self._complete.get(step) or self._look(step) for step in steps}
        self._complete = {step: entry for step, entry in known.items() if entry.complete}
        return list(known.values())

    def _look(self, step: int) -> Entry:
        with closing(self._open(self.path(step))) as storage:
            found = storage.stat(RECORD_NAME)
        return Entry(step, found is not None, found.modified_s if found is not None else 0.0)

    def forget(self, step: int) -> None:
        """Looks at a checkpoint anew next time: it is being replaced."""
        self._complete.pop(step, None)

    def summary(self, step: int) -> Summary:
        """Reads the commit record of a checkpoint.

        Raises:
            CheckpointError: It is not there, or damaged.
            StorageError: Storage did not deliver it.
        """
        with closing(self._open(self.path(step))) as storage:
            found = storage.stat(RECORD_NAME)
            url = f"{storage.url}/{RECORD_NAME}"
            if found is None or found.nbytes > MAX_RECORD_BYTES:
                raise CheckpointError(f"{url}: there is none, or none of this size can be read")
            text = bytearray(found.nbytes)
            storage.read_into(RECORD_NAME, 0, [memoryview(text)], found.version)
        record = parse(bytes(text), url)
        return Summary(sum(file.nbytes for file in record.files), len(record.files), record.metadata)

    def saved(self, entries: Sequence[Entry], *, measured: bool) -> list[Saved]:
        """Returns the complete ones, as `Retention` wants them; with their metrics only on request."""
        return [
            Saved(one.step, one.saved_s, self._metrics(one.step) if measured else {})
            for one in entries
            if one.complete
        ]

    def _metrics(self, step: int) -> dict[str, float]:
        try:
            return metrics_of(self.summary(step).metadata)
        except CheckpointError:
            return {}  # nobody can say what was measured

    def remove(self, step: int) -> None:
        """Deletes a checkpoint; no reader sees half of it as a whole one."""
        self.forget(step)
        with closing(self._target(step)) as target:
            target.remove()

    def clean_abandoned(self) -> list[str]:
        """Removes what dead saves left below the root, never what living ones need; returns it."""
        with closing(self._target(0)) as target:
            return target.clean_abandoned()

    def _target(self, step: int) -> Target:
        return open_target(
            self.path(step), self._storage_options, timeout_s=self._timeout_s, retries=self._retries
        )

    def _open(self, path: str) -> PatientStorage:
        storage = open_storage(path, self._storage_options, attempt_s=min(30.0, self._timeout_s))
        return PatientStorage(storage, retries=self._retries, timeout_s=self._timeout_s)

    def is_at(self, step: int, urls: set[str]) -> bool:
        """Whether the checkpoint of a step is one of those."""
        return _normal(self.path(step)) in {_normal(url) for url in urls}


def metadata_of(step: int, metrics: Mapping[str, Any] | None) -> dict[str, str]:
    """Returns what the record of a checkpoint is to say of its step.

    Raises:
        ValueError: A metric is no number.
        TypeError: Likewise.
    """
    numbers = {str(name): float(value) for name, value in (metrics or {}).items()}
    return {_STEP: str(step), _METRICS: json.dumps(numbers, sort_keys=True)}


def metrics_of(metadata: Mapping[str, str]) -> dict[str, float]:
    """Returns the metrics in the text of a record; what is no number is left out."""
    try:
        found = json.loads(metadata.get(_METRICS, "{}"))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: float(value) for name, value in found.items() if type(value) is float}


def _normal(url: str) -> str:
    path = url.removeprefix("file://")
    return path.rstrip("/") if "://" in path else os.path.abspath(path)
