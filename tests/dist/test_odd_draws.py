"""A short run of the soak of odd states; the long one is `python -m tests.soak.odd`."""

from __future__ import annotations

from pathlib import Path

from tests.soak.odd import soak


def test_odd_states_come_back_or_are_refused(tmp_path: Path) -> None:
    assert sum(soak(40, 0, tmp_path).values()) == 40
