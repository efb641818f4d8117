"""Turns the decision of a step into one error on all ranks, with the cause of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, TypeVar

from fastload.comm.rendezvous import Decision
from fastload.errors import (
    DeadlineExceeded,
    FastloadError,
    Interrupted,
    PeerError,
    PlanMismatch,
    WorldError,
    blames_checkpoint,
    from_wire,
    some_of,
)

T = TypeVar("T")

_OWN_RANK = re.compile(r" \(this is rank [^)]*\)")


def joint_error(
    what: str, decision: Decision, rank: int, error_here: Exception | None = None, *, hosts: Mapping[int, str]
) -> BaseException:
    """Returns the error that this rank raises for a decision in which some rank failed.

    The same fastload error on all ranks is raised as itself. If only the checkpoint is bad, all ranks raise
    the error of the first rank that noticed. Otherwise all ranks raise one `PeerError` with the cause of each
    failing rank.

    Args:
        what: Name of the step.
        decision: The decision.
        rank: This rank.
        error_here: Its error, if any.
        hosts: Host of each rank, where known.
    """
    failures = errors_of(decision, rank)
    size = sum(count for _, count in decision.runs)
    causes_only = {rank: e for rank, e in failures.items() if not isinstance(e, Interrupted)}
    failures = causes_only or failures
    source = min(failures)
    first = failures[source]
    # A joint error of another call differs between ranks only in which rank it is.
    same = len({(type(error), _OWN_RANK.sub("", str(error), 1)) for error in failures.values()}) == 1
    everywhere = same and len(failures) == size
    # Errors of libraries come as `FastloadError` from other ranks.
    is_fastload = all(isinstance(error, FastloadError) for error in (first, error_here) if error is not None)
    if (everywhere and (is_fastload or size == 1)) or all(map(blames_checkpoint, failures.values())):
        return error_here if error_here is not None and (everywhere or rank == source) else first
    causes = "; ".join(f"{_label(rank, hosts)}: {_described(error)}" for rank, error in failures.items())
    joint = PeerError(
        f"{what} failed on {len(failures)} of {size} ranks (this is {_label(rank, hosts)}): {causes}",
        failures,
    )
    joint.__cause__ = error_here
    return joint


def errors_of(decision: Decision, rank: int) -> dict[int, BaseException]:
    """Returns the error of each rank that failed or did not come, for one of the ranks."""
    errors: dict[int, BaseException] = {}
    begin = 0
    for response, count in decision.runs:
        for later in range(begin, begin + count):
            if response is None and decision.left:
                errors[later] = Interrupted("another rank has left")
            elif response is None:
                errors[later] = late(decision.waited_s, is_here=later == rank)
            elif response["error"] is not None:
                errors[later] = from_wire(response["error"])
        begin += count
    return errors


def late(waited_s: float, *, is_here: bool) -> DeadlineExceeded:
    """Returns the error of a rank, perhaps this one, that has not responded in time."""
    if is_here:
        return DeadlineExceeded(f"came too late: the others waited {waited_s:.1f} s for it, and gave up")
    return DeadlineExceeded(
        f"did not answer within {waited_s:.1f} s: killed, stopped, stuck or cut off, "
        "or did not make this call (as inside of `if rank == 0:`)"
    )


def require_left(what: str, data: bytes | None, rank: int) -> bytes:
    """Returns bytes that a rank has left.

    Raises:
        WorldError: They do not exist.
    """
    if data is None:
        raise WorldError(f"{what}: the bytes from rank {rank} are gone")
    return data


def require_same_call(decision: Decision) -> None:
    """Raises on all ranks, which all came, if they make different calls."""
    if len({response["call"] for response, _ in decision.came}) == 1:
        return
    calls = [call for response, count in decision.came for call in [response["call"]] * count]
    if len({call.partition(" ")[0] for call in calls}) == 1:
        words = [call.split(" ") for call in calls]
        num_same = len(list(takewhile(lambda column: len(set(column)) == 1, zip(*words, strict=False))))
        require_same([{"path": " ".join(of_rank[num_same:])} for of_rank in words])
        return
    raise _out_of_step(calls)


def require_same_step(decision: Decision) -> None:
    """Raises on all ranks, which all came and none of which failed, if they take different steps."""
    if len({response["place"] for response, _ in decision.came}) > 1:
        raise _out_of_step(
            [f"at {response['place']}" for response, count in decision.came for _ in range(count)]
        )


def _out_of_step(of_ranks: Sequence[str]) -> PlanMismatch:
    """Returns the error for ranks that do different things."""
    ranks: dict[str, list[str]] = {}
    for rank, doing in enumerate(of_ranks):
        ranks.setdefault(doing, []).append(str(rank))
    groups = [
        f"ranks {some_of(at)} are {doing}" if len(at) > 1 else f"rank {at[0]} is {doing}"
        for doing, at in ranks.items()
    ]
    return PlanMismatch(f"the ranks are out of step: {some_of(groups)}")


def kinds_of(values: Iterable[T]) -> list[T]:
    """Returns each distinct object once: thousands of ranks mostly share one."""
    values = list(values)
    return list(dict(zip(map(id, values), values, strict=True)).values())


def require_same(values: Sequence[Mapping[str, Any]], *names: str) -> None:
    """Checks that values are the same on all ranks.

    Args:
        values: The values of each rank, by name.
        names: Names of the values to compare; all of them if none are given.

    Raises:
        PlanMismatch: Some differ; the message names them and their ranks.
    """
    lines, kinds = [], kinds_of(values)
    for name in names or values[0]:
        first = values[0].get(name)
        if all(terms.get(name) == first for terms in kinds):
            continue
        of_ranks = enumerate(terms.get(name) for terms in values)
        others = [f"rank {rank} {value!r}" for rank, value in of_ranks if value != first]
        lines.append(f"{name}: rank 0 {first!r}, {some_of(others)}")
    if lines:
        raise PlanMismatch("the ranks did not ask for the same: " + "; ".join(lines))


def _label(rank: int, hosts: Mapping[int, str]) -> str:
    host = hosts.get(rank)
    return f"rank {rank} on {host}" if host else f"rank {rank}"


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
