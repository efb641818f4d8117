"""Another process, in which sets and hashes have another order."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.forked import forking_python

_ROOT = Path(__file__).resolve().parents[2]
_CALL = """
import importlib, sys
print(hash("order"), flush=True)
for line in sys.stdin:
    module, _, name = line.strip().rpartition(".")
    print(getattr(importlib.import_module(module), name)(), flush=True)
"""


@pytest.fixture(scope="session")
def elsewhere() -> Iterator[Callable[[Callable[[], str]], str]]:
    """Calls a function of a test module in a process with another hash seed; returns its line of text."""
    process = subprocess.Popen(
        [forking_python(), "-c", _CALL],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    lines = process.stdout
    assert int(lines.readline()) != hash("order")

    def call(function: Callable[[], str]) -> str:
        print(f"{function.__module__}.{function.__name__}", file=process.stdin, flush=True)
        return lines.readline().rstrip("\n")

    with process:
        yield call
        process.stdin.close()
        assert process.wait(30) == 0
