"""The files to stage: all files of a directory, those next to the checkpoint's included; or one file."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import unquote, urlsplit

from fastload.errors import ManifestError, OptionError
from fastload.formats.manifest import FileEntry, Manifest
from fastload.formats.names import SAVING_NAME, STAGED_NAME
from fastload.formats.reading import stat_all
from fastload.formats.untrusted import is_plain_path, show
from fastload.loading.access import Access
from fastload.storage import PatientStorage
from fastload.storage.location import HTTP

_NO_PART = frozenset(("", SAVING_NAME, STAGED_NAME))


def as_folder(manifest: Manifest) -> Manifest:
    """Returns the manifest of the copy: a single file has its name in the directory of the copy.

    Raises:
        OptionError: The checkpoint has subdirectories, or the name of the file is reserved.
    """
    names = [file.name for file in manifest.files]
    if nested := [name for name in names if "/" in name]:
        raise OptionError(f"{manifest.url} has files in directories, which are not staged: {show(nested)}")
    if not _is_file(manifest):
        return manifest
    name = _last_name(manifest.url)
    if not is_plain_path(name) or name in _NO_PART:
        raise OptionError(f"{manifest.url}: a copy of one file has its name, which {show(name)} cannot be")
    return replace(manifest, files=(replace(manifest.files[0], name=name),))


def at_source(manifest: Manifest, files: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
    """Returns the files of a copy by their names at the source; a single file has none there."""
    return manifest.files if _is_file(manifest) else files


def copied_to(manifest: Manifest, folder: str) -> str:
    """Returns the path to load a copy from."""
    return posixpath.join(folder, _last_name(manifest.url)) if _is_file(manifest) else folder


def _is_file(manifest: Manifest) -> bool:
    return [file.name for file in manifest.files] == [""]


def _last_name(url: str) -> str:
    scheme = url.partition("://")[0]
    return unquote(posixpath.basename(urlsplit(url).path)) if scheme in HTTP else posixpath.basename(url)


def list_others(storage: PatientStorage, manifest: Manifest) -> list[FileEntry]:
    """Returns the files directly below the root that the manifest does not name."""
    named = {file.name for file in manifest.files}
    names = sorted(set(storage.list() or ()) - named - _NO_PART)
    if bad := [name for name in names if not is_plain_path(name) or "/" in name]:
        raise ManifestError(f"{storage.url}: not plain file names: {show(bad)}")
    stats = stat_all(storage, names)
    return [FileEntry(name, stats[name].nbytes, stats[name].version, "") for name in names]


def essence(manifest: Manifest) -> str:
    """Returns a digest of everything but the URL and the versions of files."""
    files = tuple(replace(file, version="") for file in manifest.files)
    return replace(manifest, url="", files=files).digest()


def changed(access: Access, files: Sequence[FileEntry]) -> str:
    """Returns which file differs from the one that the first reader listed; empty if none does."""
    for file in files:
        found = access.storage.stat(file.name)
        if found is None or (found.nbytes, found.version) != (file.nbytes, file.version):
            return f"sees another {file.name} than rank {access.readers[0]}"
    return ""
