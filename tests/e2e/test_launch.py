"""A job on this machine, started by launch/torchrun_single.sh, and by what srun would set."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from fastload.formats.state import state_digest
from tests.checkpoints import load_reference, write_file
from tests.e2e.forked import Forked, forking_variables, run_forked

_ROOT = Path(__file__).resolve().parents[2]
_LAUNCHER = re.compile(r"RANK|LOCAL_RANK|WORLD_SIZE|MASTER_\w+|SLURM_\w+|FASTLOAD_\w+")

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def load(tmp_path: Path) -> list[str]:
    path = tmp_path / "model.safetensors"
    write_file(path, [("a", "F32", (1000, 300)), ("b", "I64", (7,))])
    return ["-m", "fastload", "load", str(path), "--json", "--digest"]


def environ(**variables: str) -> dict[str, str]:
    clean = {name: text for name, text in os.environ.items() if not _LAUNCHER.fullmatch(name)}
    clean |= {"PYTHONPATH": str(_ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return clean | forking_variables() | variables


def launch(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environ(**variables), cwd=_ROOT, capture_output=True, text=True, timeout=100
    )


def fork(load: list[str], folder: Path, rank: int, **variables: str) -> Forked:
    """Starts one rank without a launcher, with the variables that one would set."""
    out, err = folder / f"{rank}.out", folder / f"{rank}.err"
    return Forked(load, cwd=_ROOT, env=environ(**variables), out=out, err=err)


def report_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def digests(load: list[str], num_ranks: int) -> list[str]:
    return [state_digest(load_reference(Path(load[3])))] * num_ranks


def test_torchrun_single(load: list[str]) -> None:
    job = launch("launch/torchrun_single.sh", *load, RANKS_PER_NODE="2")
    assert report_of(job)["digests"] == digests(load, 2)


def test_launchers_that_have_not_restarted_as_often(load: list[str], tmp_path: Path) -> None:
    # One of them has taken the place of another, or has started its ranks anew because others were.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    job |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "FASTLOAD_TIMEOUT_S": "15"}
    ranks = [
        fork(load, tmp_path, rank, RANK=str(rank), TORCHELASTIC_RESTART_COUNT=str(rank), **job)
        for rank in range(2)
    ]
    leader, other = [rank.end(100) for rank in ranks]
    assert report_of(leader)["digests"] == digests(load, 2)
    assert (other.returncode, other.stdout, other.stderr) == (0, "", "")


# What a user's own program does: it knows nothing of `fastload.comm.world`.
_STOCK = """
import os, signal, sys
import torch.distributed as dist
import fastload
dist.init_process_group("gloo")
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
norm = float(fastload.load(sys.argv[1])["a"].norm())
# One write: two ranks share the output, and print may write the end of the line by itself.
sys.stdout.write(f"rank {dist.get_rank()} life {life} norm {norm}\\n")
sys.stdout.flush()
dist.barrier()
if life == "0":
    os.kill(os.getpid(), signal.SIGKILL) if dist.get_rank() == 1 else signal.pause()
"""


def test_ranks_that_are_started_anew_may_meet_on_their_own(load: list[str], tmp_path: Path) -> None:
    program = tmp_path / "stock.py"
    program.write_text(_STOCK)
    job = launch("launch/torchrun_single.sh", str(program), load[3], RANKS_PER_NODE="2", MAX_RESTARTS="1")
    assert job.returncode == 0, job.stderr
    norm = float(load_reference(Path(load[3]))["a"].norm())
    begun = [f"rank {rank} life {life} norm {norm}" for life in "01" for rank in range(2)]
    assert sorted(job.stdout.splitlines()) == sorted(begun)


def test_srun_alone(load: list[str], tmp_path: Path) -> None:
    job_id = str(os.getpid())  # the port follows from it
    step = {"SLURM_JOB_ID": job_id, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
    step |= {"SLURM_NTASKS": "2", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"}
    ranks = [
        fork(load, tmp_path, rank, **step, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
        for rank in range(2)
    ]
    leader, other = [rank.end(100) for rank in ranks]
    assert report_of(leader)["digests"] == digests(load, 2)
    assert (other.returncode, other.stdout) == (0, "")


@pytest.mark.parametrize("command", [["load", "a"], ["verify", "a"], ["stage", "a", "b"]])
def test_an_environment_that_cannot_be_is_one_line(command: list[str]) -> None:
    launcher = {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = run_forked(["-m", "fastload", *command], cwd=_ROOT, env=environ(**launcher), timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "fastload: WorldError: RANK=2 contradicts WORLD_SIZE=2: it must be below\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "device='cuda:1': torch supports no cuda device in this process"),
        ("cuda:x", "device='cuda:x': Invalid device string: 'cuda:x'"),
    ],
)
def test_a_gpu_that_is_not_there_is_one_line(tmp_path: Path, device: str, message: str) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    load = ["-m", "fastload", "load", "a"]
    other = fork(load, tmp_path, 0, **job, RANK="0", LOCAL_RANK="0")
    bad = fork([*load, "--device", device], tmp_path, 1, **job, RANK="1", LOCAL_RANK="1")
    done, told = bad.end(60), other.end(60)  # the other one not after minutes, either
    assert (done.returncode, done.stdout) == (2, "")
    # torch warns, too, if the process with the store ends first.
    ours = [line for line in done.stderr.splitlines() if "fastload" in line or "Traceback" in line]
    assert ours == [f"fastload: OptionError: {message}"]
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.startswith("fastload: PeerError: the ranks cannot join the job: rank 1 on ")
    assert told.stderr.endswith(f": {message}\n")


def test_a_port_in_use_is_named(load: list[str]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        job = environ(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
        done = run_forked(load, cwd=_ROOT, env=job, timeout=60)
    assert done.returncode == 1
    text = f"WorldError: rank 0 of 2 did not meet the others at localhost:{port}: The server socket"
    assert text in done.stderr
    assert "EADDRINUSE" in done.stderr


def test_torchrun_multi_says_how_it_is_used() -> None:
    done = launch("launch/torchrun_multi.sh", "host", "29400")
    assert (done.returncode, done.stderr) == (
        2,
        "usage: torchrun_multi.sh HOST PORT NODES [PROGRAM ARGS...]\n",
    )
