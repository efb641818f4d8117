"""What is to be staged: all files of a directory, those of the checkpoint and those beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastload.errors import ManifestError, OptionError
from fastload.formats.manifest import FileEntry, Manifest
from fastload.formats.names import SAVING_NAME, STAGED_NAME
from fastload.formats.reading import stat_all
from fastload.formats.untrusted import is_plain_path, show
from fastload.loading.access import Access
from fastload.storage import PatientStorage

__all__ = ["changed", "essence", "list_others", "require_folder"]

_NO_PART = frozenset(("", SAVING_NAME, STAGED_NAME))


def require_folder(manifest: Manifest) -> None:
    """Refuses what a flat directory cannot hold.

    Raises:
        OptionError: The checkpoint is one file, or has directories.
    """
    names = [file.name for file in manifest.files]
    if "" in names:
        raise OptionError(f"{manifest.url} is one file: stage takes the directory that it is in")
    if nested := [name for name in names if "/" in name]:
        raise OptionError(f"{manifest.url} has files in directories, which are not staged: {show(nested)}")


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
