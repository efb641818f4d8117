"""Saves that go on in the background: copied while the caller waits, written after that."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastload.options import SaveOptions
from fastload.saving.call import make_call
from fastload.saving.handle import SaveHandle
from fastload.saving.save import begin, finish
from fastload.saving.turn import Turn

__all__ = ["save_in_background"]


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
