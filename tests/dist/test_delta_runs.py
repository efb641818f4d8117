"""Runs whose checkpoints are deltas: what is kept, listed, restored and converted."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fastload
from fastload import CheckpointManager, SaveOptions
from fastload.cli import main
from fastload.errors import OptionError
from fastload.ext.deltas import save as saving_delta
from fastload.options import Patience
from fastload.training.catalog import Catalog
from fastload.training.retention import Retention
from tests.checkpoints import assert_same_bits, rot
from tests.dist import test_memory_tier
from tests.dist.harness import ranks
from tests.dist.test_deltas import LOAD, changed, step, weights
from tests.dist.test_readers import own_disk
from tests.dist.test_readers import pytestmark as needs_mounts
from tests.dist.test_sharded import placed

OPTIONS = SaveOptions(timeout_s=20, writers="all", block_bytes=4096, max_chain=3)


def manage(root: Path, **arguments: Any) -> CheckpointManager:
    return CheckpointManager(root, **{"options": OPTIONS, "deltas": True, **arguments})


def is_delta(path: Path) -> bool:
    return (path / "delta.safetensors").exists()


def run(*arguments: object, env: dict[str, str] | None = None) -> str:
    result = CliRunner().invoke(main, [str(each) for each in arguments], env=env)
    assert result.exit_code == 0, result.output
    return result.output


def entries(root: Path) -> dict[int, Any]:
    return {one.step: one for one in Catalog(root, None, Patience(0, 20)).entries()}


@pytest.mark.slow(but=["2-ranks-{}"])
@pytest.mark.parametrize("how", [{}, {"async_": False}, {"max_pending_saves": 3}], ids=str)
@ranks(2)
def test_a_run_of_deltas(rank: int, world: int, tmp_path: Path, how: dict[str, Any]) -> None:
    states = [weights()]
    with manage(tmp_path, keep_last=2, **how) as manager:
        for number in range(1, 8):
            states.append(step(states[-1], number))
            manager.save(number, {**states[number], "step": number})
            manager.wait()
        assert manager.latest() == 7
        # Of two chains of four each: 5 is complete, and 6 and 7 are kept and need it.
        assert manager.all_steps() == [5, 6, 7]
    assert [is_delta(manager_path) for manager_path in sorted(tmp_path.glob("step_*"))] == [False, True, True]
    with manage(tmp_path, **how) as manager:
        state = manager.restore()
        assert state.pop("step") == 7
        assert_same_bits(state, states[7])
        old = manager.restore(step=6)
        assert old.pop("step") == 6
        assert_same_bits(old, states[6])
        # The run goes back: what is saved again is not a delta of itself, or of what needs it.
        again = step(states[5], 50)
        manager.save(6, {**again, "step": 60})
        manager.wait()
        assert entries(tmp_path)[6].summary.base in ("", "step_00000005")
        assert "was replaced" in entries(tmp_path)[7].problem
        state = manager.restore()
        assert state.pop("step") == 60
        assert_same_bits(state, again)
    if rank == 0:
        rows = {row["step"]: row for row in json.loads(run("ls", "--json", tmp_path))["checkpoints"]}
        assert [rows[5][key] for key in ("state", "base", "num_deltas")] == ["complete", None, 0]
        assert [rows[6][key] for key in ("base", "num_deltas")] == ["step_00000005", 1]
        assert rows[7]["state"] == "damaged"
        assert "delta of" in run("ls", tmp_path)
        path = tmp_path / "step_00000006"
        found = json.loads(run("inspect", "--json", path))
        assert found["delta"]["base"] == "step_00000005"
        assert {row["name"] for row in found["tensors"]} == set(again)
        assert "a delta of step_00000005; 1 delta since the last complete checkpoint" in run("inspect", path)


@pytest.mark.slow(but=["{}-replicated", "False}-sharded"])
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("how", [{}, {"async_": False}], ids=str)
@ranks(2)
def test_a_damaged_base_does_not_end_a_run(
    rank: int, world: int, tmp_path: Path, how: dict[str, Any], sharded: bool
) -> None:
    """A listing does not show the damage; the next checkpoint is complete, the ones after it are deltas."""
    mesh = init_device_mesh("cpu", (world,))
    reports, warnings = list[fastload.SaveReport](), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fastload").addHandler(handler)
    chosen = replace(OPTIONS, on_report=reports.append, max_chain=9)
    states = [weights()]
    with manage(tmp_path, options=chosen, **how) as manager:
        for number in range(1, 7):
            states.append(step(states[-1], number))
            state = dict(states[-1])
            if sharded:
                state["wide"] = placed(state["wide"], mesh, [Shard(1)])
            manager.save(number, state)
            manager.wait()
            if number == 3:
                dist.barrier()
                if rank == 0:
                    rot(tmp_path / "step_00000003/delta.safetensors", -300)
                dist.barrier()
        assert [is_delta(path) for path in sorted(tmp_path.glob("step_*"))] == [
            False, True, True, False, True, True,
        ]  # fmt: skip
        assert "its base cannot be read: rank" in reports[3].why_complete
        assert "step_00000003/delta.safetensors: block" in reports[3].why_complete
        assert len([text for text in warnings if "a complete checkpoint is written" in text]) == (rank == 0)
        for number in (2, 4, 5, 6):
            assert_same_bits(manager.restore(step=number), states[number])


@ranks(2)
def test_a_delta_as_large_as_the_whole_is_a_warning(rank: int, world: int, tmp_path: Path) -> None:
    warnings = list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fastload").addHandler(handler)
    model = torch.nn.Linear(300, 200)
    few = torch.optim.SGD([model.bias], lr=0.1)
    every = torch.optim.AdamW(model.parameters(), lr=0.1)
    with manage(tmp_path / "a", options=replace(OPTIONS, max_chain=9)) as manager:
        for number, optimizer in enumerate([few, few, every, every]):
            model(torch.ones(300)).sum().backward()
            optimizer.step()
            manager.save(number, model.state_dict())
            manager.wait()
            assert len(warnings) == (rank == 0 and number >= 2)
    fastload.save(model.state_dict(), tmp_path / "b" / "0", options=OPTIONS)
    model(torch.ones(300)).sum().backward()
    every.step()
    path = tmp_path / "b" / "1"
    fastload.save(model.state_dict(), path, options=replace(OPTIONS, base=tmp_path / "b" / "0"))
    assert len(warnings) == 2 * (rank == 0)  # another folder
    for text, name in zip(warnings, ("a/step_00000002", "b/1"), strict=rank == 0):
        assert f"{name}: the delta takes 242 kB, a complete checkpoint 241 kB. " in text
        assert "without deltas=True and base=" in text


@ranks(2)
def test_a_base_that_storage_refuses_does_not_end_a_run(rank: int, world: int, tmp_path: Path) -> None:
    reports = list[fastload.SaveReport]()

    def refuse(*_: Any) -> Any:
        raise fastload.StorageError("permission denied", url="the base")

    with manage(tmp_path, options=replace(OPTIONS, on_report=reports.append), async_=False) as manager:
        manager.save(1, weights())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saving_delta, "read_chain", refuse)
            manager.save(2, step(weights(), 1))
        manager.save(3, step(weights(), 2))
    assert [is_delta(path) for path in sorted(tmp_path.glob("step_*"))] == [False, False, True]
    assert "its base cannot be read: the base: permission denied" in reports[1].why_complete


@needs_mounts
@ranks(2)
def test_a_host_without_the_base_gets_a_complete_checkpoint(rank: int, world: int, tmp_path: Path) -> None:
    root = own_disk(tmp_path, rank)
    chosen = replace(OPTIONS, shared=False)
    states = [weights()]
    for number in range(1, 4):
        states.append(step(states[-1], number))
        with manage(root, options=chosen) as manager:
            manager.save(number, states[-1])
        if rank == 1 and number == 1:
            shutil.rmtree(root / "step_00000001")
        dist.barrier()
    assert [is_delta(path) for path in sorted(root.glob("step_*"))] == [False] * (2 - rank) + [True]
    loaded = fastload.load(root / "step_00000003", options=LOAD)
    assert_same_bits(loaded, states[3])


@ranks(2)
def test_a_watch_takes_the_deltas(rank: int, world: int, tmp_path: Path) -> None:
    states = [weights()]
    model = {**weights(), "step": 0}
    with manage(tmp_path) as manager:
        for number in range(1, 4):
            states.append(step(states[-1], number))
            manager.save(number, {**states[number], "step": number})
            manager.wait()
        reports: list[fastload.LoadReport] = []
        chosen = fastload.LoadOptions(timeout_s=20, on_report=reports.append)
        with fastload.watch(
            tmp_path, newest_only=False, poll_s=0.05, timeout_s=10, options=chosen
        ) as versions:
            for _, version in zip(range(3), versions, strict=False):
                version.load(into=model)
                assert model["step"] == version.step
                assert_same_bits({name: model[name] for name in states[0]}, states[version.step])
    patched = [report.ranks[rank].bytes_patched for report in reports]
    nbytes = sum(tensor.nbytes for tensor in states[0].values())
    assert patched == [0, nbytes, nbytes]


@ranks(2)
def test_a_watch_of_deltas_whose_base_is_elsewhere(rank: int, world: int, tmp_path: Path) -> None:
    states = [weights()]
    complete, root = tmp_path / "complete", tmp_path / "deltas"
    fastload.save(states[0], complete / "step_00000000", options=OPTIONS)
    base = complete / "step_00000000"
    for number in (1, 2):
        states.append(step(states[-1], number))
        path = root / f"step_{number:08}"
        fastload.save(states[-1], path, options=replace(OPTIONS, base=base, bases=complete))
        assert is_delta(path)
        base = path
    chosen = fastload.LoadOptions(timeout_s=20, bases=complete)
    model = {name: tensor.clone() for name, tensor in states[0].items()}
    with fastload.watch(root, newest_only=False, poll_s=0.05, timeout_s=10, options=chosen) as versions:
        for _, version in zip(range(2), versions, strict=False):
            version.load(into=model)
            assert_same_bits(model, states[version.step])
    assert {one.state for one in entries(root).values()} == {"damaged"}
    if rank == 0:
        listed = run("ls", "--json", root, env={"FASTLOAD_BASES": str(complete)})
        assert {row["state"] for row in json.loads(listed)["checkpoints"]} == {"complete"}


def test_convert_makes_a_complete_checkpoint(tmp_path: Path) -> None:
    first = weights()
    second = step(first, 1)
    complete = SaveOptions(block_bytes=4096)
    fastload.save({**first, "step": 1}, tmp_path / "0", options=complete)
    fastload.save(
        {**second, "step": 2}, tmp_path / "1", options=SaveOptions(block_bytes=4096, base=tmp_path / "0")
    )
    assert is_delta(tmp_path / "1")
    shutil.move(tmp_path / "0", tmp_path / "elsewhere" / "0")
    result = CliRunner().invoke(main, ["convert", str(tmp_path / "1"), str(tmp_path / "2")])
    assert "1: a delta of" in result.output
    run("convert", tmp_path / "1", tmp_path / "2", env={"FASTLOAD_BASES": str(tmp_path / "elsewhere")})
    shutil.rmtree(tmp_path / "elsewhere")
    state = fastload.load(tmp_path / "2", options=LOAD)
    assert state.pop("step") == 2
    assert_same_bits(state, second)
    assert fastload.inspect(tmp_path / "2").delta is None


def test_retention_keeps_what_a_kept_delta_needs(tmp_path: Path) -> None:
    """Random runs: whatever is pruned, everything that is left loads, and deletions begin with deltas."""
    for seed in range(6):
        rng = random.Random(seed)
        root, states = tmp_path / str(seed), dict[int, dict[str, Tensor]]()
        state = {"a": torch.randn(3000, generator=torch.Generator().manual_seed(seed))}
        for number in range(1, 10):
            base = root / f"step_{rng.choice(list(states)):08}" if states and rng.random() < 0.8 else None
            state = changed(state, number, 0.05)
            chosen = SaveOptions(block_bytes=4096, base=base, max_chain=4)
            fastload.save(state, root / f"step_{number:08}", options=chosen)
            states[number] = state
        listed = list(entries(root).values())
        order = Catalog(root, None, Patience(0, 20)).expendable(listed, Retention(keep_last=1))
        bases = {one.step: one.summary.base for one in listed if one.summary.base}
        for at, number in enumerate(order):
            assert bases.get(number) not in {f"step_{earlier:08}" for earlier in order[:at]}
        run(
            "prune",
            root,
            "--keep-last",
            rng.randint(1, 3),
            *(["--keep-every", "4"] if rng.random() < 0.5 else []),
        )
        left = entries(root)
        assert len(left) < 9
        assert 9 in left
        for number, one in left.items():
            assert one.is_complete, one
            loaded = fastload.load(root / f"step_{number:08}", options=LOAD)
            assert_same_bits(loaded, states[number])
        base = next((one.summary.base for one in left.values() if one.summary.base), None)
        if base is not None:
            shutil.rmtree(root / base)
            broken = [one for one in entries(root).values() if not one.is_complete]
            assert broken
            assert all("its base" in one.problem for one in broken)


@ranks(2, ranks_per_host=1, deadline_s=90)
def test_a_run_of_deltas_with_memory(rank: int, world: int, tmp_path: Path) -> None:
    """Deltas are on storage; memory has complete checkpoints, and so has what is written from there."""
    states = [weights()]
    for number in range(1, 8):
        states.append(step(states[-1], number))
    memory, root = tmp_path / "memory", tmp_path / test_memory_tier.ROOT
    state = lambda number: {**states[number], "step": number}  # noqa: E731
    manage = partial(test_memory_tier.manage, tmp_path, memory, options=OPTIONS, deltas=True)
    with contextlib.suppress(test_memory_tier.Crash), manage() as manager:
        for number in (1, 3):
            manager.save(number, state(number))
            manager.wait()
            test_memory_tier.keep(manager, number + 1, state=state)
        raise test_memory_tier.Crash
    saved = lambda: {number: is_delta(root / f"step_{number:08}") for number in entries(root)}  # noqa: E731
    assert saved() == {1: False, 3: True}
    with manage() as manager:
        assert_same_bits(tensors_of(manager.restore()), states[4])
        assert (manager.restored_step, manager.restored_from) == (4, "memory")
        manager.save(5, state(5))
        manager.wait()
        test_memory_tier.keep(manager, 6, state=state)
    assert saved() == {1: False, 3: True, 5: True, 6: False}
    with manage() as manager:
        manager.save(7, state(7))
        manager.wait()
        assert entries(root)[7].summary.base == "step_00000006"
        assert saved()[7]
    dist.barrier()
    shutil.rmtree(memory, ignore_errors=True)
    dist.barrier()
    with manage() as manager:
        for number in (3, 5, 6, 7):
            assert_same_bits(tensors_of(manager.restore(step=number)), states[number])


def tensors_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def test_options_of_a_manager_that_do_not_go_together(tmp_path: Path) -> None:
    for arguments, text in (
        ({"options": SaveOptions(base=tmp_path / "0")}, "deltas=True saves each"),
        ({"deltas": 1}, "deltas=1"),
    ):
        with pytest.raises(OptionError, match=text):
            manage(tmp_path / "root", **arguments)
