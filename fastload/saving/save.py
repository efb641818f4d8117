"""One save, on all ranks of a group: describe → agree → assign → snapshot → write → commit.

`save` does all of it. `begin` does what the caller of an asynchronous save has to wait for, and `finish`, in
the background, the rest. What one step finds out goes on to the next as a value.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastload.comm.responses import Each, Reports
from fastload.errors import FastloadError
from fastload.options import SaveOptions
from fastload.report import SaveRankReport, SaveReport
from fastload.saving.agree import Agreed, agree, foresee, has_to_meet
from fastload.saving.call import Call, Turn, make_call
from fastload.saving.commit import commit
from fastload.saving.describe import describe
from fastload.saving.handle import SaveHandle
from fastload.saving.per_rank import OwnFiles
from fastload.saving.plan import Part, take_part
from fastload.saving.snapshot import Snapshot, Spares
from fastload.saving.write import Written, open_pending, write
from fastload.storage import Target

__all__ = ["Begun", "begin", "finish", "save", "save_all_in_background", "save_in_background"]


@dataclass(frozen=True)
class Begun:
    """A save that is ready to be written.

    Attributes:
        part: What this rank does.
        agreed: What the ranks have agreed on; None if they have not met.
        snapshot: The bytes that this rank writes; None if it takes them from the state.
        stall_s: How long the caller has waited; None if it waits for the end.
    """

    part: Part
    agreed: Agreed | None
    snapshot: Snapshot | None
    stall_s: float | None


def save(call: Call, state: Any) -> SaveReport:
    """Saves a state; returns when the checkpoint exists.

    Raises:
        FastloadError: It does not, and what is pending is gone; the same error on all ranks.
    """
    world = call.world
    with world.together():
        described, agreed = agree(call, partial(describe, call, state))
        with _or_leave(call, met=True):
            part = take_part(call, described, agreed)
    with _open_until_the_end(part.target), world.together():
        return _write(call, Begun(part, agreed, None, None), agreed, 0.0)


def begin(call: Call, state: Any) -> Begun:
    """Copies this rank's share; after that the state may change.

    The ranks meet only if they have to; see `agree.has_to_meet`.

    Raises:
        FastloadError: This rank cannot save, which the others learn, or they have met and one cannot.
    """
    agreed = None
    with call.world.together():
        with _or_leave(call, met=False):
            described = describe(call, state)
        if has_to_meet(call, described):
            described, agreed = agree(call, lambda: described)
        with _or_leave(call, met=agreed is not None):
            part = take_part(call, described, agreed if agreed is not None else foresee(call, described))
            snapshot = _copy(part, call.memory)
            described.source.forget()
    return Begun(part, agreed, snapshot, time.perf_counter() - call.began)


def _copy(part: Part, memory: Spares) -> Snapshot:
    if part.shards is None or part.packets is None:
        return Snapshot(part.described.source, part.share.pieces, memory)
    return Snapshot(part.shards, part.packets.own, memory)


def finish(call: Call, begun: Begun) -> SaveReport | None:
    """Does whatever is left of an asynchronous save, until the checkpoint exists.

    Returns:
        What was done; None if it was not written, since a newer one is there.

    Raises:
        FastloadError: It does not, and what is pending is gone; the same error on all ranks.
    """
    part, agreed, waited_s = begun.part, begun.agreed, 0.0
    with _open_until_the_end(part.target), call.world.together():
        if agreed is None:
            _, agreed = agree(call, lambda: part.described, went_on=True)
        if call.turn is not None:
            came = time.perf_counter()
            if not _comes(call, call.turn):
                return None
            waited_s = time.perf_counter() - came
        return _write(call, begun, agreed, waited_s)


def _comes(call: Call, turn: Turn) -> bool:
    """Waits until it is the turn of a save; returns whether it is written, which rank 0 says.

    They have met before that, so that a rank which failed to begin need not wait for what is written now.
    """
    is_written = call.world.agree(f"{call.what}: waiting for its turn", turn.come)[0]
    if not is_written:
        turn.give_up()
        call.world.heard()
    return is_written


@contextmanager
def _or_leave(call: Call, *, met: bool) -> Iterator[None]:
    """Tells the others, who may be in the background already, if this rank cannot go on."""
    try:
        yield
    except BaseException as error:
        if met or not isinstance(error, Exception):
            call.world.leave(error)
        else:
            with suppress(FastloadError):
                call.world.gather(call.what, error=error, wait_s=call.world.patience_s)
        raise


@contextmanager
def _open_until_the_end(target: Target) -> Iterator[None]:
    """Closes a target in the end; removes what is pending if there is no checkpoint."""
    try:
        yield
    except BaseException:
        target.abort()
        raise
    finally:
        target.close()


def _write(call: Call, begun: Begun, agreed: Agreed, waited_s: float) -> SaveReport:
    """Writes and publishes."""
    world, part = call.world, begun.part
    call.tracing.synchronize(agreed.hosts)
    written = write(call, part, begun.snapshot, open_pending(call, part))
    publishing = partial(_publish, call, begun, written, agreed.metadata, waited_s)
    published = world.agree(f"{call.what}: publishing", publishing)
    call.tracing.write({"what": call.what, "nbytes": part.described.layout.nbytes})
    world.heard()
    return _report(call, part, published)


def _publish(
    call: Call, begun: Begun, written: Written, metadata: Mapping[str, str], waited_s: float
) -> dict[str, Any]:
    """Makes the checkpoint exist, if that is this rank's to do; returns what it reports."""
    world, part = call.world, begun.part
    began = time.perf_counter()
    own = OwnFiles()
    if world.rank == part.team.leader:
        own = commit(call, part, written, metadata)
        call.tracing.add("commit", began)
    call.tracing.leave("save", call.began, None)
    sizes, now = own.sizes(), time.perf_counter()
    rank = SaveRankReport(
        rank=world.rank,
        host=world.host,
        bytes_written=part.share.nbytes + sizes["nbytes"],
        bytes_sent=sum(packet.nbytes for packet in part.packets.leaving) if part.packets is not None else 0,
        stall_s=begun.stall_s if begun.stall_s is not None else now - call.began,
        snapshot_s=part.described.source.watch.seconds,
        waited_s=waited_s,
        write_s=written.write_s,
        flush_s=written.flush_s,
        commit_s=now - began,
        total_s=now - call.began,
        peak_staging_bytes=written.slab_bytes,
    )
    return {"rank": Each(rank.pack()), "own": sizes}


def _report(call: Call, part: Part, published: Sequence[dict[str, Any]]) -> SaveReport:
    """Puts together what all ranks report."""
    layout, own = part.described.layout, published[0]["own"]  # the same from each leader
    return SaveReport(
        url=call.url,
        nbytes=layout.nbytes + own["nbytes"],
        num_tensors=len(part.described.content.specs) + own["num_tensors"],
        num_files=len(layout.files) + own["num_files"],
        block_bytes=layout.block_bytes,
        num_writers=len(part.team.writers),
        num_copies=part.team.num_copies,
        came_instead_of=call.turn.came_instead_of() if call.turn is not None else (),
        ranks=Reports(SaveRankReport, published[0]["rank"]),
    )


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
