"""What every test gets: hypothesis without a clock, and a skip where the machine lacks something."""

from __future__ import annotations

import functools
import os
import subprocess

import pytest
import torch
from hypothesis import settings

settings.register_profile("fastload", deadline=None, print_blob=True)  # a shared machine is no stopwatch
settings.load_profile("fastload")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


@pytest.hookimpl(tryfirst=True)  # xdist looks at the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what takes long and is covered, in its essence, by another test; the lab comes first.

    There is one lab, which is one worker's (of pytest-xdist): mostly it waits, while others work.
    """
    if not config.getoption("--slow"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    in_lab = [item for item in items if item.get_closest_marker("lab")]
    for item in in_lab:
        item.add_marker(pytest.mark.xdist_group("lab"))
    items[:] = in_lab + [item for item in items if item not in in_lab]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests whose marker names hardware or rights this machine does not have."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("lab") and not _has_lab():
        pytest.skip("needs root, network namespaces and the ip command")


@functools.cache
def _has_lab() -> bool:
    try:
        probe = subprocess.run(["unshare", "--net", "ip", "link"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return os.geteuid() == 0 and probe.returncode == 0
