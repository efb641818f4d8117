"""Connections and other resources that a process group keeps between calls."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from fastload.base.threads import ProcessLock

T = TypeVar("T")

_lock = ProcessLock()


class CachedResource(Protocol):
    """A resource that ranks made together and may use again.

    Attributes:
        token: Identifies it: equal on all ranks that made it together, and unique otherwise.
    """

    token: str

    def drop(self) -> None:
        """Releases it permanently; never blocks or raises."""

    def disown(self) -> None:
        """Closes its descriptors in a forked child, which has none of the parent's threads; never raises."""


class ConnectionCache:
    """One rank's cache of the resources of a group.

    A call takes a resource out and puts it back at its end, so concurrent calls never share one. Other ranks
    may have dropped theirs or given it to another call. A resource is therefore reused only if all ranks
    present the same token; otherwise each drops its own and they make a new one.

    Attributes:
        num_clears: How often the cache has been cleared; see `put`.
    """

    def __init__(self) -> None:
        self.num_clears = 0
        self._resources: dict[str, CachedResource] = {}
        self._lasting: Any = None

    def lasting(self, make: Callable[[], T]) -> T:
        """Returns the one resource that outlives failed calls; makes it the first time."""
        with _lock:
            if self._lasting is None:
                self._lasting = make()
            resource: T = self._lasting
        return resource

    def take(self, name: str) -> Any:
        """Removes a resource from the cache and returns it; None if there is none of that name."""
        with _lock:
            return self._resources.pop(name, None)

    def put(self, name: str, resource: CachedResource, num_clears: int) -> None:
        """Caches a resource in place of the one of the same name.

        Args:
            name: Key for `take`.
            resource: A resource that no call uses any more.
            num_clears: `num_clears` when it was taken or made. A resource in use during a clear is dropped.
        """
        with _lock:
            dropped = self._resources.pop(name, None) if num_clears == self.num_clears else resource
            if dropped is not resource:
                self._resources[name] = resource
        if dropped is not None:
            dropped.drop()

    def clear(self) -> None:
        """Drops all resources, since a failed call may have left messages in them; never raises."""
        with _lock:
            self.num_clears += 1
            dropped, self._resources = list(self._resources.values()), {}
        for resource in dropped:
            resource.drop()

    def close(self) -> None:
        """Drops everything, when the group is destroyed or the process ends."""
        if self._lasting is not None:
            self._lasting.drop()
        self.clear()

    def disown(self) -> None:
        """Forgets everything in a forked child."""
        resources = [*self._resources.values(), *([self._lasting] if self._lasting is not None else [])]
        self._resources, self._lasting = {}, None
        for resource in resources:
            resource.disown()


_of_groups: weakref.WeakKeyDictionary[Any, ConnectionCache] = weakref.WeakKeyDictionary()


def cache_of(group: Any) -> ConnectionCache:
    """Returns the cache of a process group; it is closed with the group or at exit."""
    with _lock:
        cache = _of_groups.get(group)
        if cache is None:
            cache = _of_groups[group] = ConnectionCache()
            weakref.finalize(group, cache.close)
        return cache


def _disown_all() -> None:
    for cache in list(_of_groups.values()):
        cache.disown()


os.register_at_fork(after_in_child=_disown_all)
