"""launch/train.py as its users run it: stopped by a signal or by force, it ends with the same weights."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

import fastload
from tests.e2e.forked import Forked, forking_python

pytestmark = pytest.mark.timeout(150)

_ROOT = Path(__file__).resolve().parents[2]
_STEPS = 24


def command_of(root: Path, *arguments: str) -> list[str]:
    command = [str(_ROOT / "launch" / "train.py"), "--root", str(root), "--steps", str(_STEPS)]
    return [*command, "--width", "32", "--batch", "16", "--log-every", "1", "--digest", *arguments]


def environ() -> dict[str, str]:
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(_ROOT), "MEMORY": ""}
    return os.environ | own


class Run:
    """launch/train.py on two ranks."""

    def __init__(self, root: Path, *arguments: str) -> None:
        self._output = root.with_suffix(".out")
        self._ranks = Forked(
            command_of(root, *arguments),
            ranks=2,
            cwd=_ROOT,
            env=environ(),
            out=self._output,
            err=self._output,
        )

    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def until(self, happened: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not happened():
            assert time.monotonic() < deadline, self.output()
            assert self.lives(), self.output()
            time.sleep(0.05)

    def lives(self) -> bool:
        return self._ranks.lives()

    def ranks(self) -> list[int]:
        """The processes of the ranks, in their order."""
        return self._ranks.pids

    def end(self) -> str:
        assert self._ranks.end(90).returncode == 0, self.output()
        return self.output()


class Torchrun(Run):
    """The same by torchrun itself, with the python that is given for the ranks."""

    def __init__(self, root: Path, *arguments: str, python: str, restarts: int = 0) -> None:
        command = [forking_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        self._output = root.with_suffix(".out")
        self._mark = {"TORCHRUN_OF": str(root)}
        with self._output.open("a") as output:
            self._process = subprocess.Popen(
                [*command, f"--max-restarts={restarts}", *command_of(root, *arguments)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ() | self._mark | {"PYTHON_EXEC": python},
                start_new_session=True,
            )

    def lives(self) -> bool:
        return self._process.poll() is None

    def ranks(self) -> list[int]:
        """The processes of the ranks, in their order."""
        ((name, value),) = self._mark.items()
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended
                variables = path.read_bytes().split(b"\0")
                if f"{name}={value}".encode() in variables:
                    ranks = [int(v[5:]) for v in variables if v.startswith(b"RANK=")]
                    found.update(dict.fromkeys(ranks, int(path.parent.name)))
        return [found[rank] for rank in sorted(found)]

    def terminate(self) -> None:
        """Does what a scheduler does: tells the launcher, which tells all processes of its ranks."""
        self._process.terminate()

    def end(self, status: int = 0) -> str:
        try:
            assert self._process.wait(90) == status, self.output()
        finally:
            ranks = self.ranks() if self._process.poll() is None else []
            for pid in [*ranks, self._process.pid] if ranks else []:
                os.kill(pid, signal.SIGKILL)
            self._process.wait(10)
        return self.output()


def weights(output: str) -> set[str]:
    return set(re.findall(r"rank \d: weights ([0-9a-f]{32})", output))


def weights_of_a_training(num_ranks: int, folder: Path, *arguments: str) -> set[str]:
    """Returns the digest of the weights that a training on ranks of this host ends with."""
    command = [str(_ROOT / "launch" / "train.py"), *arguments, "--root", str(folder / "run")]
    folder.mkdir(exist_ok=True)
    out = folder / "out"
    done = Forked(command, ranks=num_ranks, cwd=_ROOT, env=environ(), out=out, err=out).end(90)
    assert done.returncode == 0, done.stderr
    assert "begins at step 0 of" in done.stdout
    assert len(weights(done.stdout)) == 1
    return weights(done.stdout)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole") / "run"


@pytest.fixture(scope="module")
def uninterrupted(whole: Path) -> str:
    output = Run(whole, "--save-every", "8").end()
    assert f"ends at step {_STEPS} of {_STEPS}" in output
    (digest,) = weights(output)
    return digest


def losses(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", output)}


@pytest.mark.slow
def test_one_rank_trains_on_the_data_of_two(uninterrupted: str, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = command_of(tmp_path / "run", "--steps", "8")
    done = Forked(command, ranks=1, cwd=_ROOT, env=environ(), out=out, err=out).end(90)
    assert done.returncode == 0, done.stderr
    alone, by_two = losses(done.stdout), losses(Path(whole).with_suffix(".out").read_text())
    assert sorted(alone) == list(range(1, 9))
    assert alone == pytest.approx({step: by_two[step] for step in alone}, rel=1e-3)


@pytest.mark.slow(but=["ddp"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_stopped_by_a_signal_it_saves_and_goes_on(uninterrupted: str, tmp_path: Path, parallel: str) -> None:
    how = ("--parallel", parallel)
    if parallel == "fsdp":
        (uninterrupted,) = weights(Run(tmp_path / "whole", *how).end())
    root = tmp_path / "run"
    run = Run(root, *how, "--save-every", "1000", "--pause", "0.1")
    run.until(lambda: "step 3:" in run.output())
    os.kill(run.ranks()[1], signal.SIGUSR1)  # one rank is told, all of them stop
    output = run.end()
    stopped = re.search(rf"ends at step (\d+) of {_STEPS}", output)
    assert stopped is not None
    assert 3 <= int(stopped[1]) < _STEPS
    assert fastload.inspect(root / f"step_{int(stopped[1]):08d}").block_bytes
    assert weights(output) != {uninterrupted}
    again = Run(root, *how).end()
    assert f"begins at step {stopped[1]} of {_STEPS}" in again
    assert weights(again[len(output) :]) == {uninterrupted}


@pytest.mark.slow
def test_told_by_its_launcher_it_saves_with_workers_and_goes_on(uninterrupted: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    # Real processes: each of them is told, those that prepare the data as well.
    pauses = ("--pause", "0.1", "--workers", "2")
    run = Torchrun(root, "--save-every", "1000", *pauses, python=sys.executable)
    run.until(lambda: "step 3:" in run.output())
    run.terminate()
    output = run.end(status=1)  # torchrun's own: it was told to end
    assert "DataLoader worker" not in output
    stopped = re.search(rf"ends at step (\d+) of {_STEPS}", output)
    assert stopped is not None
    again = Run(root, "--workers", "1").end()
    assert f"begins at step {stopped[1]} of {_STEPS}" in again
    assert weights(again[len(output) :]) == {uninterrupted}


@pytest.mark.slow
def test_killed_it_is_started_anew_and_goes_on_from_its_last_commit(
    uninterrupted: str, tmp_path: Path
) -> None:
    run = Torchrun(
        tmp_path / "run", "--save-every", "4", "--pause", "0.1", python=forking_python(), restarts=1
    )
    run.until(lambda: "step 10:" in run.output())
    os.kill(run.ranks()[1], signal.SIGKILL)
    output = run.end()
    begins = [int(step) for step in re.findall(rf"begins at step (\d+) of {_STEPS}", output)]
    assert len(begins) == 2
    assert begins[0] == 0
    assert begins[1] in range(4, _STEPS, 4)  # on a busy machine it is killed later
    assert weights(output) == {uninterrupted}


def test_initial_weights_come_from_a_checkpoint(whole: Path, uninterrupted: str, tmp_path: Path) -> None:
    state = fastload.load(whole / f"step_{_STEPS:08d}")["model"]
    fastload.save(state, tmp_path / "weights")
    second = Run(tmp_path / "second", "--init", str(tmp_path / "weights"), "--steps", "0").end()
    assert weights(second) == {uninterrupted}


_OWN_PARTS = '''# Your model


def make_model(args: argparse.Namespace) -> nn.Module:
    """Returns a model whose forward pass changes buffers."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 5))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return []


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


# Your data


def make_data(args: argparse.Namespace) -> Dataset[Any]:
    inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(inputs, inputs.argmax(1))


'''


@pytest.fixture(scope="module")
def own_training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of launch/train.py with another model and a finite data set of pairs."""
    text = (_ROOT / "launch" / "train.py").read_text()
    begin, end = text.index("# Your model"), text.index("# The training")
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(text[:begin] + _OWN_PARTS + text[end:])
    return path


@pytest.mark.slow
def test_running_statistics_are_those_of_a_training_without_a_stop(
    own_training: Path, tmp_path: Path
) -> None:
    def run(root: str, *, ranks: int, steps: int) -> str:
        out = tmp_path / f"{root}-{ranks}-{steps}.out"
        arguments = ["--steps", str(steps), "--batch", "20", "--log-every", "1", "--digest"]
        command = [str(own_training), "--root", str(tmp_path / root), *arguments]
        done = Forked(command, ranks=ranks, cwd=tmp_path, env=environ(), out=out, err=out).end(90)
        assert done.returncode == 0, done.stdout
        assert f"ends at step {steps} of {steps}" in done.stdout
        return done.stdout

    whole = run("whole", ranks=2, steps=12)
    run("stopped", ranks=2, steps=7)
    shutil.copytree(tmp_path / "stopped", tmp_path / "alone")
    again = run("stopped", ranks=2, steps=12)
    assert "begins at step 7 of 12" in again
    assert weights(again) == weights(whole)
    assert len(weights(whole)) == 1
    assert "begins at step 7 of 12" in run("alone", ranks=1, steps=12)
    for root in ("whole", "stopped", "alone"):
        saved = fastload.load(tmp_path / root / "step_00000012")
        assert saved["model"]["1.num_batches_tracked"] == 12


def test_the_data_of_a_step_depend_on_no_number_of_ranks(own_training: Path) -> None:
    spec = importlib.util.spec_from_file_location("own_training", own_training)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    args = SimpleNamespace(batch=8, init=None, parallel="ddp", seed=3)
    training = module.Training(args, 0, "cpu")

    def batch(step: int, num_ranks: int) -> list[int]:
        training.num_ranks, of_ranks = num_ranks, []
        for training.rank in range(num_ranks):
            of_ranks.append(training.numbers_of(step))
        assert {len(numbers) for numbers in of_ranks} == {8 // num_ranks}
        return [number for numbers in zip(*of_ranks, strict=True) for number in numbers]

    steps = range(25)  # two epochs of 100 samples
    numbers = [number for step in steps for number in batch(step, 1)]
    for num_ranks in (2, 4):
        assert [number for step in steps for number in batch(step, num_ranks)] == numbers
    assert sorted(numbers[:100]) == sorted(numbers[100:]) == list(range(100))
    assert len({tuple(numbers[:100]), tuple(numbers[100:]), tuple(range(100))}) == 3
