"""Inference ranks that take the versions of another job: which, when, and what a fault leaves them with."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastload
from fastload import Watch
from fastload.errors import DeadlineExceeded, OptionError, PeerError, PlanMismatch, UnsupportedVersion
from fastload.ext import watch as watching
from tests.checkpoints import assert_same_bits, flip, rot, seal
from tests.dist import faults
from tests.dist.harness import ranks, run_ranks
from tests.dist.patience import patient
from tests.e2e.forked import Forked

RANKS_IMPORT = ("fastload.ext.watch", "fastload.training.manager")
_ROOT = Path(__file__).resolve().parents[2]
_SHAPE = (300, 70)


def weights(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {name: torch.full(_SHAPE, float(value)) for name in "ab"}


def step_of(model: dict[str, torch.Tensor]) -> int:
    """The version that a model has, all of it."""
    values = torch.cat([tensor.flatten() for tensor in model.values()]).unique()
    assert len(values) == 1, f"a mixture of {values.tolist()}"
    return int(values)


def save(root: Path, step: int, group: Any = None) -> None:
    given = fastload.SaveOptions(timeout_s=20, block_bytes=1 << 14)
    fastload.save(weights(step), root / f"step_{step:08d}", process_group=group, options=given)


def watch(root: Path, **given: Any) -> Watch:
    options = fastload.LoadOptions(timeout_s=patient(20), chunk_bytes=8192)
    return fastload.watch(root, **{"poll_s": 0.02, "timeout_s": patient(20), "options": options, **given})


def serves(rank: int, world: int, root: Path, last: int, newest_only: bool) -> list[int]:
    model, steps = weights(), list[int]()
    with watch(root, newest_only=newest_only) as versions:
        for version in versions:
            version.load(into=model)
            assert step_of(model) == version.step == versions.version
            assert version.metrics == {"reward": version.step / 10}
            steps.append(version.step)
            if version.step == last:
                return steps
    raise AssertionError("it has ended")


@pytest.mark.slow(but=["newest"])
@pytest.mark.parametrize("newest_only", [True, False], ids=["newest", "all"])
def test_a_job_that_trains_and_one_that_serves(tmp_path: Path, newest_only: bool) -> None:
    """They share the root only; retention deletes versions while they are read."""
    words = [str(_ROOT / "tests/dist/trainer_program.py"), str(tmp_path / "root"), "12", "0.05"]
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    trainer = Forked(words, cwd=tmp_path, env=env, out=tmp_path / "out", err=tmp_path / "err")
    try:
        given = {"root": tmp_path / "root", "last": 12, "newest_only": newest_only}
        first, *others = run_ranks(serves, 3, ranks_per_host=2, same=True, **given)
    finally:
        ended = trainer.end(30)
    assert ended.returncode == 0, ended.stderr
    assert all(steps == first for steps in others)
    assert first == sorted(set(first))
    assert first[-1] == 12


@ranks(2)
def test_which_versions_come(rank: int, world: int, tmp_path: Path) -> None:
    root = tmp_path / "root"
    with watch(root, timeout_s=0.1) as versions:
        with pytest.raises(DeadlineExceeded, match=r"root: no version within 0\.1 s"):
            next(versions)
        for step in (3, 4, 7):
            save(root, step)
        assert [next(versions).step, versions.version] == [7, None]
        with pytest.raises(DeadlineExceeded, match="newer than step 7 within"):
            next(versions)
    with watch(root, newest_only=False, after=3) as versions:
        assert versions.version == 3
        assert [next(versions).step, next(versions).step] == [4, 7]
        save(root, 8)
        assert next(versions).step == 8
    with watch(tmp_path / "other", after=9, timeout_s=0.1) as late:
        assert late.poll() is None
        save(tmp_path / "other", 9)  # no newer one, although it was not there before
        with pytest.raises(DeadlineExceeded, match="newer than step 9 within"):
            next(late)
    with pytest.raises(fastload.WorldError, match="watch is closed"):
        next(versions)
    with watch(root) as versions:
        while (version := versions.poll()) is None:
            time.sleep(0.01)
        assert version.step == 8
        version.load(into=(model := weights()))
        assert step_of(model) == 8
        assert versions.poll() is None
        save(root, 9)
        version = next(versions)
        with pytest.raises(fastload.MismatchError):
            version.load(into={"a": torch.zeros(3)})
        assert versions.version == 8
    with watch(root) as versions:
        next(versions).load(into=model)
        base = root / "step_00000009"
        changed = {"a": model["a"].clone(), "b": model["b"].clone()}
        changed["a"][3, 5] = 10
        given = fastload.SaveOptions(timeout_s=20, block_bytes=1 << 14, base=base)
        fastload.save(changed, root / "step_00000010", options=given)
        while (version := versions.poll()) is None:
            time.sleep(0.01)
        version.load(into=model)
        assert_same_bits(model, changed)
        assert sum(own.bytes_patched for own in version.checkpoint.report.ranks) > 0

    with pytest.raises(PeerError, match=r"rank 1.*poll_s=0: must be a positive number"):
        watch(root, poll_s=1 - rank)
    with pytest.raises(OptionError, match="after=-1: must be a step"):
        watch(root, after=-1)
    with pytest.raises(PlanMismatch, match="after: rank 0 None, rank 1 3"):
        watch(root, after=3 if rank else None)


@ranks(2)
def test_versions_that_cannot_be_read(rank: int, world: int, tmp_path: Path) -> None:
    """Deleted ones are left out, damaged ones with a warning; what is newer than fastload is an error."""
    root, model, warnings = tmp_path / "root", weights(), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fastload").addHandler(handler)
    for step in (1, 2, 3, 4, 5):
        save(root if step < 4 else tmp_path, step)
    if rank == 0:
        flip(root / "step_00000003/model.safetensors", -5)
    dist.barrier()
    with watch(root) as versions:
        version = next(versions)
        version.load(into=model)
        assert step_of(model) == version.step == 2
        assert ["step_00000003 is damaged; left out" in text for text in warnings] == [True] * (rank == 0)

        real = watching.api.prefetch

        def races(path: str, **given: Any) -> Any:
            """Between listing and reading, the version is deleted, and there is a newer one."""
            if rank == 0 and path.endswith("4"):
                (tmp_path / "step_00000005").rename(root / "step_00000005")
                shutil.rmtree(path)
            dist.barrier()
            return real(path, **given)

        dist.barrier()
        if rank == 0:
            (tmp_path / "step_00000004").rename(root / "step_00000004")
        dist.barrier()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(watching.api, "prefetch", races)
            version = next(versions)
        version.load(into=model)
        assert step_of(model) == version.step == 5
        assert len(warnings) == (rank == 0)

        save(tmp_path, 6)
        if rank == 0:
            seal(tmp_path / "step_00000006/fastload.json", version=2)
            (tmp_path / "step_00000006").rename(root / "step_00000006")
        dist.barrier()
        with pytest.raises(UnsupportedVersion, match="step_00000006 may be the newest"):
            next(versions)
        assert versions.version == 5


def test_versions_that_were_deleted_before_they_came_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def next_one(*saved: int, deleted: tuple[int, ...] = ()) -> tuple[int, list[str]]:
        """Returns the step of the next version, and the steps that a warning names."""
        for step in deleted:
            shutil.rmtree(tmp_path / f"step_{step:08d}")
        for step in saved:
            save(tmp_path, step)
        caplog.clear()
        step = next(versions).step
        return step, re.findall(r"deleted (.*) before", " ".join(caplog.messages))

    with watch(tmp_path, newest_only=False, after=10) as versions:
        assert next_one(10, 20, 30) == (20, [])
        assert next_one(deleted=(10,)) == (30, [])
        assert next_one(70, 80, deleted=(20, 30)) == (70, ["step 40, step 50, step 60"])  # never seen
        assert next_one(90, deleted=(80,)) == (90, ["step 80"])  # seen, and the last one is still there
        assert next_one(100, deleted=(70, 90)) == (100, [])  # one is kept: nothing is missing
        assert next_one(130) == (130, [])  # saved at longer intervals: the last one is still there
    with watch(tmp_path) as versions:  # the newest only: a skip is meant
        assert next_one() == (130, [])
        assert next_one(160, 170, deleted=(100, 130)) == (170, [])


@pytest.mark.slow(but=["False"])
@pytest.mark.parametrize("deltas", [False, True])
@ranks(2)
def test_versions_that_are_saved_again(rank: int, world: int, tmp_path: Path, deltas: bool) -> None:
    """A trainer goes back by one checkpoint, because of damage or because somebody asked for it."""
    root, model = tmp_path / "root", weights()
    given = fastload.SaveOptions(timeout_s=20, block_bytes=1 << 14)
    manage = partial(fastload.CheckpointManager, root, deltas=deltas, options=given)

    def state(step: int, value: float) -> dict[str, Any]:
        return {"a": weights(step)["a"] + torch.eye(*_SHAPE), "b": torch.full(_SHAPE, value)}

    def has(step: int, value: float) -> None:
        next(versions).load(into=model)
        assert versions.version == step
        assert_same_bits(model, state(step, value))

    with watch(root, timeout_s=0.3) as versions:
        with manage() as manager:
            manager.save(1, state(1, 0.1))
            manager.wait()
            has(1, 0.1)
            manager.save(2, state(2, 0.2))
        if rank == 0:
            rot(root / "step_00000002" / ("delta.safetensors" if deltas else "model.safetensors"), -5)
        dist.barrier()
        with pytest.raises(DeadlineExceeded):
            next(versions)
        with manage() as manager:
            manager.restore()
            assert manager.restored_step == 1
            manager.save(2, state(2, 0.2))  # the same bits, as a training makes them again
            manager.wait()
            has(2, 0.2)
            with pytest.raises(DeadlineExceeded):
                next(versions)
            manager.save(2, state(2, 0.3))
            manager.wait()
            has(2, 0.3)
            with pytest.raises(DeadlineExceeded):
                next(versions)
        with watch(root, after=2, timeout_s=0.3) as late, pytest.raises(DeadlineExceeded):
            next(late)


@ranks(3, dies={1: signal.SIGKILL})
def test_a_rank_that_dies_in_a_refresh(rank: int, world: int, tmp_path: Path) -> None:
    """The others know that they have no version; a second load without it repairs them."""
    root, model, group = tmp_path / "root", weights(), dist.new_group([0, 2])
    save(root, 1)
    save(root, 2)
    given = fastload.LoadOptions(timeout_s=patient(faults.TIMEOUT_S), chunk_bytes=8192)
    with watch(root, options=given, newest_only=False) as versions:
        next(versions).load(into=model)
        assert versions.version == 1
        version = next(versions)
        if rank == 1:
            faults.strike(pytest.MonkeyPatch(), "middle", lambda: faults.die(signal.SIGKILL))
        with pytest.raises(PeerError) as raised:
            version.load(into=model)
        assert list(raised.value.failures) == [1]
        assert versions.version is None
    with watch(root, process_group=group) as versions:
        next(versions).load(into=model)
        assert versions.version == step_of(model) == 2
