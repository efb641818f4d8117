import collections
import io
import os
import pickle
import pickletools
import struct
import tracemalloc
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import ManifestError
from fastload.ext.formats.torch_save.unpickle import (
    Global,
    PersistentId,
    PickledCall,
    PickledDict,
    PickledSet,
    Truncated,
    unpickle,
    unpickle_first,
)
from tests.drawn import draws

_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=20,
)


def _real(value: Any) -> Any:
    """What a pickle of plain values stands for."""
    if type(value) is PickledDict:
        return {_real(key): _real(one) for key, one in value.pairs()}
    if type(value) is PickledCall and value.what == Global("_codecs", "encode"):
        return value.args[0].encode(value.args[1])
    if type(value) is PickledCall and value.what == Global("builtins", "bytes"):
        return b""
    return type(value)(map(_real, value)) if type(value) in (list, tuple) else value


@given(_PLAIN, st.integers(0, 5), st.booleans())
def test_plain_values_come_out_as_they_were(value: Any, protocol: int, optimized: bool) -> None:
    data = pickle.dumps(value, protocol)
    data = pickletools.optimize(data) if optimized else data
    found, end = unpickle_first(b"before" + data + b"after", "it", len(b"before"))
    assert _real(found) == value
    assert end == len(b"before") + len(data)


@pytest.mark.parametrize("protocol", range(6))
def test_what_a_pickle_would_make_is_described(protocol: int) -> None:
    state = OrderedDict(a=1)
    state.extra = {"b": 2}  # type: ignore[attr-defined]
    for cls, name in ((set, "set"), (frozenset, "frozenset")):
        found = unpickle(pickle.dumps(cls((7,)), protocol), "it")
        if protocol < 4:
            assert (found.what, found.args) == (Global("builtins", name), ([7],))
        else:
            assert type(found) is PickledSet
            assert list(found) == [7]
    found = unpickle(pickle.dumps([state, state, collections.deque([3])], protocol), "it")
    assert found[0] is found[1]
    assert found[0].what == Global("collections", "OrderedDict")
    assert found[0].state.by_text("it")["extra"].by_text("it") == {"b": 2}
    assert list(found[0].pairs.pairs()) == [("a", 1)]
    assert found[2].items == [3]


def test_old_classes_names_and_persistent_ids_are_described() -> None:
    assert unpickle(b"(i__builtin__\nset\nQ.", "it").id.what == Global("builtins", "set")
    made = unpickle(b"(cos\nsystem\nK\x01o.", "it")
    assert (str(made.what), made.args) == ("os.system", (1,))
    assert unpickle(b"Pthe id\n.", "it") == PersistentId("the id")
    assert str(unpickle(b"\x80\x02ccopy_reg\n_reconstructor\n.", "it")) == "copyreg._reconstructor"
    made = unpickle(b"\x80\x04\x8c\x02os\x8c\x06system\x93K\x07\x85}\x92.", "it")
    assert (str(made.what), made.args) == ("os.system", (7,))


class _Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self._made = function, args

    def __reduce__(self) -> Any:
        return self._made


def test_nothing_that_a_pickle_calls_is_called(tmp_path: Any) -> None:
    canary = tmp_path / "canary"
    command = f"touch {canary}"
    attacks = [
        _Calls(os.system, command),
        _Calls(eval, f"open({str(canary)!r}, 'w')"),
        _Calls(getattr, _Calls(__import__, "os"), "system"),
        _Calls(open, str(canary), "w"),
        _Calls(io.open, str(canary), "w"),
    ]
    for protocol in range(6):
        for attack in attacks:
            try:
                found = unpickle(pickle.dumps({"a": attack}, protocol), "it")
            except ManifestError:
                continue
            assert type(found[1]) is PickledCall
    assert not canary.exists()
    pickle.loads(pickle.dumps(attacks[0]))
    assert canary.exists()  # it is a real one


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "cut off at byte 0"),
        (b"\x80\x04K", "cut off"),
        (b"X\xff\xff\xff\xff.", "cut off"),
        (b"\x8e" + struct.pack("<Q", 1 << 62) + b".", "cut off"),
        (b"\x96" + struct.pack("<Q", 1 << 40) + b".", "cut off"),
        (b"\x8b\xff\xff\xff\xff.", "an integer of"),
        (b"\x8b\xff\xff\xff\x7f.", "an integer of"),
        (b"\x80\x06N.", "protocol: 6"),
        (b"\x82\x01.", "is no opcode"),  # EXT1
        (b"\x97\x98.", "is no opcode"),  # NEXT_BUFFER
        (b"S'text'\n.", "is no opcode"),  # STRING, whose quotes and escapes would be evaluated
        (b"..", "underflow"),
        (b"0.", "underflow"),
        (b"h\x05.", "not found"),
        (b"q\x05N.", "underflow"),
        (b"Nr\xff\xff\xff\x7f.", "far behind"),
        (b"Np2000000000\n.", "far behind"),
        (b"NN\x93.", "requires str"),
        (b"cos\nsys tem\n.", "not a name"),
        (b"K\x01)R.", "not callable"),
        (b"cos\nsystem\n)R)R.", "not callable"),
        (b"K\x01K\x02a.", "no attribute"),
        (b"}K\x02a.", "without keys"),
        (b"]K\x02K\x03s.", "out of range"),
        (b"}(K\x02u.", "odd number"),
        (b"(K\x02d.", "a key without a value"),
        (b"]}b.", "not a dictionary"),
        (b"cos\nsystem\n}b.", "not a dictionary"),
        (b"cos\nsystem\n)R}b}b.", "a second state"),
        (b"I" + b"9" * 5000 + b"\n.", "a number of"),
        (b"L0x" + b"f" * 5000 + b"\n.", "a number of"),
        (b"Fnine\n.", "float"),
    ],
)
def test_bad_pickles_are_refused(data: bytes, says: str) -> None:
    with pytest.raises(ManifestError, match=f"the file.*{says}"):
        unpickle(data, "the file")


def test_bombs_take_no_more_memory_than_their_text() -> None:
    bombs = [
        b"N" + b"r\xff\xff\xff\x7f" * 100 + b".",  # far places in the memo
        b"N" + b"".join(b"r" + place.to_bytes(4, "little") for place in range(1000, 100_000, 5)) + b".",
        b"]" + b"(h\x00h\x00e" * 1000 + b".",
        b"]q\x00" + b"h\x00h\x00a" * 1000 + b"0" * 1000 + b".",  # holds itself
        b")" + b"2\x86" * 1000 + b".",  # 2**1000 members, if one counts
        b"}" + b")" + b"2\x86" * 1000 + b"Ns.",  # as a key, that is if one hashes
        b"\x8f(" + b")" + b"2\x86" * 1000 + b"\x90.",
        b"(" + b")" + b"2\x86" * 1000 + b"\x91.",
        b"(" + b")" + b"2\x86" * 1000 + b"Nd.",
        b"}" + b")" + b"\x85" * 90_000 + b"Ns.",  # deeper than the stack of C
        b"}" + b"c\0\n\0\n" * 100 + b"Ns.",
        b"]" * 50_000 + b"a" * 49_999 + b".",
    ]
    tracemalloc.start()
    for bomb in bombs:
        try:
            repr(unpickle(bomb, "it").__class__)
        except ManifestError:
            continue
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 30_000_000


@pytest.mark.parametrize(
    "pattern",
    [
        b"]",
        b"(",
        b"}",
        b"K\x07\x85",
        b"K\x07\x85N\x94",
        b"h\x00)R",
        b"h\x00)RN",
        b"N",
        b"M\xff\xff",
        b"\x94",
        b"\x8f",
    ],
)
def test_memory_is_some_thirty_times_the_bytes_at_most(pattern: bytes) -> None:
    data = b"ccollections\nOrderedDict\nq\x00](N" + pattern * (300_000 // len(pattern)) + b"e."
    tracemalloc.start()
    with suppress(ManifestError):
        unpickle(data, "it")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 32 * len(data)


@draws(300)
@given(st.data())
def test_any_bytes_give_a_value_or_one_error(data: st.DataObject) -> None:
    whole = pickle.dumps(
        [OrderedDict(a=1.5), {2, 3}, ("x" * 300, -1, 1 << 70), b"abc"], data.draw(st.integers(0, 5))
    )
    mutated = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ManifestError):
        repr(unpickle(bytes(mutated), "it"))
    with pytest.raises(Truncated):
        unpickle(whole[: data.draw(st.integers(0, len(whole) - 1))], "it")
