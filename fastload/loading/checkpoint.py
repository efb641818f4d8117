"""A checkpoint that all ranks of a group have open, and what they do with it together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

import torch

from fastload.base.threads import ProcessLock
from fastload.comm.traces import Tracing
from fastload.comm.world import World
from fastload.errors import FastloadError, IncompleteCheckpoint, WorldError
from fastload.formats.names import RECORD_NAME
from fastload.loading.access import Access, look_closer
from fastload.loading.load import (
    Before,
    BoxRequest,
    Job,
    Loaded,
    LoadRequest,
    Opened,
    Request,
    prepare,
    restore,
    run,
)
from fastload.options import LoadOptions
from fastload.report import LoadReport, VerifyReport
from fastload.transfer.read import ChunkReader, Verifier

if TYPE_CHECKING:
    from fastload.loading.boxes import BoxesByName
    from fastload.loading.outline import Outline
    from fastload.loading.stream import BoxFlow, Flow, TensorStream, WantedBoxes

_log = logging.getLogger(__name__)

_LEAST_STAGING_BYTES = 1 << 16


class Checkpoint:
    """A checkpoint that all ranks of a group have open. Made by `fastload.open`.

    Attributes:
        manifest: Its files and tensors, and where each tensor is.
        report: What the last `load` did, or None.
        trace_error: Why rank 0 could not write the trace of the last `load`, or None: that ends no load.
    """

    _all_open: ClassVar[WeakSet[Checkpoint]] = WeakSet()
    _opening: ClassVar[ProcessLock] = ProcessLock()

    def __init__(self, world: World, access: Access, options: LoadOptions) -> None:
        self.manifest = access.manifest
        self.report: LoadReport | None = None
        verifier = Verifier(access.manifest) if access.manifest.block_bytes and options.verify else None
        self._opened = Opened(world, access, options, verifier, header_bytes=access.storage.bytes_read)
        self._reported_retries = 0
        self._failed = False
        self._closed = False
        with self._opening:
            self._all_open.add(self)
        self._last_reader: ChunkReader | None = None
        self._flow: Flow | BoxFlow | None = None
        self._tracing = Tracing(world, options.trace)
        self._tracing.synchronize(access.hosts)

    @property
    def metadata(self) -> dict[str, str]:
        """Text that the writer attached: that of the commit record, if there is one."""
        return dict(self.manifest.metadata)

    @property
    def trace_error(self) -> FastloadError | None:  # noqa: D102  (as above)
        return self._tracing.error

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._flow is not None:
            self._flow.leave(error)
        elif error is not None and not (self._failed or self._closed):
            self._opened.world.leave(error)  # the others need not wait for what this rank will not do
        self.close()

    def close(self) -> None:
        """Releases files and connections, those that a read still waits for as soon as it ends.

        A rank that has left `tensors` early waits here until the others need it no more.
        """
        self._end_flow()
        self._closed = True
        with self._opening:
            self._all_open.discard(self)
        if self._last_reader is None:
            self._opened.access.storage.close()
        else:
            # Not before: the number of a closed descriptor may soon stand for another file.
            self._last_reader.at_end(self._opened.access.storage.close)

    @classmethod
    def urls_in_use(cls) -> set[str]:
        """Returns where the checkpoints are that this process has open, to be left alone."""
        with cls._opening:
            return {checkpoint._opened.access.storage.url for checkpoint in cls._all_open}

    def load(
        self,
        *,
        into: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        names: Sequence[str] | str | None = None,
        strict: bool = True,
    ) -> Any:
        """Loads on all ranks; see `fastload.load` for arguments, result and errors."""
        return self._run(LoadRequest(into, device, dtype, names, strict))[1]

    def read(self, boxes: BoxesByName, *, cast: bool = False) -> LoadReport:
        """Reads boxes of tensors into memory of this rank's own: what plugins are built on.

        A call of all ranks, each of which asks for what it wants, or for nothing: what several want is read
        once, and passed on.

        Args:
            boxes: By name of the tensor, pairs of a `fastload.Box` of it, in elements, and a tensor of that
                shape, of the dtype that is stored, with any strides, on any device.
            cast: Whether the tensors may be of other dtypes: what is read is cast, piece by piece.

        Returns:
            What the ranks did.

        Raises:
            MismatchError: On some rank a box does not fit; no data have moved.
            FastloadError: As for `fastload.load`.
        """
        return self._run(BoxRequest(boxes, cast))[0]

    def tensors(
        self,
        names: Sequence[str] | str | None = None,
        *,
        device: torch.device | str | None = None,
        boxes: WantedBoxes | None = None,
        borrow: bool = False,
    ) -> TensorStream:
        """Hands out tensors one after the other, in file order, in bounded memory: what engines iterate over.

        A call of all ranks, which all get the same tensors: together they read every byte once, ahead of what
        they take. Beyond the tensors that a rank has taken and keeps, and the next one, it needs
        `staging_bytes`, however large the checkpoint. A rank that is slow keeps the others waiting; one that
        takes none for `timeout_s` fails them. Use it, or the checkpoint, as a context manager::

            with fastload.open(path) as checkpoint:
                for name, tensor in checkpoint.tensors():
                    params[name].copy_(tensor)

        Args:
            names: As for `fastload.load`: those of `PerRank` values only if they are named.
            device: Where the tensors live; the CPU if None.
            boxes: In place of `names`: by name of the tensor, a `fastload.Box` of it in elements, or several
                in a list. Each rank hands out its own, and asks for what it likes; what several want is
                read once. The ranks load window after window of the checkpoint, so large that each rank
                has room for what it wants of two; `report` is that of the last one.
            borrow: Whether the caller only copies from a tensor, before it closes the checkpoint, as engines
                do. Where each rank takes all for itself (strategy ``direct``), into host memory, from files
                that this host's page cache has, and nothing is verified (`LoadOptions.verify`, or no commit
                record), tensors are then views of the mapped files: only what is copied is touched. A file
                that somebody writes to meanwhile is an error at the end, one that is cut short a SIGBUS.

        Returns:
            An iterator of (name, tensor), which a rank may leave early; see `TensorStream`. A tied tensor
            comes under all of its names, one after the other. `report` is that of the whole once all ranks
            have taken the last one, or left.

        Raises:
            MismatchError: There is no tensor of some name, or no such box.
            FastloadError: As for `fastload.load`; here, or when the next tensor is taken.
        """
        from fastload.loading.stream import Flow, StreamRequest, TensorStream, map_files

        self._end_flow()
        if boxes is not None:
            self._flow = self._box_flow(names, boxes, device)
            return TensorStream(self._flow)
        began = time.perf_counter()
        with self._at_most_one_failure():
            if self.manifest.guards:
                self._look_closer()  # what is handed out before all is over cannot be loaded again
            opened = self._opened
            mapped = map_files(opened, device) if borrow else None
            job = prepare(opened, StreamRequest(names, device, mapped))
        before = self._before(began)
        self._watch(job)
        self._flow = Flow(
            opened.world,
            job,
            guard=self._at_most_one_failure,
            settle=lambda moves: self._settle(job, before, moves),
        )
        return TensorStream(self._flow)

    def _box_flow(self, names: object, boxes: WantedBoxes, device: torch.device | str | None) -> BoxFlow:
        from fastload.loading.stream import BoxFlow, BoxWindows

        opened = self._opened
        staging_bytes = opened.options.staging_bytes

        def load(wanted: BoxesByName) -> None:
            self._load(BoxRequest(wanted), staging_bytes=max(_LEAST_STAGING_BYTES, staging_bytes // 2))

        with self._at_most_one_failure():
            windows = BoxWindows.agree(
                opened.world, self.manifest, boxes, names=names, device=device, room_bytes=staging_bytes // 4
            )
        return BoxFlow(opened.world, windows, guard=self._at_most_one_failure, load=load)

    def _run(self, request: Request) -> tuple[LoadReport, Any]:
        self._end_flow()
        with self._at_most_one_failure():
            return self._load(request, staging_bytes=self._opened.options.staging_bytes)

    def _load(self, request: Request, *, staging_bytes: int) -> tuple[LoadReport, Any]:
        def moves(job: Job) -> None:
            self._watch(job)
            job.pipeline.run()

        while True:
            before, opened = self._before(time.perf_counter()), self._opened
            if staging_bytes != opened.options.staging_bytes:
                opened = replace(opened, options=replace(opened.options, staging_bytes=staging_bytes))
            job = prepare(opened, request)
            loaded = self._move(job, before, moves)
            if not loaded.is_misread:
                return self._finish(job, loaded)
            self._look_closer()

    def _settle(self, job: Job, before: Before, moves: Callable[[Job], object]) -> tuple[LoadReport, Any]:
        """Ends a load on all ranks; see `run`."""
        return self._finish(job, self._move(job, before, moves))

    def _move(self, job: Job, before: Before, moves: Callable[[Job], object]) -> Loaded:
        opened = self._opened
        loaded = run(opened, job, self._tracing, before, moves=moves)
        self._reported_retries = opened.access.storage.num_retries
        self._opened = replace(opened, access=opened.access.without(loaded.broken))
        return loaded

    def _finish(self, job: Job, loaded: Loaded) -> tuple[LoadReport, Any]:
        opened = self._opened
        _warn_of(loaded, opened.world)
        self.report = loaded.report
        return loaded.report, restore(opened, job.wish.matched, loaded)

    def _look_closer(self) -> None:
        """Finds out where data lie of which the manifest only says that they are like others."""
        access = look_closer(self._opened.world, self._opened.access)
        self._opened, self.manifest = replace(self._opened, access=access), access.manifest

    def _before(self, began: float) -> Before:
        # Retries of opening count with the first load; a later one counts its own.
        return Before.of(self._opened.access.storage, began=began, retries=self._reported_retries)

    def _watch(self, job: Job) -> None:
        self._last_reader = job.reader
        self._tracing.follow(job.pipeline.watches)

    def _end_flow(self) -> None:
        """Leaves a stream of tensors that is under way, and does what it owes the others."""
        if self._flow is not None:
            self._flow.leave()
            self._flow.wait()
            self._flow = None

    def outline(self) -> Outline:
        """Puts the state together without the data of its tensors: what plugins are built on.

        A call of all ranks. Only what arrays and long plain values are made of is read.
        """
        from fastload.loading.outline import outline

        def load(names: Sequence[str]) -> Any:
            return self.load(names=names) if names else {}

        world = self._opened.world
        return outline(self.manifest, world.rank, world.size, load)

    def verify(self) -> VerifyReport:
        """Checks every byte, whatever `LoadOptions.verify` says; see `fastload.verify` for errors."""
        from fastload.loading.sweep import Sweep

        if not self.manifest.block_bytes:
            raise IncompleteCheckpoint(
                f"{self.manifest.url}: it has no checksums to verify: no commit record ({RECORD_NAME}), "
                "such as `fastload convert` writes"
            )
        self._end_flow()
        with self._at_most_one_failure():
            opened = self._opened
            verifier = opened.verifier or Verifier(self.manifest)
            sweep = Sweep(opened.world, opened.access, verifier, opened.options)
            self._last_reader = sweep.reader
            return sweep.run()

    @contextmanager
    def _at_most_one_failure(self) -> Iterator[None]:
        """After a failure the ranks may be anywhere: nothing more is done with this open checkpoint."""
        if self._failed:
            raise WorldError("an earlier load of this open checkpoint failed: open it again")
        if self._closed:
            closed = WorldError(f"{self.manifest.url}: this checkpoint is closed: open it again")
            self._opened.world.leave(closed)  # to whom it may still be open
            raise closed
        try:
            with self._opened.world.together():
                yield
        except BaseException:
            self._failed = True
            raise


def _warn_of(loaded: Loaded, world: World) -> None:
    """Says on rank 0 who dropped out, and what was left out."""
    if world.rank != 0:
        return
    report = loaded.report
    for rank in report.ranks:
        if rank.rank in loaded.broken:
            _log.warning("%s: rank %d on %s %s", report.url, rank.rank, rank.host, rank.note)
    if report.left_out:
        names = ", ".join(report.left_out)
        _log.warning("%s: left out: %s", report.url, names)
