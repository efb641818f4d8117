"""Who sees the checkpoint, what is in it, and who can read: settled once, by all ranks together."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import xxhash

from fastload.comm.failures import kinds_of, require_same
from fastload.comm.hosts import machine
from fastload.comm.responses import Each
from fastload.comm.world import World
from fastload.errors import CheckpointNotFound, IncompleteCheckpoint, ManifestError, StorageError
from fastload.formats.manifest import Manifest, Piece, TensorEntry
from fastload.formats.names import METADATA_NAME, RECORD_NAME, SUFFIX
from fastload.formats.open import Sight, header_digest, look, read_manifest, record_digest
from fastload.formats.reading import in_threads, read_bytes
from fastload.formats.record import CHECKSUM_BYTES, checksum
from fastload.geometry.extents import Extent, Space
from fastload.storage import PatientStorage, Storage

if TYPE_CHECKING:
    from fastload.transfer.routed_plan import Holders

_NUM_EACH = 256
_SAMPLE_BYTES = 4096
_NUM_READERS = 8


def samples_of(manifest: Manifest) -> list[Extent]:
    """Returns which ranges are compared: in the order of the bytes, the same on all ranks.

    One of each tensor, or of 256 tensors if there are more, and as many at equal distances: so whatever
    takes a 256th of the bytes is compared, too. 2 MiB in all.
    """
    space = Space([extent for extent in manifest.extents if extent.nbytes])
    if not (num_extents := len(space.extents)):
        return []
    num_tensors = min(_NUM_EACH, num_extents)
    chosen = [number * num_extents // num_tensors for number in range(num_tensors)]
    middles = [space.starts[index] + space.extents[index].nbytes // 2 for index in chosen]
    evenly = [
        (2 * number + 1) * space.nbytes // (2 * _NUM_EACH) for number in range(_NUM_EACH * bool(chosen))
    ]
    return sorted({_around(space, position) for position in middles + evenly})


def _around(space: Space[TensorEntry | Piece], position: int) -> Extent:
    """Returns the page of a file around a position, as far as it is of the same extent."""
    index = space.at(position)
    extent = space.extents[index]
    at = extent.offset + position - space.starts[index]
    begin = max(extent.offset, at - at % _SAMPLE_BYTES)
    end = min(extent.offset + extent.nbytes, at - at % _SAMPLE_BYTES + _SAMPLE_BYTES)
    return Extent(extent.file, begin, end - begin)


def read_samples(storage: PatientStorage, manifest: Manifest) -> bytes:
    """Reads the samples; returns the checksum of each, one after the other.

    Raises:
        StorageError: Storage failed.
    """

    def read(sample: Extent) -> bytes:
        name = manifest.files[sample.file].name
        return checksum(read_bytes(storage, name, sample.offset, sample.nbytes))

    return b"".join(in_threads(read, samples_of(manifest), 1 if storage.in_order else _NUM_READERS))


def difference(storage: PatientStorage, manifest: Manifest, wanted: bytes) -> Extent | None:
    """Returns the first sample that has other bytes here than where `read_samples` read these.

    Raises:
        StorageError: Storage failed.
    """
    found = read_samples(storage, manifest)
    for number, sample in enumerate(samples_of(manifest)):
        at = slice(number * CHECKSUM_BYTES, (number + 1) * CHECKSUM_BYTES)
        if found[at] != wanted[at]:
            return sample
    return None


_log = logging.getLogger(__name__)

_REPLACED = b"replaced"  # instead of a packed manifest
_SHORT_BYTES = 16 << 10  # of a packed manifest that goes with an answer


@dataclass(frozen=True)
class Access:
    """What the ranks agreed on when they opened a checkpoint; the same on every rank.

    Attributes:
        storage: Where this rank reads from.
        manifest: What is where, as the lowest rank that sees it read it.
        hosts: Host of each rank; see `comm.hosts.node`.
        machines: What tells those ranks apart that cannot share memory.
        readers: Ranks that can read, ascending.
        notes: For each rank that cannot read, why.
        shared: Whether all ranks read through one link (object store, network file system).
        holders: Which of the readers have which bytes; None if each has all.
    """

    storage: PatientStorage
    manifest: Manifest
    hosts: tuple[str, ...]
    machines: tuple[str, ...]
    readers: tuple[int, ...]
    notes: Mapping[int, str]
    shared: bool
    holders: Holders | None = None

    @property
    def is_mounted(self) -> bool:
        """Whether all ranks read through one mount, which reads ahead."""
        return self.shared and self.storage.probes

    def without(self, broken: Collection[int]) -> Access:
        """Returns the same, but for ranks that turned out not to be able to read."""
        if not broken:
            return self
        readers = tuple(rank for rank in self.readers if rank not in broken)
        return replace(
            self, readers=readers, notes={**self.notes, **dict.fromkeys(broken, "stopped reading")}
        )


def agree_on_access(
    world: World, path: str, connect: Callable[[], PatientStorage], same: Mapping[str, Any]
) -> Access:
    """Opens a checkpoint on all ranks.

    One rank, the lowest that sees the path, lists it and reads its headers; the others get its
    answer. Where looking costs nothing (file systems), a rank counts as a reader if its files are
    the same as that rank's: same size and version, or else same size and commit record, or same size, header
    and samples of the data.

    Args:
        world: The ranks.
        path: What to open, for messages.
        connect: Opens the storage there.
        same: What has to be the same on all ranks, by name.

    Raises:
        CheckpointNotFound: No rank sees it.
        PlanMismatch: The ranks did not ask for the same.
        ManifestError: It is malformed.
        PeerError: A rank could not say, with its cause.
    """
    for last in (False, True):
        opened: list[PatientStorage] = []
        try:
            access = _agree(world, path, connect, same, opened, last=last)
        except BaseException:
            for storage in opened:
                storage.close()
            raise
        if access is not None:
            return access
        opened[0].close()
    raise AssertionError("the last try ends in one way or the other")


def _agree(
    world: World,
    path: str,
    connect: Callable[[], PatientStorage],
    same: Mapping[str, Any],
    opened: list[PatientStorage],
    *,
    last: bool,
) -> Access | None:
    """Returns None if what was there was replaced while it was looked at, unless this is the last try."""
    own: list[Manifest] = []

    def hello() -> dict[str, Any]:
        storage = connect()
        opened.append(storage)
        # Where looking costs a request, rank 0 finds out when it reads the manifest.
        sees = look(storage) if storage.probes else Sight.CHECKPOINT * (world.rank == 0)
        has_it = sees == Sight.CHECKPOINT
        return {
            "machine": Each([xxhash.xxh3_64_hexdigest(machine(world.host, world.rank).encode())]),
            "same": dict(same),
            "sees": sees,
            "shared": storage.shared,
            "manifest": _read_ahead(world, storage, own) if has_it and world.rank == 0 else None,
            "files": _files_seen(storage) if has_it and storage.probes and world.size > 1 else "",
        }

    hellos = world.agree(f"opening {path}", hello)
    storage = opened[0]
    kinds = kinds_of(hellos)
    require_same([hello["same"] for hello in hellos])
    views = [hello["sees"] for hello in hellos]
    source = views.index(max(views))  # an empty mount point must not hide the files from the others
    if not views[source]:
        where = "any of the hosts" if world.size > 1 else world.host
        raise CheckpointNotFound(f"{storage.url}: no such checkpoint on {where}")

    read_ahead = hellos[source]["manifest"]
    if read_ahead is not None:
        manifest = own[0] if own else Manifest.from_bytes(base64.b64decode(read_ahead))
    else:
        found = _share_manifest(world, source, storage, connect, own, last=last)
        if found is None:
            return None
        manifest = found

    notes: dict[int, str] = {}
    files = _digest((file.name, file.nbytes, file.version) for file in manifest.files)
    if storage.probes and any(hello["files"] != files for hello in kinds):
        sees = views[world.rank] == Sight.CHECKPOINT
        notes = _compare(world, storage, manifest, source, sees=sees)
    (machines,) = hellos[0]["machine"]
    return Access(
        storage=storage,
        manifest=manifest,
        hosts=tuple(world.nodes.values()),
        machines=tuple(machines.values()),
        readers=tuple(sorted(set(range(world.size)) - notes.keys())),
        notes=notes,
        shared=any(hello["shared"] for hello in kinds),
    )


def _read_ahead(world: World, storage: PatientStorage, own: list[Manifest]) -> str | None:
    """Reads the headers on a rank that sees a checkpoint, before it is known that nobody else is to.

    Returns:
        The manifest, to be told to the others; None if it is long, or there is something wrong with it,
        which is found once more when it is shared.
    """
    if world.size == 1:
        return None
    try:
        manifest = read_manifest(storage)
    except (IncompleteCheckpoint, ManifestError):
        return None
    own.append(manifest)
    packed = manifest.to_bytes()
    return str(base64.b64encode(packed), "ascii") if len(packed) <= _SHORT_BYTES else None


def _files_seen(storage: Storage) -> str:
    """Returns a digest of the files that a checkpoint has here, if it is one of safetensors files."""
    names = storage.list()
    names = [""] if names is None else [name for name in names if name.endswith(SUFFIX)]
    about = [(name, storage.stat(name)) for name in sorted(names)]
    return _digest((name, one.nbytes, one.version) for name, one in about if one is not None)


def _digest(files: Iterable[tuple[str, int, str]]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(sorted(files)).encode())


def _share_manifest(
    world: World,
    source: int,
    storage: PatientStorage,
    connect: Callable[[], PatientStorage],
    own: list[Manifest],
    *,
    last: bool,
) -> Manifest | None:
    """Reads the headers on one rank, for all; None if what they are of was replaced meanwhile."""

    def read() -> bytes:
        try:
            if not own:
                own.append(read_manifest(storage))
        except (IncompleteCheckpoint, ManifestError) as error:
            if last or not _is_outdated(storage, connect):
                raise
            _log.info("%s: opening it once more, since it was replaced meanwhile: %s", storage.url, error)
            return _REPLACED
        return own[0].to_bytes() if world.size > 1 else b""

    packed = world.share(f"reading the headers of {storage.url}", source, read) if world.size > 1 else read()
    if packed == _REPLACED:
        return None
    return own[0] if own else Manifest.from_bytes(packed)


def look_closer(world: World, access: Access) -> Access:
    """Reads once more what is where, now without taking anything to be like something else.

    Raises:
        FastloadError: As when it was opened.
    """
    storage, own = access.storage, list[Manifest]()
    _log.info("%s: not all items that look alike are: it is opened once more", storage.url)

    def read() -> bytes:
        own.append(read_manifest(storage, exact=True))
        return own[0].to_bytes()

    what = f"looking closer at {storage.url}"
    packed = world.share(what, access.readers[0], read) if world.size > 1 else read()
    return replace(access, manifest=own[0] if own else Manifest.from_bytes(packed))


def _is_outdated(storage: PatientStorage, connect: Callable[[], PatientStorage]) -> bool:
    """Whether there are other files by now than those that a storage has told of."""
    fresh = connect()
    try:
        return not storage.agrees_with(fresh)
    finally:
        fresh.close()


def _compare(
    world: World, storage: PatientStorage, manifest: Manifest, source: int, *, sees: bool
) -> dict[int, str]:
    """Returns the ranks that do not see what the rank that read the headers saw, and what is different there.

    Metadata and headers are the same in every step of a training: where nothing has checksums of the data,
    copies are compared by samples of them.
    """

    def look() -> tuple[str, bool]:
        if not sees:
            return f"does not see {storage.url}", False
        return ("", False) if world.rank == source else _difference(storage, manifest, source)

    looks = world.agree(f"comparing what the ranks see of {storage.url}", look)
    notes = {rank: note for rank, (note, _) in enumerate(looks) if note}
    copies = {rank for rank, (note, is_copy) in enumerate(looks) if is_copy and not note}
    if not copies or manifest.block_bytes:
        return notes
    what = f"comparing data of {storage.url}"
    wanted = world.share(what, source, lambda: read_samples(storage, manifest))

    def compare() -> str:
        try:
            found = difference(storage, manifest, wanted) if world.rank in copies else None
        except StorageError as error:
            return f"cannot read it: {error}"
        if found is None:
            return ""
        label = manifest.files[found.file].name or storage.url
        place = f"{label} [bytes {found.offset}-{found.offset + found.nbytes}]"
        return f"sees other data than rank {source} in {place}: not the same checkpoint"

    return notes | {rank: note for rank, note in enumerate(world.agree(what, compare)) if note}


def _difference(storage: Storage, manifest: Manifest, source: int) -> tuple[str, bool]:
    """Compares names, sizes, versions and headers with what the rank that read the headers saw.

    Returns:
        What is different here, empty if nothing is; and whether some file is a copy: of another version.
    """
    is_copy = same_record = False
    for file in manifest.files:
        found = storage.stat(file.name)
        label = file.name or storage.url
        if found is None:
            return f"does not see {label}", is_copy
        if found.nbytes != file.nbytes:
            sizes = f"of {found.nbytes} bytes, rank {source} of {file.nbytes}"
            return f"sees {label} {sizes}: not the same file", is_copy
        if found.version == file.version or same_record:
            continue
        is_copy = True
        if manifest.record_digest:
            if record_digest(storage, manifest) != manifest.record_digest:
                name = METADATA_NAME if manifest.format == "dcp" else RECORD_NAME
                return f"sees another {name} than rank {source}: not the same checkpoint", is_copy
            same_record = True
        elif header_digest(storage, file.name, file.nbytes) != file.header_digest:
            return f"sees {label} with another header than rank {source}: not the same file", is_copy
    return "", is_copy
