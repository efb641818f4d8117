"""What ``into=`` gives back of a state that fastload saved: everything, in its place, or an error before."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import fastload
from fastload.errors import FastloadError, ManifestError, MismatchError, OptionError
from tests.checkpoints import record_by_hand, write_file
from tests.unit.test_state import assert_same


def loaded(path: Path, state: Any, into: Any, **arguments: Any) -> Any:
    """Saves a state and loads it into something; returns the latter."""
    fastload.save(state, path / "saved")
    fastload.load(path / "saved", into=into, **arguments)
    return into


def refused(path: Path, state: Any, into: Any, **arguments: Any) -> MismatchError:
    """Saves a state and has it refused, before anything of the target is changed."""
    if not (path / "saved").exists():
        fastload.save(state, path / "saved")
    before = [tensor.clone() for tensor in tensors_in(into)]
    with pytest.raises(MismatchError) as raised:
        fastload.load(path / "saved", into=into, **arguments)
    assert all(map(torch.equal, tensors_in(into), before))
    return raised.value


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, nn.Module):
        return [tensor.detach() for tensor in value.state_dict().values() if isinstance(tensor, Tensor)]
    if isinstance(value, Tensor):
        return [value.detach()]
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for member in members for tensor in tensors_in(member)]


# Plain values


def test_plain_values_are_replaced_as_a_whole(tmp_path: Path) -> None:
    state = {
        "weight": torch.arange(3.0),
        "step": 7,
        "rng": random.getstate(),
        "position": (5, 7),
        "losses": [1.0, 2.0, 3.0],
        "metrics": {"a": 1},
        "numbers": {3, 4},
        "numpy": np.random.RandomState(3).get_state(),
        "best": None,
        "curve": [torch.ones(2)],
    }
    random.seed(5)
    into = {
        "weight": torch.zeros(3),
        "step": 0,
        "rng": random.getstate(),
        "position": (0, 0),
        "losses": [],
        "metrics": {},
        "numbers": set(),
        "numpy": np.random.RandomState(4).get_state(),
        "best": 0.5,
        "curve": None,
    }
    weight = into["weight"]
    loaded(tmp_path, state, into)
    assert_same(into, state)
    assert into["weight"] is weight
    random.setstate(into["rng"])
    np.random.RandomState().set_state(into["numpy"])


def test_what_stands_beside_tensors_is_restored_in_its_place(tmp_path: Path) -> None:
    state = {"parts": [{"w": torch.ones(2), "n": 1}, 5], "pair": (torch.ones(1), 7, ("x", [torch.ones(1)]))}
    inner = {"w": torch.zeros(2), "n": 0}
    into = {"parts": [inner, 0], "pair": (torch.zeros(1), 0, ("", [torch.zeros(1)]))}
    in_pair = into["pair"][0]
    loaded(tmp_path, state, into)
    assert_same(into, state)
    assert into["parts"][0] is inner
    assert into["pair"][0] is in_pair


def test_what_cannot_be_put_anywhere_is_refused(tmp_path: Path) -> None:
    state = (torch.ones(1), 7)
    into = (torch.zeros(1), 7)
    assert_same(loaded(tmp_path, state, into), state)
    for other in (6, 7.0, True):
        assert "cannot be changed" in str(refused(tmp_path, state, (torch.zeros(1), other)))


def test_keys_that_one_side_lacks(tmp_path: Path) -> None:
    state = {"w": torch.ones(1), "step": 3, "part": {"t": torch.ones(1), "lr": 0.1}, "done": {}}
    into = {"w": torch.zeros(1), "steps": 0, "part": {"t": torch.zeros(1), "lr": 0.0, "decay": 0.5}}
    error = refused(tmp_path, state, into)
    assert error.missing == ("into['steps']", "into['part']['decay']")
    assert error.unexpected == ("step", "done")
    fastload.load(tmp_path / "saved", into=into, strict=False)
    assert_same(into, {"w": torch.ones(1), "steps": 0, "part": {"t": torch.ones(1), "lr": 0.1, "decay": 0.5}})


@pytest.mark.parametrize("strict", [True, False])
def test_one_thing_is_not_taken_for_another(tmp_path: Path, strict: bool) -> None:
    state = {"a": torch.ones(1), "b": 1, "c": {"t": torch.ones(1)}, "d": [1, 2], "e": 5, "f": torch.ones(1)}
    into = {
        "a": {"t": torch.zeros(1)},
        "b": torch.zeros(1),
        "c": torch.zeros(1),
        "d": nn.Linear(1, 1),
        "e": nn.Linear(1, 1),
        "f": nn.Linear(1, 1),
    }
    assert len(refused(tmp_path, state, into, strict=strict).mismatched) >= 5


def test_a_container_that_contains_itself_is_refused(tmp_path: Path) -> None:
    into: dict[str, Any] = {"t": torch.zeros(1)}
    into["self"] = into
    fastload.save({"t": torch.ones(1), "self": {"t": torch.ones(1)}}, tmp_path / "saved")
    with pytest.raises(FastloadError):
        fastload.load(tmp_path / "saved", into=into)


# Names and keys


def test_keys_lead_to_tensors_and_names_where_keys_do_not(tmp_path: Path) -> None:
    state = {"a": {"b": torch.tensor([1.0])}, "a.b": torch.tensor([2.0]), (1, "x"): {"": torch.tensor([3.0])}}
    state |= {"": {"": torch.tensor([4.0])}, 3: torch.tensor([5.0]), math.nan: torch.tensor([6.0])}
    into = {"a.b": torch.zeros(1)}
    loaded(tmp_path, state, into, strict=False)
    assert into["a.b"].item() == 2
    zeros = {
        key: {k: torch.zeros(1) for k in v} if isinstance(v, dict) else torch.zeros(1)
        for key, v in state.items()
    }
    fastload.load(tmp_path / "saved", into=zeros)
    assert_same(zeros, state)
    by_name = {"1": torch.zeros(1), "3": torch.zeros(1)}
    fastload.load(tmp_path / "saved", into=by_name, strict=False)
    assert (by_name["1"].item(), by_name["3"].item()) == (0, 5)


def test_keys_that_are_equal_but_spelled_differently(tmp_path: Path) -> None:
    state = {1.0: torch.tensor([10.0]), "1": torch.tensor([20.0])}
    state |= {2.0: {"t": torch.ones(1)}, "2": {"t": torch.zeros(1)}}
    into = {1: torch.zeros(1), "1": torch.zeros(1), 2: {"t": torch.zeros(1)}, "2": {"t": torch.ones(1)}}
    loaded(tmp_path, state, into)
    assert_same(list(into.values()), list(state.values()))
    alone = {1: torch.zeros(1)}
    fastload.load(tmp_path / "saved", into=alone, strict=False)
    assert alone[1].item() == 10


def test_names_pair_other_nestings(tmp_path: Path) -> None:
    flat = {"model.0.weight": torch.ones(2, 2), "model.0.bias": torch.ones(2), "x": torch.ones(1)}
    model = nn.Sequential(nn.Linear(2, 2))
    loaded(tmp_path, flat, {"model": model, "x": torch.zeros(1)})
    assert model[0].weight.sum() == 4
    nested = {"model": [{"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}], "x": torch.zeros(1)}
    fastload.load(tmp_path / "saved", into=nested)
    assert nested["model"][0]["weight"].sum() == 4
    fastload.save({"0": {"weight": torch.full((2, 2), 3.0), "bias": torch.ones(2)}}, tmp_path / "nested")
    fastload.load(tmp_path / "nested", into=model)
    assert model[0].weight.sum() == 12


# Names that differ by a prefix


def net(fill: float) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, fill)
    return model


def test_the_model_out_of_a_training_checkpoint_is_one_line_that_the_error_says(tmp_path: Path) -> None:
    trained, model = net(3.0), net(0.0)
    optimizer = torch.optim.AdamW(trained.parameters())
    trained(torch.ones(2)).sum().backward()
    optimizer.step()
    state = {"model": trained.state_dict(), "optimizer": optimizer.state_dict(), "step": 100}
    for strict in (True, False):
        error = refused(tmp_path, state, model, strict=strict)
        assert str(error).endswith("pass into={'model': model}, strict=False")
        assert error.missing == ("0.weight", "0.bias", "1.weight", "1.bias")
        assert {"model.0.weight", "optimizer.state.0.exp_avg", "step"} <= set(error.unexpected)
    fastload.load(tmp_path / "saved", into={"model": model}, strict=False)
    assert_same(model.state_dict(), trained.state_dict())
    for into in ({"a": torch.zeros(1)}, {"net": model, "step": 0}):
        error = refused(tmp_path, state, into, strict=False)
        assert str(error).endswith("no tensor of into= is in the checkpoint")
        assert into.get("step", 0) == 0
    only_step = {"step": 0}
    fastload.load(tmp_path / "saved", into=only_step, strict=False)
    assert only_step == {"step": 100}


@pytest.mark.parametrize("prefix", ["model.", "module.", "_orig_mod.", "module._orig_mod.", "a.b."])
@pytest.mark.parametrize("plain", [False, True])
def test_a_prefix_that_one_side_has_alone(tmp_path: Path, prefix: str, plain: bool) -> None:
    bare = net(3.0).state_dict()
    prefixed = {prefix + name: tensor for name, tensor in bare.items()}
    for name, state in ("bare", bare), ("prefixed", prefixed):
        if plain:
            safetensors.torch.save_file(state, tmp_path / f"{name}.safetensors")
        else:
            fastload.save(state, tmp_path / f"{name}.safetensors")
    for strict in (True, False):
        model = net(0.0)
        with pytest.raises(MismatchError) as raised:
            fastload.load(tmp_path / "prefixed.safetensors", into=model, strict=strict)
        *_, advice = str(raised.value).splitlines()
        begin = f"the checkpoint has {prefix!r} in front of these names: pass into="
        assert advice.startswith(begin)
        fastload.load(tmp_path / "prefixed.safetensors", into=eval(advice.removeprefix(begin)))
        assert_same(dict(model.state_dict()), dict(bare))
        into: Any = model
        for name in reversed(prefix.removesuffix(".").split(".")):
            wrapper = nn.Module()
            wrapper.add_module(name, into)
            into = wrapper
        with pytest.raises(MismatchError, match=f"into= has '{prefix}' .* pass what is inside of it"):
            fastload.load(tmp_path / "bare.safetensors", into=into, strict=strict)


def test_a_wrapper_beside_what_fits(tmp_path: Path) -> None:
    state = {"model": net(3.0).state_dict(), "step": 7}
    wrapped = nn.Module()
    wrapped.add_module("module", net(0.0))
    for into in ({"model": wrapped, "step": 0}, {"model": wrapped.state_dict(), "step": 0}):
        assert "into= has 'module.'" in str(refused(tmp_path, state, into, strict=False))
    (tmp_path / "ddp").mkdir()
    state = {"model": {f"0.module.{name}": torch.ones(2) for name in ("a", "b")}, "step": 7}
    own = {"model": {f"0.{name}": torch.zeros(2) for name in ("a", "b")}, "step": 0}
    error = refused(tmp_path / "ddp", state, own, strict=False)
    assert "the checkpoint has 'module.'" in str(error)
    assert "'model.0.module.a' there, 'model.0.a' in into=" in str(error)


def test_the_error_says_what_strict_would_leave_out(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "b": torch.ones(2), "position_ids": torch.ones(2), "step": 1}
    into = {"a": torch.zeros(2), "b": torch.zeros(2)}
    error = refused(tmp_path, state, into)
    assert str(error).endswith("strict=False leaves these out, and loads the rest")
    assert error.unexpected == ("position_ids", "step")
    fastload.load(tmp_path / "saved", into=into, strict=False)
    assert_same(into, {name: state[name] for name in "ab"})
    into["b"] = torch.zeros(3)  # which strict=False does not leave out
    assert "strict=False" not in str(refused(tmp_path, state, into))


# Tied tensors, arrays, complex numbers, casts


@pytest.mark.parametrize("into", [None, {"a": torch.zeros(2)}])
def test_no_load_to_the_meta_device(tmp_path: Path, into: Any) -> None:
    fastload.save({"a": torch.ones(2)}, tmp_path / "saved")
    for device in ("meta", torch.device("meta")):
        with pytest.raises(OptionError, match="meta device has no memory"):
            fastload.load(tmp_path / "saved", into=into, device=device)


def test_tied_tensors_go_to_untied_targets_by_each_name(tmp_path: Path) -> None:
    tied = torch.arange(4.0)
    state = {"a": tied, "b": tied, "c": torch.ones(1)}
    into = {"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(1)}
    reports: list[fastload.LoadReport] = []
    options = fastload.LoadOptions(on_report=reports.append)
    loaded(tmp_path, state, into, options=options)
    assert_same(into, state)
    assert reports[0].bytes_read == 20, "it is read once"
    for name in "ab":
        alone = {name: torch.zeros(4)}
        fastload.load(tmp_path / "saved", into=alone, strict=False)
        assert_same(alone[name], tied)
        alone = {name: torch.zeros(4)}
        assert set(fastload.load(tmp_path / "saved", into=alone, names=name)) == {name}
        assert_same(alone[name], tied)
        assert_same(fastload.load(tmp_path / "saved", names=name), {name: tied})
    half = {"a": torch.zeros(4, dtype=torch.bfloat16), "b": torch.zeros(4, dtype=torch.bfloat16)}
    fastload.load(tmp_path / "saved", into=half, strict=False, dtype=torch.bfloat16)
    assert_same(half, {"a": tied.bfloat16(), "b": tied.bfloat16()})
    fastload.save(
        {"b~2": tied, "b": tied, "c": {"b": torch.ones(1)}, "c.b": torch.zeros(1)}, tmp_path / "more"
    )
    assert_same(fastload.load(tmp_path / "more", names="b"), {"b": tied})
    assert set(fastload.load(tmp_path / "more", names="*")) == {"b", "b~2", "c.b", "c.b~2"}
    together = fastload.load(tmp_path / "saved", names=["a", "b"])
    assert together["a"] is together["b"]


def test_arrays_and_complex_numbers(tmp_path: Path) -> None:
    values = torch.randn(3, 2, dtype=torch.complex128)
    state = {
        "array": np.arange(3.0),
        "wide": np.ones(2, np.complex128),
        "big": np.arange(3, dtype=">f4"),
        "complex": values,
        "conj": values[:2].conj(),
        "parameter": nn.Parameter(values.clone()),
        "weight": torch.ones(2),
    }
    into = {
        "array": np.zeros(3),
        "wide": None,
        "big": 0,
        "complex": torch.zeros(2, 3, dtype=torch.complex128).T,
        "conj": torch.zeros(2, 2, dtype=torch.complex128).conj(),
        "parameter": nn.Parameter(torch.zeros(3, 2, dtype=torch.complex128)),
        "weight": torch.zeros(2),
    }
    tensors = {name: value for name, value in into.items() if isinstance(value, Tensor)}
    loaded(tmp_path, state, into)
    assert_same(into, state)
    assert all(into[name] is tensor for name, tensor in tensors.items())
    meta = {**into, "complex": torch.empty(3, 2, dtype=torch.complex128, device="meta")}
    fastload.load(tmp_path / "saved", into=meta)
    assert_same(meta, state)
    half = fastload.load(tmp_path / "saved", dtype=torch.float16)
    assert_same(half, {**state, "weight": state["weight"].half()})
    by_name = fastload.load(tmp_path / "saved", names=["c*", "array"])
    assert_same(by_name, {"array": torch.arange(3.0).double(), "complex": values, "conj": values[:2].conj()})
    as_tensors = {"array": torch.zeros(3).double(), "wide": torch.zeros(2, dtype=torch.complex128)}
    fastload.load(tmp_path / "saved", into=as_tensors, strict=False)
    assert_same(as_tensors, {name: torch.from_numpy(state[name]) for name in as_tensors})
    error = refused(tmp_path, state, {**into, "complex": torch.zeros(3, 2, 2, dtype=torch.float64)})
    assert "shape [3, 2] in the checkpoint, [3, 2, 2]" in error.mismatched[0]


def test_a_cast_leaves_arrays_tied_to_tensors_as_they_are(tmp_path: Path) -> None:
    array = np.arange(3, dtype=np.float32)
    state = {"array": array, "tensor": torch.from_numpy(array), "pair": [torch.from_numpy(array)]}
    wanted = {
        "array": array,
        "tensor": torch.from_numpy(array).half(),
        "pair": [torch.from_numpy(array).half()],
    }
    into = {"array": 0, "tensor": torch.zeros(3, dtype=torch.float16), "pair": []}
    loaded(tmp_path, state, into, dtype=torch.float16)
    assert_same(into, wanted)
    assert_same(fastload.load(tmp_path / "saved", dtype=torch.float16), wanted)


@pytest.mark.parametrize("strict", [True, False])
def test_an_optimizer_whose_state_is_tied_to_a_weight(tmp_path: Path, strict: bool) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter]["momentum_buffer"] = parameter.data if number == 0 else torch.ones(3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    other = nn.Linear(3, 3)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
    loaded(tmp_path, state, {"model": other, "optimizer": other_optimizer}, strict=strict)
    assert_same(other.state_dict(), state["model"])
    assert_same(other_optimizer.state_dict(), state["optimizer"])


def trained() -> dict[str, Any]:
    """What is saved of a training."""
    model = net(3.0)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}


@pytest.mark.parametrize("strict", [True, False])
def test_an_optimizer_of_a_model_on_meta(tmp_path: Path, strict: bool) -> None:
    state = trained()
    fastload.save(state, tmp_path / "saved")
    with torch.device("meta"):
        empty = net(0.0)
    into: dict[str, Any] = {"model": empty, "optimizer": torch.optim.Adam(empty.parameters()), "step": 0}
    for partly in (into, {"optimizer": into["optimizer"]}):
        with pytest.raises(
            MismatchError, match=r"into\['optimizer'\]: it has parameters on the meta"
        ) as raised:
            fastload.load(tmp_path / "saved", into=partly, strict=strict and partly is into)
        assert len(raised.value.mismatched) == 1
    assert (into["step"], into["optimizer"].state) == (0, {})
    assert all(parameter.is_meta for parameter in empty.parameters())
    fastload.load(tmp_path / "saved", into=into, names="model.*")  # the optimizer is not asked for
    into["optimizer"] = torch.optim.Adam(empty.parameters())
    fastload.load(tmp_path / "saved", into=into, strict=strict)
    assert_same(into["optimizer"].state_dict(), state["optimizer"])
    assert_same(empty.state_dict(), state["model"])


def groups(*sizes: int) -> torch.optim.Adam:
    return torch.optim.Adam([{"params": [torch.ones(2) for _ in range(size)]} for size in sizes])


@pytest.mark.parametrize("strict", [True, False])
def test_an_optimizer_with_other_parameter_groups(tmp_path: Path, strict: bool) -> None:
    state = trained()
    into = {"model": net(0.0), "optimizer": groups(2, 2), "step": 0}
    error = refused(tmp_path, state, into, strict=strict)
    assert error.mismatched == ("into['optimizer']: parameter groups: 1 in the checkpoint, 2 in into=",)
    into["optimizer"] = groups(5)
    error = refused(tmp_path, state, into, strict=strict)
    line = "into['optimizer']: parameters in group 0: 4 in the checkpoint, 5 in into="
    assert error.mismatched == (line,)
    assert into["step"] == 0

    def adapt(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        (group,) = state["param_groups"]
        halves = [{**group, "params": group["params"][:2]}, {**group, "params": group["params"][2:]}]
        return {**state, "param_groups": halves}

    into["optimizer"] = torch.optim.Adam([{"params": list(part.parameters())} for part in into["model"]])
    into["optimizer"].register_load_state_dict_pre_hook(adapt)
    fastload.load(tmp_path / "saved", into=into, strict=strict)
    assert_same(into["optimizer"].state_dict()["state"], state["optimizer"]["state"])


class Picky(torch.optim.Adam):
    """Has a way of its own to refuse a state."""

    def load_state_dict(self, state_dict: Any) -> None:
        raise ValueError("not this one")


def test_what_is_refused_only_after_the_load_says_so(tmp_path: Path) -> None:
    state = trained()
    model = net(0.0)
    into = {"model": model, "optimizer": Picky(model.parameters()), "step": 0}
    when = "after its tensors were loaded: into= is undefined"
    with pytest.raises(MismatchError, match=when) as raised:
        loaded(tmp_path, state, into)
    assert raised.value.mismatched == ("into['optimizer'].load_state_dict: ValueError: not this one",)
    with torch.device("meta"):
        unfilled = nn.Sequential(Rotary(False))
    with pytest.raises(MismatchError, match=when):
        loaded(tmp_path / "other", {"0.weight": torch.ones(2)}, unfilled)


def test_names_narrow_what_takes_several_tensors_to_all_or_none(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 5}
    other = nn.Linear(2, 2)
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.7)
    into = {"model": other, "optimizer": other_optimizer, "step": 0}
    loaded(tmp_path, state, into, names="model.*")
    assert_same(other.state_dict(), state["model"])
    assert (other_optimizer.state_dict()["state"], other_optimizer.param_groups[0]["lr"]) == ({}, 0.7)
    fastload.load(tmp_path / "saved", into=into, names="optimizer.*")
    assert_same(other_optimizer.state_dict(), state["optimizer"])
    assert into["step"] == 0
    assert "selects some of its tensors only" in str(refused(tmp_path, state, into, names="*.exp_avg"))


# Modules


class Counting(nn.Module):
    """Has an extra state of any kind, and notes what hooks see."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.extra = extra
        self.calls: list[Any] = []
        self.register_load_state_dict_post_hook(
            lambda module, keys: self.calls.append(tuple(map(tuple, keys)))
        )

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


EXTRA = [7, None, {"scale": 1.5, "history": [1, 2]}, torch.arange(3.0), {"amax": torch.ones(2), "n": (1, 2)}]


@pytest.mark.parametrize("number", range(len(EXTRA)))
@pytest.mark.parametrize("nested", [True, False])
def test_extra_state_and_hooks_of_modules(tmp_path: Path, number: int, nested: bool) -> None:
    saved = nn.Sequential(Counting(EXTRA[number]), nn.BatchNorm1d(2), Counting("other"))
    saved[0].weight.data += 1
    state = {"model": saved.state_dict(), "step": 1} if nested else saved.state_dict()
    other = nn.Sequential(Counting(), nn.BatchNorm1d(2), Counting())
    weight, pointer = other[0].weight, other[0].weight.data_ptr()
    loaded(tmp_path, state, {"model": other, "step": 0} if nested else other)
    assert_same(other.state_dict(), saved.state_dict())
    assert other[0].weight is weight
    assert weight.data_ptr() == pointer
    assert other[0].calls == other[2].calls == [((), ())]


def test_extra_state_that_one_side_lacks(tmp_path: Path) -> None:
    without = nn.Module()
    without.weight = nn.Parameter(torch.ones(2))
    assert refused(tmp_path, without.state_dict(), Counting()).missing == ("_extra_state",)
    (tmp_path / "other").mkdir()
    assert refused(tmp_path / "other", Counting(3).state_dict(), without).unexpected == ("_extra_state",)
    target = Counting(5)
    fastload.load(tmp_path / "saved", into=target, strict=False)
    assert (target.weight.sum().item(), target.extra, target.calls) == (2, 5, [(("_extra_state",), ())])


def test_a_tensor_as_extra_state_of_a_plain_file(tmp_path: Path) -> None:
    safetensors.torch.save_file(
        {"weight": torch.ones(2), "_extra_state": torch.arange(3)}, tmp_path / "m.safetensors"
    )
    target = Counting()
    fastload.load(tmp_path / "m.safetensors", into=target)
    assert target.weight.sum() == 2
    assert target.extra.tolist() == [0, 1, 2]
    nested = {"part": Counting()}
    safetensors.torch.save_file(
        {"part.weight": torch.ones(2), "part._extra_state": torch.ones(1)}, tmp_path / "n.safetensors"
    )
    fastload.load(tmp_path / "n.safetensors", into=nested)
    assert nested["part"].extra.item() == 1


class Renaming(nn.Module):
    """Reads what older versions saved: a name swapped with another, a matrix transposed, three made one."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(2))
        self.shift = nn.Parameter(torch.zeros(2))
        self.matrix = nn.Parameter(torch.zeros(2, 2))
        self.qkv = nn.Parameter(torch.zeros(3, 2))
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if prefix + "weight" in state:
            state[prefix + "gain"], state[prefix + "shift"] = (
                state.pop(prefix + "weight"),
                state[prefix + "gain"],
            )
            state[prefix + "matrix"] = state[prefix + "matrix"].T
            state[prefix + "qkv"] = torch.stack([state.pop(prefix + part) for part in "qkv"])


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("strict", [True, False])
def test_hooks_that_rename_and_transform(tmp_path: Path, strict: bool, meta: bool) -> None:
    old = {f"0.{name}": torch.randn(2) for name in ("weight", "gain", *"qkv")} | {
        "0.matrix": torch.randn(2, 2)
    }
    wanted = nn.Sequential(Renaming())
    wanted.load_state_dict(old)
    with torch.device("meta" if meta else "cpu"):
        model = nn.Sequential(Renaming())
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    loaded(tmp_path, {"model": old}, {"model": model}, strict=strict)
    assert_same(model.state_dict(), wanted.state_dict())
    if not meta:
        assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    (tmp_path / "more").mkdir()
    fresh = nn.Sequential(Renaming())
    error = refused(tmp_path / "more", {"model": {**old, "0.other": torch.ones(1)}}, {"model": fresh})
    assert error.unexpected == ("model.0.other",)


class ByHook(nn.Module):
    """Makes room for what was saved before it is loaded."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(size))
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_load_state_dict_pre_hook(self._make_room)

    @staticmethod
    def _make_room(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        module.table = torch.empty_like(state[prefix + "table"])


class OfAChild(nn.Module):
    """Makes room in a child."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(size, 1)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.inner.weight = nn.Parameter(state_dict[prefix + "inner.weight"].clone())
        super()._load_from_state_dict(state_dict, prefix, *rest)


class OfItsOwn(nn.Module):
    """Makes room in itself: another tensor, and another shape."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.register_buffer("table", torch.zeros(size))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.weight = nn.Parameter(torch.empty_like(state_dict[prefix + "weight"]))
        self.table.resize_(state_dict[prefix + "table"].shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


@pytest.mark.parametrize("kind", [ByHook, OfAChild, OfItsOwn])
@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("meta", [False, True])
def test_hooks_that_replace_tensors_of_the_module(tmp_path: Path, kind: Any, size: int, meta: bool) -> None:
    saved = nn.Sequential(kind(5)).state_dict()
    for tensor in saved.values():
        tensor.copy_(torch.randn(tensor.shape))
    wanted = nn.Sequential(kind(size))
    wanted.load_state_dict(saved)
    with torch.device("meta" if meta else "cpu"):
        model = nn.Sequential(kind(size))
    loaded(tmp_path, {"model": saved, "step": 1}, {"model": model, "step": 0})
    assert_same(model.state_dict(), wanted.state_dict())
    fresh = nn.Sequential(kind(size))
    before = fresh.state_dict(keep_vars=True)
    error = refused(tmp_path, {}, {"model": fresh, "step": 0, "other": torch.ones(1)})
    assert error.missing == ("other",)
    after = fresh.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[name] is tensor for name, tensor in before.items())


def test_old_names_of_a_weight_norm(tmp_path: Path) -> None:
    old = {"weight_g": torch.full((3, 1), 2.0), "weight_v": torch.randn(3, 2), "bias": torch.ones(3)}
    model = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    loaded(tmp_path, old, model)
    assert_same(model.parametrizations.weight.original1.data, old["weight_v"])
    torch.testing.assert_close(model.weight.norm(dim=1), torch.full((3,), 2.0))


class Own(nn.Linear):
    """Has a way of its own to load."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(
            {"weight": state_dict["w"].T, "bias": state_dict["bias"]}, strict, assign
        )


def test_a_load_state_dict_of_its_own(tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(2, 2), "bias": torch.ones(2)}}
    model = Own(2, 2)
    loaded(tmp_path, state, {"model": model})
    assert_same(model.weight.data, state["model"]["w"].T.contiguous())
    with pytest.raises(MismatchError, match=r"into\['model'\]\.load_state_dict: KeyError"):
        loaded(tmp_path / "other", {"model": {"bias": torch.ones(2)}}, {"model": model})


class Rotary(nn.Module):
    """Makes its table, which is not saved, when it is loaded: if `fills`."""

    def __init__(self, fills: bool) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.weight = nn.Parameter(torch.ones(2))
        self.register_load_state_dict_post_hook(lambda module, _: module.fill(fills))

    def fill(self, fills: bool) -> None:
        if fills:
            self.table = torch.full((2,), 3.0)


def test_a_buffer_on_meta_that_a_hook_fills_or_does_not(tmp_path: Path) -> None:
    state = {"0.weight": torch.randn(2)}
    with torch.device("meta"):
        fills, does_not = nn.Sequential(Rotary(True)), nn.Sequential(Rotary(False))
    loaded(tmp_path, state, fills)
    assert_same(fills[0].table, torch.full((2,), 3.0))
    with pytest.raises(MismatchError, match=r"0\.table is on the meta device") as raised:
        fastload.load(tmp_path / "saved", into=does_not)
    assert raised.value.missing == ("0.table",)


def test_lazy_modules(tmp_path: Path) -> None:
    state = nn.Linear(3, 2).state_dict()
    model = nn.LazyLinear(2)
    loaded(tmp_path, state, model)
    assert_same(OrderedDict(model.state_dict()), OrderedDict(state))


def test_a_batch_norm_of_a_plain_file_may_lack_its_counter(tmp_path: Path) -> None:
    saved = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    tensors = {name: tensor + 1 for name, tensor in saved.items() if "num" not in name}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors")
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = nn.Sequential(nn.BatchNorm1d(2))
        fastload.load(tmp_path / "m.safetensors", into=model)
        assert_same(dict(model.state_dict()), {**tensors, "0.num_batches_tracked": torch.tensor(0)})


# Malformed checkpoints


def test_a_structure_that_lies_changes_nothing(tmp_path: Path) -> None:
    write_file(tmp_path / "x.safetensors", [("w", "F32", (2,))])
    lies: list[Any] = [
        ["w", {}, "v", {"tensor": ["gone"]}],
        ["w", {}, "v", {"set": [{"unknown": 1}]}],
        ["w", {}, "v", {"dict": [1]}],
        ["w", {"tensor": [1]}, "v", 1],
        ["w", {"tensor": ["w", None, "complex128"]}, "v", 1],
    ]
    for lie in lies:
        record_by_hand(tmp_path, 256, state={"dict": lie})
        into = {"w": torch.zeros(2), "v": 0}
        with pytest.raises((ManifestError, MismatchError)):
            fastload.load(tmp_path, into=into)
        assert (into["w"].tolist(), into["v"]) == ([0, 0], 0)
