"""Joins the job that a launcher describes in the environment.

torchrun sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
``MASTER_PORT``. srun alone sets ``SLURM_*``, from which the address is derived. mpirun sets
``OMPI_COMM_WORLD_*`` (Open MPI) or ``PMI_*`` (MPICH, Intel MPI), without an address. If several have set
their variables, the innermost launcher counts: torchrun within mpirun or srun, mpirun within srun.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from fastload.base.devices import is_accelerator, parse_device, with_index
from fastload.base.threads import within
from fastload.base.tracebacks import short_tracebacks
from fastload.comm.group import join_in, member_of, separate_groups
from fastload.comm.hosts import Peer, host_addresses, interface_address, listener_at, require_reachable
from fastload.comm.world import World
from fastload.errors import FastloadError, OptionError, PeerError, WorldError, from_wire, some_of, to_wire

_POLL_S = 0.01
_MEETING_S = 300.0  # hosts of a large job do not start in the same minute
_REACHING_S = 5.0  # within which a connection is either open or blocked
_CONNECTING_S = 0.1  # for each rank; more than Gloo takes
_GOING_ON_S = 20.0  # within which a rank that has come takes its next step, unless it was killed

# The environment

# Below the ports that Linux gives to outgoing connections (32768 and up), above those of services.
_FIRST_PORT = 20000
_NUM_PORTS = 10000
_STEPS_APART = 16  # ports from one job to the next
# Rank, number of ranks, rank on its host, number of ranks there.
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


@dataclass(frozen=True, slots=True)
class Launch:
    """This process's place in its job.

    Attributes:
        rank: This process's rank.
        world_size: Number of ranks of the job.
        local_rank: This process's rank among those of its host.
        num_local_ranks: Number of ranks on this host, or None where the launcher does not say.
        master_addr: Name or address of the host where the ranks meet; empty without a launcher.
        master_port: The port there; 0 without a launcher.
        launcher: ``torchrun`` (or whatever else sets ``RANK`` and ``WORLD_SIZE``), ``mpirun``, ``srun`` or
            ``none``.
    """

    rank: int
    world_size: int
    local_rank: int
    num_local_ranks: int | None
    master_addr: str
    master_port: int
    launcher: Literal["torchrun", "mpirun", "srun", "none"]

    @property
    def init_method(self) -> str:
        """Where the ranks meet, as an ``init_method`` of torch.distributed."""
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"tcp://{host}:{self.master_port}"


ALONE = Launch(0, 1, 0, None, "", 0, "none")


@short_tracebacks
def from_env() -> Launch:
    """Reads what torchrun, or mpirun or srun alone, has set in the environment of this process.

    ``MASTER_ADDR`` and ``MASTER_PORT`` beat what is derived from Slurm's list of nodes and job number.

    Returns:
        This process's place. Without a launcher it is a world of 1; so it is in a batch script, outside
        of srun, whatever the number of tasks of the job.

    Raises:
        WorldError: A variable is missing, has a value that cannot be, or contradicts another.
    """
    if _get("RANK") or _get("WORLD_SIZE"):
        return _from_torchrun()
    if _get(_OPEN_MPI[1]):
        return _from_mpirun(*_OPEN_MPI)
    if _get(_MPICH[1]) and _get(_MPICH[2]):  # srun may set the first two
        return _from_mpirun(*_MPICH)
    if _get("SLURM_STEP_ID") and _get("SLURM_PROCID"):
        return _from_srun()
    return ALONE


def _from_torchrun() -> Launch:
    _require("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    # Operators that start one process on each host set no local variables.
    place = _place("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return Launch(*place, _get("MASTER_ADDR"), _port("MASTER_PORT"), "torchrun")


def _from_mpirun(rank_name: str, size_name: str, local_name: str, num_local_name: str) -> Launch:
    _require(rank_name, size_name, local_name, num_local_name)
    place = rank, size, *_ = _place(rank_name, size_name, local_name, num_local_name)
    if _get("MASTER_ADDR") and _get("MASTER_PORT"):
        return Launch(*place, _get("MASTER_ADDR"), _port("MASTER_PORT"), "mpirun")
    if size == 1:
        return ALONE
    raise WorldError(
        f"{rank_name}={rank}, {size_name}={size}, but MASTER_ADDR and MASTER_PORT are not set: mpirun "
        "does not say where the ranks meet; set them to the host of rank 0 and a free port there "
        "(mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT, or with MPICH -genv NAME VALUE)"
    )


def _place(
    rank_name: str, size_name: str, local_name: str, num_local_name: str
) -> tuple[int, int, int, int | None]:
    """Returns rank, number of ranks, local rank, and number of local ranks, from variables that agree."""
    rank, size = _number(rank_name), _number(size_name, least=1)
    _check_below(rank_name, rank, size_name, size)
    local_rank = _number(local_name) if _get(local_name) else 0
    num_local = _number(num_local_name, least=1) if _get(num_local_name) else None
    if num_local is not None:
        _check_below(local_name, local_rank, num_local_name, num_local)
        if num_local > size:
            raise WorldError(f"{num_local_name}={num_local} contradicts {size_name}={size}: it is above")
    return rank, size, local_rank, num_local


def _from_srun() -> Launch:
    # The job's number of tasks need not be that of the step.
    counted = "SLURM_STEP_NUM_TASKS" if _get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    _require("SLURM_PROCID", counted, "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID")
    rank, size, node = _number("SLURM_PROCID"), _number(counted, least=1), _number("SLURM_NODEID")
    _check_below("SLURM_PROCID", rank, counted, size)
    local_rank, num_local = _number("SLURM_LOCALID"), _tasks_of(node)
    if num_local is not None:
        _check_below("SLURM_LOCALID", local_rank, f"SLURM_STEP_TASKS_PER_NODE on node {node}", num_local)
    address = _get("MASTER_ADDR")
    if not address and rank == 0 and node != 0:
        raise WorldError(
            f"SLURM_PROCID=0 has SLURM_NODEID={node}: rank 0 is not on the first node, where the ranks would "
            "look for it; set MASTER_ADDR to the node of rank 0"
        )
    return Launch(
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        num_local_ranks=num_local,
        master_addr=address or _first_host(),
        master_port=_port("MASTER_PORT") if _get("MASTER_PORT") else _derived_port(),
        launcher="srun",
    )


def _first_host() -> str:
    """The first name of a list such as ``rack[2-3]-[07,09],login``; Slurm puts rank 0 there."""
    nodes = _get("SLURM_STEP_NODELIST") or _get("SLURM_JOB_NODELIST")
    match = re.match(r"(?:[^\[\],]|\[[^\[\]]+\])+", nodes)
    if match is None:
        raise WorldError(
            f"SLURM_STEP_NODELIST={nodes!r} names no host where the ranks could meet: set MASTER_ADDR"
        )
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", match[0])


def _derived_port() -> int:
    """The same on all ranks, and another for jobs, and for steps of a job, that may run side by side."""
    return _FIRST_PORT + (_STEPS_APART * _number("SLURM_JOB_ID") + _number("SLURM_STEP_ID")) % _NUM_PORTS


def _tasks_of(node: int) -> int | None:
    """The number of tasks on a node, from a list such as ``4(x2),3``: two nodes of 4, one of 3."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", _get("SLURM_STEP_TASKS_PER_NODE")):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node < len(counts) else None


def _get(name: str) -> str:
    """A variable's text; one that is set to nothing counts as not set."""
    return os.environ.get(name, "").strip()


def _require(*names: str) -> None:
    missing = [name for name in names if not _get(name)]
    if missing:
        there = ", ".join(f"{name}={_get(name)}" for name in names if _get(name))
        raise WorldError(
            f"{', '.join(missing)} not set, but {there}: torchrun sets all of RANK, WORLD_SIZE, LOCAL_RANK, "
            "MASTER_ADDR and MASTER_PORT, mpirun all of OMPI_COMM_WORLD_* or PMI_*, srun all of SLURM_*"
        )


def _number(name: str, *, least: int = 0) -> int:
    text = _get(name)
    if not re.fullmatch(r"\d{1,18}", text) or int(text) < least:
        raise WorldError(f"{name}={text!r}: must be a whole number of at least {least}")
    return int(text)


def _check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise WorldError(f"{name}={value} contradicts {limit_name}={limit}: it must be below")


def _port(name: str) -> int:
    port = _number(name, least=1)
    if port > 65535:
        raise WorldError(f"{name}={port}: must be a port, 1 to 65535")
    return port


# Joining the job


@short_tracebacks
def initialize(device: str = "cpu") -> tuple[int, str]:
    """Joins the job that torchrun, mpirun or srun describes in the environment; without one, does nothing.

    Args:
        device: Device of the tensors. An accelerator without a number, such as ``cuda``, becomes the device
            of this rank's local rank.

    Returns:
        This process's rank, 0 without a process group, and the device.

    Raises:
        OptionError: torch has no such device on this rank.
        WorldError: The environment of this rank is incomplete or contradicts itself (see `from_env`), so that
            it cannot meet the others; or the ranks did not find each other.
        PeerError: Ranks cannot connect to each other, or another rank has no such device.
    """
    launch, problem = from_env(), None
    target = torch.device("cpu")
    try:
        target = _device_of(launch, device)
    except OptionError as error:
        problem = error
    must_join = launch.launcher != "none" and not dist.is_initialized()
    if problem is not None and must_join and launch.world_size > 1:
        _refuse_job(launch, problem)
    if problem is not None:
        raise problem
    if must_join:
        _join_job(launch, backend=_backends(target.type))
    return (dist.get_rank() if dist.is_initialized() else 0), str(target)


def _device_of(launch: Launch, device: str) -> torch.device:
    """Returns the device of this rank.

    Raises:
        OptionError: torch has no such device.
    """
    target = parse_device(device)
    if is_accelerator(target) and target.index is None:
        # srun may show each task only its own device, as the first one.
        alone = launch.launcher == "srun" and torch.accelerator.device_count() == 1
        target = torch.device(target.type, 0 if alone else launch.local_rank)
    return with_index(target)  # else the backend fails, with a traceback


def _backends(device_type: str) -> str:
    """Returns the backends for `init_process_group`: Gloo for host memory, torch's choice for devices."""
    if device_type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


def join_job(launch: Launch, *calls: str, timeout_s: float) -> Iterator[World]:
    """Forms worlds of a job's ranks in their store alone, without connections or a backend.

    Args:
        launch: This process's place.
        calls: Names of the calls, each with its own world.
        timeout_s: As for `join`.

    Raises:
        WorldError: The ranks did not find each other.
    """
    rank, size = launch.rank, launch.world_size
    if size > 1:
        with _meeting(launch):
            store = dist.PrefixStore("fastload/job", _store_of(launch))
    for call in calls:
        namespace = store if size > 1 else dist.HashStore()
        yield join_in(namespace, member_of(rank, list(range(size))), call=call, timeout_s=timeout_s)


def _join_job(launch: Launch, *, backend: str) -> None:
    rank, size = launch.rank, launch.world_size
    with _meeting(launch):
        store = _store_of(launch)
        _require_ready(store, launch)
        within(
            _MEETING_S + size * _CONNECTING_S,
            f"rank {rank} of {size}: connecting to the others, one of which may have been killed,",
            lambda: dist.init_process_group(backend, store=store, rank=rank, world_size=size),
        )
        separate_groups.add(dist.group.WORLD)


def _refuse_job(launch: Launch, problem: FastloadError) -> NoReturn:
    """Tells the other ranks, which wait for this one, why it does not join."""
    with suppress(WorldError), _meeting(launch):
        _require_ready(_store_of(launch), launch, problem)
    raise problem


def _store_of(launch: Launch) -> dist.Store:
    """Connects to the store of a job."""
    rank, size = launch.rank, launch.world_size
    limit = timedelta(seconds=_MEETING_S)  # torch's own is half an hour
    store, _, _ = next(dist.rendezvous(launch.init_method, rank, size, timeout=limit))
    incarnation = _in_this_incarnation(store, rank, size)
    store.set_timeout(default_pg_timeout)
    return incarnation


@contextmanager
def _meeting(launch: Launch) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's DistError is one
        cause = str(error).partition("\n")[0]
        where = f"{launch.master_addr}:{launch.master_port}"
        raise WorldError(
            f"rank {launch.rank} of {launch.world_size} did not meet the others at {where}: {cause}"
        ) from error


def _in_this_incarnation(store: dist.Store, rank: int, size: int) -> dist.Store:
    """Returns a namespace of the store that only this incarnation of the ranks uses.

    torchrun keeps its store, with the old addresses of the ranks, when it restarts them on all hosts or on
    one that replaces another. A rank that reads an old address waits forever. So rank 0 draws a name for this
    incarnation and waits until all ranks have counted themselves under it. A rank that reads an old name
    finds either that its count is complete, or that rank 0 draws another one.

    Raises:
        RuntimeError: Some rank did not come in time.
    """
    deadline = time.monotonic() + _MEETING_S
    if rank == 0:
        name = secrets.token_hex(8)
        store.set("incarnation", name)
        store.add(f"{name}/ranks", 1)
        while (num_here := store.add(f"{name}/ranks", 0)) < size:
            if time.monotonic() > deadline:
                raise RuntimeError(f"only {num_here} of {size} ranks came within {_MEETING_S:.0f} s")
            store.add(f"{name}/beats", 1)
            time.sleep(_POLL_S)
        store.set(f"{name}/all", "here")
        return dist.PrefixStore(name, store)
    name = ""
    while time.monotonic() < deadline:
        now = str(store.get("incarnation"), "ascii")
        if now != name:
            name, is_old, beats = now, store.add(f"{now}/ranks", 1) > size, _Beats()
        if is_old:
            time.sleep(_POLL_S)
            continue
        with suppress(RuntimeError):  # torch's DistStoreError is one
            store.wait([f"{name}/all"], timedelta(seconds=_GOING_ON_S / 20))
            return dist.PrefixStore(name, store)
        if beats.have_stopped(store.add(f"{name}/beats", 0)):
            raise RuntimeError("rank 0 was killed or stopped while it waited for others")
    raise RuntimeError(f"rank 0 did not say within {_MEETING_S:.0f} s that all ranks have come")


class _Beats:
    """What a rank sees of rank 0, which counts on while it waits for others.

    A count that has never moved proves nothing: it may be that of an earlier incarnation.
    """

    def __init__(self) -> None:
        self._last: int | None = None
        self._moved_at: float | None = None

    def have_stopped(self, count: int) -> bool:
        """Whether the count has moved, and then no more; asked now and then."""
        if self._last not in (None, count):
            self._moved_at = time.monotonic()
        self._last = count
        return self._moved_at is not None and time.monotonic() - self._moved_at > _GOING_ON_S


def _require_ready(store: Any, launch: Launch, problem: FastloadError | None = None) -> None:
    """Checks that each rank can join, and connect to one on the next host, before Gloo connects all of them.

    What is wrong is known here at once, and by name: Gloo waits for half an hour.

    Args:
        store: The store of the job.
        launch: This process's place.
        problem: Why this rank cannot join, or None.

    Raises:
        PeerError: Some ranks cannot join or connect; the same on all ranks.
    """
    rank, size, host = launch.rank, launch.world_size, socket.gethostname()
    listener = next(filter(None, map(listener_at, _gloo_addresses())), None)
    with contextlib.closing(listener) if listener is not None else contextlib.nullcontext():
        where = listener.getsockname()[:2] if listener is not None else None
        store.set(f"reach/{rank}", json.dumps([host, where]))
        other = (rank + (launch.num_local_ranks or 1)) % size
        _await(store, f"reach/{other}")
        its_host, there = json.loads(store.get(f"reach/{other}"))
        if where is not None and there is not None and where[0] != there[0]:
            try:
                require_reachable(rank, [Peer(other, its_host, *there)], limit_s=_REACHING_S)
            except WorldError as error:
                problem = problem or error
        if problem is not None:
            store.append("reach/problems", json.dumps([rank, host, to_wire(problem)]) + "\n")
        _meet(store, "tried", size)
    if not store.check(["reach/problems"]):
        return
    lines = str(store.get("reach/problems"), "ascii").splitlines()
    problems = sorted((json.loads(line) for line in lines), key=lambda problem: problem[0])
    _meet(store, "read", size)  # before a rank exits that hosts the store
    failures = {rank: from_wire(wire) for rank, _, wire in problems}
    cannot_connect = all(type(error) is WorldError for error in failures.values())
    raise PeerError(
        f"the ranks cannot {'connect to each other' if cannot_connect else 'join the job'}: "
        + some_of(f"rank {rank} on {host}: {failures[rank]}" for rank, host, _ in problems),
        failures,
    )


def _meet(store: Any, what: str, size: int) -> None:
    if store.add(f"reach/num_{what}", 1) == size:
        store.set(f"reach/all_{what}", "")
    _await(store, f"reach/all_{what}")


def _await(store: Any, key: str) -> None:
    """Waits for what ranks set that have come.

    Raises:
        RuntimeError: It was not set in time.
    """
    store.wait([key], timedelta(seconds=_GOING_ON_S))


def _gloo_addresses() -> list[str]:
    """Returns the addresses that Gloo publishes for this rank."""
    address = interface_address()
    addresses = [address] if address is not None else host_addresses()
    return [one for one in addresses if not ipaddress.ip_address(one.partition("%")[0]).is_loopback]
