"""Where a checkpoint goes: what may be replaced there, and the step that replaces it."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from fastload.errors import CheckpointExists, FastloadError, OptionError
from fastload.storage import folders
from fastload.storage.base import Names
from fastload.storage.folders import opened_folder
from fastload.storage.mounts import bucket_client
from fastload.storage.pending import DATA, NOT_FREE, OLD, Pending

_log = logging.getLogger(__name__)

_NUM_TRIES = 10  # against others that publish at the same instant
_MAX_LIST_BYTES = 1 << 30  # of a record or a receipt that is looked at


class Destination:
    """The place of a local checkpoint in its parent directory, which is opened once.

    Args:
        path: The place; links in it are followed.
        names: What files of a checkpoint are called.
        signs: Names of files that tell a checkpoint of fastload's from anything else, and that say which
            files it has.

    Attributes:
        path: The place, without links.
        guard: Called with the descriptor of what is about to be replaced; raises to refuse that.
    """

    def __init__(self, path: str, names: Names, signs: Sequence[str]) -> None:
        self.path = os.path.realpath(path)
        self._given = path
        self.guard: Callable[[int], None] = lambda there: None
        self._name = os.path.basename(self.path)
        self._names = names
        self._signs = signs
        self._parent: int | None = None

    @property
    def parent(self) -> int:
        """Descriptor of the parent, which is made if it is missing."""
        if self._parent is None:
            parent = os.path.dirname(self.path)
            folders.make_folders(parent)
            self._parent = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
        return self._parent

    def close(self) -> None:
        """Closes the parent."""
        if self._parent is not None:
            os.close(self._parent)
            self._parent = None

    def check(self, written: Sequence[str], *, overwrite: bool) -> None:
        """Refuses to take the place of what is there, unless it is a checkpoint that may be replaced.

        Args:
            written: Names of files of the new checkpoint.
            overwrite: Whether a checkpoint may be replaced.

        Raises:
            CheckpointExists: There is something.
            OptionError: It is no checkpoint, or holds what would be lost or mixed up with the new one; or it
                would be in a bucket that is mounted.
            PermissionError: The path leads there by way of a link that another user may have planted.
        """
        folders.require_trusted_links(self._given)
        if client := bucket_client(self.path):
            raise OptionError(
                f"{self.path} is in a bucket that {client} mounts: there a file has one writer, who writes "
                "all of it, and to rename a directory copies it. Save to the bucket itself, such as "
                "s3://bucket/path; loads through the mount work"
            )
        with self._open() as there:
            if there is not None:
                self._kept(there, written, overwrite=overwrite)

    def take(self, held: Pending, data: int, written: Sequence[str], *, overwrite: bool) -> None:
        """Renames a pending directory into its place: the step that makes the checkpoint exist.

        What is not the old checkpoint's own is in both directories before they change places. So at every
        instant it is where it was, and what is changed in the meantime is brought after it.

        Args:
            held: The pending directory.
            data: The directory in it that is to stand here.
            written: Names of all files of the new checkpoint.
            overwrite: Whether a checkpoint may be replaced.

        Raises:
            CheckpointExists: As for `check`.
            OptionError: As for `check`.
            OSError: It could not be done, or not durably; what was here is here again.
        """
        old = self._rename_in(held, data, written, overwrite=overwrite)
        try:
            if old:
                with opened_folder(old, held.folder) as there:
                    if self._keep(there, data, written, overwrite=overwrite):
                        folders.sync(data)
            folders.sync(self.parent)
            folders.sync(held.folder)
        except (OSError, FastloadError):
            # The caller is told that there is no new checkpoint, so the old one has to be there.
            if old == DATA:
                folders.exchange(DATA, held.folder, self._name, self.parent)
            else:
                os.rename(self._name, DATA, src_dir_fd=self.parent, dst_dir_fd=held.folder)
                held.restore()
            raise

    def _rename_in(self, held: Pending, data: int, written: Sequence[str], *, overwrite: bool) -> str:
        """Returns what the old one is called in the pending directory then; empty if there was none."""
        for _ in range(_NUM_TRIES):
            with self._open() as there:
                occupied = there is not None and bool(folders.names(there))
                if there is not None:
                    self._keep(there, data, written, overwrite=overwrite)
            folders.sync(data)
            with suppress(_Changed):
                return self._exchange(held) if occupied else self._rename(held)
        raise CheckpointExists(f"{self.path}: others publish there at the same time")

    def _exchange(self, held: Pending) -> str:
        try:
            folders.exchange(DATA, held.folder, self._name, self.parent)
            return DATA
        except FileNotFoundError:
            raise _Changed from None  # somebody removed it: its place is free
        except OSError as error:
            if error.errno not in folders.UNABLE:
                raise
        os.rename(self._name, OLD, src_dir_fd=self.parent, dst_dir_fd=held.folder)
        try:
            self._rename(held)
        except BaseException:
            held.restore()
            raise
        return OLD

    def _rename(self, held: Pending) -> str:
        try:
            # It takes the place of nothing, or of an empty directory, but of nothing else.
            os.rename(DATA, self._name, src_dir_fd=held.folder, dst_dir_fd=self.parent)
        except OSError as error:
            if error.errno not in NOT_FREE:
                raise
            raise _Changed from None
        return ""

    def _keep(self, there: int, data: int, written: Sequence[str], *, overwrite: bool) -> bool:
        """Gives the new directory what the old one holds beside the checkpoint, and its mode and group.

        Returns:
            Whether anything was not as it should be.
        """
        kept = self._kept(there, written, overwrite=overwrite)
        gone = set(folders.names(data)) - {*written, *kept}
        for name in gone:
            os.unlink(name, dir_fd=data)
        try:
            folders.look_like(there, data)
        except PermissionError as error:
            _log.warning("%s: cannot keep the group of the directory: %s", self.path, error.strerror)
        return folders.carry(kept, there, data) or bool(gone)

    def _kept(self, there: int, written: Sequence[str], *, overwrite: bool) -> list[str]:
        """Returns the names of what is there beside the checkpoint, once it may be replaced."""
        found = folders.kinds(there)
        if not found:
            return []
        if not overwrite:
            raise CheckpointExists(
                f"{self.path} exists already: to replace it, ask for overwrite=True (--overwrite)"
            )
        signs = [name for name in self._signs if name in found]
        if not signs and found.keys().isdisjoint(self._names.others):
            raise OptionError(
                f"{self.path} has no {' or '.join(self._signs)}: "
                "overwrite=True replaces checkpoints of fastload's only"
            )
        if inside := sorted(name for name, is_folder in found.items() if is_folder):
            raise OptionError(f"{self.path} holds directories, overwrite=True would delete them: {inside}")
        self.guard(there)
        own = self._names.own(found, [read_list(name, there) for name in signs])
        return kept_names(self.path, found, own, written, self._names)

    @contextmanager
    def _open(self) -> Iterator[int | None]:
        """Opens what stands here; None if nothing does."""
        parent = self.parent  # which may be no directory, either
        try:
            there = folders.open_folder(self._name, parent)
        except FileNotFoundError:
            yield None
            return
        except NotADirectoryError:
            raise CheckpointExists(f"{self.path} is a file") from None
        try:
            yield there
        finally:
            os.close(there)


class _Changed(Exception):
    """What stood there when it was looked at does so no more."""


def read_list(name: str, folder: int) -> bytes:
    """Reads a file that says which files a checkpoint has; empty if it is no such file."""
    with suppress(OSError):
        file = os.open(name, os.O_RDONLY | os.O_NONBLOCK, dir_fd=folder)
        with open(file, "rb") as opened:
            found = os.fstat(file)
            if stat.S_ISREG(found.st_mode) and found.st_size <= _MAX_LIST_BYTES:
                return opened.read(_MAX_LIST_BYTES)
    return b""


def kept_names(
    url: str, there: Iterable[str], own: set[str], written: Iterable[str], names: Names
) -> list[str]:
    """Returns the names of the files that are kept when a checkpoint is replaced.

    Args:
        url: Where it is.
        there: The names of all files there.
        own: Those that are fastload's own.
        written: The names of the files of the new checkpoint.
        names: What files of a checkpoint are called.

    Raises:
        OptionError: One of them would be replaced by a new file, or read as a part of the new checkpoint.
    """
    kept = sorted(set(there) - own)
    written = set(written)
    if bad := [name for name in kept if name in written or name.endswith(names.part_endings)]:
        raise OptionError(
            f"{url} holds files that are not the checkpoint's, and that the new one would replace or be "
            f"mixed up with: {bad[:5]}: to replace the checkpoint, move them away"
        )
    return kept


def replaced_names(
    url: str,
    there: set[str],
    record: bytes | None,
    listed: Iterable[str],
    written: Iterable[str],
    names: Names,
    *,
    overwrite: bool,
) -> set[str]:
    """Returns the names of what a new checkpoint on an object store takes the place of.

    Args:
        url: Where it will be.
        there: The names of all that is there.
        record: The commit record that is there, or None.
        listed: What a dead save's owner file, if there is one, says may be there of that save.
        written: The names of the files of the new checkpoint.
        names: What files of a checkpoint are called.
        overwrite: Whether a checkpoint may be replaced.

    Raises:
        CheckpointExists: There is something, and `overwrite` is off.
        OptionError: It is no checkpoint, or as for `kept_names`.
    """
    if names.record in there and not overwrite:
        raise CheckpointExists(f"{url} exists already: to replace it, ask for overwrite=True (--overwrite)")
    own = there & {names.owner, *listed}
    is_other = overwrite and not there.isdisjoint(names.others)
    if names.record in there:
        own |= names.own(there, [record or b""])
    elif is_other:
        own |= names.own(there, [])
    foreign = sorted(there - own)
    if names.record not in there and foreign:
        if not overwrite:
            raise CheckpointExists(f"{url} holds something already: {foreign[:5]}")
        if names.owner not in there and not is_other:
            raise OptionError(
                f"{url} has no {names.record}: overwrite=True replaces checkpoints of fastload's only"
            )
    kept_names(url, there, own, written, names)
    return own
