"""Compares files with the SHA-256 that the Hugging Face hub has of them, each on one rank."""

from __future__ import annotations

import hashlib
import heapq
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from fastload.base.threads import Workers
from fastload.comm.responses import Each, Reports
from fastload.comm.world import World
from fastload.errors import ChecksumError, IncompleteCheckpoint
from fastload.formats.manifest import FileEntry
from fastload.formats.names import RECORD_NAME, SEAL_NAME
from fastload.loading.load import Session
from fastload.loading.verify import team_of
from fastload.report import RankReport, VerifyReport
from fastload.storage import Storage

_READ_BYTES = 8 << 20
_NUM_THREADS = 4


def verify_sha_256(session: Session) -> VerifyReport:
    """Checks all files of an open checkpoint without checksums.

    Raises:
        IncompleteCheckpoint: A file has no SHA-256 either.
        ChecksumError: A file differs.
        PeerError: A rank could not read its part.
    """
    world, access = session.opened.world, session.opened.access
    manifest, storage = access.manifest, access.storage

    def look() -> list[str]:
        known = _known(storage, manifest.files) if world.rank in access.readers else {}
        return [file.name for file, digest in known.items() if not digest][:1]

    if lacking := list(chain.from_iterable(world.agree(f"verifying {manifest.url}", look))):
        raise IncompleteCheckpoint(
            f"{manifest.url}: it has no checksums to verify: neither a commit record ({RECORD_NAME}) nor a "
            f"seal ({SEAL_NAME}), which `fastload seal` makes, nor an SHA-256 of the Hugging Face hub for "
            f"{lacking[0] or 'it'}"
        )
    began, already_read = time.perf_counter(), storage.bytes_read
    own = compare_sha_256(session)
    report = RankReport(
        rank=world.rank,
        host=world.host,
        reader=world.rank in access.readers,
        note=access.notes.get(world.rank, ""),
        bytes_read=storage.bytes_read - already_read,
        bytes_verified=sum(file.nbytes for file in own),
        total_s=time.perf_counter() - began,
        retries=storage.num_retries,
    )

    def pack() -> dict[str, Any]:
        return {"report": Each(report.pack())}

    found = world.agree(f"verified {manifest.url}", pack)
    world.acknowledge()
    return VerifyReport(
        url=manifest.url,
        num_files=len(manifest.files),
        num_blocks=len(manifest.files),
        nbytes=manifest.nbytes,
        ranks=Reports(RankReport, found[0]["report"]),
    )


def compare_sha_256(session: Session) -> Sequence[FileEntry]:
    """Compares the files of an open checkpoint that have an SHA-256.

    Returns:
        The files that this rank compared.

    Raises:
        ChecksumError: A file differs.
        PeerError: A rank could not read its part.
    """
    world, access = session.opened.world, session.opened.access
    own: list[FileEntry] = []

    def compare() -> None:
        team = team_of(access, world.rank)
        if world.rank in team:
            known = _known(access.storage, access.manifest.files)
            own.extend(compare_share(world, access.storage, known, team.index(world.rank), len(team)))

    world.settle(f"comparing {access.manifest.url} with the hub", compare)
    return own


def _known(storage: Storage, files: Sequence[FileEntry]) -> dict[FileEntry, str]:
    return {file: storage.sha256(file.name, file.version) for file in files}


def compare_share(
    world: World, storage: Storage, known: Mapping[FileEntry, str], number: int, num_ranks: int
) -> Sequence[FileEntry]:
    """Compares the share of one rank, in threads.

    Args:
        world: The ranks; the others wait while this one makes progress.
        storage: The storage to read from.
        known: The SHA-256 of each file, or an empty text.
        number: Number of this rank among those that share the files.
        num_ranks: Number of these ranks.

    Returns:
        The files that were compared.

    Raises:
        ChecksumError: A file differs.
        StorageError: A file cannot be read.
    """
    share = _deal([file for file, digest in known.items() if digest], num_ranks)[number]
    stopped = threading.Event()
    workers = Workers(min(_NUM_THREADS, len(share)), "fastload-sha256")
    try:
        works = [workers.submit(partial(_sha_256, world, storage, file, stopped)) for file in share]
        for file, work in zip(share, works, strict=True):
            found = world.await_work(work, lambda: None)
            if found != known[file]:
                raise ChecksumError(
                    f"{storage.label(file.name)}: not the file on the hub: SHA-256 {known[file]} expected, "
                    f"{found} found: download it again"
                )
    finally:
        stopped.set()
        workers.close(wait_s=0.0)  # a read without an answer must not delay the exit
    return share


def _deal(files: Sequence[FileEntry], num_ranks: int) -> list[list[FileEntry]]:
    """Deals files to ranks, each to that with the fewest bytes so far, the largest first."""
    dealt: list[list[FileEntry]] = [[] for _ in range(num_ranks)]
    loads = [(0, number) for number in range(num_ranks)]
    for file in sorted(files, key=lambda file: (-file.nbytes, file.name)):
        nbytes, number = loads[0]
        dealt[number].append(file)
        heapq.heapreplace(loads, (nbytes + file.nbytes, number))
    return dealt


def _sha_256(world: World, storage: Storage, file: FileEntry, stopped: threading.Event) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(_READ_BYTES, file.nbytes)))
    for offset in range(0, file.nbytes, _READ_BYTES):
        if stopped.is_set():
            break
        part = buffer[: file.nbytes - offset]
        storage.read_into(file.name, offset, [part], file.version)
        digest.update(part)
        world.note_progress()
    return digest.hexdigest()
