"""S3, Google and Azure object stores, and HTTP: range requests through obstore."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import obstore
from obstore.exceptions import (
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import from_url

from fastload.errors import OptionError, StorageError
from fastload.storage.base import ByteCounter, FileStat

__all__ = ["ObjectStorage"]

T = TypeVar("T")

_from_url: Any = from_url  # its overloads want the kind of store to be known

_SUFFIX = ".safetensors"
_HTTP_NAMES = ("model.safetensors.index.json", "model.safetensors")
_RECORD_NAME = "fastload.json"
_CONNECT_TIMEOUT = timedelta(seconds=5)
# What another try will not change.
_PERMANENT = (
    FileNotFoundError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
    ValueError,
)
_REFUSED = re.compile(r"status code: 4(?!08|29)\d\d")  # a list request has no exception of its own for it


class ObjectStorage:
    """Read access through obstore, which does the network in threads of its own.

    A whole checkpoint costs one list request, and one range request for each header and each chunk.

    Args:
        url: Root, with its scheme.
        options: Configuration of the store, as obstore takes it, beyond what the environment says.
        attempt_s: Longest time in seconds for one request; one that stalls is abandoned then.

    Raises:
        OptionError: The URL or an option is not one that the store takes.
    """

    shared = True
    probes = False
    direct_bytes_read = 0
    io = "buffered"

    def __init__(self, url: str, options: Mapping[str, Any], attempt_s: float) -> None:
        self._url = url.rstrip("/")
        self._count = ByteCounter()
        scheme, _, rest = self._url.partition("://")
        self._is_http = scheme in ("http", "https")
        parent, _, self._root = rest.rpartition("/")
        if not parent:
            parent, self._root = rest, ""
        config = dict(options)
        attempt = timedelta(seconds=attempt_s)
        client: dict[str, Any] = {
            "timeout": attempt,
            "connect_timeout": min(_CONNECT_TIMEOUT, attempt),
            "allow_http": True,  # whoever names an http:// endpoint means it
        }
        client |= config.pop("client_options", {})
        try:
            # No retries in there: fastload's own know the deadline and are counted.
            self._store: Any = _from_url(
                f"{scheme}://{parent}", client_options=client, retry_config={"max_retries": 0}, **config
            )
        except Exception as error:
            raise OptionError(f"cannot open {url}: {_first_line(error)}") from error
        self._known: dict[str, FileStat] = {}

    @property
    def url(self) -> str:
        return self._url

    @property
    def bytes_read(self) -> int:
        return self._count.total

    def stat(self, name: str) -> FileStat | None:
        if name in self._known:
            return self._known[name]
        try:
            found = _stat(self._call(name, lambda key: obstore.head(self._store, key)))
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        self._known[name] = found
        return found

    def list(self) -> list[str] | None:
        if self._url.endswith(_SUFFIX):
            return None
        if self._is_http:  # which has no listing: look for what a listing would be searched for
            record = [_RECORD_NAME] if self._has_record() else []
            return record or next(([name] for name in _HTTP_NAMES if self.stat(name) is not None), None)
        found = self._call("", lambda key: obstore.list_with_delimiter(self._store, key or None))
        names = {meta["path"].rsplit("/", 1)[-1]: _stat(meta) for meta in found["objects"]}
        self._known.update(names)
        return sorted(names) or None

    def folders(self) -> Sequence[str]:
        if self._is_http:
            raise self._error("HTTP has no listing of directories", "", None, None, transient=False)
        found = self._call("", lambda key: obstore.list_with_delimiter(self._store, key or None))
        return sorted(path.strip("/").rsplit("/", 1)[-1] for path in found["common_prefixes"])

    def _has_record(self) -> bool:
        """Whether there is a commit record; a server that refuses to say has none."""
        try:
            return self.stat(_RECORD_NAME) is not None
        except StorageError as error:
            if error.transient:
                raise
            return False

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], version: str = "") -> None:
        nbytes = sum(map(len, buffers))
        if nbytes == 0:
            return

        def get(key: str) -> tuple[Any, Any]:
            result = obstore.get(self._store, key, options={"range": (offset, offset + nbytes)})
            return result.bytes(), result.meta

        data, meta = self._call(name, get, offset, nbytes)
        self._count.add(len(data))
        found = _stat(meta)
        if version and found.version != version:
            raise self._error("it was replaced while it was read", name, offset, nbytes, transient=False)
        if len(data) != nbytes:
            # Only an object that is too short is refused for good: a cut answer may come whole next time.
            message = f"got {len(data)} of {nbytes} bytes; the object has {found.nbytes}"
            raise self._error(message, name, offset, nbytes, transient=found.nbytes >= offset + nbytes)
        view, position = memoryview(data), 0
        for buffer in buffers:
            buffer[:] = view[position : position + len(buffer)]
            position += len(buffer)

    def close(self) -> None:
        self._known.clear()

    def _key(self, name: str) -> str:
        return "/".join(part for part in (self._root, name) if part)

    def _call(
        self, name: str, ask: Callable[[str], T], offset: int | None = None, nbytes: int | None = None
    ) -> T:
        try:
            return ask(self._key(name))
        except Exception as error:
            permanent = isinstance(error, _PERMANENT) or _REFUSED.search(str(error)) is not None
            raise self._error(_first_line(error), name, offset, nbytes, transient=not permanent) from error

    def _error(
        self, message: str, name: str, offset: int | None, nbytes: int | None, *, transient: bool
    ) -> StorageError:
        url = f"{self._url}/{name}" if name else self._url
        return StorageError(message, url=url, offset=offset, nbytes=nbytes, transient=transient)


def _stat(meta: Mapping[str, Any]) -> FileStat:
    tag = (meta.get("e_tag") or "").strip('"')  # quoted in answers, bare in some listings
    modified = meta.get("last_modified")
    return FileStat(meta["size"], tag or str(modified or ""), modified.timestamp() if modified else 0.0)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]
