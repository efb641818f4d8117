"""The checkpoints below a root: their listing, and the removal of old ones."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from fastload.base.threads import Task, in_threads
from fastload.comm.observers import notify
from fastload.comm.world import World
from fastload.errors import CheckpointError, FastloadError, StorageError, UnsupportedVersion, proves_damage
from fastload.formats.names import NAMES, RECORD_NAME
from fastload.formats.record import MAX_RECORD_BYTES, Record, digest_of, parse
from fastload.formats.untrusted import MAX_INT
from fastload.options import Patience
from fastload.storage import (
    FileStat,
    Folder,
    Location,
    PatientStorage,
    Target,
    locate,
    open_patiently,
    open_target,
)
from fastload.storage.folders import os_errors, require_writable
from fastload.training.retention import KeepPolicy, Point, SavedCheckpoint, StoredCheckpoint, expendable

MAX_STEP = MAX_INT
_PREFIX = "step_"
_NAME = re.compile(_PREFIX + r"([0-9]{8,19})")
_STEP, _METRICS, _BRANCH, _INCARNATION = "step", "metrics", "branch", "incarnation"
_NUMBER = re.compile(r"[0-9]{1,18}")
_READS_AT_ONCE = 16
_LARGE_BYTES = 16 << 20
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class Summary:
    """The contents of a commit record.

    Attributes:
        files: Name → size in bytes.
        metadata: The user's text, with step, metrics and branch.
        digest: Digest of the record.
        base: Name of the base of a delta; empty for a complete checkpoint.
        base_digest: Digest of the base's record.
        num_deltas: Number of deltas since the last complete checkpoint.
    """

    files: Mapping[str, int]
    metadata: Mapping[str, str]
    digest: str = ""
    base: str = ""
    base_digest: str = ""
    num_deltas: int = 0

    @classmethod
    def of(cls, record: Record, digest: str) -> Summary:
        """Returns the summary of a record."""
        files = {file.name: file.nbytes for file in record.files}
        if (delta := record.delta) is None:
            return cls(files, record.metadata, digest)
        return cls(files, record.metadata, digest, delta.base, delta.digest, delta.num_deltas)

    @property
    def nbytes(self) -> int:
        """Bytes of all files, without the record."""
        return sum(self.files.values())

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the step; values that are not numbers are left out."""
        return metrics_of(self.metadata)

    @property
    def branch(self) -> int:
        """Its branch; 0 if the record has none."""
        text = self.metadata.get(_BRANCH, "")
        return int(text) if _NUMBER.fullmatch(text) else 0

    @property
    def incarnation(self) -> str:
        """Name of the start of the job that saved it; empty if it had no tier."""
        return self.metadata.get(_INCARNATION, "")

    def problem_with(self, files: Mapping[str, FileStat]) -> str:
        """Describes how these files differ from those in the record; empty if they do not."""
        sizes = {name: files[name].nbytes if name in files else None for name in self.files}
        wrong = [name for name, nbytes in self.files.items() if sizes[name] != nbytes]
        parts = [
            f"{name} is missing"
            if sizes[name] is None
            else f"{name} has {sizes[name]} of {self.files[name]} bytes"
            for name in wrong[:_MAX_NAMED]
        ]
        more = [f"{len(wrong) - _MAX_NAMED} more"] if len(wrong) > _MAX_NAMED else []
        return ", ".join(parts + more)


@dataclass(frozen=True, slots=True)
class Entry:
    """A listed checkpoint.

    Attributes:
        step: Its step.
        state: ``complete``; ``incomplete`` if it has no commit record; ``damaged`` if the record is, if a
            file in it is missing or has another size, or if a base is missing or damaged; ``unsupported`` if
            this fastload cannot read the record; ``unreadable`` if storage refuses access.
        problem: The reason, unless it is complete.
        saved_s: Time of the record, in seconds since 1970; 0 without one.
        place: Its path with links resolved; empty where storage has no links.
        is_link: Whether its name is a link.
        summary: Contents of the record, if it can be read.
    """

    step: int
    state: str
    problem: str = ""
    saved_s: float = 0.0
    place: str = ""
    is_link: bool = False
    summary: Summary | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all files in its commit record exist, in their sizes."""
        return self.state == "complete"

    @property
    def saved(self) -> SavedCheckpoint:
        """The checkpoint for `Retention`."""
        if self.summary is None:
            return SavedCheckpoint(self.step, self.saved_s)
        return SavedCheckpoint(self.step, self.saved_s, self.summary.metrics, self.summary.branch)

    @property
    def point(self) -> Point:
        """Position in the history of the run."""
        return self.saved.point


class Catalog:
    """Lists and removes the checkpoints below a root; ignores all other names.

    Args:
        root: A local directory or a URL; it need not exist yet.
        storage_options: As for `fastload.load`.
        patience: The number of attempts at a request, and the time for them.
        checks_bases: Whether a delta is damaged if its base is not in the root.

    Attributes:
        damaged: Steps of checkpoints that are listed as complete, and failed to load.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None,
        patience: Patience,
        *,
        checks_bases: bool = True,
    ) -> None:
        self.root = locate(root)
        self._checks_bases = checks_bases
        self._storage_options = storage_options
        self._patience = patience
        self.damaged: set[int] = set()
        self._records: dict[int, _RecordRead] = {}
        self._incomplete: dict[int, Folder] = {}
        self._large = threading.Lock()  # reads large records one at a time

    def path(self, step: int) -> Location:
        """Returns the path of the checkpoint of a step, whether it exists or not."""
        return self.root / _name_of(step)

    @property
    def shared(self) -> bool:
        """Whether all hosts see the same files below the root, as far as storage can tell."""
        with closing(self.open_storage(self.root)) as storage:
            return storage.shared

    def entries(self) -> list[Entry]:
        """Lists the checkpoints, complete or not, in the order in which they were saved.

        One request lists names and sizes of all files. New commit records are read, several at once.

        Raises:
            StorageError: The root cannot be listed, or storage does not answer.
        """
        entries, folders = self._look()
        if self._in_doubt(entries, folders):
            entries, folders = self._look()
        self._incomplete = {entry.step: folders[entry.step] for entry in entries if not entry.is_complete}
        return sorted(entries, key=lambda entry: entry.point)

    def _in_doubt(self, entries: Sequence[Entry], folders: Mapping[int, Folder]) -> bool:
        """Whether a checkpoint is newly damaged; perhaps it is just being deleted or replaced."""
        return any(
            entry.state in ("damaged", "unreadable")
            and self._incomplete.get(entry.step) != folders[entry.step]
            for entry in entries
        )

    def _look(self) -> tuple[list[Entry], dict[int, Folder]]:
        with closing(self.open_storage(self.root)) as storage:
            listed = storage.folders(_PREFIX)
            named = {int(match[1]): name for name in listed if (match := _NAME.fullmatch(name))}
            folders = {
                step: listed[name]
                for step, name in named.items()
                if name == _name_of(step) and step <= MAX_STEP
            }
            stats = {
                step: folder.files[RECORD_NAME]
                for step, folder in folders.items()
                if RECORD_NAME in folder.files
            }
            records = {
                step: known for step, known in self._records.items() if known.is_current(stats.get(step))
            }
            unknown = {_name_of(step): step for step in stats.keys() - records.keys()}

            def read(name: str) -> None:
                step = unknown[name]
                records[step] = self._read(storage, f"{name}/{RECORD_NAME}", stats[step])

            in_threads(read, sorted(unknown), _READS_AT_ONCE)
        self._records = records
        entries = [_entry(step, folder, records.get(step)) for step, folder in folders.items()]
        return _with_bases(entries, in_root_only=self._checks_bases), folders

    def _read(self, storage: PatientStorage, name: str, record: FileStat) -> _RecordRead:
        url = f"{storage.url}/{name}"
        if record.nbytes > MAX_RECORD_BYTES:
            return _RecordRead(record, "unsupported", f"a {RECORD_NAME} of {record.nbytes} bytes")
        try:
            with self._large if record.nbytes > _LARGE_BYTES else nullcontext():
                text = storage.read_all(name, record)
                summary = Summary.of(parse(text, url), digest_of(text))
        except CheckpointError as error:
            state = "damaged" if proves_damage(error) else "unsupported"
            return _RecordRead(record, state, str(error).removeprefix(f"{url}: "))
        except StorageError as error:
            if error.transient:
                raise
            return _RecordRead(record, "unreadable", str(error.args[0]))
        return _RecordRead(record, summary=summary)

    def usable(self) -> list[Entry]:
        """Returns the complete checkpoints that are not known to be damaged, oldest first.

        Raises:
            StorageError: As for `entries`.
            UnsupportedVersion: As for `require_supported`.
        """
        entries = self.entries()
        self.require_supported(
            {entry.step: entry.problem for entry in entries if entry.state == "unsupported"}
        )
        return [entry for entry in entries if entry.is_complete and entry.step not in self.damaged]

    def stored(self) -> list[StoredCheckpoint]:
        """Returns the `usable` checkpoints, as a `Lineage` compares them; raises as that does."""
        return [
            StoredCheckpoint(entry.point, entry.summary.digest, entry.summary.incarnation)
            for entry in self.usable()
            if entry.summary is not None
        ]

    def require_supported(self, unsupported: Mapping[int, str]) -> None:
        """Raises if this fastload cannot read some checkpoints, since one of them may be the newest.

        Args:
            unsupported: Step → reason.

        Raises:
            UnsupportedVersion: There are some.
        """
        if unsupported:
            step, problem = max(unsupported.items())
            raise UnsupportedVersion(
                f"{self.path(step)} may be the newest checkpoint, and this fastload cannot read it: "
                f"{problem}. Update fastload; or restore an older one by name, restore(step=…), and move "
                "this one away before the next save"
            )

    def expendable(
        self,
        entries: Sequence[Entry],
        policy: KeepPolicy,
        *,
        needed: Collection[int] = (),
        damaged: Collection[int] = (),
    ) -> list[int]:
        """Returns the steps to delete, oldest first, but deltas before their bases.

        Incomplete checkpoints, links and the targets of links are ignored, and stay; so do the bases of all
        deltas that stay.

        Args:
            entries: All checkpoints.
            policy: Names those to keep.
            needed: Steps that are kept in any case.
            damaged: Steps that are listed as complete, and are not.
        """
        links = [entry.place for entry in entries if entry.is_link]
        targets = {entry.step for entry in entries if any(_is_in(link, entry.place) for link in links)}
        saved = [
            entry.saved
            for entry in entries
            if entry.is_complete and not entry.is_link and entry.step not in damaged
        ]
        steps = set(ordered := expendable(policy, saved, needed={*needed, *targets}))
        by_name = {_name_of(entry.step): entry for entry in entries}
        for entry in entries:
            if entry.step not in steps:
                steps -= {base.step for base in _bases(entry, by_name)}
        depths = {entry.step: entry.summary.num_deltas for entry in entries if entry.summary is not None}
        return sorted((step for step in ordered if step in steps), key=lambda step: -depths[step])

    def base_for(self, step: int, *, damaged: Collection[int] = ()) -> Location | None:
        """Returns the newest complete checkpoint that does not need the one of a step; None without one.

        Args:
            step: The step that is saved, perhaps again.
            damaged: Steps that are listed as complete, and are not.
        """
        entries = self.entries()
        by_name = {_name_of(entry.step): entry for entry in entries}
        usable = [
            entry
            for entry in entries
            if entry.is_complete
            and not entry.is_link
            and not {step, *damaged} & {entry.step, *(base.step for base in _bases(entry, by_name))}
        ]
        return self.path(max(usable, key=lambda entry: entry.point).step) if usable else None

    def remove(self, step: int) -> None:
        """Deletes a checkpoint; no reader finds half of it complete."""
        with closing(self.target(step)) as target:
            target.remove()

    def clean_abandoned(self) -> list[str]:
        """Removes the remains of dead saves below the root; returns their paths."""
        with closing(self.target(0)) as target:
            return target.clean_abandoned()

    def require_writable(self) -> None:
        """Creates a local root, and tries to write there.

        Raises:
            StorageError: This process cannot.
        """
        if not self.root.scheme:
            with os_errors(self.root.url):
                require_writable(self.root.address)

    def target(self, step: int) -> Target:
        """Opens write access to the checkpoint of a step."""
        return self.open_target(self.path(step))

    def open_target(self, path: Location) -> Target:
        """Opens write access to a checkpoint, with the timeouts and options of this catalog."""
        return open_target(path, NAMES, self._storage_options, patience=self._patience)

    def open_storage(self, path: Location) -> PatientStorage:
        """Opens read access to a path, likewise."""
        return open_patiently(path, NAMES, self._storage_options, patience=self._patience)

    def is_at(self, step: int, urls: set[str]) -> bool:
        """Whether the checkpoint of a step is at one of these URLs."""
        return _normal(self.path(step).url) in map(_normal, urls)


@dataclass(frozen=True, slots=True)
class _RecordRead:
    """The result of reading a commit record."""

    record: FileStat
    state: str = "complete"
    problem: str = ""
    summary: Summary | None = None

    def is_current(self, record: FileStat | None) -> bool:
        """Whether it is the result for this record, which need not be read again."""
        is_same = record is not None and bool(record.version) and self.record == record
        return is_same and self.state != "unreadable"


def _entry(step: int, folder: Folder, record: _RecordRead | None) -> Entry:
    where: dict[str, Any] = {"place": folder.place, "is_link": folder.is_link}
    if folder.problem:
        return Entry(step, "unreadable", folder.problem, **where)
    if record is None:
        return Entry(step, "incomplete", f"it has no {RECORD_NAME}", **where)
    state, problem = record.state, record.problem
    if record.summary is not None and (problem := record.summary.problem_with(folder.files)):
        state = "damaged"
    return Entry(step, state, problem, record.record.modified_s, summary=record.summary, **where)


def _bases(entry: Entry, by_name: Mapping[str, Entry]) -> Iterator[Entry]:
    """Yields the bases of a delta that are listed, its own first."""
    for _ in range(entry.summary.num_deltas if entry.summary is not None else 0):
        base = by_name.get(entry.summary.base) if entry.summary is not None else None
        if base is None:
            return
        yield base
        entry = base


def _with_bases(entries: list[Entry], *, in_root_only: bool) -> list[Entry]:
    """Returns the entries, with deltas as damaged whose base is missing, replaced or not complete.

    Args:
        entries: The entries.
        in_root_only: Whether all bases have to be among them.
    """
    by_name = {_name_of(entry.step): entry for entry in entries}
    for entry in sorted(
        entries, key=lambda entry: entry.summary.num_deltas if entry.summary is not None else 0
    ):
        summary = entry.summary
        if summary is None or not summary.base or not entry.is_complete or not _NAME.fullmatch(summary.base):
            continue
        base = by_name.get(summary.base)
        is_there = (
            base is not None and base.summary is not None and base.summary.digest == summary.base_digest
        )
        if not is_there and not in_root_only:
            continue
        if base is None:
            problem = f"its base {summary.base} is missing"
        elif not is_there:
            problem = f"its base {summary.base} was replaced"
        elif not base.is_complete:
            problem = f"its base {summary.base} is {base.state}: {base.problem}"
        else:
            continue
        by_name[_name_of(entry.step)] = replace(entry, state="damaged", problem=problem)
    return list(by_name.values())


def is_step(step: object) -> TypeGuard[int]:
    """Whether a value is a step that can be saved."""
    return type(step) is int and 0 <= step <= MAX_STEP


def metadata_of(
    step: int, metrics: Mapping[str, Any] | None, branch: int = 0, incarnation: str = ""
) -> dict[str, str]:
    """Returns the metadata of a checkpoint: step, metrics, branch and incarnation.

    Raises:
        ValueError: A metric is not a number.
        TypeError: Likewise.
    """
    numbers = {str(name): float(value) for name, value in (metrics or {}).items()}
    texts = {_STEP: str(step), _METRICS: json.dumps(numbers, sort_keys=True)}
    if branch:
        texts[_BRANCH] = str(branch)
    return {**texts, _INCARNATION: incarnation} if incarnation else texts


def metrics_of(metadata: Mapping[str, str]) -> dict[str, float]:
    """Returns the metrics in metadata; values that are not numbers are left out."""
    try:
        metrics = json.loads(metadata.get(_METRICS, "{}"))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(metrics, dict):
        return {}
    return {name: float(value) for name, value in metrics.items() if type(value) is float}


def _name_of(step: int) -> str:
    return f"{_PREFIX}{step:08d}"


def _is_in(path: str, folder: str) -> bool:
    """Whether a local path is a directory, or in it."""
    return path == folder or path.startswith(folder + "/")


def _normal(url: str) -> str:
    return os.path.abspath(url) if os.path.isabs(url) else url


_log = logging.getLogger(__name__)


class Cleaner:
    """Deletes old checkpoints and the remains of dead saves, in the background. Its errors are only logged.

    Args:
        world: The ranks, for whose listeners this one notes what it deletes.
        catalog: The checkpoints.
        policy: Which ones to keep; None keeps all.
        in_use: Returns the URLs of checkpoints that are open.
    """

    def __init__(
        self, world: World, catalog: Catalog, policy: KeepPolicy | None, in_use: Callable[[], set[str]]
    ) -> None:
        self._world = world
        self._catalog = catalog
        self._policy = policy
        self._in_use = in_use
        self._last: Task | None = None
        self._pruning: Task | None = None

    def clean(self) -> None:
        """Begins to remove the remains of dead saves."""
        self._begin(self._clean)

    def prune(self, is_committed: Callable[[], bool], step: int, *, damaged: set[int]) -> None:
        """Deletes old checkpoints once a new one exists.

        Args:
            is_committed: Waits until the save has ended, and returns whether the new checkpoint exists.
            step: Step of the new one.
            damaged: Steps of damaged checkpoints, which are ignored.
        """
        policy = self._policy
        if policy is not None:
            self._begin(lambda: self._prune(policy, step, damaged) if is_committed() else None)
            self._pruning = self._last

    def wait(self, timeout_s: float) -> None:
        """Waits until all deletions have ended, at most this long."""
        if self._last is not None:
            self._last.join(timeout_s)

    def wait_pruned(self, timeout_s: float) -> None:
        """Waits until all deletions of checkpoints have ended, at most this long."""
        if self._pruning is not None:
            self._pruning.join(timeout_s)

    def _begin(self, work: Callable[[], object]) -> None:
        before = self._last

        def run() -> None:
            if before is not None:
                before.join()
            try:
                work()
            except Exception as error:  # even a defect costs only disk space
                defect = not isinstance(error, FastloadError)
                _log.warning("%s: cannot clean up: %s", self._catalog.root, error, exc_info=defect)

        self._last = Task(run, "fastload-keep")
        self._last.start()

    def _clean(self) -> None:
        for path in self._catalog.clean_abandoned():
            _log.info("removed %s, which a dead save left behind", path)

    def _prune(self, policy: KeepPolicy, step: int, damaged: set[int]) -> None:
        catalog, entries = self._catalog, self._catalog.entries()
        sizes = {entry.step: entry.summary.nbytes for entry in entries if entry.summary is not None}
        open_ones = {entry.step for entry in entries if catalog.is_at(entry.step, self._in_use())}
        for old in catalog.expendable(entries, policy, needed={step, *open_ones}, damaged=damaged):
            if not catalog.is_at(old, self._in_use()):
                began = time.perf_counter()
                catalog.remove(old)
                notify(self._world, "delete", began, step=old, url=catalog.path(old).url, nbytes=sizes[old])
