"""In-memory checkpoints: a survey of those on all hosts, and loads from these hosts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from fastload.base.memory import allocate_staging, host_view
from fastload.comm.group import join, separate_call
from fastload.comm.world import World
from fastload.errors import (
    CheckpointError,
    FastloadError,
    IncompleteCheckpoint,
    PeerError,
    StorageError,
    proves_damage,
)
from fastload.ext.memory.folder import JobFolder
from fastload.ext.memory.manifest import TABLE_NAME, HostManifest, ShareTable
from fastload.formats.manifest import Manifest
from fastload.formats.open import read_manifest
from fastload.formats.record import checksum
from fastload.geometry.blocks import Blocks
from fastload.loading.access import Access, agree_on_access
from fastload.loading.checkpoint import Checkpoint
from fastload.options import LoadOptions, Patience
from fastload.storage import CheckpointReader, PatientStorage
from fastload.storage.local import LocalStorage
from fastload.transfer.routed_plan import SuppliedRange, Supply

_log = logging.getLogger(__name__)
_MIN_BUFFER_BYTES = 8 << 20


@dataclass(frozen=True)
class InMemoryCheckpoint:
    """An in-memory checkpoint, as the hosts of this job have it; the same on all ranks.

    Attributes:
        name: Its name.
        manifest: The manifest on one of the hosts.
        holders: Rank → the shares on its host.
    """

    name: str
    manifest: HostManifest
    holders: Mapping[int, tuple[int, ...]]

    @property
    def step(self) -> int:
        """Its step."""
        return self.manifest.step

    @property
    def problem(self) -> str:
        """Names the number of missing shares; empty if it is complete."""
        shares = self.manifest.shares
        missing = set(shares).difference(*self.holders.values())
        if not missing:
            return ""
        return f"{len(missing)} of the {len(shares)} shares of step {self.step} are on no host"


def survey(world: World, records: Callable[[], Mapping[str, bytes]]) -> list[InMemoryCheckpoint]:
    """Returns the checkpoints that the hosts have together, the oldest first; on all ranks.

    Args:
        world: The ranks.
        records: Returns the manifests on this host, by the name of their checkpoint.

    Raises:
        FastloadError: Some rank could not read its host's manifests.
    """
    with world.step() as step:
        found = records().items()
        step.answer({name: text.decode() for name, text in found if HostManifest.parse(text)})
    manifests: dict[str, dict[int, HostManifest]] = {}
    for rank, texts in enumerate(step.answers):
        for name, text in texts.items():
            manifest = HostManifest.parse(text.encode())
            assert manifest is not None
            manifests.setdefault(name, {})[rank] = manifest
    checkpoints = [
        InMemoryCheckpoint(
            name, next(iter(of_rank.values())), {rank: manifest.held for rank, manifest in of_rank.items()}
        )
        for name, of_rank in manifests.items()
    ]
    return sorted(checkpoints, key=lambda checkpoint: (checkpoint.manifest.point, checkpoint.name))


def load(
    group: Any,
    folder: JobFolder,
    checkpoint: InMemoryCheckpoint,
    options: LoadOptions,
    arguments: Mapping[str, Any],
) -> Any:
    """Loads a checkpoint on all ranks, from the hosts that have it.

    If a checksum is wrong, each host verifies its part of the checkpoint, and damaged blocks are read
    from other hosts.

    Args:
        group: The ranks, as for `fastload.load`.
        folder: The job's folder on this host.
        checkpoint: The checkpoint.
        options: How to load; everything is verified.
        arguments: Further arguments of `Checkpoint.load`.

    Raises:
        CheckpointError: All copies of some block are damaged.
        FastloadError: As for `fastload.load`.
    """
    options = replace(options, verify=True, io="buffered", strategy="auto")
    try:
        return _load(group, folder, checkpoint, options, arguments, {})
    except FastloadError as error:
        if not _blames_copies(error):
            raise
        _log.warning("step %d in memory: a copy is damaged, trying another one: %s", checkpoint.step, error)
    damage = find_damage(group, folder, checkpoint, options)
    return _load(group, folder, checkpoint, options, arguments, damage)


def _blames_copies(error: BaseException) -> bool:
    """Whether an error shows that a host's copy is damaged or missing."""
    if isinstance(error, PeerError):
        return any(map(_blames_copies, error.failures.values()))
    return proves_damage(error) or isinstance(error, StorageError)


HostDamage = Mapping[int, Sequence[tuple[str, int, int]] | None]
"""Rank → the damaged ranges (name of the file, begin, end) on its host; None if all is damaged."""


def _load(
    group: Any,
    folder: JobFolder,
    checkpoint: InMemoryCheckpoint,
    options: LoadOptions,
    arguments: Mapping[str, Any],
    damage: HostDamage,
) -> Any:
    world = join(group, call=_what(checkpoint), timeout_s=options.timeout_s)
    with world.together():
        access = _open(world, folder, checkpoint, options, damage)
    with Checkpoint(world, access, options) as opened:
        return opened.load(**arguments)


def _what(checkpoint: InMemoryCheckpoint) -> str:
    return f"restoring step {checkpoint.step} from memory"


def _open(
    world: World, folder: JobFolder, checkpoint: InMemoryCheckpoint, options: LoadOptions, damage: HostDamage
) -> Access:
    """Opens a checkpoint on all ranks; each reads only the undamaged bytes on its host.

    Raises:
        IncompleteCheckpoint: No host has some of the bytes.
        FastloadError: Some rank failed.
    """

    def connect_here() -> PatientStorage:
        path = folder.place(checkpoint.name)
        if world.rank not in checkpoint.holders or damage.get(world.rank, ()) is None:
            path = os.path.join(path, "nothing")
        return connect(path, world, options)

    same = {"call": "restore", "checkpoint": checkpoint.name, **options.shared_values()}
    access = agree_on_access(world, _what(checkpoint), connect_here, same)
    try:
        manifest = access.stored
        with world.step(f"{_what(checkpoint)}: sharing the table of shares") as step:
            if world.rank == access.readers[0]:
                step.answer(attach=read_table(access.storage, checkpoint)[0])
        table = ShareTable.parse(step.attachment, checkpoint.manifest.table, manifest.url)
        supply = _supply(manifest, table, checkpoint, access.readers, damage)
        if lacking := supply.lacking(manifest.extents):
            raise IncompleteCheckpoint(
                f"{lacking} bytes of step {checkpoint.step} are missing or damaged on all hosts"
            )
        readers = tuple(rank for rank in access.readers if rank in supply.ranks)
        readers = readers or access.readers[:1]
        return replace(access, supply=supply, readers=readers, shared=False, source="memory")
    except BaseException:
        access.storage.close()
        raise


def connect(path: str, world: World, options: LoadOptions) -> PatientStorage:
    """Opens a host's part of a checkpoint."""
    storage = LocalStorage(path, options.io)
    return PatientStorage(storage, Patience(options.retries, world.patience_s / 2))


def read_table(storage: CheckpointReader, checkpoint: InMemoryCheckpoint) -> tuple[bytes, ShareTable]:
    """Reads the table of shares from this host; returns its bytes, too.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    text = read_file(storage, TABLE_NAME)
    return text, ShareTable.parse(text, checkpoint.manifest.table, f"{storage.url}/{TABLE_NAME}")


def read_file(storage: CheckpointReader, name: str) -> bytes:
    """Reads a file.

    Raises:
        IncompleteCheckpoint: It is missing.
    """
    stat = storage.stat(name)
    if stat is None:
        raise IncompleteCheckpoint(f"{storage.url}: it has no {name}")
    return storage.read_all(name, stat)


def _supply(
    manifest: Manifest,
    table: ShareTable,
    checkpoint: InMemoryCheckpoint,
    readers: Sequence[int],
    damage: HostDamage,
) -> Supply:
    """Returns the byte ranges of complete, undamaged checksum blocks with the ranks that have them."""
    numbers = {file.name: number for number, file in enumerate(manifest.files)}
    supplied: list[SuppliedRange] = []
    for share, files in sorted(table.shares.items()):
        ranks = tuple(rank for rank in readers if share in checkpoint.holders.get(rank, ()))
        for name, ranges in files.items() if ranks else ():
            if name in numbers:
                for begin, end in ranges:
                    of_share = SuppliedRange(numbers[name], begin, end - begin, ranks)
                    supplied += _complete_blocks(manifest.blocks, of_share)
    for name in table.whole:
        if name in numbers:
            number = numbers[name]
            supplied.append(SuppliedRange(number, 0, manifest.files[number].nbytes, tuple(readers)))
    bad = [
        (numbers[name], begin, end, rank)
        for rank, ranges in damage.items()
        for name, begin, end in ranges or ()
    ]
    return Supply(tuple(_without(sorted(supplied), sorted(bad))))


def _complete_blocks(blocks: Blocks, supplied: SuppliedRange) -> Iterable[SuppliedRange]:
    """Yields a range without the bytes at its ends that belong to incomplete blocks, if any is left.

    The tensors of a file are contiguous, and so are its blocks.
    """
    complete = blocks.between(supplied.file, supplied.offset, supplied.end)
    first = next((block.offset for _, block in complete), supplied.end)
    incomplete = blocks.at(supplied.file, supplied.end - 1)
    last = supplied.end
    if incomplete is not None and incomplete.end > last:
        last = incomplete.offset
    if first < last:
        yield supplied._replace(offset=first, nbytes=last - first)


def _without(
    supplied: Sequence[SuppliedRange], bad: Sequence[tuple[int, int, int, int]]
) -> Iterable[SuppliedRange]:
    """Yields supplied ranges without the ranks on which they are damaged."""
    for each in supplied:
        cuts = [one for one in bad if one[0] == each.file and one[1] < each.end and one[2] > each.offset]
        if not cuts:
            yield each
            continue
        bounds = {each.offset, each.end}
        bounds |= {bound for one in cuts for bound in one[1:3] if each.offset < bound < each.end}
        ordered = sorted(bounds)
        for begin, end in pairwise(ordered):
            damaged = {rank for _, first, last, rank in cuts if first < end and last > begin}
            ranks = tuple(rank for rank in each.ranks if rank not in damaged)
            if ranks:
                yield SuppliedRange(each.file, begin, end - begin, ranks)


def find_damage(
    group: Any, folder: JobFolder, checkpoint: InMemoryCheckpoint, options: LoadOptions
) -> HostDamage:
    """Verifies a checkpoint on each host; the ranks of a host share the work.

    Raises:
        IncompleteCheckpoint: No host has an undamaged part.
        FastloadError: Some rank failed.
    """
    what = f"looking for damage of step {checkpoint.step} in memory"
    with separate_call(group, what, timeout_s=options.timeout_s) as world:
        with world.step() as locating:
            locating.answer(folder.host_directory)
        hosts = [tuple(directory) for directory in locating.answers]
        host_ranks = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
        with world.step(is_long=True) as verifying:
            verifying.answer(_verify(world, folder, checkpoint, options, host_ranks))
        of_rank = verifying.answers
    damage: dict[int, Sequence[tuple[str, int, int]] | None] = {}
    for rank, host in enumerate(hosts):
        of_host = [of_rank[other] for other, its_host in enumerate(hosts) if its_host == host]
        known = [ranges for ranges in of_host if ranges is not None]
        bad = [(name, begin, end) for ranges in known for name, begin, end in ranges]
        damage[rank] = bad if len(known) == len(of_host) else None
    if all(damage[rank] is None for rank in checkpoint.holders):
        raise IncompleteCheckpoint(f"all copies of step {checkpoint.step} in memory are damaged")
    return damage


def _verify(
    world: World,
    folder: JobFolder,
    checkpoint: InMemoryCheckpoint,
    options: LoadOptions,
    host_ranks: Sequence[int],
) -> list[tuple[str, int, int]] | None:
    """Verifies this rank's part of what its host has; returns the damaged blocks, None if all is damaged."""
    if world.rank not in checkpoint.holders:
        return None
    try:
        with closing(connect(folder.place(checkpoint.name), world, options)) as storage:
            return list(_damaged(storage, checkpoint, world, host_ranks.index(world.rank), len(host_ranks)))
    except (CheckpointError, StorageError) as error:
        _log.warning("%s", error)
        return None


def _damaged(
    storage: PatientStorage, checkpoint: InMemoryCheckpoint, world: World, part: int, num_parts: int
) -> Iterable[tuple[str, int, int]]:
    """Yields the damaged blocks on this host.

    Args:
        storage: This host's part of the checkpoint.
        checkpoint: The checkpoint.
        world: The ranks; the others wait while this one makes progress.
        part: This rank's part of the work.
        num_parts: Number of parts.

    Raises:
        CheckpointError: The manifest or the table of shares is damaged.
        StorageError: Storage failed.
    """
    manifest = read_manifest(storage)
    _, table = read_table(storage, checkpoint)
    own = {world.rank: checkpoint.holders[world.rank]}
    supply = _supply(manifest, table, replace(checkpoint, holders=own), (world.rank,), {})
    memory = allocate_staging(max(manifest.block_bytes, _MIN_BUFFER_BYTES), pinned=False)
    for supplied in supply.ranges[part::num_parts]:
        file = manifest.files[supplied.file]
        for _, block in manifest.blocks.between(supplied.file, supplied.offset, supplied.end):
            data = host_view(memory[: block.nbytes])
            storage.read_into(file.name, block.offset, [data], file.version)
            if checksum(data) != manifest.recorded(block)[1]:
                yield file.name, block.offset, block.end
        world.note_progress()
        world.peer_failed()  # also shows the progress to the others
