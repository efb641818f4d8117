"""Forms a world from a process group of torch.distributed, or from the environment of a launcher.

torchrun sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
``MASTER_PORT``. srun alone sets ``SLURM_*``, from which the address is derived. mpirun sets
``OMPI_COMM_WORLD_*`` (Open MPI) or ``PMI_*`` (MPICH, Intel MPI), without an address. If several have set
their variables, the innermost launcher counts: torchrun within mpirun or srun, mpirun within srun.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
import xxhash

from fastload.base.devices import is_accelerator, parse_device, with_index
from fastload.comm.cache import ConnectionCache, cache_of
from fastload.comm.hosts import require_neighbour
from fastload.comm.store import Member, StoreRendezvous
from fastload.comm.tree import TreeRendezvous, TreeState
from fastload.comm.world import World
from fastload.errors import OptionError, WorldError
from fastload.options import SETTINGS, LoadOptions, SaveOptions, StageOptions

_POLL_S = 0.01
_MEETING_S = 300.0  # hosts of a large job do not start in the same minute
_REACHING_S = 5.0  # within which a connection is either open or blocked
_LEAVING_S = 10.0  # for which an interrupted rank waits for the store to notify the others

# Default groups that met in a namespace that no other incarnation uses.
_separate_groups: WeakSet[Any] = WeakSet()


def members_of(group: dist.ProcessGroup | None) -> list[int] | None:
    """Returns the ranks of a group in the default group; None without a group."""
    return None if group is None else dist.get_process_group_ranks(group)


def backend_of(group: Any, device_type: str) -> str:
    """Returns the backend that moves tensors between devices of a type, such as ``nccl``; empty if none does.

    Gloo and MPI take device tensors by way of host memory, where fastload has a faster way.
    """
    if group is None or not dist.is_available():
        return ""
    for entry in dist.get_backend_config(group).split(","):
        device, _, backend = entry.rpartition(":")
        if device == device_type and backend not in ("gloo", "mpi", "fake", "undefined"):
            return backend
    return ""


def rank_in(process_group: Any) -> int:
    """Returns this process's rank in a group, given as for `join`; 0 without one."""
    group = _as_group(process_group)
    return 0 if group is None else dist.get_rank(group)


def join(process_group: Any = None, *, call: str, timeout_s: float) -> World:
    """Forms the world of the ranks of a group; without torch.distributed, of this process alone.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or None for the default group.
        call: Name of the call, such as ``saving to /a``.
        timeout_s: Longest wait without progress, in seconds.

    Raises:
        WorldError: This process is not in the group, or the mesh has several dimensions.
    """
    group = _as_group(process_group)
    if group is None or dist.get_world_size(group) == 1:
        return _world_of_one(group, call, timeout_s)
    members = dist.get_process_group_ranks(group)
    root = dist.distributed_c10d._get_default_store()
    # Groups with the same members differ, since their calls are not ordered.
    identity = json.dumps([group.group_name, members])
    name = f"{_incarnation()}/{xxhash.xxh3_64_hexdigest(identity.encode())}"
    return join_in(
        dist.PrefixStore(f"fastload/{name}", root),
        member_of(dist.get_rank(group), members),
        call=call,
        timeout_s=timeout_s,
        group=group,
        cache=cache_of(group),
    )


def _world_of_one(group: dist.ProcessGroup | None, call: str, timeout_s: float) -> World:
    return World(StoreRendezvous(dist.HashStore(), Member(0, 1), call=call, timeout_s=timeout_s), group=group)


def join_in(
    namespace: dist.Store,
    member: Member,
    *,
    call: str,
    timeout_s: float,
    group: dist.ProcessGroup | None = None,
    cache: ConnectionCache | None = None,
) -> World:
    """Forms the world of ranks in a namespace of a store that only they use.

    Args:
        namespace: The namespace.
        member: This rank.
        call: As for `join`.
        timeout_s: As for `join`.
        group: Their process group.
        cache: The connections between calls; None to meet in the store only.
    """
    state = cache.lasting(TreeState) if cache is not None else TreeState(connects=False)
    rendezvous = TreeRendezvous(namespace, state, member, call=call, timeout_s=timeout_s)
    world = World(rendezvous, group=group, cache=cache)
    with world.together():
        rendezvous.begin()
    return world


def meet(
    process_group: Any,
    what: str,
    options: Options | None,
    kind: type[Options],
    prepare: Callable[[Options], T],
) -> tuple[World, Options, T]:
    """Forms the world even if this rank has failed, so that the others learn of it.

    Args:
        process_group: As for `join`.
        what: Name of the call. Ranks that make another call are out of step.
        options: The caller's options; None for the defaults.
        kind: Their class.
        prepare: Prepares this rank, given the options; an exception it raises is raised on all ranks.

    Returns:
        The world, the options, and what `prepare` has returned.
    """
    timeout_s: float = SETTINGS["timeout_s"].default
    problem: BaseException | None = None
    try:
        chosen = options if options is not None else kind()
        if not isinstance(chosen, kind):
            raise OptionError(f"options= is a {type(chosen).__name__}: pass fastload.{kind.__name__}")
        timeout_s = chosen.timeout_s
        ready = prepare(chosen)
    except BaseException as error:
        problem = error
    try:
        if problem is None:
            return join(process_group, call=what, timeout_s=timeout_s), chosen, ready
        if is_leaving := not isinstance(problem, Exception):
            timeout_s = min(timeout_s, _LEAVING_S)
        world = join(process_group, call=what, timeout_s=timeout_s)
        with world.together():
            if is_leaving:
                raise problem
            world.agree(what, partial(_raise, problem))
    finally:
        problem = None  # else error → traceback → frame → error would keep all their memory alive
    raise AssertionError("the ranks agreed although this one failed")


def agree(process_group: Any, what: str, *works: Callable[[], Any], timeout_s: float) -> list[Any]:
    """Does work on all ranks of a group, in a separate call; returns the results of the last work.

    Args:
        process_group: As for `join`.
        what: As for `meet`.
        works: Pieces of work; all ranks end one before any begins the next. See `World.agree`.
        timeout_s: As for `join`.
    """
    world = join(process_group, call=what, timeout_s=timeout_s)
    with world.together():
        results = [world.agree(what, work) for work in works]
    world.acknowledge()
    return results[-1]


def member_of(rank: int, members: list[int]) -> Member:
    """Returns a rank of a group, with the host of the store that the group uses.

    Args:
        rank: Its number in the group.
        members: Ranks of the group in the job, whose rank 0 may host the store.
    """
    if _agent_hosts_store():
        return Member(rank, len(members), None, "the launcher that hosted it has ended")
    store_host = members.index(0) if 0 in members else None
    return Member(
        rank, len(members), store_host, "rank 0 of the job, which hosts it, was killed, stopped or cut off"
    )


def _incarnation() -> str:
    """Returns a prefix that distinguishes the keys of these ranks from those of earlier ones in the store.

    A launcher that shares its store counts its restarts. The counts of launchers differ once one has replaced
    another, so `initialize` uses a namespace instead.
    """
    if dist.group.WORLD in _separate_groups or not _agent_hosts_store():
        return "0"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _agent_hosts_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _raise(error: BaseException) -> NoReturn:
    raise error


def _as_group(process_group: Any) -> dist.ProcessGroup | None:
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise WorldError("process_group= is given but torch.distributed is not initialized")
        return None
    group: Any = process_group if process_group is not None else dist.group.WORLD
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise WorldError(
                f"process_group= is a DeviceMesh of {group.ndim} dimensions: pass one, such as mesh['dp']"
            )
        group = group.get_group()
    if dist.get_rank(group) < 0:
        raise WorldError(f"rank {dist.get_rank()} is not a member of process_group=")
    return group  # type: ignore[no-any-return]


# Joining the job


def initialize(device: str = "cpu") -> tuple[int, str]:
    """Joins the job that torchrun, mpirun or srun describes in the environment; without one, does nothing.

    Args:
        device: Device of the tensors. An accelerator without a number, such as ``cuda``, becomes the device
            of this rank's local rank.

    Returns:
        This process's rank, 0 without a job, and the device.

    Raises:
        OptionError: torch has no such device.
        WorldError: The environment is incomplete or contradicts itself (see `from_env`), or the ranks did
            not find each other, or cannot connect to each other (`PeerError`).
    """
    launch = from_env()
    target = parse_device(device)
    if is_accelerator(target) and target.index is None:
        # srun may show each task only its own device, as the first one.
        alone = launch.launcher == "srun" and torch.accelerator.device_count() == 1
        target = torch.device(target.type, 0 if alone else launch.local_rank)
    device = str(with_index(target))  # else the backend fails, with a traceback
    if launch.launcher == "none":
        return 0, device
    if not dist.is_initialized():
        _join_job(launch, backend=_backends(target.type))
    return dist.get_rank(), device


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
    if size == 1:
        for call in calls:
            yield _world_of_one(None, call, timeout_s)
        return
    with _meeting(launch):
        store = dist.PrefixStore("fastload/job", _store_of(launch))
    for call in calls:
        yield join_in(store, member_of(rank, list(range(size))), call=call, timeout_s=timeout_s)


def _join_job(launch: Launch, *, backend: str) -> None:
    with _meeting(launch):
        store = _store_of(launch)
        require_neighbour(
            store,
            launch.rank,
            launch.world_size,
            host=socket.gethostname(),
            num_local=launch.num_local_ranks or 1,
            limit_s=_REACHING_S,
        )
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size)
        _separate_groups.add(dist.group.WORLD)


def _store_of(launch: Launch) -> dist.Store:
    """Connects to the store of a job."""
    rank, size = launch.rank, launch.world_size
    store, _, _ = next(dist.rendezvous(launch.init_method, rank, size))
    return _in_this_incarnation(store, rank, size)


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
        while (found := store.add(f"{name}/ranks", 0)) < size:
            if time.monotonic() > deadline:
                raise RuntimeError(f"only {found} of {size} ranks came within {_MEETING_S:.0f} s")
            time.sleep(_POLL_S)
        store.set(f"{name}/all", "here")
        return dist.PrefixStore(name, store)
    name = ""
    while time.monotonic() < deadline:
        now = str(store.get("incarnation"), "ascii")
        if now != name:
            name, is_old = now, store.add(f"{now}/ranks", 1) > size
        if is_old:
            time.sleep(_POLL_S)
            continue
        with suppress(RuntimeError):  # torch's DistStoreError is one
            store.wait([f"{name}/all"], timedelta(seconds=1))
            return dist.PrefixStore(name, store)
    raise RuntimeError(f"rank 0 did not say within {_MEETING_S:.0f} s that all ranks have come")


# The environment of a launcher

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
        """Where the ranks meet, as ``torch.distributed.init_process_group`` takes it."""
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"tcp://{host}:{self.master_port}"


_ALONE = Launch(0, 1, 0, None, "", 0, "none")


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
    return _ALONE


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
        return _ALONE
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


T = TypeVar("T")
Options = TypeVar("Options", LoadOptions, SaveOptions, StageOptions)
