"""Opens a checkpoint on all ranks: its manifest, the same on each, and the ranks that can read it."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import xxhash

from fastload.base.threads import in_threads
from fastload.comm.failures import kinds_of, require_same
from fastload.comm.hosts import machine_digest
from fastload.comm.responses import Each
from fastload.comm.world import World
from fastload.errors import CheckpointNotFound, IncompleteCheckpoint, ManifestError, OptionError, StorageError
from fastload.formats.layers import Layer, decoded, layers_of
from fastload.formats.manifest import Manifest, Piece, TensorEntry
from fastload.formats.names import NAMES, SEAL_NAME, SUFFIX
from fastload.formats.open import (
    Sight,
    digest_of,
    look,
    read_manifest,
    record_name,
)
from fastload.formats.reading import read_bytes
from fastload.formats.record import CHECKSUM_BYTES, checksum
from fastload.geometry.ranges import ByteRange, Space
from fastload.options import LoadOptions, Patience, ReadOptions
from fastload.storage import CheckpointReader, Location, Storage, open_with_sibling
from fastload.storage.folders import similar_name

if TYPE_CHECKING:
    from fastload.transfer.read import CachedBytes
    from fastload.transfer.routed_plan import Supply

_log = logging.getLogger(__name__)

_MAX_PACKED_BYTES = 16 << 10  # of a manifest that is sent with a response
_REPLACED = b"replaced"  # instead of a packed manifest
_NUM_SAMPLES = 256
_SAMPLE_BYTES = 4096
_NUM_READERS = 8


@dataclass(frozen=True)
class Access:
    """An open checkpoint and its readers; the same on every rank, but for `storage` and `cached`.

    Attributes:
        storage: The storage that this rank reads from.
        stored: The files and their tensors, as the lowest rank that sees them read it.
        logical: The tensors that can be requested, which a layer may decode from those of `stored`.
        hosts: Host of each rank; see `comm.hosts.node`.
        machines: For each rank, an identifier that ranks have in common if they can share memory.
        readers: Ranks that can read, ascending.
        notes: For each rank that cannot read, the reason.
        shared: Whether all ranks read through one link (object store, network file system).
        first_byte_s: Least time in seconds to the first byte of the headers, on rank 0; 0 if it is unknown.
        supply: The readers of each byte; None if every reader has all of them.
        cached: The bytes that this rank has in its own memory; None if no rank has any.
        components: The checkpoints that a layer has composed it of: of a delta, its own files, its base, and
            so on, the complete one last. `logical` of each is what it stands for with those after it.
        layers: Layers that serve loads.
        source: ``storage``, or the name of a tier.
    """

    storage: CheckpointReader
    stored: Manifest
    logical: Manifest
    hosts: tuple[str, ...]
    machines: tuple[str, ...]
    readers: tuple[int, ...]
    notes: Mapping[int, str]
    shared: bool
    first_byte_s: float = 0.0
    supply: Supply | None = None
    cached: CachedBytes | None = None
    components: tuple[Access, ...] = ()
    layers: tuple[Layer, ...] = ()
    source: str = "storage"

    @property
    def is_mounted(self) -> bool:
        """Whether all ranks read through one mount, which reads ahead."""
        return self.shared and self.storage.probes

    def without(self, broken: Collection[int]) -> Access:
        """Returns the access after some readers have stopped reading."""
        if not broken:
            return self
        readers = tuple(rank for rank in self.readers if rank not in broken)
        return replace(
            self, readers=readers, notes={**self.notes, **dict.fromkeys(broken, "stopped reading")}
        )


@dataclass(frozen=True)
class OpenCall:
    """The call that opens a checkpoint, for layers that open others with it.

    Attributes:
        world: The ranks.
        location: The checkpoint.
        options: How to read.
        connect: Opens a storage, without a request.
        arguments: Those that have to be the same on all ranks, by name.
        read: Reads a manifest.
    """

    world: World
    location: Location
    options: ReadOptions
    connect: Callable[[Location], CheckpointReader]
    arguments: Mapping[str, Any]
    read: Callable[[Storage], Manifest]

    def open_at(self, location: Location) -> Access:
        """Opens the files at a location on all ranks, without their layers; see `agree_on_access`."""
        connect = partial(self.connect, location)
        access = agree_on_access(self.world, location.url, connect, self.arguments, self.read)
        try:
            storage, is_base = access.storage, location != self.location
            for source in self.options.sources or ():
                storage = source.connect(storage, access.stored, is_base=is_base)
        except BaseException:
            access.storage.close()
            raise
        return replace(access, storage=storage)


def open_access(
    world: World,
    location: Location,
    storage_options: Mapping[str, Any] | None,
    options: ReadOptions,
    call: Mapping[str, Any],
    *,
    read: Callable[[Storage], Manifest] = read_manifest,
) -> Access:
    """Opens the checkpoint at a location on all ranks.

    Args:
        world: The ranks.
        location: The checkpoint.
        storage_options: See `fastload.load`.
        options: How to read.
        call: Arguments that have to be the same on all ranks, by name.
        read: Reads the manifest.

    Raises:
        FastloadError: See `agree_on_access`.
    """
    patience = Patience(options.retries, world.patience_s / 2)
    same = {**call, **options.shared_values()}

    def connect(location: Location) -> CheckpointReader:
        return open_with_sibling(
            location, NAMES, storage_options, sibling=SEAL_NAME, io=options.io, patience=patience
        )

    opening = OpenCall(world, location, options, connect, same, read)
    with world.together():
        access = opening.open_at(location)
        try:
            dequantize = isinstance(options, LoadOptions) and options.dequantize
            layers = layers_of(access.stored, dequantize=dequantize)
            if layers and access.stored.guards:  # no layer finds its tensors again elsewhere
                access = reopen_exactly(world, access)
            for layer in layers:
                access = layer.open(access, opening)
            is_stored, logical = access.logical is access.stored, decoded(access.logical)
            access = replace(access, stored=logical if is_stored else access.stored, logical=logical)
        except BaseException:
            access.storage.close()
            raise
    return access


def agree_on_access(
    world: World,
    url: str,
    connect: Callable[[], CheckpointReader],
    call: Mapping[str, Any],
    read: Callable[[Storage], Manifest] = read_manifest,
) -> Access:
    """Opens a checkpoint on all ranks.

    The lowest rank that sees the checkpoint lists it and reads its headers; the others get its manifest. On
    file systems, a rank can read if its files have the same sizes, and the same versions, commit record, or
    headers and samples of the data.

    Args:
        world: The ranks.
        url: The checkpoint, for messages.
        connect: Opens the storage of the checkpoint.
        call: Arguments that have to be the same on all ranks, by name.
        read: Reads the manifest.

    Raises:
        CheckpointNotFound: No rank sees it.
        PlanMismatch: The ranks make different calls.
        ManifestError: It is malformed.
        PeerError: A rank failed, with its cause.
    """
    opening = _Opening(world, connect, read)
    try:
        access = opening.run(url, call, is_last=False)
        if access is None:
            opening.close()
            opening = _Opening(world, connect, read)
            access = opening.run(url, call, is_last=True)
        assert access is not None
        return access
    except BaseException:
        opening.close()
        raise


class _Opening:
    """An attempt to open a checkpoint, on one rank.

    Args:
        world: The ranks.
        connect: Opens the storage.
        read: Reads the manifest.
    """

    def __init__(
        self,
        world: World,
        connect: Callable[[], CheckpointReader],
        read: Callable[[Storage], Manifest],
    ) -> None:
        self._world = world
        self._connect = connect
        self._read = read
        self._storage: CheckpointReader | None = None
        self._manifest: Manifest | None = None  # once this rank has read the headers

    def run(self, url: str, call: Mapping[str, Any], *, is_last: bool) -> Access | None:
        """Returns None if the checkpoint was replaced meanwhile, and this is not the last attempt."""
        world = self._world
        with world.step(f"opening {url}") as step:
            storage = self._storage = self._connect()
            step.answer(self._look(storage, call))
        responses = step.answers
        kinds = kinds_of(responses)
        require_same([one["call"] for one in responses])
        views = [one["sees"] for one in responses]
        source = views.index(max(views))  # an empty mount point must not hide the files from the others
        if not views[source]:
            where = "any of the hosts" if world.size > 1 else world.host
            similar = similar_name(storage.url)
            hint = f"; did you mean {similar}?" if similar else ""
            raise CheckpointNotFound(f"{storage.url}: no such checkpoint on {where}{hint}")
        if (early := responses[source]["manifest"]) is None:
            self._share_manifest(storage, source, is_last=is_last)
        elif self._manifest is None:
            self._manifest = Manifest.from_bytes(base64.b64decode(early))
        if (manifest := self._manifest) is None:
            return None
        notes: dict[int, str] = {}
        files = _digest((file.name, file.nbytes, file.version) for file in manifest.files)
        if storage.probes and any(one["files"] != files for one in kinds):
            sees = views[world.rank] == Sight.CHECKPOINT
            notes = _compare(world, storage, manifest, source, sees=sees)
        (machines,) = responses[0]["machine"]
        return Access(
            storage=storage,
            stored=manifest,
            logical=manifest,
            hosts=tuple(world.nodes.values()),
            machines=tuple(machines.values()),
            readers=tuple(sorted(set(range(world.size)) - notes.keys())),
            notes=notes,
            shared=any(one["shared"] for one in kinds),
            first_byte_s=responses[0]["first_byte_s"],
        )

    def close(self) -> None:
        """Closes the storage."""
        if self._storage is not None:
            self._storage.close()

    def _look(self, storage: CheckpointReader, call: Mapping[str, Any]) -> dict[str, Any]:
        world = self._world
        # Where a look costs a request, rank 0 looks when it reads the manifest.
        sees = look(storage) if storage.probes else Sight.CHECKPOINT * (world.rank == 0)
        has_it = sees == Sight.CHECKPOINT
        early = self._read_early(storage) if has_it and world.rank == 0 and world.size > 1 else None
        return {
            "machine": Each([machine_digest(world.host, world.rank)]),
            "call": dict(call),
            "sees": sees,
            "shared": storage.shared,
            "manifest": early,
            "first_byte_s": round(storage.first_byte_s, 6),
            "files": _files_seen(storage) if has_it and storage.probes and world.size > 1 else "",
        }

    def _read_early(self, storage: CheckpointReader) -> str | None:
        """Reads the headers on rank 0, which is the source of nearly all checkpoints.

        Returns:
            The manifest for the others; None if it is long, or malformed, which `_share_manifest` reports.
        """
        try:
            self._manifest = self._read(storage)
        except (IncompleteCheckpoint, ManifestError):
            return None
        packed = self._manifest.to_bytes()
        return str(base64.b64encode(packed), "ascii") if len(packed) <= _MAX_PACKED_BYTES else None

    def _share_manifest(self, storage: CheckpointReader, source: int, *, is_last: bool) -> None:
        """Reads the headers on one rank, for all. Leaves no manifest if the checkpoint was replaced."""
        with self._world.step(f"reading the headers of {storage.url}") as step:
            if self._world.rank == source:
                step.answer(attach=self._read_packed(storage, is_last=is_last))
        if step.attachment == _REPLACED:
            self._manifest = None
        elif self._manifest is None:
            self._manifest = Manifest.from_bytes(step.attachment)

    def _read_packed(self, storage: CheckpointReader, *, is_last: bool) -> bytes:
        """Reads the headers; returns the manifest for the other ranks."""
        try:
            self._manifest = self._manifest or self._read(storage)
        except (IncompleteCheckpoint, ManifestError) as error:
            if is_last or not self._is_outdated(storage):
                raise
            _log.info("%s: opened again, since it was replaced meanwhile: %s", storage.url, error)
            return _REPLACED
        return self._manifest.to_bytes() if self._world.size > 1 else b""

    def _is_outdated(self, storage: CheckpointReader) -> bool:
        """Whether the files have changed since the storage listed them."""
        fresh = self._connect()
        try:
            return not storage.agrees_with(fresh)
        finally:
            fresh.close()


def reopen_exactly(world: World, access: Access) -> Access:
    """Reads the manifest again, with every layout read and none inferred.

    Raises:
        FastloadError: As when it was opened.
    """
    assert access.logical is access.stored, "layers get a manifest without guards"
    storage, stored = access.storage, None
    _log.info("%s: opened again, since layouts were not as inferred", storage.url)
    with world.step(f"reading all layouts of {storage.url}") as step:
        if world.rank == access.readers[0]:
            stored = read_manifest(storage, exact=True)
            step.answer(attach=stored.to_bytes())
    stored = stored or Manifest.from_bytes(step.attachment)
    return replace(access, stored=stored, logical=stored)


def _files_seen(storage: Storage) -> str:
    """Returns a digest of the files at the root: of those of safetensors, if it is a directory."""
    names = storage.list()
    names = [""] if names is None else [name for name in names if name.endswith(SUFFIX)]
    about = [(name, storage.stat(name)) for name in sorted(names)]
    return _digest((name, one.nbytes, one.version) for name, one in about if one is not None)


def _digest(files: Iterable[tuple[str, int, str]]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(sorted(files)).encode())


def _compare(
    world: World, storage: CheckpointReader, manifest: Manifest, source: int, *, sees: bool
) -> dict[int, str]:
    """Returns the ranks whose files differ from those of the source, each with the difference.

    Metadata and headers are the same in every step of a training. Copies without a commit record are
    therefore compared by samples of the data, too.
    """
    with world.step(f"comparing what the ranks see of {storage.url}") as step:
        if not sees:
            step.answer((_why_unseen(storage.url, manifest), False))
        else:
            step.answer(("", False) if world.rank == source else _difference(storage, manifest, source))
    notes = {rank: note for rank, (note, _) in enumerate(step.answers) if note}
    copies = {rank for rank, (note, is_copy) in enumerate(step.answers) if is_copy and not note}
    if not copies or manifest.format == "fastload":  # whose record is compared
        return notes
    what = f"comparing data of {storage.url}"
    with world.step(what) as sampling:
        if world.rank == source:
            sampling.answer(attach=_read_samples(storage, manifest))
    with world.step(what) as step:
        is_copy = world.rank in copies
        step.answer(_other_data(storage, manifest, sampling.attachment, source) if is_copy else "")
    return notes | {rank: note for rank, note in enumerate(step.answers) if note}


def _why_unseen(url: str, manifest: Manifest) -> str:
    try:
        record_name(manifest)
    except OptionError as error:
        return str(error)
    return f"does not see {url}"


def _other_data(storage: CheckpointReader, manifest: Manifest, wanted: bytes, source: int) -> str:
    """Returns where data differ from those of the source; empty if all samples agree."""
    try:
        sample = _sample_that_differs(storage, manifest, wanted)
    except StorageError as error:
        return f"cannot read it: {error}"
    if sample is None:
        return ""
    label = manifest.files[sample.file].name or storage.url
    place = f"{label} [bytes {sample.offset}-{sample.offset + sample.nbytes}]"
    return f"sees other data than rank {source} in {place}: not the same checkpoint"


def _difference(storage: Storage, manifest: Manifest, source: int) -> tuple[str, bool]:
    """Compares names, sizes, versions and headers with those of the source.

    Returns:
        The difference, empty if there is none; and whether some file is a copy: of another version.
    """
    is_copy = same_record = False
    for file in manifest.files:
        stat = storage.stat(file.name)
        label = file.name or storage.url
        if stat is None:
            return f"does not see {label}", is_copy
        if stat.nbytes != file.nbytes:
            sizes = f"of {stat.nbytes} bytes, rank {source} of {file.nbytes}"
            return f"sees {label} {sizes}: not the same file", is_copy
        if stat.version == file.version or same_record:
            continue
        is_copy = True
        record = record_name(manifest) if manifest.record_digest else ""
        wanted = manifest.record_digest or file.header_digest
        if digest_of(storage, manifest, record or file.name) != wanted:
            if record:
                return f"sees another {record} than rank {source}: not the same checkpoint", is_copy
            return f"sees {label} with another header than rank {source}: not the same file", is_copy
        same_record = bool(record)
    return "", is_copy


def samples_of(manifest: Manifest) -> list[ByteRange]:
    """Returns the byte ranges that are compared, in the order of the bytes; the same on all ranks.

    One of each tensor, or of 256 tensors if there are more, and 256 at equal distances, so that any 256th of
    the bytes is compared; 2 MiB in all.
    """
    space = manifest.blocks.space
    if not (num_extents := len(space.ranges)):
        return []
    num_tensors = min(_NUM_SAMPLES, num_extents)
    chosen = [number * num_extents // num_tensors for number in range(num_tensors)]
    middles = [space.starts[index] + space.ranges[index].nbytes // 2 for index in chosen]
    evenly = [(2 * number + 1) * space.nbytes // (2 * _NUM_SAMPLES) for number in range(_NUM_SAMPLES)]
    return sorted({_page_around(space, position) for position in middles + evenly})


def _page_around(space: Space[TensorEntry | Piece], position: int) -> ByteRange:
    """Returns the page of a file around a position, within its extent."""
    index = space.at(position)
    extent = space.ranges[index]
    at = extent.offset + position - space.starts[index]
    begin = max(extent.offset, at - at % _SAMPLE_BYTES)
    end = min(extent.offset + extent.nbytes, at - at % _SAMPLE_BYTES + _SAMPLE_BYTES)
    return ByteRange(extent.file, begin, end - begin)


def _read_samples(storage: CheckpointReader, manifest: Manifest) -> bytes:
    """Returns the checksums of all samples, joined."""

    def read(sample: ByteRange) -> bytes:
        name = manifest.files[sample.file].name
        return checksum(read_bytes(storage, name, sample.offset, sample.nbytes))

    return b"".join(in_threads(read, samples_of(manifest), 1 if storage.in_order else _NUM_READERS))


def _sample_that_differs(storage: CheckpointReader, manifest: Manifest, wanted: bytes) -> ByteRange | None:
    """Returns the first sample whose checksum here is not the wanted one."""
    checksums = _read_samples(storage, manifest)
    for number, sample in enumerate(samples_of(manifest)):
        at = slice(number * CHECKSUM_BYTES, (number + 1) * CHECKSUM_BYTES)
        if checksums[at] != wanted[at]:
            return sample
    return None
