"""Names of the files of checkpoints; storage gets them as `NAMES`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fastload.storage.base import Names

RECORD_NAME = "fastload.json"
"""The commit record, the last file of a checkpoint to be written: without it there is no checkpoint."""
SAVING_NAME = "fastload.saving.json"
"""On object stores, the owner file next to the files while they are published; without a record, what is
there is the rest of a save that has not ended, or never will."""
STAGED_NAME = ".fastload-stage.json"
"""What a staged copy holds next to its files: which checkpoint it is a copy of, and how its files were."""

METADATA_NAME = ".metadata"
"""What torch.distributed.checkpoint writes last: which tensors lie where."""

SUFFIX = ".safetensors"
BIN_NAME, BIN_INDEX_NAME = "pytorch_model.bin", "pytorch_model.bin.index.json"
"""As transformers once called what it saved with torch.save."""
INDEX_SUFFIX = ".safetensors.index.json"
INDEX_NAME = "model.safetensors.index.json"
OWN_STEM = "ranks"
"""What the files with the ranks' own tensors are called, in place of ``model``."""
TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".tar")

_METADATA_OF_RANK = re.compile(r"__(\d{1,9})\.metadata")
_FILE_OF_DCP = re.compile(r"(__\d{1,9})?\.metadata(\.tmp)?|__\d{1,9}_\d{1,9}\.distcp")
_ALWAYS_OWN = frozenset((RECORD_NAME, SAVING_NAME, STAGED_NAME))
_FILE_OF_A_SAVE = re.compile(rf"(model|{OWN_STEM})(?P<shard>-\d{{5,}}-of-\d{{5,}})?\.safetensors")


def file_name(number: int, num_files: int, stem: str = "model") -> str:
    """Returns the name of one of the files of a save, counted from 0."""
    if num_files == 1:
        return f"{stem}{SUFFIX}"
    return f"{stem}-{number + 1:05}-of-{num_files:05}{SUFFIX}"


def metadata_names(listing: Sequence[str]) -> list[str]:
    """Returns the name of DCP's metadata, or the names of those of each rank, in the order of ranks."""
    if METADATA_NAME in listing:
        return [METADATA_NAME]
    found = {int(match[1]): match[0] for match in map(_METADATA_OF_RANK.fullmatch, listing) if match}
    return [found[rank] for rank in sorted(found)]


def own_names(there: Iterable[str], lists: Sequence[bytes]) -> set[str]:
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
        own.add(INDEX_NAME)  # which a save writes beside several files
    return (own | _ALWAYS_OWN) & set(there)


def _listed(text: bytes) -> set[str] | None:
    try:
        return {str(file["name"]) for file in json.loads(text)["files"]}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


NAMES = Names(
    record=RECORD_NAME,
    owner=SAVING_NAME,
    receipt=STAGED_NAME,
    likely=(RECORD_NAME, INDEX_NAME, f"model{SUFFIX}", BIN_INDEX_NAME, BIN_NAME, METADATA_NAME),
    file_endings=(SUFFIX,),
    single_endings=(SUFFIX, *TORCH_ENDINGS),
    part_endings=(SUFFIX, INDEX_SUFFIX),
    own=own_names,
)


def _own_names_or_dcp(there: Iterable[str], lists: Sequence[bytes]) -> set[str]:
    return own_names(there, lists) if lists else set(filter(_FILE_OF_DCP.fullmatch, there))


DCP_NAMES = replace(NAMES, others=(METADATA_NAME, "__0.metadata", "__0_0.distcp"), own=_own_names_or_dcp)
"""For saves that replace what torch.distributed.checkpoint saved, too."""
