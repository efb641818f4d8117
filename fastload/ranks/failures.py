"""What the ranks make of their outcomes: one error on all of them, with the cause of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from fastload.errors import (
    DeadlineExceeded,
    FastloadError,
    Interrupted,
    PeerError,
    PlanMismatch,
    WorldError,
    blames_checkpoint,
    from_wire,
    to_wire,
)
from fastload.ranks.meeting import Verdict

__all__ = [
    "Outcome",
    "late",
    "outcomes_of",
    "raise_failures",
    "require_left",
    "require_same",
    "require_same_call",
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank brought to an agreement: a value, or the error that stopped it."""

    host: str
    value: Any
    error: dict[str, Any] | None


def raise_failures(
    what: str, outcomes: Sequence[Outcome], rank: int, own: BaseException | None = None
) -> None:
    """Raises on every rank if an outcome is an error.

    The same fastload error on all ranks is raised as itself. If nothing failed but the checkpoint, which
    is bad whoever reads it, all ranks raise what the first rank that noticed raised. Otherwise all
    ranks raise one `PeerError` with each failing rank's cause.

    Args:
        what: What the ranks did together.
        outcomes: What each of them brought.
        rank: This one.
        own: Its error, if it has one.
    """
    failures = {rank: from_wire(o.error) for rank, o in enumerate(outcomes) if o.error is not None}
    if not failures:
        return
    causes_only = {rank: e for rank, e in failures.items() if not isinstance(e, Interrupted)}
    failures = causes_only or failures
    source = min(failures)
    first = failures[source]
    same = len({(type(error), str(error)) for error in failures.values()}) == 1
    everywhere = same and len(failures) == len(outcomes)
    if (everywhere and (isinstance(first, FastloadError) or len(outcomes) == 1)) or all(
        map(blames_checkpoint, failures.values())
    ):
        try:
            raise own if own is not None and (everywhere or rank == source) else first
        finally:
            # Else error → traceback → frame → error would keep all their memory alive.
            del own, first
            failures.clear()
    causes = "; ".join(f"{_label(rank, outcomes)}: {_described(error)}" for rank, error in failures.items())
    raise PeerError(
        f"{what} failed on {len(failures)} of {len(outcomes)} ranks "
        f"(this is {_label(rank, outcomes)}): {causes}",
        failures,
    ) from own


def outcomes_of(verdict: Verdict, rank: int, size: int, hosts: dict[int, str]) -> list[Outcome]:
    """Returns what each rank brought; the same object for ranks of a host that brought the same.

    Args:
        verdict: What was decided.
        rank: This one.
        size: Number of ranks.
        hosts: Host of each rank as far as it is known, which becomes more.
    """
    outcomes: list[Outcome] = []
    made: dict[tuple[int, str], Outcome] = {}  # of thousands of ranks most say the same
    for each in range(size):
        answer = verdict.answers.get(each)
        if answer is None:
            error = to_wire(late(verdict.waited_s, own=each == rank))
            outcomes.append(Outcome(hosts.get(each, ""), None, error))
            continue
        host = hosts[each] = answer.get("host") or hosts.get(each, "")
        if (outcome := made.get((id(answer), host))) is None:
            outcome = made[id(answer), host] = Outcome(host, answer["value"], answer["error"])
        outcomes.append(outcome)
    return outcomes


def late(waited_s: float, *, own: bool) -> DeadlineExceeded:
    """Says of a rank, perhaps this one, that it has not answered in time."""
    if own:
        return DeadlineExceeded(f"came too late: the others waited {waited_s:.1f} s for it, and gave up")
    return DeadlineExceeded(
        f"did not answer within {waited_s:.1f} s: killed, stopped, stuck or cut off, "
        "or did not make this call (as inside of `if rank == 0:`)"
    )


def require_left(what: str, data: bytes | None, rank: int) -> bytes:
    """Returns bytes that a rank has left.

    Raises:
        WorldError: They are not there.
    """
    if data is None:
        raise WorldError(f"{what}: what rank {rank} has left is gone")
    return data


def require_same_call(calls: Sequence[str]) -> None:
    """Raises on all ranks if they have met in different calls."""
    if len({call.partition(" ")[0] for call in calls}) == 1:
        words = [call.split(" ") for call in calls]
        num_same = len(list(takewhile(lambda alike: len(set(alike)) == 1, zip(*words, strict=False))))
        require_same([{"path": " ".join(each[num_same:])} for each in words])
        return
    ranks = {call: [str(rank) for rank in range(len(calls)) if calls[rank] == call] for call in calls}
    places = [
        f"ranks {_some(at)} are {call}" if len(at) > 1 else f"rank {at[0]} is {call}"
        for call, at in ranks.items()
    ]
    raise PlanMismatch(f"the ranks are out of step: {_some(places)}")


def require_same(values: Sequence[Mapping[str, Any]]) -> None:
    """Checks that all ranks asked for the same.

    Raises:
        PlanMismatch: They did not; it names what differs and on which ranks.
    """
    lines = []
    for name, first in values[0].items():
        others = [
            f"rank {rank} {own.get(name)!r}" for rank, own in enumerate(values) if own.get(name) != first
        ]
        if others:
            lines.append(f"{name}: rank 0 {first!r}, {_some(others)}")
    if lines:
        raise PlanMismatch("the ranks did not ask for the same: " + "; ".join(lines))


def _label(rank: int, outcomes: Sequence[Outcome]) -> str:
    host = outcomes[rank].host
    return f"rank {rank} on {host}" if host else f"rank {rank}"


def _some(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
