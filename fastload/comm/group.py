"""Forms a world from a process group of torch.distributed, or in a namespace of a store."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
import xxhash

from fastload.comm.cache import ConnectionCache, cache_of
from fastload.comm.rendezvous import GroupState, StoreRendezvous
from fastload.comm.store import Member
from fastload.comm.tree import TreeRendezvous, TreeState
from fastload.comm.world import World
from fastload.errors import WorldError
from fastload.options import SETTINGS, OptionsT, chosen_options

_BACKENDS = ("nccl", "xccl")  # beside those that were registered with torch
_LEAVING_S = 10.0  # for which an interrupted rank waits for the store to notify the others

_DESTROYED = "the process group was destroyed (torch.distributed.destroy_process_group)"

separate_groups: WeakSet[Any] = WeakSet()
"""Default groups that met in a namespace that no other incarnation uses."""


_inherited: list[Any] = []  # the default group of the parent, in a forked child


def members_of(group: dist.ProcessGroup | None) -> list[int] | None:
    """Returns the ranks of a group in the default group; None without a group.

    Raises:
        WorldError: The group was destroyed meanwhile.
    """
    if group is None:
        return None
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        raise WorldError(f"{_DESTROYED}: open the checkpoint again, with a group that exists") from None


def backend_of(group: Any, device_type: str) -> str:
    """Returns the backend that moves tensors between devices of a type, such as ``nccl``; empty if none does.

    It is one that fastload can make communicators of. Gloo and MPI take device tensors by way of host memory,
    where fastload has a faster way.
    """
    if group is None or not dist.is_available():
        return ""
    for entry in dist.get_backend_config(group).split(","):
        device, _, backend = entry.rpartition(":")
        is_known = backend in _BACKENDS or backend.upper() in dist.Backend._plugins
        if device == device_type and is_known and backend != "fake":
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
        return join_in(dist.HashStore(), Member(0, 1), call=call, timeout_s=timeout_s, group=group)
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
    rendezvous: StoreRendezvous
    if cache is not None:
        state = cache.lasting(TreeState)
        rendezvous = TreeRendezvous(namespace, state, member, call=call, timeout_s=timeout_s)
    else:
        rendezvous = StoreRendezvous(namespace, GroupState(), member, call=call, timeout_s=timeout_s)
    world = World(rendezvous, group=group, cache=cache)
    with world.together():
        rendezvous.begin()
    return world


@contextmanager
def separate_call(process_group: Any, what: str, *, timeout_s: float) -> Iterator[World]:
    """Forms the world of a separate call, which ends with the block.

        with separate_call(None, "comparing digests", timeout_s=60) as world, world.step() as step:
            step.answer(digest())

    Args:
        process_group: As for `join`.
        what: Name of the call.
        timeout_s: As for `join`.
    """
    world = join(process_group, call=what, timeout_s=timeout_s)
    with world.ending():
        yield world


class Meeting:
    """The block in which this rank checks the arguments of a call, before it meets the others.

        with Meeting(process_group, "opening /a") as meeting:
            chosen = meeting.choose(options, LoadOptions)
        world = meeting.world

    An exception in the block is raised on all ranks, in the first step of the call.

    Args:
        process_group: As for `join`.
        what: Name of the call. Ranks that make another call are out of step.
    """

    def __init__(self, process_group: Any, what: str) -> None:
        self._process_group = process_group
        self._what = what
        self._timeout_s: float = SETTINGS["timeout_s"].default
        self._world: World | None = None

    def __enter__(self) -> Meeting:
        return self

    def choose(self, options: OptionsT | None, kind: type[OptionsT]) -> OptionsT:
        """Returns the caller's options, whose timeout is that of the call; the defaults for None.

        Raises:
            OptionError: As for `chosen_options`.
        """
        chosen = chosen_options(options, kind)
        self._timeout_s = chosen.timeout_s
        return chosen

    @property
    def world(self) -> World:
        """The ranks, after the block."""
        assert self._world is not None, "after the block"
        return self._world

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_leaving = error is not None and not isinstance(error, Exception)
        timeout_s = min(self._timeout_s, _LEAVING_S) if is_leaving else self._timeout_s
        try:
            world = self._world = join(self._process_group, call=self._what, timeout_s=timeout_s)
            if error is not None:
                with world.together(), world.step():
                    raise error
        finally:
            del kind, error, trace  # else error → traceback → frame → error would keep all their memory alive


def member_of(rank: int, members: list[int]) -> Member:
    """Returns a rank of a group, with the host of the store that the group uses.

    Args:
        rank: Its number in the group.
        members: Ranks of the group in the job, whose rank 0 may host the store.
    """
    if _agent_hosts_store():
        return Member(rank, len(members), None, "the launcher that hosted it has ended", store_stays=True)
    store_host = members.index(0) if 0 in members else None
    return Member(
        rank, len(members), store_host, "rank 0 of the job, which hosts it, was killed, stopped or cut off"
    )


def _incarnation() -> str:
    """Returns a prefix that distinguishes the keys of these ranks from those of earlier ones in the store.

    A launcher that shares its store counts its restarts. The counts of launchers differ once one has replaced
    another, so `initialize` uses a namespace instead.
    """
    if dist.group.WORLD in separate_groups or not _agent_hosts_store():
        return "0"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _agent_hosts_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


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
    try:
        rank = dist.get_rank(group)
    except ValueError as error:
        raise WorldError(f"process_group= is no group of this process, or was destroyed: {error}") from None
    if rank < 0:
        raise WorldError(f"rank {dist.get_rank()} is not a member of process_group=")
    if dist.group.WORLD in _inherited and dist.get_world_size(group) > 1:
        raise WorldError(
            f"this process was forked by rank {rank}, whose process group only the parent can use: call "
            "fastload in the parent, pass a process_group= of this rank alone, or start this process with "
            "the method spawn or forkserver"
        )
    return group  # type: ignore[no-any-return]


def _note_inherited() -> None:
    if dist.is_available() and dist.is_initialized():
        _inherited[:] = [dist.group.WORLD]


os.register_at_fork(after_in_child=_note_inherited)
