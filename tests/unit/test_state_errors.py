"""What cannot be kept, and structures that nobody should trust: which errors, and what they say."""

from __future__ import annotations

import contextlib
import copy
import enum
import json
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fastload
from fastload.errors import FastloadError, ManifestError, OptionError
from fastload.formats.decoder import decode_state
from fastload.formats.encoder import encode_state
from fastload.formats.values import MAX_DEPTH, encode_value


class Color(enum.IntEnum):
    RED = 1


class Subclass(torch.Tensor):
    pass


class Mapping(dict[str, int]):
    pass


class OnlySaves:
    def state_dict(self) -> int:
        return 1


Point = namedtuple("Point", "x y")


def freed() -> Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def with_attribute() -> OrderedDict[str, int]:
    ordered = OrderedDict(a=1)
    ordered.extra = 1  # type: ignore[attr-defined]
    return ordered


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    NESTED = torch.nested.nested_tensor([torch.ones(1)])
    QUANTIZED = torch.quantize_per_tensor(torch.ones(1), 1.0, 0, torch.qint8)
    HALF = torch.ones(1, dtype=torch.complex32)
    CSR = torch.eye(2).to_sparse_csr()
REFUSED = {
    "object": (object(), "state['x'] is an object: only tensors, NumPy arrays, containers and plain values"),
    "lambda": (lambda: 1, "state['x'] is a function: only"),
    "type": (int, "state['x'] is a type: only"),
    "enum": (Color.RED, "Color: of a subclass nothing but its plain form"),
    "dict": (Mapping(), "Mapping: of a subclass"),
    "namedtuple": (Point(1, 2), "Point: of a subclass"),
    "np.str_": (np.str_("a"), "state['x'] is a numpy.str_: of a subclass"),
    "longdouble": (np.longdouble(1), "state['x'] is a numpy.longdouble: only"),
    "module's class": (nn.Linear, "state['x'] is a type: only"),
    "half of a Stateful": (OnlySaves(), "OnlySaves: it has no load_state_dict()"),
    "subclass": (torch.ones(1).as_subclass(Subclass), "only torch.Tensor and torch.nn.Parameter"),
    "sparse": (torch.eye(2).to_sparse(), "state['x'] is a torch.float32 tensor: only dense tensors"),
    "csr": (CSR, "only dense tensors"),
    "nested": (NESTED, "only dense tensors"),
    "quantized": (QUANTIZED, "no such dtype"),
    "half complex": (HALF, "torch.complex32 tensor: safetensors has no such"),
    "meta": (torch.ones(1, device="meta"), "a tensor on the meta device has no values"),
    "freed": (freed(), "its storage has been freed"),
    "object array": (np.array([None]), "a NumPy array of object: only plain numbers"),
    "text array": (np.array(["a"]), "a NumPy array of <U1"),
    "structured": (np.zeros(1, [("a", "f4")]), "a NumPy array of [('a', '<f4')]"),
    "dates": (np.zeros(1, "M8[s]"), "a NumPy array of datetime64[s]"),
    "matrix": (np.ma.zeros(2), "only tensors, NumPy arrays"),
    "factory": (defaultdict(lambda: 1), "state['x'].default_factory is a function: only None, list, dict"),
    "attribute": (with_attribute(), "state['x'].extra is an attribute of a dict"),
    "key": ({object: 1}, "state['x'][<class 'object'>] is keyed by a type: only plain values and tuples"),
    "tuple key": ({(1, (frozenset(),)): 1}, "is keyed by a frozenset"),
    "member": ({Color.RED}, "Color.RED: 1>] is keyed by a "),
    "slice": (slice(torch.ones(1)), "state['x'] is a slice"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_named_with_its_key(name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(OptionError) as caught:
        encode_state({"a": torch.ones(1), "x": value})
    assert message in str(caught.value)
    assert "state['x']" in str(caught.value)


def test_all_that_cannot_be_kept_is_listed() -> None:
    group = {"lr": 0.1, "fn": lambda: 1}
    state = {"optimizer": {"param_groups": [group]}, "many": [object() for _ in range(30)]}
    with pytest.raises(ValueError, match="cannot be saved") as caught:
        encode_state(state)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(
        "the state cannot be saved: state['optimizer']['param_groups'][0]['fn'] is a function: only"
    )
    assert lines[19].startswith("  state['many'][18] is an object")
    assert lines[20:] == ["  and 11 more"]


def test_no_state_is_refused(tmp_path: Path) -> None:
    """It would come back as a dict, and is what a method returns that was not to be asked for its result."""
    with pytest.raises(OptionError, match="the state is None: there is nothing to save"):
        fastload.save(None, tmp_path / "c")


def test_a_state_that_contains_itself_is_refused() -> None:
    inner: dict[str, Any] = {"a": [1]}
    inner["a"].append((inner, 2))
    with pytest.raises(OptionError, match=r"state\['x'\]\['a'\]\[1\]\[0\] is a dict: it contains itself"):
        encode_state({"x": inner})
    shared = [torch.ones(1)]
    assert len(encode_state({"a": shared, "b": shared}).tensors) == 1


def nest(depth: int) -> tuple[Any, Any]:
    """A list in lists, and its structure."""
    state: Any = []
    for _ in range(depth - 1):
        state = [state]
    return state, copy.deepcopy(state) if depth < 200 else state


def test_nesting_is_bounded_both_ways() -> None:
    state, structure = nest(MAX_DEPTH)
    assert encode_state(state).structure == structure
    assert decode_state(structure, {}) == state
    for depth in (MAX_DEPTH + 1, 900, 100_000):
        state, structure = nest(depth)
        with pytest.raises(OptionError, match=f"is a list: nested deeper than {MAX_DEPTH} levels"):
            encode_state(state)
        with pytest.raises(ManifestError, match=f"nested deeper than {MAX_DEPTH} levels"):
            decode_state(structure, {})
        while state:  # freeing a deep list recurses
            state = state.pop()


def test_no_recursion_error_escapes() -> None:
    key: Any = ()
    structure: Any = {"tuple": []}
    part: Any = 1
    for _ in range(50_000):
        key, structure, part = (key,), {"tuple": [structure]}, {"slice": [part, None, None]}
    for walk in (lambda: encode_state({"a": {key}}), lambda: encode_state(slice(1, 2, key))):
        with pytest.raises(OptionError):
            walk()
    for malformed in ({"set": [structure]}, {"dict": [structure, 1]}, part, [part]):
        with pytest.raises(ManifestError, match="nested too deeply"):
            decode_state(malformed, {})


def test_a_stack_that_is_nearly_full_gives_the_same_errors() -> None:
    state, structure = nest(90)

    def at_depth(levels: int, walk: Callable[[], Any]) -> Any:
        return at_depth(levels - 1, walk) if levels else walk()

    outcomes = set()
    for levels in range(0, sys.getrecursionlimit(), 10):
        for walk in (lambda: encode_state(state), lambda: decode_state(structure, {})):
            try:
                at_depth(levels, walk)
            except (FastloadError, RecursionError) as error:
                outcomes.add(type(error))
    assert outcomes >= {OptionError, ManifestError}  # RecursionError where not even the call itself fits


T = {"t": torch.ones(2), "i": torch.ones(2, dtype=torch.int32), "d": torch.ones(2, dtype=torch.float64)}
MALFORMED = {
    "two tags": ({"dict": [], "tuple": []}, "not a plain value"),
    "unknown tag": ({"pickle": "x"}, "unknown tag 'pickle'"),
    "python type": ((1,), "not a plain value"),
    "dict of what": ({"dict": {}}, "not a list"),
    "odd": ({"dict": ["a"]}, r"at state\['a'\]: not a plain value"),
    "twice": ({"dict": ["a", 1, "a", 2]}, "a key without a value, or twice"),
    "same key": ({"dict": [1, 1, True, 2]}, "twice"),
    "unhashable": ({"dict": [{"bytearray": "AA=="}, 1]}, "unhashable"),
    "list as key": ({"dict": [[], 1]}, "not a plain value"),
    "tensor as key": ({"dict": [{}, 1]}, "not a plain value"),
    "tensor in set": ({"set": [{"tensor": ["t"]}]}, "unknown tag 'tensor'"),
    "no tensor": ({"dict": ["x", {}]}, r"at state\['x'\]: there is no tensor 'x'"),
    "no such tensor": ([{"tensor": ["x"]}], r"at state\[0\]: there is no tensor 'x'"),
    "leaf of what": ({"tensor": "t"}, "not a list"),
    "leaf of many": ({"tensor": ["t", None, None, None]}, "too many values"),
    "kind": ({"tensor": ["t", "Module"]}, "not a tensor's name, kind and dtype"),
    "kind of what": ({"tensor": ["t", ["Parameter"]]}, "not a tensor's name"),
    "name of what": ({"tensor": [1]}, "not a tensor's name"),
    "integer parameter": ({"tensor": ["i", "Parameter+grad"]}, "[Oo]nly Tensors of floating point"),
    "integer leaf": ({"tensor": ["i", "Tensor+grad"]}, "only Tensors of floating point"),
    "array": ({"tensor": ["t", "ndarray"]}, "not a dtype of NumPy"),
    "array of objects": ({"tensor": ["t", "ndarray", "|O"]}, "not a dtype of NumPy"),
    "other array": ({"tensor": ["t", "ndarray", "<f8"]}, "float32 cannot stand for an array of <f8"),
    "complex": ({"tensor": ["t", None, "complex128"]}, "float32 cannot stand for this dtype"),
    "odd complex": ({"tensor": ["d", None, "complex128"]}, None),
    "dtype": ({"tensor": ["t", None, "float16"]}, "cannot stand for this dtype"),
    "factory": ({"defaultdict": ["eval", []]}, "unknown default_factory"),
    "factory of what": ({"defaultdict": [["list"], []]}, "unhashable"),
    "defaultdict": ({"defaultdict": []}, "not enough values"),
    "state_dict": ({"state_dict": [[], [], []]}, "too many values"),
    "int": ({"int": "12"}, "not of the form"),
    "int of int": ({"int": 12}, "not of the form"),
    "float": ({"float": "7ff"}, "not of the form"),
    "complex of int": ({"complex": [1, 2.0]}, "not of type float"),
    "complex of text": ({"complex": "ab"}, "not a list"),
    "str": ({"str": "f"}, "not of the form"),
    "str of bytes": ({"str": "ff"}, "decode byte"),
    "bytes": ({"bytes": "AA="}, "adding"),
    "range": ({"range": [1, 2, 0]}, "must not be zero"),
    "range of texts": ({"range": ["a", "b", "c"]}, "not of type int"),
    "slice": ({"slice": [1]}, "not enough values"),
    "Size of floats": ({"Size": [1.0]}, "not of type int"),
    "dtype name": ({"dtype": "Tensor"}, "no such dtype"),
    "dtype of what": ({"dtype": []}, "unhashable"),
    "device": ({"device": "gpu"}, "device"),
    "device of what": ({"device": "cuda:x"}, "not of the form"),
    "numpy": ({"numpy": ["|O", "00"]}, "not a number of NumPy"),
    "numpy length": ({"numpy": ["<f4", "0000"]}, "multiple"),
    "numpy count": ({"numpy": ["<f4", "0000000000000000"]}, "too many values"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_structure_is_refused(name: str) -> None:
    structure, message = MALFORMED[name]
    if message is None:  # two numbers are one complex number
        assert decode_state(structure, T).tolist() == 1 + 1j
        return
    with pytest.raises(ManifestError, match=message) as caught:
        decode_state(structure, T)
    assert "the structure of the state, at state" in str(caught.value)


M = 2**61 - 1  # the hash of an integer is its remainder by this
COLLIDING = {
    "integers": lambda i: i * M,
    "negative integers": lambda i: -3 - i * M,
    "complex numbers": lambda i: complex(1000003.0 * (2**20 - i), float(i)),
    "tuples": lambda i: ("a", (i * M, 1)),
    "ranges": lambda i: range(i * M, i * M + 3),
    "numbers of NumPy": lambda i: np.complex128(complex(1000003.0 * (2**20 - i), float(i))),
}


def encode_key(key: Any) -> Any:
    return {"tuple": [encode_key(part) for part in key]} if type(key) is tuple else encode_value(key)


@pytest.mark.parametrize("name", COLLIDING)
def test_keys_whose_hashes_collide_are_refused(name: str) -> None:
    """A dict or a set of them would take quadratic time to make."""
    keys = [COLLIDING[name](i) for i in range(257)]
    assert len({hash(key) for key in keys}) == 1
    nodes = [encode_key(key) for key in keys]
    items = [part for node in nodes for part in (node, 1)]
    structures = [
        *({kind: items} for kind in ("dict", "OrderedDict", "Counter")),
        {"defaultdict": [None, items]},
        {"state_dict": [items, None]},
        *({kind: nodes} for kind in ("set", "frozenset")),
    ]
    for structure in structures:
        with pytest.raises(ManifestError, match="more than 256 of its keys have the same hash"):
            decode_state([structure], {})
    for state in (dict.fromkeys(keys), set(keys), Counter(keys), defaultdict(None, dict.fromkeys(keys))):
        with pytest.raises(OptionError, match=r"state\['x'\] is a .*: more than 256 of"):
            encode_state({"x": state})


def test_large_numbers_as_keys_are_kept() -> None:
    state = {"powers": {2**i for i in range(4000)}, "multiples": {i * M: i for i in range(256)}}
    state["others"] = {(i * (M + 2), -i): i for i in range(5000)}
    assert decode_state(json.loads(json.dumps(encode_state(state).structure)), {}) == state


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["t", "Parameter", "<f4", "0x1"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                "dict OrderedDict Counter state_dict defaultdict tuple set frozenset tensor int float str "
                "complex bytes bytearray range slice Size dtype device numpy x".split()
            ),
            inner,
            max_size=2,
        )
    ),
    max_leaves=12,
)


@given(json_values)
def test_any_json_is_rebuilt_or_refused(structure: Any) -> None:
    before = json.dumps(structure)
    with contextlib.suppress(ManifestError):
        decode_state(structure, T | {"tensor": T["t"]})
    assert json.dumps(structure) == before


def test_a_counter_and_an_empty_state_dict_need_no_special_case() -> None:
    state = [Counter({"a": torch.ones(1)}), nn.Module().state_dict()]
    description = encode_state(state)
    restored = decode_state(description.structure, description.tensors)
    assert restored[0]["a"] is state[0]["a"]
    assert restored[1]._metadata == state[1]._metadata
