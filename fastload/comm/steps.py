"""Steps that all ranks take together: each does its part in a block, and all go on or all raise."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from types import TracebackType
from typing import TYPE_CHECKING, Any

import xxhash

from fastload.comm.failures import joint_error, require_left
from fastload.comm.responses import join_parts, split_parts, write_response
from fastload.errors import OptionError, WorldError

if TYPE_CHECKING:
    from fastload.comm.rendezvous import Decision
    from fastload.comm.world import World


class Step:
    """One step of all ranks, as a block in which this rank does its part; made by `World.step`.

    An exception in the block is raised on all ranks at its end, with every cause; see `failures.joint_error`.
    An interrupt (`KeyboardInterrupt`, `SystemExit`) answers nothing: `World.together` leaves the call.

    Make large objects in a function that the block calls: the traceback of an error keeps the locals of the
    block's own function.

    Args:
        world: The ranks.
        what: Name of the step, for messages.
        place: Where the code takes it; the same on all ranks.
        is_long: See `World.step`.
    """

    def __init__(self, world: World, what: str, place: str, *, is_long: bool = False) -> None:
        self._world = world
        self._what = what
        self._place = place
        self._is_long = is_long
        self._number = 0
        self._answer = ""  # in the form of `responses`
        self._attachment: bytes | None = None  # after the block, the one of whichever rank attached it
        self._keys: list[str] = []  # that hold the attachment of this rank in the store
        self._decision: Decision | None = None

    def __enter__(self) -> Step:
        self._number = self._world.begin_step()
        return self

    def answer(self, value: Any = None, *, attach: bytes | None = None) -> None:
        """Sets this rank's answer. Call it at most once, in the block.

        Args:
            value: A JSON value, or a dictionary with some values of `responses.Each`.
            attach: Bytes for all ranks. At most one rank attaches any.

        Raises:
            OptionError: The value is no JSON.
            PeerError: The store is gone.
        """
        assert not self._answer, "one answer"
        world = self._world
        try:
            self._answer = write_response(world.rank, {"value": value})
        except (TypeError, ValueError, RecursionError) as problem:
            raise OptionError(f"returned a value that is not JSON: {problem}") from None
        if attach is not None:
            self._attachment = attach
            if world.size > 1:
                limit_s = world.patience_s
                self._keys = world.rendezvous.leave(self._what, self._shared, attach, limit_s=limit_s)
            self._answer += write_response(world.rank, {"attached": len(self._keys)})

    @cached_property
    def answers(self) -> list[Any]:
        """The answer of each rank, after the block; one object for neighbours that gave the same.

        Raises:
            WorldError: Some rank gave none; on all ranks.
        """
        assert self._decision is not None, "after the block"
        if not all("value" in response for response, _ in self._decision.came):
            raise WorldError(f"{self._what}: not all ranks have answered")
        return self._decision.values

    @property
    def attachment(self) -> bytes:
        """The bytes that one rank has attached, after the block.

        Raises:
            WorldError: No rank has; on all ranks.
        """
        assert self._decision is not None, "after the block"
        if self._attachment is None:
            raise WorldError(f"{self._what}: no rank has attached bytes")
        return self._attachment

    @property
    def _shared(self) -> str:
        return f"shared/{self._number}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Exchanges the answers. This rank's error goes on by itself, unless another one is raised.

        No object may refer to an error whose traceback has a frame that refers to that object: their memory
        would stay until the garbage collector runs. So no frame keeps the error that is raised here, and no
        step keeps any.
        """
        world = self._world
        failure: BaseException | None = None
        world.end_step()
        try:
            if error is not None and not isinstance(error, Exception):
                return
            wait_s = world.patience_s
            if self._is_long:
                # A rank that is stuck reports it after its patience, so the others wait a little longer.
                wait_s = world.grace_s if error is not None else world.timeout_s - world.grace_s / 4
                if error is not None:
                    world.flag_failure()
            answer, attached = ("", b"") if error is not None else (self._answer, self._attachment or b"")
            decision = world.gather(
                self._what, answer, error, wait_s=wait_s, attachment=attached, place=self._place
            )
            if decision.failed:
                world.rendezvous.delete_at_end(self._keys)
                world.acknowledge()
                failure = joint_error(self._what, decision, world.rank, error, hosts=world.hosts)
            else:
                self._receive(decision)
            if failure is not None and failure is not error:
                raise failure
        except BaseException as raised:
            raised.__context__ = None  # this rank's error, which is the cause if it is one
            raise
        finally:
            del kind, error, trace, failure

    def _receive(self, decision: Decision) -> None:
        """Takes the answers, and the attachment if there is one."""
        world, self._decision = self._world, decision
        begins = accumulate((count for _, count in decision.came), initial=0)
        sources = [
            (begin, response["attached"])
            for begin, (response, _) in zip(begins, decision.came, strict=False)
            if "attached" in response
        ]
        assert len(sources) <= 1, "one rank attaches"
        if not sources or world.size == 1:
            return
        ((source, num_keys),) = sources
        world.rendezvous.note_shared(self._number, self._shared, num_keys)
        if self._attachment is None:
            data = decision.attachment
            if data is None:  # decided in the store
                limit_s = world.patience_s
                data = world.rendezvous.take(self._what, self._shared, keep=True, limit_s=limit_s)
            self._attachment = require_left(self._what, data, source)


class GatheringStep:
    """A step in which each rank answers bytes; made by `World.gathering_step`.

    Rank 0 collects them for the others in a second step, so that not every rank asks the store for those of
    every other. Equal bytes travel once.

    Args:
        world: The ranks.
        what: Name of the step, for messages.
        place: Where the code takes it; the same on all ranks.
    """

    def __init__(self, world: World, what: str, place: str) -> None:
        self._world = world
        self._what = what
        self._place = place
        self._step = Step(world, what, place)
        self._gathered = ""  # place in the store
        self._answers: list[bytes] = []

    def __enter__(self) -> GatheringStep:
        self._gathered = f"gathered/{self._world.next_step}"
        self._step.__enter__()
        return self

    def answer(self, data: bytes) -> None:
        """Sets this rank's answer. Call it once, in the block.

        Raises:
            PeerError: The store is gone.
        """
        if self._world.size == 1:
            self._answers = [data]
        else:
            self._world.show_bytes(self._what, self._gathered, data)
        self._step.answer(xxhash.xxh3_128_hexdigest(data))

    @property
    def answers(self) -> list[bytes]:
        """The bytes of each rank, after the block."""
        assert self._answers, "after the block"
        return self._answers

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._step.__exit__(kind, error, trace)
            if error is None and self._world.size > 1:
                self._answers = self._collect()
        finally:
            del kind, error, trace

    def _collect(self) -> list[bytes]:
        world, digests = self._world, self._step.answers
        sources = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
        with Step(world, self._what, self._place) as step:
            if world.rank == 0:
                shown = world.take_shown(self._what, self._gathered, sources.values())
                step.answer(attach=join_parts(shown))
        parts = dict(zip(sources, split_parts(step.attachment), strict=True))
        return [parts[digest] for digest in digests]
