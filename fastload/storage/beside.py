"""What stands beside the files of a checkpoint and is none of them: kept when the checkpoint is replaced."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from fastload.errors import CheckpointExists, OptionError
from fastload.storage.target import RECORD_NAME, SAVING_NAME, STAGED_NAME

__all__ = ["MAX_LIST_BYTES", "kept_names", "own_names", "replaced_names"]

MAX_LIST_BYTES = 1 << 30
"""Most bytes of a record or a receipt that are looked at."""

_ALWAYS_OWN = frozenset((RECORD_NAME, SAVING_NAME, STAGED_NAME))
_INDEX_NAME = "model.safetensors.index.json"
_FILE_OF_A_SAVE = re.compile(r"model(?P<shard>-\d{5,}-of-\d{5,})?\.safetensors")
_READ_AS_A_PART = (".safetensors", ".safetensors.index.json")


def own_names(there: Iterable[str], *lists: bytes) -> set[str]:
    """Returns which of the files at a place are fastload's own.

    Args:
        there: The names of all files.
        lists: The commit record, the receipt of a staged copy: what says which files there are. It comes
            from storage, and is only ever compared with what is there.

    Returns:
        Those that a list names. If none can be read, those that have the names that a save gives.
    """
    names = [_listed(text) for text in lists]
    known = [each for each in names if each is not None]
    own = set().union(*known)
    if not known:
        own = {name for name in there if _FILE_OF_A_SAVE.fullmatch(name)}
    if any((match := _FILE_OF_A_SAVE.fullmatch(name)) and match["shard"] for name in own):
        own.add(_INDEX_NAME)  # which a save writes beside several files
    return (own | _ALWAYS_OWN) & set(there)


def kept_names(url: str, there: Iterable[str], own: set[str], written: Iterable[str]) -> list[str]:
    """Returns the names of the files that are kept when a checkpoint is replaced.

    Args:
        url: Where it is.
        there: The names of all files there.
        own: Those that are fastload's own.
        written: The names of the files of the new checkpoint.

    Raises:
        OptionError: One of them would be replaced by a new file, or read as a part of the new checkpoint.
    """
    kept = sorted(set(there) - own)
    written = set(written)
    if bad := [name for name in kept if name in written or name.endswith(_READ_AS_A_PART)]:
        raise OptionError(
            f"{url} holds files that are not the checkpoint's, and that the new one would replace or be "
            f"mixed up with: {bad[:5]}: to replace the checkpoint, move them away"
        )
    return kept


def replaced_names(
    url: str,
    there: set[str],
    record: bytes | None,
    marked: Iterable[str],
    written: Iterable[str],
    *,
    overwrite: bool,
) -> set[str]:
    """Returns the names of what a new checkpoint on an object store takes the place of.

    Args:
        url: Where it will be.
        there: The names of all that is there.
        record: The commit record that is there, or None.
        marked: What a dead save's marker, if there is one, says may be there of that save.
        written: The names of the files of the new checkpoint.
        overwrite: Whether a checkpoint may be replaced.

    Raises:
        CheckpointExists: There is something, and `overwrite` is off.
        OptionError: It is no checkpoint, or as for `kept_names`.
    """
    if RECORD_NAME in there and not overwrite:
        raise CheckpointExists(f"{url} exists already: to replace it, ask for overwrite=True (--overwrite)")
    own = there & {SAVING_NAME, *marked}
    if RECORD_NAME in there:
        own |= own_names(there, record or b"")
    foreign = sorted(there - own)
    if RECORD_NAME not in there and foreign:
        if not overwrite:
            raise CheckpointExists(f"{url} holds something already: {foreign[:5]}")
        if SAVING_NAME not in there:
            raise OptionError(
                f"{url} has no {RECORD_NAME}: overwrite=True replaces checkpoints of fastload's only"
            )
    kept_names(url, there, own, written)
    return own


def _listed(text: bytes) -> set[str] | None:
    try:
        return {str(file["name"]) for file in json.loads(text)["files"]}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
