"""The tests that docs/testing.md shows, as a user runs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.forked import run_forked
from tests.pages import ROOT, program


@pytest.mark.slow
def test_the_page_passes_under_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_checkpoints.py").write_text(program("docs/testing.md"))
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_checkpoints.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = run_forked(words, cwd=tmp_path, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
