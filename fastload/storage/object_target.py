"""Checkpoints written to object stores: hidden uploads, published one by one, the commit record last."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastload.base.threads import each
from fastload.errors import DeadlineExceeded, StorageError
from fastload.storage.base import NUM_REQUESTS, Bucket, Keys, Names, ObjectWriter, Uploads, Written, new_token
from fastload.storage.object_owner import OwnerFile, clean_abandoned, discard, put_owner
from fastload.storage.process import living_saves

_log = logging.getLogger(__name__)


class ObjectTarget:
    """Write access to a checkpoint on an object store.

    Args:
        url: URL of the checkpoint.
        bucket: The objects below its parent.
        name: Name of the checkpoint: the last part of the URL.
        names: Names of files of a checkpoint.
        uploads: The uploads of large files.
    """

    shared = True

    def __init__(self, url: str, bucket: Bucket, name: str, names: Names, uploads: Uploads) -> None:
        self.url = url
        self._bucket = bucket
        self._name = name
        self._names = names
        self._uploads = uploads
        self._written = Written()
        self._sizes: dict[str, int] = {}
        self._owner: OwnerFile | None = None  # of the save that this rank prepared, until it ends

    @property
    def ordered(self) -> bool:
        return self._uploads.ordered

    def align_bytes(self, largest_bytes: int) -> int | None:
        return self._uploads.align_bytes(largest_bytes)

    def prepare(self, files: Sequence[tuple[str, int]], *, overwrite: bool) -> dict[str, Any]:
        self._sizes = dict(files)
        keys = Keys(self._name, new_token())
        owner = OwnerFile(self.url, self._bucket, keys, self._names)
        with self._errors(""):
            owner.check_free(self._sizes, overwrite=overwrite)
            self._clean()
            self._owner = owner
            living_saves.add(keys.token)
            try:
                put_owner(self._bucket, keys, {})
                uploads = self._uploads.begin(keys, self._sizes)
                if uploads:
                    put_owner(self._bucket, keys, uploads)
            except BaseException:
                self.abort()
                raise
        return {"token": keys.token, "files": self._sizes, "uploads": uploads}

    def _clean(self) -> None:
        try:
            self.clean_abandoned()
        except StorageError as error:  # missing permissions for that do not prevent a save
            _log.warning("cannot remove what dead saves left behind: %s", error)

    def join(self, ticket: Mapping[str, Any]) -> None:
        self._sizes = ticket["files"]
        keys = Keys(self._name, ticket["token"])
        self._uploads.join(keys, self._sizes, ticket["uploads"])
        with self._errors(""):
            if self._bucket.get(keys.owner) is None:
                raise StorageError("the save that this rank is to join is not there", self.url)

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
        self,
        receipts: Sequence[Mapping[str, Any]],
        small_files: Sequence[tuple[str, bytes]],
        *,
        overwrite: bool,
    ) -> None:
        self._written.require_all(self._sizes, receipts, self.url)
        owner = self._owner
        assert owner is not None
        *others, (record, content) = small_files
        with self._errors(""):
            names = [*self._sizes, *(name for name, _ in small_files)]
            owner.acquire(names, overwrite=overwrite)

        def publish_file(name: str) -> None:
            with self._errors(name):
                self._uploads.publish(name, receipts)
                owner.refresh()

        each(self._sizes, publish_file, num_threads=NUM_REQUESTS)
        self._require_files()
        for name, small in others:
            with self._errors(name, 0, len(small)):
                self._bucket.put(owner.keys.published(name), small)
        with self._errors(record, 0, len(content)):
            owner.commit(record, content)
        with self._tolerated("what the save needed"):  # the checkpoint exists; the rest is orphans
            owner.delete()
            discard(self._bucket, self._uploads, owner.keys)
        self._owner = None
        living_saves.discard(owner.keys.token)

    def _require_files(self) -> None:
        with self._errors(""):
            there = self._bucket.files(self._name)
        for name, nbytes in self._sizes.items():
            if (found := there.get(name)) != nbytes:
                message = f"the store made {found} bytes of the {nbytes} uploaded"
                raise StorageError(message, f"{self.url}/{name}")

    def abort(self) -> None:
        self._written.fail(StorageError("the save was given up", self.url))
        owner, self._owner = self._owner, None
        if owner is None:
            return
        try:
            with self._tolerated("what is pending"):
                owner.take_back()
                discard(self._bucket, self._uploads, owner.keys)
        finally:
            living_saves.discard(owner.keys.token)

    def clean_abandoned(self) -> list[str]:
        parent = self.url.rpartition("/")[0]
        with self._errors(""):
            return clean_abandoned(self._bucket, self._uploads, self._names, parent)

    def remove(self) -> None:
        keys = Keys(self._name, new_token())
        living_saves.add(keys.token)
        try:
            with self._errors(""):
                OwnerFile(self.url, self._bucket, keys, self._names).acquire_all()
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


class Streams:
    """Sequential uploads: one rank writes each file as a pending object, which the store renames.

    Args:
        bucket: The objects below the parent of the checkpoint.
        timeout_s: Longest time in seconds that a write waits for those before it.
    """

    ordered = True

    def __init__(self, bucket: Bucket, *, timeout_s: float) -> None:
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

    def give_up_old(self, age_s: float) -> list[str]:
        return []

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
                raise StorageError(f"the bytes before it did not come within {timeout_s:.0f} s")
            if self._is_broken:
                raise StorageError("a write before it failed")
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
