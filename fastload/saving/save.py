"""One save, on all ranks of a group: describe → layout → partition → snapshot → write → commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NoReturn

from fastload.errors import FastloadError, OptionError
from fastload.formats.dtypes import safetensors_spec
from fastload.formats.names import NAMES
from fastload.formats.state import describe
from fastload.options import SaveOptions
from fastload.ranks.traces import Tracing
from fastload.ranks.world import World, require_same
from fastload.report import SaveRankReport, SaveReport
from fastload.saving.assign import blocks_of, cut, partition, tail_of
from fastload.saving.commit import pack, publish
from fastload.saving.differences import Content, require_alike, small_tensors
from fastload.saving.hashing import BlockHasher
from fastload.saving.layout import TensorSpec, lay_out
from fastload.saving.per_rank import OwnFiles, OwnValues
from fastload.saving.replicas import compare_replicas
from fastload.saving.snapshot import Slabs, Snapshot, Source, Staging
from fastload.saving.team import choose_team, open_stage
from fastload.saving.write import Writing
from fastload.saving.writers import WriterTuner
from fastload.storage import Location, Target, open_target

__all__ = ["Save"]

_GOOD_PIECE_BYTES = 4 << 20  # more would leave the cache before it is hashed, and touch more new memory
_MAX_ATTEMPT_S = 30.0  # for one request: what takes longer has stalled
_CHECKSUMS = "checksums"  # where in the store the ranks leave theirs
_HEADER_METADATA = {"format": "pt"}  # what transformers asks for

_tuner = WriterTuner()


class Save:
    """One save, seen from one rank.

    `run` does all of it. Or `take_snapshot` does what the caller has to wait for, and `run`, in the
    background, the rest.

    Args:
        world: The ranks.
        state: What to save.
        location: Where to.
        metadata: Text of the user's; that of rank 0 counts.
        storage_options: For the target.
        options: How.
        pending: Raises what is left to raise of an earlier save; None if no rank can have anything.
        began: `time.perf_counter` of the call.
    """

    def __init__(
        self,
        world: World,
        state: Any,
        location: Location,
        *,
        metadata: Mapping[str, str],
        storage_options: Mapping[str, Any] | None,
        options: SaveOptions,
        pending: Callable[[], None] | None,
        began: float,
    ) -> None:
        self._world = world
        self._state = state
        self._location = location
        self._what = f"saving to {location}"
        self._metadata = metadata
        self._storage_options = storage_options
        self._options = options
        self._pending = pending
        self._began = began
        self._in_background = False
        self._stall_s: float | None = None
        self._tracing = Tracing(world, options.trace)
        self._same: dict[str, Any] | None = None
        self._content: Content
        self._hosts: list[str] = []
        self._target: Target | None = None
        self._slabs: Slabs | None = None

    @property
    def url(self) -> str:
        """Where to, as it may be shown."""
        return self._location.url

    def take_snapshot(self) -> None:
        """Copies this rank's share; after that the state may change.

        Who writes what follows from state and options alone, so the ranks need not meet for it, unless
        it matters which hosts they are on, or their tensors are to be compared. With `writers="auto"` all
        ranks write: the more there are, the less each of them has to copy.

        Raises:
            FastloadError: This rank cannot save, which the others learn, or they have met and one cannot.
        """
        self._in_background = True
        with self._world.together():
            self._or_tell(self._describe)
            if self._has_to_meet:
                self._agree()
            self._or_tell(self._copy)
        self._stall_s = time.perf_counter() - self._began

    @property
    def _has_to_meet(self) -> bool:
        options = self._options
        by_options = options.writers == "host" or options.shared is False
        by_options |= options.check_replicas in ("sample", "full")
        return by_options or self._pending is not None

    def _copy(self) -> None:
        self._assign()
        self._slabs = Snapshot(self._source, [*self._pieces, *self._tail])
        self._source.forget()

    def _or_tell(self, work: Callable[[], None]) -> None:
        """Tells the others, who may be in the background already, if this rank cannot go on."""
        try:
            work()
        except BaseException as error:
            if not isinstance(error, Exception) or self._hosts:
                self._world.leave(error)
            else:
                with suppress(FastloadError):
                    self._world.agree(self._what, partial(_raise, error))
            raise

    def run(self) -> SaveReport:
        """Does whatever is left, until the checkpoint exists.

        Raises:
            FastloadError: It does not, and what is pending is gone; the same error on all ranks.
        """
        try:
            with self._world.together():
                return self._run()
        except BaseException:
            if self._target is not None:
                self._target.abort()
            raise
        finally:
            if self._target is not None:
                self._target.close()

    def tell(self, report: SaveReport) -> None:
        """Hands the report to whoever wants it."""
        if self._options.on_report is not None:
            self._options.on_report(report)

    def _run(self) -> SaveReport:
        if not self._hosts:
            self._agree()
        if self._slabs is None:
            self._or_tell(self._assign)
        self._tracing.synchronize(self._hosts)
        assert self._target is not None
        overwrite = self._options.overwrite
        open_stage(self._world, self._team, self._target, self._open, self._layout, overwrite=overwrite)
        told, mine = self._write(self._target)
        published = self._world.agree(f"{self._what}: publishing", lambda: self._publish(told, mine))
        more = published[0]["own"]  # the same from each leader
        self._tracing.write({"what": self._what, "nbytes": self._layout.nbytes})
        self._world.heard()
        report = SaveReport(
            url=self.url,
            nbytes=self._layout.nbytes + more["nbytes"],
            num_tensors=len(self._specs) + more["num_tensors"],
            num_files=len(self._layout.files) + more["num_files"],
            block_bytes=self._layout.block_bytes,
            num_writers=len(self._team.writers),
            num_copies=self._team.num_copies,
            ranks=tuple(SaveRankReport(**each["rank"]) for each in published),
        )
        if not self._in_background:
            taken_s = max(own.write_s + own.flush_s for own in report.ranks)
            _tuner.learn(self._place, self._world.size, report.nbytes, report.num_writers, taken_s)
        return report

    def _agree(self) -> None:
        """Compares what the ranks are about to save, and learns on which hosts they are."""

        def compare() -> dict[str, Any]:
            if self._pending is not None:
                self._pending()
            if self._same is None:
                self._describe()
            # Rank 0 says how many are to write: its saves may have ended sooner than those of others.
            own: dict[str, Any] = {"host": self._world.host, "writers": self._good_writers()}
            own |= {"same": self._same, "content": self._content.digests()}
            return own | ({"metadata": self._metadata} if self._world.rank == 0 else {})

        told = self._world.agree(self._what, compare)
        self._metadata = told[0]["metadata"]
        require_same([each["same"] for each in told])
        what, how = f"{self._what}: comparing replicas", self._options.check_replicas
        require_alike(self._world, what, self._content, [each["content"] for each in told])
        if how in ("sample", "full"):
            compare_replicas(self._world, self._layout, self._source, how=how, what=what)
        self._hosts = [each["host"] for each in told]
        self._num_writers = told[0]["writers"]

    def _describe(self) -> None:
        """Takes the state apart."""
        if not all(isinstance(text, str) for pair in self._metadata.items() for text in pair):
            raise OptionError(f"metadata={self._metadata!r}: must be text by text")
        description = describe(self._state, self._world.rank)
        self._state = None
        self._own = OwnValues(self._world, self._what, description)
        self._structure = description.structure
        self._specs = [
            TensorSpec(name, *safetensors_spec(tensor), tensor.nbytes)
            for name, tensor in description.tensors.items()
        ]
        self._layout = lay_out(
            self._specs,
            max_shard_bytes=self._options.max_shard_bytes,
            block_bytes=self._options.block_bytes,
            metadata=_HEADER_METADATA,
        )
        self._num_writers = self._good_writers()
        self._source: Source = Source(self._layout, description.tensors)
        self._tracing.follow({"snapshot": self._source.watch})
        self._same = {
            "call": "save",
            "path": self._location.given,
            **self._options.shared_values(),
        }
        small = {}
        if self._options.check_replicas == "small":
            small = small_tensors(self._specs, description.tensors, description.starts)
        self._content = Content(self._structure, self._layout.digest(), self._specs, small)

    def _assign(self) -> None:
        """Finds this rank's part."""
        world, layout, options = self._world, self._layout, self._options
        self._team = choose_team(
            world.rank,
            self._hosts or [world.host] * world.size,
            writers=options.writers if options.writers != "auto" else self._num_writers,
            shared=options.shared is not False,
        )
        self._target = self._open()
        largest = max(file.nbytes for file in layout.files)
        align_bytes = self._target.align_bytes(largest)
        shares = partition(layout, num_writers=len(self._team.writers), align_bytes=align_bytes)
        writes = world.rank in self._team.writers
        ranges = shares[self._team.writers.index(world.rank)] if writes else ()
        unit = align_bytes or 1
        piece_bytes = min(_GOOD_PIECE_BYTES, options.staging_bytes // (options.write_threads + 1))
        self._pieces = cut(ranges, max(1, piece_bytes // unit) * unit)
        self._tail = tail_of(layout, ranges)
        self._hasher = BlockHasher(blocks_of(layout, ranges))

    def _good_writers(self) -> int:
        if self._in_background:
            return WriterTuner.most(self._world.size, self._layout.nbytes)
        return _tuner.choose(self._place, self._world.size, self._layout.nbytes)

    @property
    def _place(self) -> str:
        return self.url.rstrip("/").rpartition("/")[0]

    def _open(self) -> Target:
        options = self._options
        return open_target(
            self._location,
            NAMES,
            self._storage_options,
            io=options.io,
            timeout_s=self._world.patience_s / 2,
            attempt_s=min(_MAX_ATTEMPT_S, self._world.patience_s / 6),
            retries=options.retries,
        )

    def _write(self, target: Target) -> tuple[bytes, SaveRankReport]:
        """Writes this rank's part, and settles on all ranks whether all of them have."""
        world, options = self._world, self._options
        writing = Writing(
            world,
            target,
            [file.name for file in self._layout.files],
            num_threads=options.write_threads,
            progress=options.progress,
        )
        self._tracing.follow({"snapshot": self._source.watch, "write": writing.watch})
        told, error = b"", None
        slabs = self._slabs
        try:
            try:
                if slabs is None:
                    slabs = Staging(
                        self._source, [*self._pieces, *self._tail], num_slabs=options.write_threads + 1
                    )
                receipt = writing.write(self._pieces, self._tail, slabs, self._hasher)
                told = pack(receipt, self._hasher.checksums())
                if world.rank != self._team.leader:
                    world.leave_bytes(f"{self._what}: leaving checksums", _CHECKSUMS, told)
                self._own.show()
            except Exception as caught:
                error = caught
                world.raise_alarm()
            # One that is stuck says so itself after its patience: the others wait a little longer than that.
            wait_s = world.grace_s if error is not None else world.timeout_s - world.grace_s / 4
            outcomes = world.gather(self._what, None, error, wait_s=wait_s)
            world.raise_failures(self._what, outcomes, error)
        finally:
            error = None  # else error → traceback → frame → error would keep all their memory alive
            if writing.close() and isinstance(slabs, Snapshot):
                slabs.keep()
        self._slabs = None
        return told, SaveRankReport(
            rank=world.rank,
            host=world.host,
            bytes_written=sum(piece.end - piece.begin for piece in self._pieces),
            stall_s=self._stall_s or 0.0,
            snapshot_s=self._source.watch.seconds,
            write_s=writing.watch.seconds,
            flush_s=writing.flush_s,
            commit_s=0.0,
            total_s=0.0,
            peak_staging_bytes=slabs.nbytes if slabs is not None else 0,
        )

    def _publish(self, told: bytes, mine: SaveRankReport) -> dict[str, Any]:
        """Makes the checkpoint exist, if that is this rank's to do; returns the rank's report."""
        began = time.perf_counter()
        own = OwnFiles()
        if self._world.rank == self._team.leader:
            assert self._target is not None
            structure, own = self._own.gather(
                self._structure, block_bytes=self._layout.block_bytes, metadata=_HEADER_METADATA
            )
            publish(
                self._target,
                self._layout,
                [told, *map(self._told_by, self._team.members[1:])],
                structure=structure,
                own=own,
                metadata=self._metadata,
                overwrite=self._options.overwrite,
            )
            self._tracing.add("commit", began)
        self._tracing.leave("save", self._began, None)
        now = time.perf_counter()
        stall_s = self._stall_s if self._stall_s is not None else now - self._began
        sizes = own.sizes()
        rank = replace(
            mine,
            bytes_written=mine.bytes_written + sizes["nbytes"],
            commit_s=now - began,
            total_s=now - self._began,
            stall_s=stall_s,
        )
        return {"rank": asdict(rank), "own": sizes}

    def _told_by(self, rank: int) -> bytes:
        """Returns what another member of the team packed, who left it before it said that it had written."""
        told = self._world.take_bytes(f"{self._what}: collecting checksums", _CHECKSUMS, rank)
        assert told is not None
        return told


def _raise(error: Exception) -> NoReturn:
    raise error
