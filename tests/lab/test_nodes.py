"""A node is lost in the middle of a training: another takes its place, and the weights are the same."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

import fastload
from fastload.memory import state_digest
from tests.lab.test_lab import HOST_1, HOST_2, LAB, PREFIX, lab, why_not

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

_ROOT = Path(__file__).resolve().parents[2]
HOST_3, HOST_4 = f"{PREFIX}host3", f"{PREFIX}host4"
_NUM_NODES = 3
_NUM_STEPS = 40
_PORT = "29400"
_TRAINING = "--root /mnt/run --width 32 --batch 2 --log-every 1 --save-every 8 --pause 0.1 --digest".split()
_TRAINING += ["--steps", str(_NUM_STEPS)]
# What a site sets. A launcher that is gone is missed after 3 s instead of 15.
_SITE = {
    "INTERFACE": "eth0",
    "RANKS_PER_NODE": "1",
    "PET_RDZV_CONF": "keep_alive_interval=1,keep_alive_max_attempt=3",
}

# The folder named first is /mnt on this host. The rest is what a user types on each machine.
_ON_A_HOST = """
mount --make-rprivate / && mount --bind "$1" /mnt || exit 1
shift && export LOCAL_ADDR=$(hostname) && exec "$@"
"""


@pytest.fixture(scope="module", autouse=True)
def _hosts() -> Iterator[None]:
    if reason := why_not():
        pytest.skip(reason)
    try:
        lab("up", "4")
        yield
    finally:
        lab("down")


class Job:
    """A training by launch/torchrun_multi.sh: the same line on each of its nodes."""

    def __init__(self, folder: Path, meets_on: str, **environment: str) -> None:
        self._folder = folder
        self._meets_on = meets_on
        self._environment = environment
        self._nodes: list[subprocess.Popen[bytes]] = []

    def start(self, host: str, disk: Path) -> None:
        """Starts a node, as a supervisor on that machine would."""
        disk.mkdir(exist_ok=True)
        multi = str(_ROOT / "launch" / "torchrun_multi.sh")
        job = [multi, self._meets_on, _PORT, str(_NUM_NODES), str(_ROOT / "launch" / "train.py"), *_TRAINING]
        host_command = ["unshare", "--mount", "bash", "-c", _ON_A_HOST, "host", str(disk), *job]
        with (self._folder / f"{host}.out").open("ab") as output:
            node = subprocess.Popen(
                [str(LAB / "run"), "--plain", "--on", host, "--timeout", "200", "--", *host_command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ
                | {"VIRTUAL_ENV": sys.prefix, "PYTHONPATH": str(_ROOT)}
                | _SITE
                | self._environment,
            )
        self._nodes.append(node)

    def output(self) -> str:
        files = sorted(self._folder.glob("*.out"))
        return "".join(f"----- {path.name}\n{path.read_text(errors='replace')}" for path in files)

    def until(self, happened: Callable[[], object], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not happened():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def ends(self) -> set[str]:
        """Waits for the nodes that live, and returns the digests of the weights that all ranks end with."""
        self.until(lambda: self.output().count(": weights ") == _NUM_NODES, within_s=120)
        for node in self._nodes:
            node.wait(30)
        return set(re.findall(r"rank \d: weights ([0-9a-f]{32})", self.output()))

    def begins(self) -> list[int]:
        return [int(step) for step in re.findall(rf"begins at step (\d+) of {_NUM_STEPS}", self.output())]

    def stop(self) -> None:
        for node in self._nodes:
            if node.poll() is None:
                node.terminate()
        for node in self._nodes:
            node.wait(30)


def lose(host: str) -> None:
    """Kills the launcher and the ranks of a host at once, so that none of them has a last word."""
    ask = ["ip", "netns", "pids", host]
    while pids := subprocess.run(ask, capture_output=True, check=True).stdout.split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What the weights are after a training that loses nothing."""
    folder = tmp_path_factory.mktemp("trained")
    job = Job(folder, HOST_1)
    try:
        for host in (HOST_1, HOST_2, HOST_3):
            job.start(host, folder / "disk")
        weights = job.ends()
    finally:
        job.stop()
    assert job.begins() == [0]
    assert len(weights) == 1
    return weights


@dataclass(frozen=True)
class Loss:
    """How a node is lost, and what takes its place.

    Attributes:
        lost: The host.
        meets_on: The one where the launchers meet.
        replaced_by: The one that takes the place.
        cut: Whether the host goes with its network: nothing tells the others.
        shared: Whether all hosts see one root; else the lost one's copies are lost with it.
    """

    lost: str
    meets_on: str
    replaced_by: str
    cut: bool
    shared: bool

    def disk_of(self, host: str) -> str:
        return "all" if self.shared else host


_OF_RANK_0 = Loss(HOST_1, meets_on=HOST_2, replaced_by=HOST_4, cut=False, shared=False)
_IN_ITS_PLACE = Loss(HOST_3, meets_on=HOST_1, replaced_by=HOST_3, cut=False, shared=True)
_CUT_OFF = Loss(HOST_3, meets_on=HOST_1, replaced_by=HOST_4, cut=True, shared=False)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(_OF_RANK_0, id="killed-own-disks"),
        pytest.param(_IN_ITS_PLACE, id="killed-shared", marks=pytest.mark.slow),
        pytest.param(_CUT_OFF, id="cut-own-disks", marks=pytest.mark.slow),
    ],
)
def test_a_node_is_lost_and_another_takes_its_place(loss: Loss, trained: set[str], tmp_path: Path) -> None:
    disks = tmp_path / "disks"
    disks.mkdir()
    job = Job(tmp_path, loss.meets_on, FASTLOAD_SHARED="auto" if loss.shared else "false")
    try:
        for host in (HOST_1, HOST_2, HOST_3):
            job.start(host, disks / loss.disk_of(host))
        job.until(lambda: "step 12:" in job.output(), within_s=60)
        if loss.cut:
            lab("cut", loss.lost)
        lose(loss.lost)
        job.start(loss.replaced_by, disks / loss.disk_of(loss.replaced_by))
        weights = job.ends()
    finally:
        job.stop()
        lab("heal", loss.lost)
    assert job.begins() in ([0, 8], [0, 16]), job.output()
    assert weights == trained
    # Where each host has a disk of its own, the new one went on from a checkpoint of which it has no copy.
    there = disks / loss.disk_of(loss.replaced_by) / "run"
    steps = sorted(path.name for path in there.iterdir())
    assert steps == [f"step_{step:08d}" for step in (24, 32, 40)]
    assert {state_digest(fastload.load(there / steps[-1])["model"])} == trained
