"""Verifies a complete checkpoint: each rank reads a part, and data move to no other rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

from fastload.comm.failures import require_same
from fastload.comm.hosts import host_of
from fastload.comm.responses import Each, Reports
from fastload.errors import ChecksumError
from fastload.formats.record import CHECKSUM_BYTES
from fastload.loading.access import Access
from fastload.loading.load import Session
from fastload.loading.targets import TensorWriter
from fastload.report import RankReport, VerifyReport
from fastload.transfer.pipeline import Pipeline, open_pipeline, read_threads
from fastload.transfer.plan import plan_transfer
from fastload.transfer.read import ChunkReader, Damage, Verifier

_NUM_SHOWN = 20
_MAX_NOTED = 1000


def verify(session: Session) -> VerifyReport:
    """Checks all blocks of an open checkpoint; see `fastload.verify`.

    Raises:
        ChecksumError: Blocks are damaged; the same error on all ranks.
        PeerError: A rank could not read its part.
    """
    return _Verification(session).run()


class _Verification:
    """Checks all blocks, split among the ranks that read through the same link."""

    def __init__(self, session: Session) -> None:
        opened = session.opened
        access, options = opened.access, opened.options
        self._world = opened.world
        self._access = access
        self._options = options
        self._team = _team(access, self._world.rank)
        self._damage = _Damages()
        self._plan = plan_transfer(
            access.manifest.tensors,
            tuple(self._team) or access.readers,
            (),
            staging_bytes=options.staging_bytes,
            chunk_bytes=options.chunk_bytes,
            block_bytes=access.manifest.block_bytes,
            even_slots=True,
            contiguous=access.is_mounted,
        )
        self.reader = ChunkReader(
            access.storage,
            access.manifest.files,
            threads=read_threads(
                options.read_threads,
                self._plan,
                ranks_on_host=opened.ranks_on_host,
                in_order=access.storage.in_order,
            ),
            verifier=opened.verifier or Verifier(access.manifest),
            on_damage=self._damage.add,
        )

    def run(self) -> VerifyReport:
        """Verifies all parts; see `verify`."""
        world, what = self._world, f"verifying {self._access.manifest.url}"
        require_same(world.agree(what, lambda: {"call": "verify"}))
        began, already_read = time.perf_counter(), self._access.storage.bytes_read
        pipeline: list[Pipeline] = []

        def work() -> dict[str, Any]:
            if world.rank in self._plan.readers:
                pipeline.append(self._open())
                pipeline[0].run()
            staged_bytes = pipeline[0].buffer_bytes if pipeline else 0
            report = self._rank_report(time.perf_counter() - began, already_read, staged_bytes)
            return {"report": Each(report.pack()), "num": self._damage.num, "damage": self._damage.first()}

        try:
            found = world.settle(what, work)
            world.acknowledge()
        finally:
            if pipeline:
                pipeline[0].close()
            self.reader.close(wait_s=min(1.0, world.grace_s))
        return self._report(found)

    def _open(self) -> Pipeline:
        """Opens the pipeline of a rank that reads; nobody receives anything."""
        world, plan, progress = self._world, self._plan, self._options.progress
        round_bytes = plan.chunk_bytes * len(plan.readers)
        rounds = count(1)

        def note(*_: int) -> None:
            if progress is not None:
                progress(min(next(rounds) * round_bytes, plan.total_bytes), plan.total_bytes)

        nowhere = TensorWriter([])
        return open_pipeline(world, plan, self.reader, nowhere, order=(), machines=(), progress=note)

    def _rank_report(self, total_s: float, already_read: int, staged_bytes: int) -> RankReport:
        world, access = self._world, self._access
        return RankReport(
            rank=world.rank,
            host=world.host,
            reader=world.rank in self._team,
            note=access.notes.get(world.rank, ""),
            bytes_read=access.storage.bytes_read - already_read,
            bytes_verified=self.reader.verified.total,
            read_s=self.reader.watch.seconds,
            total_s=total_s,
            peak_staging_bytes=staged_bytes,
            retries=access.storage.num_retries + self.reader.rereads.total,
        )

    def _report(self, found: Sequence[dict[str, Any]]) -> VerifyReport:
        """Joins the results of all ranks."""
        manifest, access = self._access.manifest, self._access
        num_blocks = sum(len(file.checksums) // CHECKSUM_BYTES for file in manifest.files)
        if num_bad := sum(part["num"] for part in found):
            several = not access.shared and len(set(access.hosts)) > 1
            rows = [
                (*position, f"on {host_of(host)}: {text}" if several else text)
                for host, part in zip(access.hosts, found, strict=True)
                for *position, text in part["damage"]
            ]
            lines = [text for *_, text in sorted(rows)[:_NUM_SHOWN]]
            more = f"\n... and {num_bad - len(lines)} more" if num_bad > len(lines) else ""
            raise ChecksumError(
                f"{manifest.url}: {num_bad} of {num_blocks} blocks are damaged:\n" + "\n".join(lines) + more,
                tuple(lines),
            )
        return VerifyReport(
            url=manifest.url,
            num_files=len(manifest.files),
            num_blocks=num_blocks,
            nbytes=manifest.nbytes,
            ranks=Reports(RankReport, found[0]["report"]),
        )


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


def _team(access: Access, rank: int) -> list[int]:
    """Returns the ranks that read the same copy as this rank."""
    if access.shared:
        return list(access.readers)
    return [reader for reader in access.readers if access.hosts[reader] == access.hosts[rank]]
