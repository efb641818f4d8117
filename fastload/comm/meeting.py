"""How the ranks of a group meet in a store and hear one verdict, also ranks that are late or out of step.

A *call* (a load, a save, ...) has a number, which each rank draws from a counter of its own in the store;
ranks with the same number are in the same call. A call is a series of steps. In each step every rank brings
an answer, and all ranks hear one verdict:

1. A rank appends its answer to the log of the step, and counts it. Who counts the last one decides: the log
   is the verdict. Who loses patience decides, too, by what is in the log then, and so does who leaves. The
   first decision is the only one (`compare_set`), so all ranks hear the same, and a rank that is not in it is
   late, whenever it comes.
2. A rank goes on from a verdict only if all ranks are in it and none with an error. So all ranks return from
   a call, or all raise.
3. The keys of a step go once all ranks have answered the next one, since they have heard the verdict then;
   those of the last step once all have said that they have heard it. Late ranks say so, too.

A call that one rank makes and the others do not ends without them. When they come to its number, they find
its first step decided, without an answer of theirs. If it had another name than what they are about to do,
they go on to the next number, where they meet the one that made it. If it had the same name, they are late
for it: either the others make the same call once more, which they wait for a moment to see, and all meet
there; or what the others raised is raised here, too, and the next number is for the next call.

Ranks that meet in calls of different names are told so at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from typing import Any

from fastload.comm.responses import Column, join_responses, read_responses

__all__ = ["Step", "Verdict"]

# One number counts three things: answers, ranks that have heard the verdict, ranks that have lost patience.
_HEARD = 1 << 20
_IMPATIENT = 1 << 40
_IN_STORE, _ALONG_TREE, _LEFT = "store", "tree", "left"  # how a verdict came about
_APART = "\x03"  # between the answer of a rank that leaves and those that were there

_Runs = Sequence[tuple[dict[str, Any] | None, int]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided of a step: the same on all ranks, for good.

    Attributes:
        waited_s: Patience of the rank that decided, in seconds.
        runs: The answers of the ranks that came in time, None of others; each with the number of ranks, one
            after the other, that gave it.
        along_tree: Whether all came along the tree of the group, not to the store.
        left: Whether a rank has left, which decided without waiting for the others.
        bytes_along: What came along with it; None if it was read from the store.
        missed: Whether the call is over, and this rank came too late for it.
    """

    waited_s: float
    runs: _Runs
    along_tree: bool = False
    left: bool = False
    bytes_along: bytes | None = None
    missed: bool = False

    @classmethod
    def from_text(cls, text: str, size: int, bytes_along: bytes | None = None) -> Verdict:
        """Reads what `write` wrote."""
        head, _, table = text.partition("\n")
        waited_s, how = head.split()
        if how != _LEFT:
            return cls(
                float(waited_s), read_responses(table, size), how == _ALONG_TREE, bytes_along=bytes_along
            )
        last_words, table = table.split(_APART)
        each = zip(
            _by_rank(read_responses(last_words, size)), _by_rank(read_responses(table, size)), strict=True
        )
        return cls(float(waited_s), [(last or answer, 1) for last, answer in each], left=True)

    @staticmethod
    def write(waited_s: float, table: str, *, along_tree: bool = False, left: bool = False) -> str:
        """Returns it as text; see `answers` for the table."""
        how = _ALONG_TREE if along_tree else _LEFT if left else _IN_STORE
        return f"{waited_s} {how}\n{table}"

    def answer_of(self, rank: int) -> dict[str, Any] | None:
        """Returns the answer of a rank; None if it did not come in time."""
        ends = accumulate(count for _, count in self.runs)
        return next(answer for (answer, _), end in zip(self.runs, ends, strict=True) if rank < end)

    @property
    def came(self) -> list[tuple[dict[str, Any], int]]:
        """`runs` of the ranks that came in time."""
        return [(answer, count) for answer, count in self.runs if answer is not None]

    def num_others(self, rank: int) -> int:
        """Returns how many ranks but one came in time."""
        return sum(count for _, count in self.came) - (self.answer_of(rank) is not None)

    @property
    def nodes(self) -> Column | None:
        """Where each of them is, where they have told that; see `hosts.node`."""
        return next((answer["node"] for answer, _ in self.came if "node" in answer), None)

    @property
    def num_well(self) -> int:
        """How many of them brought no error."""
        return sum(count for answer, count in self.came if answer["error"] is None)

    def is_of(self, call: str) -> bool:
        """Whether some rank brought an answer to a call of that name."""
        return any(answer.get("call") == call for answer, _ in self.came)


class Step:
    """One step in the store.

    Args:
        store: A ``torch.distributed.Store``.
        name: Where the step is in it.
        size: Number of ranks.
    """

    def __init__(self, store: Any, name: str, size: int) -> None:
        self._store = store
        self._size = size
        self.log, self.count, self.verdict = f"{name}/answers", f"{name}/count", f"{name}/verdict"
        self.called = f"{name}/called"

    @property
    def keys(self) -> list[str]:
        """All that it leaves in the store."""
        first = self.called.endswith("0/called")  # of the steps of a call
        return [self.log, self.count, self.verdict, *([self.called] if first else [])]

    def answer(self, answer: str) -> bool:
        """Brings the answer of a rank, a table; returns whether it was the last one."""
        self._store.append(self.log, answer)
        return bool(self._store.add(self.count, 1) % _HEARD == self._size)

    def lose_patience(self) -> bool:
        """Returns whether this rank is the first one to: the others need not send the store all the same."""
        return bool(self._store.add(self.count, _IMPATIENT) // _IMPATIENT == 1)

    def decide(self, waited_s: float) -> Verdict:
        """Returns the verdict: that of whoever decided first. This rank must have answered."""
        table = join_responses([str(self._store.get(self.log), "ascii")])
        return Verdict.from_text(self.settle(Verdict.write(waited_s, table)), self._size)

    def leave(self, answer: str) -> Verdict:
        """Decides at once, since this rank leaves.

        What it has said along a tree before may be here in the answer of another rank: this holds instead.
        """
        self._store.append(self.log, "")  # else there may be none
        table = join_responses([str(self._store.get(self.log), "ascii")])
        text = self.settle(Verdict.write(0.0, f"{answer}{_APART}{table}", left=True))
        return Verdict.from_text(text, self._size)

    def settle(self, verdict: str) -> str:
        """Leaves a verdict unless there is one; returns which one is there then."""
        return str(self._store.compare_set(self.verdict, "", verdict), "ascii")

    def is_decided(self) -> bool:
        """Whether there is a verdict."""
        return bool(self._store.check([self.verdict]))

    def read(self) -> Verdict:
        """Returns the verdict, which has to be there."""
        return Verdict.from_text(str(self._store.get(self.verdict), "ascii"), self._size)

    def call(self, call: str) -> None:
        """Says which call is being made, by ranks that do not answer here yet."""
        self._store.set(self.called, json.dumps(call))  # a path may be no text

    def is_begun(self) -> bool:
        """Whether some rank has answered, or has said which call it makes."""
        return bool(self._store.check([self.log]) or self._store.check([self.called]))

    def is_being_made(self, call: str) -> bool:
        """Whether it `is_begun` for a call of that name."""
        if self._store.check([self.called]) and json.loads(self._store.get(self.called)) == call:
            return True
        if not self._store.check([self.log]):
            return False
        answers = read_responses(str(self._store.get(self.log), "ascii"), self._size)
        return any(answer is not None and answer.get("call") == call for answer, _ in answers)

    def hear(self) -> bool:
        """Notes that this rank has heard the verdict; returns whether all have, and its keys may go."""
        return bool(self._store.add(self.count, _HEARD) // _HEARD % _HEARD == self._size)

    def num_heard(self) -> int:
        """Returns how many ranks have heard the verdict."""
        return int(self._store.add(self.count, 0) // _HEARD % _HEARD)


def _by_rank(runs: _Runs) -> Iterator[dict[str, Any] | None]:
    return chain.from_iterable(repeat(answer, count) for answer, count in runs)
