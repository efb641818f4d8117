"""A new checkpoint on S3: each file is one multipart upload, whose parts come from all ranks."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

from fastload.base.memory import round_up
from fastload.base.threads import ProcessLock, each, within
from fastload.errors import OptionError
from fastload.storage.bucket import ObstoreBucket
from fastload.storage.names import Names
from fastload.storage.object_target import NUM_REQUESTS, ObjectTarget
from fastload.storage.objects import s3_settings
from fastload.storage.retry import patiently

__all__ = ["S3Target", "make_client"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_PART_BYTES = 16 << 20
_LEAST_PART_BYTES = 8 << 20  # S3 takes 5 MiB, but each part costs a request
_GOOD_NUM_PARTS = 128  # shares are cut between parts: with few of them they would be uneven
_MAX_PARTS = 10_000
_MAX_CONNECTIONS = 32
_GONE = ("NoSuchUpload", "404")
_PASSING = ("RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "InternalError")
_making = ProcessLock()  # a session makes one client at a time


class S3Target(ObjectTarget):
    """Write access to S3 and what speaks its protocol.

    Nothing is seen of an upload until it is completed, which publishing does. The coordinator begins the
    uploads, their ids travel in the ticket, and the receipts bring the parts back.

    Args:
        url: Where the checkpoint will be.
        bucket: The store, at the parent of that place.
        name: Last part of the URL.
        names: What files of a checkpoint are called.
        client: boto3's client for the same store.
        location: Name of the bucket, and prefix of the parent in it.
        timeout_s: Longest time in seconds for one request with its retries.
        retries: Further attempts.
    """

    ordered = False

    def __init__(
        self,
        url: str,
        bucket: ObstoreBucket,
        name: str,
        names: Names,
        *,
        client: Any,
        location: tuple[str, str],
        timeout_s: float,
        retries: int,
    ) -> None:
        super().__init__(url, bucket, name, names, timeout_s=timeout_s)
        self._client = client
        self._retries = retries
        self._bucket_name, self._prefix = location
        self._uploads: dict[str, str] = {}
        self._parts: dict[str, list[tuple[int, str]]] = {}
        self._parts_lock = threading.Lock()

    def align_bytes(self, largest_bytes: int) -> int | None:
        even = round_up(-(-largest_bytes // _GOOD_NUM_PARTS), 1 << 20)
        part = min(max(even, _LEAST_PART_BYTES), _PART_BYTES)
        return max(part, round_up(-(-largest_bytes // _MAX_PARTS), 1 << 20))

    def join(self, ticket: Mapping[str, Any]) -> None:
        super().join(ticket)
        self._uploads = ticket["uploads"]

    def write(self, name: str, offset: int, data: memoryview) -> None:
        part_bytes = self._part_bytes
        end = offset + len(data)
        assert offset % part_bytes == 0, (name, offset)
        assert end % part_bytes == 0 or end == self._sizes[name], (name, offset, len(data))
        for begin in range(offset, end, part_bytes):
            part = data[begin - offset :][:part_bytes]
            with self._noted(), self._errors(name, begin, len(part)):
                tag = self._upload(name, begin // part_bytes + 1, part)
            with self._parts_lock:
                self._parts.setdefault(name, []).append((begin // part_bytes + 1, tag))
            self._written.add(name, begin, begin + len(part))

    def _upload(self, name: str, number: int, part: memoryview) -> str:
        answer: dict[str, str] = self._ask(
            lambda: self._client.upload_part(
                **self._object(name), UploadId=self._uploads[name], PartNumber=number, Body=_Body(part)
            )
        )
        return answer["ETag"]

    def flush(self) -> dict[str, Any]:
        return {**super().flush(), "parts": {name: sorted(parts) for name, parts in self._parts.items()}}

    @property
    def _part_bytes(self) -> int:
        return self.align_bytes(max(self._sizes.values(), default=0)) or 0

    def _begin(self) -> dict[str, str]:
        def begin(name: str) -> None:
            answer = self._ask(lambda: self._client.create_multipart_upload(**self._object(name)))
            self._uploads[name] = answer["UploadId"]

        try:
            each((name for name, nbytes in self._sizes.items() if nbytes), begin, num_threads=NUM_REQUESTS)
        except BaseException:
            with suppress(Exception):  # which tells less than what ended the others
                self._give_up(self._name, self._uploads)  # no owner names them yet
            raise
        return self._uploads

    def _finish(self, name: str, receipts: Sequence[Mapping[str, Any]]) -> None:
        if not self._sizes[name]:
            self._bucket.put(self._key(name), b"")
            return
        tags = {number: tag for receipt in receipts for number, tag in receipt["parts"].get(name, ())}
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(tags.items())]
        try:
            self._ask(
                lambda: self._client.complete_multipart_upload(
                    **self._object(name), UploadId=self._uploads[name], MultipartUpload={"Parts": parts}
                )
            )
        except Exception as error:
            # The answer to the attempt that completed it was lost, or it will be missed in a moment.
            if _code(error) not in _GONE:
                raise

    def _give_up(self, prefix: str, uploads: Mapping[str, str]) -> None:
        def end(name: str) -> None:
            try:
                key = self._in_bucket(f"{prefix}/{name}")
                request = {"Bucket": self._bucket_name, "Key": key, "UploadId": uploads[name]}
                self._ask(lambda: self._client.abort_multipart_upload(**request))
            except Exception as error:
                if _code(error) not in _GONE:  # they are gone once they are completed, too
                    raise

        each(uploads, end, num_threads=NUM_REQUESTS)

    def _may_be_of_a_save(self, key: str) -> bool:
        """Whether a key below the parent, where others write, too, is that of a file of a checkpoint."""
        folder, slash, name = key.partition("/")
        return bool(folder and slash) and "/" not in name and name.endswith(self._names.file_endings)

    def _give_up_old(self, age_s: float) -> list[str]:
        """Ends uploads that were begun by saves that died before they could say so."""
        old: list[str] = []
        parent = self._in_bucket("")
        pages = self._client.get_paginator("list_multipart_uploads")
        try:
            for page in self._ask(lambda: list(pages.paginate(Bucket=self._bucket_name, Prefix=parent))):
                for upload in page.get("Uploads", ()):
                    is_ours = self._may_be_of_a_save(upload["Key"].removeprefix(parent))
                    if is_ours and time.time() - upload["Initiated"].timestamp() > age_s:
                        request = {"Bucket": self._bucket_name, "Key": upload["Key"]}
                        self._client.abort_multipart_upload(**request, UploadId=upload["UploadId"])
                        old.append(f"s3://{self._bucket_name}/{upload['Key']}")
        except self._client.exceptions.ClientError as error:
            if _code(error) not in _GONE:  # which some stores say where there are none at all
                _log.warning("%s: cannot look for uploads of dead saves: %s", self._url, error)
        return old

    def _delete_folder(self, folder: str) -> None:
        super()._delete_folder(folder)
        # The object that some stores keep for a folder, with files or without.
        request = {"Bucket": self._bucket_name, "Key": self._in_bucket(folder) + "/"}
        self._ask(lambda: self._client.delete_object(**request))

    def _object(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket_name, "Key": self._in_bucket(self._key(name))}

    def _in_bucket(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _ask(self, call: Callable[[], T]) -> T:
        """Makes a request, and makes it again as loads do: boto3's own pauses may all be short."""
        timeout_s = self._timeout_s

        def ask() -> T:
            return patiently(call, _is_transient, retries=self._retries, timeout_s=timeout_s)

        return within(timeout_s, f"a request to {self._url}", ask)

    def close(self) -> None:
        super().close()
        self._client.close()


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


def make_client(url: str, store: Any, *, attempt_s: float) -> Any:
    """Makes boto3's client for an S3 store of obstore's, so that a URL that loads also saves.

    Args:
        url: What is opened, for messages.
        store: The store, which knows the options under their canonical names.
        attempt_s: Longest time in seconds without an answer to one request.

    Raises:
        OptionError: boto3 is not installed, or does not take an option.
    """
    try:
        import boto3  # noqa: F401
        import botocore.config
    except ImportError as error:
        raise OptionError("saving to S3 needs boto3: pip install boto3") from error
    # What obstore reads from the environment and boto3 does not, or by other names.
    known = s3_settings(store)
    is_on = {"1", "true", "yes", "on", "y"}
    virtual = str(known.get("virtual_hosted_style_request", "")).lower() in is_on
    unsigned = str(known.get("skip_signature", "")).lower() in is_on
    config = botocore.config.Config(
        signature_version=botocore.UNSIGNED if unsigned else None,
        s3={"addressing_style": "virtual" if virtual else "path"},
        connect_timeout=attempt_s,  # which urllib3 goes by while it sends a part, too
        read_timeout=attempt_s,
        retries={"total_max_attempts": 1},
        max_pool_connections=_MAX_CONNECTIONS,
        # Without: not every store that speaks S3 knows them, and a signature covers the body as well.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        with _making:
            return _session().client(
                "s3",
                config=config,
                region_name=known.get("region") or known.get("default_region") or "us-east-1",
                endpoint_url=known["endpoint"],
                aws_access_key_id=known.get("access_key_id"),
                aws_secret_access_key=known.get("secret_access_key"),
                aws_session_token=known.get("token") or known.get("session_token"),
            )
    except ValueError as error:  # some of botocore's are
        raise OptionError(f"cannot open {url}: {error}") from error


@cache
def _session() -> Any:
    """Returns the one session: it reads a description of S3 that takes most of a second."""
    import boto3

    return boto3.session.Session()


def _is_transient(error: Exception) -> bool:
    """Whether another try could succeed after an error of boto3's."""
    from botocore.exceptions import ClientError, ConnectionError, HTTPClientError

    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 or status in (408, 429) or _code(error) in _PASSING
    return isinstance(error, ConnectionError | HTTPClientError)


def _code(error: BaseException) -> str:
    """Returns what S3 calls an error; empty for one that did not come from there."""
    response = getattr(error, "response", {})
    return str(response.get("Error", {}).get("Code", ""))
