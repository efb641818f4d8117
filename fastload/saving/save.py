"""A save on all ranks of a group: describe → agree → plan → snapshot → write → commit.

`save` does all steps. An asynchronous save does the blocking ones in `begin`, and the others in the
background in `finish`. Each step hands a frozen value on to the next.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fastload.base.registry import extension
from fastload.base.threads import one_torch_thread
from fastload.comm.failures import kinds_of
from fastload.comm.responses import Each, Reports
from fastload.errors import FastloadError
from fastload.report import SaveRankReport, SaveReport
from fastload.saving.agree import (
    SaveAgreement,
    agree,
    compare_on_devices,
    describe,
    has_to_meet,
    predict,
)
from fastload.saving.background import FinishedSave, QueuedSave, SaveHandle
from fastload.saving.call import SaveCall
from fastload.saving.per_rank import PerRankFiles
from fastload.saving.plan import PlannedWrite, SavePlan, make_plan
from fastload.saving.snapshot import Snapshot
from fastload.saving.write import WriteResult, commit, write


@dataclass(frozen=True)
class BegunSave:
    """A save that is ready to be written.

    Attributes:
        plan: This rank's plan.
        agreed: The agreement of the ranks; None if they have not met.
        snapshot: A copy of the bytes that this rank contributes; None if it reads them from the state.
        stall_s: Seconds that the caller was blocked; None for a synchronous save.
    """

    plan: SavePlan
    agreed: SaveAgreement | None
    snapshot: Snapshot | None
    stall_s: float | None


def save(call: SaveCall, state: Any) -> SaveReport:
    """Saves a state, and calls `on_report` when the checkpoint exists.

    Raises:
        FastloadError: It failed, and pending files were removed; the same error on all ranks.
    """
    with call.together():
        described, agreed = agree(call, state)
        plan = make_plan(call, compare_on_devices(call, described, agreed), agreed)
    begun = BegunSave(plan, agreed, None, None)
    with finishing(call, begun):
        finished = _write(call, begun, agreed, 0.0)
    finished.tell()
    return finished.report


@torch.no_grad()  # else each access to a DTensor switches gradients off and on
def begin(call: SaveCall, state: Any) -> BegunSave:
    """Copies the bytes that this rank contributes, or begins to; see `Snapshot`.

    The ranks meet only if they have to; see `agree.has_to_meet`.

    Raises:
        FastloadError: This rank cannot save, and has told the others; or they have met, and one cannot.
    """
    agreed = None
    with call.together():
        with _failing_on_all(call):
            described = describe(call, state)
        if has_to_meet(call, described):
            described, agreed = agree(call, described)
        with _failing_on_all(call) if agreed is None else nullcontext():
            expected = agreed if agreed is not None else predict(call, described)
            overlaps = call.options.snapshot == "overlap"
            described = compare_on_devices(call, described, expected, overlaps=overlaps)
            plan = make_plan(call, described, expected, from_snapshot=True)
            kind = extension("snapshots", "overlap", 'snapshot="overlap"') if overlaps else Snapshot
            snapshot: Snapshot = kind(described.reader, plan.messages.contributed, call.pool)
            if not overlaps and described.on_devices is not None:
                described.on_devices.hold_caller()
    return BegunSave(plan, agreed, snapshot, time.perf_counter() - call.began)


def finish(call: SaveCall, begun: BegunSave) -> FinishedSave | None:
    """Finishes an asynchronous save; returns when the checkpoint exists.

    Returns:
        The finished save; None if it was dropped for a newer one.

    Raises:
        FastloadError: It failed, and pending files were removed; the same error on all ranks.
    """
    waited_s = 0.0
    with finishing(call, begun) as agreed:
        if call.queued is not None:
            began = time.perf_counter()
            if not _await_turn(call, call.queued):
                return None
            waited_s = time.perf_counter() - began
        return _write(call, begun, agreed, waited_s)


def save_in_background(call: SaveCall, state: Any) -> SaveHandle:
    """Copies the bytes that this rank contributes, and saves them in the background.

    The owner of a queue raises the errors of its saves on all ranks.

    Raises:
        FastloadError: As for `fastload.async_save`.
    """
    begun = begin(call, state)
    work = partial(finish, call, begun)
    if (queued := call.queued) is not None:
        assert begun.snapshot is not None
        queued.on_drop(begun.snapshot.release)
        work = partial(queued.run, work)
    is_queued = queued is not None
    return SaveHandle(call.url, work, snapshot=begun.snapshot, caller_raises=is_queued)


def _await_turn(call: SaveCall, queued: QueuedSave) -> bool:
    """Waits for the turn of a save; returns rank 0's decision whether to write it.

    The ranks have met before, so that a rank that failed to begin does not wait for earlier saves.
    """
    with call.world.step(f"{call.what}: waiting for its turn") as step:
        step.answer(queued.await_turn())
    is_written: bool = step.answers[0]
    if not is_written:
        queued.drop()
        call.world.acknowledge()
    return is_written


@contextmanager
def _failing_on_all(call: SaveCall) -> Iterator[None]:
    """Tells the other ranks, which this rank has not met, if it fails: they may be in the background."""
    try:
        yield
    except Exception as error:
        with suppress(FastloadError), call.world.step(call.what):
            raise error
        raise


@contextmanager
def finishing(call: SaveCall, begun: BegunSave) -> Iterator[SaveAgreement]:
    """Agrees with the other ranks, if they have not met, and closes the target in the end.

    After an error it removes pending files, and ends the copy of the state.
    """
    try:
        with call.together():
            yield begun.agreed or agree(call, begun.plan.state, has_copied=True)[1]
    except BaseException:
        if begun.snapshot is not None:
            begun.snapshot.cancel()
        begun.plan.target.abort()
        raise
    finally:
        begun.plan.target.close()


def _write(call: SaveCall, begun: BegunSave, agreed: SaveAgreement, waited_s: float) -> FinishedSave:
    """Writes the files, and publishes the checkpoint."""
    world = call.world
    call.observers.begin(agreed.hosts)
    planned = PlannedWrite(begun.plan, begun.snapshot)
    try:
        # More threads would mostly wait for each other, and take the cores from training.
        with call.observers.failing("save", call.began), one_torch_thread():
            if call.transform is not None:
                planned = call.transform(call, planned, agreed)
            written = write(call, planned.plan, planned.snapshot)
        # Not a long step: a commit does not notice that another one has failed, and may take long.
        with world.step(f"{call.what}: publishing") as step:
            with call.observers.ending("save", call.began):
                response = _publish(call, begun, planned, written, agreed, waited_s)
            step.answer(response)
    finally:
        call.observers.close({"what": call.what, "nbytes": planned.plan.state.layout.nbytes})
    return finished_save(call, _report(call, planned, step.answers), step.answers)


def _publish(
    call: SaveCall,
    begun: BegunSave,
    planned: PlannedWrite,
    written: WriteResult,
    agreed: SaveAgreement,
    waited_s: float,
) -> dict[str, Any]:
    """Commits the checkpoint if this rank is a leader; returns the rank's report."""
    world, plan = call.world, planned.plan
    began = time.perf_counter()
    rank_files = PerRankFiles()
    if world.rank == plan.group.leader:
        rank_files = commit(call, plan, written, agreed, planned.delta)
        call.observers.add("commit", began)
    return published_response(call, begun, plan, written, rank_files, began, waited_s)


def published_response(
    call: SaveCall,
    begun: BegunSave,
    plan: SavePlan,
    written: WriteResult,
    rank_files: PerRankFiles,
    began: float,
    waited_s: float = 0.0,
) -> dict[str, Any]:
    """Returns the response of a rank for whose part the checkpoint exists.

    Args:
        call: The call.
        begun: Its beginning.
        plan: What was written.
        written: How.
        rank_files: The files of the ranks' own values, on a rank that committed them.
        began: `time.perf_counter` of the commit.
        waited_s: Seconds until earlier saves were written.
    """
    sizes, now = rank_files.sizes(), time.perf_counter()
    held_s = begun.snapshot.waited_s if begun.snapshot is not None else 0.0
    rank = SaveRankReport(
        rank=call.world.rank,
        host=call.world.host,
        bytes_written=plan.share.nbytes + sizes["nbytes"],
        bytes_sent=sum(message.nbytes for message in plan.messages.outgoing),
        stall_s=begun.stall_s + held_s if begun.stall_s is not None else now - call.began,
        snapshot_wait_s=held_s,
        snapshot_s=begun.plan.state.reader.watch.seconds,
        waited_s=waited_s,
        write_s=written.write_s,
        flush_s=written.flush_s,
        commit_s=now - began,
        total_s=now - call.began,
        peak_staging_bytes=written.staging_bytes,
    )
    return {"rank": Each(rank.pack()), "own": sizes, "listens": call.options.on_report is not None}


def finished_save(call: SaveCall, report: SaveReport, responses: Sequence[dict[str, Any]]) -> FinishedSave:
    """Returns a save whose checkpoint exists.

    Args:
        call: The call.
        report: Its report.
        responses: `published_response` of all ranks.
    """
    some_listen = any(response["listens"] for response in kinds_of(responses))
    return FinishedSave(report, call, some_listen)


def _report(call: SaveCall, planned: PlannedWrite, published: Sequence[dict[str, Any]]) -> SaveReport:
    """Merges the reports of all ranks."""
    plan, rank_files = planned.plan, published[0]["own"]  # the same on each leader
    layout = plan.state.layout
    return SaveReport(
        url=call.url,
        nbytes=layout.nbytes + rank_files["nbytes"],
        num_tensors=len(plan.state.content.specs) + rank_files["num_tensors"],
        num_files=len(layout.files) + rank_files["num_files"],
        block_bytes=layout.block_bytes,
        num_writers=len(plan.group.writers),
        num_copies=len(plan.leaders),
        base=planned.base,
        why_complete=planned.why_complete,
        came_instead_of=call.queued.replaced_urls() if call.queued is not None else (),
        step=call.step,
        ranks=Reports(SaveRankReport, published[0]["rank"]),
    )
