"""Random trainings that are killed, and flushes of what they left, some of which are killed, too."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

import fastload
from fastload.ext.memory.manifest import HostManifest
from tests.checkpoints import flip
from tests.dist.flush_trainer import state_of
from tests.dist.patience import patient
from tests.dist.zygote import serve_store
from tests.e2e.forked import forking_python

__all__ = ["Processes", "run_draw"]

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 8
_KILLS = ("all", "one", "launcher")
_FLUSHES = ("left alone", "left alone", "all", "one", "launcher")


class Processes:
    """The processes of a job, each with its own arguments, and the store of their launcher."""

    def __init__(self, words: Iterable[Sequence[str]], folder: Path) -> None:
        self._store = serve_store(timedelta(seconds=60))
        self._output = folder / "output"
        every = [[forking_python(), *of_rank] for of_rank in words]
        job = {"WORLD_SIZE": len(every), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._store.port}
        job |= {"TORCHELASTIC_USE_AGENT_STORE": True, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        job |= {"FASTLOAD_TIMEOUT_S": _TIMEOUT_S, "PYTHONPATH": _ROOT}
        with self._output.open("w") as output:
            self._processes = [
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=_ROOT,
                    env=os.environ | {name: str(value) for name, value in job.items()} | {"RANK": str(rank)},
                )
                for rank, command in enumerate(every)
            ]

    def kill(self, which: str, number: int) -> None:
        """Kills all of them, or one, or their launcher with its store; the others go on."""
        if which == "launcher":
            self._store = None
        for process in self._processes if which == "all" else self._processes[number:][: which == "one"]:
            process.kill()

    def end(self, seconds: float) -> tuple[list[int], str]:
        """Waits for all, and kills who is left then; returns their statuses, and what they have written."""
        limit = time.monotonic() + seconds
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, limit - time.monotonic()))
        self.kill("all", 0)
        return [process.wait() for process in self._processes], self._output.read_text()


@dataclass(frozen=True)
class Left:
    """What a run has left behind.

    Attributes:
        stored: The newest complete step on storage; 0 if there is none.
        complete: The newest complete one in memory; 0 if there is none.
        newest: The newest one in memory, complete or not; 0 if there is none.
    """

    stored: int
    complete: int
    newest: int

    @classmethod
    def of(cls, root: Path, memory: Path) -> Left:
        """Looks for it, without the code that is tested."""
        stored = [int(path.parent.name[5:]) for path in root.glob("step_*/fastload.json")]
        held: dict[str, tuple[int, set[int]]] = {}
        for record in memory.glob("host*/fastload-*/*/*/manifest.json"):
            manifest = HostManifest.parse(record.read_bytes())
            assert manifest is not None
            _, missing = held.setdefault(record.parent.name, (manifest.step, set(manifest.shares)))
            missing -= set(manifest.held)
        complete = [step for step, missing in held.values() if not missing]
        steps = [step for step, _ in held.values()]
        return cls(max(stored, default=0), max(complete, default=0), max(steps, default=0))


def run_draw(seed: int, folder: Path) -> str:
    """Kills a training, then some flushes, and checks the last one; returns what it was."""
    drawn = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    root, memory = folder / "root", folder / "memory"
    num_hosts, per_host = drawn.choice([(2, 1), (2, 1), (3, 1), (2, 2), (1, 2)])
    copies, save_every = drawn.choice([1, 2, 2, 2]), drawn.choice([5, 1000, 1000])
    for host in range(num_hosts):
        (memory / f"host{host}").mkdir(parents=True)
    words = [str(_ROOT / "tests" / "dist" / "flush_trainer.py"), str(root), str(memory)]
    words += map(str, (per_host, copies, save_every))
    killed = drawn.choice(_KILLS)
    _train(drawn, killed, [words] * num_hosts * per_host, folder)

    lost = [host for host in range(num_hosts) if drawn.random() < 0.15]
    for host in lost:
        shutil.rmtree(memory / f"host{host}")
        (memory / f"host{host}").mkdir()
    left = Left.of(root, memory)
    is_damaged = copies > 1 and num_hosts == 2 and not lost and drawn.random() < 0.3
    if is_damaged:
        _damage(drawn, memory)
    what = f"seed {seed}: {num_hosts} hosts, {copies} copies, {killed} killed, lost {lost}, {left}"

    flushes = []
    while drawn.random() < 0.6 and len(flushes) < 2:
        how = drawn.choice(_FLUSHES)
        flushes.append(how)
        _flush(drawn, how, root, memory, num_hosts, folder)
        assert Left.of(root, memory).stored in (left.stored, max(left.stored, left.complete)), what
    statuses, output = _flush(drawn, "left alone", root, memory, num_hosts, folder)
    what += f", flushes {flushes}"
    after = Left.of(root, memory)
    if left.complete > left.stored or left.newest <= left.stored:
        assert statuses == [0] * num_hosts, (what, statuses, output)
        assert after.stored == max(left.stored, left.complete), (what, output)
        outcome = "written" if left.complete > left.stored else "nothing to write"
    else:
        assert all(statuses), (what, statuses, output)
        assert f"of step {left.newest} are on no host" in output, (what, output)
        assert all(f"host{host}" in output for host in range(num_hosts)), (what, output)
        assert after.stored == left.stored, (what, output)
        outcome = "named what is missing"
    if after.stored:
        path = root / f"step_{after.stored:08d}"
        fastload.verify(path)
        found = fastload.load(path, names=["weight"])["weight"]
        assert torch.equal(found, state_of(after.stored, 0)["weight"]), what
    return f"{what}{', damaged' if is_damaged else ''}: {outcome}"


def _train(drawn: random.Random, killed: str, words: Sequence[Sequence[str]], folder: Path) -> None:
    """Runs a training until something is in memory, and a while longer; no process of it is left."""
    training = Processes(words, folder)
    deadline = time.monotonic() + patient(60)
    try:
        while not any(folder.glob("memory/host*/fastload-*/*/*/manifest.json")):
            assert time.monotonic() < deadline, training.end(0)
            time.sleep(0.01)
        time.sleep(drawn.random() * 1.2)
        training.kill(killed, drawn.randrange(len(words)))
        if killed != "all":
            time.sleep(drawn.random() * 2)  # for which the others go on
    finally:
        training.end(0)  # as the launcher does, or whoever started it


def _flush(
    drawn: random.Random, how: str, root: Path, memory: Path, num_hosts: int, folder: Path
) -> tuple[list[int], str]:
    order = drawn.sample(range(num_hosts), num_hosts)
    words = [
        ["-m", "fastload", "flush", str(root), "--memory", str(memory / f"host{host}")] for host in order
    ]
    flush = Processes(words, folder)
    if how != "left alone":
        time.sleep(drawn.random() * 1.5)
        flush.kill(how, drawn.randrange(num_hosts))
        return flush.end(drawn.choice([0, _TIMEOUT_S + 2]))  # then the launcher ends who is left
    return flush.end(patient(60))


def _damage(drawn: random.Random, memory: Path) -> None:
    """Flips a bit of a file on one host."""
    files = sorted(memory.glob(f"host{drawn.randrange(2)}/fastload-*/*/*/*.safetensors"))
    with suppress(IndexError):
        file = drawn.choice(files)
        flip(file, drawn.randrange(file.stat().st_size))
