"""``fastload convert --to torch``: one file, which all ranks write together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from torch import Tensor

from fastload.base.memory import byte_view, host_view
from fastload.comm.group import join
from fastload.comm.world import World
from fastload.errors import OptionError
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import TensorEntry
from fastload.formats.torch_save.writer import TorchLayout, join_crcs, lay_out_torch
from fastload.geometry.box import runs_of
from fastload.geometry.dtensors import is_dtensor, local_parts
from fastload.storage import locate, single_file
from fastload.storage.folders import write_all

if TYPE_CHECKING:
    from fastload.cli.convert import Parts

_CHUNK_BYTES = 16 << 20


class _Written(NamedTuple):
    """Bytes of a tensor that this rank has written, and their CRC-32."""

    name: str
    start: int
    nbytes: int
    checksum: int


def local_path(dst: str) -> str:
    """Returns the path of a file that is to be made.

    Raises:
        OptionError: It is no path of a file.
    """
    location = locate(dst)
    if location.scheme or dst.endswith("/"):
        raise OptionError(f"{location}: a file of torch's is written to file systems: give the path of one")
    return location.address


def write_torch_file(parts: Parts, dst: str, *, overwrite: bool, timeout_s: float) -> dict[str, Any]:
    """Writes a file that ``torch.load(weights_only=True)`` reads; all ranks of the job call it.

    The file appears in one step, once all of it is durable.

    Args:
        parts: What this rank holds.
        dst: Where to; a path that all ranks share.
        overwrite: Whether a file there is replaced.
        timeout_s: Longest wait without progress, in seconds.

    Returns:
        Where it is, and what it holds.

    Raises:
        CheckpointExists: There is something at `dst`.
        OptionError: Something in the state is not what torch reads.
        PeerError: Some ranks failed, with every cause.
    """
    path = local_path(dst)
    what = f"writing {path}"
    world = join(None, call=what, timeout_s=timeout_s)
    pending: list[str] = []
    layouts: list[TorchLayout] = []

    def prepare() -> str:
        layouts.append(lay_out_torch(parts.structure, parts.entries))
        if world.rank == 0:
            pending.append(single_file.make_pending(path, overwrite=overwrite))
        return "".join(pending)

    try:
        with world.together():
            name, *_ = world.agree(what, prepare)
            [layout] = layouts
            written = world.settle(what, partial(_write_parts, world, parts, layout, name))
            checksums = _joined(layout, [_Written(*one) for of_rank in written for one in of_rank])
            write_rest = partial(_write_rest, layout, checksums, name, path, overwrite=overwrite)
            nbytes, *_ = world.agree(what, lambda: write_rest() if world.rank == 0 else 0)
    except BaseException:
        for name in pending:
            single_file.remove(name)
        raise
    world.acknowledge()
    return {"url": path, "num_tensors": len(parts.entries), "nbytes": nbytes, "num_files": 1}


def _write_parts(world: World, parts: Parts, layout: TorchLayout, name: str) -> list[_Written]:
    """Writes this rank's shards, and its turn of the tensors that all ranks hold."""
    written = []
    with single_file.opened(name) as descriptor:
        for index, entry in enumerate(parts.entries):
            tensor = parts.tensors[entry.name]
            if not is_dtensor(tensor) and index % world.size != world.rank:
                continue
            begin = layout.tensors[entry.name].offset
            for start, data in _runs(entry, tensor):
                checksum = 0
                for at in range(0, len(data), _CHUNK_BYTES):
                    chunk = data[at : at + _CHUNK_BYTES]
                    write_all(descriptor, begin + start + at, chunk)
                    checksum = crc32(chunk, checksum)
                    world.note_progress()
                written.append(_Written(entry.name, start, len(data), checksum))
    return written


def _runs(entry: TensorEntry, tensor: Tensor) -> Iterator[tuple[int, memoryview]]:
    """Yields contiguous bytes of this rank's part of a tensor, each with its offset in the whole."""
    for box, part in local_parts(tensor):
        data = host_view(byte_view(part))
        runs = runs_of(box, torch_spec(entry)[1]).scaled(part.itemsize)
        for number, start in enumerate(runs.starts() if len(data) else ()):
            yield start, data[number * runs.length : (number + 1) * runs.length]


def _joined(layout: TorchLayout, written: list[_Written]) -> Mapping[str, int]:
    """Returns the CRC-32 of each tensor."""
    checksums = dict.fromkeys(layout.tensors, 0)
    for one in sorted(written):
        checksums[one.name] = join_crcs(checksums[one.name], one.checksum, one.nbytes)
    return checksums


def _write_rest(
    layout: TorchLayout, checksums: Mapping[str, int], name: str, path: str, *, overwrite: bool
) -> int:
    nbytes = 0
    with single_file.opened(name) as descriptor:
        for offset, content in layout.frame(checksums):
            write_all(descriptor, offset, content)
            nbytes = max(nbytes, offset + len(content))
    single_file.publish(name, path, overwrite=overwrite)
    return nbytes
