"""A new checkpoint on an object store: what is large is uploaded out of sight, the record comes last."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastload.base.threads import each
from fastload.errors import DeadlineExceeded, FastloadError, StorageError
from fastload.storage import object_leftovers
from fastload.storage.bucket import Bucket, Keys
from fastload.storage.marker import Marker, put_owner
from fastload.storage.names import Names
from fastload.storage.process import living_saves
from fastload.storage.target import Written, new_token
from fastload.storage.uploads import NUM_REQUESTS, Uploads

__all__ = ["ObjectTarget"]

_log = logging.getLogger(__name__)


class ObjectTarget:
    """Write access to an object store.

    Args:
        url: Where the checkpoint will be.
        bucket: The store, at the parent of that place.
        name: Last part of the URL.
        names: What files of a checkpoint are called.
        uploads: How the large files get there.
    """

    shared = True

    def __init__(self, url: str, bucket: Bucket, name: str, names: Names, uploads: Uploads) -> None:
        self._url = url
        self._bucket = bucket
        self._name = name
        self._names = names
        self._uploads = uploads
        self._written = Written()
        self._sizes: dict[str, int] = {}
        self._marker: Marker | None = None  # of the save that this rank has prepared, until it ends

    @property
    def url(self) -> str:
        return self._url

    @property
    def ordered(self) -> bool:
        return self._uploads.ordered

    def align_bytes(self, largest_bytes: int) -> int | None:
        return self._uploads.align_bytes(largest_bytes)

    def prepare(self, files: Sequence[tuple[str, int]], *, overwrite: bool) -> dict[str, Any]:
        self._sizes = dict(files)
        keys = Keys(self._name, new_token())
        marker = Marker(self._url, self._bucket, keys, self._names)
        with self._errors(""):
            marker.check_free(self._sizes, overwrite=overwrite)
            self._clean()
            self._marker = marker
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
        except StorageError as error:  # a lack of rights to do that is no reason not to save
            _log.warning("cannot remove what dead saves left behind: %s", error)

    def join(self, ticket: Mapping[str, Any]) -> None:
        self._sizes = ticket["files"]
        keys = Keys(self._name, ticket["token"])
        self._uploads.join(keys, self._sizes, ticket["uploads"])
        with self._errors(""):
            if self._bucket.get(keys.owner) is None:
                raise StorageError("the save that this rank is to join is not there", self._url)

    def write(self, name: str, offset: int, data: memoryview) -> None:
        assert offset + len(data) <= self._sizes[name], (name, offset, len(data))
        for begin, part in self._parts(offset, data):
            with self._written.noted(), self._errors(name, begin, len(part)):
                self._uploads.write(name, begin, part)
            self._written.add(name, begin, begin + len(part))

    def _parts(self, offset: int, data: memoryview) -> list[tuple[int, memoryview]]:
        """Cuts a write where a file may be cut, each piece with its offset."""
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
        self._written.require_all(self._sizes, receipts, self._url)
        marker = self._marker
        assert marker is not None
        *others, (record, content) = small_files
        with self._errors(""):
            names = [*self._sizes, *(name for name, _ in small_files)]
            marker.acquire(names, overwrite=overwrite)

        def publish_file(name: str) -> None:
            with self._errors(name):
                self._uploads.publish(name, receipts)
                marker.refresh()

        each(self._sizes, publish_file, num_threads=NUM_REQUESTS)
        self._require_files()
        for name, small in others:
            with self._errors(name, 0, len(small)):
                self._bucket.put(marker.keys.published(name), small)
        with self._errors(record, 0, len(content)):
            marker.commit(record, content)
        with self._tolerated("what the save needed"):  # the checkpoint is there; the rest harms nobody
            marker.delete()
            object_leftovers.discard(self._bucket, self._uploads, marker.keys)
        self._marker = None
        living_saves.discard(marker.keys.token)

    def _require_files(self) -> None:
        with self._errors(""):
            there = self._bucket.files(self._name)
        for name, nbytes in self._sizes.items():
            if (found := there.get(name)) != nbytes:
                message = f"the store made {found} bytes of the {nbytes} uploaded"
                raise StorageError(message, f"{self._url}/{name}")

    def abort(self) -> None:
        self._written.fail(StorageError("the save was given up", self._url))
        marker, self._marker = self._marker, None
        if marker is None:
            return
        try:
            with self._tolerated("what is pending"):
                marker.take_back()
                object_leftovers.discard(self._bucket, self._uploads, marker.keys)
        finally:
            living_saves.discard(marker.keys.token)

    def clean_abandoned(self) -> list[str]:
        parent = self._url.rpartition("/")[0]
        with self._errors(""):
            return object_leftovers.clean_abandoned(self._bucket, self._uploads, self._names, parent)

    def remove(self) -> None:
        keys = Keys(self._name, new_token())
        living_saves.add(keys.token)
        try:
            with self._errors(""):
                Marker(self._url, self._bucket, keys, self._names).acquire_all()
                self._bucket.delete_folder(self._name)
        finally:
            living_saves.discard(keys.token)

    def close(self) -> None:
        self._uploads.close()

    @contextmanager
    def _errors(self, name: str, offset: int | None = None, nbytes: int | None = None) -> Iterator[None]:
        """Turns errors of libraries into fastload's, and says where they were."""
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
    def _tolerated(self, what: str) -> Iterator[None]:
        """Only warns of what cannot be removed."""
        try:
            yield
        except Exception as error:
            _log.warning("%s: cannot remove %s: %s", self._url, what, self._bucket.secrets.first_line(error))
