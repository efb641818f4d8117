"""A short run of the soak of states; the long one is `python -m tests.soak.state`."""

from __future__ import annotations

from pathlib import Path

from tests.soak.state import soak


def test_random_states_into_random_targets(tmp_path: Path) -> None:
    tally = soak(30, 1, tmp_path)
    assert any(line.endswith("restored") for line in tally)
    assert any("refused" in line for line in tally)
