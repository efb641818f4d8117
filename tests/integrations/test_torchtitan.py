"""fastload in torchtitan, with its real checkpoint manager, optimizers, schedulers and data loaders."""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness import run_ranks, there

TITAN = Path(sys.prefix) / "titan"  # apart, for it needs older versions of what others here need

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # what others warn of is not ours to mend
    pytest.mark.skipif(
        not TITAN.exists() and not importlib.util.find_spec("torchtitan"),
        reason="torchtitan is not installed",
    ),
]


@pytest.fixture(autouse=True)
def _titan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TITAN)
    monkeypatch.chdir(tmp_path)


def body(name: str) -> Any:
    return there("tests.integrations.torchtitan_ranks", name)


@pytest.mark.slow  # Lightning and transformers are killed, too
def test_the_program_on_the_page_killed_and_started_again() -> None:
    run_ranks(body("is_killed_on_the_page"), 2, dies=dict.fromkeys(range(2), signal.SIGKILL))
    run_ranks(body("goes_on_as_if_it_had_not_been"), 2)


@pytest.mark.slow
def test_a_state_of_ones_own_with_shards() -> None:
    run_ranks(body("saves_a_state_with_shards"), 2)
    run_ranks(body("loads_a_state_with_shards"), 3)


def test_which_checkpoints_are_kept() -> None:
    run_ranks(body("keeps_complete_checkpoints"), 2)


@pytest.mark.slow
def test_what_torchtitan_and_other_meshes_saved() -> None:
    run_ranks(body("saves_both"), 2)
    run_ranks(body("loads_both"), 3)
