"""Observers of the stages of loads and saves, and listeners to what ends, on each rank."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from fastload.base.registry import extension, extensions_of_fastload, find
from fastload.base.stopwatch import Stopwatch
from fastload.comm.world import World
from fastload.errors import FastloadError
from fastload.options import environment

_log = logging.getLogger(__name__)


class Observer(Protocol):
    """Observes calls of all ranks, on one of them: the loads of an open checkpoint, or a save.

    `begin` comes once, then `follow`, `end` and `close` for each load, and once more for what a reader that
    failed has left unread. A save may have a `follow` before `begin`, for its snapshot. A call that fails
    before it moves data has no `end`. All but `begin` return at once; an exception of theirs is logged.
    """

    def begin(self, hosts: Sequence[str]) -> None:
        """The ranks have opened a checkpoint, or agreed on a save. It may take steps, on all ranks.

        Args:
            hosts: Host of each rank.
        """

    def follow(self, watches: Mapping[str, Stopwatch]) -> None:
        """Work begins, which these stopwatches measure, by stage: listen to them for each piece of it."""

    def add(self, stage: str, began_s: float) -> None:
        """A stage ends that has no stopwatch and began at this `time.perf_counter`."""

    def end(self, name: str, began_s: float, error: BaseException | None) -> None:
        """This rank has done its part of a load or a save, or failed; the ranks may not know the outcome yet.

        Args:
            name: ``load`` or ``save``.
            began_s: Its beginning, by `time.perf_counter`.
            error: The error that ended it, or None.
        """

    def close(self, about: Mapping[str, Any]) -> None:
        """All ranks know the outcome.

        Args:
            about: JSON values: ``what``, and the bytes of all ranks, ``bytes_wanted`` or ``nbytes``.
        """


class TraceWriter(Observer, Protocol):
    """The observer that ``trace=`` asks for."""

    error: FastloadError | None
    """Why it could not write the last trace, which fails no call; or None."""


class Observers:
    """The observers of a call.

    Args:
        members: The observers; without any, every method does nothing.
        trace: The one of them that writes a trace, if any.
    """

    def __init__(self, members: Sequence[Observer] = (), trace: TraceWriter | None = None) -> None:
        self._members = tuple(members)
        self._trace = trace

    @property
    def trace_error(self) -> FastloadError | None:
        """Why the last trace could not be written, or None."""
        return self._trace.error if self._trace is not None else None

    def begin(self, hosts: Sequence[str]) -> None:
        """See `Observer.begin`.

        Raises:
            PeerError: A rank did not respond.
        """
        for one in self._members:
            one.begin(hosts)

    def follow(self, watches: Mapping[str, Stopwatch]) -> None:
        """See `Observer.follow`."""
        self._tell(lambda one: one.follow(watches))

    def add(self, stage: str, began_s: float) -> None:
        """See `Observer.add`."""
        self._tell(lambda one: one.add(stage, began_s))

    @contextmanager
    def failing(self, name: str, began_s: float) -> Iterator[None]:
        """Tells the observers if the block fails; see `Observer.end`."""
        try:
            yield
        except BaseException as error:
            self._end(name, began_s, error)
            raise

    @contextmanager
    def ending(self, name: str, began_s: float) -> Iterator[None]:
        """Tells the observers when the block has ended, or failed; see `Observer.end`."""
        with self.failing(name, began_s):
            yield
        self._end(name, began_s, None)

    def _end(self, name: str, began_s: float, error: BaseException | None) -> None:
        self._tell(lambda one: one.end(name, began_s, error))

    def close(self, about: Mapping[str, Any]) -> None:
        """See `Observer.close`."""
        self._tell(lambda one: one.close(about))

    def _tell(self, tell: Callable[[Observer], None]) -> None:
        """Tells each observer; what fails in one of them fails no call."""
        for one in self._members:
            try:
                tell(one)
            except Exception:
                _log.exception("an observer failed")


@dataclass(frozen=True)
class Event:
    """Something has ended, on this rank.

    Attributes:
        name: ``load``, ``save``, ``stage``, ``redistribute``, ``restore``, ``delete``; ``manage`` when a
            `CheckpointManager` opens, and ``close`` when it closes.
        rank: This rank in its group.
        seconds: Since it began, on this rank.
        facts: ``error`` if it failed. The ``report`` of the first four. ``tier`` and ``step`` of a
            save, ``step``, ``source``, ``why`` and ``num_damaged`` of a restore, ``step``, ``url`` and
            ``nbytes`` of a deletion.
    """

    name: str
    rank: int
    seconds: float
    facts: Mapping[str, Any]


_registered: list[Callable[[World], Observer | None]] = []
_listeners: list[Callable[[Event], object]] = []


def register_observer(make: Callable[[World], Observer | None]) -> None:
    """Has all later loads and saves of this process observed.

    Args:
        make: Makes the observer of a call, given its ranks; None without one on this rank. If it takes steps,
            all ranks register it.
    """
    _registered.append(make)


def register_listener(listen: Callable[[Event], object]) -> None:
    """Has all later events of this process told to a function, in the thread in which they end.

    Args:
        listen: Returns at once. An exception is logged.
    """
    _listeners.append(listen)


@cache
def _switch_on() -> None:
    """Starts the extensions that environment variables switch on: ``FASTLOAD_METRICS`` the one so named."""
    given = environment("FASTLOAD_")
    for name in extensions_of_fastload("switches"):
        if (text := given.get(f"FASTLOAD_{name.upper()}")) and (switch := find("switches", name)):
            switch.load()(text)


def notify(world: World, name: str, began_s: float, **facts: Any) -> None:
    """Tells the listeners; never raises.

    Args:
        world: The ranks.
        name: As in `Event`.
        began_s: Its beginning, by `time.perf_counter`.
        facts: As in `Event`.
    """
    event = Event(name, world.rank, time.perf_counter() - began_s, facts)
    _tell_listener(_tell_extensions, event)
    for listen in list(_listeners):
        _tell_listener(listen, event)


def _tell_listener(listen: Callable[[Event], object], event: Event) -> None:
    try:
        listen(event)
    except Exception:
        _log.exception("a listener failed")


def _tell_extensions(event: Event) -> None:
    """Switches extensions on, and tells the one that logs events, if they are logged."""
    _switch_on()
    is_logged = logging.getLogger(f"fastload.{event.name}").isEnabledFor(logging.INFO)
    if is_logged and (log := find("logs", "events")):
        log.load()(event)


@contextmanager
def notifying_of_failure(world: World, name: str, began_s: float, **facts: Any) -> Iterator[None]:
    """Notifies if the block fails; arguments are those of `notify`."""
    try:
        yield
    except BaseException as error:
        notify(world, name, began_s, error=error, **facts)
        raise


def observe(world: World, trace: str | os.PathLike[str] | None, *, of: str = "") -> Observers:
    """Returns the observers of a call.

    Args:
        world: Its ranks, which hear of an exception.
        trace: The option, which the extension ``trace`` is for.
        of: Name of the checkpoint, if each one has a trace of its own.

    Raises:
        OptionError: That cannot be imported, or an environment variable is invalid.
    """
    with world.together():
        _switch_on()
        members = [member for make in _registered if (member := make(world)) is not None]
        tracing: TraceWriter | None = None
        if trace is not None:
            tracing = extension("observers", "trace", "trace=").Tracing(world, trace, of)
            members.append(tracing)
    return Observers(members, tracing)
