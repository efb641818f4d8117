"""How the names of a checkpoint and of ``into=`` differ, if one side has a prefix, or a part, more.

Trainings save models below a key, ``DistributedDataParallel`` and ``torch.compile`` put a name of theirs in
front of all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

__all__ = ["Renamed", "find_renamed"]

_WRAPPERS = {"module", "_orig_mod"}
_MOST_NAMES = 5_000  # that are looked at: enough to tell, and milliseconds
_MOST_PARTS = 12


class Renamed(NamedTuple):
    """What one side has more in its names.

    Attributes:
        part: Which ends with a dot.
        head: What is in front of it.
        is_saved: Whether it is the checkpoint's names that have it.
        longer: A name that has it.
        is_everything: Whether all names of the one side are those of the other with it.
    """

    part: str
    head: str
    is_saved: bool
    longer: str
    is_everything: bool

    @property
    def is_wrapper(self) -> bool:
        """Whether it is nothing but what wrappers of modules put there."""
        return _WRAPPERS.issuperset(self.part.removesuffix(".").split("."))

    def advice(self) -> str:
        """Says how the names differ, and what to do."""
        side = "the checkpoint has" if self.is_saved else "into= has"
        path = self.part.removesuffix(".")
        if self.is_saved and not self.head:
            keys = path.split(".")
            into = "".join(f"{{{key!r}: " for key in keys) + "model" + "}" * len(keys)
            rest = "" if self.is_everything else ", strict=False"
            return f"{side} {self.part!r} in front of these names: pass into={into}{rest}"
        shorter = self.head + self.longer[len(self.head) + len(self.part) :]
        saved, own = (self.longer, shorter) if self.is_saved else (shorter, self.longer)
        what = f"{side} {self.part!r} in its names ({saved!r} there, {own!r} in into=)"
        return what if self.is_saved else f"{what}: pass what is inside of it, such as model.{path}"


def find_renamed(saved: Sequence[str], own: Sequence[str]) -> Renamed | None:
    """Returns how names that only one side has differ from those that only the other has; None if otherwise.

    Args:
        saved: Of the checkpoint, and not in ``into=``.
        own: The other way round.
    """
    counts: Counter[tuple[bool, str, str]] = Counter()
    examples: dict[tuple[bool, str, str], str] = {}
    for is_saved, names, others in (True, saved, set(own)), (False, own, set(saved)):
        for name in names[:: 1 + len(names) // _MOST_NAMES]:
            for head, part, tail in _divisions(name):
                if head + tail in others:
                    counts[is_saved, head, part] += 1
                    examples.setdefault((is_saved, head, part), name)
    found = [
        Renamed(part, head, is_saved, examples[is_saved, head, part], False)
        for is_saved, head, part in counts
    ]
    if not found:
        return None
    best = max(found, key=lambda one: (one.is_wrapper, counts[one.is_saved, one.head, one.part]))
    all_names = {best.head + best.part + name.removeprefix(best.head) for name in own}
    return best._replace(is_everything=best.is_saved and all_names == set(saved))


def _divisions(name: str) -> Iterator[tuple[str, str, str]]:
    """Yields all ways to take some parts out of a name, such as ``b.`` out of ``a.b.c``."""
    starts = [0, *(place + 1 for place, letter in enumerate(name) if letter == ".")][:_MOST_PARTS]
    for begin, end in combinations(starts, 2):
        yield name[:begin], name[begin:end], name[end:]
