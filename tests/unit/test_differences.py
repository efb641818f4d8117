"""What ranks that hold different states are told: where, and what is there."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch

from fastload import PerRank
from fastload.formats.dtypes import safetensors_spec
from fastload.formats.encoder import encode_state
from fastload.saving.compare import StateContent, _differing_places, _evenly_chosen, small_tensors
from fastload.saving.layout import TensorSpec, lay_out


def content_of(state: Any) -> StateContent:
    described = encode_state(state)
    specs = [TensorSpec(name, *safetensors_spec(t), t.nbytes) for name, t in described.tensors.items()]
    layout = lay_out(specs, max_shard_bytes=1 << 30, block_bytes=None).digest
    small = small_tensors(specs, described.tensors, described.starts)
    return StateContent(described.structure, layout, specs, small)


def state_dict(**items: Any) -> Any:
    made: Any = OrderedDict(items)
    made._metadata = OrderedDict({"": {"version": items["v"]}})
    return made


LARGE = torch.zeros(1 << 15)


@pytest.mark.parametrize(
    ("one", "other", "lines"),
    [
        ({"a": 1}, {"a": 2}, ["state['a']: 1 | 2"]),
        ({"a": 1}, {"a": 1.0}, ["state['a']: 1 | 1.0"]),
        ({"a": 1}, {"a": True}, ["state['a']: 1 | True"]),
        ({"a": float("nan")}, {"a": float("nan")}, []),
        ({"a": [1, 2, 3]}, {"a": [1, 5, 3]}, ["state['a'][1]: 2 | 5"]),
        ({"a": [1, 2]}, {"a": [1]}, ["state['a'][1]: 2 | nothing"]),
        ({"a": [1]}, {"a": [1, [2, 3]]}, ["state['a'][1]: nothing | a list of 2"]),
        ({"a": (1,)}, {"a": [1]}, ["state['a']: a tuple of 1 | a list of 1"]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, ["state: keys ['a', 'b'] | keys ['b', 'a']"]),
        ({"a": {1: "x"}}, {"a": {2: "x"}}, ["state['a'][1]: 'x' | nothing", "state['a'][2]: nothing | 'x'"]),
        ({"a": {1, 2}}, {"a": {1, 3}}, ["state['a']: {'set': [1, 2]} | {'set': [1, 3]}"]),
        ({"a": b"x"}, {"a": "x"}, ["state['a']: b'x' | 'x'"]),
        ({"a": PerRank(1)}, {"a": 1}, ["state['a']: a fastload.PerRank | 1"]),
        ({"a": PerRank(1)}, {"a": PerRank(2)}, []),
        (
            {"a": defaultdict(list, x=1)},
            {"a": defaultdict(int, x=1)},
            ["state['a']: a defaultdict(list) of 1 | a defaultdict(int) of 1"],
        ),
        (
            {"m": state_dict(v=1)},
            {"m": state_dict(v=2)},
            ["state['m']['v']: 1 | 2", "state['m']._metadata['']['version']: 1 | 2"],
        ),
        ({"t": torch.ones(1)}, {"t": torch.ones(2)}, ["state['t']: F32 [1] [1.0] | F32 [2] [1.0, 1.0]"]),
        ({"t": torch.ones(1)}, {"t": torch.tensor([2.5])}, ["state['t']: F32 [1] [1.0] | F32 [1] [2.5]"]),
        ({"t": torch.ones(1)}, {"t": 1}, ["state['t']: F32 [1] | 1"]),
        (
            {"t": torch.nn.Parameter(torch.ones(1))},
            {"t": torch.ones(1)},
            ["state['t']: Parameter+grad of F32 [1] [1.0] | F32 [1] [1.0]"],
        ),
        (
            {"t": torch.zeros(9)},
            {"t": torch.ones(9)},
            ["state['t']: F32 [9] with digest 60ae5c2d3f1a6ca4 | F32 [9] with digest ea0a8ae3ca4cfad9"],
        ),
        (
            {"t": torch.ones(1, dtype=torch.complex64)},
            {"t": torch.zeros(1, dtype=torch.complex64)},
            ["state['t']: C64 [1] with bytes 0000803f00000000 | C64 [1] with bytes 0000000000000000"],
        ),
        ({"t": LARGE}, {"t": LARGE + 1}, []),
        (
            {"t": LARGE, "u": LARGE},
            {"t": LARGE, "u": LARGE.clone()},
            ["state['u']: F32 [32768], one with 't' | F32 [32768]"],
        ),
    ],
)
def test_places_are_named(one: Any, other: Any, lines: list[str]) -> None:
    first, own = content_of(one), content_of(other)
    assert (first.digests() != own.digests()) == bool(lines)
    packed = StateContent.from_bytes(first.to_bytes())
    assert packed.digests() == first.digests()
    num, found = _differing_places(packed, own)
    shown = [f"{place}: {there} | {here}" for place, there, here in found]
    if "digest" in "".join(lines):
        shown = [line.split(" with digest")[0] for line in shown]
        lines = [line.split(" with digest")[0] for line in lines]
    assert (num, shown) == (len(lines), lines)


def test_many_places_are_counted() -> None:
    """Of a list a few are shown, so that all else is."""
    one = {"a": list(range(500)), "b": 1, "c": {str(n): n for n in range(30)}}
    other = {"a": list(range(1, 501)), "b": 2, "c": {str(n): -1 for n in range(30)}}
    num, found = _differing_places(content_of(one), content_of(other))
    assert (num, len(found)) == (531, 20)
    places = [place for place, _, _ in found]
    assert places[:5] == ["state['a'][0]", "state['a'][1]", "state['a'][2]", "state['b']", "state['c']['0']"]


@pytest.mark.parametrize(
    ("starts", "num"),
    [([0], 5), ([0], 5000), ([0, 1, 3000, 3001], 3004), (list(range(5000)), 5000), ([], 0), ([0, 0, 7], 7)],
)
def test_which_tensors_are_looked_at(starts: list[int], num: int) -> None:
    chosen = list(_evenly_chosen(starts, num))
    assert chosen == sorted(set(chosen))
    assert len(chosen) <= 1024
    assert set(chosen) <= set(range(num))
    if num <= 1024:
        assert len(chosen) == num
    else:
        assert {0, num - 1} <= set(chosen)
        assert len(chosen) > 200


def test_few_tensors_beside_many_are_looked_at() -> None:
    model = {f"w{n}": torch.full((2,), float(n)) for n in range(3000)}
    optimizer = {f"m{n}": torch.full((2,), float(n)) for n in range(3000)}
    state = {
        "model": model,
        "rng": torch.zeros(5056, dtype=torch.uint8),
        "optimizer": optimizer,
        "n": torch.ones(1),
    }
    content = content_of(state)
    assert {"rng", "n", "model.w0", "model.w2999", "optimizer.m0", "optimizer.m2999"} <= content.small.keys()
    assert len(content.small) <= 1024
    assert len(content.small["rng"]) == 8


def test_strange_tensors_are_looked_at_as_well() -> None:
    state = {
        "strided": torch.arange(12).reshape(3, 4).T[::2],
        "empty": torch.empty(0),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "meta": 3,
        "grad": torch.ones(2, requires_grad=True),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
    }
    with torch.inference_mode():
        state["inference"] = torch.ones(3)
    dense = {name: t.detach().contiguous() if isinstance(t, torch.Tensor) else t for name, t in state.items()}
    assert content_of(state).small == content_of(dense).small
    assert len(content_of(state).small) == 6
