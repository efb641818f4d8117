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
    pytest.mark.filterwarnings("ignore"),  # what it warns of is not ours to mend
]


@pytest.fixture(autouse=True)
def _ao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(AO)


def body(name: str) -> Any:
    return there("tests.integrations.torchao_ranks", name)


def test_trainings_go_on_bit_for_bit(tmp_path: Path) -> None:
    run_ranks(body("trains"), 2, folder=tmp_path)


@pytest.mark.slow
def test_quantised_weights(tmp_path: Path) -> None:
    run_ranks(body("quantises"), 1, folder=tmp_path)
