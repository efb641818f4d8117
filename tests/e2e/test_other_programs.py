"""What Lightning's Trainer and accelerate save with torch.save is loaded as it is."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

import fastload
from tests.e2e.forked import run_forked
from tests.pages import ROOT
from tests.unit.test_torch_files import assert_same

pytestmark = [
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("lightning", "accelerate"))), reason="they are not installed"
    ),
    pytest.mark.timeout(240),
]


@pytest.mark.slow
def test_what_other_programs_saved(tmp_path: Path) -> None:
    command = ["-m", "tests.e2e.other_programs", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = run_forked(command, cwd=ROOT, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    files = ["last.ckpt", "state/optimizer.bin", "state/pytorch_model.bin"]
    for file in [*files, *(f"sharded/{path.name}" for path in (tmp_path / "sharded").glob("*.bin"))]:
        assert_same(fastload.load(tmp_path / file), torch.load(tmp_path / file, weights_only=True))
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    assert_same(fastload.load(tmp_path / "state"), expected)
    found = fastload.load(tmp_path / "sharded")
    assert_same({name: found[name] for name in expected}, dict(expected))
    model = torch.nn.Sequential(*[torch.nn.Linear(20, 20) for _ in range(4)])
    fastload.load(tmp_path / "sharded", into=model)
    assert_same(model.state_dict(), expected)
    assert {entry.file for entry in fastload.inspect(tmp_path / "sharded").tensors} == {0, 1, 2, 3}
    (tmp_path / "sharded" / "pytorch_model-00002-of-00004.bin").unlink()
    with pytest.raises(fastload.IncompleteCheckpoint, match="1 of 4 files missing"):
        fastload.load(tmp_path / "sharded")
