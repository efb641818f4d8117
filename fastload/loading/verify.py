"""Verifies a complete checkpoint: each rank reads a part, and data move to no other rank.

The blocks of checkpoints with checksums are compared. Files of others are compared with the SHA-256 that the
Hugging Face hub has of them.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import Any

from fastload.base.threads import Workers
from fastload.comm.failures import require_same
from fastload.comm.hosts import host_of
from fastload.comm.responses import Each, Reports
from fastload.comm.world import World
from fastload.errors import CheckpointError, ChecksumError
from fastload.formats.manifest import FileEntry, Manifest, blocks_of_files
from fastload.formats.names import RECORD_NAME, SEAL_NAME
from fastload.formats.record import CHECKSUM_BYTES
from fastload.geometry.ranges import deal_uncut
from fastload.loading.access import Access
from fastload.loading.prepare import LoadStart, Opened
from fastload.loading.session import Session
from fastload.loading.targets import TensorWriter
from fastload.report import RankReport, VerifyReport
from fastload.storage import Storage
from fastload.transfer.pipeline import Pipeline
from fastload.transfer.plan import plan_transfer
from fastload.transfer.read import ChecksumCollector, Damage, Verifier

_NUM_SHOWN = 20
_MAX_NOTED = 1000


def verify(session: Session) -> VerifyReport:
    """Checks every byte of an open checkpoint; see `fastload.verify`.

    Raises:
        ChecksumError: Blocks are damaged, or a file differs; the same error on all ranks.
        CheckpointError: It has no checksums.
        PeerError: A rank could not read its part.
    """
    has_checksums = session.opened.access.stored.block_bytes
    return _verify_blocks(session) if has_checksums else _verify_sha_256(session)


def _verify_blocks(session: Session) -> VerifyReport:
    opened, damage = session.opened, _Damages()
    reading = CompleteRead(session, Verifier(opened.access.stored, damage.add))
    with closing(reading):
        reading.compare_calls("verify")
        with opened.world.step(reading.what, is_long=True) as step:
            report = reading.run()
            step.answer(
                {
                    "report": Each(report.pack()),
                    "num": damage.num,
                    "damage": damage.first(),
                    "is_misread": reading.reader.is_misread,
                }
            )
    answers = step.answers
    if any(part["is_misread"] for part in answers):
        session.reopen_exactly()  # raises if the bytes before the data of a tensor are damaged
    opened.world.acknowledge()
    _raise_damage(opened.access, answers)
    return reading.report(answers)


class CompleteRead:
    """Reads all blocks, split among the ranks that read through the same link.

    Args:
        session: The checkpoint.
        verifier: Takes the blocks that this rank reads.

    Attributes:
        what: Name of the step, for messages.
        reader: Reads the chunks of this rank.
    """

    def __init__(self, session: Session, verifier: Verifier | ChecksumCollector) -> None:
        self._opened = opened = replace(session.opened, verifier=verifier)
        access, options = opened.access, opened.options
        self.what = f"reading {access.stored.url}"
        self._pipeline: Pipeline | None = None  # of a rank that reads
        self._plan = plan_transfer(
            access.stored.extents,
            tuple(team_of(access, opened.world.rank)) or access.readers,
            (),
            staging_bytes=options.staging_bytes,
            chunk_bytes=options.chunk_bytes,
            block_bytes=opened.block_bytes,
            even_slots=True,
            contiguous=access.is_mounted,
        )
        self.reader = opened.open_reader(self._plan, in_parts=True)

    def compare_calls(self, call: str) -> None:
        """Compares the public functions that the ranks have called.

        Raises:
            PlanMismatch: They differ.
        """
        with self._opened.world.step(self.what) as step:
            step.answer({"call": call})
        require_same(step.answers)

    def run(self) -> RankReport:
        """Reads the share of this rank.

        Raises:
            FastloadError: It cannot be read.
        """
        start = LoadStart.now(self._opened)
        if self._opened.world.rank in self._plan.readers:
            self._pipeline = self._open()
            storage = self._opened.access.storage
            storage.skip_sources(True)
            try:
                self._pipeline.run()
            finally:
                storage.skip_sources(False)
        return replace(
            _rank_report(self._opened, start, self.reader.verified.total, self.reader.rereads.total),
            read_s=self.reader.watch.seconds,
            peak_staging_bytes=self._pipeline.buffer_bytes if self._pipeline is not None else 0,
        )

    def close(self) -> None:
        """Ends its threads."""
        if self._pipeline is not None:
            self._pipeline.close()
        self.reader.close(wait_s=min(1.0, self._opened.world.grace_s))

    def _open(self) -> Pipeline:
        """Opens the pipeline of a rank that reads; nobody receives anything."""
        plan, progress = self._plan, self._opened.options.progress
        round_bytes = plan.chunk_bytes * len(plan.readers)
        rounds = count(1)

        def note(*_: int) -> None:
            if progress is not None:
                progress(min(next(rounds) * round_bytes, plan.total_bytes), plan.total_bytes)

        nowhere = TensorWriter([])
        return Pipeline(self._opened.world, plan, self.reader, nowhere, progress=note)

    def report(self, answers: Sequence[dict[str, Any]]) -> VerifyReport:
        """Returns the report over all ranks, from their answers: the packed results of `run`."""
        manifest = self._opened.access.stored
        return _report(manifest, sum(blocks_of_files(manifest, manifest.block_bytes)), answers)


def _rank_report(opened: Opened, start: LoadStart, bytes_verified: int, num_rereads: int = 0) -> RankReport:
    world, access = opened.world, opened.access
    return RankReport(
        rank=world.rank,
        host=world.host,
        reader=world.rank in access.readers,
        note=access.notes.get(world.rank, ""),
        bytes_read=access.storage.bytes_read - start.bytes_read,
        bytes_verified=bytes_verified,
        total_s=time.perf_counter() - start.at_s,
        retries=access.storage.num_retries + num_rereads,
    )


def _report(manifest: Manifest, num_blocks: int, answers: Sequence[dict[str, Any]]) -> VerifyReport:
    return VerifyReport(
        url=manifest.url,
        num_files=len(manifest.files),
        num_blocks=num_blocks,
        nbytes=manifest.nbytes,
        ranks=Reports(RankReport, answers[0]["report"]),
    )


def _raise_damage(access: Access, answers: Sequence[dict[str, Any]]) -> None:
    """Raises the damage that the ranks found, if there is any."""
    manifest = access.stored
    num_blocks = sum(len(file.checksums) // CHECKSUM_BYTES for file in manifest.files)
    if num_bad := sum(part["num"] for part in answers):
        several = not access.shared and len(set(access.hosts)) > 1
        rows = [
            (*position, f"on {host_of(host)}: {text}" if several else text)
            for host, part in zip(access.hosts, answers, strict=True)
            for *position, text, _ in part["damage"]
        ]
        doubts = {doubt for part in answers for *_, doubt in part["damage"] if doubt}
        lines = [text for *_, text in sorted(rows)[:_NUM_SHOWN]]
        more = [f"... and {num_bad - len(lines)} more"] if num_bad > len(lines) else []
        head = f"{manifest.url}: {num_bad} of {num_blocks} blocks are damaged:"
        raise ChecksumError("\n".join([head, *lines, *more, *sorted(doubts)]), tuple(lines))


class _Damages:
    """Damaged blocks that the threads of one rank find: counts all, and keeps the first in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: list[Damage] = []
        self.num = 0

    def add(self, damage: Damage) -> None:
        with self._lock:
            self.num += 1
            self._noted.append(damage)
            if len(self._noted) > _MAX_NOTED:
                self._noted = sorted(self._noted)[:_NUM_SHOWN]

    def first(self) -> list[Damage]:
        return sorted(self._noted)[:_NUM_SHOWN]


def team_of(access: Access, rank: int) -> list[int]:
    """Returns the ranks that read the same copy as this rank."""
    if access.shared:
        return list(access.readers)
    return [reader for reader in access.readers if access.hosts[reader] == access.hosts[rank]]


# Files without checksums, each on one rank

_READ_BYTES = 8 << 20
_NUM_HASHED = 4  # files at once


def _verify_sha_256(session: Session) -> VerifyReport:
    world, access = session.opened.world, session.opened.access
    manifest, storage = access.stored, access.storage
    with world.step(f"verifying {manifest.url}") as step:
        known = _known(storage, manifest.files) if world.rank in access.readers else {}
        step.answer([file.name for file, digest in known.items() if not digest][:1])
    if lacking := list(chain.from_iterable(step.answers)):
        raise CheckpointError(
            f"{manifest.url}: it has no checksums to verify: neither a commit record ({RECORD_NAME}) nor a "
            f"seal ({SEAL_NAME}), which `fastload seal` makes, nor an SHA-256 of the Hugging Face hub for "
            f"{lacking[0] or 'it'}"
        )
    start = LoadStart.now(session.opened)
    compared = compare_sha_256(session)
    report = _rank_report(session.opened, start, sum(file.nbytes for file in compared))
    with world.step(f"verified {manifest.url}") as step:
        step.answer({"report": Each(report.pack())})
    world.acknowledge()
    return _report(manifest, 0, step.answers)


def compare_sha_256(session: Session) -> Sequence[FileEntry]:
    """Compares the files of an open checkpoint that have an SHA-256.

    Returns:
        The files that this rank compared.

    Raises:
        ChecksumError: A file differs.
        PeerError: A rank could not read its part.
    """
    world, access = session.opened.world, session.opened.access
    compared: Sequence[FileEntry] = ()
    with world.step(f"comparing {access.stored.url} with the hub", is_long=True):
        team = team_of(access, world.rank)
        if world.rank in team:
            known = _known(access.storage, access.stored.files)
            compared = compare_share(world, access.storage, known, team.index(world.rank), len(team))
    return compared


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
    files = [file for file, digest in known.items() if digest]
    share = [files[at] for at in deal_uncut([file.nbytes for file in files], num_ranks)[number]]
    share.sort(key=lambda file: -file.nbytes)  # else the threads would wait for a long one at the end
    stopped = threading.Event()
    workers = Workers(min(_NUM_HASHED, len(share)), "fastload-sha256")
    try:
        works = [workers.submit(partial(_sha_256, world, storage, file, stopped)) for file in share]
        for file, work in zip(share, works, strict=True):
            digest = world.await_work(work, lambda: None)
            if digest != known[file]:
                raise ChecksumError(
                    f"{storage.label(file.name)}: not the file on the hub: SHA-256 {known[file]} expected, "
                    f"{digest} found: download it again"
                )
    finally:
        stopped.set()
        workers.close(wait_s=0.0)  # a read without an answer must not delay the exit
    return share


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
