"""Reads pickles without running them: returns descriptions of names, calls and containers.

The standard library's `pickle.Unpickler` reads a pickle that has been checked and translated:

- Opcodes are on a closed list, lengths end within the data, and each object takes some bytes of the pickle.
So it
  needs no more than about twenty times its own length in memory.
- Opcodes that make dicts and sets, and those that need a class, are replaced. So nothing is hashed or
compared,
  which could take forever or overflow the stack in C.

`find_class` and `persistent_load` import nothing. A call becomes a `PickledCall`. As in any pickle, values
may be shared, deeply nested, or contain themselves: walk them with a limit.
"""

from __future__ import annotations

import io
import pickle
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterator
from typing import Any, NamedTuple

from fastload.base.memory import uncollected
from fastload.errors import ManifestError
from fastload.formats.untrusted import MAX_INT, MemoryBudget, show

_MAX_BYTES = 1 << 30
_MAX_INT_BYTES = 1024  # Python shows integers of 4300 digits at most
_MAX_DIMS = 64
_MAX_NUMBER_CHARS = 2 * _MAX_INT_BYTES
_NAME = re.compile(r"[^\s\x00-\x1f]{1,1000}")

# The opcodes, by how many bytes follow; by how many bytes have the length of what follows; by how many lines
# follow. Missing are EXT1, EXT2 and EXT4, whose names are elsewhere, STRING, and out-of-band buffers.
_FIXED = {
    0: b"()012NQRabdelostu]}\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94",
    1: b"Khq\x80",
    2: b"M",
    4: b"Jjr",
    8: b"G\x95",
}
_COUNTED = {1: b"CU\x8a\x8c", 4: b"BTX\x8b", 8: b"\x8d\x8e\x96"}
_LINES = {1: b"FILPVgp", 2: b"ci"}

# How many bytes of the pickle an object has to have, or an open mark; and how many are granted to all.
_COST = dict.fromkeys(b"]}dltciRoPQ\x81\x85\x86\x87\x8f\x91\x92\x93", 5) | {ord("("): 2}
_FREE_COST = 500_000

_REPLACED = {
    ord(code): replacement
    for code, replacement in {
        "}": b"]Q",  # a dict: its persistent id is a list
        "d": b"lQ",
        "\x8f": b")\x85Q",  # a set: its persistent id is a tuple in a tuple
        "\x91": b"t\x85Q",
        "\x81": b"R",  # cls.__new__(cls, *args): a call
        "\x92": b"0R",  # with keywords, which nothing that is read has
        "\x95": b"",  # a frame, whose length would be another
    }.items()
}
_STOP = ord(".")
_LONG_PUT, _PUT_LINE = b"rp"
_LONGS, _NUMBER_LINES = b"\x8a\x8b", b"FILgp"

_NUM_BYTES, _NUM_LENGTH_BYTES, _NUM_LINES = (
    {code: number for number, codes in table.items() for code in codes}
    for table in (_FIXED, _COUNTED, _LINES)
)
_SKIPPED = {
    code: 1 + number
    for code, number in _NUM_BYTES.items()
    if code not in _COST and code not in _REPLACED and code != _LONG_PUT
}


class Truncated(ManifestError):
    """The data end before the pickle."""


class Global(NamedTuple):
    """A class or function that a pickle names; it is not imported.

    Attributes:
        module: Its module in Python 3, also for pickles of Python 2.
        name: Its name in the module, which may have dots.
    """

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def __call__(self, *args: Any) -> PickledCall:
        """Returns the description of a call; called by the unpickler."""
        return PickledCall(self, args)


class PersistentId(NamedTuple):
    """A reference to an object outside of the pickle.

    Attributes:
        id: As the pickle has it.
    """

    id: Any

    def __repr__(self) -> str:
        return "<persistent id>"


class PickledDict(list[Any]):
    """The keys and values of a dict, alternating; a key may appear twice."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<dict of {len(self) // 2}>"

    def __setitem__(self, key: Any, value: Any) -> None:
        self += (key, value)

    def extend(self, items: Any) -> None:
        """Refuses items without keys."""
        raise ValueError("items without keys for a dict")

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        """Yields each key with its value."""
        return zip(self[::2], self[1::2], strict=True)

    def by_text(self, where: str) -> dict[str, Any]:
        """Returns a dict with texts as keys.

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


class PickledSet(list[Any]):
    """The members of a set or a frozenset; a member may appear twice."""

    __slots__ = ()
    add = list.append

    def __repr__(self) -> str:
        return f"<set of {len(self)}>"


_NO_ITEMS: list[Any] = []
_NO_PAIRS = PickledDict()


class PickledCall:
    """A call in a pickle, and the changes to its result.

    Attributes:
        what: The function, or the class for ``__new__``.
        args: The arguments.
        state: The argument of ``__setstate__``, or None.
        items: The items to append or add to the result.
        pairs: The items to set in the result.
    """

    __slots__ = ("args", "items", "pairs", "state", "what")

    def __init__(self, what: Global, args: tuple[Any, ...]) -> None:
        self.what = what
        self.args = args
        self.state: Any = None
        self.items = _NO_ITEMS  # most have none
        self.pairs = _NO_PAIRS

    def __setstate__(self, state: Any) -> None:
        if self.state is not None:
            raise ValueError(f"a second state for {self!r}")
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.pairs is _NO_PAIRS:
            self.pairs = PickledDict()
        self.pairs[key] = value

    def extend(self, items: list[Any]) -> None:
        """Adds to its `items`."""
        if self.items is _NO_ITEMS:
            self.items = []
        self.items += items

    def add(self, item: Any) -> None:
        """Adds one of its `items`."""
        self.extend([item])

    def __repr__(self) -> str:
        return f"<{self.what}>"


def unpickle(data: bytes, where: str) -> Any:
    """Reads a pickle.

    Args:
        data: The pickle; what follows it is not looked at.
        where: What it is, for messages.

    Raises:
        ManifestError: It is malformed, or makes too many objects for its length.
    """
    return unpickle_first(data, where)[0]


@uncollected
def unpickle_first(data: bytes, where: str, start: int = 0) -> tuple[Any, int]:
    """Reads the pickle that begins at `start`; returns its value and its end.

    Raises:
        Truncated: The data end before it.
        ManifestError: It is malformed.
    """
    if len(data) - start > _MAX_BYTES:
        raise ManifestError(
            f"{where}: a pickle of {len(data) - start} bytes is over the limit of {_MAX_BYTES}"
        )
    end = None
    try:
        translated, end = _translate(data, start)
        return _Unpickler(io.BytesIO(translated), encoding="utf-8").load(), end
    except (
        pickle.UnpicklingError,
        AttributeError,
        EOFError,
        LookupError,
        OverflowError,
        TypeError,
        ValueError,
    ) as error:
        if end is None and isinstance(error, IndexError):
            raise Truncated(f"{where}: the pickle is cut off at byte {len(data) - start}") from None
        raise ManifestError(f"{where}: the pickle is malformed: {str(error)[:400]}") from None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Global:
        if not _NAME.fullmatch(f"{module}.{name}"):
            raise ValueError(f"not a name: {show((module, name))}")
        python_3 = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        return Global(*python_3)

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is list:
            if len(pid) % 2:
                raise ValueError("a key without a value")
            return PickledDict(pid)
        if type(pid) is tuple and len(pid) == 1 and type(pid[0]) is tuple:
            return PickledSet(pid[0])
        return PersistentId(pid)


def _translate(data: bytes, start: int) -> tuple[bytes, int]:
    """Checks the opcodes of a pickle, and replaces some.

    Returns:
        The new pickle, and where the old one ends.

    Raises:
        IndexError: It goes on where the data end.
        ValueError: An opcode is not on the list, or too large.
    """
    parts: list[bytes] = []
    at = copied = start
    cost = -_FREE_COST
    while (code := data[at]) != _STOP:
        if code in _SKIPPED:
            at += _SKIPPED[code]
            continue
        begin, at = at, at + 1
        if code in _NUM_LENGTH_BYTES:
            num_bytes = _NUM_LENGTH_BYTES[code]
            length = int.from_bytes(data[at : at + num_bytes], "little")
            if length > _MAX_INT_BYTES and code in _LONGS:
                raise ValueError(f"an integer of {length} bytes")
            at += num_bytes + length
            continue
        cost += _COST.get(code, 0)
        if cost > begin - start:
            raise ValueError("it makes more objects than its length allows")
        if code in _NUM_BYTES:
            at += _NUM_BYTES[code]
            if code in _REPLACED:
                parts += (data[copied:begin], _REPLACED[code])
                copied = at
            elif code == _LONG_PUT and int.from_bytes(data[begin + 1 : at], "little") > at - start:
                raise ValueError("a place in the memo far behind the others")
        elif code in _NUM_LINES:
            for _ in range(_NUM_LINES[code]):
                at = data.find(b"\n", at) + 1
                if not at:
                    raise IndexError
            line = data[begin + 1 : at]
            if code in _NUMBER_LINES and len(line) > _MAX_NUMBER_CHARS:
                raise ValueError(f"a number of {len(line)} digits")
            if code == _PUT_LINE and int(line) > at - start:
                raise ValueError("a place in the memo far behind the others")
        else:
            raise ValueError(f"{bytes([code])!r} is no opcode that is known")
    parts.append(data[copied : at + 1])
    frame = b"\x95" + sum(map(len, parts)).to_bytes(8, "little")  # one, which the unpickler reads at once
    return b"".join((frame, *parts)), at + 1


def sizes_of(value: Any) -> tuple[int, ...]:
    """Returns the numbers of a ``torch.Size``, of a tuple or of a list.

    Raises:
        ValueError: They cannot be sizes or strides of a tensor.
    """
    if type(value) is PickledCall and value.what == ("torch", "Size") and value.args:
        value = value.args[0]
    is_sized = type(value) in (tuple, list) and {int}.issuperset(map(type, value))  # in C: asked very often
    if not is_sized or len(value) > _MAX_DIMS or (value and not (min(value) >= 0 and max(value) <= MAX_INT)):
        raise ValueError(f"{show(value)} in place of sizes of a tensor")
    return tuple(value)


class PickleParser:
    """Takes the values of a pickle of metadata apart, strictly; the base class of parsers.

    Args:
        where: Its URL, for messages.
        budget: Charged with the memory of its values.
    """

    def __init__(self, where: str, budget: MemoryBudget) -> None:
        self.where = where
        self.budget = budget

    def fields_of(self, value: Any, what: str = "") -> dict[str, Any]:
        """Returns a dict whose keys are texts; `what` says in messages where it is."""
        if type(value) is not PickledDict:
            raise self.error(f"{show(value)} in place of a dict", what)
        self.budget.charge(8 * len(value))
        return value.by_text(self.where)

    def sizes(self, value: Any, what: str = "") -> tuple[int, ...]:
        """Returns sizes or offsets of a tensor."""
        try:
            return sizes_of(value)
        except ValueError as error:
            raise self.error(str(error), what) from None

    def error(self, problem: str, what: str = "") -> ManifestError:
        """Returns the error to raise."""
        return ManifestError(": ".join(filter(None, (self.where, what, problem))))


def persistent_ids(value: Any) -> Iterator[Any]:
    """Yields all persistent ids in a value of a pickle, also those in values that cannot be loaded."""
    return (node.id for node in _nodes(value) if type(node) is PersistentId)


def pickled_calls(value: Any) -> set[Global]:
    """Returns the functions and classes that a pickle calls."""
    return {node.what for node in _nodes(value) if type(node) is PickledCall}


def _nodes(value: Any) -> Iterator[Any]:
    """Yields all calls and persistent ids in a value of a pickle, each once."""
    seen, waiting = set[int](), [value]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        if type(node) is PersistentId:
            yield node
        elif type(node) is PickledCall:
            seen.add(id(node))
            yield node
            waiting += [node.args, node.state, node.items, node.pairs]
        elif type(node) in (list, tuple, PickledDict, PickledSet):
            seen.add(id(node))
            waiting += node
