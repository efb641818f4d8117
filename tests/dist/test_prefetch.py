"""Checkpoints that are read ahead: what a load still reads, what memory is held, and what goes wrong when."""

from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import fastload
from fastload.errors import ChecksumError, FastloadError, PeerError
from fastload.transfer import pipeline
from fastload.transfer import read as reading
from tests.checkpoints import assert_same_bits, flip
from tests.dist import faults
from tests.dist.faults import CHUNK_BYTES, TIMEOUT_S, die, fastload_threads
from tests.dist.harness import ranks
from tests.dist.patience import patient
from tests.dist.test_manager import manage, warned
from tests.dist.test_manager import state_of as saved_at
from tests.dist.test_rewritten import fresh, overwrite, state_of, write
from tests.dist.test_sharded import emptied, locals_of, make, placed

RANKS_IMPORT = ("torch.distributed.checkpoint", "torch.distributed.tensor")


def options(**changes: Any) -> fastload.LoadOptions:
    return fastload.LoadOptions(**{"timeout_s": 20, "chunk_bytes": 1000, **changes})


def loaded(checkpoint: fastload.Checkpoint, into: dict[str, torch.Tensor]) -> fastload.LoadReport:
    """Loads over what is there, and compares it with what was there."""
    expected = locals_of(into)
    checkpoint.load(into=emptied(into))
    assert_same_bits(locals_of(into), expected)
    assert checkpoint.report is not None
    return checkpoint.report


@pytest.mark.slow
@ranks(4, ranks_per_host=2)
def test_a_load_reads_only_what_did_not_fit(rank: int, world: int, tmp_path: Path) -> None:
    """All formats, replicated, in shards and by names, twice, and while another one is read ahead."""
    tensors = make(tmp_path)
    paths = {kind: tmp_path / kind for kind in ("saved", "plain.safetensors", "state.pt", "dcp")}
    fastload.save(tensors, paths["saved"], options=fastload.SaveOptions(block_bytes=4096))
    dcp.save(tensors, checkpoint_id=paths["dcp"])
    if rank == 0:
        save_file(tensors, paths["plain.safetensors"])
        torch.save(tensors, paths["state.pt"])
    dist.barrier()
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    sharded = {
        name: placed(tensor, init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)])
        for name, tensor in tensors.items()
    }
    for kind, path in paths.items():
        with (
            fastload.prefetch(path, options=options()) as checkpoint,
            fastload.prefetch(path, options=options(prefetch_bytes=0)) as other,
        ):
            checkpoint.wait()
            if kind == "saved":
                fastload.save({"step": 1}, tmp_path / "meanwhile")
                assert dict(checkpoint.tensors()).keys() == tensors.keys()
            for into in (dict(tensors), sharded, sharded):
                report = loaded(checkpoint, into)
                assert (report.bytes_read, report.bytes_wanted) == (0, nbytes), (kind, report)
            box = torch.empty(1, 4, 8, dtype=tensors["cube"].dtype)
            checkpoint.read({"cube": [(fastload.Box((rank, 3, 0), (1, 4, 8)), box)]})
            assert torch.equal(box, tensors["cube"][rank : rank + 1, 3:7])
            assert_same_bits(checkpoint.load(names="*e*"), {n: t for n, t in tensors.items() if "e" in n})
            has_guards = kind in ("state.pt", "dcp")  # bytes that show that data are where they seem to be
            bytes_read = loaded(other, sharded).bytes_read
            assert bytes_read >= nbytes if has_guards else bytes_read == nbytes, kind
    for given in ({"prefetch_bytes": 3000}, {"prefetch_bytes": 3000, "verify": False}, {"verify": False}):
        with fastload.prefetch(paths["saved"], options=options(**given)) as checkpoint:
            report = loaded(checkpoint, sharded)
            held = report.bytes_wanted - report.bytes_read
            assert held <= 4 * 3000 if "prefetch_bytes" in given else held == nbytes, given
    assert fastload_threads(kept=["fastload-host"]) == []


def noted_memory(patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns a function that counts the bytes of what was read ahead that are still in memory."""
    made: list[weakref.ref[torch.Tensor]] = []
    real = reading.allocate_staging

    def allocate(nbytes: int, *, pinned: bool) -> torch.Tensor:
        tensor = real(nbytes, pinned=pinned)
        made.append(weakref.ref(tensor.untyped_storage()))  # type: ignore[arg-type]
        return tensor

    patch.setattr(reading, "allocate_staging", allocate)
    return lambda: sum(one.nbytes() for ref in made if (one := ref()) is not None)


@ranks(1, 2)
def test_the_memory_is_a_share_and_is_given_back(rank: int, world: int, tmp_path: Path) -> None:
    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        held_bytes = noted_memory(patch)
        path = tmp_path / "one.safetensors"
        if rank == 0:
            save_file(state_of(1), path)
        dist.barrier()
        share_bytes = sum(tensor.nbytes for tensor in state_of(1).values()) // world
        for given, most in (({}, share_bytes), ({"prefetch_bytes": 100_000}, 100_000)):
            checkpoint = fastload.prefetch(path, options=options(chunk_bytes=None, **given))
            checkpoint.wait()
            assert 0.8 * most <= held_bytes() <= most + 4096
            assert_same_bits(checkpoint.load(), state_of(1))
            checkpoint.close()
            assert held_bytes() == 0
        fastload.prefetch(path).close()  # without a load, while reads are under way
        assert fastload_threads(kept=["fastload-host"]) == []
        assert held_bytes() == 0


@ranks(2)
def test_files_that_change_after_they_were_read(rank: int, world: int, tmp_path: Path) -> None:
    """What was read ahead is loaded as it was; the rest is an error, never a mixture."""
    old, new = write(tmp_path / "old", 1), write(tmp_path / "new", 2)
    for kind in ("one.safetensors", "saved", "zip.pt", "dcp"):
        for prefetch_bytes in (None, 400_000):
            folder = tmp_path / f"{kind}-{prefetch_bytes}"
            if rank == 0:
                folder.mkdir()
                fresh(old[kind], folder)
            dist.barrier()
            given = options(chunk_bytes=100_000, prefetch_bytes=prefetch_bytes)
            with fastload.prefetch(folder / kind, options=given) as checkpoint:
                checkpoint.wait()
                if rank == 0:
                    overwrite(folder / kind, new[kind])
                dist.barrier()
                if prefetch_bytes is None:
                    assert_same_bits(checkpoint.load(), state_of(1))
                else:
                    with pytest.raises(FastloadError, match=r"changed after it was opened|damaged"):
                        checkpoint.load()


@ranks(3, same=True)
def test_damage_is_the_same_error_before_anything_changes(rank: int, world: int, tmp_path: Path) -> str:
    path = tmp_path / "saved"
    fastload.save(state_of(1), path, options=fastload.SaveOptions(block_bytes=1 << 16))
    dist.barrier()
    if rank == 0:
        flip(path / "model.safetensors", -5)
    dist.barrier()
    into = {name: torch.zeros_like(tensor) for name, tensor in state_of(1).items()}
    texts = []
    for attempt in ("wait", "load"):
        with fastload.prefetch(path, options=options()) as checkpoint:
            with pytest.raises(ChecksumError, match=r"model.safetensors: block .* of tensor 'c'") as raised:
                checkpoint.wait() if attempt == "wait" else checkpoint.load(into=into)
            texts.append(str(raised.value))
            with pytest.raises(FastloadError, match="open it again"):
                checkpoint.load(into=into)
    assert not any(tensor.any() for tensor in into.values())
    assert fastload_threads(kept=["fastload-host"]) == []
    assert texts[0] == texts[1]
    return texts[0]


@ranks(3)
def test_an_atomic_load_changes_nothing_before_all_is_verified(rank: int, world: int, tmp_path: Path) -> None:
    """Replicated, in shards and by names: each byte is read once, into the memory of a share."""
    tensors = state_of(2)
    nbytes, given = sum(tensor.nbytes for tensor in tensors.values()), options(atomic=True, chunk_bytes=None)
    for name in ("good", "damaged"):
        fastload.save(tensors, tmp_path / name, options=fastload.SaveOptions(block_bytes=1 << 16))
    dist.barrier()
    if rank == 0:
        flip(tmp_path / "damaged/model.safetensors", -5)
    dist.barrier()
    mesh = init_device_mesh("cpu", (world,))
    with pytest.MonkeyPatch.context() as patch:
        held_bytes, most = noted_memory(patch), list[int]()
        patch.setattr(pipeline._Placing, "place", noting(pipeline._Placing.place, held_bytes, most))
        for into in (state_of(1), {n: placed(t, mesh, [Shard(0)]) for n, t in state_of(1).items()}):
            before = locals_of(into)
            with pytest.raises(ChecksumError, match="of tensor 'c'") as raised:
                fastload.load(tmp_path / "damaged", into=into, options=given)
            assert not raised.value.is_partial
            assert_same_bits(locals_of(into), before)
            assert not most, "nothing was placed"
            del raised
            gc.collect()
            with fastload.open(tmp_path / "good", options=given) as checkpoint:
                checkpoint.load(into=into)
            assert all(torch.equal(local, torch.full_like(local, 2)) for local in locals_of(into).values())
            assert checkpoint.report is not None
            assert checkpoint.report.bytes_read == checkpoint.report.bytes_verified == nbytes
            assert 0 < max(most) <= nbytes / world + 2**20 + 2**16  # a reader may read a MiB more than others
            most.clear()
        assert held_bytes() == 0
        with fastload.open(tmp_path / "damaged", options=given) as checkpoint:
            assert_same_bits(checkpoint.load(names=["a"]), {"a": tensors["a"]})  # which is not damaged
            assert checkpoint.report is not None
            assert checkpoint.report.bytes_read == tensors["a"].nbytes
        with fastload.prefetch(tmp_path / "good", options=options(atomic=True, prefetch_bytes=0)) as ahead:
            assert_same_bits(ahead.load(), tensors)


def noting(real: Callable[..., None], now: Callable[[], int], most: list[int]) -> Callable[..., None]:
    """Has a function note a number before each call."""

    def noted(*args: Any) -> None:
        most.append(now())
        real(*args)

    return noted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "atomic"),
    [("prefetching", False), ("first", False), ("read", True), ("middle", True)],
    ids=["prefetching", "loading", "reading first", "placing then"],
)
@ranks(3, dies={1: signal.SIGKILL})
def test_a_rank_that_is_killed(rank: int, world: int, tmp_path: Path, stage: str, atomic: bool) -> None:
    """The others tell of it in time, whether the tensors have changed, and load them again without it."""
    path, group = tmp_path / "one.safetensors", dist.new_group([0, 2])
    into = {name: torch.zeros_like(tensor) for name, tensor in state_of(1).items()}
    if rank == 0:
        save_file(state_of(1), path)
    dist.barrier()
    given = options(timeout_s=patient(TIMEOUT_S), atomic=atomic, chunk_bytes=CHUNK_BYTES)
    if rank == 1 and stage != "prefetching":
        faults.strike(pytest.MonkeyPatch(), stage, lambda: die(signal.SIGKILL))

    def load() -> None:
        if atomic:
            fastload.load(path, into=into, options=given)
            return
        with fastload.prefetch(path, options=given) as checkpoint:
            if rank == 1 and stage == "prefetching":
                die(signal.SIGKILL)
            checkpoint.load(into=into)

    with pytest.raises(PeerError) as raised:
        load()
    assert list(raised.value.failures) == [1], raised.value
    assert raised.value.is_partial == (stage in ("first", "middle"))
    if not raised.value.is_partial:
        assert not any(tensor.any() for tensor in into.values())
    assert fastload_threads(kept=["fastload-host"]) == []
    fastload.load(path, into=into, process_group=group, options=options(atomic=atomic))
    assert_same_bits(into, state_of(1))


@ranks(2)
def test_a_checkpoint_that_is_read_ahead_is_restored_without_storage(
    rank: int, world: int, tmp_path: Path
) -> None:
    reports: list[fastload.LoadReport] = []
    how = fastload.LoadOptions(timeout_s=20, on_report=reports.append)
    with manage(tmp_path) as manager:
        manager.prefetch()  # of nothing
        for step in (1, 2, 3):
            manager.save(step, saved_at(step))
        for given, wanted in ((None, 3), (1, 1)):
            manager.prefetch(given, options=how)
            assert manager.restore(step=given)["step"] == wanted
            assert (reports[-1].bytes_read, reports[-1].source) == (0, "storage")
        manager.prefetch(options=how)
        manager.save(4, saved_at(4))
        assert manager.restore()["step"] == 4
        assert len(reports) == 2, "options of the restore hold for what was not read ahead"
        dist.barrier()
        if rank == 0:
            flip(tmp_path / "step_00000004/model.safetensors", -1)
        dist.barrier()
        manager.prefetch()
        with warned("fastload.training.restore") as lines:
            assert manager.restore()["step"] == 3
        assert ["cannot be restored, falling back to 3" in line for line in lines] == [True] * (rank == 0)
        manager.prefetch()  # and never restored
