"""Ranks that want different things of a checkpoint; what does not go together is one error on all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import fastload
from fastload.errors import MismatchError, PeerError, PlanMismatch
from fastload.loading.session import Session
from fastload.transfer import demand
from tests.checkpoints import assert_same_bits
from tests.dist.faults import outcome_of
from tests.dist.harness import ranks
from tests.dist.test_sharded import emptied, locals_of, placed

OPTIONS = fastload.LoadOptions(strategy="allgather", chunk_bytes=3000, timeout_s=20)


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def saved_state() -> dict[str, Tensor]:
    layers = {f"layers.{n}.w": numbered(31 + n, 40) * (n + 1) for n in range(6)}
    experts = {f"experts.{n}": numbered(17, 9, dtype=torch.bfloat16) - n for n in range(4)}
    return {**layers, **experts, "embedding": numbered(101, 24), "step": torch.tensor(7.0)}


@pytest.fixture(params=["plain", "checksums"])
def saved(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    fastload.save(saved_state(), tmp_path / "c", options=fastload.SaveOptions(block_bytes=4096))
    if request.param == "plain":
        (file,) = (tmp_path / "c").glob("*.safetensors")
        return file
    return tmp_path / "c"


def load(path: Path, into: dict[str, Any], **changes: Any) -> fastload.LoadReport:
    """Loads over what is there, and compares it with what was there."""
    expected, reports = locals_of(into), []
    given = {name: changes.pop(name) for name in ("strategy", "chunk_bytes") if name in changes}
    options = fastload.LoadOptions(**{**vars(OPTIONS), **given, "on_report": reports.append})
    fastload.load(path, into=emptied(into), options=options, **changes)
    assert_same_bits(locals_of(into), expected)
    return reports[0]


@pytest.mark.slow
@ranks(4)
def test_each_rank_wants_something_else(rank: int, world: int, saved: Path) -> None:
    # So that all read something of these small states.
    pytest.MonkeyPatch().setattr(demand, "_SLACK_BYTES", 0)
    state, square = saved_state(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    line, half = init_device_mesh("cpu", (4,)), square["dp"]
    first = square.get_local_rank("pp") == 0

    def cut(name: str, mesh: DeviceMesh, placement: Any) -> Tensor:
        return placed(state[name].clone(), mesh, [placement])

    def stage() -> dict[str, Tensor]:
        """Pipeline × FSDP: each stage has its own names, on a mesh of its own."""
        names = [f"layers.{n}.w" for n in (range(3) if first else range(3, 6))]
        ends = ["embedding"] if first else ["step"]
        return {
            name: cut(name, half, Shard(0) if state[name].dim() else Replicate()) for name in names + ends
        }

    def expert() -> dict[str, Tensor]:
        """Each rank has its expert alone, and all share the rest."""
        return {
            f"experts.{rank}": state[f"experts.{rank}"].clone(),
            "embedding": cut("embedding", line, Shard(0)),
        }

    def one_whole() -> dict[str, Tensor]:
        """Rank 2 wants whole what others want in rows and columns: groups of one chunk, read into place."""
        if rank == 2:
            return {name: tensor.clone() for name, tensor in state.items()}
        return {name: cut(name, line, Shard(0) if rank else Shard(1)) for name in ("embedding", "layers.0.w")}

    def nothing() -> dict[str, Tensor]:
        """Only rank 3 wants anything; the others read for it."""
        return {name: tensor.clone() for name, tensor in state.items()} if rank == 3 else {}

    def twice() -> dict[str, Tensor]:
        """Strided shards, whose memory is not contiguous."""
        into = {}
        for name in ("layers.1.w", "embedding"):
            shard = cut(name, line, Shard(1))
            turned = shard.to_local().T.contiguous().T
            into[name] = DTensor.from_local(
                turned, line, [Shard(1)], run_check=False, shape=shard.shape, stride=shard.stride()
            )
        return into

    wholes: dict[Callable[[], dict[str, Tensor]], set[str]] = {
        stage: {name for name in state if not name.startswith("experts")},
        expert: {name for name in state if name.startswith("experts")} | {"embedding"},
        one_whole: set(state),
        nothing: set(state),
        twice: {"layers.1.w", "embedding"},
    }
    for make, names in wholes.items():
        nbytes = sum(state[name].nbytes for name in names)
        for strategy in ("allgather", "broadcast", "direct"):
            strict = names == set(state)
            report = load(saved, make(), strategy=strategy, strict=strict)
            if strategy == "direct":
                continue
            if strategy == "allgather" and make is nothing:
                assert all(own.bytes_read for own in report.ranks), "those who want nothing read, too"
            read = sum(own.bytes_read for own in report.ranks)
            assert report.bytes_wanted == read if make is not twice or saved.is_file() else read >= nbytes
            assert report.bytes_wanted >= nbytes
            if saved.is_file():
                assert report.bytes_wanted == nbytes
        if names != set(state):
            missed = sorted(set(state) - names)
            with pytest.raises(MismatchError, match="unexpected") as raised:
                load(saved, make())
            assert sorted(raised.value.unexpected) == missed


@pytest.mark.slow(but=["checksums"])
@ranks(3)
def test_names_and_casts(rank: int, world: int, saved: Path) -> None:
    state, mesh = saved_state(), init_device_mesh("cpu", (world,))
    cast = {name: tensor.to(torch.float64) for name, tensor in state.items() if tensor.dim()}
    into = {name: placed(tensor, mesh, [Shard(len(name) % 2)]) for name, tensor in cast.items()}
    for chunk_bytes in (1001, 3000):  # cuts elements
        load(saved, dict(into), dtype=torch.float64, strict=False, chunk_bytes=chunk_bytes)

    own = f"layers.{rank}.w"
    into = {
        own: placed(state[own], mesh, [Shard(0)]),
        "embedding": placed(state["embedding"], mesh, [Shard(1)]),
    }
    load(saved, into, names=[own, "embedding"])
    with pytest.raises(PeerError, match=r"(?s)rank 1 .*nowhere") as raised:
        fastload.load(saved, into={"nowhere": torch.zeros(2)} if rank == 1 else into, options=OPTIONS)
    assert set(raised.value.failures) == {1}


@ranks(3)
def test_plain_values_that_only_some_ranks_have(rank: int, world: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    tensors = {"w": numbered(40, 5), "v": numbered(7)}
    state = {**tensors, "epoch": 3, "rng": fastload.PerRank({"seed": rank, "noise": numbered(5) + rank})}
    fastload.save(state, tmp_path / "c", options=fastload.SaveOptions(timeout_s=20))
    into: dict[str, Any] = {"w": placed(tensors["w"], mesh, [Shard(0)]), "v": torch.zeros(7)}
    into |= {"epoch": 0, "rng": fastload.PerRank({"seed": -1, "noise": torch.zeros(5)})}
    if rank == 1:
        into.pop("epoch")
        into.pop("v")
    emptied({"w": into["w"]})
    fastload.load(tmp_path / "c", into=into, options=OPTIONS)
    assert torch.equal(into["w"].to_local(), placed(tensors["w"], mesh, [Shard(0)]).to_local())
    assert rank == 1 or (into["epoch"] == 3 and torch.equal(into["v"], tensors["v"]))
    own = into["rng"].value if isinstance(into["rng"], fastload.PerRank) else into["rng"]
    assert own["seed"] == rank
    assert torch.equal(own["noise"], numbered(5) + rank)


# What does not go together


def of_another_size(state: dict[str, Tensor], mesh: DeviceMesh, rank: int) -> Any:
    shard = placed(state["embedding"], mesh, [Shard(0)]).to_local()
    local = shard[:-1].clone() if rank == 1 else shard
    return {
        "embedding": DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=(101, 24), stride=(24, 1)
        )
    }


def of_another_shape(state: dict[str, Tensor], mesh: DeviceMesh, rank: int) -> Any:
    shape = (99, 24) if rank == 1 else (101, 24)
    return {"embedding": placed(torch.zeros(shape), mesh, [Shard(0)])}


def overlapping(state: dict[str, Tensor], mesh: DeviceMesh, rank: int) -> Any:
    local = placed(state["embedding"], mesh, [Shard(0)]).to_local()
    if rank == 1:
        local = local[:1].expand(local.shape)
    return {
        "embedding": DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=(101, 24), stride=(24, 1)
        )
    }


def of_another_dtype(state: dict[str, Tensor], mesh: DeviceMesh, rank: int) -> Any:
    tensor = state["embedding"].to(torch.bfloat16) if rank == 1 else state["embedding"]
    return {"embedding": placed(tensor, mesh, [Shard(0)])}


def partial(state: dict[str, Tensor], mesh: DeviceMesh, rank: int) -> Any:
    if rank != 1:
        return {"embedding": state["embedding"]}
    return {"embedding": DTensor.from_local(state["embedding"], mesh, [Partial()], run_check=False)}


BAD: dict[Any, str] = {
    of_another_size: r"embedding: into= has a DTensor with a local tensor of shape \[\d+, 24\]",
    of_another_shape: r"embedding: shape \[101, 24\] in the checkpoint, \[99, 24\] in into=",
    overlapping: "embedding: into= has a tensor whose elements share memory",
    of_another_dtype: "embedding: dtype torch.float32 in the checkpoint, torch.bfloat16 in into=",
    partial: "embedding: into= has a DTensor with placement P\\(sum\\)",
}


@ranks(3)
def test_what_one_rank_cannot_take_is_one_error_on_all(rank: int, world: int, saved: Path) -> None:
    mesh, state = init_device_mesh("cpu", (world,)), saved_state()
    for make, text in BAD.items():
        into = make(state, mesh, rank)
        before = locals_of(into)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Session, "run", lambda *_, **__: pytest.fail("data move"))
            with pytest.raises(PeerError, match=rf"(?s)rank 1 .*{text}") as raised:
                fastload.load(saved, into=into, strict=False, options=OPTIONS)
        assert {each: type(cause) for each, cause in raised.value.failures.items()} == {1: MismatchError}
        assert_same_bits(locals_of(into), before)


@pytest.mark.slow(but=["checksums"])
@ranks(3, same=True)
def test_into_on_some_ranks_only(rank: int, world: int, saved: Path) -> str:
    mesh = init_device_mesh("cpu", (world,))
    into = {"embedding": placed(saved_state()["embedding"], mesh, [Shard(0)])}
    with pytest.raises(PlanMismatch, match="into: rank 0 'given', rank 2 'not given'") as raised:
        fastload.load(saved, into=None if rank == 2 else into, strict=False, options=OPTIONS)
    return str(raised.value)


@pytest.mark.slow(but=["checksums"])
@ranks(3, same=True)
def test_other_dtypes_and_strategies(rank: int, world: int, saved: Path) -> str:
    mesh = init_device_mesh("cpu", (world,))
    tensor = saved_state()["embedding"].to(torch.float64 if rank else torch.float32)
    end = outcome_of(
        lambda: fastload.load(
            saved, into={"embedding": placed(tensor, mesh, [Shard(0)])}, strict=False,
            dtype=torch.float64 if rank else None, options=OPTIONS,
        )
    )  # fmt: skip
    assert end.kind == "PlanMismatch"
    assert "dtype: rank 0 'None', rank 1 'torch.float64'" in end.text
    return end.text


@pytest.mark.slow(but=["checksums"])
@ranks(4)
def test_a_mesh_with_ranks_that_take_no_part(rank: int, world: int, saved: Path) -> None:
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    group, state = square["dp"].get_group(), saved_state()
    outside = "2, 3" if rank < 2 else "0, 1"
    with pytest.raises(MismatchError, match=f"embedding: into= has a DTensor on a mesh with ranks {outside}"):
        fastload.load(
            saved, into={"embedding": placed(state["embedding"], line, [Shard(0)])}, strict=False,
            process_group=group, options=OPTIONS,
        )  # fmt: skip
    load(
        saved,
        {"embedding": placed(state["embedding"], square["dp"], [Shard(0)])},
        strict=False,
        process_group=group,
    )
    dist.barrier()
