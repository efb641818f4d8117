"""Formats of other packages: entry points of ``fastload.formats``, asked if no built-in one fits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from fastload.base.registry import extension, extensions
from fastload.errors import OptionError
from fastload.formats.manifest import Manifest
from fastload.storage.base import Storage

_log = logging.getLogger(__name__)

_KIND = "formats"


class Format(Protocol):
    """A format of checkpoints: an object, or a module with these names."""

    record: str
    """The file that describes the others, of which `Manifest.record_digest` is; empty if there is none."""

    def recognises(self, files: Sequence[str] | None, head: bytes) -> bool:
        """Returns whether a path is of this format, without reading more of it.

        Args:
            files: The names of the files of a directory; None of a single file.
            head: The first bytes of a single file, at most 16; else empty.
        """
        ...

    def read(self, storage: Storage, files: Sequence[str] | None, *, exact: bool) -> Manifest:
        """Reads the headers.

        Args:
            storage: The directory, or the file, whose name is empty.
            files: As for `recognises`.
            exact: Whether to read every layout, instead of inferring some and adding guards.

        Returns:
            The manifest, with the tensors in the order of their bytes.

        Raises:
            ManifestError: A file is malformed.
        """
        ...

    def digest(self, storage: Storage, name: str) -> str:
        """Returns what ranks compare of their copies of a file; empty if it is malformed.

        Args:
            storage: As for `read`.
            name: The record, of which this is `Manifest.record_digest`; or without a record one of the
                files, of which it is `FileEntry.header_digest`.
        """
        ...


class NamedFormat(NamedTuple):
    """A format with the name of its entry point, which is `Manifest.format`."""

    name: str
    format: Format

    def read(self, storage: Storage, files: Sequence[str] | None, *, exact: bool) -> Manifest:
        """Reads the headers; see `Format.read`."""
        manifest = self.format.read(storage, files, exact=exact)
        return manifest if manifest.format == self.name else replace(manifest, format=self.name)


def find_format(files: Sequence[str] | None, head: bytes) -> NamedFormat | None:
    """Asks the formats one after the other; see `Format.recognises`. None if none recognises the path."""
    for name, known in extensions(_KIND).items():
        try:
            found: Format = known.load()
        except OptionError as error:  # which the others do not need
            _log.warning("%s", error)
            continue
        if found.recognises(files, head):
            return NamedFormat(name, found)
    return None


def format_named(name: str) -> Format:
    """Returns the format of a manifest that another rank has read.

    Raises:
        OptionError: It is not installed here, or cannot be imported.
    """
    found: Format = extension(_KIND, name, f"a checkpoint of format {name!r}")
    return found


def asked_formats() -> str:
    """Returns which formats `find_format` asks, for messages."""
    return f"the formats of extensions ({', '.join(extensions(_KIND)) or 'none is installed'})"
