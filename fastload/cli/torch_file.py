"""``fastload convert --to torch``: one file, which every rank writes its share of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from zlib import crc32

from fastload.base.memory import byte_view, host_view
from fastload.cli.shares import Share, Shares
from fastload.comm.group import join
from fastload.comm.world import World
from fastload.errors import OptionError
from fastload.formats.dtypes import torch_spec
from fastload.formats.torch_save.writer import TorchLayout, join_crcs, lay_out_torch
from fastload.geometry.box import runs_of
from fastload.storage import locate, single_file
from fastload.storage.folders import write_all

__all__ = ["local_path", "write_torch_file"]

_CHUNK_BYTES = 16 << 20

Sum = tuple[str, int, int, int]
"""Of some bytes of a tensor: its name, the first byte, their number, their CRC-32."""


def local_path(dst: str) -> str:
    """Returns where a file is to be made.

    Raises:
        OptionError: It is no path of a file.
    """
    location = locate(dst)
    if location.scheme or dst.endswith("/"):
        raise OptionError(f"{location}: a file of torch's is written to file systems: give the path of one")
    return location.address


def write_torch_file(shares: Shares, dst: str, *, overwrite: bool, timeout_s: float) -> int:
    """Writes a file that ``torch.load(weights_only=True)`` reads; all ranks of the job call it.

    The file appears in one step, once all of it is durable.

    Args:
        shares: What this rank has.
        dst: Where to; a path that all ranks share.
        overwrite: Whether a file there is replaced.
        timeout_s: Longest wait without progress, in seconds.

    Returns:
        Length of the file in bytes.

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
        layouts.append(lay_out_torch(shares.structure, [share.entry for share in shares.tensors]))
        if world.rank == 0:
            pending.append(single_file.make_pending(path, overwrite=overwrite))
        return "".join(pending)

    try:
        with world.together():
            name, *_ = world.agree(what, prepare)
            [layout] = layouts
            sums = world.settle(what, partial(_write_share, world, shares, layout, name))
            checksums = _joined(layout, [one for of_rank in sums for one in of_rank])
            write_rest = partial(_write_rest, layout, checksums, name, path, overwrite=overwrite)
            nbytes, *_ = world.agree(what, lambda: write_rest() if world.rank == 0 else 0)
    except BaseException:
        for name in pending:
            single_file.remove(name)
        raise
    world.acknowledge()
    return nbytes


def _write_share(world: World, shares: Shares, layout: TorchLayout, name: str) -> list[Sum]:
    """Writes what this rank has; of what all have, every so many tensors."""
    sums = []
    with single_file.opened(name) as descriptor:
        for index, share in enumerate(shares.tensors):
            if share.dim is None and index % world.size != world.rank:
                continue
            begin = layout.tensors[share.entry.name].offset
            for start, data in _runs(share):
                checksum = 0
                for at in range(0, len(data), _CHUNK_BYTES):
                    chunk = data[at : at + _CHUNK_BYTES]
                    write_all(descriptor, begin + start + at, chunk)
                    checksum = crc32(chunk, checksum)
                    world.note_progress()
                sums.append((share.entry.name, start, len(data), checksum))
    return sums


def _runs(share: Share) -> Iterator[tuple[int, memoryview]]:
    """Yields the bytes that a rank has of a tensor, in runs, each with where in the tensor it begins."""
    data = host_view(byte_view(share.tensor))
    if not len(data):
        return
    runs = runs_of(share.box, torch_spec(share.entry)[1]).scaled(share.tensor.itemsize)
    for number, start in enumerate(runs.starts()):
        yield start, data[number * runs.length : (number + 1) * runs.length]


def _joined(layout: TorchLayout, sums: Sequence[Sum]) -> Mapping[str, int]:
    """Returns the CRC-32 of each tensor."""
    checksums = dict.fromkeys(layout.tensors, 0)
    for name, _, nbytes, checksum in sorted(sums):
        checksums[name] = join_crcs(checksums[name], checksum, nbytes)
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
