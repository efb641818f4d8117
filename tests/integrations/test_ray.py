"""The recipe for Ray Train, with the real one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastload

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="ray is not installed")
def test_the_recipe(tmp_path: Path) -> None:
    """In a process of its own, which ends its cluster."""
    program = tmp_path / "train.py"
    program.write_text('from tests.pages import run_program\n\nrun_program("docs/recipes/ray.md")\n')
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    subprocess.run([sys.executable, program], cwd=tmp_path, env=environment, check=True, timeout=280)
    assert fastload.load(tmp_path / "runs" / "ray" / "step-20")["step"] == 20
