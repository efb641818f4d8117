"""The integration of Megatron Core, with its own `save` and `load` as the control."""

from __future__ import annotations

import itertools
import os
import re
import signal
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastload
from tests.dist.harness import ranks, run_ranks
from tests.pages import page
from tests.storage.s3_server import BUCKET, client_of, seaweed_server

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore")]
RANKS_IMPORT = ("megatron.core.dist_checkpointing", "fastload.integrations.megatron")
SAVED = (2, 1, 2)  # TP × PP × DP
LOADED = [(2, 1, 2), (4, 1, 1), (1, 1, 4), (2, 2, 1), (1, 2, 2)]
OPTIONS = fastload.SaveOptions(timeout_s=20, block_bytes=4096)
LOAD = fastload.LoadOptions(timeout_s=20)


def by_megatron(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns Megatron's module, with what it asks of CUDA."""
    from megatron.core import dist_checkpointing

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    return dist_checkpointing


def empty_state(parallel: Any) -> Any:
    """Returns a state to load into; without random states if those that it needs were not saved."""
    from tests.megatron.states import state_of

    state = state_of(parallel, filled=False)
    if (parallel.tp, parallel.pp) != SAVED[:2]:
        del state["rng_state"]  # objects are not resharded
    return state


@ranks(4)
def test_other_parallelisms(rank: int, world: int, tmp_path: Path) -> None:
    from fastload.integrations import megatron as ours
    from tests.megatron.states import Parallel, state_of, values_of

    with pytest.MonkeyPatch.context() as patch:
        theirs = by_megatron(patch)
        ours.save(
            state_of(Parallel(*SAVED, rank)), tmp_path / "ours", options=OPTIONS, content_metadata={"v": 1}
        )
        for name, strategy in (("theirs", None), ("strategy", ("fastload", 1))):
            folder = tmp_path / name
            if rank == 0:
                folder.mkdir()
            dist.barrier()
            theirs.save(state_of(Parallel(*SAVED, rank)), str(folder), strategy, content_metadata={"v": 1})
        for sizes in LOADED:
            empty = partial(empty_state, Parallel(*sizes, rank))
            expected = values_of(theirs.load(empty(), str(tmp_path / "theirs")))
            assert values_of(theirs.load(empty(), str(tmp_path / "strategy"))) == expected
            assert values_of(theirs.load(empty(), str(tmp_path / "ours"))) == expected
            for name in ("ours", "strategy", "theirs"):
                assert values_of(ours.load(empty(), tmp_path / name, options=LOAD)) == expected, name


@ranks(4)
def test_the_state_of_a_gpt_model(rank: int, world: int, tmp_path: Path) -> None:
    """Its own sharded state dict, with another parallelism, as Megatron's own load fills it."""
    from fastload.integrations import megatron as ours
    from tests.megatron.models import gpt
    from tests.megatron.states import values_of

    with pytest.MonkeyPatch.context() as patch:
        theirs = by_megatron(patch)
        (tmp_path / "theirs").mkdir(exist_ok=True)
        with gpt(2, 1, seed=7) as model:
            theirs.save(model.sharded_state_dict(), str(tmp_path / "theirs"))
            ours.save(model.sharded_state_dict(), tmp_path / "ours", options=OPTIONS)
        for tp, pp in ((4, 1), (1, 1), (2, 2)):
            with gpt(tp, pp, seed=100) as model:
                expected = values_of(theirs.load(model.sharded_state_dict(), str(tmp_path / "theirs")))
            with gpt(tp, pp, seed=200) as model:
                loaded = ours.load(model.sharded_state_dict(), tmp_path / "ours", options=LOAD)
                assert values_of(loaded) == expected
                for name, parameter in model.named_parameters():
                    assert torch.equal(parameter, loaded[name]), "it is filled in place"


@ranks(4)
def test_other_expert_parallelisms(rank: int, world: int, tmp_path: Path) -> None:
    from fastload.integrations import megatron as ours
    from tests.megatron.states import experts_of, values_of

    with pytest.MonkeyPatch.context() as patch:
        theirs = by_megatron(patch)
        (tmp_path / "theirs").mkdir(exist_ok=True)
        dist.barrier()
        theirs.save(experts_of(2, rank), str(tmp_path / "theirs"))
        reports: list[Any] = []
        options = fastload.SaveOptions(timeout_s=20, writers="all", on_report=reports.append)
        ours.save(experts_of(2, rank), tmp_path / "ours", options=options)
        assert reports[0].nbytes == sum(each.bytes_written for each in reports[0].ranks), "each byte once"
        for ep in (1, 2, 4):
            empty = partial(experts_of, ep, rank, filled=False)
            expected = values_of(theirs.load(empty(), str(tmp_path / "theirs")))
            full = {name: one.data for name, one in experts_of(ep, rank).items()}
            assert expected == values_of(full)
            assert values_of(theirs.load(empty(), str(tmp_path / "ours"))) == expected
            for name in ("ours", "theirs"):
                assert values_of(ours.load(empty(), tmp_path / name, options=LOAD)) == expected, name


def piece(key: str, data: torch.Tensor, size: int, offset: int, replica: Any = 0) -> Any:
    from megatron.core.dist_checkpointing import ShardedTensor

    return ShardedTensor(key, data, data.dtype, tuple(data.shape), (size,), (offset,), None, replica)


def buckets(dp: int, at: int, *, filled: bool) -> dict[str, Any]:
    """The state of a distributed optimizer in the format dp_reshardable: parameters, and padding between.

    The buffer has 1,000 elements, and padding to a multiple of the data parallel size that is not stored.
    """
    from megatron.core.dist_checkpointing import LocalNonpersistentObject

    local = -(-1000 // (dp * 16)) * 16
    buffer = torch.arange(1000.0)
    begin, end = min(at * local, 1000), min((at + 1) * local, 1000)
    cuts = sorted({begin, end, *(cut for cut in (130, 131, 640, 900) if begin < cut < end)})
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_fp32.bucket_idx_0.exp_avg"
    pieces = [
        piece(key, buffer[first:last].clone() if filled else torch.zeros(last - first), 1000, first)
        for first, last in itertools.pairwise(cuts)
    ]
    members = [{"exp_avg": one, "padding": LocalNonpersistentObject(False)} for one in pieces]
    return {"optimizer": {"bucket": members}}


@ranks(4)
def test_flat_buckets_of_an_optimizer(rank: int, world: int, tmp_path: Path) -> None:
    from fastload.integrations import megatron as ours

    groups = [dist.new_group([0, 1, 2]), dist.new_group([0, 1])]
    reports: list[Any] = []
    options = fastload.SaveOptions(timeout_s=20, writers="all", on_report=reports.append)
    ours.save(buckets(4, rank, filled=True), tmp_path / "saved", options=options)
    assert reports[0].nbytes == sum(each.bytes_written for each in reports[0].ranks), "each byte once"
    for group, dp in zip(groups, (3, 2), strict=True):
        if rank < dp:
            state = buckets(dp, rank, filled=False)
            loads: list[Any] = []
            how = fastload.LoadOptions(timeout_s=20, strategy="allgather", on_report=loads.append)
            loaded = ours.load(state, tmp_path / "saved", process_group=group, options=how)
            found = torch.cat([one["exp_avg"] for one in loaded["optimizer"]["bucket"]])
            expected = buckets(dp, rank, filled=True)["optimizer"]["bucket"]
            assert torch.equal(found, torch.cat([one["exp_avg"].data for one in expected]))
            assert loads[-1].bytes_read < 1.1 * reports[0].nbytes, "each byte once"


@ranks(2)
def test_replicas_whose_padding_differs(rank: int, world: int, tmp_path: Path) -> None:
    """As those of several instances of a distributed optimizer: an error, unless nothing is compared."""
    from fastload.integrations import megatron as ours

    data = torch.arange(16.0)
    data[12:] = rank
    state = {"bucket": piece("bucket", data, 16, 0, rank)}
    with pytest.raises(fastload.ReplicaMismatch, match="bucket: rank 1 not as the 1 other"):
        ours.save(state, tmp_path / "saved", options=OPTIONS)
    assert not (tmp_path / "saved").exists()
    ours.save(state, tmp_path / "saved", options=replace(OPTIONS, check_replicas="off"))
    loaded = ours.load({"bucket": piece("bucket", torch.zeros(16), 16, 0)}, tmp_path / "saved", options=LOAD)
    assert loaded["bucket"][:12].tolist() == data[:12].tolist()
    assert loaded["bucket"][12:].unique().tolist() in ([0.0], [1.0])


class Float8Tensor(torch.Tensor):
    """A tensor with scales of its own, as those of Transformer Engine are."""


@ranks(2)
def test_fp8(rank: int, world: int, tmp_path: Path) -> None:
    """Plain tensors of 8 bits are saved as they are; those with scales are refused by name."""
    from fastload.integrations import megatron as ours

    with pytest.MonkeyPatch.context() as patch:
        theirs = by_megatron(patch)
        data = torch.linspace(-4.0, 4.0, 8).to(torch.float8_e4m3fn)
        tied = [piece("w", each, 16, 8 * rank) for each in (data, data.clone())]
        ours.save({"w": tied}, tmp_path / "saved", options=OPTIONS)
        for load in (ours.load, theirs.load):
            empty = piece("w", torch.zeros(16, dtype=torch.float8_e4m3fn), 16, 0)
            loaded = load({"w": empty}, str(tmp_path / "saved"))["w"]
            assert loaded.dtype is torch.float8_e4m3fn
            assert torch.equal(loaded.float(), torch.cat([data, data]).float())
        wide = ours.load({"w": piece("w", torch.zeros(8, dtype=torch.bfloat16), 16, 8)}, tmp_path / "saved")
        assert torch.equal(wide["w"], data.bfloat16())
        scaled = piece("w", torch.zeros(8).as_subclass(Float8Tensor), 16, 8 * rank)
        with pytest.raises(fastload.FastloadError, match=r"w: .* a Float8Tensor"):
            ours.save({"w": scaled}, tmp_path / "scaled", options=OPTIONS)


@ranks(2)
def test_dtensors(rank: int, world: int, tmp_path: Path) -> None:
    """The format fsdp_dtensor: refused by `save`, and saved by the integration of DCP, as the page says."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from fastload.integrations import megatron as ours
    from fastload.integrations.dcp import Reader, Writer

    mesh = dist.init_device_mesh("cpu", (2,))
    full = torch.arange(24.0).reshape(6, 4)

    def state(placement: Any, values: torch.Tensor) -> dict[str, Any]:
        return {"model": {"module.w": distribute_tensor(values, mesh, [placement])}, "iteration": 5}

    with pytest.raises(fastload.OptionError, match=r"module\.w: a DTensor.* fastload\.integrations\.dcp"):
        ours.save(state(Shard(0), full), tmp_path / "ours", options=OPTIONS)
    assert not (tmp_path / "ours").exists()
    dcp.save(state(Shard(0), full), storage_writer=Writer(tmp_path / "saved"))
    for placement in (Shard(1), Replicate()):
        into = state(placement, torch.zeros(6, 4))
        dcp.load(into, storage_reader=Reader(tmp_path / "saved"))
        assert torch.equal(into["model"]["module.w"].full_tensor(), full)


def different_values(rank: int) -> list[Any]:
    data = torch.zeros(8)
    data[5] = float(rank == 1)
    return [piece("w", data, 16, 0), piece("w", torch.ones(8), 16, 8)]


def overlap(rank: int) -> list[Any]:
    return [piece("w", torch.arange(10.0) + rank, 16, 6 * rank)]


def hole(rank: int) -> list[Any]:
    return [piece("w", torch.zeros(7), 16, 8 * rank)]


def two_shapes(rank: int) -> list[Any]:
    return [piece("w", torch.zeros(8), 16 + rank, 8 * rank)]


def unknown_object(rank: int) -> list[Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return [ShardedObject("w", object(), (2,), (rank,))]


def no_main_replica(rank: int) -> list[Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return [ShardedObject("w", 1, (2,), (rank,), replica_id=rank)]


class Unknown:
    """Something that loads of the common state refuse."""


def unknown_common(rank: int) -> list[Any]:
    return [Unknown()]


BAD = {
    unknown_common: "the common state has what .* refuses",
    different_values: "w: rank 1 not as the 1 other, in rows 0-7",
    overlap: "w: rank 1 not as the 1 other, in rows 6-9",
    hole: "row 7 of w is on no rank",
    two_shapes: r"w: rank 0 F32 \[16\], rank 1 F32 \[17\]",
    unknown_object: r"w/shard_0_2.* is an object",
    no_main_replica: "w: 1 of 2",
}


@pytest.mark.parametrize("case", BAD, ids=[case.__name__ for case in BAD])
@ranks(2)
def test_bad_input_is_an_error_on_all_ranks(rank: int, world: int, case: Any, tmp_path: Path) -> None:
    from fastload.integrations import megatron as ours

    with pytest.MonkeyPatch.context() as patch:
        theirs = by_megatron(patch)
        with pytest.raises(fastload.FastloadError, match=BAD[case]):
            ours.save({"state": case(rank)}, tmp_path / "ours", options=OPTIONS)
        assert not (tmp_path / "ours").exists()
        if case in (no_main_replica, unknown_common):
            return  # Megatron was told not to check the one, and does not check the other
        (tmp_path / "theirs").mkdir(exist_ok=True)
        with pytest.raises(fastload.FastloadError, match=BAD[case]):
            theirs.save(
                {"state": case(rank)},
                str(tmp_path / "theirs"),
                ours.SaveStrategy(OPTIONS),
                validate_access_integrity=False,
            )
        assert not (tmp_path / "theirs" / "metadata.json").exists()


@ranks(2)
def test_what_does_not_fit_the_checkpoint(rank: int, world: int, tmp_path: Path) -> None:
    """Keys that one side lacks, by each value of ``strict``, as Megatron's own load treats them."""
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from fastload.integrations import megatron as ours

    def state(*keys: str) -> dict[str, Any]:
        return {key: piece(key, torch.full((8,), 1.0 + rank), 16, 8 * rank) for key in keys}

    with pytest.MonkeyPatch.context() as patch:
        theirs = by_megatron(patch)
        (tmp_path / "theirs").mkdir(exist_ok=True)
        theirs.save(state("a", "b"), str(tmp_path / "theirs"))
        ours.save(state("a", "b"), tmp_path / "ours", options=OPTIONS)
        for strict in StrictHandling:
            try:
                expected = theirs.load(state("b", "c"), str(tmp_path / "theirs"), strict=strict)
            except BaseException:  # torch's CheckpointException is no Exception
                with pytest.raises(fastload.FastloadError, match="c"):
                    ours.load(state("b", "c"), tmp_path / "ours", strict=strict, options=LOAD)
                continue
            found = ours.load(state("b", "c"), tmp_path / "ours", strict=strict, options=LOAD)
            assert str(found) == str(expected), strict
        with pytest.raises(fastload.MismatchError, match=r"a: global shape \[16\] in the checkpoint, \[17\]"):
            ours.load({"a": piece("a", torch.zeros(8), 17, 0)}, tmp_path / "ours", options=LOAD)
        halves = {"a": piece("a", torch.zeros(16, dtype=torch.bfloat16), 16, 0)}
        loaded = ours.load(halves, tmp_path / "ours", options=LOAD)
        assert loaded["a"].tolist() == [1.0] * 8 + [2.0] * 8, "cast"


@ranks(2)
def test_saves_in_the_background(rank: int, world: int, tmp_path: Path) -> None:
    """With Megatron's queue, whose forked process waits for a thread of this one."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    from fastload.integrations import megatron as ours

    with pytest.MonkeyPatch.context() as patch:
        theirs = by_megatron(patch)
        queue = AsyncCallsQueue()
        (tmp_path / "theirs").mkdir(exist_ok=True)
        for name in ("ours", "theirs"):
            data = torch.full((8,), 1.0 + rank)
            state = {"a": piece("a", data, 16, 8 * rank), "step": 3}
            path = tmp_path / name
            if name == "ours":
                request = ours.save(state, path, async_sharded_save=True, options=OPTIONS)
            else:
                request = theirs.save(state, str(path), ours.SaveStrategy(OPTIONS), async_sharded_save=True)
            data.zero_()  # what was copied is saved
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
            assert (path / "metadata.json").exists()
            loaded = ours.load({"a": piece("a", torch.zeros(16), 16, 0)}, path, options=LOAD)
            assert loaded["a"].tolist() == [1.0] * 8 + [2.0] * 8
            assert loaded["step"] == 3
        state = {"a": piece("a", torch.zeros(8), 16, 8 * rank)}
        request = ours.save(state, tmp_path / "ours", async_sharded_save=True, options=OPTIONS)
        request.execute_sync()  # over the one before, in this process
        assert (
            ours.load({"a": piece("a", torch.ones(16), 16, 0)}, tmp_path / "ours")["a"].count_nonzero() == 0
        )
        (tmp_path / "file").touch()
        request = ours.save(state, tmp_path / "file", async_sharded_save=True, options=OPTIONS)
        queue.schedule_async_request(request)
        with pytest.raises(fastload.FastloadError, match="is a file"):
            queue.maybe_finalize_async_calls(blocking=True)
        queue.close()


def saved_state(rank: int, step: int) -> dict[str, Any]:
    return {"a": piece("a", torch.full((4000,), float(step)), 8000, 4000 * rank), "step": step}


def run_request(request: Any) -> None:
    """Does the work of a request for a queue, without the barrier in it; a rank may be dead."""
    for function in (request.async_fn, *request.finalize_fns) if request is not None else ():
        function()


def save_and_die(
    rank: int, world: int, path: Path, stage: str, who: int, through: str, background: bool
) -> None:
    """Saves step 2 over step 1; one rank is killed in a stage of it."""
    from fastload.integrations import megatron as ours
    from fastload.saving import save as saving

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    options = fastload.SaveOptions(timeout_s=10, writers="all")
    with pytest.MonkeyPatch.context() as patch:
        theirs = by_megatron(patch)
        path.mkdir(exist_ok=True)
        for step in (1, 2):
            if step == 2 and rank == who:
                name, _, when = stage.partition(" ")
                original = getattr(saving, name)

                def dying(*args: Any, original: Any = original, when: str = when, **given: Any) -> Any:
                    result = original(*args, **given) if when == "after" else die()
                    die()
                    return result

                patch.setattr(saving, name, dying)
            folder = path / str(step)
            if through == "strategy":
                folder.mkdir(exist_ok=True)
                call, strategy = theirs.save, ours.SaveStrategy(options)
            else:
                call, strategy = partial(ours.save, options=options), None
            state = saved_state(rank, step)
            if step == 1:
                call(state, str(folder), strategy)
                continue
            with pytest.raises(fastload.FastloadError):
                run_request(call(state, str(folder), strategy, async_sharded_save=background))


def load_and_save_again(rank: int, world: int, path: Path, stage: str, through: str) -> None:
    """What the killed save has left is a whole checkpoint, or none; the next save works."""
    from fastload.integrations import megatron as ours

    with pytest.MonkeyPatch.context() as patch:
        theirs = by_megatron(patch)
        is_there = (path / "2" / "metadata.json").exists()
        assert is_there == (through == "ours" and stage.endswith("after"))
        for step in (1, 2) if is_there else (1,):
            for load in (ours.load, theirs.load):
                state = load({"a": piece("a", torch.zeros(8000), 8000, 0)}, str(path / str(step)))
                assert state["step"] == step
                assert torch.equal(state["a"], torch.full((8000,), float(step)))
        if not is_there:
            with pytest.raises(Exception, match=r"not a distributed checkpoint|does not exist"):
                theirs.load({"a": piece("a", torch.zeros(8000), 8000, 0)}, str(path / "2"))
        dist.barrier()
        if through == "strategy":
            theirs.save(saved_state(rank, 3), str(path / "2"), ("fastload", 1))
        else:
            ours.save(saved_state(rank, 3), path / "2", options=OPTIONS)
        assert ours.load({"a": piece("a", torch.zeros(8000), 8000, 0)}, path / "2")["step"] == 3


@pytest.mark.parametrize("through", ["ours", "strategy"])
@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("stage", ["agree", "write", "write after", "commit", "commit after"])
def test_a_killed_save_is_whole_or_absent(stage: str, background: bool, through: str, tmp_path: Path) -> None:
    who = 0 if stage.startswith("commit") else 1
    given = {"path": tmp_path / "root", "stage": stage, "through": through}
    killed = {"who": who, "background": background, "dies": {who: signal.SIGKILL}}
    run_ranks(save_and_die, 2, **given, **killed)
    run_ranks(load_and_save_again, 2, **given)


def save_to_bucket(rank: int, world: int, url: str, storage: Any) -> None:
    from fastload.integrations import megatron as ours
    from tests.megatron.states import Parallel, state_of, values_of

    options = fastload.SaveOptions(timeout_s=50)
    for background in (False, True):
        state = state_of(Parallel(2, 1, 1, rank))
        request = ours.save(
            state, url, async_sharded_save=background, storage_options=storage, options=options
        )
        run_request(request)
        empty = state_of(Parallel(1, 2, 1, rank), filled=False)
        del empty["rng_state"]
        loaded = ours.load(empty, url, storage_options=storage, options=LOAD)
        expected = state_of(Parallel(1, 2, 1, rank))
        for name in ("iteration", "args"):
            assert values_of(loaded[name]) == values_of(expected[name])
        for name, one in expected["optimizer"]["state"].items():
            assert torch.equal(loaded["optimizer"]["state"][name], one.data)


def save_by_megatron(rank: int, world: int, path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        theirs = by_megatron(patch)
        for name, more in (("plain", {}), ("args", {"args": Namespace(num_layers=2)})):
            if rank == 0:
                (path / name).mkdir(parents=True)
            dist.barrier()
            theirs.save(saved_state(rank, 7) | more, str(path / name))


def load_megatrons_from_bucket(rank: int, world: int, url: str, storage: Any) -> None:
    from fastload.integrations import megatron as ours

    empty = {"a": piece("a", torch.zeros(4000), 8000, 4000 * (1 - rank))}
    loaded = ours.load(empty, f"{url}/plain", storage_options=storage, options=LOAD)
    assert loaded["step"] == 7
    assert loaded["a"].unique().tolist() == [7.0]
    with pytest.raises(fastload.OptionError, match=r"the common state, 'args': .*Namespace; .* mounted"):
        ours.load(empty, f"{url}/args", storage_options=storage, options=LOAD)


def test_in_a_bucket(tmp_path: Path) -> None:
    run_ranks(save_by_megatron, 2, path=tmp_path / "theirs")
    with seaweed_server(tmp_path) as storage:
        for file in (tmp_path / "theirs").rglob("*"):
            if file.is_file():
                key = f"theirs/{file.relative_to(tmp_path / 'theirs')}"
                client_of(storage).put_object(Bucket=BUCKET, Key=key, Body=file.read_bytes())
        run_ranks(load_megatrons_from_bucket, 2, url=f"s3://{BUCKET}/theirs", storage=storage)
        run_ranks(save_to_bucket, 2, url=f"s3://{BUCKET}/iter_1", storage=storage)
        found = client_of(storage).list_objects_v2(Bucket=BUCKET, Prefix="iter_1/")["Contents"]
    names = {one["Key"].rpartition("/")[2] for one in found}
    assert names == {"common.pt", "fastload.json", "metadata.json", "model.safetensors"}


@ranks(2)
def test_the_page(rank: int, world: int, tmp_path: Path) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```$", page("docs/integrations/megatron.md"), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "mounted").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        by_megatron(patch)
        names: dict[str, Any] = {"folder": str(tmp_path / "mounted"), "path": str(tmp_path / "queued")}
        for number, block in enumerate(blocks):
            names["sharded_state_dict"] = saved_state(rank, 1 + number)
            exec(block.replace("/checkpoints/", f"{tmp_path}/"), names)
            if number < 2:
                assert names["state"]["step"] == 1 + number
        names["queue"].maybe_finalize_async_calls(blocking=True)
    assert len(blocks) == 4
    for name, step in (("iter_0000100", 1), ("mounted", 2), ("queued", 4)):
        assert fastload.load(tmp_path / name, names="a")["a"].tolist() == [float(step)] * 8000


@pytest.mark.parametrize("through", ["ours", "strategy"])
@ranks(2)
def test_a_checkpoint_of_megatron_is_replaced(rank: int, world: int, through: str, tmp_path: Path) -> None:
    from fastload.integrations import megatron as ours

    with pytest.MonkeyPatch.context() as patch:
        theirs = by_megatron(patch)
        path = tmp_path / "saved"
        path.mkdir(exist_ok=True)
        theirs.save(saved_state(rank, 1), str(path))
        assert (path / ".metadata").exists()
        dist.barrier()
        if rank == 0:
            (path / "notes.txt").write_text("of the user")
        dist.barrier()
        refusing = fastload.SaveOptions(timeout_s=20, overwrite=False)
        with pytest.raises(fastload.CheckpointExists):
            ours.save(saved_state(rank, 2), path, options=refusing)
        if through == "ours":
            ours.save(saved_state(rank, 2), path, options=OPTIONS)
        else:
            theirs.save(saved_state(rank, 2), str(path), ours.SaveStrategy(OPTIONS))
        own = {"common.pt", "fastload.json", "metadata.json", "model.safetensors", "notes.txt"}
        assert {file.name for file in path.iterdir()} == own
        loaded = ours.load({"a": piece("a", torch.zeros(8000), 8000, 0)}, path, options=LOAD)
        assert loaded["step"] == 2
        assert loaded["a"].unique().tolist() == [2.0]
