"""What pickles would import, call and make, as `fastload.formats.unpickle` describes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from fastload.errors import ManifestError
from fastload.formats.untrusted import show

__all__ = ["Elements", "Global", "Made", "Pairs", "Persistent", "made_by", "persistent_ids"]


class Global(NamedTuple):
    """What a pickle would import: a name, and no more than that.

    Attributes:
        module: Of Python 3, also where a pickle has the names of Python 2.
        name: In the module; may have dots.
    """

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Pairs(list[Any]):
    """What would be a dict: its keys and values by turns, as they were set; a key may be there twice."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<dict of {len(self) // 2}>"

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        """Yields each key with its value."""
        return zip(self[::2], self[1::2], strict=True)

    def by_text(self, where: str) -> dict[str, Any]:
        """Returns it as a dict whose keys are texts.

        Args:
            where: What it is, for messages.

        Raises:
            ManifestError: A key is something else.
        """
        keys = self[::2]
        if not {str}.issuperset(map(type, keys)):  # in C: there may be very many
            other = next(key for key in keys if type(key) is not str)
            raise ManifestError(f"{where}: a key is no text but {show(other)}")
        return dict(zip(keys, self[1::2], strict=True))


class Elements(list[Any]):
    """What would be a set or a frozenset: its members, some perhaps twice."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<set of {len(self)}>"


class Persistent(NamedTuple):
    """A reference to something outside of the pickle.

    Attributes:
        id: What the pickle says of it.
    """

    id: Any

    def __repr__(self) -> str:
        return "<persistent id>"


_NO_ITEMS: list[Any] = []
_NO_PAIRS = Pairs()


class Made:
    """What a pickle would make by a call.

    Attributes:
        what: What it would call, or whose ``__new__``.
        args: The arguments; whatever is there in place of the tuple.
        kwargs: Those by name.
        state: What its ``__setstate__`` or ``__dict__`` would get; None if nothing.
        items: What would be appended to it, or added.
        pairs: The items that would be set.
    """

    __slots__ = ("args", "items", "kwargs", "pairs", "state", "what")

    def __init__(self, what: Global, args: Any, kwargs: Pairs | None = None) -> None:
        self.what = what
        self.args = args
        self.kwargs = kwargs
        self.state: Any = None
        self.items = _NO_ITEMS  # most have none
        self.pairs = _NO_PAIRS

    def append(self, items: list[Any]) -> None:
        """Adds to its `items`."""
        if self.items is _NO_ITEMS:
            self.items = []
        self.items += items

    def set_items(self, pairs: list[Any]) -> None:
        """Adds to its `pairs`."""
        if self.pairs is _NO_PAIRS:
            self.pairs = Pairs()
        self.pairs += pairs

    def __repr__(self) -> str:
        return f"<{self.what}>"


def persistent_ids(value: Any) -> Iterator[Any]:
    """Yields all persistent ids in what a pickle holds, those in what cannot be read as well."""
    return (node.id for node in _nodes(value) if type(node) is Persistent)


def made_by(value: Any) -> set[Global]:
    """Returns what a pickle would call."""
    return {node.what for node in _nodes(value) if type(node) is Made}


def _nodes(value: Any) -> Iterator[Any]:
    """Yields all that is described in what a pickle holds, each once."""
    seen, waiting = set[int](), [value]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        if type(node) is Persistent:
            yield node
        elif type(node) is Made:
            seen.add(id(node))
            yield node
            waiting += [node.args, node.kwargs, node.state, node.items, node.pairs]
        elif type(node) in (list, tuple, Pairs, Elements):
            seen.add(id(node))
            waiting += node
