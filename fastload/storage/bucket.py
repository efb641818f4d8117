"""What a target needs of an object store besides the writing of large files, through obstore or fsspec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property, partial
from os import PathLike
from typing import Any, Protocol, TypeVar

from fastload.storage.location import OBJECT_STORES, locate
from fastload.storage.remote import open_file_system
from fastload.storage.retry import FIRST_BACKOFF_S, MAX_BACKOFF_S, patiently
from fastload.storage.secrets import Secrets
from fastload.storage.target import pending_name

__all__ = ["Bucket", "FsspecBucket", "Keys", "ObstoreBucket", "Writer"]

T = TypeVar("T")

_WRITER_BYTES = 16 << 20
_WRITER_REQUESTS = 4


class Writer(Protocol):
    """An object that is being written from its first byte to its last; it is there once closed."""

    def write(self, data: memoryview, /) -> object: ...

    def close(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of what one save has on a store, below the parent of the checkpoint.

    Attributes:
        name: The checkpoint's.
        token: The save's.
    """

    name: str
    token: str

    @property
    def folder(self) -> str:
        """Prefix of what is pending."""
        return pending_name(self.name, self.token)

    @property
    def owner(self) -> str:
        """Key of what says who saves: the first that is there, and the last."""
        return self.pending("owner.json")

    def pending(self, name: str) -> str:
        """Returns the key of a file as long as it is pending."""
        return f"{self.folder}/{name}"

    def published(self, name: str) -> str:
        """Returns the key of a file of the checkpoint."""
        return f"{self.name}/{name}"


class Bucket(Protocol):
    """The objects below a prefix; keys are relative to it. Errors are those of the library.

    Attributes:
        secrets: What must not be shown of those errors.
    """

    secrets: Secrets

    def get(self, key: str) -> bytes | None:
        """Returns an object, or None if there is none."""
        ...

    def put(self, key: str, content: bytes, *, fresh: bool = False) -> bool:
        """Writes an object.

        Args:
            key: Its key.
            content: All of it.
            fresh: Only if there is none, where the store can do that; elsewhere it means nothing.

        Returns:
            Whether it was written.
        """
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects, in that order; those that are not there as well."""
        ...

    def delete_folder(self, folder: str) -> None:
        """Deletes all objects below a prefix."""
        ...

    def files(self, folder: str) -> dict[str, int]:
        """Returns name → bytes of the objects directly below a prefix."""
        ...

    def folders(self) -> list[str]:
        """Returns the names of the prefixes directly below the root."""
        ...

    def modified_s(self, key: str) -> float:
        """Returns when an object was written, in seconds since 1970; infinity if there is none."""
        ...

    def move(self, key: str, to: str) -> None:
        """Renames an object, without its bytes coming here."""
        ...

    def writer(self, key: str) -> Writer:
        """Begins to write an object."""
        ...


class ObstoreBucket:
    """Access through obstore.

    Args:
        url: Root, with its scheme.
        options: Configuration of the store, as obstore takes it, beyond what the environment says.
        timeout_s: Longest time in seconds for one request with its retries.
        attempt_s: Longest time in seconds for one attempt.
        retries: Further attempts.
    """

    def __init__(
        self,
        url: str | PathLike[str],
        options: Mapping[str, Any],
        *,
        timeout_s: float,
        attempt_s: float,
        retries: int,
    ) -> None:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        from fastload.storage.stores import is_transient, make_store

        self.secrets = Secrets(locate(url), options)
        self._api: Any = obstore
        self._exists = AlreadyExistsError
        self._patience: dict[str, Any] = {"retries": retries, "timeout_s": timeout_s}
        self._is_transient = is_transient
        self._is_remote = locate(url).scheme in OBJECT_STORES
        self._make = partial(make_store, url, options, attempt_s=attempt_s)
        # No retries in there: its own are over too soon, and not after every error that may pass.
        self.store: Any = self._make(retry={"max_retries": 0})

    @cached_property
    def _store_for_writers(self) -> Any:
        """The same with retries, since a writer sends by itself; its pauses outlast an outage of 5 s, too."""
        if not self._is_remote:
            return self.store
        backoff = {
            "init_backoff": timedelta(seconds=2 * FIRST_BACKOFF_S),
            "max_backoff": timedelta(seconds=MAX_BACKOFF_S),
            "base": 2,
        }
        retry = {
            "max_retries": self._patience["retries"],
            "retry_timeout": timedelta(seconds=self._patience["timeout_s"]),
            "backoff": backoff,
        }
        return self._make(retry=retry)

    def _ask(self, call: Callable[[], T]) -> T:
        return patiently(call, self._is_transient, **self._patience)

    def get(self, key: str) -> bytes | None:
        try:
            return self._ask(lambda: bytes(self._api.get(self.store, key).bytes()))
        except FileNotFoundError:
            return None

    def put(self, key: str, content: bytes, *, fresh: bool = False) -> bool:
        def put() -> bool:
            try:
                self._api.put(self.store, key, content, mode="create" if fresh else "overwrite")
            except self._exists:
                return False
            except NotImplementedError:  # the user turned conditions off, for a store that refuses them
                self._api.put(self.store, key, content)
            return True

        return self._ask(put)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with suppress(FileNotFoundError):
                self._ask(partial(self._api.delete, self.store, key))

    def delete_folder(self, folder: str) -> None:
        self.delete([f"{folder}/{name}" for name in self.files(folder)])

    def files(self, folder: str) -> dict[str, int]:
        found = self._ask(lambda: self._api.list_with_delimiter(self.store, folder))["objects"]
        # Some stores and tools keep an empty object by the name of the folder itself.
        return {meta["path"].rsplit("/", 1)[-1]: meta["size"] for meta in found if meta["path"] != folder}

    def folders(self) -> list[str]:
        found = self._ask(lambda: self._api.list_with_delimiter(self.store))["common_prefixes"]
        return sorted(path.strip("/").rsplit("/", 1)[-1] for path in found)

    def modified_s(self, key: str) -> float:
        try:
            modified: datetime = self._ask(lambda: self._api.head(self.store, key))["last_modified"]
        except FileNotFoundError:
            return float("inf")
        return modified.timestamp()

    def move(self, key: str, to: str) -> None:
        # One after the other, since after a deletion whose answer was lost there is nothing to be copied.
        self._ask(lambda: self._api.copy(self.store, key, to))
        self.delete([key])

    def writer(self, key: str) -> Writer:
        writer: Writer = self._api.open_writer(
            self._store_for_writers, key, buffer_size=_WRITER_BYTES, max_concurrency=_WRITER_REQUESTS
        )
        return writer


class FsspecBucket:
    """Access through an fsspec file system.

    Args:
        url: Root, with its scheme.
        options: Arguments of the fsspec file system.
    """

    def __init__(self, url: str | PathLike[str], options: Mapping[str, Any]) -> None:
        self.secrets = Secrets(locate(url), options)
        self._files, self._root = open_file_system(url, options)

    def get(self, key: str) -> bytes | None:
        try:
            return bytes(self._files.cat_file(self._path(key)))
        except FileNotFoundError:
            return None

    def put(self, key: str, content: bytes, *, fresh: bool = False) -> bool:
        self._make_folder(key)
        self._files.pipe_file(self._path(key), content)
        return True

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            try:
                self._files.rm_file(self._path(key))
            except FileNotFoundError:
                continue

    def delete_folder(self, folder: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm(self._path(folder), recursive=True)

    def files(self, folder: str) -> dict[str, int]:
        return {name: info["size"] for name, info in self._list(folder) if info["type"] == "file"}

    def folders(self) -> list[str]:
        return sorted(name for name, info in self._list("") if info["type"] == "directory")

    def modified_s(self, key: str) -> float:
        try:
            modified: datetime = self._files.modified(self._path(key))
        except FileNotFoundError:
            return float("inf")
        return modified.timestamp()

    def move(self, key: str, to: str) -> None:
        self._make_folder(to)
        self._files.mv(self._path(key), self._path(to))

    def writer(self, key: str) -> Writer:
        self._make_folder(key)
        writer: Writer = self._files.open(self._path(key), "wb")
        return writer

    def _list(self, folder: str) -> list[tuple[str, Any]]:
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return []
        return [(info["name"].rstrip("/").rsplit("/", 1)[-1], info) for info in found]

    def _make_folder(self, key: str) -> None:
        self._files.makedirs(self._path(key).rpartition("/")[0], exist_ok=True)

    def _path(self, key: str) -> str:
        return f"{self._root.rstrip('/')}/{key}" if key else self._root
