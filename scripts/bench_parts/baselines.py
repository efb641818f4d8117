"""Other arms of the benchmarks: ways to load a safetensors checkpoint into all ranks without fastload.

Each takes a directory on an fsspec file system and returns tensors that own their memory, unless its name
says otherwise. All of them exchange over the default process group, with Gloo.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from fsspec import AbstractFileSystem
from torch import Tensor

import fastload
from fastload.base.memory import host_view
from fastload.transfer.plan import plan_transfer

State = dict[str, Tensor]

_READ_BYTES = 4 << 20
_SEND_BYTES = 4 << 20


def stream_once(files: AbstractFileSystem, root: str) -> State:
    """Rank 0 reads every byte and drops it: the least time of the storage."""
    if dist.get_rank() == 0:
        for path in _paths(files, root):
            for start in range(0, files.size(path), _READ_BYTES):
                files.cat_file(path, start, start + _READ_BYTES)
    return {}


def every_rank_reads(files: AbstractFileSystem, root: str) -> State:
    """Each rank reads each file completely and parses it."""
    return {name: tensor for path in _paths(files, root) for name, tensor in _parsed(files, path).items()}


def every_rank_maps(files: AbstractFileSystem, root: str) -> State:
    """Each rank maps local files: views of the page cache, read when they are touched."""
    state: State = {}
    for path in _paths(files, root):
        state.update(safetensors.torch.load_file(path))
    return state


def every_rank_maps_and_clones(files: AbstractFileSystem, root: str) -> State:
    """Each rank maps local files and copies every tensor."""
    return {name: tensor.clone() for name, tensor in every_rank_maps(files, root).items()}


def first_rank_broadcasts(files: AbstractFileSystem, root: str) -> State:
    """Rank 0 reads and parses file after file; one blocking broadcast per tensor."""
    first = dist.get_rank() == 0
    state: State = {}
    for path in _shared(_paths(files, root) if first else None):
        mine = _parsed(files, path) if first else {}
        for name, dtype, shape in _shared([(n, t.dtype, tuple(t.shape)) for n, t in mine.items()]):
            state[name] = mine[name] if first else torch.empty(shape, dtype=dtype)
            dist.broadcast(state[name].view(torch.uint8), src=0)
    return state


def own_share_then_ring(files: AbstractFileSystem, root: str, url: str) -> State:
    """Each rank reads one contiguous 1/N of all bytes; then a ring all-gather, then copies."""
    manifest = _shared(fastload.inspect(url) if dist.get_rank() == 0 else None)
    flat = torch.empty(manifest.nbytes, dtype=torch.uint8)
    view = host_view(flat)
    rank, size = dist.get_rank(), dist.get_world_size()
    bounds = [manifest.nbytes * place // size for place in range(size + 1)]
    for position, file, offset, nbytes in _reads(manifest, bounds[rank], bounds[rank + 1]):
        data = files.cat_file(f"{root}/{manifest.files[file].name}", offset, offset + nbytes)
        view[position : position + nbytes] = data
    _ring_all_gather([flat[begin:end] for begin, end in itertools.pairwise(bounds)])
    state, position = {}, 0
    for entry in manifest.tensors:
        own = flat[position : position + entry.nbytes].clone()
        state[entry.name] = own.view(torch.bfloat16).view(entry.shape)
        position += entry.nbytes
    return state


def _ring_all_gather(shares: list[Tensor]) -> None:
    """Fills every share from its owner, the rank of its index, along a ring."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pieces = [list(share.split(_SEND_BYTES)) for share in shares]
    longest = max(map(len, pieces))
    right, left = (rank + 1) % size, (rank - 1) % size

    def send(owner: int, index: int) -> Any:
        return dist.isend(pieces[owner][index], right, tag=owner * longest + index)

    if size == 1:
        return
    owners = [(rank - distance) % size for distance in range(1, size)]
    coming = [(owner, index) for owner in owners for index in range(len(pieces[owner]))]
    receives = [
        dist.irecv(pieces[owner][index], left, tag=owner * longest + index) for owner, index in coming
    ]
    sends = [send(rank, index) for index in range(len(pieces[rank]))]
    for (owner, index), receive in zip(coming, receives, strict=True):
        receive.wait()
        if owner != right:
            sends.append(send(owner, index))
    for sent in sends:
        sent.wait()


def _reads(manifest: fastload.Manifest, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Cuts a range of all bytes into reads: (offset in all bytes, file, offset, bytes)."""
    plan = plan_transfer(manifest.tensors, (0,), (0,), staging_bytes=1 << 30, chunk_bytes=_READ_BYTES)
    position = 0
    for extent in plan.ranges:
        start, stop = max(begin, position), min(end, position + extent.nbytes)
        for at in range(start, stop, _READ_BYTES):
            yield at, extent.file, extent.offset + at - position, min(_READ_BYTES, stop - at)
        position += extent.nbytes


def _paths(files: AbstractFileSystem, root: str) -> list[str]:
    return sorted(path for path in files.ls(root, detail=False) if path.endswith(".safetensors"))


def _parsed(files: AbstractFileSystem, path: str) -> State:
    return safetensors.torch.load(files.cat_file(path))


def _shared(value: Any) -> Any:
    """Returns rank 0's value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
