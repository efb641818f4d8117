"""S3, Google and Azure object stores, and HTTP: range requests through obstore."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import unquote

import obstore
from obstore.store import S3Store

from fastload.errors import OptionError, StorageError
from fastload.storage.base import ByteCounter, FileStat, Folder
from fastload.storage.location import HTTP, Location, locate
from fastload.storage.names import Names
from fastload.storage.secrets import Secrets
from fastload.storage.stores import advice, is_transient, make_store, s3_settings

__all__ = ["ObjectStorage"]

T = TypeVar("T")

_SIGNATURES = frozenset("x-amz-signature x-goog-signature signature".split())
_PAGE = 1000  # objects: as many as one answer of S3 lists
_REPLACED = "it was replaced while it was read"
_LAST = "\U0010ffff"  # comes after all other characters


class ObjectStorage:
    """Read access through obstore, which does the network in threads of its own.

    A whole checkpoint costs one list request, and one range request for each header and each chunk.

    Args:
        location: Root.
        names: What files of a checkpoint are called.
        options: Configuration of the store, as obstore takes it, beyond what the environment says.
        attempt_s: Longest time in seconds for one request; one that stalls is abandoned then.

    Raises:
        OptionError: The URL or an option is not one that the store takes.
    """

    shared = True
    probes = False
    in_order = False
    direct_bytes_read = 0

    def __init__(
        self, location: Location, names: Names, options: Mapping[str, Any], attempt_s: float
    ) -> None:
        self._url = location.url
        self._names = names
        self._secrets = Secrets(location, options)
        self._count = ByteCounter()
        self._is_http = location.scheme in HTTP
        self._is_signed = _is_signed(location, names)
        self._is_file = self._is_signed or _is_file(location, names)
        # HTTP's is opened where it is, with its query; of the others only the bucket is a URL.
        root, self._root = (location, "") if self._is_http else _split(location)
        # No retries in there: fastload's own know the deadline and are counted.
        self._store = make_store(root, options, attempt_s=attempt_s, retry={"max_retries": 0})
        # As buckets list their objects, but for directory buckets of S3.
        self._is_sorted = not (
            isinstance(self._store, S3Store) and s3_settings(self._store).get("s3_express")
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
        if not self._is_http and not self._key(name):
            return None  # a bucket is no object, whatever some stores say
        try:
            found = _stat(self._call(name, self._ask_for_stat))
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        self._known[name] = found
        return found

    def _ask_for_stat(self, key: str) -> Any:
        """Asks for size and version: where a signature is for reading, by reading the first byte."""
        if not self._is_signed:
            return obstore.head(self._store, key)
        return obstore.get(self._store, key, options={"range": (0, 1)}).meta

    def list(self) -> list[str] | None:
        if self._is_file:
            return None
        if self._is_http:  # which has no listing: look for what a listing would be searched for
            first, *others = self._names.likely
            if self._has(first):
                return [first]
            return next(([name] for name in others if self.stat(name) is not None), None)
        found = self._call("", lambda key: obstore.list_with_delimiter(self._store, key or None))
        # Some stores and tools keep an empty object by the name of the folder itself.
        files = [meta for meta in found["objects"] if meta["path"] != self._root]
        names = {meta["path"].rsplit("/", 1)[-1]: _stat(meta) for meta in files}
        self._known.update(names)
        return sorted(names) or None

    def folders(self, prefix: str = "") -> Mapping[str, Folder]:
        if self._is_http:
            raise self._error("HTTP has no listing of directories", "", None, None, transient=False)
        found: dict[str, dict[str, FileStat]] = {}
        for path, about in self._call("", lambda key: self._below(key, prefix)):
            folder, _, name = path.partition("/")
            files = found.setdefault(folder, {})
            if "/" not in name:
                files[name] = about
        return {name: Folder(files) for name, files in sorted(found.items())}

    def _below(self, key: str, prefix: str) -> Sequence[tuple[str, FileStat]]:
        """Lists what is in folders of such names, page by page, whatever its depth."""
        root = f"{key}/" if key else ""
        found = []
        for page in obstore.list(self._store, key or None, offset=root + prefix or None, chunk_size=_PAGE):
            paths = [(meta["path"].removeprefix(root), meta) for meta in page]
            found += [(p, _stat(meta)) for p, meta in paths if p.startswith(prefix) and "/" in p]
            if self._is_sorted and paths[-1][0] > prefix + _LAST:
                break
        return found

    def _has(self, name: str) -> bool:
        """Whether there is a file; a server that refuses to say has none."""
        try:
            return self.stat(name) is not None
        except StorageError as error:
            if error.transient:
                raise
            return False

    def read_into(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        version: str = "",
        via_cache: bool = False,
    ) -> None:
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
            raise self._error(_REPLACED, name, offset, nbytes, transient=False)
        if len(data) != nbytes:
            # Only an object that is too short is refused for good: a cut answer may come whole next time.
            message = f"got {len(data)} of {nbytes} bytes; the object has {found.nbytes}"
            raise self._error(message, name, offset, nbytes, transient=found.nbytes >= offset + nbytes)
        view, position = memoryview(data), 0
        for buffer in buffers:
            buffer[:] = view[position : position + len(buffer)]
            position += len(buffer)

    def read_all(self, name: str, about: FileStat) -> bytes:
        def get(key: str) -> bytes | None:
            # Without a range: some servers answer one that is the whole object as if there were none.
            result = obstore.get(self._store, key)
            found = _stat(result.meta)
            is_same = (found.nbytes, found.version) == (about.nbytes, about.version)
            return bytes(result.bytes()) if is_same else None

        data = self._call(name, get, 0, about.nbytes)
        if data is None:
            raise self._error(_REPLACED, name, 0, about.nbytes, transient=False)
        self._count.add(len(data))
        return data

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
            message = self._secrets.first_line(error) + advice(error)
            cause = self._secrets.clean(error)
            raise self._error(message, name, offset, nbytes, transient=is_transient(error)) from cause

    def _error(
        self, message: str, name: str, offset: int | None, nbytes: int | None, *, transient: bool
    ) -> StorageError:
        url = f"{self._url}/{name}" if name else self._url
        return StorageError(message, url=url, offset=offset, nbytes=nbytes, transient=transient)


def _split(location: Location) -> tuple[Location, str]:
    """Returns what is above a place on an object store, or its bucket, and the name below that."""
    parent, _, name = location.address.removeprefix(f"{location.scheme}://").rpartition("/")
    return (locate(f"{location.scheme}://{parent}"), name) if parent else (location, "")


def _is_file(location: Location, names: Names) -> bool:
    """Whether a URL names one file, by its path or, as of a download, in its query."""
    path = location.url if location.scheme not in HTTP else unquote(location.url)
    is_blob = "sr=b" in location.query.split("&")  # what Azure's signature is for
    query = unquote(location.query)
    return path.endswith(names.single_endings) or any(end in query for end in names.single_endings) or is_blob


def _is_signed(location: Location, names: Names) -> bool:
    """Whether a URL is signed for reading one object, by S3, Google or what does as they do.

    Raises:
        OptionError: That object is one that names others, which the signature is not for.
    """
    keys = {pair.partition("=")[0].lower() for pair in location.query.split("&")}
    if not keys & _SIGNATURES or "policy" in keys:  # which may be for many, and for more than reading
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
