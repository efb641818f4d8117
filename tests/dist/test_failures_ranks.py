"""A rank that dies, stops or raises at any stage: all others end in time, with one error that names it."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastload
from fastload.base.threads import Task
from fastload.comm import shared_memory
from fastload.errors import PeerError, StorageError
from fastload.loading import targets
from fastload.storage.local import LocalStorage
from fastload.transfer import transport
from tests.dist import faults
from tests.dist.faults import (
    PATIENT_S,
    SLACK_S,
    TIMEOUT_S,
    TOLD_S,
    Outcome,
    checkpoint,
    die,
    fastload_threads,
    is_intact,
    options,
    outcome_of,
)  # fmt: skip
from tests.dist.harness import run_ranks
from tests.dist.patience import patient

KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@dataclass(frozen=True)
class Case:
    """What goes wrong in a load: at that stage its victims, by rank in their group, get a signal."""

    stage: str
    victims: Mapping[int, signal.Signals]
    strategy: str = "allgather"
    num_before: int = 0  # loads that go well


def load_and_fail(rank: int, world: int, path: Path, cases: Sequence[Case]) -> Outcome:
    """Every case has a group of ranks of its own; all load at once. One case has that of all ranks."""
    size = world // len(cases)
    groups = [dist.new_group(range(first, first + size)) for first in range(0, world, size)]
    group = groups[rank // size] if len(cases) > 1 else None
    dist.barrier()  # else one may be gone while others still connect
    case = cases[rank // size]
    given = options(strategy=case.strategy)
    for _ in range(case.num_before):
        fastload.load(path, process_group=group, options=options(timeout_s=PATIENT_S))
    if (victim := rank % size) in case.victims:
        faults.strike(pytest.MonkeyPatch(), case.stage, lambda: die_together(path, case, victim))
    return outcome_of(lambda: fastload.load(path, process_group=group, options=given))


def die_together(path: Path, case: Case, victim: int) -> None:
    """All victims get there first: the end of one may keep another from it."""
    marks = {each: Path(f"{path}-{case.stage}-{each}") for each in case.victims}
    if len(marks) > 1:
        marks[victim].touch()
        while not all(mark.exists() for mark in marks.values()):
            time.sleep(0.01)
    die(case.victims[victim])


def require_named(ends: list[Outcome | None], victims: set[int], store_died: bool = False) -> None:
    """All that are left raised the same, in time, and it names the victims and nobody else."""
    left = {rank: end for rank, end in enumerate(ends) if rank not in victims}
    for rank, end in left.items():
        assert end is not None
        assert end.kind == "PeerError", (rank, end)
        assert set(end.causes) == victims, (rank, end)
        assert all(f"rank {victim}" in end.text for victim in victims), (rank, end)
        assert end.seconds < TIMEOUT_S + SLACK_S, (rank, end)
    assert len({tuple(end.causes.items()) for end in left.values() if end is not None}) == 1


def run_cases(path: Path, *cases: Case, size: int = 3, store: Any = "agent") -> None:
    dies = {
        number * size + victim: signum
        for number, case in enumerate(cases)
        for victim, signum in case.victims.items()
    }
    ends = run_ranks(
        load_and_fail, size * len(cases), dies=dies, store=store,
        ranks_per_host=2, path=checkpoint(path), cases=cases,
    )  # fmt: skip
    for number, case in enumerate(cases):
        require_named(ends[number * size :][:size], set(case.victims))


STAGES = [stage for stage in faults.STAGES if stage not in ("headers", "compare")]
EARLY = ("start", "open", "prepare")  # before data moves the strategy makes no difference
KILLED = {
    stage: [
        Case(stage, {0 if (stage, strategy) == ("read", "broadcast") else (place + turn) % 3: KILL}, strategy)
        for turn, strategy in enumerate(("allgather", "broadcast", "direct"))
    ]
    for place, stage in enumerate(STAGES)
}


@pytest.mark.slow(but=["exchange", "gather"])
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage not in EARLY])
def test_killed_rank_is_named(tmp_path: Path, stage: str) -> None:
    run_cases(tmp_path / "x.safetensors", *KILLED[stage])


def test_rank_killed_before_data_moves_is_named(tmp_path: Path) -> None:
    run_cases(tmp_path / "x.safetensors", *(KILLED[stage][0] for stage in EARLY))


@pytest.mark.slow(but=["SIGKILL"])
@pytest.mark.parametrize("signum", [KILL, STOP], ids=lambda signum: signum.name)
def test_rank_that_ends_between_agreements_is_named(tmp_path: Path, signum: signal.Signals) -> None:
    run_cases(tmp_path / "x.safetensors", Case("headers", {0: signum}), Case("compare", {1: signum}))


@pytest.mark.slow(but=["read-exchange-place"])
@pytest.mark.parametrize(
    "places",
    [
        [("open", 2), ("prepare", 0), ("connect", 1)],
        [("read", 2), ("exchange", 1), ("place", 0)],
        [("middle", 0), ("middle", 1), ("middle", 2)],
        [("first", 0), ("last", 1), ("gather", 0)],
    ],
    ids=lambda places: "-".join(stage for stage, _ in places),
)
def test_stopped_rank_is_named(tmp_path: Path, places: list[tuple[str, int]]) -> None:
    run_cases(tmp_path / "x.safetensors", *(Case(stage, {victim: STOP}) for stage, victim in places))


@pytest.mark.slow
def test_rank_that_ends_in_the_tree_of_a_group_is_named(tmp_path: Path) -> None:
    """The first one, and one that has others above and below itself."""
    places = [("open", 8, KILL), ("prepare", 8, STOP), ("gather", 0, KILL)]
    cases = [Case(stage, {victim: signum}, num_before=1) for stage, victim, signum in places]
    run_cases(tmp_path / "x.safetensors", *cases, size=10)


def test_stopped_rank_is_named_with_other_strategies(tmp_path: Path) -> None:
    cases = [Case("middle", {0: STOP}, strategy) for strategy in ("broadcast", "direct")]
    run_cases(tmp_path / "x.safetensors", *cases)


@pytest.mark.slow(but=["SIGKILL", "middle"])
@pytest.mark.parametrize("signum", [KILL, STOP], ids=lambda signum: signum.name)
@pytest.mark.parametrize("stage", ["open", "connect", "middle", "gather"])
def test_rank_0_takes_the_rendezvous_store_with_it(
    tmp_path: Path, stage: str, signum: signal.Signals
) -> None:
    run_cases(tmp_path / "x.safetensors", Case(stage, {0: signum}), store="rank0")


def test_two_ranks_killed_at_once_are_both_named(tmp_path: Path) -> None:
    run_cases(tmp_path / "x.safetensors", Case("middle", {1: KILL, 3: KILL}), size=4)
    run_cases(tmp_path / "x.safetensors", Case("first", {0: KILL, 2: STOP}), size=4)


def fail_to_connect(rank: int, world: int, path: Path) -> Outcome:
    if rank == 1:
        pytest.MonkeyPatch().setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    return outcome_of(lambda: fastload.load(path, options=options(timeout_s=PATIENT_S)))


def test_ranks_that_wait_for_one_that_cannot_connect_are_told(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "x.safetensors")
    for end in run_ranks(fail_to_connect, 3, ranks_per_host=1, path=path):
        assert end.kind == "PeerError"
        assert "nowhere0" in end.text
        assert "did not answer" not in end.text
        assert end.seconds < TOLD_S


def load_and_resume(rank: int, world: int, path: Path, notes: Path) -> Outcome:
    """Rank 1 stops; rank 0 lets it go on when it has failed itself."""
    patch = pytest.MonkeyPatch()
    if rank == 1:
        (notes / "pid").write_text(str(os.getpid()))
        faults.strike(patch, "middle", lambda: die(STOP))
    end = outcome_of(lambda: fastload.load(path, options=options()))
    if rank == 0:
        os.kill(int((notes / "pid").read_text()), signal.SIGCONT)
    return end


def test_rank_that_goes_on_too_late_raises_what_the_others_raised(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "x.safetensors")
    ends = run_ranks(load_and_resume, 3, path=path, notes=tmp_path)
    assert [end.kind for end in ends] == ["PeerError"] * 3
    assert [set(end.causes) for end in ends] == [{1}] * 3, ends
    assert all(end.seconds < TIMEOUT_S + SLACK_S for end in ends if end is not ends[1])


class Odd(Exception):
    """Carries what no wire can, and its text is no text."""

    def __init__(self) -> None:
        super().__init__(threading.Lock(), {1, 2})
        self.lock = threading.Lock()
        self.deep = ((object(),), float("nan"))

    def __str__(self) -> str:
        raise ValueError("no text")


RAISES = {
    "error": lambda: RuntimeError("the callback of the user"),
    "key": lambda: KeyError("name"),
    "odd": Odd,
    "huge": lambda: ValueError("x" * (20 << 20)),
    "huge-fields": lambda: fastload.MismatchError("no", tuple(str(n) * 9 for n in range(400_000))),
    "nested": lambda: PeerError("an inner load", {7: KeyError("inner")}),
    "interrupt": KeyboardInterrupt,
    "exit": lambda: SystemExit(3),
}


def raise_and_load_again(rank: int, world: int, path: Path, stage: str) -> dict[str, Outcome]:
    """Rank 1 raises in the first load; the second one finds the group as good as new."""
    ends = {}
    for raises, make in RAISES.items():
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                faults.strike(patch, stage, lambda make=make: fail(make()))  # type: ignore[misc]
            ends[raises] = outcome_of(lambda: fastload.load(path, options=options(timeout_s=PATIENT_S)))
        assert is_intact(fastload.load(path, options=options(timeout_s=20))), raises
    return ends


def fail(error: BaseException) -> None:
    try:
        raise error
    finally:
        del error  # no cycle with its own traceback


@pytest.mark.slow(but=["prepare"])
@pytest.mark.parametrize("stage", ["prepare", "middle"])
def test_any_exception_on_one_rank_is_told_to_all(tmp_path: Path, stage: str) -> None:
    path = checkpoint(tmp_path / "x.safetensors")
    shown = {"error": "the callback of the user", "key": "KeyError: 'name'", "interrupt": "KeyboardInterrupt",
             "nested": "an inner load", "odd": "Odd", "huge": "xxx", "exit": "SystemExit"}  # fmt: skip
    of_ranks = run_ranks(raise_and_load_again, 3, path=path, stage=stage)
    for raises in RAISES:
        ends = [of_rank[raises] for of_rank in of_ranks]
        own = {"interrupt": "KeyboardInterrupt", "exit": "SystemExit"}.get(raises, "PeerError")
        assert [end.kind for end in ends] == ["PeerError", own, "PeerError"], (raises, ends)
        for rank, end in enumerate(ends):
            assert end.kind != "PeerError" or set(end.causes) == {1}, (raises, ends)
            assert rank == 1 or shown.get(raises, "no") in end.text
            assert end.seconds < TOLD_S, "told, not waited for"


def raise_in_progress(rank: int, world: int, path: Path) -> Outcome:
    def progress(done: int, total: int) -> None:
        if rank == 2 and done > total // 2:
            raise LookupError("no such progress bar")

    end = outcome_of(lambda: fastload.load(path, options=options(progress=progress)))
    assert fastload_threads() == [], "a thread is left"
    return end


def test_exception_in_a_progress_callback(tmp_path: Path) -> None:
    ends = run_ranks(raise_in_progress, 3, path=checkpoint(tmp_path / "x.safetensors"))
    assert [end.causes for end in ends] == [{2: "LookupError"}] * 3


def load_in_groups(rank: int, world: int, path: Path) -> Outcome | None:
    """Ranks 0 and 1 load while rank 3 kills itself under rank 2."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    patch = pytest.MonkeyPatch()
    if rank == 3:
        faults.strike(patch, "middle", lambda: die(KILL))
    if rank < 2:
        for _ in range(5):
            assert is_intact(fastload.load(path, process_group=group, options=options(timeout_s=20)))
        return None
    return outcome_of(lambda: fastload.load(path, process_group=group, options=options()))


def test_failure_of_one_group_leaves_the_other_alone(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "x.safetensors")
    ends = run_ranks(load_in_groups, 4, dies={3: KILL}, path=path)
    assert set(ends[2].causes) == {1}, "its rank in the group"


def interrupt_in_agreement(rank: int, world: int, path: Path) -> Outcome | None:
    """Rank 0 loses patience with a rank that does not come; nothing goes on behind its back."""
    if rank == 1:
        time.sleep(1.5)
        return None
    signal.signal(signal.SIGALRM, lambda *_: fail(KeyboardInterrupt()))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    end = outcome_of(lambda: fastload.load(path, options=options(timeout_s=60)))
    time.sleep(0.2)
    assert fastload_threads() == []
    return end


def test_interrupt_ends_the_wait_for_others(tmp_path: Path) -> None:
    ends = run_ranks(interrupt_in_agreement, 2, path=checkpoint(tmp_path / "x.safetensors"))
    assert ends[0].kind == "KeyboardInterrupt"
    assert ends[0].seconds < 30, "it would have waited for 60 s"


def store_host_dies_outside(rank: int, world: int, path: Path) -> Outcome:
    group = dist.new_group([1, 2])
    dist.barrier()
    if rank == 0:
        die(KILL)
    time.sleep(0.2)
    return outcome_of(lambda: fastload.load(path, process_group=group, options=options()))


def test_nobody_of_the_group_is_blamed_for_the_store(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "x.safetensors")
    ends = run_ranks(store_host_dies_outside, 3, dies={0: KILL}, store="rank0", path=path)
    for end in ends[1:]:
        assert (end.kind, end.causes) == ("PeerError", {})
        assert "rank 0 of the job" in end.text


def fail_and_exit(rank: int, world: int, path: Path, stage: str, how: str) -> None:
    """Ends as a program does, through the whole of the interpreter's finalization."""
    patch = pytest.MonkeyPatch()
    patch.setattr(os, "_exit", sys.exit)
    if rank == 1:
        faults.strike(patch, stage, lambda: fail(RuntimeError("no")) if how == "raise" else die(KILL))
    end = outcome_of(lambda: fastload.load(path, options=options()))
    assert set(end.causes) == {1}


@pytest.mark.slow(but=["raise-prepare", "die-middle"])
@pytest.mark.parametrize("stage", ["prepare", "middle"])
@pytest.mark.parametrize("how", ["raise", "die"])
def test_process_exits_cleanly_after_a_failure(tmp_path: Path, stage: str, how: str) -> None:
    path = checkpoint(tmp_path / "x.safetensors")
    dies = {1: KILL} if how == "die" else None
    run_ranks(fail_and_exit, 3, dies=dies, path=path, stage=stage, how=how)


def exit_with_a_busy_thread(rank: int, world: int) -> None:
    """A thread is on its way out of C++ when the program ends."""
    pytest.MonkeyPatch().setattr(os, "_exit", sys.exit)
    store = dist.distributed_c10d._get_default_store()
    until = [time.monotonic() + 60]

    def busy() -> None:
        while time.monotonic() < until[0]:
            store.check(["nothing"])

    atexit.register(lambda: until.insert(0, time.monotonic() + 0.3))
    Task(busy, "busy").start()


def test_no_thread_of_ours_returns_when_the_interpreter_is_gone() -> None:
    run_ranks(exit_with_a_busy_thread, 2)


def kept_after_failure(rank: int, world: int, path: Path, what: str) -> None:
    """Neither buffers nor tensors, descriptors or threads outlive a load that failed."""
    gc.collect()
    gc.disable()
    made: list[weakref.ref[torch.Tensor]] = []
    patch = pytest.MonkeyPatch()
    for owner, name in (
        (transport, "allocate_buffers"),
        (shared_memory, "_map"),
        (targets, "allocate"),
    ):
        real = getattr(owner, name)

        def noted(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            found = real(*args, **kwargs)
            made.extend(map(weakref.ref, found if isinstance(found, list) else [found]))
            return found

        patch.setattr(owner, name, noted)
    victim = rank == min(1, world - 1)
    if victim and what == "raise":
        faults.strike(patch, "middle", lambda: fail(RuntimeError("no")))
    if what == "all-read" or (victim and what == "read"):
        real_read = LocalStorage.read_into

        def read_into(self: LocalStorage, name: str, offset: int, *more: Any) -> None:
            if offset > faults.NUM_BYTES // 2:
                raise StorageError("no")
            real_read(self, name, offset, *more)

        patch.setattr(LocalStorage, "read_into", read_into)
    descriptors: list[int] = []
    for _ in range(4):
        with contextlib.suppress(PeerError, StorageError, RuntimeError):
            fastload.load(path, options=options())
        dist.barrier()
        fastload_threads()  # waits for those that take a group down, and its descriptors with it
        descriptors.append(faults.num_descriptors())
    assert made
    until = time.monotonic() + 30  # a thread that ends late on a busy machine lets go of them late
    while (alive := sum(ref() is not None for ref in made)) and time.monotonic() < until:
        time.sleep(0.05)
    assert alive == 0, f"{alive} of {len(made)} buffers are alive"
    assert fastload_threads() == []
    assert faults.num_descriptors(at_most=descriptors[1]) <= descriptors[1], descriptors


@pytest.mark.slow(but=["raise", "all-read", "1-read"])
@pytest.mark.parametrize(
    ("world", "what"), [(3, "raise"), (3, "read"), (3, "all-read"), (1, "raise"), (1, "read")]
)
def test_nothing_is_kept_after_failures(tmp_path: Path, world: int, what: str) -> None:
    path = checkpoint(tmp_path / "x.safetensors")
    run_ranks(kept_after_failure, world, ranks_per_host=2, path=path, what=what)


def short_deadline(rank: int, world: int, path: Path) -> Outcome:
    patch = pytest.MonkeyPatch()
    if rank == 1:
        # A little later than the others have looked for an alarm.
        faults.strike(patch, "first", lambda: time.sleep(0.07) or fail(RuntimeError("no")))
    else:  # busy for far longer than the others wait for its answer
        slow_down(patch, patient(0.05))
    return outcome_of(lambda: fastload.load(path, options=options(timeout_s=patient(0.6), strategy="direct")))


def slow_down(patch: pytest.MonkeyPatch, seconds: float) -> None:
    real = LocalStorage.read_into

    def read_into(*args: Any) -> None:
        time.sleep(seconds)
        real(*args)

    patch.setattr(LocalStorage, "read_into", read_into)


def fall_behind(rank: int, world: int, path: Path) -> None:
    """Rank 1 takes far longer than the timeout, but it gets on."""
    patch = pytest.MonkeyPatch()
    if rank == 1:
        slow_down(patch, patient(0.25))
    given = options(timeout_s=patient(1.0), strategy="direct", read_threads=2)
    assert is_intact(fastload.load(path, options=given))


def test_slow_rank_that_gets_on_is_waited_for(tmp_path: Path) -> None:
    run_ranks(fall_behind, 3, path=checkpoint(tmp_path / "x.safetensors"))


def test_deadline_below_a_second_still_names_the_one_that_failed(tmp_path: Path) -> None:
    ends = run_ranks(short_deadline, 3, path=checkpoint(tmp_path / "x.safetensors"))
    assert [set(end.causes) for end in ends] == [{1}] * 3, ends
