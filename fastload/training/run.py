"""The random name of a run, kept in its root: by it, and not by the path, memory knows whose it is."""

from __future__ import annotations

from contextlib import closing
from typing import NamedTuple

from fastload.errors import CheckpointError, FastloadError
from fastload.formats.names import RECORD_NAME
from fastload.formats.record import MAX_RECORD_BYTES, Record, parse
from fastload.storage import Location, locate
from fastload.storage.tier_place import GENERATION as NAME
from fastload.training.catalog import Catalog

__all__ = ["RunName"]

_FOLDER = "fastload-run"  # a checkpoint without files, which every storage can hold
_PREFIX = "fastload-"  # shorter: some stores do not list what follows a whole name
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
            folder = storage.folders(_PREFIX).get(_FOLDER)
            about = folder.files.get(RECORD_NAME) if folder is not None else None
            if folder is None or about is None or about.nbytes > MAX_RECORD_BYTES:
                return None
            try:
                metadata = parse(storage.read_all(f"{_FOLDER}/{RECORD_NAME}", about)).metadata
            except CheckpointError:
                return None
        run = metadata.get(_RUN, "")
        return _There(run, metadata.get(_ROOT, ""), folder.place) if NAME.fullmatch(run) else None


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
