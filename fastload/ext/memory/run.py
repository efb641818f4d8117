"""The name of a run, by which each start of its job finds what earlier ones left in memory."""

from __future__ import annotations

from contextlib import closing
from typing import NamedTuple

from fastload.errors import CheckpointError, FastloadError
from fastload.ext.memory.folder import NAME
from fastload.formats.names import RECORD_NAME
from fastload.formats.record import MAX_RECORD_BYTES, Record, parse
from fastload.storage import Location, locate
from fastload.storage.base import new_token
from fastload.training.catalog import Catalog
from fastload.training.tier import TierJob

_FOLDER = "fastload-run"  # a checkpoint without files, which works on every storage
_PREFIX = "fastload-"  # shorter than the name, which some stores do not list
_RUN, _ROOT = "run", "root"


def agree_on_run(job: TierJob, name: RunName) -> tuple[str, bool]:
    """Returns the name of a run, that in its root or a new one, and whether this rank is to store it.

    Raises:
        StorageError: Storage does not answer; on all ranks.
    """
    world = job.world
    with world.ending(), world.step(f"looking for the name of the run in {job.catalog.root}") as step:
        looks = world.rank == 0 or not job.catalog.shared
        new = new_token() if world.rank == 0 else ""
        step.answer([world.node, name.read() if looks else "", new])
    hosts = [host for host, *_ in step.answers]
    run = next((known for _, known, _ in step.answers if known), step.answers[0][2])
    writer = hosts.index(world.node) if job.options.shared is False else 0
    return run, world.rank == writer


class RunName:
    """The name of a run, stored in its root.

    The path of the root is stored with it. If that is another root, which still has the name, this one is a
    copy, and gets its own name.

    Args:
        catalog: The catalog of the root.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._stored: _StoredName | None = None

    def read(self) -> str:
        """Returns the name; empty without one.

        Raises:
            StorageError: Storage does not answer.
        """
        stored = self._stored = self._read(self._catalog.root)
        return stored.run if stored is not None and not self._is_copy(stored) else ""

    def write(self, run: str) -> None:
        """Stores a name in the root, unless it has it.

        Raises:
            FastloadError: It cannot be written.
        """
        root = self._catalog.root
        if self._stored is not None and self._stored[:2] == (run, root.url):
            return
        record = Record(1, (), metadata={_RUN: run, _ROOT: root.url})
        with closing(self._catalog.open_target(root / _FOLDER)) as target:
            try:
                target.prepare([], overwrite=True)
                target.publish([target.flush()], [(RECORD_NAME, record.to_bytes())])
            except BaseException:
                target.abort()
                raise

    def _is_copy(self, stored: _StoredName) -> bool:
        """Whether the root that the name was stored for still exists, at another path."""
        root = self._catalog.root
        if stored.root == root.url:
            return False
        try:
            other = locate(stored.root)
            found = self._read(other) if other.scheme == root.scheme else stored
        except FastloadError:
            return True  # perhaps
        is_same_folder = found is not None and bool(found.place) and found.place == stored.place
        return found is not None and found.run == stored.run and not is_same_folder

    def _read(self, root: Location) -> _StoredName | None:
        with closing(self._catalog.open_storage(root)) as storage:
            folder = storage.folders(_PREFIX).get(_FOLDER)
            stat = folder.files.get(RECORD_NAME) if folder is not None else None
            if folder is None or stat is None or stat.nbytes > MAX_RECORD_BYTES:
                return None
            try:
                metadata = parse(storage.read_all(f"{_FOLDER}/{RECORD_NAME}", stat)).metadata
            except CheckpointError:
                return None
        run = metadata.get(_RUN, "")
        return _StoredName(run, metadata.get(_ROOT, ""), folder.place) if NAME.fullmatch(run) else None


class _StoredName(NamedTuple):
    """The name of a run, as stored in a root.

    Attributes:
        run: The name.
        root: URL of the root that it was stored for.
        place: Its path with links resolved; empty where storage has no links.
    """

    run: str
    root: str
    place: str
