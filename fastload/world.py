"""The ranks of a job: how they join it, and what an integration asks of them.

All of it works in a process without a process group, too, which is then rank 0 of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastload.base.tracebacks import short_tracebacks
from fastload.comm import group
from fastload.comm.launch import Launch, from_env, initialize
from fastload.comm.world import World
from fastload.errors import OptionError
from fastload.options import LoadOptions

__all__ = ["Launch", "agree", "from_env", "get_hosts", "get_rank", "initialize"]


@short_tracebacks
def get_rank(process_group: Any = None) -> int:
    """Returns this process's rank in a group, given as for `fastload.load`; 0 without torch.distributed."""
    return group.rank_in(process_group)


@short_tracebacks
def get_hosts(process_group: Any = None, *, timeout_s: float | None = None) -> list[str]:
    """Returns the host of each rank, by rank: ``NAME/ID``, the same for ranks on the same machine.

    A call of all ranks.

    Args:
        process_group: As for `fastload.load`.
        timeout_s: As for `agree`.

    Raises:
        PeerError: A rank did not answer in time.
    """
    with _call("asking for hosts", process_group, timeout_s) as ranks, ranks.step() as step:
        step.answer(ranks.node)
    return step.answers


@short_tracebacks
def agree(
    what: str, *works: Callable[[], Any], process_group: Any = None, timeout_s: float | None = None
) -> list[Any]:
    """Calls functions on all ranks; either all ranks return, or all raise with every cause.

    A call of all ranks. Each function has ended on all ranks before the next one begins. The results come
    back as from ``torch.distributed.all_gather_object``; no tensor of the group moves.

    Args:
        what: Name of what the ranks do, for errors.
        works: Functions without arguments, which may differ between ranks, in the same number on all ranks.
            The last one returns JSON; what the others return stays on their rank.
        process_group: As for `fastload.load`.
        timeout_s: Longest time without progress, in seconds; None for that of `LoadOptions`.

    Returns:
        What the last function returned on each rank.

    Raises:
        PeerError: A function raised on some rank, or returned what is no JSON, or a rank did not come in
            time. With one rank, its own error is raised.
        OptionError: There is no function, or the timeout cannot be used; in a group of several ranks, which
            may differ in this, a PeerError.
    """
    with _call(what, process_group, timeout_s) as ranks:
        for work in works[:-1]:
            with ranks.step():
                work()
        with ranks.step() as step:
            if not works:
                raise OptionError(f"{what}: there is no function to call")
            step.answer(works[-1]())
    return step.answers


@contextmanager
def _call(what: str, process_group: Any, timeout_s: float | None) -> Iterator[World]:
    """Forms the world of a call, which ends with the block."""
    with group.Meeting(process_group, what) as meeting:
        given = LoadOptions() if timeout_s is None else LoadOptions(timeout_s=timeout_s)
        meeting.choose(given, LoadOptions)
    with meeting.world.ending():
        yield meeting.world
