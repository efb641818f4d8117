"""The harness must not only run ranks: each way a rank can fail has to fail the test, and say which."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.dist.harness import ranks, run_ranks


@ranks(1, 2, 5, same=True)
def test_ranks_form_a_group(rank: int, world: int, tmp_path: Path) -> list[float]:
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank), str(world))
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == [world] * 3
    (tmp_path / str(rank)).write_text("here")
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == world
    return ones.tolist()


@pytest.mark.parametrize("extra", ["a", "b"])
@ranks(2, store="rank0")
def test_parameters_reach_the_ranks(rank: int, world: int, extra: str) -> None:
    assert extra in "ab"
    dist.barrier()


@ranks(3, dies={0: signal.SIGKILL})
def test_the_rendezvous_store_outlives_rank_0(rank: int, world: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        dist.barrier()


@ranks(3, dies={2: signal.SIGSTOP})
def test_a_rank_may_stop_for_good(rank: int, world: int) -> None:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)


def _rank_1_raises(rank: int, world: int) -> None:
    print(f"{rank} says hello")
    assert rank + 40 != 41, "no good"


def test_an_exception_is_shown_with_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pytest.fail.Exception) as failure:
        run_ranks(_rank_1_raises, 3)
    text = str(failure.value)
    assert text.startswith("=== rank 1 of 3 raised\nTraceback")
    assert "in _rank_1_raises" in text
    assert "AssertionError: no good\nassert (1 + 40) != 41" in text
    assert "zygote.py" not in text
    assert "--- output of rank 2 ---\n2 says hello" in capsys.readouterr().out


def _rank_0_hangs(rank: int, world: int) -> None:
    if rank == 0:
        time.sleep(1000)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_hang_names_its_ranks_and_shows_where() -> None:
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception) as failure:
        run_ranks(_rank_0_hangs, 3, deadline_s=2)
    assert time.monotonic() - start < 10
    text = str(failure.value)
    assert "=== rank 0 of 3 hangs: still running after 2 s" in text
    assert "=== rank 1 of 3 hangs" in text
    assert "in _rank_0_hangs" in text


def _rank_1_ends(rank: int, world: int, how: str) -> None:
    if rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "exit":
        os._exit(3)
    if rank == 1:
        sys.exit("enough")


@pytest.mark.parametrize(
    ("how", "expected"),
    [("kill", "was killed by SIGKILL"), ("exit", "exited with status 3"), ("leave", "SystemExit: enough")],
)
def test_a_rank_that_ends_early_is_a_failure(how: str, expected: str) -> None:
    with pytest.raises(pytest.fail.Exception) as failure:
        run_ranks(_rank_1_ends, 2, how=how)
    assert "=== rank 1 of 2" in str(failure.value)
    assert expected in str(failure.value)
    assert "rank 0 of 2" not in str(failure.value)


def _returns_rank(rank: int, world: int) -> int:
    return rank


def test_values_come_back_and_can_be_compared() -> None:
    assert run_ranks(_returns_rank, 3) == [0, 1, 2]
    with pytest.raises(pytest.fail.Exception, match=r"different values\nrank 0: 0\nrank 1: 1"):
        run_ranks(_returns_rank, 2, same=True)


@pytest.mark.parametrize("wanted", [signal.SIGKILL, signal.SIGSTOP], ids=lambda wanted: wanted.name)
def test_a_rank_that_was_to_die_may_not_return(wanted: signal.Signals) -> None:
    with pytest.raises(pytest.fail.Exception, match=f"rank 0 of 2 returned 0, but .* {wanted.name}"):
        run_ranks(_returns_rank, 2, dies={0: wanted})


def _warns(rank: int, world: int) -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def test_warnings_are_errors_on_the_ranks_too() -> None:
    with pytest.raises(pytest.fail.Exception, match="UserWarning: careful"):
        run_ranks(_warns, 1)


def _whole_environment(rank: int, world: int) -> tuple[str | None, str]:
    return os.environ.get("FASTLOAD_PROBE"), os.getcwd()


def test_environment_and_directory_are_those_of_the_test(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FASTLOAD_PROBE", "7")
    monkeypatch.chdir(tmp_path)
    assert run_ranks(_whole_environment, 1) == [("7", str(tmp_path))]


def _leaves_a_process(rank: int, world: int) -> int:
    warnings.simplefilter("ignore", ResourceWarning)
    return subprocess.Popen(["sleep", "100"]).pid


def test_nothing_a_rank_started_outlives_it() -> None:
    left = run_ranks(_leaves_a_process, 2)
    limit = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in left):
        assert time.monotonic() < limit
        time.sleep(0.01)


def _ends_as_programs_do(rank: int, world: int) -> None:
    own = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]

    def look() -> None:
        for number in own:
            try:
                os.fstat(number)
            except OSError:
                os.kill(os.getpid(), signal.SIGABRT)

    os._exit = sys.exit  # type: ignore[assignment]
    atexit.register(look)


def test_nothing_that_a_rank_has_from_the_zygote_closes_what_is_its_own() -> None:
    """An object for a descriptor of the zygote's would close the number, which is another's by then."""
    run_ranks(_ends_as_programs_do, 2)


def _open_descriptors(rank: int, world: int) -> list[str]:
    links = (Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd"))
    return [os.readlink(link) for link in links if link.is_symlink()]


def test_ranks_have_no_descriptors_but_their_own() -> None:
    """Three standard ones; of the store and of Gloo, some sockets and pipes of their own."""
    ends = run_ranks(_open_descriptors, 3)
    for number, end in enumerate(ends):
        others = {name for other in ends[:number] + ends[number + 1 :] for name in other}
        assert set(end) & others <= {os.devnull, "anon_inode:[eventpoll]", "anon_inode:[eventfd]"}
        assert sum(".log" in name for name in end) == 2
        assert end.count(os.devnull) == 1
