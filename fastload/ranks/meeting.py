"""How the ranks of a group meet in a store and hear one verdict, also ranks that are late or out of step.

A *call* (a load, a save, ...) has a number, which each rank draws from a counter of its own in the store;
ranks with the same number are in the same call. A call is a series of steps. In each step every rank brings
an answer, and all ranks hear one verdict:

1. A rank appends its answer to the log of the step, and counts it. Who counts the last one decides: the log
   is the verdict. Who loses patience decides, too, by what is in the log then. The first decision is the only
   one (`compare_set`), so all ranks hear the same, and a rank that is not in it is late, whenever it comes.
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

import base64
import json
import zlib
from dataclasses import dataclass
from typing import Any

__all__ = ["Step", "Verdict"]

# One number counts three things: answers, ranks that have heard the verdict, ranks that have lost patience.
_HEARD = 1 << 20
_IMPATIENT = 1 << 40


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided of a step: the same on all ranks, for good.

    Attributes:
        waited_s: Patience of the rank that decided, in seconds.
        answers: Rank → its answer, for the ranks that came in time.
    """

    waited_s: float
    answers: dict[int, dict[str, Any]]

    @classmethod
    def from_bytes(cls, data: bytes) -> Verdict:
        """Reads what `Step.decide` left."""
        waited_s, _, packed = str(data, "ascii").partition("\n")
        return cls(float(waited_s), _read_log(str(zlib.decompress(base64.b64decode(packed)), "ascii")))

    def is_of(self, call: str) -> bool:
        """Whether some rank brought an answer to a call of that name."""
        return _has_call(self.answers, call)


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

    @property
    def keys(self) -> list[str]:
        """All that it leaves in the store."""
        return [self.log, self.count, self.verdict]

    def answer(self, rank: int, answer: str) -> bool:
        """Brings the answer of a rank, a JSON object; returns whether it was the last one."""
        self._store.append(self.log, f"{rank} {answer}\n")
        return bool(self._store.add(self.count, 1) % _HEARD == self._size)

    def lose_patience(self) -> bool:
        """Returns whether this rank is the first one to: the others need not send the store all the same."""
        return bool(self._store.add(self.count, _IMPATIENT) // _IMPATIENT == 1)

    def decide(self, waited_s: float) -> Verdict:
        """Returns the verdict: that of whoever decided first. This rank must have answered."""
        # Packed, since all ranks get it through one store, and answers are much alike; a store takes text.
        packed = base64.b64encode(zlib.compress(self._store.get(self.log), 1))
        verdict = f"{waited_s}\n{str(packed, 'ascii')}"
        return Verdict.from_bytes(self._store.compare_set(self.verdict, "", verdict))

    def is_decided(self) -> bool:
        """Whether there is a verdict."""
        return bool(self._store.check([self.verdict]))

    def read(self) -> Verdict:
        """Returns the verdict, which has to be there."""
        return Verdict.from_bytes(self._store.get(self.verdict))

    def is_being_made(self, call: str) -> bool:
        """Whether some rank has answered, and to a call of that name; the log has to be there."""
        return _has_call(_read_log(str(self._store.get(self.log), "ascii")), call)

    def hear(self) -> bool:
        """Notes that this rank has heard the verdict; returns whether all have, and its keys may go."""
        return bool(self._store.add(self.count, _HEARD) // _HEARD % _HEARD == self._size)

    def num_heard(self) -> int:
        """Returns how many ranks have heard the verdict."""
        return int(self._store.add(self.count, 0) // _HEARD % _HEARD)


def _read_log(log: str) -> dict[int, dict[str, Any]]:
    answers: dict[int, dict[str, Any]] = {}
    for line in log.splitlines():
        rank, _, answer = line.partition(" ")
        answers.setdefault(int(rank), json.loads(answer))
    return answers


def _has_call(answers: dict[int, dict[str, Any]], call: str) -> bool:
    return any(answer.get("call") == call for answer in answers.values())
