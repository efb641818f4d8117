"""Checkpoints written to object stores: hidden uploads, published one by one, the commit record last.

Owner files tell which process publishes to a URL, and which uploads are orphans.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from fastload.base.threads import Workers, at_once, in_threads
from fastload.errors import CheckpointExists, DeadlineExceeded, OptionError, StorageError
from fastload.storage.base import (
    DEFAULT_WRITES,
    Names,
    ObjectWriter,
    WritableStorage,
    Written,
    new_token,
    pending_name,
    saved_name,
)
from fastload.storage.destination import kept_names
from fastload.storage.process import Owner, living_saves

T = TypeVar("T")
_log = logging.getLogger(__name__)

_REFRESH_S = 60.0
_PUBLISHING_S = 600.0  # an owner file this old belongs to a dead save, since running saves refresh theirs
_SETTLE_S = 0.5  # longer than a request; see `OwnerFile.acquire`
_ABANDONED_S = 24 * 3600.0  # a save of another host that began this long ago is dead


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of the objects of one save, relative to the parent of the checkpoint.

    Attributes:
        name: Name of the checkpoint.
        token: Unique name of the save.
    """

    name: str
    token: str

    @property
    def folder(self) -> str:
        """Prefix of the pending objects."""
        return pending_name(self.name, self.token)

    @property
    def owner(self) -> str:
        """Key of the owner file: written first, deleted last."""
        return self.pending("owner.json")

    def pending(self, name: str) -> str:
        """Returns the key of a pending file."""
        return f"{self.folder}/{name}"

    def published(self, name: str) -> str:
        """Returns the key of a published file."""
        return f"{self.name}/{name}"


class Upload(NamedTuple):
    """An unfinished upload: name of the checkpoint, name of the file, and id."""

    checkpoint: str
    file: str
    id: str


class Uploads(Protocol):
    """The uploads of one save, on one rank. Raises the errors of its library.

    Attributes:
        ordered: As `Target.ordered`.
        writes_at_once: As `Target.writes_at_once`.
    """

    @property
    def ordered(self) -> bool: ...

    @property
    def writes_at_once(self) -> int: ...

    def align_bytes(self, largest_bytes: int) -> int | None:
        """Returns the alignment as `Target.align_bytes`; a write is at most that long."""

    def begin(self, keys: Keys, sizes: Mapping[str, int]) -> dict[str, str]:
        """Begins all uploads, on the coordinator; returns their ids by file. On errors, leaves none."""

    def join(self, keys: Keys, sizes: Mapping[str, int], uploads: Mapping[str, str]) -> None:
        """Joins uploads that the coordinator began."""

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Uploads a range of a file. Thread-safe."""

    def end(self, name: str) -> None:
        """Makes this rank's part of a file durable."""

    def receipt(self) -> dict[str, Any]:
        """Returns this rank's part of the receipts for `publish`, in JSON types."""

    def publish(self, name: str, receipts: Sequence[Mapping[str, Any]]) -> None:
        """Publishes a file under its name, once all ranks have uploaded it."""

    def give_up(self, name: str, uploads: Mapping[str, str]) -> None:
        """Aborts unfinished uploads to the checkpoint of that name."""

    def find_old(self, age_s: float) -> list[Upload]:
        """Returns uploads below the same parent that began this long before those of this save.

        Both times are the store's. Empty if it does not tell when those of this save began.
        """

    def remove_empty(self, folder: str) -> None:
        """Removes a directory directly below the parent, whose files have been deleted."""

    def close(self) -> None:
        """Releases connections."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The content of an owner file.

    Attributes:
        token: Token of the save; empty if unknown.
        owner: The saving process, or None.
        files: Files to remove if there is no record; only next to published files.
        uploads: Upload ids by file; only of pending files.
    """

    token: str
    owner: Owner | None
    files: Sequence[str]
    uploads: Mapping[str, str]

    @classmethod
    def parse(cls, text: bytes | None, token: str = "") -> Lease:
        """Parses an owner file, leniently, since it comes from storage.

        Args:
            text: Content of the file, if any.
            token: Token of the save, if the file does not have it.
        """
        try:
            fields = json.loads(text or b"{}")
        except (ValueError, RecursionError):
            fields = {}
        fields = fields if isinstance(fields, dict) else {}
        files, uploads = fields.get("files"), fields.get("uploads")
        return cls(
            token=token or str(fields.get("token", "")),
            owner=Owner.parse(str(fields.get("owner", "")).encode()),
            files=[str(file) for file in files] if isinstance(files, list) else [],
            uploads={file: str(uploads[file]) for file in uploads} if isinstance(uploads, dict) else {},
        )

    @property
    def has_ended(self) -> bool | None:
        """Whether the save has ended, with or without success; None if it is unknown on this host."""
        if self.owner is None:
            return None
        return (self.owner == Owner.here() and self.token not in living_saves) or self.owner.is_gone


class OwnerFile:
    """The owner file next to the files that a save publishes.

    Args:
        url: URL of the checkpoint, for messages.
        bucket: The storage of its parent.
        keys: Keys of the save.
        names: Names of files of a checkpoint.
        overwrite: Whether to replace a checkpoint.

    Attributes:
        keys: As given.
        decides: Whether the store refuses a conditional put where there is a file.
    """

    def __init__(
        self, url: str, bucket: WritableStorage, keys: Keys, names: Names, *, overwrite: bool
    ) -> None:
        self.keys = keys
        self.decides = False
        self._overwrite = overwrite
        self._names = names
        self._url = url
        self._bucket = bucket
        self._key = keys.published(names.owner)
        self._seen: tuple[set[str], bool] = set(), False  # the last result of `check_free`
        self._files: list[str] = []  # the files that it lists; empty before it is written
        self._put_at = 0.0
        self._cleared = False
        self._lock = threading.Lock()

    def check_free(self, written: Iterable[str]) -> tuple[set[str], bool]:
        """Checks that a new checkpoint can be published here.

        Args:
            written: Names of files of the new checkpoint.

        Returns:
            The names of files to remove, and whether there is no owner file.

        Raises:
            CheckpointExists: The URL exists, or another save publishes there.
            OptionError: The URL holds something other than a checkpoint, or files that would be lost or mixed
                up with the new one.
        """
        there = self._list()
        is_owned = self._names.owner in there
        lease = self._read() if is_owned else Lease.parse(None)
        if is_owned and not lease.has_ended:
            age_s = time.time() - self._bucket.modified_s(self._key)
            if age_s < _PUBLISHING_S:
                raise CheckpointExists(f"{self._url}: {lease.owner or 'another save'} is publishing there")
        self._seen = self._own(there, written, lease.files), not is_owned
        return self._seen

    def acquire(self, names: Sequence[str]) -> None:
        """Writes the owner file, which keeps other saves out, and removes old files.

        Between two saves at once the store decides, if it supports conditional puts. Otherwise, or if the
        owner file of a dead save is replaced, the last put wins, and both saves read the file again after a
        while.

        Args:
            names: Names of all files of the new checkpoint.

        Raises:
            CheckpointExists: As for `check_free`, or another save was faster.
            OptionError: As for `check_free`.
        """
        was_free = self.decides and self._seen[1]
        if not was_free:
            self.check_free(names)
        lease, there, decided = self._acquire_once(names)
        if was_free and lease.token != self.keys.token:  # of a save that began later, and may have died
            self.check_free(names)
            lease, there, decided = self._acquire_once(names)
        if lease.token != self.keys.token:
            raise CheckpointExists(f"{self._url}: another save is being published there")
        if decided:  # of the files there, none is of a save that this one has overtaken
            to_replace = self._own(there - {self._names.owner}, names, ())
        else:
            to_replace = self._own(there, names, self._files)
        if not to_replace <= {*self._files, self._names.owner}:  # of another save, which was faster
            self._files = sorted({*self._files, *to_replace} - {self._names.owner})
            self._put()
        self._cleared = True
        self._clear(to_replace - {self._names.owner})

    def _acquire_once(self, names: Sequence[str]) -> tuple[Lease, set[str], bool]:
        """Writes the owner file after `check_free`.

        Returns:
            What the owner file says then, the names of the files there, and whether the store has decided.
        """
        to_replace, is_fresh = self._seen
        self._files = sorted({*names, *to_replace} - {self._names.owner})
        self._put(fresh=is_fresh)
        decided = self.decides and is_fresh
        if not decided:
            time.sleep(_SETTLE_S)
        # Read it: the response to a put may be lost, and its retry refused.
        lease, there = at_once(self._read, self._list)
        return lease, there, decided

    def acquire_all(self) -> None:
        """Writes the owner file unconditionally, and removes all files: the checkpoint is being deleted."""
        self._files = sorted(self._list() - {self._names.owner})
        self._put()
        self._clear(self._files)

    def refresh(self) -> None:
        """Writes it again from time to time, so that the save does not count as dead. Thread-safe."""
        with self._lock:
            if time.monotonic() > self._put_at + _REFRESH_S:
                self.require()
                self._put()

    def require(self) -> None:
        """Raises `StorageError` if another save took this one for dead, and replaced the owner file."""
        if not self._is_ours:
            raise StorageError("another save assumed that this one was dead, and replaced it")

    def commit(self, record: str, content: bytes) -> None:
        """Writes the commit record, which makes the checkpoint exist, after `require`."""
        self._bucket.put(self.keys.published(record), content)
        self._files = []

    def take_back(self) -> None:
        """Deletes the published files, unless they are older or of another save."""
        files, self._files = self._files, []
        if files and self._is_ours:
            if self._cleared:
                self._clear(files)
            self.delete()

    def delete(self) -> None:
        """Deletes the owner file."""
        self._bucket.delete([self._key])

    def _own(self, there: set[str], written: Iterable[str], listed: Iterable[str]) -> set[str]:
        """Returns the names of the objects that the new checkpoint replaces.

        Args:
            there: Names of all objects there.
            written: Names of files of the new checkpoint.
            listed: The files that the owner file of a dead save lists.

        Raises:
            CheckpointExists: As for `check_free`.
            OptionError: As for `check_free`.
        """
        names, to_replace = self._names, there & {self._names.owner, *listed}
        if names.record in there:
            if not self._overwrite:
                raise CheckpointExists(f"{self._url} exists: pass {names.to_replace} to replace it")
            record = self._bucket.get(self.keys.published(names.record))
            to_replace |= names.own(there, [record or b""])
        else:
            is_other = self._overwrite and not there.isdisjoint(names.others)
            if is_other:
                to_replace |= names.own(there, [])
            foreign = sorted(there - to_replace)
            if foreign and not self._overwrite:
                raise CheckpointExists(f"{self._url} is not empty: {foreign[:5]}")
            if foreign and names.owner not in there and not is_other:
                raise OptionError(
                    f"{self._url} has no {names.record}: overwrite=True replaces only checkpoints of fastload"
                )
        kept_names(self._url, there, to_replace, written, names)
        return to_replace

    def _clear(self, names: Iterable[str]) -> None:
        """Deletes published files, the record first."""
        record, others = self._names.record, sorted(names)
        if record in others:
            others.remove(record)
            self._bucket.delete([self.keys.published(record)])
        in_threads(lambda name: self._bucket.delete([self.keys.published(name)]), others)

    def _put(self, *, fresh: bool = False) -> bool:
        owner = Owner.here().to_bytes().decode()
        content = {"token": self.keys.token, "owner": owner, "files": self._files}
        self._put_at = time.monotonic()
        return self._bucket.put(self._key, json.dumps(content).encode(), fresh=fresh)

    def _read(self) -> Lease:
        return Lease.parse(self._bucket.get(self._key))

    def _list(self) -> set[str]:
        """Returns the names of the files at the URL."""
        return {*self._bucket.files(self.keys.name)}

    @property
    def _is_ours(self) -> bool:
        """Whether the owner file is that of this save."""
        return self._read().token == self.keys.token


class ObjectTarget:
    """Write access to a checkpoint on an object store.

    Args:
        url: URL of the checkpoint.
        bucket: The storage of its parent.
        name: Name of the checkpoint: the last part of the URL.
        names: Names of files of a checkpoint.
        uploads: The uploads of large files.
    """

    def __init__(self, url: str, bucket: WritableStorage, name: str, names: Names, uploads: Uploads) -> None:
        self.url = url
        self._bucket = bucket
        self._name = name
        self._names = names
        self._uploads = uploads
        self._written = Written()
        self._sizes: dict[str, int] = {}
        self._begun: dict[str, str] = {}  # the uploads that this rank began
        self._owner: OwnerFile | None = None  # of the save that this rank prepared, until it ends
        self._second_put: Future[bool] | None = None  # of the owner file of what is pending

    @property
    def ordered(self) -> bool:
        return self._uploads.ordered

    @property
    def writes_at_once(self) -> int:
        return self._uploads.writes_at_once

    def align_bytes(self, largest_bytes: int) -> int | None:
        return self._uploads.align_bytes(largest_bytes)

    def prepare(self, files: Sequence[tuple[str, int]], *, overwrite: bool) -> dict[str, Any]:
        self._sizes = dict(files)
        keys = Keys(self._name, new_token())
        owner = OwnerFile(self.url, self._bucket, keys, self._names, overwrite=overwrite)
        with self._errors(""):
            folders = self._begin(owner)
            self._owner = owner
            living_saves.add(keys.token)
            try:
                look = partial(self._uploads.find_old, _ABANDONED_S)
                _, old = at_once(self._put_owner, partial(self._warned, look))
                # Of two puts, a store that supports conditions refuses the second. Not at once: some stores
                # answer 500 to one of two writers of one object. Nobody needs to know before `publish`.
                background = Workers(1, "fastload-owner")
                self._second_put = background.submit(self._put_owner)
                background.close(wait_s=0.0)
                if folders:
                    self._warned(partial(self._remove_abandoned, folders))
                if old:
                    self._warned(partial(self._end_old_uploads, old, folders))
            except BaseException:
                self.abort()
                raise
        return {"token": keys.token, "files": self._sizes, "uploads": self._begun}

    def _begin(self, owner: OwnerFile) -> list[str]:
        """Checks that the place is free, begins uploads, and returns the names of pending directories.

        Nobody sees an upload before it is completed, so none of the first requests waits for another.
        """

        def begin() -> None:
            self._begun = self._uploads.begin(owner.keys, self._sizes)

        try:
            folders: list[str]
            _, folders, _ = at_once(
                partial(owner.check_free, self._sizes),
                partial(self._warned, self._pending_folders),
                begin,
            )
        except BaseException:
            with suppress(Exception):  # the first error says more
                self._uploads.give_up(self._name, self._begun)
            raise
        return folders

    def _warned(self, clean: Callable[[], list[T]]) -> list[T]:
        """Returns the result of a part of the cleaning; on errors none, with a warning."""
        try:
            with self._errors(""):
                return clean()
        except StorageError as error:  # missing permissions for that do not prevent a save
            _log.warning("cannot remove the remains of dead saves: %s", error)
            return []

    def _put_owner(self) -> bool:
        """Writes the owner file of pending files: this process, and the uploads to abort if it dies.

        Returns:
            Whether it was written; see `WritableStorage.put`.
        """
        assert self._owner is not None
        owner = {"owner": Owner.here().to_bytes().decode(), "uploads": self._begun}
        return self._bucket.put(self._owner.keys.owner, json.dumps(owner).encode(), fresh=True)

    def join(self, ticket: Mapping[str, Any]) -> None:
        self._sizes = ticket["files"]
        keys = Keys(self._name, ticket["token"])
        self._uploads.join(keys, self._sizes, ticket["uploads"])
        with self._errors(""):
            if self._bucket.get(keys.owner) is None:
                raise StorageError("there is no save for this rank to join", self.url)

    def write(self, name: str, offset: int, data: memoryview) -> None:
        assert offset + len(data) <= self._sizes[name], (name, offset, len(data))
        for begin, part in self._parts(offset, data):
            with self._written.noted(), self._errors(name, begin, len(part)):
                self._uploads.write(name, begin, part)
            self._written.add(name, begin, begin + len(part))

    def _parts(self, offset: int, data: memoryview) -> list[tuple[int, memoryview]]:
        """Cuts a write at the alignment; returns each part with its offset."""
        align_bytes = self.align_bytes(max(self._sizes.values()))
        if align_bytes is None:
            return [(offset, data)]
        begins = range(0, len(data), align_bytes)
        return [(offset + begin, data[begin : begin + align_bytes]) for begin in begins]

    def flush(self) -> dict[str, Any]:
        self._written.check()
        for name in self._sizes:
            with self._written.noted(), self._errors(name):
                self._uploads.end(name)
        return {"written": self._written.to_json(), **self._uploads.receipt()}

    def publish(
        self, receipts: Sequence[Mapping[str, Any]], small_files: Sequence[tuple[str, bytes]]
    ) -> None:
        self._written.require_all(self._sizes, receipts, self.url)
        owner = self._owner
        assert owner is not None
        *others, (record, content) = small_files
        with self._errors(""):
            names = [*self._sizes, *(name for name, _ in small_files)]
            assert self._second_put is not None
            owner.decides = not self._second_put.result()
            owner.acquire(names)

        def publish_file(name: str) -> None:
            with self._errors(name):
                self._uploads.publish(name, receipts)
                owner.refresh()

        def put(name: str, small: bytes) -> None:
            with self._errors(name, 0, len(small)):
                self._bucket.put(owner.keys.published(name), small)

        at_once(
            *(partial(publish_file, name) for name in sorted(self._sizes)),
            *(partial(put, *named) for named in others),
        )
        with self._errors(""):
            at_once(self._require_files, owner.require)
        with self._errors(record, 0, len(content)):
            owner.commit(record, content)
        with self._tolerated("what the save needed"):  # the checkpoint exists; the rest is orphans
            at_once(owner.delete, partial(self._bucket.delete, [owner.keys.owner]))
            self._uploads.remove_empty(owner.keys.folder)
        self._owner = None
        living_saves.discard(owner.keys.token)

    def _require_files(self) -> None:
        there = self._bucket.files(self._name)
        for name, nbytes in self._sizes.items():
            if (stored := there.get(name)) != nbytes:
                message = f"the store made {stored} bytes of the {nbytes} uploaded"
                raise StorageError(message, f"{self.url}/{name}")

    def abort(self) -> None:
        self._written.fail(StorageError("the save was aborted", self.url))
        owner, self._owner = self._owner, None
        if owner is None:
            return
        try:
            with self._tolerated("what is pending"):
                if self._second_put is not None:
                    self._second_put.exception()  # else it could come after the deletion
                owner.take_back()
                self._discard(owner.keys, self._begun)
        finally:
            living_saves.discard(owner.keys.token)

    def clean_abandoned(self) -> list[str]:
        with self._errors(""):
            return self._remove_abandoned(self._pending_folders())

    def _end_old_uploads(self, old: Iterable[Upload], folders: Iterable[str]) -> list[Upload]:
        """Aborts the old uploads that no owner file names, and returns them: their saves died before that.

        Args:
            old: Old uploads.
            folders: Pending directories; what dead saves have left there is removed.
        """
        leases = [Lease.parse(self._bucket.get(keys.owner)) for keys in _keys_of(folders)]
        owned = {upload for lease in leases for upload in lease.uploads.values()}
        dead = [upload for upload in old if upload.id not in owned]
        for upload in dead:
            self._uploads.give_up(upload.checkpoint, {upload.file: upload.id})
        return dead

    def _pending_folders(self) -> list[str]:
        return [*self._bucket.folders(".")]  # as names of pending directories begin

    def _remove_abandoned(self, folders: Iterable[str]) -> list[str]:
        """Removes what dead saves have left in pending directories; returns their URLs."""
        parent = self.url.rpartition("/")[0]
        removed, failures = [], []
        for keys in _keys_of(folders):
            try:
                lease = Lease.parse(self._bucket.get(keys.owner), keys.token)
                if self._is_abandoned(keys, lease):
                    self._clear_published(keys)
                    self._discard(keys, lease.uploads)
                    removed.append(f"{parent}/{keys.folder}")
            except Exception as error:  # the others are removed all the same
                failures.append(error)
        if failures:
            raise failures[0]
        return removed

    def _is_abandoned(self, keys: Keys, lease: Lease) -> bool:
        ended = lease.has_ended
        return time.time() - self._written_s(keys) > _ABANDONED_S if ended is None else ended

    def _written_s(self, keys: Keys) -> float:
        """Returns the time of the owner file; without one, after an abort, that of the last pending file."""
        written_s = self._bucket.modified_s(keys.owner)
        if written_s < math.inf:
            return written_s
        pending = [keys.pending(name) for name in self._bucket.files(keys.folder)]
        return max(map(self._bucket.modified_s, pending), default=math.inf)

    def _clear_published(self, keys: Keys) -> None:
        """Deletes the published files of a dead save, unless they are complete."""
        owner = keys.published(self._names.owner)
        lease = Lease.parse(self._bucket.get(owner))
        if lease.token != keys.token:
            return
        there = self._bucket.files(keys.name)
        if self._names.record not in there:
            self._bucket.delete([keys.published(file) for file in sorted(there) if file in lease.files])
        self._bucket.delete([owner])

    def _discard(self, keys: Keys, uploads: Mapping[str, str]) -> None:
        """Removes the pending files of a save; the owner file goes last, so that failures leave an orphan."""
        self._uploads.give_up(keys.name, uploads)
        files = [keys.pending(name) for name in self._bucket.files(keys.folder)]
        self._bucket.delete([*(file for file in files if file != keys.owner), keys.owner])
        self._bucket.delete_folder(keys.folder)

    def remove(self) -> None:
        keys = Keys(self._name, new_token())
        living_saves.add(keys.token)
        try:
            with self._errors(""):
                OwnerFile(self.url, self._bucket, keys, self._names, overwrite=True).acquire_all()
                self._bucket.delete_folder(self._name)
        finally:
            living_saves.discard(keys.token)

    def close(self) -> None:
        self._uploads.close()
        self._bucket.close()

    @contextmanager
    def _errors(self, name: str, offset: int | None = None, nbytes: int | None = None) -> Iterator[None]:
        """Turns errors of libraries into `StorageError` with URL and range."""
        url = f"{self.url}/{name}" if name else self.url
        try:
            with self._bucket.secrets.errors(url, offset, nbytes):
                yield
        except DeadlineExceeded as error:
            raise StorageError(str(error), url, offset, nbytes) from error
        except StorageError as error:
            if not error.url:
                error.url, error.offset, error.nbytes = url, offset, nbytes
            raise

    @contextmanager
    def _tolerated(self, what: str) -> Iterator[None]:
        """Logs errors of deletions as warnings."""
        try:
            yield
        except Exception as error:
            _log.warning("%s: cannot remove %s: %s", self.url, what, self._bucket.secrets.first_line(error))


def _keys_of(folders: Iterable[str]) -> list[Keys]:
    """Returns the keys of the saves that have these pending directories."""
    names = [(saved_name(folder), folder.split(".")) for folder in folders]
    return [Keys(name, parts[-2]) for name, parts in names if name is not None]


class Streams:
    """Sequential uploads: one rank writes each file as a pending object, which the store renames.

    Args:
        bucket: The storage of the parent of the checkpoint.
        timeout_s: Longest time in seconds that a write waits for those before it.
    """

    ordered = True
    writes_at_once = DEFAULT_WRITES

    def __init__(self, bucket: WritableStorage, *, timeout_s: float) -> None:
        self._bucket = bucket
        self._timeout_s = timeout_s
        self._keys = Keys("", "")
        self._streams: dict[str, _Stream] = {}
        self._lock = threading.Lock()

    def align_bytes(self, largest_bytes: int) -> int | None:
        return None

    def begin(self, keys: Keys, sizes: Mapping[str, int]) -> dict[str, str]:
        self._keys = keys
        return {}

    def join(self, keys: Keys, sizes: Mapping[str, int], uploads: Mapping[str, str]) -> None:
        self._keys = keys

    def write(self, name: str, offset: int, data: memoryview) -> None:
        with self._lock:
            if name not in self._streams:
                self._streams[name] = _Stream(self._bucket.writer(self._keys.pending(name)))
            stream = self._streams[name]
        stream.write(offset, data, self._timeout_s)

    def end(self, name: str) -> None:
        if name in self._streams:
            self._streams[name].close()

    def receipt(self) -> dict[str, Any]:
        return {}

    def publish(self, name: str, receipts: Sequence[Mapping[str, Any]]) -> None:
        self._bucket.move(self._keys.pending(name), self._keys.published(name))

    def give_up(self, name: str, uploads: Mapping[str, str]) -> None:
        pass  # objects that are not closed do not exist; the others are pending

    def find_old(self, age_s: float) -> list[Upload]:
        return []

    def remove_empty(self, folder: str) -> None:
        self._bucket.delete_folder(folder)

    def close(self) -> None:
        self._streams.clear()


class _Stream:
    """Orders the writes of one object, which come from several threads."""

    def __init__(self, writer: ObjectWriter) -> None:
        self._writer = writer
        self._position = 0
        self._is_broken = False
        self._turn = threading.Condition()

    def write(self, offset: int, data: memoryview, timeout_s: float) -> None:
        """Writes the bytes at an offset, once all bytes before it are written."""
        with self._turn:
            if not self._turn.wait_for(lambda: self._is_broken or self._position >= offset, timeout_s):
                raise StorageError(f"the bytes before it did not arrive within {timeout_s:.0f} s")
            if self._is_broken:
                raise StorageError("an earlier write failed")
            assert self._position == offset, (self._position, offset)
            self._is_broken = True
            try:
                self._writer.write(data)
                self._position += len(data)
                self._is_broken = False
            finally:
                self._turn.notify_all()

    def close(self) -> None:
        """Completes the object."""
        self._writer.close()
