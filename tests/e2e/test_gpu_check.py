"""scripts/gpu_check: stages with limits, a report after each, and rehearsals without a GPU."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.forked import run_forked

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check"

# Stages of this test's own: one that is well, one that hangs with a child, one that dies, one that looks.
PROGRAM = """
import os, shutil, signal, sys, time
from pathlib import Path
sys.path[:0] = [{root!r}, {scripts!r}]
from gpu_check_parts.program import check
from gpu_check_parts.stages import Stage

out = Path({out!r})

def well(job):
    print("well is well")
    job.results.fact("where", str(job.folder))
    job.results.check("one", True)
    for value in (3.0, 1.0, 2.0):
        job.results.value("Rates", "an arm", s=value)

def hangs(job):
    job.results.check("before it hangs", True)
    if not (child := os.fork()):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(1000)
    (out / "child").write_text(str(child))
    time.sleep(1000)

def dies(job):
    os.kill(os.getpid(), signal.SIGKILL)

def fails(job):
    job.results.check("another", False, "it is not so")

def cannot(job):
    job.results.skip("this", "there is no such thing here")

def looks(job):
    shutil.copy(out / "report.json", out / "seen.json")
    raise RuntimeError("has looked")

work = [well, hangs, dies, fails, cannot, looks]
stages = [Stage(run.__name__, run.__name__, 4 if run is hangs else 60, run) for run in work]
check(stages, out, kind="cpu", size="tiny", folder=Path({folder!r}))
"""


def states(path: Path) -> dict[str, tuple[str, str]]:
    found = json.loads(path.read_text())
    return {stage["name"]: (stage["state"], stage["why"]) for stage in found["stages"]}


def test_a_stage_that_hangs_or_dies_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "files"
    folder.mkdir()
    program = tmp_path / "program.py"
    scripts = str(ROOT / "scripts")
    program.write_text(PROGRAM.format(root=str(ROOT), scripts=scripts, out=str(out), folder=str(folder)))
    ran = run_forked([str(program)], cwd=tmp_path, env=dict(os.environ), timeout=100)
    assert ran.returncode == 0, ran.stderr
    expected = {
        "well": ("ok", ""),
        "hangs": ("ended at its limit", "still running after 4 s"),
        "dies": ("failed", "killed by SIGKILL"),
        "fails": ("failed", "1 of 1 checks, first: another"),
        "cannot": ("not run", "there is no such thing here"),
    }
    assert states(out / "seen.json") == {**expected, "looks": ("running", "")}  # during the last stage
    assert states(out / "report.json") == {**expected, "looks": ("failed", "RuntimeError: has looked")}
    stages = {stage["name"]: stage for stage in json.loads((out / "seen.json").read_text())["stages"]}
    assert stages["well"]["tables"] == {"Rates": {"an arm": {"s": [3.0, 1.0, 2.0]}}}
    assert stages["hangs"]["checks"] == [{"name": "before it hangs", "ok": True, "detail": ""}]
    text, log = (out / "report.md").read_text(), (out / "log.txt").read_text()
    assert "| an arm | 2.00 | 3 |" in text
    assert "| another | it is not so |" in text
    assert "well is well" in log
    assert "time.sleep(1000)" in log, "where it hung"
    assert (
        sorted(path.name for path in out.iterdir()) == "child log.txt report.json report.md seen.json".split()
    )
    assert list(folder.iterdir()) == []
    assert not lives(int((out / "child").read_text()))


def lives(pid: int) -> bool:
    """Whether a process still runs some time later."""
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        ("cpu", "facts,nccl,load,copies"),
        pytest.param("emu", "nccl,streams,save,overlap,failures", marks=pytest.mark.emulated),
    ],
)
def test_a_rehearsal(tmp_path: Path, kind: str, stages: str) -> None:
    arguments = ["--device", kind, "--size", "tiny", "--only", stages, "--out", str(tmp_path / "out")]
    ran = run_forked([str(SCRIPT), *arguments], cwd=tmp_path, env=dict(os.environ), timeout=110)
    report: dict[str, Any] = json.loads((tmp_path / "out" / "report.json").read_text())
    failed = [check for stage in report["stages"] for check in stage["checks"] if not check["ok"]]
    log = (tmp_path / "out" / "log.txt").read_text()
    assert states(tmp_path / "out" / "report.json") == dict.fromkeys(stages.split(","), ("ok", "")), (
        failed,
        log,
    )
    assert ran.returncode == 0
    assert all(stage["checks"] or stage["tables"] for stage in report["stages"])
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_unknown_stages_are_named(tmp_path: Path) -> None:
    ran = run_forked([str(SCRIPT), "--only", "load,lod"], cwd=tmp_path, env=dict(os.environ), timeout=60)
    assert ran.returncode == 2
    assert "no such stage: lod" in ran.stderr
