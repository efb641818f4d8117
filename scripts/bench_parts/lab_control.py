"""The lab around a job of a benchmark: up, the checkpoints and a file service, one job, down."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(SCRIPTS / "lab"))

import services  # noqa: E402  (the lab's own modules)
from network import STORAGE  # noqa: E402

from bench_parts.tables import AS_IT_WAS  # noqa: E402

STORE_URL = f"http://{services.STORAGE_ADDRESS}:8333"
_STORE = "server -ip={address} -ip.bind=0.0.0.0 -s3 -s3.config=s3.json -dir=. -volume.max=0 -volume.port=8334"
_STORE += " -s3.port.iceberg=0 -s3.port.lance=0 -master.telemetry=false"
# It leaves sockets in /tmp whatever its options, so it gets its own /tmp.
_OWN_TMP = 'cd "$0" && mount -t tmpfs tmpfs /tmp && exec "$@"'
_SFTP_PORT = 2222
_SFTP_SERVER = "/usr/lib/openssh/sftp-server"
_TRIES, _WAIT_S = 30, 10.0  # another lab may be up
_POLL_S = 0.1
_DCP_RANKS = 4
_SAFETENSORS = "safetensors"

SMALL, FULL = "small", "full"
S3_ROOT = f"s3://{services.BUCKET}"
SFTP = [f"{services.STORAGE_ADDRESS}:{services.DATA_DIR / services.BUCKET}", _SFTP_PORT]


@dataclass(frozen=True)
class Checkpoint:
    """One state in the formats of all arms, in one directory.

    Attributes:
        folder: The directory.
        digest: Digest of the state.
        nbytes: Bytes of its tensors.
    """

    folder: Path
    digest: str
    nbytes: int


@dataclass
class Outcome:
    """The results of one job.

    Attributes:
        rows: One per run of an arm.
        failed: Why an arm did not run, by name.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def make_quantised(folder: Path, kind: str, nbytes: int, num_files: int) -> Checkpoint:
    """Writes safetensors files with quantised weights."""
    from bench_parts import quantised_weights
    from fastload.formats.state import state_digest

    state = quantised_weights.write(kind, folder / _SAFETENSORS, nbytes, num_files)
    return Checkpoint(folder, state_digest(state), sum(tensor.nbytes for tensor in state.values()))


def make_checkpoint(folder: Path, nbytes: int, num_files: int) -> Checkpoint:
    """Writes safetensors files with scripts/make_checkpoint.py, and the same for DCP, torch, flashpack.

    DCP saves it with as many ranks as FSDP shards it over.
    """
    import torch
    from safetensors.torch import load_file

    from fastload.formats.state import state_digest

    maker = [sys.executable, str(SCRIPTS / "make_checkpoint.py"), str(folder / _SAFETENSORS)]
    subprocess.run([*maker, "--size", str(nbytes), "--files", str(num_files)], check=True)
    state = {}
    for path in sorted((folder / _SAFETENSORS).glob("*.safetensors")):
        state.update(load_file(path))
    saver = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(_DCP_RANKS),
        "--standalone",
    ]
    saver += [str(SCRIPTS / "bench_parts" / "save_dcp.py"), str(folder / _SAFETENSORS), str(folder / "dcp")]
    subprocess.run(saver, check=True, capture_output=True)
    torch.save(state, folder / "state.pt")
    try:
        from flashpack import pack_to_file
    except ImportError:
        pass  # its arm reports that
    else:
        pack_to_file(state, str(folder / "state.flashpack"), None)
    return Checkpoint(folder, state_digest(state), sum(tensor.nbytes for tensor in state.values()))


def exit_on_signals() -> None:
    """Has signals raise `SystemExit`, so that the lab is shut down in any case, also in the background."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))


class Lab:
    """A lab that is up; a context manager.

    Args:
        hosts: Number of hosts.
        rates: Options of scripts/lab/up.
        checkpoints: Served checkpoints, by name.
    """

    def __init__(self, hosts: int, rates: Sequence[str], checkpoints: dict[str, Checkpoint]) -> None:
        self.hosts = hosts
        self.rates = rates
        self.checkpoints = checkpoints

    def __enter__(self) -> Lab:
        for _ in range(_TRIES):
            up = lab("up", str(self.hosts), *self.rates, capture_output=True, check=False)
            if up.returncode == 0:
                break
            if "lab is up already" not in up.stderr and "another `up`" not in up.stderr:
                raise RuntimeError(up.stderr)
            time.sleep(_WAIT_S)
        else:
            raise RuntimeError("another lab is up; end it with scripts/lab/down")
        try:
            for name, checkpoint in self.checkpoints.items():
                lab("put", str(checkpoint.folder), name, capture_output=True)
            if self.checkpoints:
                self.serve_files()
        except BaseException:
            lab("down")
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lab("down")

    def serve_files(self) -> None:
        """Serves files to sshfs, without encryption; the process ends with the lab."""
        listen = f"TCP-LISTEN:{_SFTP_PORT},bind={services.STORAGE_ADDRESS},fork,reuseaddr,nodelay"
        services.start(STORAGE, ["socat", listen, f"EXEC:{_SFTP_SERVER}"])

    def serve_store(self) -> None:
        """Starts SeaweedFS for saves; it ends with the lab.

        (The lab's rclone accepts the parts of an upload only in order, and copies them.)
        """
        weed = Path(sys.executable).with_name("weed")
        if not weed.exists():
            raise RuntimeError(f"{weed} is missing: run scripts/setup")
        folder = services.DATA_DIR / "store"
        folder.mkdir()
        keys = [{"accessKey": services.KEY, "secretKey": services.SECRET}]
        identity = {"name": "lab", "credentials": keys, "actions": ["Admin"]}
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        words = _STORE.format(address=services.STORAGE_ADDRESS).split()
        services.start(STORAGE, ["sh", "-c", _OWN_TMP, str(folder), str(weed), *words])

    def run(
        self,
        arms: Sequence[str],
        tuned: Sequence[str],
        repeats: int,
        timeout_s: float,
        *,
        shards: str = "",
        ranks_per_host: int = 1,
        against: Path | None = None,
    ) -> Outcome:
        """Runs arms that load the complete state into every rank or, with `shards`, its part in that layout.

        The arm `AS_IT_WAS` has the fastload of the directory `against`.
        """
        given: dict[str, Any] = {
            "tuned": list(tuned),
            "shards": shards,
            "repeats": repeats,
            "timeout_s": timeout_s,
            "sftp": SFTP,
        }
        for name, checkpoint in self.checkpoints.items():
            urls = {"http": f"{services.HTTP_URL}/{name}", "s3": f"{S3_ROOT}/{name}"}
            facts = {"digest": checkpoint.digest, "nbytes": checkpoint.nbytes}
            given[name] = {"name": name, "folder": str(checkpoint.folder), **facts, **urls}
        libraries = {AS_IT_WAS: against} if against else {}
        return run_arms("bench_parts.lab_job", arms, given, ranks_per_host, libraries)


def run_arms(
    module: str,
    arms: Sequence[str],
    given: dict[str, Any],
    ranks_per_host: int = 1,
    libraries: Mapping[str, Path] = MappingProxyType({}),
) -> Outcome:
    """Runs arms on all hosts of the lab that is up: in one job, or in one for each fastload, by turns.

    An arm that ends the job in its small first run is left out.

    Args:
        module: What each rank runs.
        arms: Their names.
        given: The job's settings, beside those that every job has.
        ranks_per_host: Ranks of a job on each host.
        libraries: Directories with another fastload, by the arms that want them.
    """
    outcome, left = Outcome(), list(arms)
    while left:
        lines, status = _run_jobs(module, {**given, "arms": left}, ranks_per_host, libraries)
        began: dict[str, Any] = {}
        for line in lines:
            if "begin" in line:
                began = line
            elif "error" in line:
                outcome.failed[began["begin"]] = line["error"]
            elif line["turn"] >= 0:
                outcome.rows.append(line)
        if status == 0:
            return outcome
        if not lines:
            raise RuntimeError(f"the job ended with {status}")
        if "begin" not in lines[-1]:
            outcome.failed["after the last arm"] = f"the job ended with status {status}"
            return outcome
        outcome.failed[began["begin"]] = f"the job ended with status {status} in this arm"
        if began["turn"] >= 0:
            return outcome
        left.remove(began["begin"])
    return outcome


def _run_jobs(
    module: str, given: dict[str, Any], ranks_per_host: int, libraries: Mapping[str, Path]
) -> tuple[list[dict[str, Any]], int]:
    """Runs a job for each fastload; returns the lines of all, and the first nonzero status."""
    arms_of: dict[Path, list[str]] = {}
    for arm in given["arms"]:
        arms_of.setdefault(libraries.get(arm, SCRIPTS.parent), []).append(arm)
    with tempfile.TemporaryDirectory(prefix="bench-lab-job-") as folder, contextlib.ExitStack() as stack:
        results = Path(folder, "results")
        results.touch()
        given = {**given, "results": str(results), "counter": [str(SCRIPTS / "lab" / "bytes")]}
        jobs = []
        for number, (library, own) in enumerate(arms_of.items()):
            settings = Path(folder, f"settings-{number}.json")
            settings.write_text(json.dumps({**given, "own": own, "library": str(library)}))
            # -P: modules of the working directory do not hide the library.
            words = ["--nproc", str(ranks_per_host), "--", "python", "-P", "-m", module, str(settings)]
            jobs.append(_start(words, library))
            stack.callback(_end, jobs[-1])
        status = _wait(jobs)
        return [json.loads(line) for line in results.read_text().splitlines()], status


def _start(words: Sequence[str], library: Path) -> subprocess.Popen[bytes]:
    path = [str(SCRIPTS), str(library), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [str(SCRIPTS / "lab" / "run"), "--timeout", "100000", *words]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(path)})


def _wait(jobs: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits for all, or until one fails, since the others would wait for it. Returns its status, or 0."""
    while any(job.poll() is None for job in jobs):
        if failed := [job.returncode for job in jobs if job.returncode]:
            return failed[0]
        time.sleep(_POLL_S)
    return next((job.returncode for job in jobs if job.returncode), 0)


def _end(job: subprocess.Popen[bytes]) -> None:
    job.terminate()
    job.wait()


def lab(
    command: str, *words: str, check: bool = True, capture_output: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs one of scripts/lab."""
    path = str(SCRIPTS / "lab" / command)
    return subprocess.run([path, *words], check=check, text=True, capture_output=capture_output)
