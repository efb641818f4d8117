"""The checkpoints of one run: directories of one root, each named after its step."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastload.base.tasks import Task
from fastload.base.threads import each
from fastload.errors import CheckpointError, FastloadError, StorageError, UnsupportedVersion, proves_damage
from fastload.formats.names import NAMES, RECORD_NAME
from fastload.formats.record import MAX_RECORD_BYTES, Record, parse
from fastload.formats.untrusted import MAX_INT
from fastload.storage import (
    FileStat,
    Folder,
    Location,
    PatientStorage,
    Target,
    locate,
    open_storage,
    open_target,
)
from fastload.storage.memory_folder import GENERATION as RUN_NAME
from fastload.training.retention import Point, Retention, SavedCheckpoint

MAX_STEP = MAX_INT
_PREFIX = "step_"
_NAME = re.compile(_PREFIX + r"([0-9]{8,19})")
_STEP, _METRICS, _BRANCH = "step", "metrics", "branch"
_NUMBER = re.compile(r"[0-9]{1,18}")
_READS_AT_ONCE = 16
_LARGE_BYTES = 16 << 20
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class Summary:
    """What the commit record says of one checkpoint.

    Attributes:
        files: Name → size in bytes.
        metadata: Text that was attached.
    """

    files: Mapping[str, int]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Size of its files in bytes, without the record."""
        return sum(self.files.values())

    @property
    def metrics(self) -> dict[str, float]:
        """What was measured at that step; what is no number is left out."""
        return metrics_of(self.metadata)

    @property
    def branch(self) -> int:
        """Its branch; 0 for what does not say."""
        text = self.metadata.get(_BRANCH, "")
        return int(text) if _NUMBER.fullmatch(text) else 0

    def problem_with(self, files: Mapping[str, FileStat]) -> str:
        """Says what differs between these files and those that the record names; empty if nothing does."""
        found = {name: files[name].nbytes if name in files else None for name in self.files}
        wrong = [name for name, nbytes in self.files.items() if found[name] != nbytes]
        parts = [
            f"{name} is missing"
            if found[name] is None
            else f"{name} has {found[name]} of {self.files[name]} bytes"
            for name in wrong[:_MAX_NAMED]
        ]
        more = [f"{len(wrong) - _MAX_NAMED} more"] if len(wrong) > _MAX_NAMED else []
        return ", ".join(parts + more)


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of one checkpoint without reading its data.

    Attributes:
        step: Its step.
        state: ``complete``; ``incomplete`` if it has no commit record; ``damaged`` if that, or a file that it
            names, is not as it was written; ``unsupported`` if this fastload cannot read the record;
            ``unreadable`` if storage does not let us look.
        problem: What is the matter, unless it is complete.
        saved_s: When the record was written, in seconds since 1970; 0 if there is none.
        place: Where it really is, links followed; empty where storage knows no links.
        is_link: Whether its name is a link, which others have made.
        summary: What the record says, if there is one that can be used.
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
        """Whether all files are there that its commit record names, in their sizes."""
        return self.state == "complete"

    @property
    def saved(self) -> SavedCheckpoint:
        """The same as `Retention` wants it."""
        if self.summary is None:
            return SavedCheckpoint(self.step, self.saved_s)
        return SavedCheckpoint(self.step, self.saved_s, self.summary.metrics, self.summary.branch)

    @property
    def point(self) -> Point:
        """Where it stands in the history of the run."""
        return Point(self.summary.branch if self.summary is not None else 0, self.step)


class Catalog:
    """Finds and removes the checkpoints below a root; what is named in another way is no business of it.

    Args:
        root: A local directory or a URL; it need not exist yet.
        storage_options: As for `fastload.load`.
        timeout_s: Longest time in seconds for one request.
        retries: Further attempts after a transient error.

    Attributes:
        damaged: Steps of checkpoints that seem to be complete, and turned out not to be when loaded.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None,
        *,
        timeout_s: float,
        retries: int,
    ) -> None:
        self.root = locate(root)
        self._storage_options = storage_options
        self._timeout_s = timeout_s
        self._retries = retries
        self.damaged: set[int] = set()
        self._known: dict[int, _Reading] = {}
        self._bad: dict[int, Folder] = {}
        self._large = threading.Lock()  # one record at a time that is so large

    def path(self, step: int) -> Location:
        """Returns where the checkpoint of a step is, or would be."""
        return self.root / _name_of(step)

    @property
    def shared(self) -> bool:
        """Whether all hosts see the same below the root, as far as storage can tell."""
        with closing(self.open_storage(self.root)) as storage:
            return storage.shared

    def entries(self) -> list[Entry]:
        """Lists the checkpoints, complete or not, in the order in which they were saved.

        One listing tells names and sizes of all files; the commit records that are not known yet are read,
        several at once.

        Raises:
            StorageError: The root cannot be listed, or storage does not answer.
        """
        entries, folders = self._look()
        if self._in_doubt(entries, folders):
            entries, folders = self._look()
        self._bad = {one.step: folders[one.step] for one in entries if not one.is_complete}
        return sorted(entries, key=lambda one: one.point)

    def _in_doubt(self, entries: Sequence[Entry], folders: Mapping[int, Folder]) -> bool:
        """Whether something seems to be broken that did not before: it may just be deleted or replaced."""
        return any(
            one.state in ("damaged", "unreadable") and self._bad.get(one.step) != folders[one.step]
            for one in entries
        )

    def _look(self) -> tuple[list[Entry], dict[int, Folder]]:
        with closing(self.open_storage(self.root)) as storage:
            found = storage.folders(_PREFIX)
            named = {int(match[1]): name for name in found if (match := _NAME.fullmatch(name))}
            folders = {
                step: found[name]
                for step, name in named.items()
                if name == _name_of(step) and step <= MAX_STEP
            }
            known = self._known
            records = {
                step: folder.files[RECORD_NAME]
                for step, folder in folders.items()
                if RECORD_NAME in folder.files
            }
            readings = {
                step: known[step]
                for step in records.keys() & known.keys()
                if known[step].is_known_of(records[step])
            }
            unknown = {_name_of(step): step for step in records.keys() - readings.keys()}

            def read(name: str) -> None:
                step = unknown[name]
                readings[step] = self._read(storage, f"{name}/{RECORD_NAME}", records[step])

            each(unknown, read, num_threads=_READS_AT_ONCE)
        self._known = readings
        return [_entry(step, folder, readings.get(step)) for step, folder in folders.items()], folders

    def _read(self, storage: PatientStorage, name: str, record: FileStat) -> _Reading:
        url = f"{storage.url}/{name}"
        if record.nbytes > MAX_RECORD_BYTES:
            return _Reading(record, "unsupported", f"a {RECORD_NAME} of {record.nbytes} bytes")
        try:
            with self._large if record.nbytes > _LARGE_BYTES else nullcontext():
                found = parse(storage.read_all(name, record), url)
        except CheckpointError as error:
            state = "damaged" if proves_damage(error) else "unsupported"
            return _Reading(record, state, str(error).removeprefix(f"{url}: "))
        except StorageError as error:
            if error.transient:
                raise
            return _Reading(record, "unreadable", str(error.args[0]))
        return _Reading(record, summary=Summary({f.name: f.nbytes for f in found.files}, found.metadata))

    def newest(self) -> tuple[int, int] | None:
        """Returns branch and step of the newest complete checkpoint, or None.

        Raises:
            StorageError: As for `entries`.
            UnsupportedVersion: As for `require_supported`.
        """
        entries = self.entries()
        self.require_supported({one.step: one.problem for one in entries if one.state == "unsupported"})
        complete = [one for one in entries if one.is_complete and one.step not in self.damaged]
        return max(((one.point.branch, one.step) for one in complete), default=None)

    def require_supported(self, unsupported: Mapping[int, str]) -> None:
        """Refuses to say which checkpoint is the newest where some cannot be read: it may be one of them.

        Args:
            unsupported: Why not, by step.

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
        retention: Retention,
        *,
        needed: Collection[int] = (),
        damaged: Collection[int] = (),
    ) -> list[int]:
        """Returns the steps to delete, oldest first.

        What is not complete counts for nothing and stays. So do links, which others have made, and what they
        lead to.

        Args:
            entries: All that there is.
            retention: What is kept.
            needed: Steps that are kept whatever the rules say.
            damaged: Steps that are not complete either, although their files seem to be.
        """
        links = [one.place for one in entries if one.is_link]
        targets = {one.step for one in entries if any(_is_in(link, one.place) for link in links)}
        saved = [
            one.saved for one in entries if one.is_complete and not one.is_link and one.step not in damaged
        ]
        return retention.expendable(saved, needed={*needed, *targets})

    def remove(self, step: int) -> None:
        """Deletes a checkpoint; no reader takes half of it for a complete one."""
        with closing(self.target(step)) as target:
            target.remove()

    def clean_abandoned(self) -> list[str]:
        """Removes what dead saves left below the root, never what living ones need; returns it."""
        with closing(self.target(0)) as target:
            return target.clean_abandoned()

    def target(self, step: int) -> Target:
        """Opens write access to the checkpoint of a step."""
        return self.open_target(self.path(step))

    def open_target(self, path: Location) -> Target:
        """Opens write access to a checkpoint, with the patience and the options of this catalog."""
        return open_target(
            path, NAMES, self._storage_options, timeout_s=self._timeout_s, retries=self._retries
        )

    def open_storage(self, path: Location) -> PatientStorage:
        """Opens read access to what is at a path, likewise."""
        storage = open_storage(path, NAMES, self._storage_options, attempt_s=min(30.0, self._timeout_s))
        return PatientStorage(storage, retries=self._retries, timeout_s=self._timeout_s)

    def is_at(self, step: int, urls: set[str]) -> bool:
        """Whether the checkpoint of a step is one of those."""
        return _normal(self.path(step).url) in map(_normal, urls)


@dataclass(frozen=True, slots=True)
class _Reading:
    """What came of reading a commit record, or why nothing did."""

    record: FileStat
    state: str = "complete"
    problem: str = ""
    summary: Summary | None = None

    def is_known_of(self, record: FileStat) -> bool:
        """Whether that very record was read, so that there is no need to read it again."""
        return bool(record.version) and self.record == record and self.state != "unreadable"


def _entry(step: int, folder: Folder, reading: _Reading | None) -> Entry:
    where: dict[str, Any] = {"place": folder.place, "is_link": folder.is_link}
    if folder.problem:
        return Entry(step, "unreadable", folder.problem, **where)
    if reading is None:
        return Entry(step, "incomplete", f"it has no {RECORD_NAME}", **where)
    state, problem = reading.state, reading.problem
    if reading.summary is not None and (problem := reading.summary.problem_with(folder.files)):
        state = "damaged"
    return Entry(step, state, problem, reading.record.modified_s, summary=reading.summary, **where)


def metadata_of(step: int, metrics: Mapping[str, Any] | None, branch: int = 0) -> dict[str, str]:
    """Returns what the record of a checkpoint is to say of its step.

    Raises:
        ValueError: A metric is no number.
        TypeError: Likewise.
    """
    numbers = {str(name): float(value) for name, value in (metrics or {}).items()}
    texts = {_STEP: str(step), _METRICS: json.dumps(numbers, sort_keys=True)}
    return {**texts, _BRANCH: str(branch)} if branch else texts


def metrics_of(metadata: Mapping[str, str]) -> dict[str, float]:
    """Returns the metrics in what a record says; what is no number is left out."""
    try:
        found = json.loads(metadata.get(_METRICS, "{}"))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: float(value) for name, value in found.items() if type(value) is float}


def _name_of(step: int) -> str:
    return f"{_PREFIX}{step:08d}"


def _is_in(path: str, folder: str) -> bool:
    """Whether a local place is a directory, or in it."""
    return path == folder or path.startswith(folder + "/")


def _normal(url: str) -> str:
    return os.path.abspath(url) if os.path.isabs(url) else url


_FOLDER = "fastload-run"  # a checkpoint without files, which every storage can hold
_RUN_PREFIX = "fastload-"  # shorter: some stores do not list what follows a whole name
_RUN, _ROOT = "run", "root"


class RunName:
    """The name of a run, as one rank reads and writes it.

    It says where the root was, too: what says so of another place that is still there is a copy, and gets a
    name of its own.

    Args:
        catalog: The root.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._there: _There | None = None

    def read(self) -> str:
        """Returns the name; empty if there is none yet.

        Raises:
            StorageError: Storage does not answer.
        """
        there = self._there = self._read(self._catalog.root)
        return there.run if there is not None and not self._is_copy(there) else ""

    def write(self, run: str) -> None:
        """Has the root bear a name, unless it does.

        Raises:
            FastloadError: It cannot be written.
        """
        root = self._catalog.root
        if self._there is not None and self._there[:2] == (run, root.url):
            return
        record = Record(1, (), metadata={_RUN: run, _ROOT: root.url})
        with closing(self._catalog.open_target(root / _FOLDER)) as target:
            try:
                target.prepare([], overwrite=True)
                target.publish([target.flush()], [(RECORD_NAME, record.to_bytes())], overwrite=True)
            except BaseException:
                target.abort()
                raise

    def _is_copy(self, there: _There) -> bool:
        """Whether a root that has this name is still where this one says that it was."""
        root = self._catalog.root
        if there.root == root.url:
            return False
        try:
            other = locate(there.root)
            found = self._read(other) if other.scheme == root.scheme else there
        except FastloadError:
            return True  # nobody knows
        by_another_path = found is not None and bool(found.place) and found.place == there.place
        return found is not None and found.run == there.run and not by_another_path

    def _read(self, root: Location) -> _There | None:
        with closing(self._catalog.open_storage(root)) as storage:
            folder = storage.folders(_RUN_PREFIX).get(_FOLDER)
            about = folder.files.get(RECORD_NAME) if folder is not None else None
            if folder is None or about is None or about.nbytes > MAX_RECORD_BYTES:
                return None
            try:
                metadata = parse(storage.read_all(f"{_FOLDER}/{RECORD_NAME}", about)).metadata
            except CheckpointError:
                return None
        run = metadata.get(_RUN, "")
        return _There(run, metadata.get(_ROOT, ""), folder.place) if RUN_NAME.fullmatch(run) else None


class _There(NamedTuple):
    """What is in a root.

    Attributes:
        run: The name of its run.
        root: Where it says that it is.
        place: Where that really is, links followed; empty where storage knows no links.
    """

    run: str
    root: str
    place: str


_log = logging.getLogger(__name__)


class Housekeeper:
    """Keeps one root in order, in the background. What cannot be deleted is no reason for a training to fail.

    Args:
        catalog: The checkpoints.
        retention: Which of them are kept.
        in_use: Returns where the checkpoints are that must be left alone.
    """

    def __init__(self, catalog: Catalog, retention: Retention, in_use: Callable[[], set[str]]) -> None:
        self._catalog = catalog
        self._retention = retention
        self._in_use = in_use
        self._last: Task | None = None

    def clean(self) -> None:
        """Begins to remove what dead saves left behind."""
        self._begin(self._clean)

    def prune(self, is_committed: Callable[[], bool], step: int, *, damaged: set[int]) -> None:
        """Begins to delete old checkpoints, once a new one is there.

        Args:
            is_committed: Waits until the new one exists, or returns False if it never will.
            step: That of the new one.
            damaged: Steps of checkpoints that do not count, and that nothing is done to.
        """
        if self._retention.keep_last is not None:
            self._begin(lambda: self._prune(step, damaged) if is_committed() else None)

    def wait(self, timeout_s: float) -> None:
        """Waits until all that was begun has ended, for so long at most."""
        if self._last is not None:
            self._last.join(timeout_s)

    def _begin(self, work: Callable[[], object]) -> None:
        before = self._last

        def run() -> None:
            if before is not None:
                before.join()
            try:
                work()
            except Exception as error:  # a defect, too, costs no more than disk space
                defect = not isinstance(error, FastloadError)
                _log.warning("%s: cannot clean up: %s", self._catalog.root, error, exc_info=defect)

        self._last = Task(run, "fastload-keep")
        self._last.start()

    def _clean(self) -> None:
        for path in self._catalog.clean_abandoned():
            _log.info("removed %s, which a save that died left behind", path)

    def _prune(self, step: int, damaged: set[int]) -> None:
        entries = self._catalog.entries()
        for old in self._catalog.expendable(entries, self._retention, needed={step}, damaged=damaged):
            if not self._catalog.is_at(old, self._in_use()):
                self._catalog.remove(old)
                _log.info("removed %s", self._catalog.path(old))
