"""S3, Google and Azure object stores, and HTTP: range requests through obstore."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import quote

import obstore
from obstore.exceptions import (
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import S3Store, from_url

from fastload.errors import OptionError, StorageError
from fastload.options import environment
from fastload.storage.base import ByteCounter, FileStat

__all__ = ["ObjectStorage", "make_store", "s3_settings"]

T = TypeVar("T")

_from_url: Any = from_url  # its overloads want the kind of store to be known
# What obstore takes apart from the options of a store, and dies of when it finds it among them.
_CLIENT_OPTIONS = frozenset(
    """
    allow_http allow_invalid_certificates connect_timeout default_content_type default_headers http1_only
    http2_keep_alive_interval http2_keep_alive_timeout http2_keep_alive_while_idle http2_only
    pool_idle_timeout pool_max_idle_per_host proxy_ca_certificate proxy_excludes proxy_url
    randomize_addresses root_certificate timeout user_agent
    """.split()
)

# What obstore finds by itself, or is told to do without.
_OTHER_CREDENTIALS = frozenset(
    """
    access_key_id container_credentials_full_uri container_credentials_relative_uri skip_signature
    web_identity_token_file
    """.split()
)
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
# obstore dies of an endpoint that is no URL, with the first request.
_ENDPOINT = re.compile(r"https?://(\[[0-9a-f:.]+\]|[^\s/?#:@\[\]]+)(:\d{1,5})?(/[^\s?#]*)?", re.IGNORECASE)
# obstore looks nowhere but in the environment, and then asks the cloud's metadata service.
_NO_KEYS = re.compile(r"Error performing \w+ \S+/(latest/api/token|latest/meta-data/)")
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
        # No retries in there: fastload's own know the deadline and are counted.
        self._store = make_store(
            f"{scheme}://{parent}", options, attempt_s=attempt_s, retry={"max_retries": 0}
        )
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
        # Some stores and tools keep an empty object by the name of the folder itself.
        files = [meta for meta in found["objects"] if meta["path"] != self._root]
        names = {meta["path"].rsplit("/", 1)[-1]: _stat(meta) for meta in files}
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
            message = _first_line(error)
            if _NO_KEYS.search(message):
                message += " (no AWS_ACCESS_KEY_ID in the environment, no profile in ~/.aws)"
            raise self._error(message, name, offset, nbytes, transient=not permanent) from error

    def _error(
        self, message: str, name: str, offset: int | None, nbytes: int | None, *, transient: bool
    ) -> StorageError:
        url = f"{self._url}/{name}" if name else self._url
        return StorageError(message, url=url, offset=offset, nbytes=nbytes, transient=transient)


def make_store(url: str, options: Mapping[str, Any], *, attempt_s: float, retry: Mapping[str, Any]) -> Any:
    """Makes obstore's store for a URL.

    Args:
        url: Its root, with its scheme.
        options: Configuration of the store, as obstore takes it, beyond what the environment says; options
            of the HTTP client may stand among those of the store.
        attempt_s: Longest time in seconds for one request.
        retry: What obstore is to do about failures by itself.

    Raises:
        OptionError: The URL or an option is not one that the store takes.
    """
    config = dict(options)
    attempt = timedelta(seconds=attempt_s)
    client: dict[str, Any] = {
        "timeout": attempt,
        "connect_timeout": min(_CONNECT_TIMEOUT, attempt),
        "allow_http": True,  # whoever names an http:// endpoint means it
    }
    client |= {name: config.pop(name) for name in _CLIENT_OPTIONS & config.keys()}
    given = config.pop("client_options", {})
    if not isinstance(given, Mapping):
        raise OptionError(f"cannot open {url}: client_options={given!r}: must be a dict")
    config |= {"client_options": {**client, **given}, "retry_config": retry}
    try:
        store = _from_url(_quoted(url), **config)
        if isinstance(store, S3Store) and (profile := _profile_for(store)) is not None:
            store = _from_url(_quoted(url), credential_provider=profile, **config)
    except BaseException as error:
        # Of what its authors did not foresee obstore dies with an exception that is no `Exception`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise OptionError(f"cannot open {url}: {_first_line(error)}") from error
    endpoint = s3_settings(store)["endpoint"] if isinstance(store, S3Store) else None
    if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
        raise OptionError(f"cannot open {url}: endpoint {endpoint!r} is not a URL such as https://host:9000")
    return store


def _quoted(url: str) -> str:
    """Returns a URL as obstore reads it. But for HTTP's, those given say the keys as they are."""
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    return url if scheme in ("http", "https") else f"{scheme}://{host}/{quote(path)}"


def _profile_for(store: S3Store) -> Any:
    """Returns what asks boto3 for the credentials of a profile in ~/.aws, for a store that has no others.

    obstore knows no profiles: roles, single sign-on, and processes that print keys.
    """
    if _OTHER_CREDENTIALS & {name for name, value in s3_settings(store).items() if value}:
        return None
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return None
    session = boto3.session.Session()
    if not session.available_profiles or session.get_credentials() is None:
        return None
    return Boto3CredentialProvider(session)


def s3_settings(store: S3Store) -> dict[str, Any]:
    """Returns what an S3 store goes by: its options, and the environment for what they do not say."""
    known: dict[str, Any] = {
        name.removeprefix("AWS_").lower(): value for name, value in environment("AWS_").items()
    }
    known |= store.config
    return {**known, "endpoint": known.get("endpoint") or known.get("endpoint_url")}


def _stat(meta: Mapping[str, Any]) -> FileStat:
    tag = (meta.get("e_tag") or "").strip('"')  # quoted in answers, bare in some listings
    modified = meta.get("last_modified")
    return FileStat(meta["size"], tag or str(modified or ""), modified.timestamp() if modified else 0.0)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]
