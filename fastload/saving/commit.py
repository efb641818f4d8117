"""The single step that makes a checkpoint exist, once every byte of it is known to be durable."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fastload.errors import StorageError
from fastload.formats.names import INDEX_NAME, RECORD_NAME
from fastload.formats.record import CHECKSUM_BYTES, Record, RecordedFile, checksum
from fastload.saving.hashing import Checksums
from fastload.saving.layout import Layout, LayoutFile
from fastload.saving.per_rank import OwnFiles
from fastload.storage import Target

__all__ = ["pack", "publish"]


def pack(receipt: Mapping[str, Any], checksums: Checksums) -> bytes:
    """Packs what a rank has to tell its leader."""
    sums = {file: [[first, text.hex()] for first, text in parts] for file, parts in checksums.items()}
    return json.dumps({"receipt": receipt, "checksums": sums}).encode()


def publish(
    target: Target,
    layout: Layout,
    packed: Sequence[bytes],
    *,
    structure: Any,
    own: OwnFiles,
    metadata: Mapping[str, str],
    overwrite: bool,
) -> None:
    """Writes index, the ranks' own values and commit record, and makes the checkpoint exist.

    Args:
        target: Where all ranks have written.
        layout: The files.
        packed: What each of the ranks packed.
        structure: The state but for its tensors.
        own: What the ranks have of their own.
        metadata: Text of the user's.
        overwrite: Whether a checkpoint that is there may be replaced.

    Raises:
        StorageError: Bytes or checksums are missing, or storage failed.
        CheckpointExists: Another save was faster.
    """
    told = [json.loads(text) for text in packed]
    files = _recorded(layout, [each["checksums"] for each in told], target.url)
    small_files = [(INDEX_NAME, layout.index)] if layout.index is not None else []
    small_files += zip((file.name for file in own.files), own.contents, strict=True)
    files += tuple(map(partial(_record_own, layout.block_bytes), own.files, own.contents))
    record = Record(
        block_bytes=layout.block_bytes,
        files=files,
        state=structure,
        metadata=metadata,
    )
    small_files.append((RECORD_NAME, record.to_bytes()))
    target.publish([each["receipt"] for each in told], small_files, overwrite=overwrite)


def _record_own(block_bytes: int, file: LayoutFile, content: bytes) -> RecordedFile:
    sums = bytearray()
    for entry in file.tensors:
        end = entry.offset + entry.nbytes
        for begin in range(entry.offset, end, block_bytes):
            sums += checksum(content[begin : min(begin + block_bytes, end)])
    return RecordedFile(file.name, file.nbytes, len(file.header), checksum(file.header), bytes(sums))


def _recorded(layout: Layout, checksums: Sequence[dict[str, Any]], url: str) -> tuple[RecordedFile, ...]:
    files = []
    for index, file in enumerate(layout.files):
        parts = sorted(part for each in checksums for part in each.get(str(index), ()))
        wanted, sums = layout.first_block(index + 1) - layout.first_block(index), bytearray()
        for first, text in parts:
            if first * CHECKSUM_BYTES != len(sums):
                break
            sums += bytes.fromhex(text)
        if len(sums) != wanted * CHECKSUM_BYTES:
            found = len(sums) // CHECKSUM_BYTES
            raise StorageError(f"nobody hashed block {found} of {wanted}", url=f"{url}/{file.name}")
        files.append(
            RecordedFile(file.name, file.nbytes, len(file.header), checksum(file.header), bytes(sums))
        )
    return tuple(files)
