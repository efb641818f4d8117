"""Tests of the project, run by whatever pytest there is."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_check_parts import mps
from gpu_check_parts.results import Results
from gpu_check_parts.stages import Job
from tests.gpu import one_gpu

_ROOT = Path(__file__).resolve().parents[2]
_MARKERS = {"cuda": "gpu", "emu": "emulated"}
# Not the project's, which another version of pytest may refuse; and another torch has other warnings.
_SETTINGS = """[pytest]
addopts = --import-mode=importlib
filterwarnings = default
markers =
    emulated: on the emulated accelerator
    engines: with an inference engine
    gpu: on CUDA devices
    lab: with network namespaces
    one_gpu: of several ranks, on one CUDA device
    slow: covered by other tests
    timeout: of a test
norecursedirs = .*
"""
_REHEARSAL = "replicated or refreshes or killed or host_memory_in_one_load"
_ENDING_S = 4.0


def two_ranks(job: Job) -> None:
    run_tests(job, "2-ranks", ["test_saves.py", "test_loads.py", "test_draws.py"], use_mps=job.use_mps)


def kills(job: Job) -> None:
    """Without MPS, which a killed client can break."""
    run_tests(job, "2-ranks", ["test_failures.py"], use_mps=False)


def run_tests(job: Job, expression: str, files: Sequence[str], *, use_mps: bool) -> None:
    """Runs tests of tests/gpu, and notes how each ended.

    Args:
        job: The job.
        expression: Which tests; see pytest's ``-k``.
        files: Of these files.
        use_mps: Whether their processes share the device by MPS.
    """
    if job.kind not in _MARKERS:
        job.results.skip("tests of devices", "the CPU is none: --device emu")
        return
    for needed in ("pytest", "hypothesis"):
        if find_spec(needed) is None:
            job.results.skip("tests of devices", f"{needed} is not installed")
            return
    import pytest

    settings = job.folder / "pytest.ini"
    settings.write_text(_SETTINGS)
    if job.kind != "cuda":
        expression = f"({expression}) and ({_REHEARSAL})"
    command = ["-c", str(settings), "--rootdir", str(_ROOT), "-p", "no:cacheprovider", "-q", "--tb=short"]
    command += ["-m", _MARKERS[job.kind], "-k", expression, *(f"{_ROOT}/tests/gpu/{name}" for name in files)]
    os.environ[one_gpu.SWITCH] = "1"
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asked otherwise, CUDA is of no use in later forks
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # whatever plugins the machine has
    os.chdir(_ROOT)
    # Like Ctrl-C: it ends the ranks, and says which test was running.
    end = threading.Timer(max(1.0, job.left_s - _ENDING_S), os.kill, (os.getpid(), signal.SIGINT))
    end.daemon = True
    with mps.service(use_mps):
        end.start()
        status = pytest.main(command, plugins=[_Noted(job.results)])
        end.cancel()
    if status == pytest.ExitCode.INTERRUPTED:
        job.results.fact("tests", "more than fit into the time")
    elif status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        job.results.check("pytest", False, status)


class _Noted:
    """A plugin of pytest that notes how each test ended."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.rpartition("/")[2]
        if report.skipped:
            self._results.skip(name, report.longrepr[2])
        elif report.failed:
            self._results.check(name, False, str(report.longrepr).strip().splitlines()[-1])
        elif report.when == "call":
            self._results.check(name, True, f"{report.duration:.1f} s")
