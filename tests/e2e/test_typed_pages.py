"""The training loops of README and docs, and sizes as text, pass mypy as strictly as fastload itself does."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.e2e.forked import run_forked
from tests.pages import ROOT, page

RECIPES = ("data", "ddp", "fabric", "from-dcp", "fsdp2", "ray", "refresh")
TYPED = ("README.md", "docs/training.md", *(f"docs/recipes/{name}.md" for name in RECIPES))
# The names that a page leaves to its reader, unless a block defines them.
GIVEN = """
from typing import Any
import fastload
import torch
from torch.utils.data import DistributedSampler

batch_size: int
data: torch.utils.data.TensorDataset
manager: fastload.CheckpointManager
model: torch.nn.Module
num_steps: int
optimizer: torch.optim.Optimizer
rank: int
step: int
def train(_: Any, /) -> float: return 0.0
"""

SIZES = """
import fastload
load = fastload.LoadOptions(staging_bytes="128MiB", prefetch_bytes="8GiB", chunk_bytes=None)
save = fastload.SaveOptions(max_shard_bytes="5GB", block_bytes=1 << 20)
total: int = load.staging_bytes + save.max_shard_bytes
ahead: int | None = load.prefetch_bytes
"""


def blocks() -> dict[str, str]:
    """The python blocks of these pages, as modules by name."""
    found = {}
    for name in TYPED:
        stem = re.sub(r"\W", "_", name.removesuffix(".md")).lower()
        codes = re.findall(r"^```python\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL)
        given = "" if "recipes" in name else GIVEN  # recipes are complete programs
        found |= {f"{stem}_{number}": f"{given}\n{code}" for number, code in enumerate(codes, 1)}
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_training_loops_pass_mypy(tmp_path: Path) -> None:
    for name, code in (blocks() | {"sizes": SIZES}).items():
        (tmp_path / f"{name}.py").write_text(code)
    # With the options of the project, so that both share what mypy has kept of torch.
    arguments = ["-m", "mypy", "--no-error-summary", *map(str, sorted(tmp_path.glob("*.py")))]
    done = run_forked(arguments, cwd=ROOT, env=os.environ, timeout=380)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
