"""A save to memory: each host keeps what its ranks write, and copies from other hosts."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from fastload.comm.responses import Reports, join_parts, split_parts
from fastload.ext.memory.copies import send_copies
from fastload.ext.memory.folder import HostDirectory, JobFolder
from fastload.ext.memory.groups import CopyPlan, plan_copies
from fastload.ext.memory.manifest import TABLE_NAME, HostManifest, ShareTable
from fastload.ext.memory.target import HostPart, MemoryTarget, Published
from fastload.formats.names import RECORD_NAME
from fastload.report import SaveRankReport, SaveReport
from fastload.saving.agree import SaveAgreement
from fastload.saving.background import FinishedSave
from fastload.saving.call import SaveCall
from fastload.saving.per_rank import PerRankFiles
from fastload.saving.plan import SavePlan
from fastload.saving.save import BegunSave, finished_save, finishing, published_response
from fastload.saving.write import commit, write
from fastload.storage import Target
from fastload.training.retention import Lineage, Point


@dataclass(frozen=True, kw_only=True)
class TierSaveCall(SaveCall):
    """A call to save to memory.

    Attributes:
        name: Name of the checkpoint, the same on all hosts.
        point: Its position in the history of the run.
        lineage: Stored with it.
        num_copies: Number of hosts that have each share.
        directories: The host directory of each rank.
        job: The job's folder on this host.
        target: This host's part of the checkpoint.
    """

    name: str
    point: Point
    lineage: Lineage
    num_copies: int
    directories: Sequence[HostDirectory]
    job: JobFolder
    target: MemoryTarget

    @property
    def what(self) -> str:
        """Name of the save, for messages."""
        return f"saving step {self.point.step} to memory"

    @property
    def occasion(self) -> str:
        """The root of the run, and the step."""
        return f"{self.location.given}/{self.what}"

    def open_target(self) -> Target:
        """Returns write access to this host's part."""
        return self.target


def finish(call: TierSaveCall, begun: BegunSave) -> FinishedSave:
    """Writes, copies and commits in the background.

    Raises:
        FastloadError: The checkpoint exists on no host; the same error on all ranks.
    """
    with finishing(call, begun) as agreed:
        call.observers.begin(agreed.hosts)
        try:
            with call.observers.ending("save", call.began):
                plan, copies, responses = _write(call, begun, agreed)
        finally:
            call.observers.close({"what": call.what, "nbytes": begun.plan.state.layout.nbytes})
    if copies.leads:
        call.job.retire(call.name)
    return finished_save(call, _report(call, plan, copies, responses), responses)


def _write(
    call: TierSaveCall, begun: BegunSave, agreed: SaveAgreement
) -> tuple[SavePlan, CopyPlan, Sequence[dict[str, Any]]]:
    """Writes, copies and commits; returns what this rank wrote, the copies, and the answers of all ranks."""
    world, target = call.world, call.target
    # Blocks that begin in the share are written completely, so that they can be verified.
    share = begun.plan.share
    share = replace(share, runs=[replace(run, is_tail=False) for run in share.runs])
    plan = replace(begun.plan, share=share)
    copies = plan_copies(call.directories, world.rank, call.num_copies)
    names = [file.name for file in plan.state.layout.files]
    target.expect(_host_part(call, plan, copies, names))
    written = write(call, plan, begun.snapshot)
    if copies.num_hosts > 1 and call.num_copies > 1:
        send_copies(world, call.what, target, copies, share.parts, names)

    own, began = PerRankFiles(), time.perf_counter()
    with world.step(f"{call.what}: publishing") as publishing:
        if world.rank == plan.group.leader:
            own = commit(call, plan, written, agreed)
            assert target.published is not None
            publishing.answer(attach=_pack(target.published))
    small_names, *contents = split_parts(publishing.attachment)
    small_files = dict(zip(json.loads(small_names), contents, strict=True))
    nbytes, table = plan.state.layout.nbytes, small_files[TABLE_NAME]
    manifest = _host_manifest(call, nbytes, table, copies).to_bytes()
    with world.step(f"{call.what}: recording") as recording:
        if copies.leads:
            call.job.record(call.name, list(small_files.items()), manifest)
        recording.answer(published_response(call, begun, plan, written, own, began))
    return plan, copies, recording.answers


def _report(
    call: TierSaveCall, plan: SavePlan, copies: CopyPlan, responses: Sequence[dict[str, Any]]
) -> SaveReport:
    """Merges the reports of all ranks."""
    layout, own = plan.state.layout, responses[plan.group.leader]["own"]
    return SaveReport(
        url=call.url,
        tier=call.tier,
        step=call.step,
        nbytes=layout.nbytes + own["nbytes"],
        num_tensors=len(plan.state.content.specs) + own["num_tensors"],
        num_files=len(layout.files) + own["num_files"],
        block_bytes=layout.block_bytes,
        num_writers=len(plan.group.writers),
        num_copies=min(call.num_copies, copies.num_hosts),
        ranks=Reports(SaveRankReport, responses[0]["rank"]),
    )


def _host_part(call: TierSaveCall, plan: SavePlan, copies: CopyPlan, names: Sequence[str]) -> HostPart:
    """Returns the part of this host: the shares of its ranks, and as many bytes for each further copy."""
    layout, parts = plan.state.layout, plan.share.parts
    own_bytes = sum(part.nbytes for part in parts)
    facts = [plan.state.content.layout, call.directories, call.num_copies, own_bytes, len(parts)]
    return HostPart(
        plan=xxhash.xxh3_128_hexdigest(json.dumps(facts).encode()),
        heads={file.name: file.header for file in layout.files},
        nbytes=own_bytes * len(copies.held) + sum(len(file.header) for file in layout.files),
        ranges=[(names[part.file], part.offset, part.nbytes) for part in parts],
    )


def _host_manifest(call: TierSaveCall, nbytes: int, table: bytes, copies: CopyPlan) -> HostManifest:
    digest = xxhash.xxh3_128_hexdigest(table)
    shares = sorted(ShareTable.parse(table, digest, call.what).shares)
    held = tuple(number for number in copies.held if number in shares)
    lineage = call.lineage
    return HostManifest(*call.point, nbytes, tuple(shares), held, digest, lineage.incarnation, lineage.origin)


def _pack(published: Published) -> bytes:
    """Packs the files of every host: the commit record, other small files, and the table of shares."""
    shares = {
        number: {name: [(begin, end) for begin, end in ranges] for name, ranges in files.items()}
        for number, files in enumerate(published.written)
        if files
    }
    whole = tuple(name for name, _ in published.small_files if name != RECORD_NAME)
    files = [*published.small_files, (TABLE_NAME, ShareTable(shares, whole).to_bytes())]
    return join_parts([json.dumps([name for name, _ in files]).encode(), *(content for _, content in files)])
