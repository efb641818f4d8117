"""A save of tensors that come one by one: kept in a file on a local disk, then saved as a state."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastload.base.memory import byte_view, host_view, round_up
from fastload.base.tracebacks import short_tracebacks
from fastload.comm.world import World
from fastload.errors import Interrupted, OptionError
from fastload.formats.codecs import coded_of
from fastload.formats.encoder import encode_state
from fastload.geometry.box import dense_strides, row_major
from fastload.geometry.dtensors import is_dtensor, is_sharded, local_of
from fastload.options import SaveOptions
from fastload.report import SaveReport
from fastload.saving.call import make_call
from fastload.saving.save import save
from fastload.storage import local_directory
from fastload.storage.folders import os_errors, write_all

_ALIGN_BYTES = 64  # for any dtype
_PIECE_BYTES = 32 << 20
_LOCAL = "_local_tensor"  # of a DTensor, as torch's protocol of tensor subclasses names it


@short_tracebacks
def save_stream(
    tensors: Iterable[tuple[str, Tensor]],
    path: str | os.PathLike[str],
    *,
    spool: str | os.PathLike[str],
    process_group: Any = None,
    metadata: Mapping[str, str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
) -> SaveReport:
    """Saves tensors that come one by one, in bounded memory; the ranks of a group have different ones.

    A call of all ranks. Each takes its tensors and keeps them in a file without a name in `spool`. The kernel
    writes its pages to disk and drops them as it needs memory. Once all ranks have theirs, they save them as
    `save` does, into the same files as the dicts of all ranks with ``SaveOptions(parts=True)``: the tensors
    of rank 0 in their order, then those of rank 1, and so on. When it raises, it raises on all ranks, and
    `path` is unchanged::

        def exported():
            for number, (name, tensor) in enumerate(gathered(model)):  # collective: on all ranks
                if number % world_size == rank:
                    yield name, tensor

        fastload.save_stream(exported(), "s3://bucket/llama", spool="/local/tmp")

    Args:
        tensors: Name and tensor, on any device. Each is taken once, before the next one, and not kept. The
            iterator may communicate, but not through fastload. A tensor that several ranks have is saved
            once. A DTensor comes on all ranks of its mesh, and each keeps its shard.
        path: As for `save`.
        spool: A directory on a local disk with space for the tensors of this rank, and not in memory
            (``/dev/shm``); it may differ between ranks.
        process_group: As for `load`.
        metadata: As for `save`.
        storage_options: As for `load`.
        options: As for `save`.

    Raises:
        OptionError: A name comes twice on a rank, or something is no tensor that can be saved.
        PeerError: An iterator raised, or a disk is full; with every cause.
        FastloadError: As for `save`.
    """
    call = make_call(path, process_group, metadata, storage_options, options, changes={"parts": True})
    with call.world.together():
        state = take_tensors(call.world, call.what, tensors, spool)
    return save(call, state)


class _Spool:
    """A file without a name for bytes that memory may be too small for: appended, then mapped.

    The kernel writes its pages to disk, and drops them, as it needs memory. Nothing is left after a kill.

    Args:
        folder: A directory on a local disk.

    Attributes:
        end: Offset of the next byte, a multiple of `_ALIGN_BYTES`.

    Raises:
        StorageError: There is no such directory, or no permission.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.end = 0
        with os_errors(folder):
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed by `close`)

    def append(self, data: memoryview) -> None:
        """Appends bytes, and moves the end to where a tensor may begin.

        Raises:
            StorageError: The disk is full.
        """
        with os_errors(self._folder, self.end, len(data)):
            write_all(self._file.fileno(), self.end, data)
        self.end = round_up(self.end + len(data), _ALIGN_BYTES)

    def map(self) -> memoryview:
        """Maps everything; writes to it change nothing but memory. The map outlasts `close`."""
        if not self.end:
            return memoryview(bytearray())
        with os_errors(self._folder):
            os.ftruncate(self._file.fileno(), self.end)
            return memoryview(mmap.mmap(self._file.fileno(), self.end, access=mmap.ACCESS_COPY))

    def close(self) -> None:
        """Closes the file, which is gone with its map."""
        self._file.close()


class _Place(NamedTuple):
    """A tensor in the file; of a DTensor, its local tensor.

    Attributes:
        begin: Offset of its first byte.
        dtype: Its dtype.
        shape: Its shape.
        strides: Its strides in elements, without gaps. The bytes lie in their order.
        wrap: Makes of its view a tensor of the same kind.
    """

    begin: int
    dtype: torch.dtype
    shape: torch.Size
    strides: Sequence[int]
    wrap: Callable[[Tensor], Tensor]


def take_tensors(
    world: World, what: str, tensors: Iterable[tuple[str, Tensor]], spool: str | os.PathLike[str]
) -> dict[str, Tensor]:
    """Takes the tensors of this rank, and returns them as views of a file that the kernel pages in and out.

    The ranks wait for each other, as long as each of them makes progress.

    Args:
        world: The ranks.
        what: Name of the save, for messages.
        tensors: Name and tensor, one by one.
        spool: A directory on a local disk. The file in it has no name.

    Raises:
        FastloadError: An iterator raised, or its tensors cannot be saved, or the disk is full; on all ranks.
    """
    with world.step(f"{what}: taking the tensors", is_long=True):
        taken = _take(world, tensors, local_directory(spool, "keep tensors in"))
    return taken


def _take(world: World, tensors: Iterable[tuple[str, Tensor]], folder: str) -> dict[str, Tensor]:
    places: dict[str, _Place] = {}
    spool = _Spool(folder)
    try:
        for name, tensor in tensors:
            _require_new(name, tensor, places, world.rank)
            local = local_of(tensor).detach().resolve_conj().resolve_neg()
            strides = _strides_to_keep(tensor, local)
            places[name] = _Place(spool.end, local.dtype, local.shape, strides, _wrapper(tensor))
            _append(world, spool, local, strides)
        data = spool.map()
    finally:
        spool.close()
    return {name: _view(data, place) for name, place in places.items()}


def _require_new(name: Any, tensor: Any, places: Container[str], rank: int) -> None:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise OptionError(f"({name!r}, {type(tensor).__name__}): must be a name and a tensor")
    if name in places:
        raise OptionError(f"{name!r} comes twice")
    if is_sharded(tensor) and not is_dtensor(tensor):
        raise OptionError(
            f"{name!r} is a {tensor}: of tensors that come one by one, DTensors only are sharded"
        )
    encoded = encode_state({name: tensor}, rank)  # raises for what cannot be saved
    if coded_of(encoded.structure["dict"][1]) is not None:
        raise OptionError(f"{name!r} is a {type(local_of(tensor)).__name__}: streams take plain tensors")


def _wrapper(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a function that makes tensors like this one, whose memory it does not keep."""
    is_parameter, requires_grad = isinstance(tensor, torch.nn.Parameter), tensor.requires_grad
    wrap_local = _dtensor_wrapper(tensor) if is_dtensor(tensor) else None

    def wrap(local: Tensor) -> Tensor:
        whole = wrap_local(local) if wrap_local is not None else local
        return (
            torch.nn.Parameter(whole, requires_grad) if is_parameter else whole.requires_grad_(requires_grad)
        )

    return wrap


def _dtensor_wrapper(tensor: Any) -> Callable[[Tensor], Tensor]:
    """Returns a function that makes DTensors of local tensors.

    `DTensor.from_local` would move the local tensor to the devices of the mesh.
    """
    inner, context = tensor.__tensor_flatten__()
    kept = {name: getattr(tensor, name) for name in inner if name != _LOCAL}
    unflatten, shape, stride = type(tensor).__tensor_unflatten__, tensor.shape, tensor.stride()
    return lambda local: unflatten({**kept, _LOCAL: local}, context, shape, stride)


def _strides_to_keep(tensor: Tensor, local: Tensor) -> Sequence[int]:
    """Returns the strides with which a tensor is saved; shards and empty tensors have none of their own."""
    has_own = local.numel() and not is_dtensor(tensor)
    return dense_strides(local.shape, local.stride()) if has_own else row_major(local.shape)


def _append(world: World, spool: _Spool, tensor: Tensor, strides: Sequence[int]) -> None:
    """Appends a tensor; a piece at a time from an accelerator, since host memory may be short."""
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    flat = byte_view(tensor.permute(order).contiguous())
    for begin in range(0, flat.numel(), _PIECE_BYTES):
        if world.peer_failed():
            raise Interrupted("the save stopped because it failed on another rank")
        spool.append(host_view(flat[begin : begin + _PIECE_BYTES].cpu()))
        world.note_progress()


def _view(data: memoryview, place: _Place) -> Tensor:
    nbytes = place.shape.numel() * place.dtype.itemsize
    flat = torch.empty(0, dtype=torch.uint8)
    if nbytes:
        flat = torch.frombuffer(data, dtype=torch.uint8, count=nbytes, offset=place.begin)
    return place.wrap(flat.view(place.dtype).as_strided(place.shape, place.strides))
