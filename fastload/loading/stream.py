"""Tensors handed out one after the other, in little memory: what a rank takes, what it owes the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastload.base.devices import record_use
from fastload.base.errands import Errand
from fastload.base.threads import background
from fastload.comm.world import World
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest
from fastload.formats.names import OWN_STEM
from fastload.formats.state import OWN_PREFIX, own_view
from fastload.loading.job import Job, Opened
from fastload.loading.match import Match
from fastload.loading.mismatch import raise_mismatch
from fastload.loading.outbox import Outbox, Wanted
from fastload.loading.place import Destination
from fastload.loading.selection import Selection, catalogue

if TYPE_CHECKING:
    from fastload.loading.mapped import MappedFiles
    from fastload.loading.windows import BoxFlow

__all__ = ["Flow", "StreamRequest", "TensorStream"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamRequest:
    """What a caller asks for; see `Checkpoint.tensors`."""

    names: Sequence[str] | str | None
    device: torch.device | str | None
    mapped: MappedFiles | None = None
    dtype: None = None
    is_same: bool = True

    def match(self, opened: Opened, device: torch.device) -> Match:
        """Finds out what it is; there is no memory for it yet.

        Raises:
            MismatchError: There is no tensor of some name.
            ManifestError: torch has no such dtype.
        """
        manifest, world = opened.access.manifest, opened.world
        wanted = _wanted(manifest, self.names, world.rank, world.size)
        outbox = Outbox(manifest, wanted, device, opened.options.staging_bytes // 2, self.mapped)
        nothing = torch.empty(0)
        destinations = [
            Destination(one.entry, torch_spec(one.entry)[0], nothing, None, piece)
            for one in wanted
            for piece in one.entry.pieces or (None,)
        ]
        return Match(destinations, {}, _nothing, _nothing, url=manifest.url, outbox=outbox)


def _nothing() -> None:
    pass


def _wanted(manifest: Manifest, names: Sequence[str] | str | None, rank: int, size: int) -> list[Wanted]:
    """Returns which tensors to hand out, in the order of the checkpoint; none of the ranks' own."""
    has_own = manifest.structure is not None and any(f.name.startswith(OWN_STEM) for f in manifest.files)
    structure = manifest.structure
    if has_own:
        structure = own_view(structure, rank, size).structure
    if manifest.format != "fastload" and structure is not None:
        from fastload.formats.state import without_refused

        structure = without_refused(structure, [])
    selection = Selection(
        "*" if names is None else names, catalogue(replace(manifest, structure=structure)), has_own
    )
    if names is not None:
        raise_mismatch(manifest.url, missing=selection.absent)
    found: dict[str, list[str]] = {}
    complex128: set[str] = set()
    for name, saved in selection.chosen.items():
        if names is not None or not saved.stored.startswith(OWN_PREFIX) or not has_own:
            found.setdefault(saved.stored, []).append(name)
            complex128 |= {saved.stored} if saved.is_complex128 else set()
    return [
        Wanted(entry, tuple(found[entry.name]), entry.name in complex128)
        for entry in manifest.tensors
        if entry.name in found
    ]


class TensorStream(Iterator[tuple[str, Tensor]]):
    """Pairs of a name and a tensor; made by `Checkpoint.tensors`, for all ranks to iterate over.

    A rank may leave it when it likes, with ``break``, `close`, or by dropping it. It then does its part for
    the others in the background, until they have all they want; if all leave, the transfer ends. As a
    context manager, or inside of that of its checkpoint, an exception ends it on all ranks.
    """

    def __init__(self, flow: Flow | BoxFlow) -> None:
        self._flow = flow

    def __next__(self) -> tuple[str, Tensor]:
        name, tensor = self._flow.take()
        record_use(tensor)  # another thread, on another stream, may have allocated it
        return name, tensor

    def __enter__(self) -> TensorStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flow.leave(error)

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the interpreter ends, and lets no thread begin
            self.close()

    def close(self) -> None:
        """Leaves it; does nothing at its end. Later tensors are not handed out."""
        self._flow.leave()


class Flow:
    """The transfer behind a stream of tensors, seen from one rank.

    Args:
        world: The ranks.
        job: The transfer, ready to run.
        guard: What it all happens in.
        settle: Ends it on all ranks, given what is to be done for that.
    """

    def __init__(
        self,
        world: World,
        job: Job,
        *,
        guard: Callable[[], AbstractContextManager[None]],
        settle: Callable[[Callable[[Job], object]], object],
    ) -> None:
        assert job.wish.matched.outbox is not None, "made for a stream"
        self._world = world
        self._job = job
        self._outbox: Outbox = job.wish.matched.outbox
        self._guard = guard
        self._settle = settle
        self._tensors = self._hand_out()
        self._departure = Departure(world, ahead=job.plan.depth)
        self._rest: Errand | None = None
        self._is_over = False
        self._error: BaseException | None = None
        job.pipeline.ends_before = self._ends_before

    def take(self) -> tuple[str, Tensor]:
        """Returns the next tensor.

        Raises:
            StopIteration: There is none, or this rank has left.
            FastloadError: Some rank failed.
        """
        if self._is_over or self._rest is not None:
            raise StopIteration
        return next(self._tensors)

    def leave(self, error: BaseException | None = None) -> None:
        """Takes no more: goes on in the background as long as others do.

        Args:
            error: Why, if it is to end on all ranks; None if it is not.
        """
        if self._is_over:
            return
        if error is not None and self._error is None:
            self._error = error
            self._world.flag_failure()
        if self._rest is None:
            self._outbox.close()
            self._rest = background(self._finish, "fastload-rest")
            self._rest.start()

    def wait(self) -> None:
        """Returns once it has ended on this rank, after this has left."""
        if self._rest is not None:
            self._rest.join()

    def _hand_out(self) -> Iterator[tuple[str, Tensor]]:
        try:
            with self._guard():
                errors: list[Exception] = []
                try:
                    for in_place in self._job.pipeline.steps():
                        yield from self._outbox.hand_out(in_place)
                    yield from self._outbox.hand_out(())
                except Exception as error:
                    errors.append(error)
                self._settle(lambda job: self._raise(errors))
        finally:
            self._is_over = True
            self._outbox.close()

    def _raise(self, errors: list[Exception]) -> None:
        if self._error is not None:
            raise self._error
        try:
            if errors:
                raise errors[0]
        finally:
            errors.clear()  # else error → traceback → frame → error would keep all their memory alive

    def _ends_before(self, number: int) -> bool:
        if self._rest is None:
            return False
        return self._job.wish.decision.alone or self._departure.ends_before(number)

    def _finish(self) -> None:
        """Does what is left to do for the others; that it cannot is told to them, and here to nobody."""
        try:
            if not self._job.wish.decision.alone:
                self._departure.leave(self._job.pipeline.num_posted)
            for _ in self._tensors:
                pass
        except BaseException as error:
            _log.debug("after this rank had left: %s", error)
        finally:
            self._error = None


class Departure:
    """How ranks leave a transfer of rounds one by one: when all have, it ends with one and the same round.

    The last one that leaves says which. No rank is further: those that go on for the others begin no round
    that is more than so many ahead of what it has begun itself.

    Args:
        world: The ranks.
        ahead: How many rounds ahead.
    """

    def __init__(self, world: World, *, ahead: int) -> None:
        self._world = world
        self._ahead = ahead
        self._end: int | None = None

    def leave(self, num_begun: int) -> None:
        """Tells the others that this rank has left, with so many rounds begun."""
        if self._world.tally("leaving a stream", "departures", 1) == self._world.size:
            self._end = num_begun + self._ahead
            self._world.tally("leaving a stream", "end", self._end + 1)

    def ends_before(self, number: int) -> bool:
        """Whether a round is not to be begun any more."""
        if self._end is None and (found := self._world.tally("leaving a stream", "end", 0)):
            self._end = found - 1
        return self._end is not None and number >= self._end
