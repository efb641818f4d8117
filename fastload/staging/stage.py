"""One staging, on all ranks of a group: list → take stock → read → exchange → write → publish.

One rank of each host, its leader, works for it: a copy is needed once on a host, so each byte enters it once.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import xxhash

from fastload.base.threads import Workers
from fastload.errors import ChecksumError, ManifestError, OptionError, StorageError
from fastload.formats.manifest import FileEntry, Manifest
from fastload.formats.names import SAVING_NAME, STAGED_NAME
from fastload.formats.reading import stat_all
from fastload.formats.safetensors import read_manifest
from fastload.formats.untrusted import is_plain_path, show
from fastload.loading.access import Access
from fastload.options import StageOptions
from fastload.ranks.world import World, require_same
from fastload.report import StageRankReport, StageReport
from fastload.staging.inventory import Block, as_ranges, held_by_all, take_inventory
from fastload.staging.place_files import FilePlacer, await_work
from fastload.staging.stock import Stock, receipt_of, take_stock
from fastload.storage import PatientStorage
from fastload.storage.local import LocalStorage
from fastload.storage.local_copy import LocalCopy
from fastload.storage.target import new_token
from fastload.transfer.exchange import open_members_exchange
from fastload.transfer.pipeline import Pipeline, read_threads
from fastload.transfer.plan import DISTRESS_BYTES, ReadPlan, plan_reads
from fastload.transfer.read import ChunkReader
from fastload.transfer.verify import refuse

__all__ = ["Stage"]

_log = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20  # where no commit record says it
_NO_PART = frozenset(("", SAVING_NAME, STAGED_NAME))


class Stage:
    """One staging, seen from one rank.

    Args:
        world: The ranks.
        access: The checkpoint.
        path: Where each host is to have its copy.
        options: How.
        began: `time.perf_counter` of the call.
    """

    def __init__(
        self, world: World, access: Access, path: str, options: StageOptions, *, began: float
    ) -> None:
        self._world = world
        self._access = access
        self._path = path
        self._options = options
        self._began = began
        self._what = f"staging {access.manifest.url} to {path}"
        self._header_bytes = access.storage.bytes_read
        self._copy: LocalCopy | None = None
        self._stock = Stock.nothing(0)
        self._job: _Job | None = None

    def run(self) -> StageReport:
        """Returns once every host has its copy.

        Raises:
            FastloadError: Some host has none; what was done so far is kept for the next try.
        """
        try:
            with self._world.together():
                _require_folder(self._access.manifest)
                self._list()
                self._elect()
                self._prepare()
                mine = self._move()
                return self._publish(mine)
        finally:
            self._let_go()

    def _list(self) -> None:
        """Settles what there is to copy, which the first rank that sees it says."""
        storage, manifest = self._access.storage, self._access.manifest

        def look() -> bytes:
            others = _list_others(storage, manifest)
            weak = others if manifest.block_bytes else [*manifest.files, *others]
            # Where storage tells no versions, nothing can be known to be the same the next time.
            nonce = new_token() if any(not file.version for file in weak) else ""
            return json.dumps([[[f.name, f.nbytes, f.version] for f in others], nonce]).encode()

        told = self._world.share(f"listing {manifest.url}", self._access.readers[0], look)
        others, nonce = json.loads(told)
        self._others = [FileEntry(name, nbytes, version, "") for name, nbytes, version in others]
        block_bytes = min(_BLOCK_BYTES, self._options.chunk_bytes or _BLOCK_BYTES)
        self._inventory = take_inventory(manifest, self._others, block_bytes=block_bytes, nonce=nonce)

    def _elect(self) -> None:
        """Chooses the leader of each host: one that can read, if there is one."""
        access = self._access

        def look() -> str:
            if self._world.rank in (*access.notes, access.readers[0]) or not access.storage.probes:
                return access.notes.get(self._world.rank, "")
            return self._changed(self._others)

        notes = self._world.agree(f"comparing what the ranks see of {access.manifest.url}", look)
        self._notes = {rank: note for rank, note in enumerate(notes) if note}
        able = [rank for rank in access.readers if rank not in self._notes]
        leaders: dict[str, int] = {}
        for rank in (*able, *self._notes):
            leaders.setdefault(access.hosts[rank], rank)
        self._leaders = sorted(leaders.values())
        self._leader = leaders[access.hosts[self._world.rank]]
        self._readers = [place for place, rank in enumerate(self._leaders) if rank in able]

    @property
    def _leads(self) -> bool:
        return self._leader == self._world.rank

    def _changed(self, files: Sequence[FileEntry]) -> str:
        """Says which file is not, here and now, what it was on the rank that listed them."""
        for file in files:
            found = self._access.storage.stat(file.name)
            if found is None or (found.nbytes, found.version) != (file.nbytes, file.version):
                return f"sees another {file.name} than rank {self._access.readers[0]}"
        return ""

    def _prepare(self) -> None:
        """Finds out what each host has already, and makes room for the rest."""
        world, inventory = self._world, self._inventory

        def prepare() -> dict[str, Any]:
            if not self._leads:
                return {}
            self._copy, self._stock = take_stock(world, inventory, self._path, self._options)
            whole = self._copy is None
            place = self._copy.data_path if self._copy is not None else self._path
            return {"whole": whole, "held": as_ranges(self._stock.held), "place": place}

        stocks = world.agree(f"preparing to stage to {self._path}", prepare)
        here = stocks[self._leader]

        def join() -> None:
            if LocalStorage(here["place"]).stat("") is None:
                raise StorageError(
                    f"this rank does not see what rank {self._leader} prepared: they have one host name, "
                    f"{world.host}, but not one disk",
                    url=self._path,
                )

        world.agree(f"joining the staging to {self._path}", join)
        self._wholes = [place for place, rank in enumerate(self._leaders) if stocks[rank]["whole"]]
        lacking = [stocks[rank]["held"] for rank in self._leaders if not stocks[rank]["whole"]]
        self._runs = inventory.lacking(held_by_all(lacking, inventory.num_blocks))

    def _move(self) -> StageRankReport:
        """Moves the data, and settles on all ranks whether all hosts have it."""
        world = self._world
        plans: list[ReadPlan] = []

        def prepare() -> dict[str, str]:
            plans.append(self._plan())
            if self._leads and self._runs:
                self._job = self._open(plans[0])
            return {
                "files": self._inventory.identity,
                "plan": plans[0].digest(),
                "distress": secrets.token_hex(DISTRESS_BYTES),
            }

        asked = world.agree(self._what, prepare)
        self._distress = bytes.fromhex(asked[0].pop("distress", ""))  # rank 0's is everybody's
        require_same(asked)
        error: Exception | None = None
        told: dict[str, Any] = {}
        try:
            try:
                told = self._run()
            except Exception as caught:
                error = caught
                world.raise_alarm()
            # One that is stuck says so itself after its patience: the others wait a little longer than that.
            wait_s = world.grace_s if error is not None else world.timeout_s - world.grace_s / 4
            outcomes = world.gather(self._what, told, error, wait_s=wait_s)
            world.raise_failures(self._what, outcomes, error)
        finally:
            error = None  # else error → traceback → frame → error would keep all their memory alive
        digests = {outcomes[rank].host: outcomes[rank].value["digest"] for rank in self._leaders}
        if len(set(digests.values())) > 1:
            raise ChecksumError(f"{self._what}: the hosts received different bytes: {digests}")
        self._digest = next(iter(digests.values()))
        return self._report_rank(told.get("flush_s", 0.0))

    def _plan(self) -> ReadPlan:
        return plan_reads(
            [run for _, run in self._runs],
            world_size=len(self._leaders),
            readers=self._wholes or self._readers,
            staging_bytes=self._options.staging_bytes,
            chunk_bytes=self._options.chunk_bytes,
            block_bytes=self._inventory.block_bytes,
        )

    def _open(self, plan: ReadPlan) -> _Job:
        world, options, access = self._world, self._options, self._access
        storage = access.storage
        if self._wholes:  # whoever has a copy feeds those who have none
            storage = PatientStorage(
                LocalStorage(self._path, options.io),
                retries=options.retries,
                timeout_s=world.patience_s / 2,
            )
        threads = read_threads(
            options.read_threads, depth=plan.depth, exchanges=plan.world_size > 1, ranks_on_host=1
        )
        reader = ChunkReader(storage, self._inventory.files, threads=threads, verifier=None, on_damage=refuse)
        placer = FilePlacer(
            world,
            self._inventory,
            self._runs,
            self._copy,
            checksums=self._stock.checksums,
            held=self._stock.held,
            read_again=self._read_again,
            verify=options.verify,
            num_threads=options.write_threads,
        )
        exchange = open_members_exchange(world, self._leaders)
        place = self._leaders.index(world.rank)
        pipeline = Pipeline(world, plan, place, reader, exchange, placer, options.progress)
        return _Job(storage, reader, placer, pipeline, lambda: exchange.watch.seconds)

    def _read_again(self, block: Block, buffer: memoryview) -> None:
        file = self._inventory.files[block.file]
        self._access.storage.read_into(file.name, block.offset, [buffer], file.version)

    def _run(self) -> dict[str, Any]:
        """Does this rank's part; returns what the others have to know of it."""
        if not self._leads:
            return {}
        flush_s = 0.0
        if self._job is not None:
            self._job.pipeline.run(self._distress)
        if self._copy is not None:
            began = time.perf_counter()
            self._in_background(partial(self._finish, self._copy))
            flush_s = time.perf_counter() - began
        return {"digest": xxhash.xxh3_128_hexdigest(bytes(self._stock.checksums)), "flush_s": flush_s}

    def _finish(self, copy: LocalCopy) -> None:
        """Makes the copy durable, and looks at it and its original once more."""
        self._receipt = copy.flush()
        place = self._leaders.index(self._world.rank)
        probing = self._access.storage.probes and place in self._readers and not self._wholes
        if probing and (changed := self._changed(self._inventory.files)):
            raise StorageError(f"{changed}: it changed while it was read", url=self._access.storage.url)
        staged = LocalStorage(copy.data_path)
        try:
            found = read_manifest(staged)
        finally:
            staged.close()
        if found is None or _essence(found) != _essence(self._access.manifest):
            raise ManifestError(f"{copy.data_path}: its headers are not those of {self._access.manifest.url}")

    def _in_background(self, call: Callable[[], None]) -> None:
        workers = Workers(1, "fastload-flush")
        late = StorageError("the disk did not answer in time", url=self._path)
        try:
            await_work(self._world, workers.submit(call), lambda: late)
        finally:
            workers.close(wait_s=0.0)

    def _report_rank(self, flush_s: float) -> StageRankReport:
        world, job, stock = self._world, self._job, self._stock
        fed = self._wholes and job is not None
        mine = StageRankReport(
            rank=world.rank,
            host=world.host,
            leads=self._leads,
            note=self._notes.get(world.rank, ""),
            bytes_read=self._access.storage.bytes_read - self._header_bytes,
            bytes_kept=stock.kept_bytes,
            flush_s=flush_s,
            retries=self._access.storage.num_retries,
        )
        if job is None:
            return mine
        return replace(
            mine,
            note=job.pipeline.drop_out or mine.note,
            bytes_fed=job.storage.bytes_read if fed else 0,
            bytes_received=job.pipeline.received_bytes,
            bytes_written=job.placer.written.total,
            bytes_verified=job.placer.verified.total,
            read_s=job.reader.watch.seconds,
            exchange_s=job.exchange_s(),
            write_s=job.placer.watch.seconds,
            peak_staging_bytes=job.pipeline.staging_bytes,
            retries=mine.retries + job.placer.rereads.total,
        )

    def _publish(self, mine: StageRankReport) -> StageReport:
        """Makes the copies exist."""
        inventory = self._inventory

        def publish() -> dict[str, Any]:
            if self._copy is not None:
                receipts: list[Mapping[str, Any]] = [self._receipt, {"written": self._stock.kept}]
                text = receipt_of(inventory, self._stock, self._copy.files())
                overwrite = self._options.overwrite or self._stock.damaged
                self._copy.publish(receipts, [(STAGED_NAME, text)], overwrite=overwrite)
            return asdict(replace(mine, total_s=time.perf_counter() - self._began))

        ranks = self._world.agree(f"{self._what}: publishing", publish)
        self._world.heard()
        return StageReport(
            url=self._access.manifest.url,
            path=self._path,
            nbytes=inventory.nbytes,
            num_files=len(inventory.files),
            num_hosts=len(self._leaders),
            digest=self._digest,
            ranks=tuple(StageRankReport(**rank) for rank in ranks),
        )

    def _let_go(self) -> None:
        """Ends the threads, and leaves what was copied for the next try, if anything was."""
        ended, job, self._job = True, self._job, None
        if job is not None:
            job.pipeline.close()
            job.reader.stop()
            ended = job.placer.close()
            job.reader.at_end(self._access.storage.close)
            if job.storage is not self._access.storage:
                job.reader.at_end(job.storage.close)
            if not job.reader.close(wait_s=min(1.0, self._world.grace_s)):
                _log.warning("%s: a read is still under way", self._what)
        else:
            self._access.storage.close()
        if self._copy is not None and ended:
            # A write that hangs keeps its descriptor: the number of a closed one may soon be another file.
            (self._copy.close if any(self._stock.held) else self._copy.abort)()


@dataclass(frozen=True)
class _Job:
    """What moves the data of one leader."""

    storage: PatientStorage
    reader: ChunkReader
    placer: FilePlacer
    pipeline: Pipeline
    exchange_s: Callable[[], float]


def _require_folder(manifest: Manifest) -> None:
    names = [file.name for file in manifest.files]
    if "" in names:
        raise OptionError(f"{manifest.url} is one file: stage takes the directory that it is in")
    if nested := [name for name in names if "/" in name]:
        raise OptionError(f"{manifest.url} has files in directories, which are not staged: {show(nested)}")


def _list_others(storage: PatientStorage, manifest: Manifest) -> list[FileEntry]:
    """Lists the files directly below the root that the manifest does not name."""
    named = {file.name for file in manifest.files}
    names = sorted(set(storage.list() or ()) - named - _NO_PART)
    if bad := [name for name in names if not is_plain_path(name) or "/" in name]:
        raise ManifestError(f"{storage.url}: not plain file names: {show(bad)}")
    stats = stat_all(storage, names)
    return [FileEntry(name, stats[name].nbytes, stats[name].version, "") for name in names]


def _essence(manifest: Manifest) -> str:
    """A digest of all but where and which very files they are."""
    files = tuple(replace(file, version="") for file in manifest.files)
    return replace(manifest, url="", files=files).digest()
