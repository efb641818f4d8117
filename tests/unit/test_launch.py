"""What the environment says of a rank: torchrun's words, srun's, and where they cannot be true."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.comm.launch import Launch, from_env
from fastload.errors import WorldError

_TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
_SRUN = {
    "SLURM_JOB_ID": "4217",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_NODELIST": "node[01-03,7]",
    "SLURM_STEP_NODELIST": "node[02-03]",
}
_BATCH = {name: _SRUN[name] for name in _SRUN if "STEP" not in name} | {"SLURM_PROCID": "0"}
_MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
_MPICH = dict(
    zip(("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), _MPIRUN.values(), strict=True)
)
_MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
_NAMES = [*_TORCHRUN, *_SRUN, *_MPIRUN, *_MPICH, "SLURM_STEP_NUM_TASKS"]


def launched(environment: dict[str, str]) -> Launch:
    with pytest.MonkeyPatch.context() as patch:
        for name in _NAMES:
            patch.delenv(name, raising=False)
        for name, text in environment.items():
            patch.setenv(name, text)
        return from_env()


def test_torchrun() -> None:
    assert launched(_TORCHRUN) == Launch(5, 8, 1, 4, "node1", 29500, "torchrun")


def test_one_process_on_each_host_needs_no_local_rank() -> None:
    environment = {name: text for name, text in _TORCHRUN.items() if not name.startswith("LOCAL")}
    assert launched(environment) == Launch(5, 8, 0, None, "node1", 29500, "torchrun")


def test_srun_meets_on_the_first_host_of_the_step() -> None:
    port = 20000 + (16 * 4217 + 2) % 10000
    assert launched(_SRUN) == Launch(5, 7, 1, 3, "node02", port, "srun")


def test_what_is_set_beats_what_is_derived() -> None:
    launch = launched(_SRUN | {"MASTER_ADDR": "fe80::1", "MASTER_PORT": "1234"})
    assert (launch.master_addr, launch.master_port) == ("fe80::1", 1234)
    assert launch.init_method == "tcp://[fe80::1]:1234"


def test_torchrun_inside_of_srun_is_torchrun() -> None:
    assert launched(_SRUN | _TORCHRUN).launcher == "torchrun"


@pytest.mark.parametrize("environment", [_MPIRUN, _MPICH, _SRUN | _MPIRUN, _SRUN | _MPICH])
def test_mpirun_needs_a_place_to_meet(environment: dict[str, str]) -> None:
    assert launched(environment | _MASTER) == Launch(5, 8, 1, 4, "node1", 29500, "mpirun")
    with pytest.raises(
        WorldError, match=r"MASTER_ADDR and MASTER_PORT are not set: .*mpirun -x MASTER_ADDR="
    ):
        launched(environment)
    assert launched(environment | _TORCHRUN).launcher == "torchrun"


def test_what_srun_sets_for_mpi_is_not_mpirun() -> None:
    assert launched(_SRUN | {"PMI_RANK": "5", "PMI_SIZE": "7", "PMIX_RANK": "5"}).launcher == "srun"


_ONE_OF_MPIRUN = dict(zip(_MPIRUN, "0101", strict=True))


@pytest.mark.parametrize("environment", [{}, _BATCH, {"RANK": "", "LOCAL_RANK": "3"}, _ONE_OF_MPIRUN])
def test_without_a_launcher_it_is_alone(environment: dict[str, str]) -> None:
    assert launched(environment) == Launch(0, 1, 0, None, "", 0, "none")


def test_the_number_of_tasks_is_that_of_the_step() -> None:
    assert launched(_SRUN | {"SLURM_STEP_NUM_TASKS": "6"}).world_size == 6


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set, but RANK=0"),
        ({"WORLD_SIZE": "8"}, "RANK, MASTER_ADDR, MASTER_PORT not set, but WORLD_SIZE=8"),
        (_TORCHRUN | {"RANK": "8"}, "RANK=8 contradicts WORLD_SIZE=8"),
        (_TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK=4 contradicts LOCAL_WORLD_SIZE=4"),
        (_TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 contradicts WORLD_SIZE=8"),
        (_TORCHRUN | {"RANK": "-1"}, "RANK='-1': must be a whole number of at least 0"),
        (_TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE='0': must be a whole number of at least 1"),
        (_TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT=65536: must be a port"),
        (_TORCHRUN | {"MASTER_PORT": ""}, "MASTER_PORT not set"),
        (_SRUN | {"SLURM_PROCID": "7"}, "SLURM_PROCID=7 contradicts SLURM_NTASKS=7"),
        (_SRUN | {"SLURM_NTASKS": ""}, "SLURM_NTASKS not set"),
        (_SRUN | {"SLURM_LOCALID": "3"}, "SLURM_LOCALID=3 contradicts SLURM_STEP_TASKS_PER_NODE on node 1=3"),
        (_SRUN | {"SLURM_PROCID": "0"}, "SLURM_PROCID=0 has SLURM_NODEID=1"),
        (_SRUN | {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "set MASTER_ADDR"),
        (_SRUN | {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID not set"),
    ],
    ids=str,
)
def test_what_cannot_be_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(WorldError, match=message.replace("[", r"\[")):
        launched(environment)


# Parts of a name in a list, each with what it is in the first name.
_NUMBERS = st.integers(0, 99).map(str)
_RANGES = st.lists(st.tuples(_NUMBERS, st.one_of(st.just(""), _NUMBERS.map("-{}".format))), min_size=1)
_BRACKETS = _RANGES.map(lambda ranges: (f"[{','.join(a + b for a, b in ranges)}]", ranges[0][0]))
_PARTS = st.one_of(
    st.sampled_from(["n", "gpu-", "-", "rack", "x86"]).map(lambda text: (text, text)), _BRACKETS
)
_HOSTS = st.lists(_PARTS, max_size=3).map(lambda parts: [("n", "n"), *parts])


@given(st.lists(_HOSTS, min_size=1, max_size=3))
def test_the_first_host_has_the_first_number_of_each_bracket(hosts: list[list[tuple[str, str]]]) -> None:
    listed = ",".join("".join(text for text, _ in host) for host in hosts)
    first = "".join(text for _, text in hosts[0])
    assert launched(_SRUN | {"SLURM_STEP_NODELIST": listed}).master_addr == first


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="scontrol is not installed")
@pytest.mark.parametrize("nodes", ["a", "a,b", "n[1-3,7]", "n[001-010]", "r[2-3]n[07,09]", "l-[5],n[1-2]"])
def test_the_first_host_is_the_one_that_slurm_shows(nodes: str, tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=none\nNodeName=none\n")
    command = ["scontrol", "show", "hostnames", nodes]
    environment = os.environ | {"SLURM_CONF": str(conf)}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert launched(_SRUN | {"SLURM_STEP_NODELIST": nodes}).master_addr == shown.stdout.splitlines()[0]
