"""Stages a checkpoint on all ranks of a group: list → take stock → read → exchange → write → publish.

One rank of each host, its leader, makes the copy, so that each byte enters a host once.
"""

from __future__ import annotations

import json
import logging
import posixpath
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import xxhash

from fastload.base.threads import Workers
from fastload.comm.failures import require_same
from fastload.comm.observers import notify, notifying_of_failure
from fastload.comm.world import World
from fastload.errors import ChecksumError, ManifestError, OptionError, StorageError
from fastload.ext.staging.inventory import BlockRun, Inventory, as_ranges, held_by_all, take_inventory
from fastload.ext.staging.local_copy import LocalCopy
from fastload.ext.staging.options import StageOptions
from fastload.ext.staging.report import StageRankReport, StageReport
from fastload.ext.staging.stock import Stock, receipt_of, take_stock
from fastload.ext.staging.write_files import BlockCheck, FileWriter, WritingReader
from fastload.formats.manifest import FileEntry, Manifest, is_single_file
from fastload.formats.names import NAMES, SAVING_NAME, SEAL_NAME, STAGED_NAME
from fastload.formats.open import read_manifest
from fastload.formats.reading import stat_all
from fastload.formats.untrusted import is_plain_path, show
from fastload.geometry.blocks import Block
from fastload.loading.access import Access
from fastload.loading.verify import compare_share
from fastload.options import Patience
from fastload.storage import CheckpointReader, PatientStorage, open_with_sibling
from fastload.storage.base import DEFAULT_WRITES, new_token
from fastload.storage.local import LocalStorage
from fastload.storage.location import HTTP
from fastload.transfer.links import accept_offers, offer_of
from fastload.transfer.pipeline import Pipeline, pace_of
from fastload.transfer.plan import TransferPlan, plan_transfer
from fastload.transfer.read import ChunkReader

_log = logging.getLogger(__name__)
T = TypeVar("T")

_BLOCK_BYTES = 1 << 20  # without a commit record
_NO_PART = frozenset(("", SAVING_NAME, STAGED_NAME))


@dataclass(frozen=True)
class _Leaders:
    """The leaders of the hosts.

    Attributes:
        notes: Why a rank cannot read, by rank.
        all: All leaders, ascending.
        own: The leader of this rank's host.
        able: The leaders that can read.
    """

    notes: Mapping[int, str]
    all: tuple[int, ...]
    own: int
    able: tuple[int, ...]


@dataclass(frozen=True)
class _Missing:
    """The bytes to copy.

    Attributes:
        complete: Leaders of the hosts that have a complete copy.
        runs: The blocks that some host lacks.
    """

    complete: tuple[int, ...]
    runs: tuple[BlockRun, ...]


@dataclass(frozen=True)
class _Moved:
    """The outcome of the copy on this rank.

    Attributes:
        digest: A digest of all bytes, the same on all hosts.
        receipt: The receipt of the copy for its writes; None if this rank has written nothing.
        report: The report of this rank.
    """

    digest: str
    receipt: Mapping[str, Any] | None
    report: StageRankReport


class Stage:
    """One staging, seen from one rank.

    Args:
        world: The ranks.
        access: The checkpoint.
        path: The directory of the copy on each host.
        options: How to stage.
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
        self._what = f"staging {access.stored.url} to {path}"
        self._header_bytes = access.storage.bytes_read
        self._turn = 0.0
        # Released at the end, whatever the outcome.
        self._copy: LocalCopy | None = None
        self._stock = Stock.nothing(0)
        self._job: _Job | None = None
        self._flusher = Workers(1, "fastload-flush")

    def run(self) -> StageReport:
        """Returns once every host has its copy.

        Raises:
            FastloadError: A host has none. The next attempt resumes.
        """
        try:
            with notifying_of_failure(self._world, "stage", self._began), self._world.together():
                inventory = self._list(as_folder(self._access.stored))
                leaders = self._elect(inventory)
                missing = self._prepare(inventory, leaders)
                moved = self._move(inventory, leaders, missing)
                return self._publish(inventory, leaders, moved)
        finally:
            self._release()

    def _list(self, manifest: Manifest) -> Inventory:
        """Lists the files to copy, as the first rank that sees them does.

        It also chooses where the copy begins: with sources, which may be others that stage, not all at once
        where they do.
        """
        with self._world.step(f"listing {manifest.url}") as step:
            if self._world.rank == self._access.readers[0]:
                others = list_others(self._access.storage, self._access.stored)
                weak = others if manifest.format == "fastload" else [*manifest.files, *others]
                # Files without versions cannot be recognized by the next attempt.
                nonce = new_token() if any(not file.version for file in weak) else ""
                rows = [[file.name, file.nbytes, file.version] for file in others]
                turn = random.random() if self._options.sources else 0.0
                step.answer(attach=json.dumps([rows, nonce, turn]).encode())
        rows, nonce, self._turn = json.loads(step.attachment)
        others = [FileEntry(name, nbytes, version, "") for name, nbytes, version in rows]
        block_bytes = min(_BLOCK_BYTES, self._options.chunk_bytes or _BLOCK_BYTES)
        return take_inventory(manifest, others, block_bytes=block_bytes, nonce=nonce)

    def _elect(self, inventory: Inventory) -> _Leaders:
        """Chooses the leader of each host: a rank that can read, if there is one."""
        access, world = self._access, self._world
        known = set(access.stored.files)
        others = [file for file in at_source(self._access.stored, inventory.files) if file not in known]
        with world.step(f"comparing what the ranks see of {access.stored.url}") as step:
            if world.rank in (*access.notes, access.readers[0]) or not access.storage.probes:
                step.answer(access.notes.get(world.rank, ""))
            else:
                step.answer(changed(access, others))
        notes = {rank: note for rank, note in enumerate(step.answers) if note}
        able = [rank for rank in access.readers if rank not in notes]
        leaders: dict[str, int] = {}
        for rank in (*able, *notes):
            leaders.setdefault(access.hosts[rank], rank)
        chosen = tuple(sorted(leaders.values()))
        own = leaders[access.hosts[world.rank]]
        return _Leaders(notes, chosen, own, tuple(rank for rank in chosen if rank in able))

    def _prepare(self, inventory: Inventory, leaders: _Leaders) -> _Missing:
        """Finds the blocks that each host has already, and makes room for the others."""
        world = self._world
        with world.step(f"preparing to stage to {self._path}") as step:
            if world.rank == leaders.own:
                self._copy, self._stock = take_stock(world, inventory, self._path, self._options)
                if self._copy is not None and self._options.on_copy is not None:
                    stored, folder = self._access.stored, self._copy.data_path
                    self._options.on_copy(GrowingCopy(stored, self._path, folder, inventory, self._stock))
                place = self._copy.data_path if self._copy is not None else self._path
                held = as_ranges(self._stock.held)
                step.answer({"complete": self._copy is None, "held": held, "place": place})
            else:
                step.answer({})
        stocks = step.answers
        with world.step(f"joining the staging to {self._path}"):
            if LocalStorage(stocks[leaders.own]["place"]).stat("") is None:
                raise StorageError(
                    f"this rank does not see what rank {leaders.own} prepared: they have the same host name, "
                    f"{world.host}, but different disks",
                    url=self._path,
                )
        complete = tuple(rank for rank in leaders.all if stocks[rank]["complete"])
        lacking = [stocks[rank]["held"] for rank in leaders.all if not stocks[rank]["complete"]]
        runs = inventory.lacking(held_by_all(lacking, len(inventory.blocks)))
        return _Missing(complete, tuple(inventory.turned(runs, self._turn)))

    def _move(self, inventory: Inventory, leaders: _Leaders, missing: _Missing) -> _Moved:
        """Moves the data, and agrees with all ranks that all hosts have them."""
        world, leads = self._world, self._world.rank == leaders.own
        with world.step(self._what) as planning:
            plan, offer = self._plan(inventory, leaders, missing), None
            if leads and missing.runs:
                self._job = self._open(inventory, leaders, missing, plan)
                offer = offer_of(self._job.pipeline.transport.connections)
            planning.answer([{"files": inventory.identity, "plan": plan.digest()}, offer])
        plans, offers = zip(*planning.answers, strict=True)
        require_same(plans)
        connections = self._job.pipeline.transport.connections if self._job is not None else None
        accept_offers(world, self._what, connections, offers)
        receipt: Mapping[str, Any] | None = None
        flush_s = 0.0
        with world.step(self._what, is_long=True) as step:
            if self._job is not None:
                self._job.pipeline.run()
            if self._copy is not None:
                began = time.perf_counter()
                probing = world.rank in leaders.able and not missing.complete
                if probing and self._options.verify:
                    self._compare(self._copy, inventory, leaders)
                receipt = self._in_background(partial(self._finish, self._copy, inventory, probing=probing))
                flush_s = time.perf_counter() - began
            step.answer(xxhash.xxh3_128_hexdigest(bytes(self._stock.checksums)) if leads else "")
        found = step.answers
        digests = {f"rank {rank} on {world.hosts[rank]}": found[rank] for rank in leaders.all}
        if len(set(digests.values())) > 1:
            raise ChecksumError(f"{self._what}: the hosts received different bytes: {digests}")
        report = self._report_rank(leaders, flush_s, fed=bool(missing.complete))
        return _Moved(found[leaders.own], receipt, report)

    def _plan(self, inventory: Inventory, leaders: _Leaders, missing: _Missing) -> TransferPlan:
        """Plans the rounds. Hosts with a complete copy supply it; without any, the leaders that read do."""
        return plan_transfer(
            missing.runs,
            missing.complete or leaders.able,
            leaders.all,
            staging_bytes=self._options.staging_bytes,
            chunk_bytes=self._options.chunk_bytes,
            block_bytes=inventory.block_bytes,
            contiguous=self._access.is_mounted and not missing.complete,
        )

    def _open(self, inventory: Inventory, leaders: _Leaders, missing: _Missing, plan: TransferPlan) -> _Job:
        world, options = self._world, self._options
        storage, first_byte_s = self._access.storage, self._access.first_byte_s
        if missing.complete:
            patience = Patience(options.retries, world.patience_s / 2)
            storage, first_byte_s = PatientStorage(LocalStorage(self._path, options.io), patience), 0.0
        pace = pace_of(options.read_threads, plan, storage, ranks_on_host=1, first_byte_s=first_byte_s)
        files = inventory.files if missing.complete else at_source(self._access.stored, inventory.files)
        check = BlockCheck(inventory, partial(self._read_again, inventory), verify=options.verify)
        writer = FileWriter(
            world,
            inventory,
            missing.runs,
            self._copy,
            stock=self._stock,
            check=check,
            num_threads=options.write_threads or DEFAULT_WRITES,
        )
        if options.sources and not missing.complete:
            storage = WritingReader(storage, [file.name for file in files], writer)
        reader = ChunkReader(storage, files, pace=pace)
        pipeline = Pipeline(world, plan, reader, writer, progress=options.progress)
        return _Job(storage, check, writer, pipeline)

    def _read_again(self, inventory: Inventory, block: Block, buffer: memoryview) -> None:
        file = at_source(self._access.stored, inventory.files)[block.file]
        self._access.storage.read_into(file.name, block.offset, [buffer], file.version)

    def _finish(self, copy: LocalCopy, inventory: Inventory, *, probing: bool) -> Mapping[str, Any]:
        """Makes the copy durable, and compares it with its original; returns its receipt."""
        receipt = copy.flush()
        probing = probing and self._access.storage.probes
        if probing and (change := changed(self._access, at_source(self._access.stored, inventory.files))):
            raise StorageError(f"{change}: it changed while it was read", url=self._access.storage.url)
        path = copied_to(self._access.stored, copy.data_path)
        patience = Patience(self._options.retries, self._world.patience_s / 2)
        staged = open_with_sibling(path, NAMES, sibling=SEAL_NAME, patience=patience)
        try:
            found = read_manifest(staged)
        finally:
            staged.close()
        if essence(found) != essence(self._access.stored):
            raise ManifestError(f"{copy.data_path}: its headers are not those of {self._access.stored.url}")
        return receipt

    def _compare(self, copy: LocalCopy, inventory: Inventory, leaders: _Leaders) -> None:
        """Compares this host's share of the files, of which all hosts have the same, with their SHA-256."""
        originals = at_source(self._access.stored, inventory.files)
        known = {
            replace(file, version=""): self._access.storage.sha256(original.name, original.version)
            for file, original in zip(inventory.files, originals, strict=True)
        }
        staged = LocalStorage(copy.data_path, self._options.io)
        try:
            number = leaders.able.index(self._world.rank)
            compare_share(self._world, staged, known, number, len(leaders.able))
        finally:
            staged.close()

    def _in_background(self, call: Callable[[], T]) -> T:
        late = StorageError("the disk did not answer in time", url=self._path)
        return self._world.await_work(self._flusher.submit(call), lambda: late)

    def _report_rank(self, leaders: _Leaders, flush_s: float, *, fed: bool) -> StageRankReport:
        world, job, stock = self._world, self._job, self._stock
        own = StageRankReport(
            rank=world.rank,
            host=world.host,
            leads=world.rank == leaders.own,
            note=leaders.notes.get(world.rank, ""),
            bytes_read=self._access.storage.bytes_read - self._header_bytes,
            bytes_supplied=self._access.storage.supplied_bytes,
            problems="; ".join(self._access.storage.problems),
            bytes_kept=stock.kept_bytes,
            flush_s=flush_s,
            retries=self._access.storage.num_retries,
        )
        if job is None:
            return own
        read_s, exchange_s, _ = (watch.seconds for watch in job.pipeline.watches.values())
        return replace(
            own,
            note=job.pipeline.drop_out or own.note,
            bytes_fed=job.storage.bytes_read if fed else 0,
            bytes_received=job.pipeline.received_bytes,
            bytes_written=job.writer.written.total,
            bytes_verified=job.check.verified.total,
            read_s=read_s,
            exchange_s=exchange_s,
            write_s=job.writer.watch.seconds,
            peak_staging_bytes=job.pipeline.buffer_bytes,
            retries=own.retries + job.check.rereads.total,
        )

    def _publish(self, inventory: Inventory, leaders: _Leaders, moved: _Moved) -> StageReport:
        """Publishes the copies."""
        on_report = self._options.on_report
        with self._world.step(f"{self._what}: publishing") as step:
            if self._copy is not None and moved.receipt is not None:
                receipts: list[Mapping[str, Any]] = [moved.receipt, {"written": self._stock.kept}]
                text = receipt_of(inventory, self._stock, self._copy.state_of_files())
                self._copy.publish(receipts, [(STAGED_NAME, text)])
            rank = asdict(replace(moved.report, total_s=time.perf_counter() - self._began))
            step.answer({"rank": rank, "listens": on_report is not None})
        responses = step.answers
        report = StageReport(
            url=self._access.stored.url,
            path=copied_to(self._access.stored, self._path),
            nbytes=inventory.nbytes,
            num_files=len(inventory.files),
            num_hosts=len(leaders.all),
            digest=moved.digest,
            ranks=tuple(StageRankReport(**each["rank"]) for each in responses),
        )
        some_listen = any(each["listens"] for each in responses)
        notify(self._world, "stage", self._began, report=report)
        self._world.tell(self._what, report, on_report, some_listen=some_listen)
        self._world.acknowledge()
        return report

    def _release(self) -> None:
        """Ends the threads. Keeps an incomplete copy for the next attempt, if it has any block."""
        ended, job, self._job = True, self._job, None
        if job is not None:
            job.pipeline.close()
            job.pipeline.reader.stop()
            ended = job.writer.close()
            job.storage.close()
            if not job.pipeline.reader.close(wait_s=min(1.0, self._world.grace_s)):
                _log.warning("%s: a read is still under way", self._what)
                ended &= not self._options.sources  # else it writes what it has read
        self._access.storage.close()
        ended &= self._flusher.close(wait_s=min(1.0, self._world.grace_s))
        if self._copy is not None and ended:
            # A write that hangs needs its descriptor: the number of a closed one may soon be another file's.
            (self._copy.close if any(self._stock.held) else self._copy.abort)()


@dataclass(frozen=True)
class GrowingCopy:
    """A `fastload.formats.sources.CopyInProgress`; see there.

    Attributes:
        manifest: The checkpoint.
        path: The path of the copy.
        folder: The directory that it is in for now.
        inventory: Its files.
        stock: The blocks that are there.
    """

    manifest: Manifest
    path: str
    folder: str
    inventory: Inventory
    stock: Stock

    @cached_property
    def names(self) -> dict[str, str]:
        """The files: the name in the checkpoint → the name in the directory."""
        files = self.inventory.files
        pairs = zip(at_source(self.manifest, files), files, strict=True)
        return {original.name: file.name for original, file in pairs}

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def has(self, name: str, begin: int, end: int) -> bool:
        """Whether a byte range of a file is there and verified."""
        file, blocks = self._numbers[name], self.inventory.blocks
        first, last = blocks.number_at(file, begin), blocks.number_at(file, end - 1)
        return self.stock.held.find(0, first, last + 1) < 0

    def ranges(self) -> dict[str, list[tuple[int, int]]]:
        """Returns all byte ranges that are there and verified."""
        originals = {copied: original for original, copied in self.names.items()}
        found = self.inventory.ranges(bytes(self.stock.held))
        return {originals[name]: ranges for name, ranges in found.items()}


@dataclass(frozen=True)
class _Job:
    """The parts that move the data of one leader."""

    storage: CheckpointReader
    check: BlockCheck
    writer: FileWriter
    pipeline: Pipeline


def as_folder(manifest: Manifest) -> Manifest:
    """Returns the manifest of the copy: a single file has its name in the directory of the copy.

    Raises:
        OptionError: The checkpoint has subdirectories, or the name of the file is reserved.
    """
    names = [file.name for file in manifest.files]
    if nested := [name for name in names if "/" in name]:
        raise OptionError(f"{manifest.url} has files in directories, which are not staged: {show(nested)}")
    if not is_single_file(manifest):
        return manifest
    name = _last_name(manifest.url)
    if not is_plain_path(name) or name in _NO_PART:
        raise OptionError(
            f"{manifest.url}: the copy of one file needs its name, and {show(name)} is not a file name"
        )
    return replace(manifest, files=(replace(manifest.files[0], name=name),))


def at_source(manifest: Manifest, files: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
    """Returns the files of a copy by their names at the source.

    A single file has none there, and its seal that of any seal; see `FileWithSibling`.
    """
    if not is_single_file(manifest):
        return files
    seal = _name_of_seal(manifest)
    return tuple(replace(file, name=SEAL_NAME if file.name == seal else "") for file in files)


def copied_to(manifest: Manifest, folder: str) -> str:
    """Returns the path to load a copy from."""
    return posixpath.join(folder, _last_name(manifest.url)) if is_single_file(manifest) else folder


def _name_of_seal(manifest: Manifest) -> str:
    return f"{_last_name(manifest.url)}.{SEAL_NAME}"


def _last_name(url: str) -> str:
    scheme = url.partition("://")[0]
    return unquote(posixpath.basename(urlsplit(url).path)) if scheme in HTTP else posixpath.basename(url)


def list_others(storage: CheckpointReader, manifest: Manifest) -> list[FileEntry]:
    """Returns the files below the root that the manifest does not name, or the seal of a single file."""
    named = {file.name for file in manifest.files}
    if is_single_file(manifest):
        about = storage.stat(SEAL_NAME) if manifest.block_bytes else None
        name = _name_of_seal(manifest)
        return [] if about is None else [FileEntry(name, about.nbytes, about.version, "")]
    names = sorted(set(storage.list() or ()) - named - _NO_PART)
    if bad := [name for name in names if not is_plain_path(name) or "/" in name]:
        raise ManifestError(f"{storage.url}: not plain file names: {show(bad)}")
    stats = stat_all(storage, names)
    return [FileEntry(name, stats[name].nbytes, stats[name].version, "") for name in names]


def essence(manifest: Manifest) -> str:
    """Returns a digest of everything but the URL and the versions of files."""
    files = tuple(replace(file, version="") for file in manifest.files)
    return replace(manifest, url="", files=files).digest()


def changed(access: Access, files: Sequence[FileEntry]) -> str:
    """Returns which file differs from the one that the first reader listed; empty if none does."""
    for file in files:
        found = access.storage.stat(file.name)
        if found is None or (found.nbytes, found.version) != (file.nbytes, file.version):
            return f"sees another {file.name} than rank {access.readers[0]}"
    return ""
