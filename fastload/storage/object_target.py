"""A new checkpoint on an object store: what is large is uploaded out of sight, the record comes last.

While a save lives, the parent of the checkpoint holds ``.<name>.<token>.saving/owner.json``, which says
which process saves and what it has begun. To publish takes several steps here, so a marker
(`Names.marker`) stands beside the files from before the first of them until after the commit record. It
keeps other saves out, and names all files that may be there without a record if the save dies.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastload.base.threads import each
from fastload.errors import CheckpointExists, DeadlineExceeded, FastloadError, StorageError
from fastload.storage.beside import replaced_names
from fastload.storage.bucket import Bucket, Stream
from fastload.storage.names import Names
from fastload.storage.owner import Owner
from fastload.storage.target import Written, check_written, new_token, pending_name, saved_name

__all__ = ["NUM_REQUESTS", "ObjectTarget"]

_log = logging.getLogger(__name__)

NUM_REQUESTS = 8
_REFRESH_S = 60.0
_PUBLISHING_S = 600.0  # a marker that is this old was left behind: a living save refreshes its own
_ABANDONED_S = 24 * 3600.0  # a save of another machine that is this old is dead
_SETTLE_S = 0.5  # longer than one request takes; see `_acquire`
_alive: set[str] = set()  # tokens of this process's own saves, until they end


class ObjectTarget:
    """Write access to an object store; each file has one writer, which uploads it below the pending prefix.

    To publish moves the files to their names, which is the store's business: no byte comes here.

    Args:
        url: Where the checkpoint will be.
        bucket: The store, at the parent of that place.
        name: Last part of the URL.
        names: What files of a checkpoint are called.
        timeout_s: Longest time in seconds that a write waits for those before it.
    """

    shared = True
    ordered = True

    def __init__(self, url: str, bucket: Bucket, name: str, names: Names, *, timeout_s: float) -> None:
        self._url = url
        self._bucket = bucket
        self._name = name
        self._names = names
        self._timeout_s = timeout_s
        self._written = Written()
        self._sizes: dict[str, int] = {}
        self._token = ""
        self._pending = ""
        self._prepared = False
        self._marked: list[str] = []
        self._marked_at = 0.0
        self._cleared = False
        self._streams: dict[str, Stream] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._url

    def align_bytes(self, largest_bytes: int) -> int | None:
        return None

    def prepare(self, files: Sequence[tuple[str, int]], *, overwrite: bool) -> dict[str, Any]:
        self._sizes = dict(files)
        with self._errors(""):
            self._check_free(self._sizes, overwrite=overwrite)
            self._clean()
            self._set_token(new_token())
            self._prepared = True
            _alive.add(self._token)
            try:
                self._put_owner({})
                uploads = self._begin()
                if uploads:
                    self._put_owner(uploads)
            except BaseException:
                self.abort()
                raise
        return {"token": self._token, "files": self._sizes, "uploads": uploads}

    def _clean(self) -> None:
        try:
            self.clean_abandoned()
        except StorageError as error:  # a lack of rights to do that is no reason not to save
            _log.warning("cannot remove what dead saves left behind: %s", error)

    def join(self, ticket: Mapping[str, Any]) -> None:
        self._set_token(ticket["token"])
        self._sizes = ticket["files"]
        with self._errors(""):
            if self._bucket.get(self._owner_key) is None:
                raise StorageError("the save that this rank is to join is not there", self._url)

    def write(self, name: str, offset: int, data: memoryview) -> None:
        assert offset + len(data) <= self._sizes[name], (name, offset, len(data))
        with self._noted(), self._errors(name, offset, len(data)):
            with self._lock:
                if name not in self._streams:
                    writer = self._bucket.writer(self._pending_key(name))
                    self._streams[name] = Stream(writer, self._timeout_s)
                stream = self._streams[name]
            stream.write(offset, data)
        self._written.add(name, offset, offset + len(data))

    def flush(self) -> dict[str, Any]:
        self._written.check()
        for name, stream in self._streams.items():
            with self._noted(), self._errors(name):
                stream.close()
        return {"written": self._written.to_json()}

    def publish(
        self,
        receipts: Sequence[Mapping[str, Any]],
        small_files: Sequence[tuple[str, bytes]],
        *,
        overwrite: bool,
    ) -> None:
        self._written.check()
        check_written(self._sizes, receipts, self._url)
        *others, (record, content) = small_files
        with self._errors(""):
            names = [*self._sizes, *(name for name, _ in small_files)]
            self._acquire(names, overwrite=overwrite)
        each(self._sizes, lambda name: self._publish_file(name, receipts), num_threads=NUM_REQUESTS)
        self._require_files()
        for name, small in others:
            with self._errors(name, 0, len(small)):
                self._bucket.put(self._key(name), small)
        with self._errors(record, 0, len(content)):
            self._require_marker()
            self._bucket.put(self._key(record), content)
            self._marked = []
        try:
            self._bucket.delete([self._key(self._names.marker)])
            self._discard(self._pending)
        except Exception as error:  # the checkpoint is there; what is left beside it harms nobody
            told = self._bucket.secrets.first_line(error)
            _log.warning("%s: cannot remove what the save needed: %s", self._url, told)
        self._prepared = False
        _alive.discard(self._token)

    def _publish_file(self, name: str, receipts: Sequence[Mapping[str, Any]]) -> None:
        with self._errors(name):
            self._finish(name, receipts)
            with self._lock:
                if time.monotonic() > self._marked_at + _REFRESH_S:
                    self._require_marker()
                    self._put_marker()

    def _require_files(self) -> None:
        with self._errors(""):
            there = self._bucket.files(self._name)
        for name, nbytes in self._sizes.items():
            if (found := there.get(name)) != nbytes:
                message = f"the store made {found} bytes of the {nbytes} uploaded"
                raise StorageError(message, f"{self._url}/{name}")

    def _delete_folder(self, folder: str) -> None:
        """Deletes what is left of a folder whose files have been deleted."""
        self._bucket.delete_folder(folder)

    # What S3 does in another way: it joins the parts that all ranks uploaded.

    def _begin(self) -> dict[str, str]:
        """Begins the uploads; returns what names them."""
        return {}

    def _finish(self, name: str, receipts: Sequence[Mapping[str, Any]]) -> None:
        """Makes a file appear under its name."""
        self._bucket.move(self._pending_key(name), self._key(name))

    def _give_up(self, prefix: str, uploads: Mapping[str, str]) -> None:
        """Ends uploads that will not be finished."""

    def _give_up_old(self, age_s: float) -> list[str]:
        """Ends uploads beside the checkpoint that are that old and that no owner names."""
        return []

    # The marker, and what stands beside it.

    def _acquire(self, names: Sequence[str], *, overwrite: bool) -> None:
        """Puts the marker, keeps out all other saves by it, and clears the place.

        The store decides between two saves that do so at once, if it honours a condition on a put: of
        which it is asked by a second such put, which has to fail. If it does not, or if the marker of a
        dead save is replaced, the last one to put it wins, and each looks who that was after a while.
        """
        own, is_fresh = self._check_free(names, overwrite=overwrite)
        self._marked = sorted({*names, *own} - {self._names.marker})
        decided = not self._put_marker(fresh=is_fresh) or (is_fresh and not self._put_marker(fresh=True))
        if not decided:
            time.sleep(_SETTLE_S)
        if not self._is_ours:  # which no answer says: one may be lost, and the next attempt is refused then
            raise CheckpointExists(f"{self._url}: another save is being published there")
        own = self._own({*self._bucket.files(self._name)}, names, self._marked, overwrite=overwrite)
        if not own <= {*self._marked, self._names.marker}:  # of another save, which was faster
            self._marked = sorted({*self._marked, *own} - {self._names.marker})
            self._put_marker()
        self._cleared = True
        self._clear(own - {self._names.marker})

    def _clear(self, names: Iterable[str]) -> None:
        """Deletes files of the checkpoint, the record first."""
        ordered = sorted(names, key=lambda name: (name != self._names.record, name))
        self._bucket.delete([self._key(name) for name in ordered])

    def _put_marker(self, *, fresh: bool = False) -> bool:
        marker = {"token": self._token, "owner": Owner.here().to_bytes().decode(), "files": self._marked}
        self._marked_at = time.monotonic()
        return self._bucket.put(self._key(self._names.marker), json.dumps(marker).encode(), fresh=fresh)

    @property
    def _is_ours(self) -> bool:
        """Whether the marker that stands beside the files is that of this save."""
        return bool(self._marker().get("token") == self._token)

    def _require_marker(self) -> None:
        """Goes no further once another save has put its own marker there."""
        if not self._is_ours:
            raise StorageError("another save took this one for dead and took its place")

    def _marker(self) -> dict[str, Any]:
        """Returns the marker that stands beside the files, or nothing."""
        return _parse(self._bucket.get(self._key(self._names.marker)))

    def _check_free(self, written: Iterable[str], *, overwrite: bool) -> tuple[set[str], bool]:
        """Refuses to take the place of what is there, unless it may be replaced or a dead save left it.

        Returns:
            The names of what is to go, and whether there is no marker.
        """
        there = {*self._bucket.files(self._name)}
        is_marked = self._names.marker in there
        marker = self._marker() if is_marked else {}
        owner = Owner.parse(str(marker.get("owner", "")).encode())
        if is_marked and not _has_ended(owner, str(marker.get("token"))):
            age_s = time.time() - self._bucket.modified_s(self._key(self._names.marker))
            if age_s < _PUBLISHING_S:
                raise CheckpointExists(f"{self._url}: {owner or 'another save'} is publishing there")
        marked = map(str, marker.get("files", ()))
        return self._own(there, written, marked, overwrite=overwrite), not is_marked

    def _own(
        self, there: set[str], written: Iterable[str], marked: Iterable[str], *, overwrite: bool
    ) -> set[str]:
        is_replaced = overwrite and self._names.record in there
        record = self._bucket.get(self._key(self._names.record)) if is_replaced else None
        return replaced_names(self._url, there, record, marked, written, self._names, overwrite=overwrite)

    def abort(self) -> None:
        self._written.fail(StorageError("the save was given up", self._url))
        prepared, self._prepared = self._prepared, False
        marked, self._marked = self._marked, []
        if not prepared:
            return
        try:
            # Else what stands there is what was there before, or that of another save.
            if marked and self._is_ours:
                if self._cleared:
                    self._clear(marked)
                self._bucket.delete([self._key(self._names.marker)])
            self._discard(self._pending)
        except Exception as error:
            told = self._bucket.secrets.first_line(error)
            _log.warning("%s: cannot remove what is pending: %s", self._url, told)
        finally:
            _alive.discard(self._token)

    def clean_abandoned(self) -> list[str]:
        removed = []
        with self._errors(""):
            for folder in self._bucket.folders():
                if saved_name(folder) is not None and self._is_abandoned(folder):
                    self._clear_published(folder)
                    self._discard(folder)
                    removed.append(f"{self._url.rpartition('/')[0]}/{folder}")
            removed += self._give_up_old(_ABANDONED_S)
        return removed

    def _is_abandoned(self, folder: str) -> bool:
        key = f"{folder}/owner.json"
        owner = Owner.parse(str(_parse(self._bucket.get(key)).get("owner", "")).encode())
        ended = _has_ended(owner, folder.split(".")[-2])
        return time.time() - self._bucket.modified_s(key) > _ABANDONED_S if ended is None else ended

    def _clear_published(self, folder: str) -> None:
        """Deletes what a dead save had published when it died, unless that was all."""
        name = saved_name(folder) or ""
        marker = _parse(self._bucket.get(f"{name}/{self._names.marker}"))
        if folder != pending_name(name, str(marker.get("token"))):
            return
        there = self._bucket.files(name)
        if self._names.record not in there:
            self._bucket.delete(
                [f"{name}/{file}" for file in sorted(there) if file in marker.get("files", ())]
            )
        self._bucket.delete([f"{name}/{self._names.marker}"])

    def _discard(self, folder: str) -> None:
        """Removes a pending prefix; its owner goes last, so that what is left after a failure is found."""
        uploads = _parse(self._bucket.get(f"{folder}/owner.json")).get("uploads", {})
        if isinstance(uploads, dict):
            self._give_up(saved_name(folder) or "", uploads)
        names = [name for name in self._bucket.files(folder) if name != "owner.json"]
        self._bucket.delete([f"{folder}/{name}" for name in [*names, "owner.json"]])
        self._delete_folder(folder)

    def remove(self) -> None:
        self._set_token(new_token())
        _alive.add(self._token)
        try:
            with self._errors(""):
                self._marked = sorted(set(self._bucket.files(self._name)) - {self._names.marker})
                self._put_marker()
                self._clear(self._marked)
                self._delete_folder(self._name)
        finally:
            _alive.discard(self._token)

    def close(self) -> None:
        self._streams.clear()

    # Names and errors.

    def _set_token(self, token: str) -> None:
        self._token, self._pending = token, pending_name(self._name, token)

    @property
    def _owner_key(self) -> str:
        return f"{self._pending}/owner.json"

    def _put_owner(self, uploads: Mapping[str, str]) -> None:
        owner = {"owner": Owner.here().to_bytes().decode(), "uploads": dict(uploads)}
        self._bucket.put(self._owner_key, json.dumps(owner).encode())

    def _key(self, name: str) -> str:
        return f"{self._name}/{name}"

    def _pending_key(self, name: str) -> str:
        return f"{self._pending}/{name}"

    @contextmanager
    def _errors(self, name: str, offset: int | None = None, nbytes: int | None = None) -> Iterator[None]:
        url = f"{self._url}/{name}" if name else self._url
        try:
            yield
        except DeadlineExceeded as error:
            raise StorageError(str(error), url, offset, nbytes) from error
        except FastloadError as error:
            if isinstance(error, StorageError) and not error.url:
                error.url, error.offset, error.nbytes = url, offset, nbytes
            raise
        except Exception as error:
            secrets = self._bucket.secrets
            raise StorageError(secrets.first_line(error), url, offset, nbytes) from secrets.clean(error)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keeps an error for good: after it nobody knows what is on storage."""
        self._written.check()
        try:
            yield
        except StorageError as error:
            self._written.fail(error)
            raise


def _has_ended(owner: Owner | None, token: str) -> bool | None:
    """Whether a save has ended, in whichever way; None if that cannot be known from here."""
    if owner is None:
        return None
    return (owner == Owner.here() and token not in _alive) or owner.is_gone


def _parse(text: bytes | None) -> dict[str, Any]:
    """Reads a JSON object; whatever else is there counts as an empty one."""
    try:
        found = json.loads(text or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
