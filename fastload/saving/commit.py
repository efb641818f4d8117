"""The commit: one step that makes a checkpoint exist, once all its bytes are durable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from fastload.errors import StorageError
from fastload.formats.manifest import Delta
from fastload.formats.names import INDEX_NAME, RECORD_NAME
from fastload.formats.record import CHECKSUM_BYTES, Record, RecordedFile, checksum
from fastload.saving.call import SaveCall
from fastload.saving.layout import Layout, LayoutFile
from fastload.saving.per_rank import PerRankFiles, collect_own
from fastload.saving.plan import SavePlan
from fastload.saving.write import WriteReceipt, WriteResult, collect_receipts


def commit(
    call: SaveCall,
    plan: SavePlan,
    result: WriteResult,
    metadata: Mapping[str, str],
    delta: Delta | None = None,
) -> PerRankFiles:
    """Writes the index, the ranks' own values and the commit record, and publishes the checkpoint.

    Args:
        call: The leader's call.
        plan: Its plan.
        result: What the ranks have written.
        metadata: The user's text.
        delta: The base, if the files are those of a delta.

    Returns:
        The files with the ranks' own values.

    Raises:
        StorageError: Bytes or checksums are missing, or storage failed.
        CheckpointExists: Another save has made this checkpoint.
    """
    state, layout, target = plan.state, plan.state.layout, plan.target
    structure, own = collect_own(
        call.world, call.what, state.own, state.content.structure, layout.block_bytes
    )
    receipts = collect_receipts(call.world, plan.group, result, what=call.what)
    record = Record(
        block_bytes=layout.block_bytes,
        files=(
            *_recorded(layout, receipts, target.url),
            *map(partial(_record_own, layout.block_bytes), own.files, own.contents),
        ),
        state=structure,
        metadata=metadata,
        delta=delta,
    )
    small_files = [(INDEX_NAME, layout.index)] if layout.index is not None else []
    small_files += zip((file.name for file in own.files), own.contents, strict=True)
    small_files.append((RECORD_NAME, record.to_bytes()))
    target.publish([each.written for each in receipts], small_files)
    return own


def _record_own(block_bytes: int, file: LayoutFile, content: bytes) -> RecordedFile:
    sums = bytearray()
    for entry in file.tensors:
        end = entry.offset + entry.nbytes
        for begin in range(entry.offset, end, block_bytes):
            sums += checksum(content[begin : min(begin + block_bytes, end)])
    return RecordedFile(file.name, file.nbytes, len(file.header), checksum(file.header), bytes(sums))


def _recorded(layout: Layout, receipts: Sequence[WriteReceipt], url: str) -> tuple[RecordedFile, ...]:
    found = bytearray()
    for first, digests in sorted(row for receipt in receipts for row in receipt.checksums):
        if first * CHECKSUM_BYTES == len(found):
            found += bytes.fromhex(digests)
    files = []
    for index, file in enumerate(layout.files):
        first, end = layout.first_block(index), layout.first_block(index + 1)
        sums = bytes(found[first * CHECKSUM_BYTES : end * CHECKSUM_BYTES])
        if len(sums) != (end - first) * CHECKSUM_BYTES:
            missing = len(sums) // CHECKSUM_BYTES
            raise StorageError(f"no rank hashed block {missing} of {end - first}", url=f"{url}/{file.name}")
        files.append(RecordedFile(file.name, file.nbytes, len(file.header), checksum(file.header), sums))
    return tuple(files)
