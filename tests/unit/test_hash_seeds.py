"""What ranks compare is the same in a process with another hash seed, in which sets have another order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_layout import layout_and_shares
from tests.unit.test_plan import digest_of_a_plan
from tests.unit.test_state import structure_with_sets

_ROOT = Path(__file__).resolve().parents[2]
_CALL = """
import json
from tests.unit import test_hash_seeds
print(json.dumps([hash("order"), test_hash_seeds.made()]))
"""


def made() -> dict[str, str]:
    return {
        "plan": digest_of_a_plan(),
        "layout": layout_and_shares(),
        "structure of a state": structure_with_sets(),
    }


@pytest.mark.slow
def test_another_process_makes_the_same() -> None:
    """A forked one would have this one's seed."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONHASHSEED": "random"}
    done = subprocess.run(
        [sys.executable, "-c", _CALL], env=environment, cwd=_ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    order, found = json.loads(done.stdout)
    assert order != hash("order")
    assert found == made()
