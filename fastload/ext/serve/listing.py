"""The answer of a server to its URL, as a listing of directories: for runs that a trainer serves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastload.storage import FileStat, Folder


def parse_listing(text: bytes) -> Mapping[str, Folder] | None:
    """Returns the checkpoints of a server, by name; None if it is no server of fastload."""
    try:
        index = json.loads(text)
        if "fastload" not in index:
            return None
        return {
            name: Folder(_files_of(about))
            for name, about in sorted(index["checkpoints"].items())
            if about["ranges"] is None
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _files_of(about: Mapping[str, Any]) -> dict[str, FileStat]:
    return {str(path): FileStat(int(nbytes), str(about["digest"])) for path, nbytes in about["files"].items()}
