"""One and four ranks: the tests that two ranks have run."""

from __future__ import annotations

from gpu_check_parts.stages import Job
from gpu_check_parts.suite import run_tests


def run(job: Job) -> None:
    worlds = "1-ranks or 4-ranks"
    if job.kind == "cuda" and not job.use_mps:
        job.results.skip("four ranks", "they would take turns on the device without MPS")
        worlds = "1-ranks"
    run_tests(job, worlds, ["test_loads.py", "test_saves.py"], use_mps=job.use_mps)
