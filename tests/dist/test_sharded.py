"""Loads into DTensors: every rank gets its own bytes, each read once, whatever the mesh and placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import fastload
from fastload.transfer import buffers
from tests.checkpoints import assert_same_bits
from tests.dist.harness import ranks

SHAPES: dict[str, tuple[int, ...]] = {
    "even": (64, 32),
    "uneven": (13, 7),
    "few": (2, 5),
    "none": (0, 4),
    "row": (1, 4096),
    "vector": (101,),
    "scalar": (),
    "cube": (6, 10, 8),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]


def make(path: Path) -> dict[str, torch.Tensor]:
    """Writes a checkpoint of two files, each rank the same."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        dtype = DTYPES[index % len(DTYPES)]
        raw = torch.randint(0, 255, (*shape, dtype.itemsize), generator=generator).to(torch.uint8)
        tensors[name] = (raw % 2 == 1)[..., 0] if dtype == torch.bool else raw.view(dtype).reshape(shape)
    path.mkdir(exist_ok=True)
    return tensors


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        safetensors.torch.save_file({name: tensors[name] for name in part}, path / f"{number}.safetensors")


def placed(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """Cuts a tensor as torch does; without communication."""
    usable = [one if getattr(one, "dim", -1) < tensor.dim() else Replicate() for one in placements]
    bits = tensor if tensor.dtype != torch.float8_e4m3fn else tensor.view(torch.uint8)
    found = distribute_tensor(bits, mesh, usable, src_data_rank=None)
    local = found.to_local().view(tensor.dtype)
    return DTensor.from_local(
        local, mesh, usable, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def emptied(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same targets, without what is in them."""
    for tensor in state.values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local.detach().zero_()
    return dict(state)


def locals_of(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in state.items()
    }


def check(path: Path, into: dict[str, torch.Tensor], **options: Any) -> fastload.LoadReport:
    """Loads over what is there, and compares it with what was there."""
    expected = locals_of(into)
    reports: list[fastload.LoadReport] = []
    chosen = fastload.LoadOptions(timeout_s=20, on_report=reports.append, **options)
    fastload.load(path, into=emptied(into), options=chosen)
    assert_same_bits(locals_of(into), expected)
    return reports[0]


MESHES: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "fsdp": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "hsdp": ((2, 2), [Replicate(), Shard(0)]),
    "tp": ((2, 2), [Replicate(), Shard(1)]),
    "fsdp of columns": ((2, 2), [Shard(0), Shard(1)]),
    "fsdp of rows": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "twice": ((2, 2), [Shard(0), Shard(0)]),
    "strided alone": ((4,), [_StridedShard(0, split_factor=2)]),
    "strided columns": ((2, 2), [Replicate(), _StridedShard(1, split_factor=2)]),
    "replicated": ((4,), [Replicate()]),
    "deep": ((1, 2, 1, 2), [Replicate(), Shard(1), Shard(0), Shard(0)]),
}


@ranks(4)
def test_each_mesh_gets_its_bytes_each_read_once(rank: int, world: int, tmp_path: Path) -> None:
    tensors = make(tmp_path)
    if rank == 0:
        write(tmp_path, tensors)
    torch.distributed.barrier()
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    for shape, placements in MESHES.values():
        mesh = init_device_mesh("cpu", shape)
        for strategy in ("allgather", "broadcast", "direct"):
            into = {name: placed(tensor, mesh, placements) for name, tensor in tensors.items()}
            report = check(tmp_path, into, strategy=strategy, chunk_bytes=1000)
            assert report.bytes_wanted == nbytes
            if strategy != "direct":
                assert sum(one.bytes_read for one in report.ranks) == nbytes


@ranks(4)
def test_ranks_read_the_boxes_they_ask_for(rank: int, world: int, tmp_path: Path) -> None:
    tensors = make(tmp_path)
    if rank == 0:
        write(tmp_path, tensors)
    torch.distributed.barrier()
    cube, even = tensors["cube"], tensors["even"]
    with fastload.open(tmp_path, options=fastload.LoadOptions(strategy="allgather", timeout_s=20)) as opened:
        boxes: dict[str, list[tuple[fastload.Box, torch.Tensor]]] = {
            0: {},
            1: {
                "even": [
                    (fastload.Box((0, 0), (64, 8)), torch.zeros(64, 8)),
                    (fastload.Box((8, 4), (8, 28)), torch.zeros(28, 8).T),  # of any strides, and once more
                    (fastload.Box((3, 3), (0, 2)), torch.zeros(0, 2)),
                ],
                "scalar": [(fastload.Box((), ()), torch.zeros((), dtype=tensors["scalar"].dtype))],
            },
            2: {},
            3: {"even": [(fastload.Box((8, 4), (8, 28)), torch.zeros(8, 28))]},
        }[rank]
        if rank == 0:
            box = fastload.Box((1, 2, 3), (4, 5, 2))
            boxes = {"cube": [(box, torch.zeros(2, 5, 4, dtype=cube.dtype).permute(2, 1, 0))]}
        report = opened.read(boxes)
        for name, of_name in boxes.items():
            for (offsets, sizes), tensor in of_name:
                slices = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
                assert_same_bits({name: tensor.clone()}, {name: tensors[name][slices].clone()})
        assert even.nbytes + cube.nbytes > report.bytes_wanted
        # Rows are read as they are: of the cube, more than the box.
        assert even.nbytes + cube.nbytes > sum(one.bytes_read for one in report.ranks) > report.bytes_wanted

        whole = {
            name: (fastload.Box.whole(tensor.shape), torch.empty_like(tensor, dtype=torch.float64))
            for name, tensor in tensors.items()
            if tensor.dtype == torch.float32
        }
        report = opened.read({name: [pair] for name, pair in whole.items()}, cast=True)
        assert sum(one.bytes_read for one in report.ranks) == report.bytes_wanted
        assert_same_bits({n: t.float() for n, (_, t) in whole.items()}, {n: tensors[n] for n in whole})

        problem = r"(?s)rank 3 .*even: the box at \[60, 0\] of \[5, 1\] is out of bounds"
        with pytest.raises(fastload.PeerError, match=problem):
            opened.read({"even": [(fastload.Box((60, 0), (5, 1)), torch.zeros(5, 1))]} if rank == 3 else {})


def write_rows(path: Path, rank: int, num_rows: int) -> torch.Tensor:
    """Writes one tensor of 1024 columns, each rank the same."""
    tensor = torch.arange(num_rows * 1024, dtype=torch.float32).reshape(num_rows, 1024)
    if rank == 0:
        safetensors.torch.save_file({"a": tensor}, path / "model.safetensors")
    torch.distributed.barrier()
    return tensor


MIXED: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "fsdp": ((8,), [Shard(0)]),
    "hsdp, replicas across hosts": ((2, 4), [Replicate(), Shard(0)]),
    "hsdp, replicas within a host": ((4, 2), [Shard(0), Replicate()]),
    "dp x tp": ((4, 2), [Replicate(), Shard(0)]),
}


@ranks(8, ranks_per_host=4)
def test_each_byte_enters_each_host_that_wants_it_once(rank: int, world: int, tmp_path: Path) -> None:
    """Also those of groups that have several ranks on a host, on that of the reader and on others."""
    tensors = {
        "rows": torch.arange(8 * 65_536, dtype=torch.float32).view(512, 1024),
        "norm": torch.arange(65_536, dtype=torch.float32),
    }
    if rank == 0:
        write(tmp_path, tensors)
    torch.distributed.barrier()
    for name, (shape, placements) in MIXED.items():
        mesh = init_device_mesh("cpu", shape)
        everywhere = [Replicate()] * len(shape)
        into: dict[str, torch.Tensor] = {
            "rows": placed(tensors["rows"], mesh, placements),
            "norm": placed(tensors["norm"], mesh, everywhere),
        }
        share = locals_of(into)["rows"]
        begins: list[Any] = [None] * world
        torch.distributed.all_gather_object(begins, (share.flatten()[0].item(), share.nbytes))
        report = check(tmp_path, into, strategy="allgather", chunk_bytes=16_384)
        for host in (range(4), range(4, 8)):
            wanted = sum(dict(begins[one] for one in host).values()) + tensors["norm"].nbytes
            came = sum(report.ranks[one].bytes_read + report.ranks[one].bytes_in for one in host)
            assert came <= 1.02 * wanted, (name, host, came / wanted)


@ranks(4)
def test_staging_is_enough_for_all_that_is_packed_and_received(
    rank: int, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = write_rows(tmp_path, rank, 2048)
    besides: list[int] = []
    take = buffers._RoundBuffer.take

    def taken(room: buffers._RoundBuffer, nbytes: int, **how: bool) -> torch.Tensor:
        found = take(room, nbytes, **how)
        if found.untyped_storage().data_ptr() != room.memory.untyped_storage().data_ptr():
            besides.append(nbytes)
        return found

    monkeypatch.setattr(buffers._RoundBuffer, "take", taken)
    staging_bytes = 4 << 20
    options = fastload.LoadOptions(strategy="allgather", staging_bytes=staging_bytes, timeout_s=20)
    with fastload.open(tmp_path, options=options) as opened:
        widths = [1000 + 2 * rank + number for number in range(4)]  # which overlap, here and on other ranks
        wanted = [(fastload.Box((0, 0), (2048, width)), torch.zeros(2048, width)) for width in widths]
        report = opened.read({"a": wanted})
        assert all(torch.equal(got, tensor[:, : got.shape[1]]) for _, got in wanted)
        assert staging_bytes >= report.ranks[rank].peak_staging_bytes > 0
        columns = placed(tensor, init_device_mesh("cpu", (world,)), [Shard(1)])
        opened.load(into=emptied({"a": columns}))
        assert torch.equal(columns.to_local(), tensor.chunk(world, 1)[rank])
        assert opened.report is not None
        assert staging_bytes >= opened.report.ranks[rank].peak_staging_bytes > 0
    assert besides == []


@ranks(4)
def test_staging_is_kept_where_only_one_round_fits(rank: int, world: int, tmp_path: Path) -> None:
    """Ranks of one host that share memory have two buffers."""
    chunk_bytes = 256 << 10
    tensors = {"w": torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024)}
    if rank == 0:
        safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    torch.distributed.barrier()
    mesh = init_device_mesh("cpu", (2, 2))
    into = {"w": placed(tensors["w"], mesh, [Replicate(), Shard(1)])}
    given = {"strategy": "broadcast", "chunk_bytes": chunk_bytes, "staging_bytes": 3 * chunk_bytes}
    for own in check(tmp_path, into, **given).ranks:
        assert own.peak_staging_bytes <= given["staging_bytes"]


@ranks(2)
def test_boxes_are_made_of_integers(rank: int, world: int, tmp_path: Path) -> None:
    tensor = write_rows(tmp_path, rank, 4)
    with fastload.open(tmp_path, options=fastload.LoadOptions(timeout_s=20)) as opened:
        box = fastload.Box((numpy.int64(1), torch.tensor(2)), [numpy.int32(2), 3])  # type: ignore[arg-type]
        got = torch.zeros(2, 3)
        opened.read({"a": [(box, got), (fastload.Box((0, 0), (1, 1)), torch.zeros(1, 1))]})
        assert torch.equal(got, tensor[1:3, 2:5])
        broken = fastload.Box((0.5, 0), (1, 1))  # type: ignore[arg-type]
        with pytest.raises(fastload.FastloadError, match=r"boxes= has a box of a that is not made of int"):
            opened.read({"a": [(broken, torch.zeros(1, 1))]})
