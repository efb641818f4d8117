"""A short run of the soak of odd states; the long one is `python -m tests.soak.odd`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.odd import soak


@pytest.mark.parametrize("first", [20, *(pytest.param(each, marks=pytest.mark.slow) for each in (0, 10, 30))])
def test_odd_states_come_back_or_are_refused(first: int, tmp_path: Path) -> None:
    assert sum(soak(10, 0, tmp_path, first).values()) == 10
