"""torchao's optimizers and quantised weights: saved and restored bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness import run_ranks, there

AO = Path(sys.prefix) / "ao"  # apart, for transformers and others change where it is installed

pytestmark = [
    pytest.mark.skipif(not AO.exists(), reason="torchao is not installed"),
    pytest.mark.slow,  # tests/unit/test_subclasses.py has a class of its own
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),  # what it warns of is not ours to mend
]


@pytest.fixture(autouse=True)
def _ao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(AO)


def body(name: str) -> Any:
    return there("tests.integrations.torchao_ranks", name)


def test_trainings_go_on_bit_for_bit(tmp_path: Path) -> None:
    run_ranks(body("trains"), 1, folder=tmp_path)


def test_quantised_weights(tmp_path: Path) -> None:
    run_ranks(body("quantises"), 1, folder=tmp_path)


def test_states_of_shards_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    run_ranks(body("saves_shards"), 2, folder=tmp_path)
    for world in (2, 4, 1):
        run_ranks(body("loads_shards"), world, folder=tmp_path)


def test_weights_that_fsdp_gathers_in_float8(tmp_path: Path) -> None:
    run_ranks(body("trains_in_float8"), 2, folder=tmp_path)
