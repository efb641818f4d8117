"""A training with DataLoader workers, when a launcher or Slurm sends the signals to stop to all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import fastload

_ROOT = Path(__file__).resolve().parents[2]
_DEADLINE_S = 120.0

pytestmark = pytest.mark.timeout(_DEADLINE_S + 30)


@contextmanager
def training(method: str, root: Path, how: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Runs worker_program.py in a process group of its own; gives it and the file of what it prints."""
    program = Path(__file__).with_name("worker_program.py")
    output = root.with_suffix(".out")
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-W", "error::UserWarning", str(program), method, str(root), how],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    try:
        yield process, output
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        assert process.stdin is not None
        process.stdin.close()


def signal_all_until(text: str, process: subprocess.Popen[str], output: Path) -> None:
    """Sends both signals to every process of the training, over and over, as soon as its manager is open."""
    deadline = time.monotonic() + _DEADLINE_S
    while text not in output.read_text() and process.poll() is None:
        assert time.monotonic() < deadline, output.read_text()
        if "open" in output.read_text():
            os.killpg(process.pid, signal.SIGTERM)
            os.killpg(process.pid, signal.SIGUSR1)
        time.sleep(0.02)


def await_end_of_all(group: int) -> None:
    deadline = time.monotonic() + 30
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.05)
        pytest.fail("something of the training is still there")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_outlive_the_signals_but_not_their_parent(method: str, tmp_path: Path) -> None:
    with training(method, tmp_path / "run", "shelter") as (process, output):
        signal_all_until("epoch 2\n", process, output)  # also while its workers start
        assert process.poll() is None, output.read_text()
        # It ends, although a forked worker would be busy for 1000 s, and takes its workers along.
        _, _ = process.communicate("\n", timeout=_DEADLINE_S)
        assert process.returncode == 0, output.read_text()
        assert "told True" in output.read_text()
        (step,) = (tmp_path / "run").iterdir()
        assert fastload.load(step) == {"epochs": int(step.name[5:])}
        await_end_of_all(process.pid)


@pytest.mark.slow
def test_without_it_a_worker_dies_and_takes_the_training_along(tmp_path: Path) -> None:
    with training("fork", tmp_path / "run", "plain") as (process, output):
        signal_all_until("epoch 1000\n", process, output)
        assert process.wait(30) != 0
    assert not list((tmp_path / "run").glob("step_*"))
