"""S3 through boto3, for requests that obstore lacks: multipart uploads from several ranks."""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import ssl
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import IO, Any, TypeVar

from fastload.base.memory import round_up
from fastload.base.threads import in_threads, within
from fastload.errors import OptionError
from fastload.ext.remote.obstore import ObjectStorage, StoreSettings
from fastload.ext.remote.process import making_client
from fastload.ext.remote.s3_settings import is_on, new_session
from fastload.options import Patience
from fastload.storage.base import Names
from fastload.storage.location import Location
from fastload.storage.object_target import Keys, Upload
from fastload.storage.retry import patiently

T = TypeVar("T")
_log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 128  # that are kept
_SEND_BYTES = 256 << 10
_SHORT_BYTES = 1 << 20
_PASSING = ("RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "InternalError")
_GONE = ("NoSuchUpload", "404")
_PART_BYTES = 16 << 20
_LEAST_PART_BYTES = 8 << 20  # S3 takes 5 MiB, but each part costs a request
_GOOD_NUM_PARTS = 128  # shares are cut between parts; few parts would make them uneven
_MAX_PARTS = 10_000


class S3Storage(ObjectStorage):
    """Access to S3: an `ObjectStorage` with a boto3 client.

    Args:
        root: Location of the root.
        names: Names of files of a checkpoint.
        options: As for `ObjectStorage`.
        patience: Likewise.

    Attributes:
        client: The boto3 client.
        bucket: Name of the bucket.
    """

    def __init__(self, root: Location, names: Names, options: Mapping[str, Any], patience: Patience) -> None:
        if importlib.util.find_spec("botocore") is None:
            raise OptionError("saving to S3 needs boto3: pip install 'fastload-torch[remote]'")
        super().__init__(root, names, options, patience)
        self.bucket, _, self._prefix = root.address.removeprefix(f"{root.scheme}://").partition("/")
        s3 = self.settings.s3
        assert s3 is not None
        try:
            s3.require_for_saves()
        except OptionError as error:
            raise OptionError(f"cannot save to {root}: {error}") from None
        self._certificates = _file_of(s3.root_certificates) if s3.root_certificates else None
        trusted = f"/proc/self/fd/{self._certificates.fileno()}" if self._certificates else None
        try:
            self.client = make_client(root.url, self.settings, trusted, attempt_s=patience.attempt_s)
        except BaseException:
            self._close_certificates()
            raise

    def close(self) -> None:
        super().close()
        self.client.close()
        self._close_certificates()

    def _close_certificates(self) -> None:
        if self._certificates is not None:
            self._certificates.close()

    def key(self, key: str) -> str:
        """Returns the full key of a key relative to the root."""
        return f"{self._prefix}/{key}" if self._prefix else key

    def named(self, key: str) -> dict[str, str]:
        """Returns the arguments of the client that name an object."""
        return {"Bucket": self.bucket, "Key": self.key(key)}

    def ask_s3(self, call: Callable[[], T]) -> T:
        """Makes a request through boto3, with fastload's retries, since the pauses of boto3's may be short.

        Raises:
            DeadlineExceeded: The request did not end in time.
        """
        ask = partial(patiently, partial(self.renewing, call, _has_expired), _is_transient, self.patience)
        return within(self.patience.timeout_s, f"a request to {self.url}", ask)

    def delete_folder(self, folder: str) -> None:
        super().delete_folder(folder)
        self.delete_empty(folder)

    def delete_empty(self, folder: str) -> None:
        """Deletes the object for a folder itself, which some stores keep of one that is empty."""
        self.ask_s3(partial(self.client.delete_object, **self.named(f"{folder}/")))


def make_client(url: str, settings: StoreSettings, trusted: str | None, *, attempt_s: float) -> Any:
    """Creates a boto3 client with the settings of an obstore store, so that a URL that loads also saves.

    Args:
        url: URL of the root, for messages.
        settings: The settings.
        trusted: Path of a file of certificates to trust; None for those of the system.
        attempt_s: Longest time in seconds without a response.

    Raises:
        OptionError: boto3 does not accept an option.
    """
    import botocore.config

    s3, client = settings.s3, settings.client
    assert s3 is not None
    proxy, agent = client.get("proxy_url"), client.get("user_agent")
    config = botocore.config.Config(
        signature_version=botocore.UNSIGNED if s3.is_unsigned else None,
        s3={
            "addressing_style": "virtual" if s3.is_virtual else "path",
            "use_accelerate_endpoint": False,
            "use_dualstack_endpoint": False,
        },
        use_dualstack_endpoint=False,
        use_fips_endpoint=False,
        connect_timeout=attempt_s,  # also the limit of urllib3 while it sends a part
        read_timeout=attempt_s,
        retries={"total_max_attempts": 1},
        max_pool_connections=_MAX_CONNECTIONS,
        # Not all S3-compatible stores support checksums, and the signature covers the body.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        **({"proxies": {"http": proxy, "https": proxy}} if proxy else {}),
        **({"user_agent": agent} if agent else {}),
    )
    session = new_session()
    if s3.credentials is not None:
        session.register_component("credential_provider", s3.credentials)
    if metadata := s3.options.get("metadata_endpoint"):
        session.set_config_variable("ec2_metadata_service_endpoint", metadata)
    keys: Sequence[str | None] = s3.keys or (None, None, None)
    try:
        with making_client:
            made = session.create_client(
                "s3",
                config=config,
                region_name=s3.region,
                endpoint_url=s3.endpoint,
                verify=_verification(client, trusted),
                aws_access_key_id=keys[0],
                aws_secret_access_key=keys[1],
                aws_session_token=keys[2],
            )
    except ValueError as error:  # the base of some errors of botocore
        raise OptionError(f"cannot open {url}: {error}") from None
    _add(made, s3.object_parameters(), client.get("default_headers") or {})
    return made


def _verification(client: Mapping[str, Any], trusted: str | None) -> str | bool:
    """Returns which certificates boto3 is to trust: those in a file, its own, or all."""
    if is_on(client.get("allow_invalid_certificates")):
        # The user asked for it. urllib3 would warn of each connection.
        warnings.filterwarnings("ignore", message="Unverified HTTPS request")
        return False
    return trusted or _system_certificates() or True


def _add(client: Any, parameters: Mapping[str, Any], headers: Mapping[str, Any]) -> None:
    """Adds parameters and headers to all requests of a client; obstore does not sign such headers either."""

    def add_parameters(params: dict[str, Any], model: Any, **_: object) -> None:
        params.update(
            {name: parameters[name] for name in parameters.keys() & model.input_shape.members.keys()}
        )

    def add_headers(request: Any, **_: object) -> None:
        for name, value in headers.items():
            request.headers[name] = value.decode() if isinstance(value, bytes) else value

    client.meta.events.register("provide-client-params.s3", add_parameters)
    client.meta.events.register("before-send.s3", add_headers)


def _file_of(certificates: str) -> IO[bytes]:
    """Returns a file in memory with certificates, and those of the system: boto3 trusts no others then."""
    from botocore.httpsession import get_cert_path

    file = os.fdopen(os.memfd_create("fastload-certificates"), "wb")
    with open(_system_certificates() or get_cert_path(True), "rb") as known:
        file.write(known.read() + b"\n" + certificates.encode())
    file.flush()
    return file


def _system_certificates() -> str | None:
    """Returns the path of the certificates that obstore trusts, such as ``SSL_CERT_FILE``."""
    return ssl.get_default_verify_paths().cafile


def _is_transient(error: Exception) -> bool:
    """Whether another attempt could succeed after an error of boto3."""
    from botocore.exceptions import ClientError, ConnectionError, HTTPClientError

    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 or status in (408, 429) or error_code(error) in _PASSING
    return isinstance(error, ConnectionError | HTTPClientError)


def error_code(error: BaseException) -> str:
    """Returns the S3 error code; empty for an error that is not from S3."""
    response = getattr(error, "response", {})
    return str(response.get("Error", {}).get("Code", ""))


def _has_expired(error: Exception) -> bool:
    return error_code(error) == "ExpiredToken"


class Multipart:
    """Multipart uploads: each file is one upload, with parts from all ranks.

    An object exists once its upload is completed, which is how it is published. The coordinator begins the
    uploads and sends their ids in the ticket; the receipts return the parts.

    Args:
        bucket: The bucket.
        names: Names of files of a checkpoint.
    """

    ordered = False
    writes_at_once = 32  # each waits for a round trip, and a connection has some 60 MB/s

    def __init__(self, bucket: S3Storage, names: Names) -> None:
        self._bucket = bucket
        self._file_endings = names.file_endings
        self._keys = Keys("", "")
        self._sizes: Mapping[str, int] = {}
        self._uploads: Mapping[str, str] = {}
        self._parts: dict[str, list[tuple[int, str]]] = {}
        self._lock = threading.Lock()

    @property
    def _client(self) -> Any:
        return self._bucket.client

    def align_bytes(self, largest_bytes: int) -> int:
        even = round_up(-(-largest_bytes // _GOOD_NUM_PARTS), 1 << 20)
        part = min(max(even, _LEAST_PART_BYTES), _PART_BYTES)
        return max(part, round_up(-(-largest_bytes // _MAX_PARTS), 1 << 20))

    def begin(self, keys: Keys, sizes: Mapping[str, int]) -> dict[str, str]:
        uploads: dict[str, str] = {}

        def begin(name: str) -> None:
            create = partial(self._client.create_multipart_upload, **self._bucket.named(keys.published(name)))
            uploads[name] = self._bucket.ask_s3(create)["UploadId"]

        try:
            in_threads(begin, sorted(name for name, nbytes in sizes.items() if nbytes))
        except BaseException:
            with suppress(Exception):  # the first error says more
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
        """Uploads a part; returns its ETag."""
        which = {**self._upload(name), "PartNumber": number}

        def put() -> Any:
            # boto3 sends a file only once the store has answered its headers. Each attempt needs a new one.
            body = _Body(data) if len(data) > _SHORT_BYTES else bytes(data)
            return self._client.upload_part(**which, Body=body)

        answer = self._bucket.ask_s3(put)
        tag: str = answer["ETag"]
        return tag

    def _upload(self, name: str) -> dict[str, str]:
        """Returns the arguments of the client that name an upload."""
        return {**self._bucket.named(self._keys.published(name)), "UploadId": self._uploads[name]}

    def end(self, name: str) -> None:
        pass  # parts are durable once they are acknowledged

    def receipt(self) -> dict[str, Any]:
        return {"parts": {name: sorted(parts) for name, parts in self._parts.items()}}

    def publish(self, name: str, receipts: Sequence[Mapping[str, Any]]) -> None:
        if not self._sizes[name]:
            self._bucket.put(self._keys.published(name), b"")
            return
        tags = {number: tag for receipt in receipts for number, tag in receipt["parts"].get(name, ())}
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(tags.items())]
        which = {**self._upload(name), "MultipartUpload": {"Parts": parts}}
        # Gone: an earlier attempt completed it, or the check of sizes that follows fails.
        self._unless_gone(partial(self._client.complete_multipart_upload, **which))

    def give_up(self, name: str, uploads: Mapping[str, str]) -> None:
        def end(file: str) -> None:
            self._end(self._bucket.key(f"{name}/{file}"), uploads[file])

        in_threads(end, sorted(uploads))

    def _end(self, key: str, upload: str) -> None:
        """Aborts an upload, unless it is completed or aborted already."""
        which = {"Bucket": self._bucket.bucket, "Key": key, "UploadId": upload}
        self._unless_gone(partial(self._client.abort_multipart_upload, **which))

    def _unless_gone(self, call: Callable[[], Any]) -> None:
        """Makes a request about an upload that may be gone."""
        try:
            self._bucket.ask_s3(call)
        except Exception as error:
            if error_code(error) not in _GONE:
                raise

    def _may_be_of_a_save(self, key: str) -> bool:
        """Whether a key is like that of a checkpoint's file; other programs write below the parent, too."""
        folder, slash, name = key.partition("/")
        return bool(folder and slash) and "/" not in name and name.endswith(self._file_endings)

    def find_old(self, age_s: float) -> list[Upload]:
        bucket, parent = self._bucket, self._bucket.key("")
        pages = self._client.get_paginator("list_multipart_uploads")
        ours = set(self._uploads.values())
        try:
            listed = bucket.ask_s3(lambda: list(pages.paginate(Bucket=bucket.bucket, Prefix=parent)))
        except self._client.exceptions.ClientError as error:
            if error_code(error) not in _GONE:  # the response of some stores without any uploads
                reason = bucket.secrets.first_line(error)
                _log.warning("%s: cannot look for uploads of dead saves: %s", bucket.url, reason)
            return []
        uploads = [upload for page in listed for upload in page.get("Uploads", ())]
        # Not by the clock of this host, which may be wrong. Some stores have one date for all uploads.
        begun = [upload["Initiated"] for upload in uploads if upload["UploadId"] in ours]
        old = list[Upload]()
        for upload in uploads:
            key = upload["Key"].removeprefix(parent)
            may_be_old = begun and upload["UploadId"] not in ours and self._may_be_of_a_save(key)
            if may_be_old and (min(begun) - upload["Initiated"]).total_seconds() > age_s:
                checkpoint, _, file = key.partition("/")
                old.append(Upload(checkpoint, file, upload["UploadId"]))
        return old

    def remove_empty(self, folder: str) -> None:
        self._bucket.delete_empty(folder)

    def close(self) -> None:
        pass  # the client belongs to the bucket


class _Body(io.RawIOBase):
    """The body of a part as a file: boto3 takes no memoryview, and copies bytes."""

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

    def read(self, size: int = -1) -> Any:
        # More than http.client asks for, 16 KiB, each of which would take the GIL; and without a copy.
        count = len(self._data) if size < 0 else max(size, _SEND_BYTES)
        found = self._data[self._position : self._position + count]
        self._position += len(found)
        return found
