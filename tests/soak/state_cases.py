"""One draw of the soak of states: a state, a target, how to load, and what the target has to be afterwards.

What is expected is worked out from the draw itself: each node knows what was saved, what the target has in
its place, and so what has to be there afterwards. Modules and optimizers are compared with what their own
``load_state_dict`` makes of the same state.
"""

from __future__ import annotations

import copy
import fnmatch
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fastload
from fastload import PerRank
from fastload.errors import MismatchError
from tests.unit.test_state import assert_same

__all__ = ["Case", "draw", "run"]

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.complex128, torch.bool, torch.uint8, torch.int32, torch.int64, torch.uint16,
]  # fmt: skip
SHAPES = [(), (3,), (2, 3), (0, 2), (1, 2, 2)]
KEYS = [
    "a", "b", "a.b", "c", "", 1, "1", (1, "x"), ("",), None, 2.5, b"k", "\u00e9", "__metadata__",
    "b~2", 2**70,
]  # fmt: skip
PLAIN = [
    None, True, 7, -0.0, float("nan"), 2**80, "text", b"bytes", 3j, {1, "x"}, frozenset("ab"), range(3),
    torch.float32, torch.Size([2]), np.float32(1.5), random.Random(5).getstate(), [], {}, (), [1, [2]],
    {"lr": 0.1, "betas": (0.9, 0.99)}, Counter("abca"), defaultdict(list, {"k": [1]}),
]  # fmt: skip
BOXES = ["dict", "dict", "OrderedDict", "defaultdict", "list", "tuple", "Counter"]


class _Refused(Exception):
    """It has to be an error."""


class Extra(nn.Module):
    """A module with an extra state."""

    def __init__(self, size: int, extra: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(size, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Renaming(nn.Module):
    """A module that knows an older name of its weight, which was transposed."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(size))
        self.matrix = nn.Parameter(torch.randn(2, 2))
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        if prefix + "old" in state:
            state[prefix + "gain"] = state.pop(prefix + "old")
            state[prefix + "matrix"] = state[prefix + "matrix"].T


class Tied(nn.Module):
    """Two names of one weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        self.two.weight = self.one.weight


def make_module(kind: str, size: int, extra: Any) -> nn.Module:
    """Makes a module of a kind, with random weights."""
    if kind == "plain":
        return nn.Sequential(nn.Linear(size, 2), nn.BatchNorm1d(2))
    if kind == "extra":
        return nn.Sequential(Extra(size, extra), nn.Linear(2, 1))
    return nn.Sequential(Renaming(size) if kind == "renaming" else Tied(size))


def make_optimizer(kind: str, steps: int) -> torch.optim.Optimizer:
    """Makes an optimizer that has made some steps."""
    weights = [nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(3))]
    made: torch.optim.Optimizer = (
        torch.optim.SGD(weights, lr=random.random(), momentum=0.9)
        if kind == "SGD"
        else torch.optim.AdamW(weights, lr=random.random())
    )
    for _ in range(steps):
        sum(weight.square().sum() for weight in weights).backward()  # type: ignore[union-attr]
        made.step()
    return made


@dataclass
class Node:
    """A place in the state, in the target, or in both.

    Attributes:
        saved: What was saved there; `ABSENT` if nothing was.
        target: What the target has there; `ABSENT` if nothing.
        kind: ``plain``, ``tensor``, ``module``, ``optimizer`` or ``box``.
        bad: Whether the target is one that cannot take what was saved.
        own_saved, own_target: Whether it is in a `PerRank` there.
        below: Of a box, its members by key.
    """

    saved: Any
    target: Any
    kind: str
    bad: bool = False
    own_saved: bool = False
    own_target: bool = False
    below: list[tuple[Any, Node]] = field(default_factory=list)

    @property
    def is_one_sided(self) -> bool:
        """Whether one side only has something there."""
        return self.saved is ABSENT or self.target is ABSENT


ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "ABSENT"})()


@dataclass
class Case:
    """One draw."""

    root: Node
    strict: bool
    names: str | None
    dtype: torch.dtype | None
    anew: bool

    @property
    def label(self) -> str:
        """What is counted together."""
        into = "anew" if self.anew else "into, strict" if self.strict else "into, not strict"
        return f"{into}{', names=' if self.names else ''}{', dtype=' if self.dtype else ''}"

    def show(self) -> str:
        """Returns the draw in words."""
        how = f"strict={self.strict} names={self.names!r} dtype={self.dtype} anew={self.anew}"
        return "\n".join([how, *_lines(self.root, "state")])


def _lines(node: Node, where: str) -> Iterator[str]:
    if node.kind != "box":
        kind = f"{node.kind}{' that is bad' * node.bad}"
        yield f"{where}: {kind}: {_short(node.saved)} into {_short(node.target)}"
        return
    yield f"{where}: {type(node.saved).__name__}"
    for key, child in node.below:
        yield from _lines(child, f"{where}[{key!r}]")


def _short(value: Any) -> str:
    if isinstance(value, PerRank):
        return f"PerRank({_short(value.value)})"
    if isinstance(value, Tensor):
        return f"{type(value).__name__} {value.dtype} {list(value.shape)}"
    return str(list(value)) if isinstance(value, OrderedDict) else repr(value)[:100]


class _Draw:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.dtype = rng.choice([None, None, None, torch.float16, torch.float64])
        self.trouble = rng.choice([0.0, 0.0, 0.03, 0.15])
        self.names = rng.choice([None, None, None, "*", "a*", "*b*"])
        self.tensors: list[tuple[Tensor, Tensor]] = []  # saved, and what takes its place

    def case(self) -> Case:
        strict, anew = self.rng.choice([True, True, False]), self.rng.choice([False] * 5 + [True])
        root = self.box(0, self.rng.choice(["dict", "dict", "OrderedDict", "list"]))
        return Case(root, strict, self.names, self.dtype, anew)

    def node(self, depth: int) -> Node:
        kinds = ["plain", "plain", "tensor", "tensor", "tensor", "array", "module", "optimizer"]
        kind = self.rng.choice([*kinds, *(["box"] * 4 if depth < 3 else [])])
        made: Node = {
            "plain": self.plain, "tensor": self.tensor, "array": self.array, "module": self.module,
            "optimizer": self.optimizer, "box": lambda: self.box(depth, self.rng.choice(BOXES)),
        }[kind]()  # fmt: skip
        if kind in ("plain", "array"):
            made.own_saved = self.rng.random() < 0.2
        made.own_target = self.rng.random() < 0.1
        if depth and self.rng.random() < self.trouble:
            if self.rng.random() < 0.5:
                made = _only(made, saved=self.rng.random() < 0.5)
            elif made.kind in ("tensor", "module", "optimizer"):
                made.target = self.rng.choice(PLAIN)  # to be replaced as a whole
                made.kind, made.bad = "plain", False
        return made

    def plain(self) -> Node:
        return Node(copy.deepcopy(self.rng.choice(PLAIN)), copy.deepcopy(self.rng.choice(PLAIN)), "plain")

    def array(self) -> Node:
        dtype = self.rng.choice(["<f4", "<f8", ">f4", "<c16", "<i8", "|b1"])
        return Node(np.arange(6).astype(dtype), self.rng.choice([None, np.zeros(2), 3]), "plain")

    def tensor(self) -> Node:
        if self.tensors and self.rng.random() < 0.25:
            saved, target = self.rng.choice(self.tensors)
            if self.names is not None or self.rng.random() < 0.5:  # in the target it is not tied
                target = target.detach().clone()
            return Node(saved, target, "tensor")
        own = self.rng.random() < 0.2
        dtype, shape = self.rng.choice(DTYPES), self.rng.choice(SHAPES)
        torch.manual_seed(self.rng.randrange(1 << 30))
        saved = (torch.randn(shape, dtype=torch.float64) * 4).to(dtype)
        if dtype.is_complex:
            saved = torch.randn(shape, dtype=dtype)
        wanted = self.dtype if self.dtype is not None and dtype.is_floating_point else dtype
        target = torch.zeros(shape, dtype=wanted)
        way = self.rng.choice(["plain", "plain", "plain", "strided", "parameter", "meta", "conj"])
        if way == "strided" and len(shape) == 2:
            target = torch.zeros(shape[::-1], dtype=wanted).T
        elif way == "conj" and dtype.is_complex:
            saved, target = saved.conj(), target.conj()
        elif way == "parameter" and dtype in (torch.float32, torch.complex128):
            saved = nn.Parameter(saved, requires_grad=self.rng.random() < 0.5)
            target = nn.Parameter(target, requires_grad=saved.requires_grad)
        elif way == "meta":
            target = target.to("meta")
        bad = self.rng.random() < self.trouble / 2
        if bad:
            wider = torch.zeros((*shape, 2), dtype=wanted)
            target = self.rng.choice([wider, torch.zeros(shape, dtype=torch.int16)])
        elif not own:  # nothing of the rest is tied to a rank's own
            self.tensors.append((saved, target))
        return Node(saved, target, "tensor", bad, own_saved=own)

    def module(self) -> Node:
        kind = self.rng.choice(["plain", "extra", "tied", *(["renaming"] if self.names is None else [])])
        extra = self.rng.choice([5, None, {"n": [1, 2]}, torch.arange(3), {"amax": torch.ones(2), "h": ()}])
        size = self.rng.choice([1, 3])
        saved = make_module(kind, size, extra).state_dict()
        if kind == "renaming" and self.rng.random() < 0.7:
            saved["0.old"] = saved.pop("0.gain")
        bad = self.rng.random() < self.trouble / 2
        target = make_module(kind, size + bad, 0)
        if self.dtype is not None:
            target.to(self.dtype)
        return Node(saved, target, "module", bad)

    def optimizer(self) -> Node:
        kind = self.rng.choice(["SGD", "AdamW"])
        return Node(
            make_optimizer(kind, self.rng.choice([0, 2])).state_dict(),
            make_optimizer(kind, self.rng.choice([0, 1])),
            "optimizer",
        )

    def box(self, depth: int, kind: str) -> Node:
        num = self.rng.randint(0, 4)
        is_list = kind in ("list", "tuple")
        keys = list(range(num)) if is_list else self.rng.sample(KEYS, num)
        below = [(key, self.node(depth + 1)) for key in keys]
        if is_list:  # what one side lacks has to be at the end
            gaps = [place for place, (_, node) in enumerate(below) if node.is_one_sided]
            below = below[: gaps[0] + 1] if gaps else below
        elif self.rng.random() < self.trouble:
            below.append((f"new{depth}", _only(self.node(3), saved=False)))
        for _, node in below:
            if kind == "tuple" and _is_meta(node.target):  # which cannot be replaced there
                node.target = torch.zeros(node.target.shape, dtype=node.target.dtype)
        return Node(_box(kind, below, "saved"), _box(kind, below, "target"), "box", below=below)


def _only(node: Node, *, saved: bool) -> Node:
    """Returns a place that one side only has."""
    if node.kind == "box" or node.is_one_sided:
        node = Node(5, 6, "plain")
    if saved:
        return Node(node.saved, ABSENT, node.kind)
    # One name of a tensor that is tied in the target would be enough.
    target = node.target.detach().clone() if isinstance(node.target, Tensor) else node.target
    return Node(ABSENT, target, node.kind)


def _box(kind: str, below: list[tuple[Any, Node]], side: str) -> Any:
    items = [(key, getattr(node, side)) for key, node in below if getattr(node, side) is not ABSENT]
    own = {key for key, node in below if getattr(node, f"own_{side}")}
    items = [(key, PerRank(value) if key in own else value) for key, value in items]
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(value for _, value in items)
    if kind == "defaultdict":
        return defaultdict(list, items)
    made: Any = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}[kind]()
    for key, value in items:
        made[key] = value
    return made


def draw(rng: random.Random) -> Case:
    """Draws a case."""
    random.seed(rng.randrange(1 << 30))
    return _Draw(rng).case()


# What has to come of it


class _Oracle:
    """Works out what the target has to be."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def cast(self, value: Any) -> Any:
        """What was saved, as it is when it is made anew."""
        if isinstance(value, Tensor):
            plain = value.detach()
            if self.case.dtype is not None and plain.is_floating_point():
                plain = plain.to(self.case.dtype)
            return nn.Parameter(plain, value.requires_grad) if isinstance(value, nn.Parameter) else plain
        return _mapped(value, self.cast)

    def chosen(self, name: str) -> bool:
        return self.case.names is None or fnmatch.fnmatchcase(name, self.case.names)

    def takes_whole(self, value: Any, name: str) -> bool:
        """Whether what is replaced as a whole is selected."""
        if self.case.names is None:
            return True
        picked = [self.chosen(one) for one, _ in _tensors(value, name)]
        if any(picked) and not all(picked):
            raise _Refused("some of its tensors")
        return any(picked)

    def node(self, node: Node, name: str) -> Any:
        """Returns what is to be at a place of the target, frozen."""
        strict, narrow = self.case.strict, self.case.names is not None
        if node.target is ABSENT:
            lost = any(self.chosen(one) for one, _ in _tensors(node.saved, name)) if narrow else True
            if strict and lost:
                raise _Refused("unexpected")
            return ABSENT
        if node.saved is ABSENT:
            lost = not narrow or any(self.chosen(one) for one in _fillable(node.target, name))
            if strict and lost:
                raise _Refused("missing")
            return freeze(node.target)
        if node.kind == "box" and _holds_some(node.target):
            return self.box(node, name)
        if node.kind in ("plain", "box"):
            is_taken = self.takes_whole(node.saved, name)
            return freeze(self.cast(node.saved) if is_taken else node.target)
        if node.kind == "tensor":
            if not self.chosen(name):
                return freeze(node.target)
            if node.bad:
                raise _Refused("does not fit")
            return _filled(node)
        if node.kind == "module":
            return self.module(node, name)
        if not self.takes_whole(node.saved, name):
            return freeze(node.target)
        reference = copy.deepcopy(node.target)
        reference.load_state_dict(copy.deepcopy(node.saved))
        return freeze(reference)

    def module(self, node: Node, name: str) -> Any:
        prefix = f"{name}." if name else ""
        state = OrderedDict(
            (key, value)
            for key, value in node.saved.items()
            if self.case.names is None or self.takes_whole(value, f"{prefix}{key}")
        )
        own = node.target.state_dict()
        if any(
            _shape(own.get(key, value)) != _shape(value)
            for key, value in state.items()
            if "_extra" not in key
        ):
            raise _Refused("does not fit")
        reference = copy.deepcopy(node.target)
        if state or self.case.names is None:
            try:
                reference.load_state_dict(copy.deepcopy(state), strict=False)
            except RuntimeError as error:
                raise _Refused(str(error)) from None
        return freeze(reference)

    def box(self, node: Node, name: str) -> Any:
        prefix = f"{name}." if name else ""
        found = [(key, self.node(child, prefix + key_text(key))) for key, child in node.below]
        items = [(key, value) for key, value in found if value is not ABSENT]
        if isinstance(node.target, list | tuple):
            return type(node.target)(value for _, value in items)
        made = copy.copy(node.target)
        made.clear()
        for key, value in items:
            made[key] = value
        return made


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else torch.Size([])


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _filled(node: Node) -> Any:
    plain = node.saved.detach().resolve_conj().to(node.target.dtype)
    if isinstance(node.target, nn.Parameter):
        return nn.Parameter(plain.clone(), node.target.requires_grad)
    return plain.clone()


def key_text(key: Any) -> str:
    """Returns a key as it is in a name."""
    if isinstance(key, tuple):
        return f"({', '.join(map(key_text, key))})"
    return hex(key) if key == 2**70 else str(key)


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields what is stored as a tensor, by name."""
    value = _bare(value)
    if isinstance(value, Tensor | np.ndarray):
        yield name or "tensor", value
    is_list = isinstance(value, list | tuple)
    for key, member in enumerate(value) if is_list else value.items() if isinstance(value, dict) else ():
        yield from _tensors(member, f"{name}.{key_text(key)}" if name else key_text(key))


def _fillable(target: Any, name: str) -> Iterator[str]:
    """Yields the names of the tensors of a module, or of a tensor."""
    if isinstance(target, Tensor):
        yield name
    elif isinstance(target, nn.Module):
        yield from (f"{name}.{key}" if name else key for key in target.state_dict())


def _holds_some(value: Any) -> bool:
    if isinstance(value, Tensor | nn.Module | torch.optim.Optimizer | PerRank):
        return True
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(map(_holds_some, members))


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, PerRank) else value


def _mapped(value: Any, change: Any) -> Any:
    """Returns a copy of a container with its members changed; anything else as it is."""
    if isinstance(value, PerRank):
        return change(value.value)
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(change(member) for member in value)
    if not isinstance(value, dict):
        return value
    made = copy.copy(value)
    for key in value:
        made[key] = change(value[key])
    return made


def freeze(value: Any) -> Any:
    """Returns a copy of what is to be compared."""
    if isinstance(value, nn.Module):
        return ("module", freeze(dict(value.state_dict())))
    if isinstance(value, torch.optim.Optimizer):
        return ("optimizer", freeze(value.state_dict()))
    if _is_meta(value):
        return ("meta", type(value), value.shape, value.dtype)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().clone(), value.requires_grad)
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict | list | tuple | PerRank):
        return _mapped(value, freeze)
    return copy.deepcopy(value)


def run(case: Case, folder: Path) -> str:
    """Saves, loads and compares; returns how it ended."""
    path = folder / "state"
    fastload.save(case.root.saved, path, options=fastload.SaveOptions(overwrite=True))
    if case.anew:
        return _load_anew(case, path)
    into, oracle = case.root.target, _Oracle(case)
    before, tensors = freeze(into), dict(_at_places(into))
    saved = [name for name, _ in _tensors(case.root.saved, "")]
    try:
        expected = oracle.box(case.root, "")
        if case.strict and case.names is not None and not any(map(oracle.chosen, saved)):
            raise _Refused("nothing is selected")
    except _Refused:
        expected = None
    refusal = ""
    try:
        fastload.load(path, into=into, strict=case.strict, names=case.names, dtype=case.dtype)
    except MismatchError as error:
        refusal = str(error)
    if refusal:
        is_elsewhere = not case.strict and "  missing in the checkpoint" in refusal
        assert expected is None or is_elsewhere, f"it was refused: {refusal}"
        if expected is not None:
            # No tensor of the target was saved, and that is told.
            assert_same(list(_tensors(expected, "")), list(_tensors(before, "")))
        assert_same(freeze(into), before)
        return "refused, and nothing was changed"
    assert expected is not None, "it was not refused"
    assert_same(freeze(into), expected)
    after = dict(_at_places(into))
    assert all(after[place] is tensor for place, tensor in tensors.items() if not tensor.is_meta)
    return "restored"


def _load_anew(case: Case, path: Path) -> str:
    oracle = _Oracle(case)
    if case.names is None:
        loaded = fastload.load(path, dtype=case.dtype)
        assert_same(loaded, oracle.cast(case.root.saved))
        first: dict[int, Any] = {}
        pairs = zip(_at_places(case.root.saved), _at_places(loaded), strict=True)
        for (_, saved), (_, tensor) in pairs:
            assert first.setdefault(id(saved), tensor) is tensor, "it is no longer tied"
        return "restored"
    every = list(_tensors(case.root.saved, ""))
    chosen = {name: value for name, value in every if oracle.chosen(name)}
    if not chosen:
        with pytest.raises(MismatchError):
            fastload.load(path, names=case.names)
        return "refused"
    loaded = fastload.load(path, names=case.names, dtype=case.dtype)
    twice = {name for name, count in Counter(name for name, _ in every).items() if count > 1} | {
        "__metadata__"
    }
    assert chosen.keys() - twice <= loaded.keys()
    for name in chosen.keys() - twice:
        wanted = chosen[name]
        if isinstance(wanted, np.ndarray):
            wanted = torch.from_numpy(wanted.astype(wanted.dtype.newbyteorder("=")))
        assert_same(loaded[name], oracle.cast(torch.Tensor.detach(wanted)))
    return "restored"


def _at_places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yields the tensors in containers, and the keys that lead to them."""
    value = _bare(value)
    if isinstance(value, Tensor):
        yield place, value
    is_list = isinstance(value, list | tuple)
    for key, member in enumerate(value) if is_list else value.items() if isinstance(value, dict) else ():
        yield from _at_places(member, (*place, key))
