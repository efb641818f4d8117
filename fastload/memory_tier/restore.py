"""In-memory checkpoints: what the hosts have together, and a load of it from the hosts that have it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from fastload.base.memory import allocate_staging, host_view
from fastload.comm.group import join
from fastload.comm.world import World
from fastload.errors import (
    CheckpointError,
    FastloadError,
    IncompleteCheckpoint,
    PeerError,
    StorageError,
    proves_damage,
)
from fastload.formats.manifest import Manifest, TensorEntry
from fastload.formats.open import read_manifest
from fastload.formats.record import CHECKSUM_BYTES, checksum
from fastload.geometry.blocks import Blocks
from fastload.geometry.ranges import Space
from fastload.loading.access import Access, agree_on_access
from fastload.loading.checkpoint import Checkpoint
from fastload.memory_tier.manifest import TABLE_NAME, HostManifest, ShareTable
from fastload.options import LoadOptions
from fastload.storage import PatientStorage
from fastload.storage.local import LocalStorage
from fastload.storage.memory_folder import JobFolder
from fastload.transfer.routed_plan import HeldRange, Holders

_log = logging.getLogger(__name__)
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class InMemoryCheckpoint:
    """An in-memory checkpoint, as far as the hosts that are here have it; the same on all ranks.

    Attributes:
        name: Its name.
        branch: With `step` its place in the history of the run.
        step: Its step.
        nbytes: Length of all files.
        num_shares: Shares that it consists of.
        table: xxh3-128 of what each of them has.
        missing: Numbers of those that no host has.
        holders: For each rank, the shares that its host has.
    """

    name: str
    branch: int
    step: int
    nbytes: int
    num_shares: int
    table: str
    missing: tuple[int, ...]
    holders: Mapping[int, tuple[int, ...]]

    @property
    def point(self) -> tuple[int, int]:
        """Its place in the history of the run: branch and step."""
        return self.branch, self.step

    @property
    def is_complete(self) -> bool:
        """Whether each share is on some host."""
        return not self.missing

    @property
    def lack(self) -> str:
        """Says what is missing; empty if nothing is."""
        if self.is_complete:
            return ""
        return f"{len(self.missing)} of the {self.num_shares} shares of step {self.step} are on no host"


def survey(world: World, what: str, folder: JobFolder) -> list[InMemoryCheckpoint]:
    """Returns the checkpoints that the hosts have together, the oldest first; on all ranks.

    Raises:
        FastloadError: Some rank could not look.
    """

    def look() -> dict[str, Any]:
        found = {name: HostManifest.parse(text) for name, text in folder.records().items()}
        return {name: asdict(each) for name, each in found.items() if each is not None}

    of_rank = world.agree(what, look)
    names = sorted({name for each in of_rank for name in each})
    found = []
    for name in names:
        first = next(each[name] for each in of_rank if name in each)
        shares = first["shares"]
        holders = {rank: tuple(each[name]["held"]) for rank, each in enumerate(of_rank) if name in each}
        here = {share for held in holders.values() for share in held}
        missing = tuple(share for share in shares if share not in here)
        facts = (first["branch"], first["step"], first["nbytes"], len(shares), first["table"])
        found.append(InMemoryCheckpoint(name, *facts, missing, holders))
    return sorted(found, key=lambda each: (each.branch, each.step, each.name))


def load(
    group: Any,
    folder: JobFolder,
    found: InMemoryCheckpoint,
    options: LoadOptions,
    arguments: Mapping[str, Any],
) -> Any:
    """Loads a checkpoint on all ranks, from the hosts that have it.

    If a byte is not as it was written, each host looks at all that it has of the checkpoint, and what is
    damaged comes from another one.

    Args:
        group: The ranks, as for `fastload.load`.
        folder: What the job has on this host.
        found: The checkpoint.
        options: How to load; all is verified.
        arguments: Further ones of `Checkpoint.load`.

    Raises:
        CheckpointError: It cannot be loaded: some of it is damaged in all copies.
        FastloadError: As for `fastload.load`.
    """
    options = replace(options, verify=True, io="buffered", strategy="auto")
    try:
        return _load(group, folder, found, options, arguments, {})
    except FastloadError as error:
        if not _blames_copies(error):
            raise
        _log.warning("step %d in memory: a copy is damaged, looking for another one: %s", found.step, error)
    damage = _look_for_damage(group, folder, found, options)
    if all(damage[rank] is None for rank in found.holders):
        raise IncompleteCheckpoint(f"no host has anything of step {found.step} as it was written")
    return _load(group, folder, found, options, arguments, damage)


def _blames_copies(error: BaseException) -> bool:
    """Whether an error says that some host has not what it should have."""
    if isinstance(error, PeerError):
        return any(map(_blames_copies, error.failures.values()))
    return proves_damage(error) or isinstance(error, StorageError)


_Damage = Mapping[int, Sequence[tuple[int, int, int]] | None]
"""By rank, (file, begin, end) of what its host has and is damaged; None: all of it."""


def _load(
    group: Any,
    folder: JobFolder,
    found: InMemoryCheckpoint,
    options: LoadOptions,
    arguments: Mapping[str, Any],
    damage: _Damage,
) -> Any:
    world = join(group, call=_what(found), timeout_s=options.timeout_s)
    with world.together():
        access = _open(world, folder, found, options, damage)
    with Checkpoint(world, access, options) as checkpoint:
        return checkpoint.load(**arguments)


def _what(found: InMemoryCheckpoint) -> str:
    return f"restoring step {found.step} from memory"


def _open(
    world: World, folder: JobFolder, found: InMemoryCheckpoint, options: LoadOptions, damage: _Damage
) -> Access:
    """Opens a checkpoint on all ranks; whoever has something of it reads that, and nothing else.

    Raises:
        IncompleteCheckpoint: Some of it nobody has.
        FastloadError: Some rank cannot go on.
    """

    def connect_here() -> PatientStorage:
        place = folder.place(found.name)
        if world.rank not in found.holders or damage.get(world.rank, ()) is None:
            place = os.path.join(place, "nothing")
        return connect(place, world, options)

    same = {"call": "restore", "generation": found.name, **options.shared_values()}
    access = agree_on_access(world, _what(found), connect_here, same)
    try:
        manifest = access.manifest

        packed = world.share(
            f"{_what(found)}: telling who has what",
            access.readers[0],
            lambda: read_table(access.storage, found)[0],
        )
        table = ShareTable.parse(packed, found.table, manifest.url)
        holders = _holders(manifest, table, found, access.readers, damage)
        if lacking := holders.lacking(manifest.extents):
            raise IncompleteCheckpoint(
                f"{lacking} bytes of step {found.step} are on no host as they were written"
            )
        readers = tuple(rank for rank in access.readers if rank in holders.ranks)
        return replace(access, holders=holders, readers=readers or access.readers[:1], shared=False)
    except BaseException:
        access.storage.close()
        raise


def connect(place: str, world: World, options: LoadOptions) -> PatientStorage:
    """Opens a host's part of a checkpoint."""
    storage = LocalStorage(place, options.io)
    return PatientStorage(storage, retries=options.retries, timeout_s=world.patience_s / 2)


def read_table(storage: PatientStorage, found: InMemoryCheckpoint) -> tuple[bytes, ShareTable]:
    """Reads what each share has, from this host.

    Raises:
        CheckpointError: It is not here, or damaged.
    """
    stat = storage.stat(TABLE_NAME)
    if stat is None:
        raise IncompleteCheckpoint(f"{storage.url}: it has no {TABLE_NAME}")
    text = storage.read_all(TABLE_NAME, stat)
    return text, ShareTable.parse(text, found.table, f"{storage.url}/{TABLE_NAME}")


def _holders(
    manifest: Manifest, table: ShareTable, found: InMemoryCheckpoint, readers: Sequence[int], damage: _Damage
) -> Holders:
    """Says which ranks can deliver which bytes: whole checksum blocks only, of what is not damaged."""
    numbers = {file.name: number for number, file in enumerate(manifest.files)}
    entries = _entries_by_file(manifest)
    held: list[HeldRange] = []
    for share, files in sorted(table.shares.items()):
        ranks = tuple(rank for rank in readers if share in found.holders.get(rank, ()))
        for name, ranges in files.items() if ranks else ():
            number = numbers.get(name, -1)
            for begin, end in _whole_blocks(entries.get(number, ()), ranges, manifest.block_bytes):
                held.append(HeldRange(number, begin, end, ranks))
    for name in table.whole:
        if name in numbers:
            number = numbers[name]
            held.append(HeldRange(number, 0, manifest.files[number].nbytes, tuple(readers)))
    bad = [(file, begin, end, rank) for rank, ranges in damage.items() for file, begin, end in ranges or ()]
    return Holders(tuple(_without(sorted(held), sorted(bad))))


def _entries_by_file(manifest: Manifest) -> dict[int, list[TensorEntry]]:
    entries: dict[int, list[TensorEntry]] = {}
    for entry in sorted(manifest.tensors, key=lambda entry: (entry.file, entry.offset)):
        if entry.nbytes:
            entries.setdefault(entry.file, []).append(entry)
    return entries


def _whole_blocks(
    entries: Sequence[TensorEntry], ranges: Iterable[tuple[int, int]], block_bytes: int
) -> Iterable[tuple[int, int]]:
    """Yields what of ranges of a file is whole blocks of its tensors; neighbours are joined."""
    space = Space(entries)
    for begin, end in sorted(ranges):
        last: tuple[int, int] | None = None
        for index in range(max(0, space.find(entries[0].file, begin)) if entries else 0, len(entries)):
            start, nbytes = entries[index].offset, entries[index].nbytes
            if start >= end:
                break
            first = start + max(0, -(-(begin - start) // block_bytes) * block_bytes)
            stop = start + nbytes
            if end < stop:
                stop = start + (end - start) // block_bytes * block_bytes
            if first >= stop:
                continue
            if last is not None and last[1] == first:
                last = last[0], stop
                continue
            if last is not None:
                yield last
            last = first, stop
        if last is not None:
            yield last


def _without(held: Sequence[HeldRange], bad: Sequence[tuple[int, int, int, int]]) -> Iterable[HeldRange]:
    """Yields what is held, less what is damaged on some ranks."""
    for each in held:
        cuts = [one for one in bad if one[0] == each.file and one[1] < each.end and one[2] > each.begin]
        if not cuts:
            yield each
            continue
        bounds = {each.begin, each.end}
        bounds |= {bound for one in cuts for bound in one[1:3] if each.begin < bound < each.end}
        ordered = sorted(bounds)
        for begin, end in pairwise(ordered):
            damaged = {rank for _, first, last, rank in cuts if first < end and last > begin}
            ranks = tuple(rank for rank in each.ranks if rank not in damaged)
            if ranks:
                yield HeldRange(each.file, begin, end, ranks)


def _look_for_damage(
    group: Any, folder: JobFolder, found: InMemoryCheckpoint, options: LoadOptions
) -> _Damage:
    """Has each host verify all that it has of a checkpoint; the ranks of a host share the work.

    Raises:
        FastloadError: Some rank could not tell.
    """
    what = f"{_what(found)}: looking for damage"
    world = join(group, call=what, timeout_s=options.timeout_s)
    with world.together():
        hosts = [tuple(home) for home in world.agree(what, lambda: folder.home)]

        def look() -> list[tuple[int, int, int]] | None:
            if world.rank not in found.holders:
                return None
            mates = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
            try:
                with closing(connect(folder.place(found.name), world, options)) as storage:
                    place = mates.index(world.rank), len(mates)
                    return list(_damaged(storage, found, world, *place))
            except (CheckpointError, StorageError) as error:
                _log.warning("%s", error)
                return None

        answers = world.settle(what, look)
        world.acknowledge()
    ranges: dict[int, Sequence[tuple[int, int, int]] | None] = {}
    for rank, host in enumerate(hosts):
        of_host = [answers[mate] for mate, other in enumerate(hosts) if other == host]
        known = [answer for answer in of_host if answer is not None]
        bad = [(file, begin, end) for answer in known for file, begin, end in answer]
        ranges[rank] = bad if len(known) == len(of_host) else None
    return ranges


def _damaged(
    storage: PatientStorage, found: InMemoryCheckpoint, world: World, place: int, num_places: int
) -> Iterable[tuple[int, int, int]]:
    """Yields the blocks that this host has and that are not as they were written.

    Args:
        storage: This host's part of the checkpoint.
        found: The checkpoint.
        world: The ranks, which hear that this one gets on.
        place: Which part of the work is this rank's.
        num_places: In how many parts it is cut.

    Raises:
        CheckpointError: Nothing of it can be told.
        StorageError: Storage failed.
    """
    manifest = read_manifest(storage)
    _, table = read_table(storage, found)
    own = {world.rank: found.holders[world.rank]}
    holders = _holders(manifest, table, replace(found, holders=own), (world.rank,), {})
    blocks = Blocks(Space([entry for entry in manifest.extents if entry.nbytes]), manifest.block_bytes)
    firsts = [blocks.firsts[blocks.space.find(file, -1) + 1] for file in range(len(manifest.files))]
    memory = allocate_staging(max(manifest.block_bytes, _PIECE_BYTES), pinned=False)
    for held in holders.ranges[place::num_places]:
        file = manifest.files[held.file]
        for _, block in blocks.between(held.file, held.begin, held.end):
            data = host_view(memory[: block.nbytes])
            storage.read_into(file.name, block.offset, [data], file.version)
            at = (block.number - firsts[held.file]) * CHECKSUM_BYTES
            if checksum(data) != file.checksums[at : at + CHECKSUM_BYTES]:
                yield held.file, block.offset, block.offset + block.nbytes
        world.note_progress()
        world.peer_failed()  # which tells the others
