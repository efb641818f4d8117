"""The steps of ./scripts/demo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # its commands have tests of their own
def test_the_demo(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/demo_steps.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "read from storage: 512 MB = 1.00 × the checkpoint" in done.stdout
    assert len({line.split()[-1] for line in done.stdout.splitlines() if line.startswith("digest of")}) == 1
    assert "begins at step 40 of 60, from storage" in done.stdout
    assert "ends at step 60 of 60" in done.stdout


@pytest.mark.slow  # likewise
def test_a_command_that_fails(tmp_path: Path) -> None:
    (tmp_path / "weights").touch()
    command = [sys.executable, "scripts/demo_steps.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "FileExistsError" in done.stderr
    assert "demo: a process exited with 1" in done.stderr
