"""Slurm in the lab: munged and slurmctld on the first host, one slurmd on every host. See lab.py.

Nodes have the lab's real host names and addresses, each slurmd listens on its own host, and jobs run
inside of the host's namespaces. Everything Slurm writes is below the lab's state directory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from network import LabError, State, host_name, inside
from processes import end_processes, is_running, pids_in_namespaces, pids_of_run
from services import LAB_DIR, NAME, lab_env, start

SLURM = LAB_DIR / "slurm"
CONF = SLURM / "slurm.conf"
HEAD = host_name(1)
SOCKET = SLURM / "munge.socket"
MARK = f"slurm-{NAME}"  # in the environment of the daemons and of all that they start
START_DEADLINE_S = 20.0
STEPS_DEADLINE_S = 5.0
CORES = 64  # that each node says it has; nobody is bound to any

# Two partitions: a job in `urgent` preempts one in `batch`, which has the grace time to save.
SLURM_CONF = """\
ClusterName=lab
SlurmctldHost={head}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket},cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
PropagateResourceLimits=NONE
NodeName={nodes} CPUs={cores} State=UNKNOWN
PartitionName=batch Nodes={nodes} Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes={nodes} PriorityTier=2 PreemptMode=OFF
"""


def up(num_hosts: int, state: State) -> int:
    """Starts the daemons and returns when every node is idle."""
    if not 1 <= num_hosts <= state["num_hosts"]:
        raise LabError(f"1 to {state['num_hosts']} of the lab's hosts, not {num_hosts}")
    if missing := [
        tool for tool in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(tool) is None
    ]:
        raise LabError(f"missing: {', '.join(missing)}; run scripts/lab/setup")
    if SLURM.exists():
        raise LabError("Slurm is up already (or half made); end it with scripts/lab/slurm_down")
    for folder in (SLURM, SLURM / "state"):
        folder.mkdir(mode=0o755)
    os.environ["FASTLOAD_LAB_RUN"] = MARK
    try:
        _start_daemons([host_name(number) for number in range(1, num_hosts + 1)])
    except BaseException:
        down()
        raise
    print(f"{num_hosts} nodes, idle; scripts/lab/slurm -- sbatch ...")
    return 0


def down() -> int:
    """Ends the jobs, the daemons and whatever they started, and removes what they wrote."""
    if CONF.exists():
        # A step ends fast while its daemons live; whatever happens here, it ends below.
        cancel = [*inside(HEAD), "timeout", "5", "scancel", "--full", "--signal=KILL", "--user=root"]
        subprocess.run(cancel, capture_output=True, check=False, env=_env())
        deadline = time.monotonic() + STEPS_DEADLINE_S
        while _stepds() and time.monotonic() < deadline:
            time.sleep(0.05)
    end_processes(lambda: {*pids_of_run(MARK), *_stepds()})
    if SLURM.exists():
        shutil.rmtree(SLURM)
    return 0


def _stepds() -> list[int]:
    """What runs the steps of jobs; it has an environment of its own, without the mark."""
    found = []
    for pid in pids_in_namespaces():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text() == "slurmstepd\n" and is_running(pid):
                found.append(pid)
    return found


def command(words: Sequence[str]) -> int:
    """Becomes sbatch, squeue, scontrol or whatever else, as a user on the first host types it."""
    if not CONF.exists():
        raise LabError("Slurm is not up; start it with scripts/lab/slurm_up")
    os.execvpe("ip", [*inside(HEAD), *words], _env())


def _start_daemons(hosts: Sequence[str]) -> None:
    key = SLURM / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    CONF.write_text(
        SLURM_CONF.format(head=HEAD, nodes=",".join(hosts), cores=CORES, folder=SLURM, socket=SOCKET)
    )
    # Nothing here uses cgroups, but slurmd looks for their file system, which a host of the lab lacks.
    (SLURM / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    # One munged serves all: a socket in the file system is the same in every network namespace.
    munged = ["munged", "--foreground", f"--key-file={key}", f"--socket={SOCKET}", "--force"]
    munged += [f"--{kind}-file={SLURM}/munged.{kind}" for kind in ("pid", "seed", "log")]
    pids = {"munged": start(HEAD, munged)}
    _wait_until(SOCKET.exists, pids)
    pids["slurmctld"] = start(HEAD, ["slurmctld", "-D", "-f", str(CONF)])
    pids |= {f"slurmd on {host}": start(host, ["slurmd", "-D", "-f", str(CONF)]) for host in hosts}
    _wait_until(lambda: _states() == {"idle": len(hosts)}, pids)


def _states() -> Counter[str]:
    """How many nodes are in each state; none while slurmctld does not answer."""
    sinfo = [*inside(HEAD), "sinfo", "--noheader", "--Node", "--partition=batch", "--format=%T"]
    done = subprocess.run(sinfo, capture_output=True, text=True, check=False, env=_env())
    return Counter(done.stdout.split())


def _wait_until(ready: Callable[[], bool], pids: Mapping[str, int]) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while not ready():
        ended = [name for name, pid in pids.items() if not is_running(pid)]
        if ended or time.monotonic() > deadline:
            logs = "".join(path.read_text(errors="replace")[-2000:] for path in sorted(SLURM.glob("*.log")))
            raise LabError(
                f"{', '.join(ended) or 'Slurm'} did not come up; nodes are {dict(_states())}:\n{logs}"
            )
        time.sleep(0.1)


def _env() -> dict[str, str]:
    """A user's environment; which interface Gloo and NCCL take is for the job to say."""
    env = lab_env() | {"SLURM_CONF": str(CONF), "FASTLOAD_LAB_RUN": MARK}
    return {key: value for key, value in env.items() if not key.endswith("_SOCKET_IFNAME")}
