"""What is in launch/ as it is shipped, most of it on a real Slurm: loads, trains, stops, returns."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from fastload.formats.state import state_digest
from tests.checkpoints import load_reference, write_sharded
from tests.e2e.forked import forking_variables
from tests.e2e.test_train import weights_of_a_training
from tests.lab.test_lab import HOST_1, LAB, NAME, PREFIX, lab, why_not

pytestmark = [pytest.mark.lab, pytest.mark.timeout(120)]

_ROOT = Path(__file__).resolve().parents[2]
_TRAPPER = Path(__file__).with_name("trapper.py")
_NUM_NODES = 4
_JOB_DEADLINE_S = 90.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "ckpt"
    rows = [(f"layer.{number}.weight", "F32", (1000, 1000 + number)) for number in range(12)]
    write_sharded(folder, {"a.safetensors": rows[:7], "b.safetensors": rows[7:]}, index=True)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _cluster(checkpoint: Path) -> Iterator[None]:
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    tools = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
    if reason := why_not():
        pytest.skip(reason)
    if missing := [tool for tool in tools if shutil.which(tool, path=path) is None]:
        pytest.skip(f"Slurm lacks {', '.join(missing)}; run scripts/lab/setup")
    try:
        lab("up", str(_NUM_NODES))
        lab("put", str(checkpoint), "ckpt")
        lab("slurm_up", str(_NUM_NODES))
        yield
        slurm("sbatch", "--nodes=2", "--output=/dev/null", "--wrap=srun sleep 4321")
        deadline = time.monotonic() + 20
        while f"{shutil.which('sleep')} 4321" not in command_lines():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        lab("slurm_down")
        assert lab("run", "--plain", "--", "true").returncode == 0, "the lab outlives Slurm"
        assert not Path(f"/run/{NAME}/slurm").exists()
        assert remains() == []
    finally:
        lab("down")


def command_lines() -> list[str]:
    lines = [path.read_bytes().split(b"\0") for path in Path("/proc").glob("[0-9]*/cmdline")]
    return [b" ".join(words).decode(errors="replace").strip() for words in lines]


def remains() -> list[str]:
    """Command lines of what Slurm in this lab is made of, and of the job that was there at its end."""
    ours = ("slurmstepd", "sleep 4321", f"/{NAME}/slurm/")
    return [line for line in command_lines() if any(part in line for part in ours)]


def slurm(*command: str, cwd: Path = _ROOT, **environment: str) -> str:
    done = subprocess.run(
        [str(LAB / "slurm"), "--", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        cwd=cwd,
        env=os.environ | {"VIRTUAL_ENV": sys.prefix, "PYTHONPATH": str(_ROOT), "MEMORY": ""} | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


# SIGNALING and REQUEUED show for a moment, while Slurm stops a job that is to run again.
_ALIVE = {"PENDING", "RUNNING", "SIGNALING", "REQUEUED", "COMPLETING", "COMPLETED"}


class Job:
    """A template that was submitted, with what a site sets: the shape of the job and the interface."""

    def __init__(
        self,
        template: str,
        program: list[str],
        *,
        nodes: int,
        ranks_per_node: int,
        folder: Path,
        options: Sequence[str] = (),
        **environment: str,
    ) -> None:
        path = str(_ROOT / "launch" / f"slurm_{template}.sbatch")
        program = [str(_ROOT / word) if word.startswith("launch/") else word for word in program]
        shape = [f"--nodes={nodes}", "--time=5", *options]
        site = {"INTERFACE": "eth0"}
        if template == "torchrun":
            site["RANKS_PER_NODE"] = str(ranks_per_node)
        else:
            shape.append(f"--ntasks-per-node={ranks_per_node}")
        command = ("sbatch", "--parsable", *shape, path, *program)
        self.id = slurm(*command, cwd=folder, **site, **environment).strip()
        self._output = folder / f"train-{self.id}.out"

    def output(self) -> str:
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def fact(self, name: str) -> str:
        """A value that Slurm gives for the job, such as its JobState."""
        shown = slurm("scontrol", "--oneliner", "show", "job", self.id)
        match = re.search(rf"\b{name}=(\S+)", shown)
        assert match is not None, shown
        return match[1]

    def member(self, number: int, name: str) -> str:
        """As `fact`, of one member of an array."""
        shown = slurm("scontrol", "--oneliner", "show", "job", f"{self.id}_{number}")
        match = re.search(rf"\b{name}=(\S+)", shown)
        assert match is not None, shown
        return match[1]

    def until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _JOB_DEADLINE_S
        while not happened():
            state = self.fact("JobState")
            alive = time.monotonic() < deadline and state in _ALIVE
            assert alive, f"the job is {state}:\n{self.output()}"
            time.sleep(1)  # to ask costs a core that the ranks need

    def is_over(self) -> bool:
        return self.fact("JobState") == "COMPLETED"


def storage_bytes() -> int:
    sent: int = json.loads(lab("bytes").stdout)["storage_tx"]
    return sent


@pytest.mark.slow(but=["torchrun"])
@pytest.mark.parametrize(
    ("nodes", "ranks_per_node"),
    [(2, 2), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((2, 1), (4, 1), (4, 2)))],
)
@pytest.mark.parametrize("template", ["torchrun", "srun"])
def test_a_template_loads_and_storage_is_read_once(
    template: str, nodes: int, ranks_per_node: int, checkpoint: Path, tmp_path: Path
) -> None:
    program = ["-m", "fastload", "load", "s3://lab/ckpt", "--json", "--digest"]
    before = storage_bytes()
    job = Job(
        template,
        program,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        folder=tmp_path,
        **forking_variables(),
    )
    job.until(job.is_over)
    printed = re.findall(r"^0: (.*)$", job.output(), re.MULTILINE)
    report = json.loads("".join(printed))  # srun labels each 1024 characters of a line
    num_ranks = nodes * ranks_per_node
    assert report["digests"] == [state_digest(load_reference(checkpoint))] * num_ranks
    assert report["read_amplification"] == 1.0
    assert (storage_bytes() - before) / report["bytes_wanted"] < 1.01
    hosts = Counter(own["host"] for own in report["ranks"])
    assert hosts == {f"{PREFIX}host{n + 1}": ranks_per_node for n in range(nodes)}


# What stops a job, and what the program learns of it.
_STOPS = {
    "at-start": "SIGUSR1",  # Slurm's signal to the batch shell, before the program listens
    "preemption": "SIGTERM",  # with a grace time, of a job in a partition of lower priority
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "how"),
    [("torchrun", "preemption"), ("srun", "at-start")],
)
def test_a_job_that_is_stopped_saves_and_comes_back(template: str, how: str, tmp_path: Path) -> None:
    # It is deaf, and is told 5 s later again: it has to run for longer.
    begin = tmp_path / "begin"
    num_steps, deaf = (80, {"TRAPPER_WAITS_FOR": str(begin)}) if how == "at-start" else (40, {})
    program = [str(_TRAPPER), str(tmp_path), str(num_steps)]
    job = Job(template, program, nodes=2, ranks_per_node=1, folder=tmp_path, **deaf)
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    if how == "at-start":
        job.until(lambda: all((tmp_path / f"{rank}.deaf").exists() for rank in range(2)))
        assert not any(log.exists() for log in logs)
    else:
        job.until(lambda: all(log.exists() and "\n5\n" in log.read_text() for log in logs))
    if how == "preemption":
        slurm("sbatch", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=true")
    else:
        slurm("scancel", "--batch", "--signal=USR1", job.id)
        time.sleep(1)  # until the batch shell has passed it on
        begin.touch()
    job.until(lambda: job.is_over() and all((tmp_path / f"{rank}.saved").exists() for rank in range(2)))
    assert job.fact("Restarts") == "1"
    for log in logs:
        lines = log.read_text().splitlines()
        stops = [line for line in lines if line.startswith("ends")]
        assert stops == [stops[0], f"ends at {num_steps}, told []"]
        assert stops[0].endswith(f"told ['{_STOPS[how]}']")
        assert [int(line) for line in lines if line.isdecimal()] == list(range(1, num_steps + 1))
    assert "stopped (the step ended with 0); back into the queue" in job.output()


_TRAINING = "--steps 24 --width 32 --batch 8 --log-every 1 --save-every 8 --digest".split()
_TRAINED = "ends at step 24 of 24"


def weights(output: str, num_ranks: int) -> set[str]:
    """Digests of the weights at the end, of all ranks; each line is labelled with its rank."""
    lines = re.findall(r"^(\d): rank \1: weights ([0-9a-f]{32})", output, re.MULTILINE)
    last = dict(lines[-num_ranks:])
    assert sorted(last) == [str(rank) for rank in range(num_ranks)], output
    return set(last.values())


@pytest.mark.slow  # a job that is stopped, and the training without Slurm, have tests of their own
@pytest.mark.timeout(240)  # two trainings, one of them in two parts
@pytest.mark.parametrize(
    ("template", "how", "parallel", "ranks_per_node"),
    [("torchrun", "time-limit", "hsdp", 2), ("srun", "requeue", "fsdp", 1)],
)
def test_a_training_that_is_stopped_ends_with_the_same_weights(
    template: str, how: str, parallel: str, ranks_per_node: int, tmp_path: Path
) -> None:
    training, num_ranks = [*_TRAINING, "--parallel", parallel], 2 * ranks_per_node
    program = ["launch/train.py", *training, "--pause", "0.2", "--workers", "1"]
    shape = {"nodes": 2, "ranks_per_node": ranks_per_node, "folder": tmp_path}
    job = Job(template, program, **shape, **forking_variables())
    job.until(lambda: "step 10:" in job.output())
    if how == "requeue":
        slurm("scontrol", "requeue", job.id)
    else:
        slurm("scancel", "--batch", "--signal=USR1", job.id)
    job.until(lambda: job.is_over() and _TRAINED in job.output())
    assert job.fact("Restarts") == "1"
    begins = [int(step) for step in re.findall(r"begins at step (\d+) of 24", job.output())]
    assert len(begins) == 2
    assert begins[1] >= 10, "it saved when it was stopped"
    assert "DataLoader worker" not in job.output()
    assert weights(job.output(), num_ranks) == weights_of_a_training(num_ranks, tmp_path / "alone", *training)


@pytest.mark.parametrize(
    ("template", "num_cores"),
    [
        ("torchrun", 64),  # of a node, for all its ranks: a task of Slurm's is the launcher
        ("srun", 8),  # of a rank
    ],
)
def test_slurm_would_take_the_template_as_it_is(template: str, num_cores: int) -> None:
    path = _ROOT / "launch" / f"slurm_{template}.sbatch"
    said = slurm("sbatch", "--test-only", str(path))
    shape = rf"using {2 * num_cores} processors on nodes {HOST_1[:-1]}\[1-2\] in partition batch"
    assert re.search(rf"Job \d+ to start at \S+ {shape}", said)


def test_a_program_that_fails_ends_the_job(tmp_path: Path) -> None:
    job = Job("srun", ["-c", "raise SystemExit(3)"], nodes=1, ranks_per_node=1, folder=tmp_path)
    with pytest.raises(AssertionError, match="the job is FAILED"):
        job.until(job.is_over)
    assert job.fact("ExitCode") == "3:0"


# It is stopped as soon as it runs, and ends with 1; in its fourth life with 0.
_STOPPED = """
import os, pathlib, signal, subprocess, sys
folder = pathlib.Path(sys.argv[1])
life = int(os.environ.get("SLURM_RESTART_COUNT", 0))
if life == 3:
    sys.exit()
(folder / ".pending" / "data").write_text(str(life))
if sys.argv[2:]:
    (folder / "step" / "data").write_text(str(life))
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(1))
subprocess.run(["scancel", "--batch", "--signal=USR1", os.environ["SLURM_JOB_ID"]], check=True)
signal.pause()
"""


@pytest.mark.slow
def test_returns_without_a_save_are_limited(tmp_path: Path) -> None:
    templates = [(_ROOT / "launch" / f"slurm_{name}.sbatch").read_text() for name in ("torchrun", "srun")]
    limit, other = [re.findall(r"^# The limit of returns.*?\n\n", text, re.M | re.S) for text in templates]
    assert limit == other != []
    jobs = {}
    for template, saves in (("torchrun", False), ("srun", True)):  # a node for each; the lines are the same
        folder = tmp_path / f"{template}-{saves}"
        for name in ("step", ".pending"):
            (folder / "checkpoints" / name).mkdir(parents=True)
        program = folder / "stopped.py"
        program.write_text(_STOPPED)
        words = [str(program), str(folder / "checkpoints"), *(["saves"] if saves else [])]
        given = {"MAX_RETURNS": "1", "CHECKPOINTS": str(folder / "checkpoints"), "MAX_RESTARTS": "0"}
        jobs[folder, saves] = Job(template, words, nodes=1, ranks_per_node=1, folder=folder, **given)
    for (folder, saves), job in jobs.items():
        if saves:
            job.until(job.is_over)
            assert job.fact("Restarts") == "3"
        else:
            with pytest.raises(AssertionError, match="returned 2 times without a save: ends"):
                job.until(job.is_over)
            assert (job.fact("JobState"), job.fact("Restarts")) == ("FAILED", "2")
        assert list(folder.glob(".progress-*")) == []


@pytest.mark.slow
def test_a_member_of_an_array_comes_back_alone(tmp_path: Path) -> None:
    arrays = []
    for template in ("srun", "torchrun"):  # whose ranks start later
        folder = tmp_path / template
        for member in "01":
            (folder / member).mkdir(parents=True)
        program = [str(_TRAPPER), str(folder / "%a"), "100"]
        shape = {"nodes": 1, "ranks_per_node": 1, "folder": folder, "options": ["--array=0-1"]}
        array = Job(template, program, **shape, **forking_variables())
        arrays.append((array, [folder / member / "0.log" for member in "01"]))
    stopped = {}
    for array, logs in arrays:
        array.until(lambda logs=logs: all(log.exists() and "\n5\n" in log.read_text() for log in logs))
        # The one whose number is the array's.
        stopped[array] = next(n for n in range(2) if array.member(n, "JobId") == array.id)
        slurm("scancel", "--batch", "--signal=USR1", f"{array.id}_{stopped[array]}")
    for array, logs in arrays:
        array.until(lambda logs=logs: all("ends at 100, told []" in log.read_text() for log in logs))
        array.until(lambda array=array: all(array.member(n, "JobState") == "COMPLETED" for n in range(2)))
        again = stopped[array]
        assert [array.member(n, "Restarts") for n in range(2)] == [str(int(n == again)) for n in range(2)]
        assert logs[1 - again].read_text().startswith("begins at 0\n1\n")
        assert "begins" not in logs[1 - again].read_text()[1:]


def test_a_binding_of_cores_is_sruns(tmp_path: Path) -> None:
    job = Job("srun", ["-c", "0"], nodes=1, ranks_per_node=1, folder=tmp_path, CPU_BIND="rubbish")
    with pytest.raises(AssertionError, match='unrecognized --cpu-bind argument "rubbish"'):
        job.until(job.is_over)


# Takes apptainer's options as the template gives them; Debian has no apptainer.
_RUNTIME = """#!/bin/bash
[[ "$1 $2 $3 $4 $6" == "exec --bind /a,/b:/c --pwd train.sif" ]] || exit 9
cd "$5" && shift 6 && IN_CONTAINER=yes exec "$@"
"""
_ENVIRONMENT = """
import os
print(*(os.environ[name] for name in "IN_CONTAINER GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME NCCL_DEBUG".split()))
"""


def test_a_container_and_settings_of_the_network_reach_the_ranks(tmp_path: Path) -> None:
    runtime, program = tmp_path / "apptainer", tmp_path / "environment.py"
    runtime.write_text(_RUNTIME)
    runtime.chmod(0o755)
    program.write_text(_ENVIRONMENT)
    given = {"IMAGE": "train.sif", "RUNTIME": str(runtime), "MOUNTS": "/a,/b:/c", "NCCL_DEBUG": "INFO"}
    job = Job("srun", ["environment.py"], nodes=2, ranks_per_node=1, folder=tmp_path, **given)
    job.until(job.is_over)
    assert sorted(job.output().splitlines()) == [f"{rank}: yes eth0 eth0 INFO" for rank in range(2)]


def test_ranks_that_fail_are_started_anew_as_often_as_was_asked(tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text('import os\nexit("life " + os.environ["TORCHELASTIC_RESTART_COUNT"])\n')
    given = {"MAX_RESTARTS": "1", **forking_variables()}
    job = Job("torchrun", [str(program)], nodes=1, ranks_per_node=2, folder=tmp_path, **given)
    with pytest.raises(AssertionError, match="the job is FAILED"):
        job.until(job.is_over)
    lives = re.findall(r"^[01]: life (\d)$", job.output(), re.MULTILINE)
    assert set(lives) == {"0", "1"}, job.output()


_FAILING = """
import sys
import torch
import fastload
fastload.world.initialize()
with fastload.CheckpointManager(sys.argv[1], memory=sys.argv[2], memory_every_steps=1) as manager:
    for step in (1, 2):
        assert manager.should_save(step)
        manager.save(step, {"weight": torch.full((1000,), float(step))})
        assert manager.latest() == step
    sys.exit(3)
"""


@pytest.mark.slow(but=["srun"])
@pytest.mark.parametrize("template", ["srun", "torchrun"])
def test_what_a_program_that_fails_has_in_memory_is_written(template: str, tmp_path: Path) -> None:
    program, root, memory = tmp_path / "fails.py", tmp_path / "root", tmp_path / "memory"
    program.write_text(_FAILING)
    memory.mkdir()
    given = {"MAX_RESTARTS": "0", "CHECKPOINTS": str(root), "MEMORY": str(memory), **forking_variables()}
    words = [str(program), str(root), str(memory)]
    job = Job(template, words, nodes=1, ranks_per_node=2, folder=tmp_path, **given)
    with pytest.raises(AssertionError, match="the job is FAILED"):
        job.until(job.is_over)
    assert f"{root}: step 2 written from memory" in job.output()
    assert [path.name for path in root.glob("step_*")] == ["step_00000002"]


@pytest.mark.slow
def test_torchrun_multi_starts_all_ranks_anew_when_one_is_killed(tmp_path: Path) -> None:
    site = 'INTERFACE=eth0 RANKS_PER_NODE=1 LOCAL_ADDR=$(hostname) exec "$@"'
    job = [str(_ROOT / "launch" / "torchrun_multi.sh"), HOST_1, "29400", "2"]
    job += [str(_TRAPPER), str(tmp_path), "40", "1"]
    lab("run", "--plain", "--hosts", "2", "--timeout", "45", "--", "bash", "-c", site, "bash", *job)
    logs = [(tmp_path / f"{rank}.log").read_text().splitlines() for rank in range(2)]
    begins = [[line for line in lines if line.startswith("begins")] for lines in logs]
    told = [[line for line in lines if line.endswith("told ['SIGTERM']")] for lines in logs]
    # The rank that was killed has saved nothing; torchrun tells the other to end, which saves.
    assert begins[1] == ["begins at 0", "begins at 0"]
    assert told[1] == []
    assert begins[0] == ["begins at 0", told[0][0].replace("ends", "begins").partition(",")[0]]
    assert [lines[-1] for lines in logs] == ["ends at 40, told []"] * 2
