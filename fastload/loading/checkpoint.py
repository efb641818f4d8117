"""An open checkpoint, as users see it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from weakref import WeakSet

import torch

from fastload.base.registry import extension_module
from fastload.base.threads import ProcessLock
from fastload.base.tracebacks import short_tracebacks
from fastload.comm.world import World
from fastload.errors import FastloadError, OptionError
from fastload.formats.manifest import Manifest
from fastload.loading.access import Access
from fastload.loading.match import BoxRequest, LoadRequest
from fastload.loading.session import Session
from fastload.options import LoadOptions
from fastload.report import LoadReport, VerifyReport

if TYPE_CHECKING:
    from fastload.ext.streams.tensors import BoxSelection, TensorStream
    from fastload.loading.match import BoxesByName
    from fastload.loading.selection import Outline


class OngoingTransfer(Protocol):
    """A transfer that goes on after the call that began it, such as a stream; the next call ends it."""

    def leave(self, error: BaseException | None = None) -> None:
        """Takes part no longer, but does its part for the other ranks; an error ends it on all ranks."""

    def wait(self) -> None:
        """Waits for its end on this rank, after it has left."""


@short_tracebacks
class Checkpoint:
    """A checkpoint that all ranks of a group have open. Made by `fastload.open`.

    Calls of several threads wait for each other. On several ranks they have to come in the same order.
    """

    _all_open: ClassVar[WeakSet[Checkpoint]] = WeakSet()
    _opening: ClassVar[ProcessLock] = ProcessLock()

    def __init__(self, world: World, access: Access, options: LoadOptions) -> None:
        self._transfer: OngoingTransfer | None = None
        self._session = Session(world, access, options)
        self._turn = threading.RLock()
        with self._opening:
            self._all_open.add(self)

    @property
    def manifest(self) -> Manifest:
        """Its files and tensors, and the place of each tensor, as its layers decode them."""
        return self._session.opened.access.logical

    @property
    def metadata(self) -> dict[str, str]:
        """Text that the writer attached: that of the commit record, if there is one."""
        return dict(self.manifest.metadata)

    @property
    def report(self) -> LoadReport | None:
        """The report of the last `load`, or None."""
        return self._session.report

    @property
    def trace_error(self) -> FastloadError | None:
        """Why rank 0 could not write the trace of the last `load`, or None. It fails no load."""
        return self._session.opened.observers.trace_error

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._session.is_inherited:
            if self._transfer is not None:
                self._transfer.leave(error)
            elif error is not None:
                self._session.leave(error)
        self.close()

    def __del__(self) -> None:
        # Between devices it leaves only when the caller says so, or has dropped everything.
        transfer = self._transfer
        if transfer is None or self._session.is_inherited:
            return
        if threading.main_thread().is_alive():
            transfer.leave()

    def close(self) -> None:
        """Releases files and connections, those of a read under way as soon as it ends.

        A rank that has left `tensors` early waits here until the others no longer need it. In a forked child
        it does nothing: the parent has the checkpoint open.
        """
        if self._session.is_inherited:
            return
        self._end_transfer()
        with self._opening:
            self._all_open.discard(self)
        self._session.close()

    @classmethod
    def urls_in_use(cls) -> set[str]:
        """Returns the URLs of the checkpoints that this process has open."""
        with cls._opening:
            return {checkpoint._session.opened.access.storage.url for checkpoint in cls._all_open}

    def prefetch(self) -> None:
        """Begins to read the checkpoint into host memory, in the background; see `fastload.prefetch`."""
        with self._call(ends_transfer=False):
            extension_module("prefetch").prefetch(self._session)
            self._session.opened.world.acknowledge()

    def wait(self) -> None:
        """Waits until all ranks have read what they prefetch, and verified it. A call of all ranks.

        Raises:
            ChecksumError: Bytes differ from those that were written.
            FastloadError: As for `fastload.load`; the same on all ranks.
        """
        with self._call(ends_transfer=False):
            self._session.await_supply()
            self._session.opened.world.acknowledge()

    @property
    def is_prefetched(self) -> bool:
        """Whether no read of what this rank prefetches is under way."""
        return self._session.is_supplied

    def load(
        self,
        *,
        into: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        names: Sequence[str] | str | None = None,
        strict: bool = True,
    ) -> Any:
        """Loads on all ranks; see `fastload.load` for arguments, result and errors.

        After `prefetch` it waits as `wait` does, and reads only what is not in memory.
        """
        with self._call():
            on_mismatch = self._session.opened.options.per_rank_mismatch
            request = LoadRequest(into, device, dtype, names, strict, on_mismatch)
            return self._session.serve(request).result

    def read(self, boxes: BoxesByName, *, cast: bool = False) -> LoadReport:
        """Reads boxes of tensors into this rank's memory, for plugins.

        A call of all ranks. Each requests the boxes that it wants, or none; bytes that several ranks want are
        read once.

        Args:
            boxes: By name of the tensor, pairs of a `fastload.Box` of it, in elements, and a tensor of that
                shape, of the stored dtype, with any strides, on any device.
            cast: Whether the tensors may have other dtypes, to which the data are cast.

        Returns:
            The report over all ranks.

        Raises:
            MismatchError: On some rank a box does not fit; no data have moved.
            FastloadError: As for `fastload.load`.
        """
        with self._call():
            return self._session.serve(BoxRequest(boxes, cast)).report

    def tensors(
        self,
        names: Sequence[str] | str | None = None,
        *,
        device: torch.device | str | None = None,
        boxes: BoxSelection | None = None,
        borrow: bool = False,
    ) -> TensorStream:
        """Streams tensors in file order, in bounded memory, for inference engines.

        A call of all ranks, which all get the same tensors. Together they read every byte once, ahead of the
        tensors that they take. A rank needs memory for the tensors that it keeps, the next one, and
        `staging_bytes`, however large the checkpoint is. A slow rank makes the others wait; one that takes no
        tensor for `timeout_s` fails them. Use the stream, or the checkpoint, as a context manager::

            with fastload.open(path) as checkpoint:
                for name, tensor in checkpoint.tensors():
                    params[name].copy_(tensor)

        Args:
            names: As for `fastload.load`; tensors of `PerRank` values have to be named.
            device: Device of the tensors; the CPU if None.
            boxes: Instead of `names`: by name of the tensor, a `fastload.Box` of it in elements, or a list of
                boxes. Each rank gets its own boxes, whichever it likes; bytes that several ranks want are
                read once. The ranks load the checkpoint in windows. Each rank has memory for its boxes in two
                of them. `report` is that of the last window.
            borrow: Whether the caller only copies from each tensor, before it closes the checkpoint, as
                engines do. Tensors are then views of the mapped files, if each rank reads everything for
                itself (strategy ``direct``), into host memory, from local files, and nothing is verified
                (`LoadOptions.verify`, or no commit record). A write to a file meanwhile is an error at the
                end; a file that is cut short, or a disk that fails, is a SIGBUS.

        Returns:
            An iterator of (name, tensor), which a rank may leave early; see `TensorStream`. A tied tensor
            comes once under each of its names. `report` covers the complete stream, once all ranks have taken
            the last tensor, or left.

        Raises:
            OptionError: A layer decodes the checkpoint, as with `LoadOptions.dequantize`.
            MismatchError: There is no tensor of some name, or no such box.
            FastloadError: As for `fastload.load`; here, or when the next tensor is taken.
        """
        access = self._session.opened.access
        if access.logical is not access.stored:
            raise OptionError(
                "a layer, such as that of dequantize=, decodes this checkpoint: streams hand out tensors as "
                "stored, so use load or read"
            )
        with self._call():
            streams = extension_module("streams.tensors")
            self._transfer = streams.prepare_stream(self._session, names, device, boxes, borrow=borrow)
        stream: TensorStream = streams.TensorStream(self, self._session, self._transfer)
        return stream

    @contextmanager
    def _call(self, *, ends_transfer: bool = True) -> Iterator[None]:
        """Makes a call of all ranks, once those of other threads have ended."""
        self._session.require_own()  # first: in a forked child a lock may be held for ever
        with self._turn:
            if ends_transfer:
                self._end_transfer()
            with self._session.usable():
                yield

    def _end_transfer(self) -> None:
        """Leaves the transfer that is under way, and waits until the other ranks have their tensors."""
        if self._transfer is not None:
            self._transfer.leave()
            self._transfer.wait()
            self._transfer = None

    def outline(self) -> Outline:
        """Returns the state without the data of its tensors, for plugins. A call of all ranks.

        Only arrays and long plain values are read.
        """
        from fastload.loading.selection import outline

        def load(names: Sequence[str]) -> Any:
            return self.load(names=names) if names else {}

        world = self._session.opened.world
        return outline(self.manifest, world.rank, world.size, load)

    def verify(self) -> VerifyReport:
        """Checks every byte, whatever `LoadOptions.verify` says; see `fastload.verify` for errors."""
        from fastload.loading.verify import verify

        with self._call():
            return verify(self._session)
