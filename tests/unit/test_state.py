"""State taken apart and put together again: equal, types included, tied where it was tied."""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fastload.formats.decoder import decode_state
from fastload.formats.dtypes import NAMES, safetensors_spec
from fastload.formats.encoder import encode_state
from tests.e2e.forked import run_forked


def through_json(structure: Any) -> Any:
    """As the commit record writes it: keys sorted, UTF-8."""
    text = json.dumps(structure, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return json.loads(text.encode())


def round_trip(state: Any) -> Any:
    description = encode_state(state)
    for name, tensor in description.tensors.items():
        safetensors_spec(tensor)
        assert name.encode()
        assert name != "__metadata__"
        assert not tensor.requires_grad
    stored = {name: tensor.clone() for name, tensor in reversed(description.tensors.items())}
    restored = decode_state(through_json(description.structure), stored)
    assert encode_state(restored).structure == description.structure
    return restored


def assert_same(got: Any, wanted: Any) -> None:
    """Equal in type, order, and every bit."""
    assert type(got) is type(wanted)
    if isinstance(wanted, Tensor):
        assert (got.dtype, got.shape, got.requires_grad) == (wanted.dtype, wanted.shape, wanted.requires_grad)
        assert bits_of(got) == bits_of(wanted)
    elif isinstance(wanted, np.ndarray | np.generic):
        assert (got.dtype, got.shape, got.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())
    elif isinstance(wanted, dict):
        assert_same(list(got.items()), list(wanted.items()))
        assert_same(vars(got) if hasattr(got, "__dict__") else None, getattr(wanted, "__dict__", None))
        assert getattr(got, "default_factory", None) is getattr(wanted, "default_factory", None)
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted)
        for ours, theirs in zip(got, wanted, strict=True):
            assert_same(ours, theirs)
    elif isinstance(wanted, float | complex):
        parts = [struct.pack("<dd", value.real, value.imag) for value in (got, wanted)]
        assert parts[0] == parts[1]
    elif isinstance(wanted, set | frozenset):
        assert sorted(map(repr, got)) == sorted(map(repr, wanted))  # a nan is not equal to itself
    else:
        assert got == wanted


def bits_of(tensor: Tensor) -> list[int]:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).tolist() if plain.numel() else []


# Plain values

QUIET, SIGNALLING = (
    struct.unpack("<d", bits)[0] for bits in (b"\1\2\3\4\5\6\xf8\x7f", b"\1\0\0\0\0\0\xf0\xff")
)

VALUES = [
    None, True, False, 0, -1, 2**53 - 1, 2**53, -(2**53), 2**64, -(3**3000),
    0.0, -0.0, 1.0, 1e300, 5e-324, 0.1, math.inf, -math.inf, math.nan, QUIET, SIGNALLING,
    1j, complex(-0.0, math.nan), complex(math.inf, -0.0),
    "", "text", "\u00e9\u20ac\U0001f600", "\ud800", "\ud83d\ude00", "a\udfff\x00", "{}", "tensor",
    b"", b"\x00\xff", bytearray(b"ab"), range(3), range(10, -(2**70), -3), slice(None), slice(1, 2**60, None),
    torch.Size([2, 3]), torch.Size([]), torch.float32, torch.bfloat16, torch.uint16,
    torch.device("cpu"), torch.device("cuda", 3), torch.device("meta"),
    [], {}, (), set(), frozenset(), [[]], [{}], {"a": {}}, ((),), {1, "a", (2, None)},
    frozenset({-0.0, math.nan}),
    {"tensor": 1}, {"dict": []}, {"": ""}, {"\ud800": 1, "b": [1, (2, [3])]},
    {1: "int", "1": "str", (1, "1"): "tuple", None: 0, 2.5: 0, False: 0, ((1,), ()): 0, b"x": 0},
    OrderedDict([("b", 1), ("a", 2)]), Counter("abca"), Counter(), Counter({"a": 1.5}),
    *(defaultdict(factory, {"a": 1}) for factory in (None, list, dict, int, float, set)),
    np.float64(0.1), np.float32(0.1), np.float16("nan"), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True),
    np.complex64(1 - 2j), np.complex128(complex(-0.0, 3)), {np.int64(3): 1},
]  # fmt: skip


@pytest.mark.parametrize(
    "number", range(len(VALUES)), ids=lambda number: f"{number}-{type(VALUES[number]).__name__}"
)
def test_a_value_comes_back_with_its_type(number: int) -> None:
    value = VALUES[number]
    assert_same(round_trip(value), value)
    assert_same(round_trip([{"a": value}]), [{"a": value}])


def test_an_integer_too_long_for_decimal_digits_comes_back() -> None:
    huge = -(10**5000)
    assert round_trip({huge: [huge, torch.ones(1)], (huge,): 1}) == {huge: [huge, torch.ones(1)], (huge,): 1}


keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
leaves = (
    keys | st.binary(max_size=9) | st.complex_numbers() | st.sampled_from(VALUES)
    | st.builds(lambda n: torch.arange(n, dtype=torch.int16), st.integers(0, 3))
    | st.builds(lambda n: np.arange(n, dtype=np.float32), st.integers(0, 3))
)  # fmt: skip
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.sets(keys, max_size=4)
    ),
    max_leaves=20,
)


@given(states)
def test_any_state_comes_back(state: Any) -> None:
    assert_same(round_trip(state), state)


def test_plain_things_are_plain_json() -> None:
    state = {"model": {"a.b": torch.zeros(2)}, "steps": [1, 2.5, None, True, "x"]}
    description = encode_state(state)
    assert description.structure == {
        "dict": ["model", {"dict": ["a.b", {}]}, "steps", [1, 2.5, None, True, "x"]],
    }
    assert list(description.tensors) == ["model.a.b"]
    assert description.tensors["model.a.b"] is state["model"]["a.b"]


# Tensors


@pytest.mark.parametrize("dtype", [*sorted(NAMES, key=str), torch.complex128], ids=str)
def test_a_tensor_of_any_dtype_comes_back(dtype: torch.dtype) -> None:
    flat = (torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2).view(dtype)
    state = [flat, flat.view(2, 3), flat.view(3, 2).T, flat[:0], flat.view(6, 1)[2:4]]
    if "float4" not in str(dtype):
        state += [flat[3], flat.view(2, 3)[:, 1]]
    restored = round_trip(state)
    for got, wanted in zip(restored, state, strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        if "float4" not in str(dtype):
            assert bits_of(got) == bits_of(wanted)
    assert len({id(tensor) for tensor in restored}) == len(state)  # views of one storage are not tied


def test_parameters_and_requires_grad_come_back() -> None:
    state = {
        "parameter": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "integers": nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False),
        "leaf": torch.ones(2, requires_grad=True),
        "result": torch.ones(2, requires_grad=True) * 2,
        "complex": nn.Parameter(torch.ones(2, dtype=torch.complex128)),
        "plain": torch.ones(2),
    }
    restored = round_trip(state)
    assert_same(restored, state)
    assert restored["result"].is_leaf


def test_lazy_conjugates_and_negatives_are_stored_as_they_read() -> None:
    values = torch.tensor([1 + 2j, -3j])
    lazy = values.conj()
    state = {
        "conj": lazy,
        "neg": values.conj().imag,
        "again": lazy,
        "values": values,
        "wide": values.cdouble().conj(),
    }
    assert_same(round_trip(state), state)
    restored = round_trip(state)
    assert restored["conj"] is restored["again"]
    assert restored["conj"] is not restored["values"]


def test_tied_tensors_are_stored_once_and_come_back_tied() -> None:
    weight = nn.Parameter(torch.randn(3, 2))
    buffer, empty = torch.randn(4), torch.empty(0)
    state = {
        "a": {"weight": weight, "data": weight.data, "empty": empty},
        "b": [weight, weight.detach(), buffer, weight.data.T, buffer[:2]],
        "c": (buffer, buffer[:2], empty, torch.empty(0)),
    }
    description = encode_state(state)
    assert list(description.tensors) == "a.weight a.empty b.2 b.3 b.4 c.3".split()
    restored = round_trip(state)
    assert_same(restored, state)
    a, b, c = restored["a"], restored["b"], restored["c"]
    assert b[0] is a["weight"]
    assert b[1] is a["data"]
    assert a["data"].data_ptr() == a["weight"].data_ptr()
    assert c[0] is b[2]
    assert c[1] is b[4]
    assert c[2] is a["empty"]
    assert c[3] is not c[2]


def test_a_model_with_tied_weights_keeps_its_names_and_ties() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 5, bias=False))
    model[2].weight = model[0].weight
    state = model.state_dict()
    description = encode_state(state)
    assert list(description.tensors) == [name for name in state if name != "2.weight"]
    restored = round_trip(state)
    assert_same(restored, state)
    assert restored._metadata == state._metadata
    assert restored["2.weight"] is restored["0.weight"]
    model.load_state_dict(restored)


# NumPy


@pytest.mark.parametrize("dtype", "? b B h H i I l L e f d F D >i2 >u8 >f4 >c16".split())
def test_an_array_comes_back(dtype: str) -> None:
    array = np.arange(6).astype(dtype).reshape(2, 3)
    frozen = array.copy()
    frozen.flags.writeable = False
    packed = np.zeros(3, dtype=[("tag", "u1"), ("value", dtype)])["value"]  # not even aligned
    state = [array, array[::-1, ::2], array.T, array[0, 1:2].reshape(()), array[:0], frozen, frozen, packed]
    restored = round_trip(state)
    assert_same(restored, state)
    assert restored[6] is restored[5]
    restored[0][0, 0] = 1


def test_an_array_and_a_tensor_of_the_same_memory_stay_tied() -> None:
    array = np.ones(3, np.float32)
    restored = round_trip([array, torch.from_numpy(array)])
    restored[1][0] = 5
    assert restored[0][0] == 5


def test_numpy_is_imported_only_for_what_came_from_it() -> None:
    program = (
        "import sys, torch\n"
        "for name in [name for name in sys.modules if name.startswith('fastload')]: del sys.modules[name]\n"
        "sys.modules['numpy'] = None\n"
        "from fastload.formats.encoder import encode_state\n"
        "from fastload.formats.decoder import decode_state\n"
        "d = encode_state({'a': torch.ones(2), 'b': [1, {2}]})\n"
        "print(decode_state(d.structure, d.tensors)['b'])\n"
        "decode_state({'numpy': ['<f4', '00000000']}, {})"
    )
    done = run_forked(["-c", program], cwd=ROOT, env=os.environ, timeout=60)
    assert done.stdout.strip() == "[1, {2}]"
    assert "CheckpointError: the checkpoint holds NumPy values, NumPy cannot be imported" in done.stderr


ROOT = Path(__file__).parents[2]

# Names


def test_names_are_paths_and_never_collide() -> None:
    def ones() -> Tensor:
        return torch.ones(1)

    state = {
        "a.b": ones(),
        "a": {"b": ones(), "b~2": ones(), "": ones()},
        "__metadata__": ones(),
        1: ones(),
        "1": ones(),
        (1, "x"): ones(),
        "": {"": ones()},
        "tensor": ones(),
        "list": [ones(), {"b\ud800": ones()}],
    }
    names = list(encode_state(state).tensors)
    expected = "a.b a.b~2 a.b~2~2 a. __metadata__~2 1 1~2 (1,x) tensor tensor~2 list.0 list.1.b\\ud800"
    assert [name.replace(" ", "") for name in names] == expected.split()
    assert_same(round_trip(state), state)
    assert list(encode_state(ones()).tensors) == ["tensor"]
    assert list(encode_state([ones()]).tensors) == ["0"]


def test_very_many_collisions_take_no_time() -> None:
    state = {
        "a": {(): [{"x": torch.ones(1)}]},
        "m": [{1: torch.ones(1), "1": torch.ones(1)} for _ in range(100)],
    }
    state |= {f"k{i}": {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}} for i in range(100)}
    assert len(encode_state(state).tensors) == 401


def structure_with_sets() -> str:
    state = {"s": {"a", "b", (1, "c"), None, 2.5, "d"}, "f": frozenset("xyz"), "t": torch.ones(1)}
    return json.dumps(encode_state(state).structure)


# Speed and size


@pytest.mark.slow
def test_very_many_tensors_take_little_time_and_space() -> None:
    num = 20_000
    model = OrderedDict((f"layers.{i}.weight", torch.zeros(1)) for i in range(num))
    state = {
        i: {"step": torch.zeros(()), "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
        for i in range(num)
    }
    start = time.process_time()
    description = encode_state({"model": model, "optimizer": {"state": state}})
    structure = through_json(description.structure)
    decode_state(structure, description.tensors)
    assert time.process_time() - start < 2  # 0.1 s
    keys_bytes = sum(map(len, model)) + num * len("step exp_avg exp_avg_sq 00000")
    assert len(json.dumps(structure, separators=(",", ":"))) < keys_bytes + 12 * 4 * num


def test_nothing_is_kept_alive_after_a_walk() -> None:
    import gc
    import weakref

    gc.collect()
    gc.disable()
    try:
        state = {"a": nn.Parameter(torch.zeros(1)), "b": np.zeros(3), "c": [{}]}
        gone = weakref.ref(state["b"])
        rebuilt = decode_state(encode_state(state).structure, encode_state(state).tensors)
        gone_too = weakref.ref(rebuilt["b"])
        del state, rebuilt
        assert gone() is None
        assert gone_too() is None
    finally:
        gc.enable()
