"""Storage systems: a `Storage` reads a checkpoint, a `Target` writes one."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import Any, Protocol

from fastload.base.registry import extension, extension_module, extensions
from fastload.errors import FastloadError, OptionError
from fastload.options import Patience
from fastload.storage import single_file
from fastload.storage.base import FileStat, Folder, Names, Storage, Target, WritableStorage, take
from fastload.storage.local import LocalStorage
from fastload.storage.location import (
    HTTP,
    OBJECT_STORES,
    SCHEME,
    Location,
    Secrets,
    local_directory,
    locate,
    name_of,
    redact,
)
from fastload.storage.process import registered_storages
from fastload.storage.reader import CheckpointReader, FileWithSibling
from fastload.storage.retry import PatientStorage

__all__ = [
    "CheckpointReader",
    "FileStat",
    "FileWithSibling",
    "Folder",
    "Location",
    "Names",
    "PatientStorage",
    "Storage",
    "StorageOpener",
    "Target",
    "WritableStorage",
    "local_directory",
    "locate",
    "name_of",
    "open_patiently",
    "open_storage",
    "open_target",
    "open_with_sibling",
    "put_next_to",
    "redact",
    "register_storage",
    "require_packages",
    "require_writable",
    "take",
]

_S3 = frozenset("s3 s3a".split())
_HUB = "hf"  # which fsspec knows, too: it would read slowly
_READ_ONLY = HTTP | {_HUB}
_PATIENCE = Patience()


class StorageOpener(Protocol):
    """Opens the URLs of a scheme that fastload does not know: an entry point of ``fastload.storages``.

    The name of the entry point is the scheme.
    """

    def __call__(
        self, location: Location, options: Mapping[str, Any], *, io: str, patience: Patience
    ) -> Storage:
        """Opens a storage, without a request. Its ``TypeError`` and ``ValueError`` become `OptionError`.

        Args:
            location: The URL.
            options: ``storage_options`` of the caller.
            io: How to read local files, such as those of a cache: ``auto``, ``buffered`` or ``direct``.
            patience: Gives the longest time for one request. The caller tries again.

        Raises:
            OptionError: The URL or an option is invalid, or a package is missing.
        """


def register_storage(scheme: str, factory: Callable[..., Storage]) -> None:
    """Registers a storage for the URLs of a scheme, in this process.

    It takes the place of any other storage for them, those of obstore and fsspec included. Every rank has to
    register it, at import for example.

    Args:
        scheme: The text before ``://``, such as ``"mystore"``.
        factory: A subclass of `Storage`, or of `WritableStorage` for saves; or a function that returns one.
            Called as ``factory(url, **storage_options)``, once for each load or save, on each rank. Its
            ``TypeError`` and ``ValueError`` become `OptionError`.

    Raises:
        OptionError: It is no scheme, or one of this host's files.
    """
    if not isinstance(scheme, str) or not re.fullmatch(SCHEME, scheme) or scheme.lower() == "file":
        raise OptionError(f"scheme={scheme!r}: must be the text before :// of a URL, other than file")
    registered_storages[scheme.lower()] = factory


def open_storage(
    path: str | os.PathLike[str],
    names: Names,
    options: Mapping[str, Any] | None = None,
    *,
    io: str = "auto",
    patience: Patience = _PATIENCE,
) -> Storage:
    """Opens read access to a local path, or a URL that obstore, an extension or fsspec supports.

    Makes no request yet.

    Args:
        path: Path, URL or `Location`.
        names: Names of files of a checkpoint.
        options: Passed to obstore, the extension or fsspec, in addition to the environment.
        io: How to read local files: ``auto``, ``buffered`` or ``direct``.
        patience: Gives the longest time for one request to an object store. Nothing is retried.

    Raises:
        OptionError: The path or URL is invalid, its scheme unknown, or a package is missing.
        StorageError: The file system connects at once, and that failed.
    """
    location = locate(path)
    if not location.scheme:
        return LocalStorage(location.address, io)
    return _open_url(location, names, options or {}, patience._replace(retries=0), io)


def open_patiently(
    path: str | os.PathLike[str],
    names: Names,
    options: Mapping[str, Any] | None = None,
    *,
    io: str = "auto",
    patience: Patience,
) -> PatientStorage:
    """Opens read access, with retries; other arguments and errors are those of `open_storage`."""
    return PatientStorage(open_storage(path, names, options, io=io, patience=patience), patience)


def open_with_sibling(
    path: str | os.PathLike[str],
    names: Names,
    options: Mapping[str, Any] | None = None,
    *,
    sibling: str,
    io: str = "auto",
    patience: Patience,
) -> CheckpointReader:
    """Opens read access, with retries, to a checkpoint; of a single file, also to a file next to it.

    Args:
        path: As for `open_storage`.
        names: As for `open_storage`.
        options: As for `open_storage`.
        sibling: What the file next to it is called after a dot; its name below the root of the reader.
        io: As for `open_storage`.
        patience: As for `open_patiently`.

    Raises:
        OptionError: As for `open_storage`.
    """
    location = locate(path)
    reader = open_patiently(location, names, options, io=io, patience=patience)
    if (place := location.next_to_file(sibling)) is None:
        return reader
    open_sibling = partial(open_patiently, place, names, options, io=io, patience=patience)
    return FileWithSibling(reader, sibling, open_sibling)


def open_target(
    path: str | os.PathLike[str],
    names: Names,
    options: Mapping[str, Any] | None = None,
    *,
    io: str = "auto",
    patience: Patience = _PATIENCE,
) -> Target:
    """Opens write access to a new checkpoint at a local path or a URL.

    Makes no request yet.

    Args:
        path: Path, URL or `Location`.
        names: Names of files of a checkpoint.
        options: As for `open_storage`.
        io: How to write local files: ``auto``, ``buffered`` or ``direct``.
        patience: The number of attempts at a request to an object store, and the time for them.

    Raises:
        OptionError: The URL cannot be written to, or a package is missing.
    """
    location = locate(path)
    scheme, url = location.scheme, location.address
    if not scheme:
        from fastload.storage.local_target import LocalTarget

        return LocalTarget(url, names, io=io)
    require_writable(location)
    parent, _, name = url.removeprefix(f"{scheme}://").rpartition("/")
    if not name or (scheme in OBJECT_STORES and not parent):
        raise OptionError(f"cannot save to {location}: name a path below the bucket")
    from fastload.storage.object_target import ObjectTarget, Streams

    options = options or {}
    root = locate(f"{scheme}://{parent}")
    if scheme in _S3 - registered_storages.keys():
        require_packages(root, "remote", "obstore")
        uploads = extension_module("remote.s3")
        s3 = uploads.S3Storage(root, names, options, patience)
        return ObjectTarget(location.url, s3, name, names, uploads.Multipart(s3, names))
    parent_storage = _open_writable(root, names, options, patience)
    streams = Streams(parent_storage, timeout_s=patience.timeout_s)
    return ObjectTarget(location.url, parent_storage, name, names, streams)


def require_writable(location: Location) -> None:
    """Requires a URL of a kind of storage that can be written to.

    Raises:
        OptionError: It can only be read.
    """
    if location.scheme in _READ_ONLY - registered_storages.keys():
        raise OptionError(f"cannot save to {location}: {location.scheme}:// can only be read")


def put_next_to(
    place: Location,
    names: Names,
    name: str,
    content: bytes,
    options: Mapping[str, Any] | None = None,
    *,
    patience: Patience,
) -> None:
    """Writes or replaces a small file next to those of a checkpoint.

    Args:
        place: Location of the checkpoint.
        names: Names of files of a checkpoint.
        name: Name of the file, without ``/``.
        content: All of its bytes.
        options: As for `open_storage`.
        patience: As for `open_target`.

    Raises:
        StorageError: It cannot be written.
    """
    if not place.scheme:
        single_file.replace(os.path.join(place.address, name), content)
        return
    storage = _open_writable(place, names, options or {}, patience)
    with closing(storage), storage.secrets.errors(f"{place.url}/{name}"):
        storage.put(name, content)


def _open_url(
    location: Location, names: Names, options: Mapping[str, Any], patience: Patience, io: str = "auto"
) -> Storage:
    if factory := registered_storages.get(location.scheme):
        return _open_guarded(location, options, lambda: factory(location.address, **options))
    if location.scheme in OBJECT_STORES | HTTP:
        require_packages(location, "remote", "obstore")
        obstore = extension_module("remote.obstore")
        return obstore.ObjectStorage(location, names, options, patience)  # type: ignore[no-any-return]
    if location.scheme == _HUB or location.scheme in extensions("storages"):
        opener: StorageOpener = extension("storages", location.scheme, f"{location.scheme}://")
        open_own = partial(opener, location, options, io=io, patience=patience)
        return _open_guarded(location, options, open_own)
    return extension_module("remote.fsspec").FsspecStorage(location, options)  # type: ignore[no-any-return]


def _open_guarded(location: Location, options: Mapping[str, Any], open_own: Callable[[], Storage]) -> Storage:
    """Opens a storage whose code is not fastload's; its errors are fastload's, without credentials."""
    secrets = Secrets(location, options)
    with secrets.errors(location.url):
        try:
            storage = open_own()
        except FastloadError:
            raise
        except (TypeError, ValueError) as error:
            why = secrets.hide(str(error))
            raise OptionError(f"cannot open {location}: {why}") from secrets.clean(error)
    if not isinstance(storage, Storage):
        kind = type(storage).__name__
        raise OptionError(f"cannot open {location}: its factory returned {kind}, not a fastload.Storage")
    storage.secrets = secrets
    return storage


def _open_writable(
    root: Location, names: Names, options: Mapping[str, Any], patience: Patience
) -> WritableStorage:
    storage = _open_url(root, names, options, patience)
    if not isinstance(storage, WritableStorage):
        storage.close()
        raise OptionError(
            f"cannot save to {root}: {type(storage).__name__} is for loads only; derive it from "
            "fastload.WritableStorage"
        )
    return storage


def require_packages(location: Location, extra: str, *packages: str) -> None:
    """Requires the packages for a URL, which an extra installs.

    Raises:
        OptionError: One is missing.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise OptionError(f"{location.scheme}:// needs {package}: pip install 'fastload-torch[{extra}]'")
