"""Observers: told of the stages and the ends of loads and saves, on each rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from fastload.base.registry import extension
from fastload.base.stopwatch import Stopwatch
from fastload.comm.world import World
from fastload.errors import FastloadError


class Observer(Protocol):
    """Observes calls of all ranks, on one of them: the loads of an open checkpoint, or a save.

    Its methods are called in this order, from `follow` on once more for each load; all but `begin` return at
    once, and raise nothing.
    """

    error: FastloadError | None
    """Why it could not do its work in the last call, which does not fail; or None."""

    def begin(self, hosts: Sequence[str]) -> None:
        """The ranks have opened a checkpoint, or agreed on a save. It may take steps, on all ranks.

        Args:
            hosts: Host of each rank.
        """
        ...

    def follow(self, watches: Mapping[str, Stopwatch]) -> None:
        """Work begins, which these stopwatches measure, by stage: listen to them for each piece of it."""
        ...

    def add(self, stage: str, began_s: float) -> None:
        """A stage ends that has no stopwatch and began at this `time.perf_counter`."""
        ...

    def end(self, name: str, began_s: float, error: BaseException | None) -> None:
        """This rank has done its part of a load or a save, or failed; the ranks do not know the outcome yet.

        Args:
            name: ``load`` or ``save``.
            began_s: Its beginning, by `time.perf_counter`.
            error: The error that ended it, or None.
        """
        ...

    def close(self, about: Mapping[str, Any]) -> None:
        """All ranks know the outcome.

        Args:
            about: JSON values: ``what``, and the bytes of all ranks, ``bytes_wanted`` or ``nbytes``.
        """
        ...


class Observers:
    """The observers of a call.

    Args:
        members: The observers; without any, every method does nothing.
    """

    def __init__(self, members: Sequence[Observer] = ()) -> None:
        self._members = tuple(members)

    @property
    def error(self) -> FastloadError | None:
        """The first error of an observer; see `Observer.error`."""
        return next((one.error for one in self._members if one.error is not None), None)

    def begin(self, hosts: Sequence[str]) -> None:
        """See `Observer.begin`.

        Raises:
            PeerError: A rank did not respond.
        """
        for one in self._members:
            one.begin(hosts)

    def follow(self, watches: Mapping[str, Stopwatch]) -> None:
        """See `Observer.follow`."""
        for one in self._members:
            one.follow(watches)

    def add(self, stage: str, began_s: float) -> None:
        """See `Observer.add`."""
        for one in self._members:
            one.add(stage, began_s)

    @contextmanager
    def ending(self, name: str, began_s: float) -> Iterator[None]:
        """Tells the observers when the block has ended, or failed; see `Observer.end`."""
        try:
            yield
        except BaseException as error:
            self._end(name, began_s, error)
            raise
        self._end(name, began_s, None)

    def _end(self, name: str, began_s: float, error: BaseException | None) -> None:
        for one in self._members:
            one.end(name, began_s, error)

    def close(self, about: Mapping[str, Any]) -> None:
        """See `Observer.close`."""
        for one in self._members:
            one.close(about)


_registered: list[Callable[[World], Observer]] = []


def register_observer(make: Callable[[World], Observer]) -> None:
    """Has all later loads and saves of this process observed.

    Args:
        make: Makes the observer of a call, given its ranks. If it takes steps, all ranks register it.
    """
    _registered.append(make)


def observe(world: World, trace: str | os.PathLike[str] | None) -> Observers:
    """Returns the observers of a call.

    Args:
        world: Its ranks.
        trace: The option, which the extension ``trace`` is for.

    Raises:
        OptionError: That cannot be imported.
    """
    members = [make(world) for make in _registered]
    if trace is not None:
        members.append(extension("observers", "trace", "trace=").Tracing(world, trace))
    return Observers(members)
