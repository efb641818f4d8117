"""The stack machine that pickles are programs of: each opcode, as far as it only describes something.

See `fastload.formats.unpickle`.
"""

from __future__ import annotations

import re
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from typing import Any

from fastload.formats.pickled import Elements, Global, Made, Pairs, Persistent
from fastload.formats.untrusted import show

__all__ = ["Ended", "Machine"]

_MAX_PROTOCOL = 5
_MAX_INT_BYTES = 1024  # Python shows integers of 4300 digits at most
_FREE_OBJECTS = 100_000
_LEAST_BYTES = 5  # for each object beyond those; programs write seven and more
_MAX_MARKS = 10_000  # open at once: one for each level of nesting
_NAME = re.compile(r"[^\s\x00-\x1f]{1,1000}")


class Ended(Exception):
    """The data ended within an opcode."""


# The opcodes that make an object of some 80 bytes from as little as one.
_MAKING = frozenset(b"]lt\x87}d\x8f\x91c\x93R\x81\x92ioPQ")


# The opcodes that large pickles are made of.
_MEMOIZE, _TUPLE_1, _TUPLE_2, _NEW, _SHORT_TEXT = b"\x94\x85\x86\x81\x8c"
_GET_FAR, _GET_NEAR, _INT4, _MARK, _SET_ITEMS, _NO_ARGS = b"jhJ(u)"
_DICT, _BUILD, _CALL, _UINT1, _UINT2, _STOP = b"}bRKM."
_AS_UINT2, _AS_UINT4, _AS_INT4 = (struct.Struct(code).unpack_from for code in ("<H", "<I", "<i"))
_AS_UINT8, _AS_DOUBLE = (struct.Struct(code).unpack_from for code in ("<Q", ">d"))


class Machine:
    """The stack machine that pickles are programs of."""

    def __init__(self, data: bytes, start: int) -> None:
        self.data = data
        self.at = start
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # what the stack was at each mark
        self.memo: list[Any] = []
        self.far_memo: dict[int, Any] = {}  # what is not memorized one after the other, from 0 on
        self.protocol = 0
        self.start = start
        self.room = _FREE_OBJECTS  # how many more objects may be made
        self.granted = 0  # how many were added to that

    def run(self) -> Any:
        """Obeys the opcodes until the end; those that large pickles are made of right here."""
        data, memo, at, stack = self.data, self.memo, self.at, self.stack
        below, room = self.below, self.room
        try:
            while (code := data[at]) != _STOP:
                at += 1
                if room <= 0:
                    room = self.more_room(room, at)
                if code > 0x80:
                    if code == _MEMOIZE and not self.far_memo:
                        memo.append(stack[-1])
                        continue
                    if code == _TUPLE_1:
                        stack[-1] = (stack[-1],)
                        room -= 1
                        continue
                    if code == _NEW and type(stack[-2]) is Global:
                        args = stack.pop()
                        stack[-1] = Made(stack[-1], args)
                        room -= 1
                        continue
                    if code == _TUPLE_2:
                        last = stack.pop()
                        stack[-1] = (stack[-1], last)
                        room -= 1
                        continue
                    if code == _SHORT_TEXT and (end := at + 1 + data[at]) <= len(data):
                        stack.append(data[at + 1 : end].decode("utf-8", "surrogatepass"))
                        at = end
                        continue
                elif code == _GET_FAR and (index := _AS_UINT4(data, at)[0]) < len(memo):
                    stack.append(memo[index])
                    at += 4
                    continue
                elif code == _GET_NEAR and data[at] < len(memo):
                    stack.append(memo[data[at]])
                    at += 1
                    continue
                elif code == _INT4:
                    stack.append(_AS_INT4(data, at)[0])
                    at += 4
                    continue
                elif code == _MARK and len(below) < _MAX_MARKS:
                    below.append(stack)
                    stack = []
                    continue
                elif code == _NO_ARGS:
                    stack.append(())
                    continue
                elif code == _DICT:
                    stack.append(Pairs())
                    room -= 1
                    continue
                elif code == _SET_ITEMS and below and type(below[-1][-1]) is Pairs:
                    if len(stack) % 2 == 0:
                        pairs, stack = stack, below.pop()
                        stack[-1] += pairs
                        continue
                elif code == _BUILD and type(stack[-2]) is Made and stack[-2].state is None:
                    state = stack.pop()
                    stack[-1].state = state
                    continue
                elif code == _CALL and type(stack[-2]) is Global:
                    args = stack.pop()
                    stack[-1] = Made(stack[-1], args)
                    room -= 1
                    continue
                elif code == _UINT2:
                    stack.append(_AS_UINT2(data, at)[0])
                    at += 2
                    continue
                elif code == _UINT1:
                    stack.append(data[at])
                    at += 1
                    continue
                if code in _MAKING:
                    room -= 1
                self.at, self.stack, self.room = at, stack, room
                try:
                    _OPCODES[code](self)
                finally:
                    at, stack, room = self.at, self.stack, self.room
            at += 1
        finally:
            self.at, self.stack = at, stack
        if self.below or len(stack) != 1:
            raise ValueError("it does not come to one value")
        return stack.pop()

    def more_room(self, room: int, at: int) -> int:
        """Adds to the room for objects what the bytes before `at` allow.

        Raises:
            ValueError: There is still none.
        """
        allowed = (at - self.start) // _LEAST_BYTES
        room += allowed - self.granted
        self.granted = allowed
        if room <= 0:
            raise ValueError(f"more objects than {_FREE_OBJECTS} and one for each {_LEAST_BYTES} bytes")
        return room

    # What opcodes have behind them

    def take(self, length: int) -> bytes:
        begin = self.at
        taken = self.data[begin : begin + length]
        if length < 0:
            raise ValueError("a negative length")
        if len(taken) < length:
            raise Ended
        self.at = begin + length
        return taken

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise Ended
        begin, self.at = self.at, end + 1
        return self.data[begin:end]

    def byte(self) -> int:
        value = self.data[self.at]
        self.at += 1
        return value

    def uint4(self) -> int:
        (value,) = _AS_UINT4(self.data, self.at)
        self.at += 4
        return int(value)

    def int4(self) -> int:
        (value,) = _AS_INT4(self.data, self.at)
        self.at += 4
        return int(value)

    def uint8(self) -> int:
        (value,) = _AS_UINT8(self.data, self.at)
        self.at += 8
        return int(value)

    # The stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        if len(self.below) >= _MAX_MARKS:
            raise ValueError(f"more than {_MAX_MARKS} open marks")
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

    def uint2(self) -> int:
        (value,) = _AS_UINT2(self.data, self.at)
        self.at += 2
        return int(value)

    def double(self) -> None:
        self.push(_AS_DOUBLE(self.data, self.at)[0])
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
            self.room -= 1  # for its first list
            target.append(values)
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
            self.room -= 1  # for its first list
            target.set_items(pairs)
        elif type(target) is Pairs:
            target += pairs
        else:
            raise ValueError(f"keys for {show(target)}")

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
        if index < len(self.memo):
            self.memo[index] = self.stack[-1]
        elif index == len(self.memo) and not self.far_memo:
            self.memo.append(self.stack[-1])
        else:
            self.room -= 3  # which is how much more it takes
            self.far_memo[index] = self.stack[-1]

    def put_next(self) -> None:
        self.put(len(self.memo) + len(self.far_memo))

    def get(self, index: int) -> None:
        self.push(self.memo[index] if 0 <= index < len(self.memo) else self.far_memo[index])

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


def _frame(machine: Machine) -> None:
    if machine.uint8() > len(machine.data) - machine.at:
        raise Ended


# Not among them: EXT1, EXT2 and EXT4, whose names are elsewhere, and out-of-band buffers.
_OPCODES: dict[int, Callable[[Machine], object]] = {
    ord(code): opcode
    for code, opcode in {
        "\x80": Machine.check_protocol,
        "\x95": _frame,
        "(": Machine.mark,
        "0": Machine.pop,
        "1": Machine.to_mark,
        "2": lambda m: m.push(m.stack[-1]),
        "N": lambda m: m.push(None),
        "\x88": lambda m: m.push(True),
        "\x89": lambda m: m.push(False),
        "I": Machine.int_line,
        "J": lambda m: m.push(m.int4()),
        "K": lambda m: m.push(m.byte()),
        "M": lambda m: m.push(m.uint2()),
        "L": lambda m: m.push(int(m.line().removesuffix(b"L"))),
        "\x8a": lambda m: m.long(m.byte()),
        "\x8b": lambda m: m.long(m.int4()),
        "F": lambda m: m.push(float(m.line())),
        "G": Machine.double,
        "T": lambda m: m.push(m.take(m.int4()).decode()),
        "U": lambda m: m.push(m.take(m.byte()).decode()),
        "B": lambda m: m.push(m.take(m.uint4())),
        "C": lambda m: m.push(m.take(m.byte())),
        "\x8e": lambda m: m.push(m.take(m.uint8())),
        "\x96": lambda m: m.push(bytearray(m.take(m.uint8()))),
        "V": Machine.text_line,
        "X": lambda m: m.text(m.uint4()),
        "\x8c": lambda m: m.text(m.byte()),
        "\x8d": lambda m: m.text(m.uint8()),
        "]": lambda m: m.push([]),
        "l": lambda m: m.push(m.to_mark()),
        "a": Machine.append,
        "e": lambda m: m.extend_by(m.to_mark()),
        ")": lambda m: m.push(()),
        "t": lambda m: m.push(tuple(m.to_mark())),
        "\x85": lambda m: m.tuple_of(1),
        "\x86": lambda m: m.tuple_of(2),
        "\x87": lambda m: m.tuple_of(3),
        "}": lambda m: m.push(Pairs()),
        "d": Machine.pairs,
        "s": Machine.set_item,
        "u": lambda m: m.set_items(m.to_mark()),
        "\x8f": lambda m: m.push(Elements()),
        "\x90": lambda m: m.extend_by(m.to_mark()),
        "\x91": lambda m: m.push(Elements(m.to_mark())),
        "p": lambda m: m.put(int(m.line())),
        "q": lambda m: m.put(m.byte()),
        "r": lambda m: m.put(m.uint4()),
        "\x94": Machine.put_next,
        "g": lambda m: m.get(int(m.line())),
        "h": lambda m: m.get(m.byte()),
        "j": lambda m: m.get(m.uint4()),
        "c": Machine.named,
        "\x93": Machine.stack_name,
        "R": Machine.make,
        "\x81": Machine.make,
        "\x92": Machine.make_by_name,
        "i": Machine.instance,
        "o": Machine.instance_of_first,
        "b": Machine.build,
        "P": lambda m: m.push(Persistent(m.line().decode())),
        "Q": Machine.persistent,
    }.items()
}
