"""Tensor subclasses by torch's protocol: saved as inner tensors, loaded in place, and by a closed list."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.utils._pytree import tree_map

import fastload
from fastload.errors import ManifestError, MismatchError, OptionError, UnsupportedVersion
from fastload.ext import subclasses
from fastload.formats.decoder import decode_state
from fastload.formats.encoder import encode_state
from fastload.integrations.dcp import Reader, Writer
from fastload.loading.selection import GAP
from tests.unit.test_state import assert_same


class Rounding(Enum):
    NEAREST = "nearest"
    DOWN = "down"


@dataclass
class How:
    rounding: Rounding
    axes: tuple[int, ...] = ()


class Pair(NamedTuple):
    how: How
    dtype: torch.dtype


class Scaled(Tensor):
    """Elements of int8, and a scale for each row."""

    elements: Tensor
    scale: Tensor
    context: Any

    @staticmethod
    def __new__(cls, elements: Tensor, scale: Tensor, context: Any) -> Scaled:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, elements.shape, dtype=torch.float32, device=elements.device
        )

    def __init__(self, elements: Tensor, scale: Tensor, context: Any) -> None:
        self.elements, self.scale, self.context = elements, scale, context

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["elements", "scale"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: torch.Size, stride: Any) -> Scaled:
        return cls(inner["elements"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            [one] = args
            return cls(func(one.elements), func(one.scale), one.context)
        if func is torch.ops.aten.view.default:  # of DTensor.from_local, to the same shape
            return cls(args[0].elements, args[0].scale, args[0].context)
        if func is torch.ops.aten.copy_.default:
            one, other = args
            one.elements.copy_(other.elements)
            one.scale.copy_(other.scale)
            return one
        if func is torch.ops.aten.add_.Tensor:
            one, other = args
            one.elements.add_(other)
            return one
        plain = tree_map(lambda x: x.elements * x.scale if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


CONTEXT = [Pair(How(Rounding.DOWN, (1,)), torch.bfloat16), {"a": (1, 2.5, None)}, "text", torch.Size([3])]


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(subclasses, "_allowed", dict(subclasses._allowed))
        for kind in (Rounding, How, Pair, Scaled):
            subclasses.allow(kind)
        yield


def make(seed: int = 0, context: Any = CONTEXT) -> Scaled:
    drawn = torch.Generator().manual_seed(seed)
    elements = torch.randint(-128, 128, (6, 4), dtype=torch.int8, generator=drawn)
    return Scaled(elements, torch.rand(6, 1, generator=drawn), context)


def assert_equal(got: Any, wanted: Scaled) -> None:
    assert type(got) is type(wanted)
    assert_same([got.elements, got.scale], [wanted.elements, wanted.scale])
    assert got.context == wanted.context


def test_it_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    weight, frozen = nn.Parameter(make(1)), nn.Parameter(make(2), requires_grad=False)
    one = make(3)
    state = {"plain": torch.ones(2), "w": [one, weight, frozen], "own": fastload.PerRank({"x": make(4)})}
    fastload.save({**state, "shared": one.scale}, tmp_path / "a")
    names = {entry.name for entry in fastload.inspect(tmp_path / "a").tensors}
    assert {"w.0.elements", "w.0.scale", "w.1.scale", "@rank0.own.x.elements"} < names
    assert "shared" not in names, "tied with w.0.scale"
    record = json.loads((tmp_path / "a" / "fastload.json").read_text())
    assert (record["version"], record["delta"], record["strides"]) == (4, None, {})
    found = fastload.load(tmp_path / "a")
    for got, wanted in zip(found["w"], state["w"], strict=True):
        assert isinstance(got, nn.Parameter) == isinstance(wanted, nn.Parameter)
        assert got.requires_grad == wanted.requires_grad
        assert_equal(got, wanted)
    assert found["shared"] is found["w"][0].scale
    assert_equal(found["own"]["x"], make(4))
    alone = fastload.load(tmp_path / "a", names="w.0.*")
    assert_same(alone, {"w.0.elements": one.elements, "w.0.scale": one.scale})
    fastload.verify(tmp_path / "a")


def test_it_is_filled_in_place(tmp_path: Path) -> None:
    fastload.save({"a": make(1), "b": (make(2), 3), "c": make(3)}, tmp_path / "a")
    into = {"a": make(4), "b": (nn.Parameter(make(5)), 0), "c": None}
    inner = [into["a"].elements, into["b"][0].elements]
    fastload.load(tmp_path / "a", into=into)
    assert_equal(into["a"], make(1))
    assert_equal(into["b"][0].data, make(2))
    assert_equal(into["c"], make(3))
    assert into["a"].elements is inner[0]
    assert into["b"][0].elements is inner[1]
    for other, words in (
        ({"a": make(4, context=["other"])}, r"a: into= has a Scaled on cpu, the checkpoint .*'tests.Scaled'"),
        ({"a": torch.ones(6, 4)}, "a: into= has a Tensor on cpu, the checkpoint .*Scaled"),
        ({"a": Scaled(torch.ones(5, 4), torch.ones(5, 1), CONTEXT)}, "a: into= has a Scaled on cpu"),
    ):
        with pytest.raises(MismatchError, match=words):
            fastload.load(tmp_path / "a", into=other, strict=False)
    fastload.save({"a": torch.ones(6, 4)}, tmp_path / "plain")
    with pytest.raises(MismatchError, match="a: into= has a Scaled, the checkpoint a plain tensor"):
        fastload.load(tmp_path / "plain", into={"a": make(4)})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_streams_and_dcp_refuse_it(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'w' is a Scaled: streams take plain tensors"):
        fastload.save_stream([("w", make(1))], tmp_path / "a", spool=tmp_path)
    with pytest.raises(CheckpointException, match="w is a Scaled, of several tensors"):
        dcp.save({"w": make(1)}, storage_writer=Writer(tmp_path / "a"))
    fastload.save({"w": make(1), "x": torch.ones(2)}, tmp_path / "a")
    with fastload.open(tmp_path / "a") as checkpoint:
        outline = checkpoint.outline()
    assert outline.state["w"] is GAP
    assert "Scaled" in outline.left_out[0]
    state = {"x": torch.zeros(2)}
    dcp.load(state, storage_reader=Reader(tmp_path / "a"))
    assert state["x"].tolist() == [1, 1]


def with_hook(module: nn.Module) -> nn.Module:
    module.register_load_state_dict_pre_hook(lambda *_: None)
    return module


class Noted(nn.Linear):
    """With a state of its own, so that its load_state_dict is called."""

    def get_extra_state(self) -> Any:
        return {"note": 3}

    def set_extra_state(self, state: Any) -> None:
        self.note = state


@pytest.mark.parametrize("kind", ["plain", "hook", "extra state"])
def test_modules(tmp_path: Path, kind: str) -> None:
    def module(seed: int) -> nn.Module:
        layer = Noted(4, 6) if kind == "extra state" else nn.Linear(4, 6)
        layer.weight = nn.Parameter(make(seed), requires_grad=False)
        return nn.Sequential(with_hook(layer) if kind == "hook" else layer, nn.Linear(6, 2))

    saved, other, third = module(1), module(2), module(3)
    fastload.save({"model": saved}, tmp_path / "a")
    weight, elements = other[0].weight, other[0].weight.elements
    fastload.load(tmp_path / "a", into={"model": other})
    assert other[0].weight is weight
    assert other[0].weight.elements is elements
    assert_equal(other[0].weight.data, make(1))
    assert torch.equal(other[1].weight, saved[1].weight)
    third.load_state_dict(fastload.load(tmp_path / "a")["model"])
    assert_equal(third[0].weight.data, make(1))


def test_a_save_has_what_was_there_when_it_began(tmp_path: Path) -> None:
    """torch counts changes of the outer tensor only, so inner ones are copied at once."""
    one = make(1)
    versions = one.elements._version, one._version
    assert encode_state({"w": one, "x": one.scale * 2}).uncounted == {"w.elements", "w.scale"}
    handle = fastload.async_save({"w": one}, tmp_path / "a", options=fastload.SaveOptions(snapshot="overlap"))
    one.add_(1)
    assert (one.elements._version, one._version - 1) == versions
    handle.wait(20)
    assert_equal(fastload.load(tmp_path / "a")["w"], make(1))


def test_only_classes_on_the_list_are_saved_and_loaded(tmp_path: Path) -> None:
    fastload.save({"w": make(1)}, tmp_path / "a")
    for name in ("tests.Scaled", "tests.Rounding", "tests.How"):
        kept = subclasses._allowed.pop(name)
        with pytest.raises(OptionError, match=r"state\['w'\] is a .*Scaled: it is not on the list .*allow"):
            fastload.save({"w": make(1)}, tmp_path / "b")
        with pytest.raises(UnsupportedVersion, match=rf"state\['w'\]: the class '{name}' is not on the list"):
            fastload.load(tmp_path / "a")
        subclasses._allowed[name] = kept
    with pytest.raises(OptionError, match=r"another class called tests.Scaled is on the list"):
        subclasses.allow(type("Scaled", (Tensor,), {"__module__": "tests.other"}))
    with pytest.raises(OptionError, match="is no tensor subclass"):
        subclasses.allow(Path)
    subclasses._allowed["tests.Gone"] = "tests.no_such_module"
    structure = with_header(lambda header: header.update({"class": "tests.Gone"}))
    with pytest.raises(UnsupportedVersion, match=r"tests\.Gone cannot be imported"):
        decode_state(*structure)


def with_header(change: Any) -> tuple[Any, dict[str, Tensor]]:
    encoded = encode_state({"w": make(1)})
    structure = json.loads(json.dumps(encoded.structure))
    change(structure["dict"][1]["coded"][1])
    return structure, encoded.tensors


MALFORMED = [
    {"class": 3},
    {"class": ["tests.Scaled"]},
    {"class": "tests.Rounding"},
    {"class": "tests.How"},
    {"class": "builtins.eval"},
    {"size": [5, 4]},
    {"size": [-1]},
    {"size": 3},
    {"stride": None},
    {"stride": [1]},
    {"stride": [-4, 1]},
    {"kind": 3},
    {"context": {"enum": ["tests.Rounding", "SIDEWAYS"]}},
    {"context": {"enum": ["tests.Rounding", []]}},
    {"context": {"enum": ["tests.How", "axes"]}},
    {"context": {"record": ["tests.Rounding", []]}},
    {"context": {"record": ["tests.How", [["no_field", 1]]]}},
    {"context": {"record": ["tests.How", 3]}},
    {"context": {"dict": [[{"list": []}, 1]]}},
    {"context": {"dict": [1]}},
    {"context": {"other": 1}},
    {"context": {"list": [[]]}},
]


@pytest.mark.parametrize("change", MALFORMED, ids=str)
def test_a_malformed_header_is_an_error(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"the structure of the state, at state\['w'\]"):
        decode_state(*with_header(lambda header: header.update(change)))


@pytest.mark.parametrize(
    "payload", [3, [], ["subclass", {}], [3, {}, []], ["subclass", 3, []], ["subclass", {}, [1]]]
)
def test_a_malformed_node_is_an_error(payload: Any) -> None:
    with pytest.raises(ManifestError):
        decode_state({"dict": ["w", {"coded": payload}]}, {})


def test_without_the_extension_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fastload.save({"w": make(1)}, tmp_path / "a")
    structure, tensors = with_header(lambda header: None)
    structure["dict"][1]["coded"][0] = "another"
    with pytest.raises(OptionError, match="a value of the checkpoint needs the extension 'another'"):
        decode_state(structure, tensors)
