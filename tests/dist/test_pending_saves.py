"""Several saves of one training at once: what is written, what is given up, and what all ranks hear of it."""

from __future__ import annotations

import itertools
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from fastload import CheckpointManager, SaveOptions, SaveReport
from fastload.errors import FastloadError, OptionError
from fastload.saving import save as saver
from fastload.saving import snapshot
from fastload.saving.background import QueuedSave
from fastload.storage.local_target import LocalTarget
from tests.dist.faults import fastload_threads
from tests.dist.harness import ranks, run_ranks
from tests.dist.patience import patient
from tests.dist.test_manager import steps_in, warned

PATIENCE_S = 20.0


class Storage:
    """A file system that writes when told to, on this rank: `LocalTarget` with a gate before its flush."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self.begun: list[int] = []

    def let_through(self, num_saves: int) -> None:
        for _ in range(num_saves):
            self._permits.release()

    def await_begun(self, *steps: int) -> None:
        until = time.monotonic() + PATIENCE_S
        while self.begun != list(steps):
            assert time.monotonic() < until, self.begun
            time.sleep(0.005)

    @contextmanager
    def in_place(self) -> Iterator[Storage]:
        real = LocalTarget.flush

        def flush(target: LocalTarget) -> Any:
            self.begun.append(int(target.url[-8:]))
            assert self._permits.acquire(timeout=PATIENCE_S)
            return real(target)

        LocalTarget.flush = flush  # type: ignore[method-assign]
        try:
            yield self
        finally:
            LocalTarget.flush = real  # type: ignore[method-assign]


@contextmanager
def waiting(storage: Storage) -> Iterator[None]:
    """What is done in here ends only once storage goes on with one save."""
    goes_on = threading.Event()

    def go_on() -> None:
        goes_on.set()
        storage.let_through(1)

    threading.Timer(0.2, go_on).start()
    yield
    assert goes_on.is_set()


class Training:
    """A state that changes in place, as in a training: whole on each rank, or a shard on each."""

    def __init__(self, *, sharded: bool) -> None:
        self.weight = torch.zeros(1200, 7)
        if sharded:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            rows = self.weight.chunk(dist.get_world_size())[dist.get_rank()].clone()
            self.weight = DTensor.from_local(rows, mesh, [Shard(0)])

    def at(self, step: int) -> dict[str, Any]:
        self.weight.fill_(step)
        return {"weight": self.weight, "step": step}


def manage(root: Path, reports: list[SaveReport] | None = None, **arguments: Any) -> CheckpointManager:
    on_report = reports.append if reports is not None else None
    timeout_s = arguments.pop("timeout_s", PATIENCE_S)
    options = SaveOptions(timeout_s=timeout_s, writers="all", block_bytes=4096, on_report=on_report)
    return CheckpointManager(root, **{"options": options, "max_pending_saves": 2, **arguments})


def require_whole(manager: CheckpointManager, *steps: int) -> None:
    assert manager.all_steps() == list(steps)
    for step in steps:
        state = manager.restore(step=step)
        assert state["step"] == step
        assert torch.equal(state["weight"], torch.full((1200, 7), float(step)))


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Yields the lengths of the memory that is allocated for snapshots."""
    found, real = list[int](), snapshot.allocate_staging

    def noted(nbytes: int, *, pinned: bool) -> torch.Tensor:
        found.append(nbytes)
        return real(nbytes, pinned=pinned)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "allocate_staging", noted)
        yield found


@pytest.mark.slow(but=["3-ranks-sharded", "1-ranks-replicated"])
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@ranks(1, 3)
def test_the_newest_that_waits_is_written_and_nobody_waits_for_that(
    rank: int, world: int, tmp_path: Path, sharded: bool
) -> None:
    training, reports = Training(sharded=sharded), list[SaveReport]()
    with (
        Storage().in_place() as storage,
        warned("fastload.training.pending") as lines,
        allocations() as allocated,
        manage(tmp_path, reports) as manager,
    ):
        manager.save(1, training.at(1))
        storage.await_begun(1)
        by_first = list(allocated)
        half = len(by_first) // 2
        assert by_first[:half] == by_first[half:] != [], "two copies"
        for step in (2, 3, 4):
            manager.save(step, training.at(step))
        training.at(99)
        storage.let_through(9)
        require_whole(manager, 1, 4)
        assert storage.begun == [1, 4]
        assert [line.split(":")[0] for line in lines] == [
            f"step {step} is not written" for step in (2, 3) if rank == 0
        ]
        for step in (5, 6, 7):
            manager.save(step, training.at(step))
            manager.wait()
        assert allocated == by_first, "what the first save has taken is what all the others use"
    assert [int(report.url[-8:]) for report in reports] == [1, 4, 5, 6, 7]
    assert [report.came_instead_of for report in reports] == [
        (), (manager.path(2), manager.path(3)), (), (), ()
    ]  # fmt: skip
    assert reports[1].waited_s > 0
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@ranks(3, same=True)
def test_what_a_rule_names_is_written_and_training_waits_for_it(
    rank: int, world: int, tmp_path: Path
) -> list[int]:
    training, storage = Training(sharded=False), Storage()
    losses = {1: 9.0, 2: 1.0, 3: 2.0, 10: 3.0, 11: 4.0, 12: 5.0}
    with storage.in_place(), manage(tmp_path, keep_every=10, best=("loss", "min")) as manager:

        def save(step: int) -> None:
            # Each rank has a loss of its own: those of the others would name other steps.
            loss = losses[step] if rank == 0 else float(step)
            manager.save(step, training.at(step), metrics={"loss": loss})

        def save_must_wait(step: int) -> None:
            with waiting(storage):
                save(step)

        save(1)
        storage.await_begun(1)
        save(2)  # the best
        save_must_wait(3)
        save(10)  # in place of 3; a multiple of 10
        save_must_wait(11)
        save(12)  # in place of 11
        storage.let_through(9)
        require_whole(manager, 1, 2, 10, 12)
    return storage.begun


@ranks(1)
def test_that_saves_wait_is_said_once(rank: int, world: int, tmp_path: Path) -> None:
    for num_slots, says in ((1, "the last save has not ended"), (2, "2 saves are pending")):
        training, storage, root = Training(sharded=False), Storage(), tmp_path / str(num_slots)
        with (
            storage.in_place(),
            warned("fastload.training.pending", logging.INFO) as lines,
            manage(root, max_pending_saves=num_slots, keep_every=1) as manager,
        ):
            for step in range(1, num_slots + 1):
                manager.save(step, training.at(step))
            for step in range(num_slots + 1, num_slots + 4):
                with waiting(storage):
                    manager.save(step, training.at(step))
            storage.let_through(9)
            manager.wait()
        assert [says in line for line in lines] == [True]


@pytest.mark.slow(but=["1-2"])
@ranks(2)
@pytest.mark.parametrize("num_slots", [1, 2])
def test_the_wait_for_an_earlier_save_is_in_the_report(
    rank: int, world: int, tmp_path: Path, num_slots: int
) -> None:
    """As a stall, which the training felt; the wait in the background is another one."""
    training, storage, reports = Training(sharded=False), Storage(), list[SaveReport]()
    with (
        storage.in_place(),
        manage(tmp_path, reports, max_pending_saves=num_slots, keep_every=1) as manager,
    ):
        for step in range(1, num_slots + 1):
            manager.save(step, training.at(step))
        began = time.perf_counter()
        with waiting(storage):
            manager.save(num_slots + 1, training.at(num_slots + 1))
        blocked_s = time.perf_counter() - began
        storage.let_through(9)
        manager.wait()
    own = reports[-1].ranks[rank]
    assert 0.2 <= own.stall_s <= blocked_s
    assert own.total_s >= own.stall_s + own.waited_s
    assert reports[-1].stall_s >= own.stall_s


@ranks(3, same=True)
def test_what_is_saved_after_a_signal_is_written(rank: int, world: int, tmp_path: Path) -> list[int]:
    training, saved = Training(sharded=False), []
    with Storage().in_place() as storage, manage(tmp_path, every_steps=1000) as manager:
        manager.save(0, training.at(0))
        storage.await_begun(0)
        for step in itertools.count(1):
            time.sleep(0.001 * (1 + (rank + step) % 3))
            if rank == 1 and step == 50:
                os.kill(os.getpid(), signal.SIGTERM)
            if manager.should_save(step):
                manager.save(step, training.at(step))
                saved.append(step)
                break
        with waiting(storage):
            manager.save(step + 1, training.at(step + 1))
        storage.let_through(2)
        require_whole(manager, 0, step, step + 1)
    return saved


@ranks(3, same=True)
def test_ranks_that_do_not_keep_step_write_the_same(rank: int, world: int, tmp_path: Path) -> Any:
    """Storage and training take as long as they please, on each rank."""
    random.seed(rank)
    training, reports = Training(sharded=True), list[SaveReport]()
    storage = Storage()
    storage.let_through(1000)
    real = LocalTarget.write

    def write(target: LocalTarget, *given: Any) -> None:
        time.sleep(random.uniform(0, 0.03))
        real(target, *given)

    LocalTarget.write = write  # type: ignore[method-assign]
    with (
        storage.in_place(),
        manage(tmp_path, reports, max_pending_saves=3, keep_last=2, keep_every=20) as manager,
    ):
        for step in range(1, 61):
            time.sleep(random.uniform(0, 0.02))
            manager.save(step, training.at(step))
        manager.wait()
        dist.barrier()
        written = [int(report.url[-8:]) for report in reports]
        assert steps_in(tmp_path) == sorted({20, 40, 60, *written[-2:]})
        given_up = [int(url[-8:]) for report in reports for url in report.came_instead_of]
        assert sorted(written + given_up) == list(range(1, 61))
        assert written == sorted(written)
        assert written == storage.begun
        assert len(written) > 3
        assert {20, 40, 60} <= set(written)
    assert fastload_threads() == []
    return written, given_up


# What goes wrong


@contextmanager
def full(*steps: int) -> Iterator[None]:
    """Storage has no room for some steps, on this rank."""
    real = LocalTarget.write

    def write(target: LocalTarget, *given: Any) -> None:
        if int(target.url[-8:]) in steps:
            raise OSError(28, "no more room")
        real(target, *given)

    LocalTarget.write = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalTarget.write = real  # type: ignore[method-assign]


@ranks(3)
def test_an_error_is_told_on_all_ranks_in_the_same_call_and_what_is_newer_is_written(
    rank: int, world: int, tmp_path: Path
) -> None:
    training, last = Training(sharded=False), [0]

    def save_again(manager: CheckpointManager, step: int) -> None:
        """Ranks come to know of an error at other times; they are told in the same call."""
        for again in range(step + 5, step + 500):
            time.sleep(0.002 * rank)
            last[0] = again
            manager.save(again, training.at(again))

    def ask(manager: CheckpointManager, step: int) -> None:
        for again in range(step, step + 1000):
            time.sleep(0.005 + 0.002 * rank)
            last[0] = again
            manager.should_save(again)

    def wait(manager: CheckpointManager, step: int) -> None:
        manager.wait()

    with manage(tmp_path) as manager:
        for number, call in enumerate((save_again, ask, wait)):
            step = 1000 * (number + 1)
            with full(step) if rank == 2 else full():
                manager.save(step, training.at(step))
                manager.save(step + 1, training.at(step + 1))
                with pytest.raises(FastloadError, match="no more room"):
                    call(manager, step)
            saved = [torch.tensor([0]) for _ in range(world)]
            dist.all_gather(saved, torch.tensor(last))
            assert len(set(map(int, saved))) == 1, "all were told in the same call"
            manager.wait()  # it is told once
            if call is not save_again:
                assert manager.latest() == step + 1
        with full(4000, 4001):
            manager.save(4000, training.at(4000))
            manager.save(4001, training.at(4001))
            for step in (4000, 4001):
                with pytest.raises(FastloadError, match=f"step_0000{step}.*no more room"):
                    manager.latest()
        manager.save(4002, training.at(4002))
        require_whole(manager, *manager.all_steps())


@ranks(3)
def test_a_rank_that_cannot_begin_tells_the_others_while_they_write(
    rank: int, world: int, tmp_path: Path
) -> None:
    training = Training(sharded=False)
    with Storage().in_place() as storage, manage(tmp_path) as manager:
        manager.save(1, training.at(1))
        storage.await_begun(1)
        began = time.monotonic()
        if rank == 2:
            with pytest.raises(OptionError, match=r"cannot be kept|cannot be saved"):
                manager.save(2, {**training.at(2), "lock": threading.Lock()})
        else:
            manager.save(2, training.at(2))
        storage.let_through(9)
        if rank != 2:
            with pytest.raises(FastloadError, match="lock"):
                manager.wait()
        else:
            manager.wait()
        assert time.monotonic() - began < PATIENCE_S / 2
        manager.save(3, training.at(3))
        require_whole(manager, 1, 3)


# Stage in which a rank is killed, that rank, and which checkpoints may be there: of 1, written meanwhile, of
# 2, given up in one case, and of 3.
KILLS = [
    ("copying", 2, [{1}, set()]),
    ("waiting", 0, [set()]),
    ("giving up", 0, [{1}, set()]),
    ("giving up", 2, [{1}, set()]),
    ("its turn", 0, [{1}]),
    ("its turn", 2, [{1}]),
    ("writing", 2, [{1}]),
    ("publishing", 0, [{1}]),
]


def killed(rank: int, world: int, cases: list[tuple[Any, ...]], tmp_path: Path) -> None:
    """A rank's body: in each case three ranks train, and one of them is killed in some stage of its saves."""
    groups = [dist.new_group(range(first, first + 3)) for first in range(0, world, 3)]
    stage, victim, _ = cases[rank // 3]
    root, group = tmp_path / str(rank // 3), groups[rank // 3]
    die = partial(os.kill, os.getpid(), signal.SIGKILL)
    training, storage = Training(sharded=False), Storage()
    with storage.in_place():
        manager = manage(root, timeout_s=patient(3.0), process_group=group)
        manager.save(1, training.at(1))
        storage.await_begun(1)
        if rank % 3 == victim:
            strike(stage, die)
        steps = (2, 3) if stage == "giving up" else (2,)
        with suppress(FastloadError):  # which some ranks hear of in the save itself
            for step in steps:
                manager.save(step, training.at(step))
        if rank % 3 == victim and stage == "waiting":
            die()
        storage.let_through(9)
        began = time.monotonic()
        with pytest.raises(FastloadError, match=f"rank {victim}"):  # noqa: PT012  (by one of them)
            for _ in range(3):
                manager.wait()
        with suppress(FastloadError):
            manager.close()
        assert time.monotonic() - began < PATIENCE_S


def strike(stage: str, die: Callable[[], None]) -> None:
    """Has this process die in a stage of the save of step 2."""

    def instead(*_: Any, **__: Any) -> Any:
        die()

    if stage == "copying":
        saver.Snapshot = instead
    elif stage == "giving up":
        QueuedSave.drop = instead  # type: ignore[method-assign]
    elif stage == "its turn":
        saver.PlannedWrite = instead  # type: ignore[attr-defined]
    elif stage == "writing":
        real = LocalTarget.write
        LocalTarget.write = lambda target, *given: (  # type: ignore[method-assign]
            die() if target.url.endswith("2") else real(target, *given)
        )
    elif stage == "publishing":
        commit = saver.commit
        saver.commit = lambda call, *given: die() if call.url.endswith("2") else commit(call, *given)


@pytest.mark.slow
def test_killed_in_every_stage(tmp_path: Path) -> None:
    """What was whole stays so; the others are told who is gone; and the next job goes on from there."""
    dies = {3 * number + victim: signal.SIGKILL for number, (_, victim, _) in enumerate(KILLS)}
    run_ranks(killed, 3 * len(KILLS), dies=dies, cases=KILLS, tmp_path=tmp_path)
    for number, (stage, _, wholes) in enumerate(KILLS):
        with manage(tmp_path / str(number)) as manager:
            steps = manager.all_steps()
            assert set(steps) in wholes, stage
            require_whole(manager, *steps)
            manager.save(9, Training(sharded=False).at(9))
            require_whole(manager, *steps, 9)


@ranks(2)
def test_wrong_arguments(rank: int, world: int, tmp_path: Path) -> None:
    for wrong in (
        {"max_pending_saves": 0},
        {"max_pending_saves": 2.0},
        {"max_pending_saves": 2, "async_": False},
    ):
        with pytest.raises(OptionError, match="max_pending_saves"):
            manage(tmp_path, **wrong)
