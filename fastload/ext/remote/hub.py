"""The Hugging Face hub: the files of a repository, as of one commit.

huggingface_hub finds the token, the cache and the address of each file; obstore reads ranges of it. The
version of a file names the commit and the content, so that all ranks read what the first one listed.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from huggingface_hub import constants, get_hf_file_metadata
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status
from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

from fastload.base.version import __version__
from fastload.errors import CheckpointNotFound, FastloadError, OptionError, StorageError
from fastload.ext.remote.direct import IdleConnections
from fastload.ext.remote.obstore import Ranges, StoreSettings, advice, is_transient, settings_of
from fastload.storage.base import FileStat, Folder, Storage
from fastload.storage.local import LocalStorage, hub_blob
from fastload.storage.location import HTTP, Location, Secrets, locate

_log = logging.getLogger(__name__)

_URL = re.compile(
    r"hf://(?:(?P<kind>model|dataset|space)s/)?(?P<repo>[^/@]+/[^/@]+|[^/@]+(?=@|$))"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<path>.+))?",
    re.DOTALL,
)
_BUCKET = re.compile(r"hf://buckets/(?P<namespace>[^/]+)/(?P<name>.+)", re.DOTALL)
_BUCKETS = "https://s3.hf.co"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_VERSION = re.compile(r"(?P<commit>[0-9a-f]{40}):(?P<content>[0-9a-f]{40}|[0-9a-f]{64}|)")
_SHA_256_DIGITS = 64
_OPTIONS = frozenset("cache_dir endpoint token".split())
_MAX_REFERENCE = 100
_NOT_FOUND, _TOO_MANY = 404, 429
_MAX_PAGES = 1000  # of a listing, 1000 files each
_REPLACED = "it was replaced while it was read"
_REFUSED = (PermissionDeniedError, UnauthenticatedError, FileNotFoundError)


@dataclass(frozen=True)
class _Source:
    """A file at the address that the hub redirects to.

    Attributes:
        ranges: Reads it; without the token, unless the hub itself has the file.
        nbytes: Its size, as the hub knows it; None if it does not say.
        tags: ETag of its first responses.
    """

    ranges: Ranges
    nbytes: int | None
    tags: list[str]


class _Repository:
    """A repository of the hub: one request for each call, and errors that say what to do.

    Args:
        location: The URL that names it.
        options: ``token`` and ``endpoint``, instead of those of the environment.
        attempt_s: Longest time in seconds for one request.

    Attributes:
        revision: The branch, tag or commit in the URL, or the default one.
        path: Path in the repository; empty for its root.
        kind: ``model``, ``dataset`` or ``space``.
        name: Its name, such as ``org/model``.
        secrets: Redacts the token.
    """

    def __init__(self, location: Location, options: Mapping[str, Any], attempt_s: float) -> None:
        if bucket := _BUCKET.fullmatch(location.address):
            raise OptionError(
                f"path={location.url!r}: open a storage bucket of the hub as S3: s3://{bucket['name']} with "
                f"the endpoint {_BUCKETS}/{bucket['namespace']} and S3 keys of your token"
            )
        found = _URL.fullmatch(location.address)
        self.path = (found and found["path"]) or ""
        if found is None or (self.path and not _is_plain(self.path)):
            raise OptionError(f"path={location.url!r}: must be hf://org/name[@revision][/path]")
        self.name, self.kind = found["repo"], found["kind"] or "model"
        self.revision = unquote(found["revision"] or constants.DEFAULT_REVISION)
        self._url = location.url
        self._endpoint = str(options.get("endpoint") or constants.ENDPOINT).rstrip("/")
        self._page = f"{self._endpoint}/{'' if self.kind == 'model' else f'{self.kind}s/'}{self.name}"
        self._attempt_s = attempt_s
        self._token = options.get("token")
        try:
            self._headers = build_hf_headers(
                token=self._token, library_name="fastload", library_version=__version__
            )
        except LocalTokenNotFoundError as error:
            raise OptionError(f"cannot open {location}: token={self._token!r}: {error}") from None
        self.secrets = Secrets(location, {"token": self._headers.get("authorization", "")})

    def commit(self) -> str:
        """Returns the commit of the revision."""
        answer = self._get(f"revision/{quote(self.revision, safe='')}")
        with self.errors(self._url):
            commit = answer.json()["sha"]
            if not _COMMIT.fullmatch(commit):
                raise ValueError(f"commit {commit!r}")
            return str(commit)

    def look_up(self, commit: str, path: str) -> FileStat | None:
        """Returns size and version of one file; None if there is none."""
        with self.errors(self._url):
            answer = get_session().post(
                self._api(f"paths-info/{commit}"),
                headers=self._headers,
                data={"paths": [path], "expand": False},
                timeout=self._attempt_s,
            )
            hf_raise_for_status(answer)
            found = [entry for entry in answer.json() if entry["path"] == path and entry["type"] == "file"]
            return _stat(commit, found[0]) if found else None

    def entries(self, commit: str, path: str, *, recursive: bool = False) -> dict[str, FileStat | None]:
        """Returns the files below a path, by name relative to it; directories are None."""
        found: dict[str, FileStat | None] = {}
        url = f"tree/{commit}/{quote(path)}".rstrip("/")
        answer = self._get(url, [("recursive", str(recursive).lower())])
        start = f"{path}/" if path else ""
        for _ in range(_MAX_PAGES):
            if answer.status_code == _NOT_FOUND:
                return {}
            with self.errors(self._url):
                for entry in answer.json():
                    name = str(entry["path"]).removeprefix(start)
                    found[name] = _stat(commit, entry) if entry["type"] == "file" else None
                following = answer.links.get("next", {}).get("url")
                if following is None:
                    return found
                # The links of a mirror may name the hub itself, so only their query counts.
                query = parse_qsl(urlsplit(following).query, keep_blank_values=True)
            answer = self._get(url, query)
        raise StorageError("its listing has too many pages", self._url)

    def source(self, commit: str, path: str, content: str) -> tuple[StoreSettings, int | None]:
        """Asks for the address of a file. Another host than the hub never gets the token.

        Args:
            commit: Its commit.
            path: Its path in the repository.
            content: Its ETag; empty to accept any.

        Returns:
            The settings of its store, and its size; None if the hub does not say.
        """
        found = get_hf_file_metadata(
            f"{self._page}/resolve/{commit}/{quote(path)}",
            token=self._token,
            timeout=self._attempt_s,
            library_name="fastload",
            library_version=__version__,
            endpoint=self._endpoint,
        )
        if content and found.etag != content:
            raise StorageError(_REPLACED, self._url)
        location, hub = locate(found.location), urlsplit(self._endpoint)
        if location.scheme not in HTTP or (hub.scheme, location.scheme) == ("https", "http"):
            raise StorageError(f"the hub redirects to {location}, which is not https", self._url)
        headers = {"User-Agent": self._headers["user-agent"]}
        if urlsplit(location.address)[:2] == hub[:2] and "authorization" in self._headers:
            headers["Authorization"] = self._headers["authorization"]
        options = {"default_headers": headers}
        return settings_of(location, options, attempt_s=self._attempt_s), found.size

    def _get(self, what: str, query: Sequence[tuple[str, str]] = ()) -> Any:
        """Requests JSON; a path that is not in the repository is status 404."""
        with self.errors(self._url):
            answer = get_session().get(
                self._api(what), headers=self._headers, params=list(query), timeout=self._attempt_s
            )
            if answer.headers.get("X-Error-Code") != "EntryNotFound":
                hf_raise_for_status(answer)
            return answer

    def _api(self, what: str) -> str:
        return f"{self._endpoint}/api/{self.kind}s/{self.name}/{what}"

    @contextmanager
    def errors(self, url: str, offset: int | None = None, nbytes: int | None = None) -> Iterator[None]:
        """Turns errors of huggingface_hub into errors that say what to do.

        Args:
            url: URL of the file, to print.
            offset: First byte of the request.
            nbytes: Length of the request in bytes.
        """
        try:
            yield
        except OfflineModeIsEnabled:
            raise
        except StorageError as error:
            error.url, error.offset, error.nbytes = url, offset, nbytes
            raise
        except FastloadError:
            raise
        except Exception as error:
            raise self._explained(error, (url, offset, nbytes)) from None

    def _explained(self, error: Exception, place: tuple[str, int | None, int | None]) -> FastloadError:
        log_in = "log in with `hf auth login`, or set HF_TOKEN, on every host"
        if isinstance(error, GatedRepoError):
            return StorageError(f"it is gated: accept its conditions at {self._page}, and {log_in}", *place)
        if isinstance(error, RepositoryNotFoundError):
            return CheckpointNotFound(
                f"{self._url}: {self._endpoint} has no such {self.kind}, or it is private: check its name; "
                f"if it is private, {log_in}"
            )
        if isinstance(error, RevisionNotFoundError):
            return CheckpointNotFound(
                f"{self._url}: it has no revision {self.revision!r}: see {self._page}/tree/main"
            )
        if isinstance(error, HFValidationError):
            return OptionError(f"{self._url}: {error}")
        if not isinstance(error, HfHubHTTPError):
            malformed = isinstance(error, ValueError | LookupError | TypeError | AttributeError)
            what = "the hub's answer is malformed" if malformed else "no answer from the hub"
            return StorageError(f"{what}: {self.secrets.first_line(error)}", *place, transient=not malformed)
        status, headers = error.response.status_code, error.response.headers
        if status == _TOO_MANY:
            wait_s = _retry_after_s(headers)
            asked = f", which asks to wait for {wait_s:g} s" if wait_s else ""
            message = f"too many requests to the hub (HTTP 429){asked}: try again later; for more, {log_in}"
            return StorageError(message, *place, transient=True, retry_after_s=wait_s)
        known = {
            401: f"the hub refuses the token: {log_in}",
            403: f"the token may not read it: {log_in} with one that may",
            _NOT_FOUND: "there is no such file",
        }
        message = known.get(status, f"the hub: {self.secrets.first_line(error)}")
        return StorageError(message, *place, transient=not 400 <= status < 500 or status == 408)


class HubStorage(Storage):
    """Read access to a repository, or a file or directory in it.

    A checkpoint costs two requests to the hub for its commit and its listing, and one for the address of each
    file on each rank that reads it. A file in the hub's cache on this host is read from there; in offline
    mode (``HF_HUB_OFFLINE``) all files are.

    Args:
        location: ``hf://[datasets/|spaces/]org/name[@revision][/path]``.
        options: ``token``, ``endpoint`` and ``cache_dir``, instead of those of the environment.
        io: How to read files of the cache: ``auto``, ``buffered`` or ``direct``.
        attempt_s: Longest time in seconds for one request.

    Raises:
        OptionError: The URL or an option is invalid.
    """

    def __init__(
        self, location: Location, options: Mapping[str, Any], *, io: str = "auto", attempt_s: float
    ) -> None:
        super().__init__(location)
        if unknown := sorted(options.keys() - _OPTIONS):
            raise OptionError(
                f"cannot open {location}: its storage_options are {sorted(_OPTIONS)}, not {unknown}"
            )
        self._repository = repository = _Repository(location, options, attempt_s)
        cache = os.path.expanduser(str(options.get("cache_dir") or constants.HF_HUB_CACHE))
        folder = repo_folder_name(repo_id=repository.name, repo_type=repository.kind)
        self._cache = LocalStorage(os.path.join(cache, folder), io)
        self._lock = threading.Lock()
        self._commit = repository.revision if _COMMIT.fullmatch(repository.revision) else ""
        self._known: dict[str, FileStat | None] = {}
        self._names: list[str] | None = None  # of the files directly in the root, if it is a directory
        self._connections = IdleConnections()  # to the servers of all files
        self._sources: dict[tuple[str, str], _Source] = {}
        self._asking: dict[tuple[str, str], threading.Lock] = {}

    @property
    def bytes_read(self) -> int:
        return super().bytes_read + self._cache.bytes_read

    @property
    def direct_bytes_read(self) -> int:
        return self._cache.direct_bytes_read

    def stat(self, name: str) -> FileStat | None:
        with self._lock:
            self._list()
            if self._names is None:
                return None if name else self._known[""]
            if name not in self._known:
                path = self._in_repository(name)
                self._known[name] = self._repository.look_up(self._commit, path) if "/" in name else None
            return self._known[name]

    def list(self) -> list[str] | None:
        with self._lock:
            self._list()
            return self._names

    def folders(self, prefix: str = "") -> Mapping[str, Folder]:
        with self._lock:
            self._list()
            if self._names is None:
                return {}
            entries = self._repository.entries(self._commit, self._repository.path, recursive=True)
        found: dict[str, dict[str, FileStat]] = {}
        for path, about in entries.items():
            folder, mark, name = path.partition("/")
            if folder.startswith(prefix) and (mark or about is None):
                files = found.setdefault(folder, {})
                if name and "/" not in name and about is not None:
                    files[name] = about
        return {name: Folder(files) for name, files in sorted(found.items())}

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], version: str = "") -> None:
        nbytes = sum(map(len, buffers))
        if nbytes == 0:
            return
        if not version:
            listed = self.stat(name)
            if listed is None or not listed.version:
                raise StorageError("there is no such file", self.label(name), offset, nbytes)
            version = listed.version
        parts = _VERSION.fullmatch(version)
        if parts is None:
            raise StorageError(_REPLACED, self.label(name), offset, nbytes)
        commit, content = parts["commit"], parts["content"]
        blob = [f"blobs/{content}"] if content else []
        for cached in (*blob, f"snapshots/{commit}/{self._in_repository(name)}"):
            about = self._cache.stat(cached)
            if about is not None and about.nbytes >= offset + nbytes:  # else its download was cut off
                self._cache.read_into(cached, offset, buffers)
                return
        self._download(name, commit, content, offset, buffers)

    def share_reads(self, shared: bool) -> None:
        self._cache.share_reads(shared)

    def sha256(self, name: str, version: str) -> str:
        parts = _VERSION.fullmatch(version)
        return parts["content"] if parts and len(parts["content"]) == _SHA_256_DIGITS else ""

    def close(self) -> None:
        self._sources.clear()
        self._connections.close()
        self._cache.close()

    def _in_repository(self, name: str) -> str:
        return "/".join(part for part in (self._repository.path, name) if part)

    def _list(self) -> None:
        """Lists the root, once."""
        if "" in self._known:
            return
        repository = self._repository
        try:
            if not self._commit:
                self._commit = repository.commit()
                _log.info("%s: revision %s is commit %s", self.url, repository.revision, self._commit)
            file = repository.look_up(self._commit, repository.path) if repository.path else None
            entries = repository.entries(self._commit, repository.path) if file is None else {}
            files = {name: about for name, about in entries.items() if about is not None}
        except OfflineModeIsEnabled:
            file, files = self._list_cache()
            entries = dict(files)
        is_folder = file is None and bool(entries or not repository.path)
        self._names = sorted(files) if is_folder else None
        self._known = {**files, "": FileStat(0, "") if is_folder else file}

    def _list_cache(self) -> tuple[FileStat | None, dict[str, FileStat]]:
        """Lists the root in the cache: the file that it is, or the files in it."""
        reference = f"refs/{self._repository.revision}"
        if not self._commit and (about := self._cache.stat(reference)) is not None:
            commit = (
                self._cache.read_all(reference, about)[:_MAX_REFERENCE].decode("ascii", "replace").strip()
            )
            self._commit = commit if _COMMIT.fullmatch(commit) else ""
        folder = os.path.join(self._cache.url, "snapshots", self._commit or "-", self._repository.path)
        found: dict[str, FileStat] = {}
        with closing(LocalStorage(folder)) as root:
            for name in root.list() or [""]:
                if (about := root.stat(name)) is not None:
                    version = f"{self._commit}:{hub_blob(os.path.join(folder, name))}"
                    known = version if _VERSION.fullmatch(version) else f"{self._commit}:"
                    found[name] = FileStat(about.nbytes, known)
        if not found:
            raise CheckpointNotFound(
                f"{self.url}: not in {self._cache.url}, and HF_HUB_OFFLINE is set: unset it, or fetch the "
                "files with `hf download`"
            )
        return found.pop("", None), found

    def _download(
        self, name: str, commit: str, content: str, offset: int, buffers: Sequence[memoryview]
    ) -> None:
        nbytes, label, key = sum(map(len, buffers)), self.label(name), (name, commit)
        with self._lock:
            asking = self._asking.setdefault(key, threading.Lock())
        with asking, self._repository.errors(label, offset, nbytes):
            source = self._sources.get(key)
            if source is None:
                settings, size = self._repository.source(commit, self._in_repository(name), content)
                source = _Source(Ranges(settings, self._connections, self.note_first_byte), size, [])
                self._sources[key] = source
        worked, secrets = bool(source.tags), self._repository.secrets
        try:
            with secrets.errors(label, offset, nbytes, is_transient=is_transient, advice=advice):
                num_read, meta = source.ranges.read("", offset, buffers)
            tag = meta.get("e_tag") or ""
            if source.nbytes not in (None, meta["size"]) or (worked and source.tags[0] != tag):
                raise StorageError(_REPLACED, label, offset, nbytes)
            self.note_read(name, offset, nbytes, num_read, meta["size"])
        except StorageError as error:
            self._sources.pop(key, None)  # the next attempt asks for its address again, since this may have
            error.transient |= worked and isinstance(error.__cause__, _REFUSED)  # expired
            raise
        if not worked:
            source.tags.append(tag)


def _stat(commit: str, entry: Mapping[str, Any]) -> FileStat:
    content = (entry.get("lfs") or {}).get("oid") or entry["oid"]
    about = FileStat(int(entry["size"]), f"{commit}:{content}")
    if about.nbytes < 0 or not _VERSION.fullmatch(about.version):
        raise ValueError(f"entry of {entry['path']!r}")
    return about


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Returns the seconds to wait that a response asks for, or 0."""
    given = headers.get("retry-after") or ""
    if given.isdigit():
        return float(given)
    found = re.search(r"\bt=(\d+)", headers.get("ratelimit") or "")
    return float(found[1]) if found else 0.0


def _is_plain(path: str) -> bool:
    return not {"", ".", ".."} & set(path.split("/")) and path.isprintable()
