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

# A shared machine is no stopwatch.
settings.register_profile("all", deadline=None, print_blob=True)
settings.register_profile("fewer", settings.get_profile("all"), max_examples=25)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")
    parser.addoption("--engines", action="store_true", help="run the tests marked engines, too")
    parser.addoption("--megatron", action="store_true", help="run the tests marked megatron, too")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("all" if config.getoption("slow") else "fewer")
    if config.getoption("numprocesses", None) and not worker:
        forked.make_folder()
        # Forked workers: each would take seconds to import torch.
        config.option.tx = [f"popen//python={forked.forking_python()}" for _ in config.option.tx]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what takes long and is covered, in its essence, by another test; long ones come first."""
    for item in items:
        if item.get_closest_marker("gpu") and item.callspec.params["world"] > 1:  # type: ignore[attr-defined]
            item.add_marker("one_gpu")
    if not any("::" in argument for argument in config.args):
        _check_exceptions(items)
    for name in ("slow", "engines", "megatron"):
        if not config.getoption(f"--{name}"):
            left_out = [item for item in items if _is_left_out(item, name)]
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not _is_left_out(item, name)]
    items.sort(key=lambda item: [not item.nodeid.startswith(part) for part in _LONG])


def _id(item: pytest.Item) -> str:
    """What names the parameters of a test among those of its function."""
    return item.callspec.id if hasattr(item, "callspec") else ""


def _is_slow(item: pytest.Item) -> bool:
    """Whether a mark leaves it out: one without `but`, or with texts of which none is in its id."""
    exceptions = [mark.kwargs.get("but", ()) for mark in item.iter_markers("slow")]
    return not all(any(text in _id(item) for text in texts) for texts in exceptions)


def _check_exceptions(items: list[pytest.Item]) -> None:
    """Refuses a mark whose exceptions are none, since nobody would notice that its test does not run."""
    ids: dict[tuple[str, str], set[str]] = {}
    for item in items:
        for mark in item.iter_markers("slow"):
            for text in mark.kwargs.get("but", ()):
                ids.setdefault((item.nodeid.partition("[")[0], text), set()).add(_id(item))
    wrong = [
        f"{test}: {text!r}" for (test, text), found in ids.items() if not any(text in each for each in found)
    ]
    if wrong:
        raise pytest.UsageError("no parameters have what marks make exceptions for: " + "; ".join(wrong))


def _is_left_out(item: pytest.Item, marker: str) -> bool:
    """Whether it does not run without the option of a marker."""
    return _is_slow(item) if marker == "slow" else item.get_closest_marker(marker) is not None


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
    if item.get_closest_marker("megatron") and importlib.util.find_spec("megatron") is None:
        pytest.skip("needs Megatron Core: ./scripts/test --megatron installs and uses it")
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
