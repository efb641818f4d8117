"""SIGKILL of any rank before, during and after every step of a save."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fastload.saving import save as saver
from tests.crash.saves import (
    End,
    Struck,
    end_of,
    leftovers,
    require_named,
    require_whole,
    save,
    save_again,
    save_all_struck,
    save_struck,
    state,
)
from tests.crash.tracer import needs_strace
from tests.dist.harness import run_ranks

LATE = "DeadlineExceeded: did not answer within"

# The thread that writes makes three pwrites and one fsync. The one that publishes makes, on the leader:
# pwrite of the owner, fallocate; pwrite, fsync and rename of the record; fsync of the data, rename of the
# data, or renameat2 if there is something to replace, fsync of parent and staging.
KILLS = [
    # call, count, rank, whether something is replaced, in the background, what is there afterwards
    ("fallocate", 1, 0, True, False, 1),
    ("pwrite64", 1, 0, True, True, 1),
    ("pwrite64", 1, 1, True, False, 1),
    ("pwrite64", 2, 0, False, False, None),
    ("pwrite64", 2, 2, True, True, 1),
    ("pwrite64", 3, 1, False, True, None),
    ("fsync", 1, 0, True, False, 1),
    ("fsync", 1, 1, True, True, 1),
    ("fsync", 1, 2, False, False, None),
    ("renameat", 1, 0, True, True, 1),
    ("fsync", 2, 0, True, False, 1),
    ("renameat", 2, 0, False, True, None),
    ("renameat2", 1, 0, True, False, 1),
    ("fsync", 3, 0, False, False, 2),
    ("fsync", 3, 0, True, True, 2),
    ("fsync", 4, 0, True, False, 2),
    ("unlinkat", 1, 0, True, True, 2),
    ("unlinkat", 2, 0, False, False, 2),
]


def names_of(cases: list[tuple[Any, ...]]) -> str:
    return "+".join(
        f"{call}{count}-rank{rank}-{'over' if replaces else 'new'}-{'async' if background else 'sync'}"
        for call, count, rank, replaces, background, _ in cases
    )


@pytest.mark.slow(but=["renameat1"])
@needs_strace
@pytest.mark.parametrize("cases", [KILLS[n : n + 3] for n in range(0, len(KILLS), 3)], ids=names_of)
def test_killed_before_a_system_call(tmp_path: Path, cases: list[tuple[Any, ...]]) -> None:
    struck = []
    for number, (call, count, rank, replaces, background, _) in enumerate(cases):
        path = tmp_path / str(number) / "a"
        save(state(1), path if replaces else path.with_name("other"), background=False)
        faults = {rank: [(call, f"signal=SIGKILL:when={count}")]}
        struck.append(Struck(path, faults, {"overwrite": replaces, "background": background}))
    for one, ends, (_, _, rank, replaces, _, left) in zip(
        struck, save_all_struck(struck), cases, strict=True
    ):
        require_named(ends, {rank: LATE})
        require_whole(one.path, left)
        if not replaces:
            require_whole(one.path.with_name("other"), 1)
        if rank != 0:
            assert leftovers(one.path.parent) == []  # the leader lives, and has cleaned up itself
    save_again(*(one.path for one in struck))


# With two files of the user's beside what is replaced: linkat of each comes before the fsync of the data.
KILLS_BESIDE = [
    # call, count, what is there afterwards
    ("linkat", 1, 1),
    ("linkat", 2, 1),
    ("fsync", 2, 1),
    ("fchmod", 1, 1),
    ("renameat2", 1, 1),
    ("fsync", 3, 2),
    ("unlinkat", 1, 2),
    ("unlinkat", 4, 2),
]


@pytest.mark.slow(but=["after"])
@needs_strace
@pytest.mark.parametrize("cases", [KILLS_BESIDE[:4], KILLS_BESIDE[4:]], ids=["before", "after"])
def test_killed_at_any_instant_what_is_beside_it_is_there(
    tmp_path: Path, cases: list[tuple[Any, ...]]
) -> None:
    """One directory holds the whole checkpoint and the user's files: of the old state or of the new one."""
    struck = []
    for number, (call, count, _) in enumerate(cases):
        path = tmp_path / str(number) / "a"
        save(state(1), path, background=False)
        (path / "config.json").write_text('{"layers": 3}')
        (path / "notes").symlink_to("../notes")
        faults = {0: [(call, f"signal=SIGKILL:when={count}")]}
        struck.append(Struck(path, faults, {"overwrite": True, "background": False}))

    def require_beside(path: Path) -> None:
        assert sorted(os.listdir(path)) == ["config.json", "fastload.json", "model.safetensors", "notes"]
        assert (path / "config.json").read_text() == '{"layers": 3}'
        assert os.readlink(path / "notes") == "../notes"

    for one, ends, (_, _, left) in zip(struck, save_all_struck(struck), cases, strict=True):
        require_named(ends, {0: LATE})
        require_whole(one.path, left)
        require_beside(one.path)
    save_again(*(one.path for one in struck))
    for one in struck:
        require_beside(one.path)


@needs_strace
def test_killed_where_names_cannot_be_exchanged(tmp_path: Path) -> None:
    """The old one is out of sight until the next save, to any place beside it, puts it back."""
    save(state(1), tmp_path / "a", background=False)
    faults = [("renameat2", "error=EINVAL"), ("renameat", "signal=SIGKILL:when=3")]
    ends = save_struck(tmp_path / "a", {0: faults}, overwrite=True, background=False)
    require_named(ends, {0: LATE})
    require_whole(tmp_path / "a", None)
    save_again(tmp_path / "b")
    require_whole(tmp_path / "a", 1)


@pytest.mark.slow(but=["async"])
@needs_strace
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_rank_0_takes_the_rendezvous_store_along(tmp_path: Path, background: bool) -> None:
    save(state(1), tmp_path / "a", background=False)
    faults = {0: [("pwrite64", "signal=SIGKILL:when=2")]}
    ends = save_struck(tmp_path / "a", faults, overwrite=True, background=background, store="rank0")
    require_named(ends, {0: "hosted the rendezvous store"})
    require_whole(tmp_path / "a", 1)
    save_again(tmp_path / "a")


def die_in_between(rank: int, world: int, path: Path, victim: int, **how: Any) -> End:
    """The victim has written its data, and dies before it is published."""
    if rank == victim:
        real = saver.write

        def write(*args: Any) -> Any:
            real(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        saver.write = write  # type: ignore[attr-defined]
    return end_of(lambda: save(state(2), path, **how))


@pytest.mark.slow(but=["async-2-2"])
@pytest.mark.parametrize(("victim", "left"), [(0, 1), (2, 2)])
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_dies_between_data_and_commit(tmp_path: Path, victim: int, left: int, background: bool) -> None:
    """All data is durable by then, so the leader publishes it without the other one; who lives raises."""
    path = tmp_path / "a"
    save(state(1), path, background=False)
    ends = run_ranks(
        die_in_between, 3, dies={victim: signal.SIGKILL},
        path=path, victim=victim, overwrite=True, background=background,
    )  # fmt: skip
    require_named([end for rank, end in enumerate(ends) if rank != victim], {victim: LATE})
    require_whole(path, left)
    save_again(path)


def never_come(rank: int, world: int, path: Path, **how: Any) -> End | None:
    return end_of(lambda: save(state(2), path, **how)) if rank != 1 else None


@pytest.mark.slow(but=["async"])
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_rank_that_never_comes(tmp_path: Path, background: bool) -> None:
    save(state(1), tmp_path / "a", background=False)
    ends = run_ranks(never_come, 3, path=tmp_path / "a", overwrite=True, background=background)
    require_named([ends[0], ends[2]], {1: LATE})
    require_whole(tmp_path / "a", 1)
    assert leftovers(tmp_path) == []
