"""Names of the files of checkpoints, and how files of torch.save begin. Storage gets names as `NAMES`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice

from fastload.storage.base import Names

RECORD_NAME = "fastload.json"
"""The commit record, the last file of a checkpoint to be written: without it there is no checkpoint."""
SAVING_NAME = "fastload.saving.json"
"""The owner file next to the files on object stores while they are published. Without a record, the files
belong to a save that has not ended."""
CONFIG_NAME = "config.json"
"""The configuration of a model of Hugging Face."""
SEAL_NAME = "fastload.seal.json"
"""The checksums of a checkpoint that another program wrote; see `fastload.ext.checksums.seal`."""
STAGED_NAME = ".fastload-stage.json"
"""The receipt of a staged copy: the checkpoint it is a copy of, and its files."""

METADATA_NAME = ".metadata"
"""The index of torch.distributed.checkpoint, which it writes last."""

SHARDING_NAME = "metadata.pkl"
"""The index of torch_checkpointing."""

SUFFIX = ".safetensors"
BIN_NAME, BIN_INDEX_NAME = "pytorch_model.bin", "pytorch_model.bin.index.json"
"""The names of transformers for files of torch.save."""
BIN_SHARD = re.compile(r"pytorch_model-\d+-of-\d+\.bin")
"""One of several files, which their index names."""
INDEX_SUFFIX = ".safetensors.index.json"
MODEL_STEM = "model"
"""The first part of the names of the files of a save."""
ADAPTER_STEM = "adapter_model"
"""The first part of the name of the file of an adapter of PEFT, instead of ``model``."""
INDEX_NAME = "model.safetensors.index.json"
OWN_STEM = "ranks"
"""The first part of the names of files with the ranks' own tensors, instead of ``model``."""
DELTA_STEM = "delta"
"""The first part of the names of files with the changes of a delta checkpoint."""
TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".tar")

ZIP_STARTS = (b"PK\3\4", b"PK\5\6")
"""The first bytes of zip archives; the second ones of an empty archive."""
LEGACY_STARTS = (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",)  # 0x1950a86a20f9469cfc6c
"""The first bytes of files of torch.save from before torch 1.6."""
START_BYTES = 16
"""Bytes to read of a file to compare with these."""

_SHARD = re.compile(r"(?:shard-\d+-)?(?P<before>.*?)(?P<number>\d+)-of-(?P<count>\d+)(?P<after>\D.*)")
_NUMBERED = re.compile(r"(?P<before>consolidated\.)(?P<number>\d+)(?P<after>\.\D.*)")
_MOST_MISSING = 20  # which a message lists

_METADATA_OF_RANK = re.compile(r"__(\d{1,9})\.metadata")
_FILE_OF_DCP = re.compile(r"(__\d{1,9})?\.metadata(\.tmp)?|__\d{1,9}_\d{1,9}\.distcp|fastload\.seal\.json")
_ALWAYS_OWN = frozenset((RECORD_NAME, SAVING_NAME, SEAL_NAME, STAGED_NAME))
_FILE_OF_A_SAVE = re.compile(
    rf"({MODEL_STEM}|{ADAPTER_STEM}|{OWN_STEM}|{DELTA_STEM})(?P<shard>-\d{{5,}}-of-\d{{5,}})?\.safetensors"
)


def file_name(number: int, num_files: int, stem: str = MODEL_STEM) -> str:
    """Returns the name of one of the files of a save, counted from 0."""
    if num_files == 1:
        return f"{stem}{SUFFIX}"
    return f"{stem}-{number + 1:05}-of-{num_files:05}{SUFFIX}"


def metadata_names(listing: Sequence[str]) -> list[str]:
    """Returns the names of DCP's metadata: one for all ranks, or one for each, in the order of ranks."""
    if METADATA_NAME in listing:
        return [METADATA_NAME]
    by_rank = {int(match[1]): match[0] for match in map(_METADATA_OF_RANK.fullmatch, listing) if match}
    return [by_rank[rank] for rank in sorted(by_rank)]


def missing_files(names: Iterable[str]) -> list[str]:
    """Returns files that are missing according to the numbers in the names of others: the first ones.

    ``model-00001-of-00003.safetensors`` has two more next to it. Of a checkpoint of DCP
    (``shard-00000-model-00001-of-00003.safetensors``), some rank has a part of each.
    """
    groups: dict[tuple[str, str, str], dict[int, int]] = {}  # number → its digits
    for name in names:
        match = _SHARD.fullmatch(name) or _NUMBERED.fullmatch(name)
        if match:
            key = match["before"], match.groupdict().get("count", ""), match["after"]
            groups.setdefault(key, {})[int(match["number"])] = len(match["number"])
    missing: list[str] = []
    for (before, num_files, after), numbers in groups.items():
        missing += islice(_missing(before, num_files, after, numbers), _MOST_MISSING - len(missing))
    return missing


def _missing(before: str, num_files: str, after: str, there: dict[int, int]) -> Iterator[str]:
    width = min(there.values())
    end = int(num_files) if num_files else max(there) + 1
    counted = f"-of-{num_files}" if num_files else ""
    first = 0 if 0 in there or not num_files else 1
    for number in count(first):
        if number >= end + (first if num_files else 0):
            return
        if number not in there:
            yield f"{before}{number:0{width}}{counted}{after}"


def own_names(there: Iterable[str], lists: Sequence[bytes]) -> set[str]:
    """Returns the files of a directory that fastload has written.

    Args:
        there: The names of all files.
        lists: The texts of the commit record and the receipt, which name files. They are untrusted.

    Returns:
        The files that a list names. If no list can be read, the files whose names a save gives.
    """
    names = [_listed(text) for text in lists]
    known = [of_list for of_list in names if of_list is not None]
    listed = set().union(*known)
    if not known:
        listed = {name for name in there if _FILE_OF_A_SAVE.fullmatch(name)}
    if any((match := _FILE_OF_A_SAVE.fullmatch(name)) and match["shard"] for name in listed):
        listed.add(INDEX_NAME)  # which a save writes next to several files
    return (listed | _ALWAYS_OWN) & set(there)


def _listed(text: bytes) -> set[str] | None:
    try:
        return {str(file["name"]) for file in json.loads(text)["files"]}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


NAMES = Names(
    record=RECORD_NAME,
    owner=SAVING_NAME,
    receipt=STAGED_NAME,
    likely=(
        RECORD_NAME,
        INDEX_NAME,
        f"model{SUFFIX}",
        BIN_INDEX_NAME,
        BIN_NAME,
        METADATA_NAME,
        SHARDING_NAME,
    ),
    file_endings=(SUFFIX,),
    single_endings=(SUFFIX, *TORCH_ENDINGS),
    part_endings=(SUFFIX, INDEX_SUFFIX),
    own=own_names,
    to_replace="options=fastload.SaveOptions(overwrite=True)",
)


def own_names_or_dcp(there: Iterable[str], lists: Sequence[bytes]) -> set[str]:
    """Returns the files of a directory that fastload or torch.distributed.checkpoint has written."""
    return own_names(there, lists) if lists else set(filter(_FILE_OF_DCP.fullmatch, there))


DCP_NAMES = replace(NAMES, others=(METADATA_NAME, "__0.metadata", "__0_0.distcp"), own=own_names_or_dcp)
"""For saves that replace checkpoints of torch.distributed.checkpoint, too."""
