"""Storage that fails one rank of a save: all ranks raise its cause, and the old one is as it was."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastload.formats.names import NAMES
from fastload.storage import open_target
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
from tests.storage.disks import small_disk_in

# See test_killed.py for which call is which.
FAILURES = [
    # call, count, rank, error, whether something is replaced, in the background, what the cause says
    ("pwrite64", 2, 1, "EIO", True, False, "model.safetensors [bytes "),
    ("pwrite64", 3, 0, "EIO", True, True, "model.safetensors [bytes "),
    ("pwrite64", 1, 2, "EDQUOT", True, True, "model.safetensors [bytes "),
    ("pwrite64", 2, 1, "ENOSPC", False, True, "model.safetensors [bytes "),
    ("fsync", 1, 2, "EIO", True, False, "model.safetensors: "),
    ("fsync", 1, 1, "EIO", False, True, "model.safetensors: "),
    ("fallocate", 1, 0, "EDQUOT", True, False, "model.safetensors [bytes 0-"),
    ("fsync", 2, 0, "EIO", True, True, ""),  # of the directory with the data
    ("renameat", 2, 0, "EIO", False, False, ""),
    ("renameat2", 1, 0, "EIO", True, False, ""),
    ("fsync", 3, 0, "EIO", True, False, ""),  # of the parent: what has been published is taken back
    ("fsync", 3, 0, "EIO", False, True, ""),
    ("fsync", 4, 0, "EIO", True, True, ""),
]


def names_of(cases: list[tuple[Any, ...]]) -> str:
    return "+".join(
        f"{error}-{call}{count}-rank{rank}-{'over' if over else 'new'}-{'async' if background else 'sync'}"
        for call, count, rank, error, over, background, _ in cases
    )


@pytest.mark.slow(but=["ENOSPC", "EIO-fsync4"])
@needs_strace
@pytest.mark.parametrize("cases", [FAILURES[n : n + 3] for n in range(0, len(FAILURES), 3)], ids=names_of)
def test_a_system_call_fails(tmp_path: Path, cases: list[tuple[Any, ...]]) -> None:
    struck = []
    for number, (call, count, rank, error, replaces, background, _) in enumerate(cases):
        path = tmp_path / str(number) / "a"
        save(state(1), path if replaces else path.with_name("other"), background=False)
        faults = {rank: [(call, f"error={error}:when={count}")]}
        struck.append(Struck(path, faults, {"overwrite": replaces, "background": background}))
    ended = save_all_struck(struck)
    for one, ends, (_, _, rank, error, replaces, _, says) in zip(struck, ended, cases, strict=True):
        assert len(ends) == 3
        require_named(ends, {rank: f"({error})"})
        assert ends[0].causes[rank].startswith(f"StorageError: {one.path.parent}"), ends[0]
        assert says in ends[0].causes[rank], ends[0]
        require_whole(one.path, 1 if replaces else None)
        assert leftovers(one.path.parent) == []
    save_again(*(one.path for one in struck))


@needs_strace
def test_what_cannot_be_removed_is_left_to_the_next(tmp_path: Path) -> None:
    """The new one is in place, so the save has succeeded; the old one is out of sight."""
    save(state(1), tmp_path / "a", background=False)
    ends = save_struck(
        tmp_path / "a", {0: [("unlinkat", "error=EIO"), ("unlink", "error=EIO")]}, overwrite=True,
        background=False,
    )  # fmt: skip
    assert [end.kind for end in ends] == ["saved"] * 3, ends
    require_whole(tmp_path / "a", 2)
    assert len(leftovers(tmp_path)) == 1
    save_again(tmp_path / "a")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Room for one state of 9 MiB, but not for two."""
    with small_disk_in(tmp_path, 16) as folder:
        yield folder


@pytest.mark.slow(but=["async"])
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_a_full_disk(disk: Path, background: bool) -> None:
    save(state(1), disk / "a", background=False)
    for path, overwrite in ((disk / "a", True), (disk / "b", False)):
        ends = save_struck(path, {}, overwrite=overwrite, background=background)
        require_named(ends, {0: "(ENOSPC)"})
        require_whole(disk / "a", 1)
        assert sorted(path.name for path in disk.iterdir()) == ["a"]


@needs_strace
def test_a_disk_that_fills_up_under_files_without_blocks(disk: Path) -> None:
    """Where blocks cannot be reserved, whoever writes the one too many hears of it."""
    save(state(1), disk / "a", background=False)
    ends = save_struck(disk / "b", {0: [("fallocate", "error=EOPNOTSUPP")]}, background=False)
    assert {end.kind for end in ends} == {"PeerError"}, ends
    assert all("(ENOSPC)" in cause for cause in ends[0].causes.values()), ends[0]
    assert len({tuple(end.causes.items()) for end in ends}) == 1, ends
    require_whole(disk / "a", 1)
    assert sorted(path.name for path in disk.iterdir()) == ["a"]


@needs_strace
def test_old_ones_can_be_removed_from_a_full_disk(disk: Path) -> None:
    save(state(1), disk / "a", background=False)
    subprocess.run(["dd", "if=/dev/zero", f"of={disk}/filler", "bs=4k"], capture_output=True)
    ends = save_struck(disk / "a", {}, overwrite=True, background=True)
    require_named(ends, {0: "(ENOSPC)"})
    assert sorted(path.name for path in disk.iterdir()) == ["a", "filler"]
    require_whole(disk / "a", 1)
    target = open_target(disk / "a", NAMES)
    target.remove()
    target.close()
    assert sorted(path.name for path in disk.iterdir()) == ["filler"]
    (disk / "filler").unlink()
    save_again(disk / "b")


@pytest.mark.slow(but=["async"])
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_a_read_only_file_system(disk: Path, background: bool) -> None:
    save(state(1), disk / "a", background=False)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for name, overwrite in (("a", True), ("b", False)):
        ends = save_struck(disk / name, {}, overwrite=overwrite, background=background)
        require_named(ends, {0: "Read-only file system (EROFS)"})
    require_whole(disk / "a", 1)


def cannot_begin(rank: int, world: int) -> End:
    wrong = {"endpoint": "nonsense:://"} if rank == 1 else {}
    return end_of(lambda: save(state(2), "s3://bucket/a", background=False, storage=wrong, timeout_s=20.0))


def test_a_rank_that_cannot_even_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others learn why, and need not wait for it until their patience ends."""
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    ends = run_ranks(cannot_begin, 3)
    assert ends[1].kind == "OptionError", ends
    for end in (ends[0], ends[2]):
        assert "OptionError: cannot open s3://bucket: " in end.text, ends
        assert "nonsense" in end.causes[1], ends
