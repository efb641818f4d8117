"""A node is lost in the middle of a training: another takes its place, and the weights are the same."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fastload
from launch.train import digest
from tests.e2e.forked import forking_variables
from tests.e2e.test_train import weights_of_a_training
from tests.lab.test_lab import HOST_1, HOST_2, LAB, PREFIX, lab, why_not

pytestmark = [pytest.mark.lab, pytest.mark.timeout(500)]

_ROOT = Path(__file__).resolve().parents[2]
HOST_3, HOST_4 = f"{PREFIX}host3", f"{PREFIX}host4"
_HOSTS = (HOST_1, HOST_2, HOST_3)
_NUM_NODES = len(_HOSTS)
_NUM_STEPS = 40
_PORT = "29400"
_TRAIN = str(_ROOT / "launch" / "train.py")
_TRAINING = "--root /mnt/run --width 32 --batch 6 --log-every 1 --save-every 8 --pause 0.1 --digest".split()
_TRAINING = [_TRAIN, *_TRAINING, "--steps", str(_NUM_STEPS)]
# A busy machine takes many times the seconds of a quiet one to start four launchers and their ranks.
_REACHES_A_STEP_S, _ENDS_S, _RUNS_S = 150, 200, 400
# What a site sets. A launcher that is gone is missed after 5 s instead of 15.
_SITE = {
    "INTERFACE": "eth0",
    "RANKS_PER_NODE": "1",
    "MEMORY": "",
    "PET_RDZV_CONF": "keep_alive_interval=1,keep_alive_max_attempt=5",
}

# The folder named first is /mnt on this host, and /media is memory, which goes with its last process. The
# rest is what a user types on each machine.
_ON_A_HOST = """
mount --make-rprivate / && mount --bind "$1" /mnt && mount -t tmpfs -o size=256m none /media || exit 1
shift && export LOCAL_ADDR=$(hostname) && exec "$@"
"""


@pytest.fixture(scope="module", autouse=True)
def _lab() -> Iterator[None]:
    if reason := why_not():
        pytest.skip(reason)
    try:
        lab("up", "4")
        yield
    finally:
        lab("down")


class Job:
    """What launch/torchrun_multi.sh starts: the same line on each of three nodes."""

    def __init__(self, folder: Path, meets_on: str, program: list[str], **environment: str) -> None:
        multi = str(_ROOT / "launch" / "torchrun_multi.sh")
        self._line = [multi, meets_on, _PORT, str(_NUM_NODES), *program]
        self._folder = folder
        self._environment = _SITE | environment
        self._nodes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for node in self._nodes:
            if node.poll() is None:
                node.terminate()
        for node in self._nodes:
            node.wait(60)

    def start(self, host: str, disk: Path) -> None:
        """Starts a node, as a supervisor on that machine would."""
        disk.mkdir(exist_ok=True, parents=True)
        command = ["unshare", "--mount", "bash", "-c", _ON_A_HOST, "host", str(disk), *self._line]
        with (self._folder / f"{host}.out").open("ab") as output:
            node = subprocess.Popen(
                [str(LAB / "run"), "--plain", "--on", host, "--timeout", str(_RUNS_S), "--", *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | forking_variables() | {"PYTHONPATH": str(_ROOT)} | self._environment,
            )
        self._nodes.append(node)

    def end(self) -> list[int]:
        """Waits for all nodes, and returns their exit status in the order in which they were started."""
        try:
            return [node.wait(_ENDS_S) for node in self._nodes]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.output()) from None

    def output(self) -> str:
        files = sorted(self._folder.glob("*.out"))
        return "".join(f"----- {path.name}\n{path.read_text(errors='replace')}" for path in files)

    def until(self, happened: Callable[[], object]) -> None:
        deadline = time.monotonic() + _REACHES_A_STEP_S
        while not happened():
            assert time.monotonic() < deadline, self.output()
            assert any(node.poll() is None for node in self._nodes), self.output()
            time.sleep(0.05)

    def weights(self) -> set[str]:
        """The digests of the weights that the ranks ended with."""
        return set(re.findall(r"rank \d: weights ([0-9a-f]{32})", self.output()))

    def begins(self) -> list[int]:
        return [int(step) for step in re.findall(rf"begins at step (\d+) of {_NUM_STEPS}", self.output())]


def lose(host: str) -> None:
    """Kills the launcher and the ranks of a host at once, so that none of them has a last word."""
    ask = ["ip", "netns", "pids", host]
    while pids := subprocess.run(ask, capture_output=True, check=True).stdout.split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the weights are that the training would draw itself."""
    spec = importlib.util.spec_from_file_location("train", _TRAIN)
    assert spec is not None
    assert spec.loader is not None
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    torch.manual_seed(0)
    model = train.Decoder(width=32, layers=2, heads=4, length=64)
    folder = tmp_path_factory.mktemp("initial") / "weights"
    fastload.save(model.state_dict(), folder)
    lab("put", str(folder), "initial")
    return "s3://lab/initial"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What the weights are after a training that loses nothing."""
    folder = tmp_path_factory.mktemp("trained")
    return weights_of_a_training(_NUM_NODES, folder, *_TRAINING[1:], "--pause", "0")


@dataclass(frozen=True)
class Loss:
    """How a node is lost, and what takes its place.

    Attributes:
        lost: The host.
        meets_on: The one where the launchers meet.
        replaced_by: The one that takes the place.
        cut: Whether the network of the host goes first: nothing tells the others.
        shared: Whether all hosts see one root; else the lost one's copies are lost with it.
        staged: Whether the initial weights were staged, and so are lost, too.
    """

    lost: str
    meets_on: str
    replaced_by: str
    cut: bool = False
    shared: bool = False
    staged: bool = False


_LOSSES = {
    "killed-own-disks": Loss(HOST_1, meets_on=HOST_2, replaced_by=HOST_4),
    "killed-shared": Loss(HOST_3, meets_on=HOST_1, replaced_by=HOST_3, shared=True),
    "cut-staged": Loss(HOST_3, meets_on=HOST_1, replaced_by=HOST_4, cut=True, staged=True),
}


@pytest.mark.slow  # that of its memory, below, has the same launchers
@pytest.mark.parametrize("loss", _LOSSES.values(), ids=_LOSSES)
def test_a_node_is_lost_and_another_takes_its_place(
    loss: Loss, trained: set[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def disk(host: str) -> Path:
        return tmp_path / "disks" / ("all" if loss.shared else host)

    program = [*_TRAINING, "--init", "/mnt/initial"] if loss.staged else _TRAINING
    if loss.staged:
        initial = request.getfixturevalue("initial")
        with Job(tmp_path, loss.meets_on, ["-m", "fastload", "stage", initial, "/mnt/initial"]) as prologue:
            for host in _HOSTS:
                prologue.start(host, disk(host))
            assert prologue.end() == [0, 0, 0], prologue.output()
    shared = "auto" if loss.shared else "false"
    with Job(tmp_path, loss.meets_on, program, FASTLOAD_SHARED=shared) as job:
        for host in _HOSTS:
            job.start(host, disk(host))
        job.until(lambda: "step 12:" in job.output())
        if loss.cut:
            lab("cut", loss.lost)
        lose(loss.lost)
        job.start(loss.replaced_by, disk(loss.replaced_by))
        ends = job.end()
    lab("heal", loss.lost)
    assert sorted(ends) == [0, 0, 0, 137], job.output()
    assert job.begins() in ([0, 8], [0, 16]), job.output()
    assert job.weights() == trained
    # Where each host has a disk of its own, the new one went on from a checkpoint of which it has no copy.
    there = disk(loss.replaced_by)
    steps = sorted(path.name for path in (there / "run").iterdir())
    assert steps == [f"step_{step:08d}" for step in (24, 32, 40)]
    assert {digest(fastload.load(there / "run" / steps[-1])["model"])} == trained
    assert not (there / "initial").exists()


@pytest.mark.slow
def test_the_launchers_end_with_the_host_where_they_meet(trained: set[str], tmp_path: Path) -> None:
    with Job(tmp_path, HOST_1, _TRAINING) as job:
        for host in _HOSTS:
            job.start(host, tmp_path / "disk")
        job.until(lambda: "step 12:" in job.output())
        lose(HOST_1)
        assert 0 not in job.end(), job.output()
    with Job(tmp_path, HOST_2, _TRAINING) as job:
        for host in (HOST_2, HOST_3, HOST_4):
            job.start(host, tmp_path / "disk")
        assert job.end() == [0, 0, 0], job.output()
    assert job.begins() in ([0, 8], [0, 16]), job.output()
    assert job.weights() == trained


@pytest.mark.slow
def test_a_node_is_lost_with_its_memory_and_nothing_is_on_storage(tmp_path: Path) -> None:
    """Each step is in the memory of two hosts: the newest comes back from there, and no save is needed."""
    program = [*_TRAINING, "--save-every", "1000", "--memory-every", "1"]
    disk = tmp_path / "disk"
    with Job(tmp_path, HOST_1, program, MEMORY="/media") as job:
        for host in _HOSTS:
            job.start(host, disk)
        job.until(lambda: "step 12:" in job.output())
        lose(HOST_3)
        assert not list((disk / "run").glob("step_*"))
        job.start(HOST_3, disk)
        ends = job.end()
    assert sorted(ends) == [0, 0, 0, 137], job.output()
    assert f"of {_NUM_STEPS}, from memory" in job.output(), job.output()
    assert job.begins()[1] >= 8, job.output()
    assert job.weights() == weights_of_a_training(
        _NUM_NODES, tmp_path / "alone", *program[1:], "--pause", "0"
    )
