"""Saves that go on in the background: copied while the caller waits, written after that."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastload.options import SaveOptions
from fastload.saving.call import Call, make_call
from fastload.saving.handle import SaveHandle
from fastload.saving.save import Begun, begin, finish
from fastload.saving.turn import Turn

__all__ = ["save_all_in_background", "save_in_background"]


def save_in_background(
    state: Any,
    path: str | os.PathLike[str],
    *,
    process_group: Any,
    metadata: Mapping[str, str] | None,
    storage_options: Mapping[str, Any] | None,
    options: SaveOptions | None,
    turn: Turn | None = None,
) -> SaveHandle:
    """Copies this rank's share, and goes on in the background.

    Args are those of `fastload.save`, and `turn`: when it is written; None for at once. Whoever gives one
    tells all ranks of the errors of such saves.

    Raises:
        FastloadError: As for `fastload.async_save`.
    """
    call = make_call(
        path,
        process_group,
        metadata,
        storage_options,
        options,
        in_background=True,
        # An error that only some ranks have seen is raised by all, and in this call, not in the background.
        raise_earlier=SaveHandle.raise_unseen if SaveHandle.in_doubt() else None,
        turn=turn,
    )
    begun = begin(call, state)
    write = partial(finish, call, begun)
    if turn is None:
        return SaveHandle(call.url, write, call.tell)
    assert begun.snapshot is not None
    turn.hold(begun.snapshot.keep)
    return SaveHandle(call.url, partial(turn.run, write), call.tell, apart=True)


def save_all_in_background(
    states: Mapping[str, Any], *, process_group: Any, options: SaveOptions
) -> list[SaveHandle]:
    """Copies this rank's share of several states, and goes on in the background.

    None is written before all are copied: writing would hold up the copies. The ranks do not meet for one
    save because another one goes on, so whoever calls has to wait for all of them, on all ranks.

    Args:
        states: Path → state.
        process_group: As for `fastload.save`.
        options: As for `fastload.save`.

    Returns:
        A handle for each.

    Raises:
        FastloadError: As for `fastload.async_save`.
    """
    begun: list[tuple[Call, Begun]] = []
    handles: list[SaveHandle] = []
    raise_earlier = SaveHandle.raise_unseen if SaveHandle.in_doubt() else None
    try:
        for path, state in states.items():
            call = make_call(
                path, process_group, None, None, options, in_background=True, raise_earlier=raise_earlier
            )
            begun.append((call, begin(call, state)))
    finally:  # also if one cannot be saved here, for the other ranks may go on with those before it
        for call, each in begun:
            handles.append(SaveHandle(call.url, partial(finish, call, each), call.tell, apart=True))
    return handles
