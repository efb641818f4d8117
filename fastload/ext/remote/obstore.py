"""S3, Google and Azure object stores, and HTTP, through obstore."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from os import PathLike
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import AzureStore, HTTPStore, from_url

from fastload.base.registry import extensions
from fastload.base.threads import in_threads
from fastload.errors import OptionError, StorageError
from fastload.ext.remote.azure import url_of, wait_for_copy
from fastload.ext.remote.direct import DirectBodies, IdleConnections
from fastload.ext.remote.s3_settings import S3Settings, is_on, resolve
from fastload.options import Patience
from fastload.storage.base import (
    HEAD_BYTES,
    FileStat,
    Folder,
    Names,
    ObjectWriter,
    WritableStorage,
    fill,
    is_page,
    take,
)
from fastload.storage.location import HTTP, Location, Secrets, basic_auth, locate
from fastload.storage.retry import FIRST_BACKOFF_S, MAX_BACKOFF_S, patiently

T = TypeVar("T")

_from_url: Any = from_url  # its overloads need the kind of store
# Options that obstore takes as separate arguments; among the options of a store they crash it.
_CLIENT_OPTIONS = frozenset(
    """
    allow_http allow_invalid_certificates connect_timeout default_content_type default_headers http1_only
    http2_keep_alive_interval http2_keep_alive_timeout http2_keep_alive_while_idle http2_only
    pool_idle_timeout pool_max_idle_per_host proxy_ca_certificate proxy_excludes proxy_url
    randomize_addresses root_certificate timeout user_agent
    """.split()
)

_S3 = frozenset("s3 s3a".split())
# Options of S3 that `S3Settings` replaces.
_RESOLVED = frozenset(
    """
    access_key_id bucket default_region endpoint region secret_access_key session_token skip_signature
    virtual_hosted_style_request
    """.split()
)
_CONNECT_TIMEOUT = timedelta(seconds=5)
# Permanent errors.
_PERMANENT = (
    FileNotFoundError,
    InvalidPathError,
    NotImplementedError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
    ValueError,
)
# All other errors are a `GenericError`, whose kind is only in its text. There these words come before those
# of the server.
_STATUS = re.compile(r"Server returned non-2xx status code: (\d{3})")
_PASSING = (408, 409, 429)  # 409: another conditional request is under way
_NO_RANGES = re.compile(r"Generic \S+ error: Received non-partial response when range requested")
# obstore searches only the environment, and then asks the cloud's metadata service.
_NO_KEYS = re.compile(r"Error performing \w+ \S+/(latest/api/token|latest/meta-data/)")
_EXPIRED = "<Code>ExpiredToken</Code>"
_SIGNATURES = frozenset(
    "q-signature signature x-amz-signature x-goog-signature x-oss-signature x-tos-signature".split()
)
# Responses to HEAD of servers that only know GET, and to URLs that are signed for GET.
_NO_HEAD = (403, 405, 501)
_NO_SUCH_RANGE = 416
FIRST_BYTES = 256 << 10
"""Bytes to read of a file whose name is a guess: a small one completely, the header of a large one."""
_NEAR_BYTES = 64 << 10  # what readers of headers ask for first
_MAX_HEADS = 256  # files whose first bytes are kept at a time: 16 MiB of headers
_MAX_LISTING_BYTES = 64 << 20
_PAGE = 1000  # objects in one listing response of S3
_LAST = "\U0010ffff"  # sorts after all other characters
_REPLACED = "it was replaced while it was read"
_PART_BYTES = 256 << 10  # longer bodies are taken in parts of at least this length
_SIGNED_FOR = timedelta(minutes=15)  # the clock of the server may differ by as much
_WRITER_BYTES = 16 << 20
_WRITER_REQUESTS = 4


@dataclass(frozen=True, repr=False)
class StoreSettings:
    """The settings of a location: what makes its obstore stores, and clients of other libraries.

    Attributes:
        location: The location of the root.
        config: Options of its obstore store.
        client: Options of the HTTP client.
        s3: The settings of a location of S3, for other libraries, too.
    """

    location: Location
    config: Mapping[str, Any]
    client: Mapping[str, Any]
    s3: S3Settings | None = None

    def make(self, *, retry: Mapping[str, Any]) -> Any:
        """Creates a store, with retries of obstore's own.

        Raises:
            OptionError: The store does not accept the URL or an option.
        """
        secrets = Secrets(self.location, {**self.config, **self.client})
        config = {**self.config, "client_options": dict(self.client), "retry_config": retry}
        try:
            if self.location.scheme in HTTP:  # obstore would take some host names for S3 or Azure
                return HTTPStore.from_url(_without_user(self.location.address), **config)
            return _from_url(_quoted(self.location.address), **config)
        except BaseException as error:
            # A panic in obstore is an exception that is not an `Exception`.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise OptionError(f"cannot open {self.location}: {secrets.first_line(error)}") from None


def settings_of(url: str | PathLike[str], options: Mapping[str, Any], *, attempt_s: float) -> StoreSettings:
    """Finds the settings of a URL.

    Args:
        url: URL of the root. User and password of an HTTP URL are sent to the server.
        options: Configuration of the store, in addition to the environment. May include options of the HTTP
            client.
        attempt_s: Longest time in seconds for one request.

    Raises:
        OptionError: The store does not accept the URL or an option.
    """
    location = locate(url)
    config = dict(options)
    attempt = timedelta(seconds=attempt_s)
    client: dict[str, Any] = {
        "timeout": attempt,
        "connect_timeout": min(_CONNECT_TIMEOUT, attempt),
        "allow_http": True,  # an http:// endpoint was given explicitly
    }
    client |= {name: config.pop(name) for name in _CLIENT_OPTIONS & config.keys()}
    given = config.pop("client_options", {})
    if not isinstance(given, Mapping):
        raise OptionError(
            f"cannot open {location}: client_options= must be a dict, not {type(given).__name__}"
        )
    client |= given
    if (header := basic_auth(location)) is not None:
        client["default_headers"] = _with_header(client.get("default_headers"), "Authorization", header)
    if location.scheme not in _S3:
        return StoreSettings(location, config, client)
    # A store that trusts all reads no certificates, and makes no request. It has obstore's names for options.
    probe = StoreSettings(location, config, {"allow_invalid_certificates": True})
    config = {**probe.make(retry={"max_retries": 0}).config, **_provider_in(config)}
    secrets = Secrets(location, options)
    bucket = location.address.removeprefix(f"{location.scheme}://").partition("/")[0]
    try:
        s3 = resolve(config, client, bucket)
        resolved = s3.for_obstore()
    except OptionError as error:
        raise OptionError(f"cannot open {location}: {secrets.hide(str(error))}") from None
    except Exception as error:  # of botocore: files that it cannot read, profiles that are not there
        raise OptionError(f"cannot open {location}: {secrets.first_line(error)}") from None
    if s3.root_certificates:
        client["root_certificate"] = s3.root_certificates
    kept = {name: value for name, value in config.items() if name not in _RESOLVED}
    return StoreSettings(location, {**kept, **resolved}, client, s3)


def _provider_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the option that obstore does not count among the configuration of a store."""
    return {name: value for name, value in config.items() if name == "credential_provider" and value}


def is_transient(error: Exception) -> bool:
    """Whether another attempt could succeed after an error of obstore."""
    if not isinstance(error, GenericError):
        return not isinstance(error, _PERMANENT)
    status = _status(error)
    return not _lacks_ranges(error) and (not 400 <= status < 500 or status in _PASSING)


def _status(error: Exception) -> int:
    """Returns the status of the response that an error of obstore is about; 0 if there is none."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found is not None else 0


def get_range(store: Any, key: str, offset: int, nbytes: int) -> Any:
    """Requests a range of an object; returns obstore's result, which may hold less if the object ends."""
    try:
        return obstore.get(store, key, options={"range": (offset, offset + nbytes)})
    except (GenericError, NotSupportedError) as error:
        if offset or not (_lacks_ranges(error) or _status(error) == _NO_SUCH_RANGE):
            raise
        # A server may send all of an object if that is what the range covers (RFC 9110, 14.2). An empty one
        # has no ranges.
        result = obstore.get(store, key)
        if result.meta["size"] > nbytes:
            raise  # without reading the body, which may be of any size
        return result


class Ranges:
    """Reads ranges of the objects of a store.

    Args:
        settings: The settings of the store.
        connections: For what obstore does not receive.
        note_first_byte: Called with the seconds from each request to its answer.

    Attributes:
        store: The obstore store.
        connections: As given.
    """

    def __init__(
        self, settings: StoreSettings, connections: IdleConnections, note_first_byte: Callable[[float], None]
    ) -> None:
        self.connections = connections
        # Without retries of obstore: those of fastload know the deadline and all transient errors.
        self.store: Any = settings.make(retry={"max_retries": 0})
        self._note_first_byte = note_first_byte
        self._direct: DirectBodies | None = None
        address_of = _addresses(settings, self.store)
        if address_of is not None and DirectBodies.takes(settings.client):
            self._direct = DirectBodies(address_of, settings.client, connections, note_first_byte)

    def read(self, key: str, offset: int, buffers: Sequence[memoryview]) -> tuple[int, Mapping[str, Any]]:
        """Reads a range into buffers.

        Returns:
            How much of it there was, and the object's metadata as obstore has it.
        """
        nbytes = sum(map(len, buffers))
        if self._direct is not None and nbytes > _PART_BYTES:
            meta = self._direct.read(key, offset, buffers)
            if meta is not None:
                return nbytes, meta
        asked_s = time.monotonic()
        result = get_range(self.store, key, offset, nbytes)
        self._note_first_byte(time.monotonic() - asked_s)
        return _receive(result, buffers), result.meta


def _addresses(settings: StoreSettings, store: Any) -> Callable[[str], str] | None:
    """Returns what gives the URL of a key, which is all that a client needs; None if there is none."""
    if settings.s3 is not None:
        if settings.s3.is_unsigned or settings.s3.has_headers_of_reads:
            return None
        return lambda key: str(obstore.sign(store, "GET", key, _SIGNED_FOR))
    if settings.location.scheme not in HTTP:
        return None
    path, mark, query = _without_user(settings.location.address).partition("?")
    return lambda key: f"{'/'.join(filter(None, (path, quote(key))))}{mark}{query}"


def _receive(result: Any, buffers: Sequence[memoryview]) -> int:
    """Copies the body of a response into buffers; returns how much of it there was.

    A long one is copied while it arrives: all of it at once would be fresh memory for each request, whose
    pages the kernel has to clear. Parts are short, since obstore copies each while it holds Python's lock. Of
    a body that is too long no more is read than shows that it is. A short one takes less processor time at
    once.

    Args:
        result: A result of `get_range`, whose body is not read yet.
        buffers: Their total length is that of the range.
    """
    num_read, nbytes = 0, sum(map(len, buffers))
    parts = [result.bytes()] if nbytes <= _PART_BYTES else result.stream(min_chunk_size=_PART_BYTES)
    for part in parts:
        data = memoryview(part)
        num_read += len(data)
        taken, buffers = take(buffers, len(data))
        fill(taken, data)
        if num_read > nbytes:
            break
    return num_read


def advice(error: Exception) -> str:
    """Returns advice to add to the message of an error of obstore; empty if there is none."""
    if _lacks_ranges(error):
        return " (it answers ranges with status 200, not 206: " + (
            "`rclone serve http` does it right)"
            if isinstance(error, NotSupportedError)
            else "as `rclone serve s3` does; SeaweedFS and MinIO do it right)"
        )
    if isinstance(error, GenericError) and _NO_KEYS.search(str(error)):
        return " (no AWS_ACCESS_KEY_ID in the environment, no profile in ~/.aws)"
    if _EXPIRED in str(error):
        return " (the session token; those of a profile in ~/.aws are renewed)"
    return ""


def _has_expired(error: Exception) -> bool:
    """Whether a store refuses a session token for its age; responses to HEAD do not say why."""
    text = str(error)
    return _EXPIRED in text or ("Error performing HEAD " in text and _status(error) == 400)


def _lacks_ranges(error: Exception) -> bool:
    """Whether the server does not support range requests. Only for HTTP this error has its own type."""
    if isinstance(error, GenericError):
        return _NO_RANGES.match(str(error)) is not None
    return isinstance(error, NotSupportedError)


def _with_header(headers: Any, name: str, value: str) -> Any:
    """Adds a header, unless the user gives one of that name."""
    given = dict(headers or {})
    return given if name.lower() in map(str.lower, given) else {**given, name: value}


def _without_user(url: str) -> str:
    scheme, _, rest = url.partition("://")
    host = re.split("[/?]", rest, maxsplit=1)[0]
    return f"{scheme}://{rest[host.rfind('@') + 1 :]}"


def _quoted(url: str) -> str:
    """Quotes the key in a URL, as obstore expects."""
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    return f"{scheme}://{host}/{quote(path)}"


class ObjectStorage(WritableStorage):
    """Access through obstore, which has its own network threads. HTTP can only be read.

    A checkpoint costs one list request, and one range request for each header and each chunk.

    Args:
        location: Location of the root.
        names: Names of files of a checkpoint.
        options: Configuration of the store, in addition to the environment.
        patience: The number of attempts, and the time for them.

    Attributes:
        url: URL of the root, for messages.
        settings: The settings of the store.
        patience: As given.

    Raises:
        OptionError: The store does not accept the URL or an option.
    """

    def __init__(
        self, location: Location, names: Names, options: Mapping[str, Any], patience: Patience
    ) -> None:
        super().__init__(location)
        self.patience = patience
        self.secrets = Secrets(location, options)
        self._names = names
        self._is_http = location.scheme in HTTP
        is_signed = _is_signed(location, names)
        self._takes_head = not is_signed
        self._is_file = is_signed or _is_file(location, names)
        # The root of an HTTP store is the URL itself, with its query; that of others is above the last name.
        root, self._root = (location, "") if self._is_http else _split(location)
        self.settings = settings_of(root, options, attempt_s=patience.attempt_s)
        self._ranges = Ranges(self.settings, IdleConnections(), self.note_first_byte)
        self._known: dict[str, FileStat | None] = {}  # None: a guess that was wrong
        self._heads: dict[str, bytes] = {}  # what was read for metadata, for the next read of each
        self._listed: dict[tuple[str, str], str] = {}  # versions in listings, by name and own version

    @property
    def store(self) -> Any:
        """The obstore store."""
        return self._ranges.store

    def stat(self, name: str) -> FileStat | None:
        if name in self._known:
            return self._known[name]
        if not self._is_http and not self._key(name):
            return None  # a bucket is not an object, though some stores say so
        reads = self._is_http and not self._is_file
        is_guess = reads and name in ("", *self._names.likely)
        try:
            if is_guess:
                found = self._guess(name)
            elif reads and name.endswith(self._names.file_endings):  # whose header is read next
                found, _ = self._stat_by_reading(name, _NEAR_BYTES)
            else:
                found = _stat(self._call(name, self._ask_for_stat))
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            found = None
        if is_guess or found is not None:
            self._known[name] = found
        return found

    def _guess(self, name: str) -> FileStat | None:
        """Returns size and version; None for a page, which some servers show for names that they lack."""
        found, first = self._stat_by_reading(name, FIRST_BYTES)
        if is_page(first[:HEAD_BYTES]):
            self._heads.pop(name, None)
            return None
        return found

    def _stat_by_reading(self, name: str, nbytes: int) -> tuple[FileStat, bytes]:
        """Requests size and version by a read of the first bytes, which are kept for the next read."""

        def ask(key: str) -> tuple[Any, bytes]:
            asked_s = time.monotonic()
            try:
                result = get_range(self.store, key, 0, nbytes)
                self.note_first_byte(time.monotonic() - asked_s)
                return result.meta, bytes(result.bytes())
            except (GenericError, NotSupportedError) as error:
                if not _lacks_ranges(error):
                    raise
                result = obstore.get(self.store, key)
                return result.meta, next((bytes(part) for part in result.stream(min_chunk_size=1)), b"")

        meta, first = self._call(name, ask)
        if len(self._heads) < _MAX_HEADS:  # more take a second request
            self._heads[name] = first
        return _stat(meta), first

    def _ask_for_stat(self, key: str) -> Any:
        """Requests size and version; where only GET is allowed, by a read of the first byte."""
        if self._takes_head:
            try:
                return obstore.head(self.store, key)
            except (GenericError, PermissionDeniedError, FileNotFoundError) as error:
                if _status(error) not in _NO_HEAD:
                    raise
        meta = get_range(self.store, key, 0, 1).meta
        self._takes_head = False
        return meta

    def _guess_listing(self) -> list[str] | None:
        """Requests all likely names at once; returns the first one that is there."""

        def look(name: str) -> FileStat | StorageError | None:
            try:
                return self.stat(name)
            except StorageError as error:
                return error

        likely = self._names.likely
        for name, found in zip(likely, in_threads(look, likely, len(likely)), strict=True):
            if isinstance(found, StorageError):
                if found.transient or name != likely[0]:  # a server that denies access to it counts as none
                    raise found
            elif found is not None:
                return [name]
        return None

    def list(self) -> list[str] | None:
        if self._is_file:
            return None
        if self._is_http:  # HTTP has no listing: probe the likely names
            return self._guess_listing()
        found = self._call("", self._objects)
        # A version other than an ETag may be spelled in another way in the responses to GET.
        self._known.update({name: _stat(meta) for name, meta in found.items() if meta.get("e_tag")})
        return sorted(found) or None

    def _objects(self, key: str) -> dict[str, Mapping[str, Any]]:
        """Lists the objects directly below a key, by name."""
        found = obstore.list_with_delimiter(self.store, key or None)["objects"]
        # Some stores and tools keep an empty object with the name of the folder itself.
        return {meta["path"].rsplit("/", 1)[-1]: meta for meta in found if meta["path"] != key}

    def folders(self, prefix: str = "") -> Mapping[str, Folder]:
        if self._is_http:
            listed = self._listed_by_server()
            return {name: folder for name, folder in listed.items() if name.startswith(prefix)}
        found: dict[str, dict[str, FileStat]] = {}
        for path, about in self._call("", lambda key: self._below(key, prefix)):
            folder, _, name = path.partition("/")
            files = found.setdefault(folder, {})
            if "/" not in name:
                files[name] = about
        return {name: Folder(files) for name, files in sorted(found.items())}

    def _listed_by_server(self) -> Mapping[str, Folder]:
        """Returns the directories in the answer of a server to its URL, if an extension understands it."""

        def get(key: str) -> bytes:
            result = obstore.get(self.store, key)
            return bytes(result.bytes()) if result.meta["size"] <= _MAX_LISTING_BYTES else b""

        text = self._call("", get)
        for each in extensions("listings").values():
            parse: Callable[[bytes], Mapping[str, Folder] | None] = each.load()
            if (found := parse(text)) is not None:
                return found
        raise StorageError("HTTP has no listing of directories", self.url)

    @property
    def _is_sorted(self) -> bool:
        """Whether objects are listed in order, as in all buckets but directory buckets of S3."""
        s3 = self.settings.s3
        return s3 is None or not is_on(s3.options.get("s3_express"))

    def _below(self, key: str, prefix: str) -> Sequence[tuple[str, FileStat]]:
        """Lists all objects below folders with this prefix, page by page."""
        root = f"{key}/" if key else ""
        found = []
        start = root + prefix if prefix != "." else ""  # which obstore takes for no name
        for page in obstore.list(self.store, key or None, offset=start or None, chunk_size=_PAGE):
            paths = [(meta["path"].removeprefix(root), meta) for meta in page]
            found += [(p, _stat(meta)) for p, meta in paths if p.startswith(prefix) and "/" in p]
            if self._is_sorted and paths[-1][0] > prefix + _LAST:
                break
        return found

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], version: str = "") -> None:
        nbytes = sum(map(len, buffers))
        if nbytes == 0:
            return
        first, known = self._heads.pop(name, b""), self._known.get(name)
        if offset + nbytes <= len(first) and known is not None and version in ("", known.version):
            return self.fill(name, offset, buffers, first[offset : offset + nbytes])

        def read(key: str) -> tuple[int, Mapping[str, Any]]:
            return self._ranges.read(key, offset, buffers)

        num_read, meta = self._call(name, read, offset, nbytes)
        found = _stat(meta)
        if version and not self._is_same(name, found, version):
            raise StorageError(_REPLACED, self.label(name), offset, nbytes)
        self.note_read(name, offset, nbytes, num_read, found.nbytes)

    def read_all(self, name: str, about: FileStat) -> bytes:
        def get(key: str) -> bytes | None:
            # Without a range: some servers ignore one that covers the whole object.
            result = obstore.get(self.store, key)
            found = _stat(result.meta)
            if found.nbytes != about.nbytes or not self._is_same(name, found, about.version):
                return None
            return bytes(result.bytes())

        data = self._call(name, get, 0, about.nbytes)
        if data is None:
            raise StorageError(_REPLACED, self.label(name), 0, about.nbytes)
        self._count.add(len(data))
        return data

    def _is_same(self, name: str, found: FileStat, version: str) -> bool:
        """Whether what was read is the object of a version, which may be that of a listing.

        The listings of some gateways have ETags of their own. There, an object is the one that was listed if
        a listing still has that version, and the object is the same afterwards as when it was read.
        """
        if version in (found.version, self._listed.get((name, found.version))):
            return True
        if self._is_http:  # which has no listings
            return False
        try:
            listed = self._listed_now(name)
            now = _stat(self._call(name, self._ask_for_stat))
        except StorageError as error:
            if error.transient:
                raise
            return False  # there are no listings, or it has been deleted
        if listed is None or listed.version != version or now.version != found.version:
            return False
        # A listing from a cache is older; responses to GET have no fractions of seconds.
        if abs(listed.modified_s - found.modified_s) >= 1 or listed.nbytes != found.nbytes:
            return False
        self._listed[name, found.version] = version
        return True

    def _listed_now(self, name: str) -> FileStat | None:
        """Returns what a listing has of a file at this moment; None if it is not there."""
        folder, _, last = self._key(name).rpartition("/")
        meta = self._call("", lambda _: self._objects(folder)).get(last)
        return None if meta is None else _stat(meta)

    # Saves. Errors are those of obstore

    @cached_property
    def _store_for_writers(self) -> Any:
        """A store with retries, for writers, which send by themselves; its pauses outlast 5 s."""
        init, most = timedelta(seconds=2 * FIRST_BACKOFF_S), timedelta(seconds=MAX_BACKOFF_S)
        retry = {
            "max_retries": self.patience.retries,
            "retry_timeout": timedelta(seconds=self.patience.timeout_s),
            "backoff": {"init_backoff": init, "max_backoff": most, "base": 2},
        }
        return self.settings.make(retry=retry)

    def _ask(self, call: Callable[[], T]) -> T:
        return patiently(partial(self.renewing, call, _has_expired), is_transient, self.patience)

    def renewing(self, call: Callable[[], T], has_expired: Callable[[Exception], bool]) -> T:
        """Makes a request, once more if the store says that credentials of a profile have expired."""
        credentials = self.settings.s3.credentials if self.settings.s3 is not None else None
        if credentials is None:
            return call()
        number = credentials.number
        try:
            return call()
        except Exception as error:
            if not has_expired(error):
                raise
            credentials.renew(number)
        return call()

    def get(self, name: str) -> bytes | None:
        try:
            return self._ask(lambda: bytes(obstore.get(self.store, self._key(name)).bytes()))
        except FileNotFoundError:
            return None

    def put(self, name: str, content: bytes, *, fresh: bool = False) -> bool:
        def put() -> bool:
            try:
                obstore.put(self.store, key, content, mode="create" if fresh else "overwrite")
            except AlreadyExistsError:
                return False
            except NotImplementedError:  # the user disabled conditional puts, for a store without them
                obstore.put(self.store, key, content)
            return True

        key = self._key(name)
        return self._ask(put)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._ask(partial(obstore.delete, self.store, self._key(name)))

    def files(self, folder: str) -> dict[str, int]:
        found = self._ask(partial(self._objects, self._key(folder)))
        return {name: meta["size"] for name, meta in found.items()}

    def modified_s(self, name: str) -> float:
        try:
            return _stat(self._ask(partial(obstore.head, self.store, self._key(name)))).modified_s
        except FileNotFoundError:
            return math.inf

    def move(self, name: str, to: str) -> None:
        # Two separate retries: if the response to a deletion is lost, there is nothing left to copy.
        if isinstance(self.store, AzureStore):
            self._copy_on_azure(name, to)
        else:
            self._ask(partial(obstore.copy, self.store, self._key(name), self._key(to)))
        self.delete([name])

    def _copy_on_azure(self, name: str, to: str) -> None:
        """Copies an object where the store may go on with it after its response."""
        address = _quoted(self.settings.location.address)
        try:
            url = self._ask(partial(url_of, self.store, address, self._key(to)))
        except BaseError:  # of a user without the permission, so that nobody could ask for the copy's status
            writer = self.writer(to)
            for part in self._ask(partial(obstore.get, self.store, self._key(name))).stream(_WRITER_BYTES):
                writer.write(memoryview(part))
            writer.close()
            return
        self._ask(partial(obstore.copy, self.store, self._key(name), self._key(to)))
        wait_for_copy(url, self.settings.client, timeout_s=self.patience.timeout_s)

    def writer(self, name: str) -> ObjectWriter:
        writer: ObjectWriter = obstore.open_writer(
            self._store_for_writers,
            self._key(name),
            buffer_size=_WRITER_BYTES,
            max_concurrency=_WRITER_REQUESTS,
        )
        return writer

    def close(self) -> None:
        self._known.clear()
        self._heads.clear()
        self._ranges.connections.close()

    def _key(self, name: str) -> str:
        return "/".join(part for part in (self._root, name) if part)

    def _call(
        self, name: str, ask: Callable[[str], T], offset: int | None = None, nbytes: int | None = None
    ) -> T:
        with self.secrets.errors(self.label(name), offset, nbytes, is_transient=is_transient, advice=advice):
            return self._ask(partial(ask, self._key(name)))


def _split(location: Location) -> tuple[Location, str]:
    """Returns the parent of a location on an object store, and the name below it."""
    parent, _, name = location.address.removeprefix(f"{location.scheme}://").rpartition("/")
    return (locate(f"{location.scheme}://{parent}"), name) if parent else (location, "")


def _is_file(location: Location, names: Names) -> bool:
    """Whether a URL names one file, by its path or in its query."""
    path = location.url if location.scheme not in HTTP else unquote(location.url)
    is_blob = "sr=b" in location.query.split("&")  # an Azure signature for one blob
    query = unquote(location.query)
    return path.endswith(names.single_endings) or any(end in query for end in names.single_endings) or is_blob


def _is_signed(location: Location, names: Names) -> bool:
    """Whether a URL is signed for reads of one object, as S3, Google and others do.

    Raises:
        OptionError: The object names other objects, which the signature does not cover.
    """
    keys = {pair.partition("=")[0].lower() for pair in location.query.split("&")}
    if not keys & _SIGNATURES or "policy" in keys:  # which may cover several objects, and writes
        return False
    if location.url.endswith(".json"):
        raise OptionError(
            f"cannot open {location}: it is signed for this one file, which names others: sign the URL of a "
            f"{' or '.join(names.file_endings)} file"
        )
    return True


def _stat(meta: Mapping[str, Any]) -> FileStat:
    tag = (meta.get("e_tag") or "").strip('"')  # quoted in answers, bare in some listings
    modified = meta.get("last_modified")
    return FileStat(meta["size"], tag or str(modified or ""), modified.timestamp() if modified else 0.0)
