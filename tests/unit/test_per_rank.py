"""What each rank has of its own: taken apart, put together, refused, and never trusted."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fastload
from fastload import PerRank
from fastload.errors import ManifestError, MismatchError, OptionError
from fastload.ext.per_rank import merge, split
from fastload.formats.decoder import decode_state
from fastload.formats.encoder import encode_state
from fastload.formats.state import NO_VALUE, fill_places, has_gap, leaves, own_view
from fastload.saving.per_rank import gather_own, pack_own
from tests.drawn import draws
from tests.unit.test_state import assert_same


def gathered(states: list[Any]) -> tuple[Any, dict[str, Tensor]]:
    """Does what a save does: structure and tensors of all ranks, by way of files."""
    described = [encode_state(state, rank) for rank, state in enumerate(states)]
    packed = [pack_own(d.own_values, d.own_tensors, rank, len(states)) for rank, d in enumerate(described)]
    structure, files = gather_own(described[0].structure, packed, block_bytes=4096)
    tensors = dict(described[0].tensors)
    for file, content in zip(files.files, files.contents, strict=True):
        assert len(content) == file.nbytes
        for entry in file.tensors:
            dtype = next(t.dtype for d in described for n, t in d.own_tensors.items() if n == entry.name)
            data = bytearray(content[entry.offset : entry.offset + entry.nbytes])
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            tensors[entry.name] = flat.reshape(entry.shape)
    return json.loads(json.dumps(structure)), tensors


def seen_by(rank: int, size: int, structure: Any, tensors: dict[str, Tensor]) -> Any:
    return decode_state(own_view(structure, rank, size).structure, tensors)


VALUES = [
    None,
    17,
    "text",
    random.Random(3).getstate(),
    torch.get_rng_state(),
    np.random.RandomState(3).get_state(),
    {"torch": torch.arange(5), "python": random.Random(4).getstate(), "steps": [1, {"a": (2, b"x" * 500)}]},
    [torch.empty(0), torch.tensor(2.5), torch.ones(3, dtype=torch.complex128), 3j],
    OrderedDict(a=torch.nn.Parameter(torch.ones(2)), b={"c": set(range(200))}),
    {},
    [],
    torch.ones(4, 4).t()[::2],
]


@pytest.mark.parametrize("number", range(len(VALUES)))
def test_each_rank_gets_its_own_back(number: int) -> None:
    own = [VALUES[number], VALUES[(number + 1) % len(VALUES)], VALUES[(number + 5) % len(VALUES)]]
    states = [{"w": torch.ones(2), "here": [1, PerRank(value)], "step": 3} for value in own]
    structure, tensors = gathered(states)
    for rank, value in enumerate(own):
        assert_same(seen_by(rank, 3, structure, tensors), {"w": torch.ones(2), "here": [1, value], "step": 3})
    names = {name for name in tensors if name != "w"}
    views = [own_view(structure, rank, 3) for rank in range(3)]
    used = [{leaf.stored for leaf in leaves(view.structure)} - {"w"} for view in views]
    assert names == set().union(*used)
    assert [view.together.keys() for view in views] == used
    assert all(set(together) == names for view in views for together in view.together.values())
    for rank in range(3):
        assert any(name.startswith(f"@rank{rank}.here.1") for name in names), "each has at least one tensor"


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=300)),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner), st.tuples(inner, inner)),
    max_leaves=20,
)
values = st.recursive(
    st.one_of(plain, st.integers(0, 5).map(lambda n: torch.arange(n))),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner), st.tuples(inner, inner)),
    max_leaves=10,
)


@draws(40)
@given(st.lists(st.tuples(values, values), min_size=1, max_size=4), values)
def test_whatever_the_ranks_have(own: list[tuple[Any, Any]], common: Any) -> None:
    states = [{"a": PerRank(a), "common": common, "b": (PerRank(b),)} for a, b in own]
    try:
        structure, tensors = gathered(states)
    except OptionError as error:
        assert "safetensors header" in str(error) or "lone" in str(error)  # noqa: PT017
        return
    for rank, (a, b) in enumerate(own):
        assert_same(seen_by(rank, len(own), structure, tensors), {"a": a, "common": common, "b": (b,)})
    size = len(own) + 1
    view = own_view(structure, 0, size)
    assert view.elsewhere == [("a", len(own)), ("b.0", len(own))]
    assert_same(decode_state(view.structure, tensors), {"a": None, "common": common, "b": (None,)})


def test_the_structure_stays_short_however_much_the_ranks_have() -> None:
    states = [{"rng": PerRank(random.Random(rank).getstate())} for rank in range(64)]
    structure, tensors = gathered(states)
    assert len(json.dumps(structure)) < 64 * 60
    assert sum(tensor.nbytes for tensor in tensors.values()) > 64 * 5000


def test_the_same_states_give_the_same_bytes() -> None:
    def make() -> tuple[Any, tuple[bytes, ...]]:
        own = [{"s": {"x", "y", str(rank)}, "t": torch.full((3,), rank)} for rank in range(3)]
        described = [encode_state({"a": PerRank(value)}, rank) for rank, value in enumerate(own)]
        packed = [pack_own(d.own_values, d.own_tensors, rank, 3) for rank, d in enumerate(described)]
        structure, files = gather_own(described[0].structure, packed, block_bytes=4096)
        return structure, files.contents

    assert make() == make()


def test_ties_are_kept_within_a_value_of_a_rank() -> None:
    shared = torch.arange(4.0)
    pair = PerRank([shared, shared, shared[:2]])
    states = [{"w": shared, "a": PerRank(shared), "b": pair, "c": [pair]} for _ in range(2)]
    structure, tensors = gathered(states)
    own = ["a", "b.0", "b.2", "c.0.0", "c.0.2"]
    assert sorted(tensors) == [*(f"@rank{rank}.{name}" for rank in range(2) for name in own), "w"]
    found = seen_by(1, 2, structure, tensors)
    assert_same(found, {"w": shared, "a": shared, "b": pair.value, "c": [pair.value]})
    assert found["b"][0] is found["b"][1]
    assert found["c"][0][0] is found["c"][0][1]
    assert len({id(each) for each in (found["w"], found["a"], found["b"][0], found["c"][0][0])}) == 4


def test_a_text_may_be_as_long_as_what_it_stands_for_is() -> None:
    value = {"numbers": list(range(5000)), "big": 2**20000, "inf": float("inf")}
    structure, tensors = gathered([{"a": PerRank(value)}])
    assert_same(seen_by(0, 1, structure, tensors), {"a": value})


def test_what_cannot_be_kept_is_named() -> None:
    with pytest.raises(
        OptionError, match=r"state\['a'\]\['b'\] is a fastload.PerRank: it is inside of another"
    ):
        encode_state({"a": PerRank({"b": PerRank(1)})})
    with pytest.raises(OptionError, match=r"state\['a'\]\['f'\] is a builtins?\.?.*function"):
        encode_state({"a": PerRank({"f": print})})
    with pytest.raises(
        OptionError, match=r"'@rank0\.x': with a PerRank in the state, no name may begin with"
    ):
        encode_state({"@rank0.x": torch.ones(1), "a": PerRank(1)})
    assert "@rank0.x" in encode_state({"@rank0.x": torch.ones(1)}).tensors
    with pytest.raises(OptionError, match="keyed by"):
        encode_state({PerRank(1): 2})
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(OptionError, match=r"nested too deeply|contains itself"):
        encode_state(PerRank(loop))


def test_too_much_is_refused_and_named() -> None:
    def pack(value: Any, size: int) -> bytes:
        described = encode_state({"a": PerRank(value)}, 3)
        return pack_own(described.own_values, described.own_tensors, 3, size)

    pack(torch.zeros((1 << 20) - 500, dtype=torch.uint8), 8)
    with pytest.raises(OptionError) as raised:
        pack({"small": 1, "large": torch.zeros(1 << 18)}, 8)
    text = str(raised.value)
    assert "rank 3" in text
    assert "1,048,576 of them '@rank3.a.large': at most 1,048,576 a rank are kept with 8 ranks" in text
    assert "sharded saves" in text
    pack(torch.zeros(200_000, dtype=torch.uint8), 1024)
    with pytest.raises(OptionError, match="at most 262,144 a rank are kept with 1024 ranks"):
        pack(torch.zeros(300_000, dtype=torch.uint8), 1024)


@pytest.mark.parametrize(
    "node",
    [
        {"PerRank": 3},
        {"PerRank": ["a"]},
        {"PerRank": [1, [1]]},
        {"PerRank": ["a", 1]},
        {"PerRank": ["a", []]},
        {"PerRank": ["a", [1, 2], 3]},
        {"PerRank": ["a", [{"tensor": 1}, {}]]},
        {"PerRank": ["a", [{"PerRank": ["b", [1, 2]]}, 1]]},
        {"PerRank": ["a", [{"tensor": ["t", "json"]}, 2]]},
        {"PerRank": ["a", [{"tensor": ["bad", "json"]}, 2]]},
        {"PerRank": ["a", [{"tensor": ["nested", "json"]}, 2]]},
        {"PerRank": ["a", [{"tensor": ["leaf", "json"]}, 2]]},
    ],
)
def test_nothing_is_trusted(node: Any) -> None:
    tensors = {
        "t": torch.ones(3),
        "bad": torch.frombuffer(bytearray(b'{"a"'), dtype=torch.uint8),
        "nested": torch.frombuffer(bytearray(b"[" * 100_000), dtype=torch.uint8),
        "leaf": torch.frombuffer(bytearray(b'{"tensor": ["t"]}'), dtype=torch.uint8),
    }
    with pytest.raises(ManifestError, match="structure of the state"):
        decode_state(own_view({"dict": ["k", node]}, 0, 2).structure, tensors)


def test_gaps() -> None:
    assert has_gap({"dict": ["a", [1, NO_VALUE]]})
    assert not has_gap({"dict": ["a", [1, {"float": "00"}, {}]]})
    assert fill_places({"dict": ["a", {"PerRank": ["a", 0]}]}, [[1], [2]]) == {
        "dict": ["a", {"PerRank": ["a", [1, 2]]}]
    }


class Loader:
    def __init__(self, position: int) -> None:
        self.position = position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_into(tmp_path: Path) -> None:
    """One rank is as good as any number, and says most of it."""
    rng = torch.arange(9, dtype=torch.uint8)
    state = {
        "w": torch.ones(3),
        "rng": PerRank(rng),
        "plain": PerRank({"python": random.Random(1).getstate()}),
        "loader": PerRank({"position": 7, "order": list(range(100))}),
        "nested": {"a": PerRank([torch.ones(2), 4]), "b": 1},
        "tuple": (PerRank(torch.ones(1)), 5),
    }
    fastload.save(state, tmp_path / "c")
    loaded = fastload.load(tmp_path / "c")
    values = {**{k: v.value if isinstance(v, PerRank) else v for k, v in state.items()}}
    values |= {"nested": {"a": [torch.ones(2), 4], "b": 1}, "tuple": (torch.ones(1), 5)}
    assert_same(loaded, values)
    loader, target, plain = Loader(0), torch.zeros(9, dtype=torch.uint8), PerRank(None)
    into = {
        "w": torch.zeros(3),
        "rng": PerRank(target),
        "plain": plain,
        "loader": loader,
        "nested": {"a": PerRank([torch.zeros(2), 0]), "b": 0},
        "tuple": (PerRank(torch.zeros(1)), 0),
    }
    with pytest.raises(MismatchError, match="tuple"):  # the 5 cannot be put into a tuple of into= itself
        fastload.load(tmp_path / "c", into=into["tuple"])
    result = fastload.load(tmp_path / "c", into=into)
    assert sorted(result) == ["nested.a.0", "rng", "tuple.0", "w"]
    assert torch.equal(target, rng)
    assert into["rng"].value is target
    assert into["plain"] is plain
    assert plain.value == {"python": random.Random(1).getstate()}
    assert loader.position == 7
    assert isinstance(into["nested"]["a"], PerRank)
    assert_same(into["nested"]["a"].value, [torch.ones(2), 4])
    assert into["tuple"][1] == 5
    assert_same(into["tuple"][0].value, torch.ones(1))
    without = {
        "w": torch.zeros(3),
        "rng": torch.zeros(9, dtype=torch.uint8),
        "plain": 0,
        "loader": PerRank(Loader(0)),
        "nested": {"a": None, "b": None},
        "tuple": None,
    }
    fastload.load(tmp_path / "c", into=without)
    assert without["loader"].value.position == 7
    without["loader"] = values["loader"]
    assert_same(without, values)
    wrong = {**into, "plain": torch.zeros(3)}
    with pytest.raises(MismatchError, match="plain: into= has a tensor, the checkpoint none"):
        fastload.load(tmp_path / "c", into=wrong)


class Noting(nn.Linear):
    """A layer whose state dict has more than tensors, and that is told with what metadata it was saved."""

    extra: Any = None
    version: Any = None

    def get_extra_state(self) -> Any:
        return {"order": list(range(100))}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        self.version = local_metadata
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)


def make_module(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.BatchNorm1d(3), Noting(3, 3))


@pytest.mark.parametrize("is_root", [False, True])
def test_a_state_dict_goes_into_its_module(tmp_path: Path, is_root: bool) -> None:
    """However much it says of its layers."""
    saved = make_module(1)
    state_dict = saved.state_dict()
    state_dict._metadata["3"]["note"] = note = "n" * 300  # type: ignore[attr-defined]
    own = PerRank(state_dict)
    fastload.save(own if is_root else {"model": own}, tmp_path / "c")
    loaded = fastload.load(tmp_path / "c")
    assert_same(loaded if is_root else loaded["model"], state_dict)
    for wrap in (PerRank, lambda module: module):
        module = make_module(2)
        fastload.load(tmp_path / "c", into=wrap(module) if is_root else {"model": wrap(module)})
        assert_same(module.state_dict(), saved.state_dict())
        assert module[3].version == {"version": 1, "note": note}
        assert module[3].extra == {"order": list(range(100))}


def test_a_place_for_the_ranks_takes_what_all_have_alike(tmp_path: Path) -> None:
    fastload.save({"rng": torch.ones(2), "position": 3}, tmp_path / "c")
    into = {"rng": PerRank(torch.zeros(2)), "position": PerRank(0)}
    fastload.load(tmp_path / "c", into=into)
    assert into["rng"].value.tolist() == [1, 1]
    assert into["position"].value == 3


def test_the_whole_state_of_a_rank(tmp_path: Path) -> None:
    fastload.save(PerRank({"a": torch.ones(2), "b": 1}), tmp_path / "c")
    assert_same(fastload.load(tmp_path / "c"), {"a": torch.ones(2), "b": 1})
    into = PerRank({"a": torch.zeros(2), "b": 0})
    fastload.load(tmp_path / "c", into=into)
    assert_same(into.value, {"a": torch.ones(2), "b": 1})
    for number, value in enumerate((7, "long" * 99)):
        fastload.save(PerRank(value), tmp_path / str(number))
        assert fastload.load(tmp_path / str(number)) == value


def test_names_and_casts(tmp_path: Path) -> None:
    fastload.save({"w": torch.ones(2), "x": PerRank({"t": torch.ones(3), "p": "p" * 200})}, tmp_path / "c")
    assert sorted(fastload.load(tmp_path / "c", names=["x.t", "@rank0.x.t"])) == ["@rank0.x.t", "x.t"]
    half = fastload.load(tmp_path / "c", dtype=torch.bfloat16)
    assert half["x"]["t"].dtype is torch.bfloat16
    assert half["x"]["p"] == "p" * 200
    assert {file.name for file in fastload.inspect(tmp_path / "c").files} == {
        "model.safetensors",
        "ranks.safetensors",
    }
    assert fastload.verify(tmp_path / "c").num_blocks == 3


def test_patterns_select_what_this_rank_has(tmp_path: Path) -> None:
    """By its path, and neither texts nor what other ranks have, but where a pattern is meant for those."""
    own = PerRank({"long": "x" * 300, "t": torch.ones(3)})
    fastload.save({"w": torch.ones(2), "r": own}, tmp_path / "c")
    path = tmp_path / "c"
    for pattern, names in (
        ("*", ["r.t", "w"]),
        ("*t", ["r.t"]),
        ("[@rw]*", ["r.t", "w"]),
        ("@rank0.r.t", ["@rank0.r.t"]),
        ("@rank0.*", ["@rank0.r.long", "@rank0.r.t"]),
    ):
        assert sorted(fastload.load(path, names=pattern)) == names
    into = {"w": torch.zeros(2), "r": {"long": "", "t": torch.zeros(3)}}
    assert sorted(fastload.load(path, into=into, names="*")) == ["r.t", "w"]
    assert_same(into, {"w": torch.ones(2), "r": {"long": "", "t": torch.ones(3)}})
    fastload.save({"@rank0.w": torch.ones(2)}, tmp_path / "plain")
    assert sorted(fastload.load(tmp_path / "plain", names="*")) == ["@rank0.w"], "nobody's own"


def test_it_replaces_a_checkpoint_that_had_own_values(tmp_path: Path) -> None:
    fastload.save({"w": torch.ones(2), "x": PerRank(1)}, tmp_path / "c")
    options = fastload.SaveOptions(overwrite=True)
    fastload.save({"w": torch.ones(2), "x": PerRank(2)}, tmp_path / "c", options=options)
    assert fastload.load(tmp_path / "c")["x"] == 2
    (tmp_path / "c" / "fastload.json").write_text("damaged")
    fastload.save({"w": torch.ones(2)}, tmp_path / "c", options=options)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["fastload.json", "model.safetensors"]


# Functions for another number of ranks


def positions(parts: list[list[range]]) -> list[int]:
    return sorted(position for part in parts for each in part for position in each)


@draws(60)
@given(
    st.integers(0, 60),
    st.lists(st.tuples(st.integers(1, 7), st.lists(st.integers(0, 9), min_size=7, max_size=7)), max_size=4),
)
def test_positions_are_split_whatever_the_ranks_have_taken(
    total: int, sizes: list[tuple[int, list[int]]]
) -> None:
    """Each position is taken once, parts are even, and there are no more ranges than ranks have come."""
    parts, taken, most = [[range(total)]], [], 1
    for size, advances in sizes:
        parts = [split(parts, rank, size) for rank in range(size)]
        num_left = [sum(map(len, part)) for part in parts]
        assert max(num_left) - min(num_left) <= 1
        most += size
        assert sum(map(len, parts)) <= most
        for part, advance in zip(parts, advances, strict=False):
            for _ in range(min(advance, sum(map(len, part)))):
                taken.append(part[0][0])
                part[0] = part[0][1:]
                if not part[0]:
                    del part[0]
    assert positions([*parts, [range(each, each + 1) for each in taken]]) == list(range(total))


def test_shards_are_merged_and_split() -> None:
    values = [
        {"epoch": 3, "shards": ["a", "b", "c"]},
        {"epoch": 3, "shards": []},
        {"epoch": 3, "shards": ["d"]},
    ]
    assert merge(values, 1, 2) == {"epoch": 3, "shards": ["a", "b", "c", "d"]}
    found = [split(values, rank, 3)["shards"] for rank in range(3)]
    assert found == [["a"], ["b"], ["c", "d"]]
    assert split(values, 0, 9) == {"epoch": 3, "shards": []}
    assert merge([[range(3), range(5, 5)], [range(3, 9), range(0, 10, 3), range(12, 14, 3)]], 0, 1) == [
        range(3), range(5, 5), range(3, 9), range(0, 14, 3),
    ]  # fmt: skip


def test_ranges_that_a_slice_has_left_empty_take_nothing_away() -> None:
    """They may end before they begin."""
    assert merge([[range(10)[:5]], [range(10)[5:3]], [range(10)[5:]]], 0, 1) == [range(10)]


def test_tensors_and_arrays_that_are_the_same_on_all_ranks() -> None:
    state = np.random.RandomState(3).get_state()
    values = [{"seed": torch.arange(3), "state": state, "left": [rank]} for rank in range(2)]
    merged = merge(values, 0, 1)
    assert torch.equal(merged["seed"], torch.arange(3))
    assert merged["state"] is state
    assert merged["left"] == [0, 1]
    for other in (torch.arange(4), torch.arange(3.0), torch.tensor([0, 1, 5])):
        with pytest.raises(ValueError, match="only lists may differ"):
            merge([torch.arange(3), other], 0, 1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([{"epoch": 1}, {"epoch": 2}], "only lists may differ between ranks, not 1"),
        ([1, True], "only lists may differ between ranks, not 1"),
        ([{"a": 1}, {"b": 1}], "different keys"),
        ([[1], 2], "only lists"),
    ],
)
def test_what_is_no_list_has_to_be_the_same(values: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split(values, 0, 2)
