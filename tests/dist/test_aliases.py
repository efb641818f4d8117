"""Several tensors of a checkpoint go into one memory: equal ones load, others are one error on all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fastload
from fastload.errors import MismatchError, StorageError
from fastload.geometry.box import Box
from fastload.integrations.dcp import Reader
from fastload.storage.local import LocalStorage
from tests.accelerator import accelerator
from tests.dist.harness import ranks

SHAPE = (60, 16)
EMBED = torch.arange(960.0).reshape(SHAPE)
OTHER = EMBED.clone()
OTHER[-1, -1] += 64  # one element, which bfloat16 tells apart, too

STRATEGIES = ["auto", "allgather", "direct", "broadcast"]


def options(strategy: str = "allgather", **more: Any) -> fastload.LoadOptions:
    return fastload.LoadOptions(**{"strategy": strategy, "chunk_bytes": 1000, "timeout_s": 30, **more})


def write(path: Path, rank: int, head: Tensor, **more: Tensor) -> Path:
    if rank == 0:
        path.parent.mkdir(exist_ok=True)
        save_file({"a": torch.ones(50), "embed": EMBED, "head": head, "z": torch.ones(50), **more}, path)
    if dist.is_initialized():
        dist.barrier()
    return path


def refused(call: Callable[[], object], names: tuple[str, str] = ("embed", "head")) -> None:
    """A call has to end in one error that names both, whichever rank found it, with the rest as usual."""
    with pytest.raises(MismatchError, match=re.escape(f"{names[0]} and {names[1]}")) as raised:
        call()
    (line,) = raised.value.mismatched
    assert f"{names[0]} and {names[1]}" in line
    assert raised.value.is_partial


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(SHAPE))
        self.head = self.embed


def layouts() -> Iterator[tuple[str, Callable[[], dict[str, Tensor]], torch.dtype | None]]:
    """Destinations of embed and head that share memory; how embed is found in the first of them."""

    def plain() -> dict[str, Tensor]:
        shared = torch.zeros(SHAPE)
        return {"embed": shared, "head": shared}

    def cast() -> dict[str, Tensor]:
        shared = torch.zeros(SHAPE, dtype=torch.bfloat16)
        return {"embed": shared, "head": shared.detach()}

    def strided() -> dict[str, Tensor]:
        shared = torch.zeros(SHAPE[::-1])
        return {"embed": shared.T, "head": shared.T}

    def mixed() -> dict[str, Tensor]:  # the same elements, reached in other ways
        shared = torch.zeros(60, 32)
        return {"embed": shared[:, :16], "head": shared.as_strided(SHAPE, (32, 1))}

    def within() -> dict[str, Tensor]:  # z is a part of both, and equal there
        shared = torch.zeros(SHAPE)
        return {"embed": shared, "head": shared, "some": shared.view(-1)[10:50]}

    def columns() -> dict[str, Tensor]:
        shared = torch.zeros(SHAPE)
        return {"embed": shared, "head": shared, "column": shared[:, 3]}

    def conjugated() -> dict[str, Tensor]:
        shared = torch.zeros(SHAPE)
        negated = torch._neg_view(shared)
        return {"embed": negated, "head": negated}

    yield "plain", plain, None
    yield "cast", cast, torch.bfloat16
    yield "strided", strided, None
    yield "mixed", mixed, None
    yield "within", within, None
    yield "columns", columns, None
    yield "negated", conjugated, None


@pytest.mark.slow(but=["1-ranks"])
@ranks(1, 3, deadline_s=120)
def test_two_tensors_in_one_memory(rank: int, world: int, tmp_path: Path) -> None:
    parts = {"some": EMBED.view(-1)[10:50].clone(), "column": EMBED[:, 3].clone()}
    same = write(tmp_path / "same.safetensors", rank, EMBED.clone(), **parts)
    differ = write(tmp_path / "differ.safetensors", rank, OTHER, **parts)
    for name, make, dtype in layouts():
        for strategy in STRATEGIES:
            into = make()
            fastload.load(same, into=into, names=list(into), dtype=dtype, options=options(strategy))
            for key, tensor in into.items():
                expected = {"embed": EMBED, "head": EMBED, **parts}[key]
                assert torch.equal(tensor, expected.to(tensor.dtype)), (name, strategy, key)
            into = make()
            refused(
                lambda into=into, dtype=dtype, strategy=strategy: fastload.load(  # type: ignore[misc]
                    differ, into=into, names=list(into), dtype=dtype, options=options(strategy)
                )
            )


@ranks(1, 3)
def test_other_ways_to_load(rank: int, world: int, tmp_path: Path) -> None:
    """Modules, reads ahead, all or nothing, boxes; with more than two names of one memory."""
    same = write(tmp_path / "same.safetensors", rank, EMBED.clone())
    differ = write(tmp_path / "differ.safetensors", rank, OTHER)
    for path in (same, differ):

        def load(path: Path = path, **more: Any) -> Tensor:
            model = Tied()
            fastload.load(path, into=model, strict=False, options=options(**more))
            return model.embed

        def prefetched(path: Path = path) -> Tensor:
            with fastload.open(path, options=options()) as checkpoint:
                checkpoint.prefetch()
                model = Tied()
                checkpoint.load(into=model, strict=False)
                return model.embed

        def boxed(path: Path = path) -> Tensor:
            shared = torch.zeros(20, 16)
            box = Box((40, 0), (20, 16))
            with fastload.open(path, options=options()) as checkpoint:
                checkpoint.read({"embed": [(box, shared)], "head": [(box, shared)]})
            return torch.cat([EMBED[:40], shared])

        calls: list[Callable[[], Tensor]] = [load, partial(load, atomic=True), prefetched, boxed]
        for call in calls:
            if path == same:
                assert torch.equal(call(), EMBED)
            else:
                refused(call)
    with fastload.open(same) as checkpoint:
        row = torch.zeros(1, 16)
        refused(
            lambda: checkpoint.read({"embed": [(Box((0, 0), (1, 16)), row), (Box((1, 0), (1, 16)), row)]}),
            ("embed [0, 0]", "embed [1, 0]"),
        )


@ranks(3)
def test_ranks_that_share_memory_only_here(rank: int, world: int, tmp_path: Path) -> None:
    """Only rank 1 ties the two, and all ranks learn of it."""
    differ = write(tmp_path / "differ.safetensors", rank, OTHER)
    shared = torch.zeros(SHAPE)
    into = {"embed": shared, "head": shared if rank == 1 else torch.zeros(SHAPE)}
    refused(lambda: fastload.load(differ, into=into, strict=False, options=options()))


@pytest.mark.slow(but=["2-ranks"])
@ranks(2, 3)
def test_shards(rank: int, world: int, tmp_path: Path) -> None:
    """FSDP and tensor parallel models, of which one rank holds the element that differs."""
    mesh = init_device_mesh("cpu", (world,))
    same = write(tmp_path / "same.safetensors", rank, EMBED.clone())
    differ = write(tmp_path / "differ.safetensors", rank, OTHER)
    for dim in (0, 1):
        for path in (same, differ):

            def load(path: Path = path, dim: int = dim) -> DTensor:
                shared = distribute_tensor(torch.zeros(SHAPE), mesh, [Shard(dim)])
                into = {"embed": shared, "head": shared}
                fastload.load(path, into=into, strict=False, options=options())
                return shared

            if path == same:
                assert torch.equal(load().full_tensor(), EMBED)
            else:
                refused(load)
    model = Tied()
    fully_shard(model, mesh=mesh)
    fastload.load(same, into=model, strict=False, options=options())
    assert isinstance(model.embed, DTensor)
    assert torch.equal(model.embed.full_tensor(), EMBED)
    refused(lambda: fastload.load(differ, into=model, strict=False, options=options()))


@ranks(2)
def test_dcp_checkpoints(rank: int, world: int, tmp_path: Path) -> None:
    """Saved in shards of rows and of columns, loaded by fastload and by its reader for dcp."""
    mesh = init_device_mesh("cpu", (world,))
    for dim in (0, 1):
        for head in (EMBED, OTHER):
            path = tmp_path / f"{dim}-{head is EMBED}"
            state = {
                "embed": distribute_tensor(EMBED, mesh, [Shard(dim)]),
                "head": distribute_tensor(head, mesh, [Shard(1 - dim)]),
            }
            dcp.save(state, checkpoint_id=path)

            def native(path: Path = path) -> Tensor:
                shared = torch.zeros(SHAPE)
                fastload.load(path, into={"embed": shared, "head": shared}, options=options())
                return shared

            def by_dcp(path: Path = path) -> Tensor:
                shared = torch.zeros(SHAPE)
                reader = Reader(path, options=options())
                dcp.load({"embed": shared, "head": shared}, storage_reader=reader)
                return shared

            for call in (native, by_dcp):
                if head is EMBED:
                    assert torch.equal(call(), EMBED)
                else:
                    with pytest.raises(BaseException, match="embed and head"):  # dcp's own wraps it
                        call()


@ranks(2)
def test_tied_when_saved(rank: int, world: int, tmp_path: Path) -> None:
    """One stored tensor under several names goes to two places; another tensor goes to one of them, too."""
    for other in (EMBED, OTHER):
        shared = EMBED.clone()
        path = tmp_path / str(other is EMBED)
        fastload.save({"embed": shared, "tied": shared, "third": other.clone()}, path)
        once = torch.zeros(SHAPE)
        fastload.load(path, into={"embed": once, "tied": once}, names=["embed", "tied"])
        assert torch.equal(once, EMBED)
        for names in (("embed", "tied"), ("tied", "embed")):
            first, second = torch.zeros(SHAPE), torch.zeros(SHAPE)
            into = {names[0]: first, names[1]: second, "third": second}
            if other is EMBED:
                fastload.load(path, into=into, options=options())
                assert torch.equal(first, EMBED)
                assert torch.equal(second, EMBED)
            else:
                with pytest.raises(MismatchError, match=r"third and embed|embed and third"):
                    fastload.load(path, into=into, options=options())


@ranks(3)
def test_a_reader_that_fails(rank: int, world: int, tmp_path: Path) -> None:
    """Others read its chunks: what they place twice is not taken for two tensors."""
    same = write(tmp_path / "same.safetensors", rank, EMBED.clone())
    differ = write(tmp_path / "differ.safetensors", rank, OTHER)
    honest = LocalStorage.read_into
    mesh = init_device_mesh("cpu", (world,))
    for is_sharded in (False, True):
        for path in (same, differ):
            count = 0

            def read(self: LocalStorage, *args: Any, **how: Any) -> None:
                nonlocal count
                count += 1
                if rank == 1 and count > 2:
                    raise StorageError("this disk is broken", url=self.url)
                honest(self, *args, **how)

            shared: Tensor = torch.zeros(SHAPE)
            if is_sharded:
                shared = distribute_tensor(shared, mesh, [Shard(0)])
            into = {"embed": shared, "head": shared}
            with (
                fastload.open(path, options=options(retries=0)) as checkpoint,
                pytest.MonkeyPatch.context() as patch,
            ):
                patch.setattr(LocalStorage, "read_into", read)
                if path == same:
                    checkpoint.load(into=into, strict=False)
                    assert checkpoint.report is not None
                    assert "stopped reading" in checkpoint.report.ranks[1].note
                    full = shared.full_tensor() if isinstance(shared, DTensor) else shared
                    assert torch.equal(full, EMBED)
                else:
                    refused(lambda: checkpoint.load(into=into, strict=False))  # noqa: B023


@ranks(3, accelerator=True)
def test_devices(rank: int, world: int, tmp_path: Path) -> None:
    """Between devices, also with a reader that fails: what it could not read is placed, too."""
    emulator = accelerator()
    torch.accelerator.set_device_index(rank)
    device = torch.device("emu", rank)
    same = write(tmp_path / "same.safetensors", rank, EMBED.clone())
    differ = write(tmp_path / "differ.safetensors", rank, OTHER)
    honest = LocalStorage.read_into
    for is_broken in (False, True):
        for is_sharded in (False, True):
            for path in (same, differ):
                count = 0

                def read(self: LocalStorage, *args: Any, broken: bool = is_broken, **how: Any) -> None:
                    nonlocal count
                    count += 1
                    if broken and rank == 1 and count > 2:
                        raise StorageError("this disk is broken", url=self.url)
                    honest(self, *args, **how)

                # Sharded: two ranks want the first half of the rows, so that messages have recipients.
                rows = (30 if rank < 2 else 0, 30)
                shared = torch.zeros(30 if is_sharded else 60, 16, device=device)
                with (
                    fastload.open(path, options=options(retries=0)) as checkpoint,
                    pytest.MonkeyPatch.context() as patch,
                ):
                    patch.setattr(LocalStorage, "read_into", read)

                    def load() -> Tensor:
                        if is_sharded:  # noqa: B023
                            box = Box((rows[0], 0), (rows[1], 16))  # noqa: B023
                            boxes = {name: [(box, shared)] for name in ("embed", "head")}  # noqa: B023
                            checkpoint.read(boxes)
                        else:
                            into = {"embed": shared, "head": shared}  # noqa: B023
                            checkpoint.load(into=into, strict=False)
                        return shared.cpu()  # noqa: B023

                    if path == same:
                        expected = EMBED[rows[0] : rows[0] + rows[1]] if is_sharded else EMBED
                        assert torch.equal(load(), expected)
                    else:
                        refused(load)
    assert emulator.faults() == []


@ranks(2)
def test_deltas_and_redistributed_states(rank: int, world: int, tmp_path: Path) -> None:
    """A model that holds the base, in which both were equal; and tensors that other ranks hold."""
    torch.manual_seed(0)
    base = torch.randn(300, 256)
    head = base.clone()
    state = {"embed": base.clone(), "head": head}
    fastload.save(state, tmp_path / "base")
    for is_same in (True, False):
        shared = base.clone()
        state["embed"][3, 7] = state["head"][3, 7] = 5.0
        if not is_same:
            state["head"][200, 1] = 7.0
        path = tmp_path / f"delta-{is_same}"
        fastload.save(state, path, options=fastload.SaveOptions(base=str(tmp_path / "base")))
        into = {"embed": shared, "head": shared}
        if is_same:
            fastload.load(path, into=into)
            assert torch.equal(shared, state["embed"])
        else:
            refused(lambda: fastload.load(path, into=into))  # noqa: B023
        for _ in range(2):  # a repeated call takes its plan from the first one
            moved = torch.zeros(300, 256)
            call = partial(fastload.redistribute, state, into={"embed": moved, "head": moved})
            if is_same:
                call()
                assert torch.equal(moved, state["embed"])
            else:
                refused(call)
