"""Stages: each in a process group of its own, with a deadline and a log; none stops the next."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_check_parts.ranks import end_with_parent
from gpu_check_parts.results import Found, Results, read_results

_MARGIN_S = 2.0  # in which a stage is to end by itself
_GRACE_S = 6.0  # after the deadline, to clean up
_MOST_LOG = 1 << 20  # characters of a stage


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        load_bytes: Of the checkpoint that is loaded.
        save_bytes: Of the state that is saved.
        copy_bytes: Of one copy.
        width: Of the layers of the model that trains while it is saved.
        num_loops: Loads with collectives of the caller.
        turns: Of the arms of a measurement, at most.
        heartbeat_s: After which torch's monitor ends a process whose group has seen a failure.
    """

    load_bytes: int
    save_bytes: int
    copy_bytes: int
    width: int
    num_loops: int
    turns: int
    heartbeat_s: int

    @property
    def alive_s(self) -> float:
        """Seconds after which a process has outlived the monitor."""
        return 1.5 * self.heartbeat_s


SIZES = {
    "full": Sizes(12 * 10**9, 4 * 10**9, 512 << 20, 8192, 45, 7, 8),
    "small": Sizes(48 << 20, 24 << 20, 16 << 20, 512, 45, 3, 2),
    "tiny": Sizes(1 << 20, 1 << 20, 1 << 20, 64, 3, 1, 1),
}


@dataclass(frozen=True)
class Job:
    """What a stage is given.

    Attributes:
        kind: Of the device; see `devices.Device`.
        sizes: How large everything is.
        folder: For its files, in memory where there is such a file system.
        results: For its findings.
        until: When it is to have ended, as `time.monotonic`.
        use_mps: Whether NVIDIA's MPS has been seen to work.
    """

    kind: str
    sizes: Sizes
    folder: Path
    results: Results
    until: float
    use_mps: bool

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return max(0.0, self.until - time.monotonic())


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: For the command line.
        title: For the report.
        limit_s: When it is ended.
        run: Its work.
    """

    name: str
    title: str
    limit_s: float
    run: Callable[[Job], None]


@dataclass
class Outcome:
    """What became of a stage.

    Attributes:
        stage: The stage.
        state: ``waiting``, ``running``, ``ok``, ``failed``, ``ended at its limit``, ``not run`` or
            ``interrupted``.
        why: Why it is not ok; one line.
        seconds: How long it took.
        found: Its findings.
    """

    stage: Stage
    state: str = "waiting"
    why: str = ""
    seconds: float = 0.0
    found: Found = field(default_factory=lambda: read_results(Path(os.devnull)))

    def to_dict(self) -> dict[str, Any]:
        """Returns it in JSON types."""
        stage = self.stage
        head = {"name": stage.name, "title": stage.title, "limit_s": stage.limit_s}
        return {**head, "state": self.state, "why": self.why, "seconds": self.seconds, **self.found}


class StageProcess:
    """A stage that runs.

    Args:
        stage: The stage.
        limit_s: When it is ended.
        out: Folder of the log and of the findings so far.
        given: Further arguments of `Job`.
    """

    def __init__(self, stage: Stage, limit_s: float, out: Path, **given: Any) -> None:
        self._title = stage.title
        self._log, self._lines = out / "running.log", out / "running.jsonl"
        self._log.write_text("")
        self._began, self._limit_s = time.monotonic(), limit_s
        until = self._began + limit_s - _MARGIN_S
        job = Job(results=Results(self._lines), until=until, **given)
        sys.stdout.flush()
        self._pid = os.fork()
        if not self._pid:
            self._be(stage, job)

    def wait(self) -> tuple[str, str]:
        """Returns the state and the reason, once the stage has ended or was ended."""
        ended_at_limit = False
        try:
            status = self._wait(self._limit_s)
            if status is None:
                ended_at_limit = True
                os.killpg(self._pid, signal.SIGINT)  # it says where it was
                status = self._wait(_GRACE_S)
        finally:
            self._kill()
        if ended_at_limit:
            return "ended at its limit", f"still running after {self._limit_s:.0f} s"
        assert status is not None
        if os.WIFSIGNALED(status):
            return "failed", f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
        found = read_results(self._lines)
        failed = [check for check in found["checks"] if not check["ok"]]
        if os.WEXITSTATUS(status):
            return "failed", _last_line(self._log)
        if failed:
            return "failed", f"{len(failed)} of {len(found['checks'])} checks, first: {failed[0]['name']}"
        if found["skipped"] and not found["checks"] and not found["tables"]:
            return "not run", next(iter(found["skipped"].values()))
        return "ok", ""

    def take_results(self, log: Path) -> Found:
        """Moves the end of its log to the end of a file, and returns its findings."""
        text = self._log.read_text(errors="replace")[-_MOST_LOG:]
        with log.open("a") as file:
            file.write(f"======== {self._title}\n{text}\n")
        found = read_results(self._lines)
        self._log.unlink()
        self._lines.unlink(missing_ok=True)
        return found

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def _kill(self) -> None:
        """Kills what is left of it, and what it has started."""
        with suppress(ProcessLookupError, ChildProcessError):
            os.killpg(self._pid, signal.SIGKILL)
            self._wait(_GRACE_S)

    def _wait(self, limit_s: float) -> int | None:
        limit = time.monotonic() + limit_s
        while time.monotonic() < limit:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if ended:
                return status
            time.sleep(0.02)
        return None

    def _be(self, stage: Stage, job: Job) -> None:
        code = 1
        try:
            os.setsid()
            end_with_parent()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has jobs ignore it
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            for number in (1, 2):
                os.dup2(log, number)
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            tempfile.tempdir = str(job.folder)  # removed with it, however the stage ends
            stage.run(job)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
