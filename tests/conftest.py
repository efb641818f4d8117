"""What every test gets: hypothesis without a clock, a skip where the machine lacks something, a worker."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.util
import os
import string
import subprocess

import pytest
from hypothesis import settings

from tests.e2e import forked
from tests.gpu import one_gpu

_LONG = "tests/lab/test_slurm.py tests/lab/ tests/e2e/ tests/crash/ tests/dist/ tests/storage/".split()

# A lab for each worker, with names and addresses of its own.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["FASTLOAD_LAB"] = string.ascii_lowercase[int(worker.removeprefix("gw"))]
    atexit.register(os._exit, 0)  # torch would take half a second to free what the end of a process frees

# torch asks for the name of each peer it connects to: where an answer is lost, that is 5 s by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Workers share the cores: threads of torch that wait for each other would spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

gc.disable()  # until all tests are collected: what is imported stays

settings.register_profile("fastload", deadline=None, print_blob=True)  # a shared machine is no stopwatch
settings.load_profile("fastload")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")
    parser.addoption("--engines", action="store_true", help="run the tests marked engines, too")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not worker:
        forked.make_folder()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what takes long and is covered, in its essence, by another test; long ones come first."""
    for item in items:
        if item.get_closest_marker("gpu") and item.callspec.params["world"] > 1:  # type: ignore[attr-defined]
            item.add_marker("one_gpu")
    for name in ("slow", "engines"):
        if not config.getoption(f"--{name}"):
            marked = [item for item in items if item.get_closest_marker(name)]
            config.hook.pytest_deselected(items=marked)
            items[:] = [item for item in items if item not in marked]
    items.sort(key=lambda item: [not item.nodeid.startswith(part) for part in _LONG])


def pytest_collection_finish() -> None:
    """Spares the garbage collector the modules and tests, which stay until the end."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests whose marker names hardware or rights this machine does not have."""
    if item.get_closest_marker("gpu"):
        num = one_gpu.num_gpus_for(item.callspec.params["world"])  # type: ignore[attr-defined]
        if _num_gpus() < num:
            pytest.skip(f"needs {num} CUDA device{'s' * (num > 1)}")
    if item.get_closest_marker("emulated") and not _has_emulator():
        pytest.skip("needs a C++ compiler, which builds the emulated accelerator")
    if item.get_closest_marker("engines") and importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM: ./scripts/test --engines installs and uses it")
    if item.get_closest_marker("lab") and not _has_lab():
        pytest.skip("needs root, network namespaces and the ip command")


@functools.cache
def _num_gpus() -> int:
    import torch  # not above: the process that deals the tests to the workers has no need of it

    return torch.cuda.device_count()


@functools.cache
def _has_emulator() -> bool:
    from tests.accelerator import build  # nor of what this imports

    if build.compiler():
        build.library()  # not in a rank, whose time is short
    return bool(build.compiler())


@functools.cache
def _has_lab() -> bool:
    try:
        probe = subprocess.run(["unshare", "--net", "ip", "link"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return os.geteuid() == 0 and probe.returncode == 0
