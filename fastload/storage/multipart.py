"""Large files on S3: each is one multipart upload, whose parts come from all ranks."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fastload.base.memory import round_up
from fastload.base.threads import each
from fastload.storage.bucket import Bucket, Keys
from fastload.storage.names import Names
from fastload.storage.s3 import S3Requests, error_code
from fastload.storage.uploads import NUM_REQUESTS

__all__ = ["Multipart"]

_log = logging.getLogger(__name__)

_PART_BYTES = 16 << 20
_LEAST_PART_BYTES = 8 << 20  # S3 takes 5 MiB, but each part costs a request
_GOOD_NUM_PARTS = 128  # shares are cut between parts: with few of them they would be uneven
_MAX_PARTS = 10_000
_GONE = ("NoSuchUpload", "404")


class Multipart:
    """Multipart uploads to S3 and what speaks its protocol.

    Nothing is seen of one until it is completed, which publishing does. The coordinator begins them, their
    ids travel in the ticket, and the receipts bring the parts back.

    Args:
        bucket: The store.
        requests: What asks it for what `bucket` cannot.
        names: What files of a checkpoint are called.
    """

    ordered = False

    def __init__(self, bucket: Bucket, requests: S3Requests, names: Names) -> None:
        self._bucket = bucket
        self._requests = requests
        self._file_endings = names.file_endings
        self._keys = Keys("", "")
        self._sizes: Mapping[str, int] = {}
        self._uploads: Mapping[str, str] = {}
        self._parts: dict[str, list[tuple[int, str]]] = {}
        self._lock = threading.Lock()

    def align_bytes(self, largest_bytes: int) -> int:
        even = round_up(-(-largest_bytes // _GOOD_NUM_PARTS), 1 << 20)
        part = min(max(even, _LEAST_PART_BYTES), _PART_BYTES)
        return max(part, round_up(-(-largest_bytes // _MAX_PARTS), 1 << 20))

    def begin(self, keys: Keys, sizes: Mapping[str, int]) -> dict[str, str]:
        uploads: dict[str, str] = {}
        client = self._requests.client

        def begin(name: str) -> None:
            where = self._requests.named(keys.published(name))
            uploads[name] = self._requests.ask(lambda: client.create_multipart_upload(**where))["UploadId"]

        try:
            each((name for name, nbytes in sizes.items() if nbytes), begin, num_threads=NUM_REQUESTS)
        except BaseException:
            with suppress(Exception):  # which tells less than what ended the others
                self.give_up(keys.name, uploads)  # no owner names them yet
            raise
        self.join(keys, sizes, uploads)
        return uploads

    def join(self, keys: Keys, sizes: Mapping[str, int], uploads: Mapping[str, str]) -> None:
        self._keys, self._sizes, self._uploads = keys, sizes, uploads

    def write(self, name: str, offset: int, data: memoryview) -> None:
        part_bytes = self.align_bytes(max(self._sizes.values()))
        number, inside = divmod(offset, part_bytes)
        assert not inside, (name, offset)
        is_part = len(data) == part_bytes or offset + len(data) == self._sizes[name]
        assert is_part, (name, offset, len(data))
        tag = self._put_part(name, number + 1, data)
        with self._lock:
            self._parts.setdefault(name, []).append((number + 1, tag))

    def _put_part(self, name: str, number: int, data: memoryview) -> str:
        """Uploads a part; returns its tag."""
        client, where = self._requests.client, self._requests.named(self._keys.published(name))
        which = {"UploadId": self._uploads[name], "PartNumber": number}
        answer = self._requests.ask(lambda: client.upload_part(**where, **which, Body=_Body(data)))
        tag: str = answer["ETag"]
        return tag

    def end(self, name: str) -> None:
        pass  # a part is there once it is answered

    def receipt(self) -> dict[str, Any]:
        return {"parts": {name: sorted(parts) for name, parts in self._parts.items()}}

    def publish(self, name: str, receipts: Sequence[Mapping[str, Any]]) -> None:
        if not self._sizes[name]:
            self._bucket.put(self._keys.published(name), b"")
            return
        tags = {number: tag for receipt in receipts for number, tag in receipt["parts"].get(name, ())}
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(tags.items())]
        client, where = self._requests.client, self._requests.named(self._keys.published(name))
        which = {"UploadId": self._uploads[name], "MultipartUpload": {"Parts": parts}}
        # Gone: the answer to the attempt that completed it was lost, or it will be missed in a moment.
        self._unless_gone(lambda: client.complete_multipart_upload(**where, **which))

    def give_up(self, name: str, uploads: Mapping[str, str]) -> None:
        def end(file: str) -> None:
            self._end(self._requests.key(f"{name}/{file}"), uploads[file])

        each(uploads, end, num_threads=NUM_REQUESTS)

    def _end(self, key: str, upload: str) -> None:
        """Ends an upload; once it is completed it is gone, too."""
        which = {"Bucket": self._requests.bucket, "Key": key, "UploadId": upload}
        self._unless_gone(lambda: self._requests.client.abort_multipart_upload(**which))

    def _unless_gone(self, call: Callable[[], Any]) -> None:
        """Makes a request about an upload, which may be gone."""
        try:
            self._requests.ask(call)
        except Exception as error:
            if error_code(error) not in _GONE:
                raise

    def _may_be_of_a_save(self, key: str) -> bool:
        """Whether a key below the parent, where others write, too, is that of a file of a checkpoint."""
        folder, slash, name = key.partition("/")
        return bool(folder and slash) and "/" not in name and name.endswith(self._file_endings)

    def give_up_old(self, age_s: float) -> list[str]:
        """Ends uploads that were begun by saves that died before they could say so."""
        requests, old = self._requests, list[str]()
        parent = requests.key("")
        pages = requests.client.get_paginator("list_multipart_uploads")
        try:
            for page in requests.ask(lambda: list(pages.paginate(Bucket=requests.bucket, Prefix=parent))):
                for upload in page.get("Uploads", ()):
                    is_ours = self._may_be_of_a_save(upload["Key"].removeprefix(parent))
                    if is_ours and time.time() - upload["Initiated"].timestamp() > age_s:
                        self._end(upload["Key"], upload["UploadId"])
                        old.append(f"s3://{requests.bucket}/{upload['Key']}")
        except requests.client.exceptions.ClientError as error:
            if error_code(error) not in _GONE:  # which some stores say where there are none at all
                _log.warning("%s: cannot look for uploads of dead saves: %s", requests.url, error)
        return old

    def close(self) -> None:
        self._requests.client.close()


class _Body(io.RawIOBase):
    """A part as boto3 takes it: something to read from, since it takes no memoryview, without a copy."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def __len__(self) -> int:
        return len(self._data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), len(self._data) - self._position)
        buffer[:count] = self._data[self._position : self._position + count]
        self._position += count
        return count
