"""What is to be staged: all files of a directory, the checkpoint's and those beside them; or one file."""

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
    """Returns the manifest as it will be in the directory of a copy: a file by itself has its name there.

    Raises:
        OptionError: The checkpoint has directories, which a flat one cannot hold; or the file's name is none
            that a copy can have.
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
    """Returns files of a copy under the names that they are read by, where one by itself has none."""
    return manifest.files if _is_file(manifest) else files


def copied_to(manifest: Manifest, folder: str) -> str:
    """Returns where in the directory of a copy the checkpoint is: the path to load."""
    return posixpath.join(folder, _last_name(manifest.url)) if _is_file(manifest) else folder


def _is_file(manifest: Manifest) -> bool:
    return [file.name for file in manifest.files] == [""]


def _last_name(url: str) -> str:
    scheme = url.partition("://")[0]
    return unquote(posixpath.basename(urlsplit(url).path)) if scheme in HTTP else posixpath.basename(url)


def list_others(storage: PatientStorage, manifest: Manifest) -> list[FileEntry]:
    """Lists the files directly below the root that the manifest does not name."""
    named = {file.name for file in manifest.files}
    names = sorted(set(storage.list() or ()) - named - _NO_PART)
    if bad := [name for name in names if not is_plain_path(name) or "/" in name]:
        raise ManifestError(f"{storage.url}: not plain file names: {show(bad)}")
    stats = stat_all(storage, names)
    return [FileEntry(name, stats[name].nbytes, stats[name].version, "") for name in names]


def essence(manifest: Manifest) -> str:
    """Returns a digest of all but where and which very files they are."""
    files = tuple(replace(file, version="") for file in manifest.files)
    return replace(manifest, url="", files=files).digest()


def changed(access: Access, files: Sequence[FileEntry]) -> str:
    """Says which file is not, here and now, what it was on the rank that listed them; empty if none."""
    for file in files:
        found = access.storage.stat(file.name)
        if found is None or (found.nbytes, found.version) != (file.nbytes, file.version):
            return f"sees another {file.name} than rank {access.readers[0]}"
    return ""
