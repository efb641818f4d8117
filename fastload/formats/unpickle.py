"""Reads pickles, and obeys none: what a pickle would import, call and make is only described.

The opcodes are interpreted here, in Python. Nothing is imported, called, hashed or compared, so there is
nothing that a pickle could reach; whoever reads the result decides which names it knows, and what they
stand for. Data are never larger than the text they come from, and a pickle costs a step for each opcode.

What comes out is plain values, lists and tuples (shared, nested deeply, or holding themselves, as the pickle
has it: walk them with a limit), and the classes of `fastload.formats.pickled`.
"""

from __future__ import annotations

import re
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from typing import Any

from fastload.base.memory import uncollected
from fastload.errors import ManifestError
from fastload.formats.pickled import Elements, Global, Made, Pairs, Persistent
from fastload.formats.untrusted import show

__all__ = ["Truncated", "unpickle", "unpickle_first"]

_MAX_BYTES = 1 << 30
_MAX_PROTOCOL = 5
_MAX_INT_BYTES = 1024  # Python shows integers of 4300 digits at most
_NAME = re.compile(r"[^\s\x00-\x1f]{1,1000}")


class Truncated(ManifestError):
    """The pickle goes on where the data end."""


def unpickle(data: bytes, where: str) -> Any:
    """Reads a pickle.

    Args:
        data: The pickle; what follows it is not looked at.
        where: What it is, for messages.

    Raises:
        ManifestError: It is malformed.
    """
    return unpickle_first(data, where)[0]


@uncollected
def unpickle_first(data: bytes, where: str, start: int = 0) -> tuple[Any, int]:
    """Reads the pickle that begins at `start`; returns what it holds, and where it ends.

    Raises:
        Truncated: It is not all there.
        ManifestError: It is malformed.
    """
    if len(data) - start > _MAX_BYTES:
        raise ManifestError(
            f"{where}: a pickle of {len(data) - start} bytes is over the limit of {_MAX_BYTES}"
        )
    machine = _Machine(data, start)

    def where_it_is() -> str:
        return f"at byte {machine.at - start}"

    try:
        return machine.run(), machine.at
    except (_Ended, struct.error):
        raise Truncated(f"{where}: the pickle is cut off {where_it_is()}") from None
    except IndexError:
        if machine.at >= len(data):  # else nothing was left on the stack
            raise Truncated(f"{where}: the pickle is cut off {where_it_is()}") from None
        why = "there is too little on the stack"
    except KeyError as error:
        why = f"{error.args[0]!r} is no opcode that is known, or nothing memorized"
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = str(error)[:400]
    raise ManifestError(f"{where}: the pickle is malformed {where_it_is()}: {why}")


class _Ended(Exception):
    """The data ended within an opcode."""


_STOP = ord(".")
_UINT2, _UINT4, _INT4 = (struct.Struct(code).unpack_from for code in ("<H", "<I", "<i"))
_UINT8, _DOUBLE = (struct.Struct(code).unpack_from for code in ("<Q", ">d"))


class _Machine:
    """The stack machine that pickles are programs of."""

    def __init__(self, data: bytes, start: int) -> None:
        self.data = data
        self.at = start
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # what the stack was at each mark
        self.memo: dict[int, Any] = {}
        self.protocol = 0

    def run(self) -> Any:
        data, opcodes = self.data, _OPCODES
        while (code := data[self.at]) != _STOP:
            self.at += 1
            opcodes[code](self)
        self.at += 1
        if self.below or len(self.stack) != 1:
            raise ValueError("it does not come to one value")
        return self.stack.pop()

    # What opcodes have behind them

    def take(self, length: int) -> bytes:
        begin = self.at
        taken = self.data[begin : begin + length]
        if length < 0:
            raise ValueError("a negative length")
        if len(taken) < length:
            raise _Ended
        self.at = begin + length
        return taken

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise _Ended
        begin, self.at = self.at, end + 1
        return self.data[begin:end]

    def byte(self) -> int:
        value = self.data[self.at]
        self.at += 1
        return value

    def uint4(self) -> int:
        (value,) = _UINT4(self.data, self.at)
        self.at += 4
        return int(value)

    def int4(self) -> int:
        (value,) = _INT4(self.data, self.at)
        self.at += 4
        return int(value)

    def uint8(self) -> int:
        (value,) = _UINT8(self.data, self.at)
        self.at += 8
        return int(value)

    # The stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def to_mark(self) -> list[Any]:
        if not self.below:
            raise ValueError("there is no mark")
        items, self.stack = self.stack, self.below.pop()
        return items

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.to_mark()

    # Numbers and texts; those of which there are most in one step

    def uint1(self) -> None:
        self.stack.append(self.data[self.at])
        self.at += 1

    def short_text(self) -> None:
        begin = self.at + 1
        end = self.at = begin + self.data[self.at]
        if end > len(self.data):
            raise _Ended
        self.stack.append(self.data[begin:end].decode("utf-8", "surrogatepass"))

    def uint2(self) -> None:
        self.push(_UINT2(self.data, self.at)[0])
        self.at += 2

    def double(self) -> None:
        self.push(_DOUBLE(self.data, self.at)[0])
        self.at += 8

    def int_line(self) -> None:
        text = self.line()
        self.push(text == b"01" if text in (b"00", b"01") else int(text))

    def long(self, length: int) -> None:
        if length > _MAX_INT_BYTES:
            raise ValueError(f"an integer of {length} bytes")
        self.push(int.from_bytes(self.take(length), "little", signed=True))

    def text(self, length: int) -> None:
        self.push(self.take(length).decode("utf-8", "surrogatepass"))

    def text_line(self) -> None:
        self.push(self.line().decode("raw-unicode-escape"))

    # Containers

    def append(self) -> None:
        value = self.stack.pop()
        self.extend_by([value])

    def extend_by(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is Made:
            target.items += values
        elif type(target) is list or type(target) is Elements:
            target += values
        else:
            raise ValueError(f"items for {show(target)}")

    def set_item(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self.set_items([key, value])

    def set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if len(pairs) % 2:
            raise ValueError("a key without a value")
        if type(target) is Made:
            target = target.pairs
        if type(target) is not Pairs:
            raise ValueError(f"keys for {show(target)}")
        target += pairs

    def pairs(self) -> None:
        items = self.to_mark()
        self.push(Pairs())
        self.set_items(items)

    def tuple_of(self, length: int) -> None:
        if len(self.stack) < length:
            raise ValueError("there is too little on the stack")
        self.stack[-length:] = [tuple(self.stack[-length:])]

    # The memo

    def put(self, index: int) -> None:
        if not self.stack or index < 0:
            raise ValueError("there is nothing to be memorized")
        self.memo[index] = self.stack[-1]

    def put_next(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def get_near(self) -> None:
        self.stack.append(self.memo[self.data[self.at]])
        self.at += 1

    def get_far(self) -> None:
        self.stack.append(self.memo[_UINT4(self.data, self.at)[0]])
        self.at += 4

    # What would be imported and called

    def name(self, module: Any, name: Any) -> None:
        if not (type(module) is str and type(name) is str and _NAME.fullmatch(f"{module}.{name}")):
            raise ValueError("a name that is none")
        if self.protocol < 3:
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        self.push(Global(module, name))

    def named(self) -> None:
        module = self.line().decode()
        self.name(module, self.line().decode())

    def stack_name(self) -> None:
        name = self.stack.pop()
        self.name(self.stack.pop(), name)

    def make(self) -> None:
        args = self.stack.pop()
        self.made(self.stack.pop(), args)

    def make_by_name(self) -> None:
        kwargs = self.stack.pop()
        args = self.stack.pop()
        if type(kwargs) is not Pairs:
            raise ValueError(f"{show(kwargs)} in place of arguments by name")
        self.made(self.stack.pop(), args, kwargs)

    def made(self, what: Any, args: Any, kwargs: Pairs | None = None) -> None:
        if type(what) is not Global:
            raise ValueError(f"it calls {show(what)}, which is no name")
        self.push(Made(what, args, kwargs))

    def instance(self) -> None:
        args = tuple(self.to_mark())
        self.named()
        self.made(self.stack.pop(), args)

    def instance_of_first(self) -> None:
        what, *args = self.to_mark()
        self.made(what, tuple(args))

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is not Made or target.state is not None:
            raise ValueError(f"a state for {show(target)}")
        target.state = state

    def persistent(self) -> None:
        self.push(Persistent(self.stack.pop()))

    def check_protocol(self) -> None:
        self.protocol = self.byte()
        if self.protocol > _MAX_PROTOCOL:
            raise ValueError(f"protocol {self.protocol} is not supported")


def _frame(machine: _Machine) -> None:
    if machine.uint8() > len(machine.data) - machine.at:
        raise _Ended


# Not among them: EXT1, EXT2 and EXT4, whose names are elsewhere, and out-of-band buffers.
_OPCODES: dict[int, Callable[[_Machine], object]] = {
    ord(code): opcode
    for code, opcode in {
        "\x80": _Machine.check_protocol,
        "\x95": _frame,
        "(": _Machine.mark,
        "0": _Machine.pop,
        "1": _Machine.to_mark,
        "2": lambda m: m.push(m.stack[-1]),
        "N": lambda m: m.push(None),
        "\x88": lambda m: m.push(True),
        "\x89": lambda m: m.push(False),
        "I": _Machine.int_line,
        "J": lambda m: m.push(m.int4()),
        "K": _Machine.uint1,
        "M": _Machine.uint2,
        "L": lambda m: m.push(int(m.line().removesuffix(b"L"))),
        "\x8a": lambda m: m.long(m.byte()),
        "\x8b": lambda m: m.long(m.int4()),
        "F": lambda m: m.push(float(m.line())),
        "G": _Machine.double,
        "T": lambda m: m.push(m.take(m.int4()).decode()),
        "U": lambda m: m.push(m.take(m.byte()).decode()),
        "B": lambda m: m.push(m.take(m.uint4())),
        "C": lambda m: m.push(m.take(m.byte())),
        "\x8e": lambda m: m.push(m.take(m.uint8())),
        "\x96": lambda m: m.push(bytearray(m.take(m.uint8()))),
        "V": _Machine.text_line,
        "X": lambda m: m.text(m.uint4()),
        "\x8c": _Machine.short_text,
        "\x8d": lambda m: m.text(m.uint8()),
        "]": lambda m: m.push([]),
        "l": lambda m: m.push(m.to_mark()),
        "a": _Machine.append,
        "e": lambda m: m.extend_by(m.to_mark()),
        ")": lambda m: m.push(()),
        "t": lambda m: m.push(tuple(m.to_mark())),
        "\x85": lambda m: m.tuple_of(1),
        "\x86": lambda m: m.tuple_of(2),
        "\x87": lambda m: m.tuple_of(3),
        "}": lambda m: m.push(Pairs()),
        "d": _Machine.pairs,
        "s": _Machine.set_item,
        "u": lambda m: m.set_items(m.to_mark()),
        "\x8f": lambda m: m.push(Elements()),
        "\x90": lambda m: m.extend_by(m.to_mark()),
        "\x91": lambda m: m.push(Elements(m.to_mark())),
        "p": lambda m: m.put(int(m.line())),
        "q": lambda m: m.put(m.byte()),
        "r": lambda m: m.put(m.uint4()),
        "\x94": _Machine.put_next,
        "g": lambda m: m.get(int(m.line())),
        "h": _Machine.get_near,
        "j": _Machine.get_far,
        "c": _Machine.named,
        "\x93": _Machine.stack_name,
        "R": _Machine.make,
        "\x81": _Machine.make,
        "\x92": _Machine.make_by_name,
        "i": _Machine.instance,
        "o": _Machine.instance_of_first,
        "b": _Machine.build,
        "P": lambda m: m.push(Persistent(m.line().decode())),
        "Q": _Machine.persistent,
    }.items()
}
