"""Which tensor goes where: names=, into=, tied and meta tensors, and everything that does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastload.errors import MismatchError, OptionError
from fastload.formats.manifest import FileEntry, Manifest, TensorEntry
from fastload.loading.match import LoadRequest, Match

CPU = torch.device("cpu")


def manifest(**tensors: tuple[str, tuple[int, ...]]) -> Manifest:
    """Dots in names are written as double underscores."""
    sizes = {"F32": 4, "BF16": 2, "I64": 8, "F8_E4M3": 1}
    entries, offset = [], 8
    for name, (dtype, shape) in tensors.items():
        nbytes = torch.Size(shape).numel() * sizes[dtype]
        entries.append(TensorEntry(name.replace("__", "."), dtype, shape, 0, offset, nbytes))
        offset += nbytes
    return Manifest("/ckpt", (FileEntry("", offset, "", ""),), tuple(entries))


def run(
    checkpoint: Manifest, into: Any = None, names: Any = None, dtype: Any = None, strict: bool = True
) -> Match:
    found = LoadRequest(into, None, dtype, names, strict).match(checkpoint)
    found.surplus.raise_unwanted(checkpoint.url, found.surplus.names)
    return found


def names_of(found: Match) -> list[str]:
    return [d.entry.name for d in found.destinations]


LAYERS = manifest(
    **{f"layers__{n}__{part}": ("F32", (2, n + 1)) for n in range(3) for part in ("weight", "bias")},
    head=("BF16", (4,)),
    step=("I64", ()),
)


# names=


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("head", ["head"]),
        (["step", "head"], ["head", "step"]),  # manifest order
        ("layers.1.*", ["layers.1.weight", "layers.1.bias"]),
        (["*.bias", "layers.2.bias", "head"], ["layers.0.bias", "layers.1.bias", "layers.2.bias", "head"]),
        ("layers.[02].weight", ["layers.0.weight", "layers.2.weight"]),
        ("layers.?.weight", ["layers.0.weight", "layers.1.weight", "layers.2.weight"]),
        ([], []),
        (("head",), ["head"]),
        ("*", [entry.name for entry in LAYERS.tensors]),
    ],
)
def test_names(names: Any, expected: list[str]) -> None:
    assert names_of(run(LAYERS, names=names)) == expected


def test_a_name_that_looks_like_a_pattern_is_a_name_first() -> None:
    checkpoint = Manifest(
        "/ckpt",
        (FileEntry("", 100, "", ""),),
        (TensorEntry("a[0]", "F32", (1,), 0, 8, 4), TensorEntry("a0", "F32", (1,), 0, 12, 4)),
    )
    assert names_of(run(checkpoint, names="a[0]")) == ["a[0]"]
    assert names_of(run(checkpoint, names="a*")) == ["a[0]", "a0"]


def test_patterns_are_case_sensitive() -> None:
    with pytest.raises(MismatchError):
        run(LAYERS, names="HEAD*")


def test_names_that_select_nothing_are_all_listed() -> None:
    with pytest.raises(MismatchError) as raised:
        run(LAYERS, names=["head", "nope", "layers.7.*"], strict=False)
    assert raised.value.missing == ("nope", "layers.7.*")
    assert str(raised.value).count("missing in the checkpoint") == 2


# New tensors


def test_new_tensors_have_the_stored_dtype_and_no_gradient() -> None:
    tensors = run(LAYERS).finish()
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == {
        **{f"layers.{n}.{p}": (torch.float32, (2, n + 1)) for n in range(3) for p in ("weight", "bias")},
        "head": (torch.bfloat16, (4,)),
        "step": (torch.int64, ()),
    }
    assert not any(t.requires_grad for t in tensors.values())


def test_dtype_casts_floating_point_tensors_only() -> None:
    tensors = run(LAYERS, dtype=torch.float16).finish()
    assert tensors["head"].dtype == tensors["layers.0.bias"].dtype == torch.float16
    assert tensors["step"].dtype == torch.int64


# Modules


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cache", torch.full((2,), 7.0), persistent=False)
        self.register_parameter("absent", None)


MODEL = {"embed__weight": ("F32", (5, 3)), "head__weight": ("F32", (5, 3)), "scale": ("F32", (3,))}


def test_a_module_takes_parameters_and_persistent_buffers() -> None:
    model = Model()
    found = run(manifest(**MODEL), into=model)
    assert {name: id(t) for name, t in found.finish().items()} == {
        "embed.weight": id(model.embed.weight),
        "head.weight": id(model.head.weight),
        "scale": id(model.scale),
    }
    with pytest.raises(MismatchError) as raised:
        run(manifest(**MODEL, cache=("F32", (2,))), into=model)
    assert (raised.value.unexpected, raised.value.missing) == (("cache",), ())


@pytest.mark.parametrize("stored", [["embed__weight"], ["head__weight"], ["embed__weight", "head__weight"]])
def test_one_name_of_tied_parameters_is_enough(stored: list[str]) -> None:
    model = Model(tied=True)
    checkpoint = manifest(**{name: MODEL[name] for name in stored}, scale=MODEL["scale"])
    tensors = run(checkpoint, into=model).finish()
    assert len(tensors) == len(stored) + 1
    assert all(t is model.embed.weight for name, t in tensors.items() if name != "scale")


def test_untied_parameters_need_both_names() -> None:
    with pytest.raises(MismatchError) as raised:
        run(manifest(embed__weight=MODEL["embed__weight"], scale=MODEL["scale"]), into=Model())
    assert raised.value.missing == ("head.weight",)


def test_tied_views_in_a_state_dict_count_as_one() -> None:
    weight = torch.zeros(5, 3)
    into = {"a": weight, "b": weight.view(5, 3), "c": weight[0]}
    with pytest.raises(MismatchError) as raised:
        run(manifest(a=("F32", (5, 3))), into=into)
    assert raised.value.missing == ("c",)


def test_meta_modules_become_real_and_stay_tied() -> None:
    with torch.device("meta"):
        model = Model(tied=True)
    model.cache = torch.full((2,), 7.0)  # no checkpoint holds it
    model.embed.weight.mark = "kept"
    model.scale.requires_grad_(False)
    model.embed.weight.requires_grad_(False)
    before = model.embed.weight
    found = run(manifest(embed__weight=MODEL["embed__weight"], scale=MODEL["scale"]), into=model)
    assert model.embed.weight is before, "nothing changes before the data is there"
    loaded = found.finish()
    assert isinstance(model.embed.weight, nn.Parameter)
    assert model.embed.weight.device == model.scale.device == CPU
    assert model.head.weight is model.embed.weight is loaded["embed.weight"]
    assert model.embed.weight.mark == "kept"
    assert not model.embed.weight.requires_grad
    assert "scale" in dict(model.named_buffers())


def test_meta_tensors_that_are_not_loaded_stay_meta() -> None:
    with torch.device("meta"):
        model = Model()
    found = run(manifest(**MODEL), into=model, names=["scale"])
    found.finish()
    assert not model.scale.is_meta
    assert model.embed.weight.is_meta


@pytest.mark.parametrize("strict", [True, False])
def test_buffers_on_meta_that_no_checkpoint_holds_are_refused(strict: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Model())
    checkpoint = manifest(**{f"a__0__{name}": spec for name, spec in MODEL.items()}, x=("F32", (1,)))
    into: Any = {"a": model, "x": torch.zeros(1)}
    with pytest.raises(MismatchError, match=r"a\.0\.cache is on the meta device.*\n.*to_empty") as raised:
        run(checkpoint, into=into, strict=strict)
    assert (raised.value.missing, raised.value.unexpected) == (("a.0.cache",), ())
    assert all(parameter.is_meta for parameter in model.parameters())
    # With names= a model may be filled in several loads: the last one tells.
    run(checkpoint, into=into, names="x", strict=strict).finish()
    run(checkpoint, into=into, names=["a.0.scale", "a.0.head.*"], strict=strict).finish()
    with pytest.raises(MismatchError) as raised:
        run(checkpoint, into=into, names="a.0.embed.*", strict=strict)
    assert raised.value.missing == ("a.0.cache",)
    model[0].cache = torch.full((2,), 7.0)
    run(checkpoint, into=into, names="a.0.embed.*", strict=strict).finish()
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_what_strict_leaves_on_meta_is_left_there() -> None:
    with torch.device("meta"):
        into = {"a": Model(), "b": Model()}
    checkpoint = manifest(**{f"a__{name}": spec for name, spec in MODEL.items() if name != "head__weight"})
    into["a"].cache = torch.ones(2)
    run(checkpoint, into=into, strict=False).finish()
    assert not into["a"].embed.weight.is_meta
    assert into["a"].head.weight.is_meta
    assert into["b"].scale.is_meta


# State dicts and optimizers


def test_nested_dicts_and_lists() -> None:
    parameter = nn.Parameter(torch.zeros(4, 2))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    checkpoint = manifest(
        state__0__step=("F32", ()), state__0__exp_avg=("F32", (4, 2)), state__0__exp_avg_sq=("F32", (4, 2))
    )
    tensors = run(checkpoint, into=state).finish()
    assert set(tensors) == {"state.0.step", "state.0.exp_avg", "state.0.exp_avg_sq"}
    assert tensors["state.0.exp_avg"] is state["state"][0]["exp_avg"]

    into: dict[str, Any] = {
        "list": [torch.zeros(1), {"x": torch.zeros(2)}],
        "n": 3,
        "none": None,
        "text": "t",
    }
    checkpoint = manifest(list__0=("F32", (1,)), list__1__x=("F32", (2,)))
    assert set(run(checkpoint, into=into).finish()) == {"list.0", "list.1.x"}
    assert set(run(Manifest("", (), checkpoint.tensors[:0]), into={}).finish()) == set()
    lone = Manifest("", checkpoint.files, (TensorEntry("0", "F32", (1,), 0, 8, 4),))
    assert set(run(lone, into=[torch.zeros(1)]).finish()) == {"0"}


def test_meta_tensors_in_lists_are_replaced() -> None:
    into = {"a": [torch.empty(2, device="meta")]}
    loaded = run(manifest(a__0=("F32", (2,))), into=into).finish()
    assert into["a"][0] is loaded["a.0"]
    assert not into["a"][0].is_meta


def test_meta_tensors_in_tuples_are_refused_before_anything_moves() -> None:
    into = {"a": (torch.empty(2, device="meta"),)}
    with pytest.raises(OptionError, match="meta tensor in a tuple"):
        run(manifest(a__0=("F32", (2,))), into=into)


@pytest.mark.parametrize("into", [3, "text", torch.zeros(1), object()], ids=lambda into: type(into).__name__)
def test_what_is_no_destination(into: Any) -> None:
    with pytest.raises(OptionError, match="into= is a"):
        run(LAYERS, into=into)


def test_two_tensors_of_one_name() -> None:
    with pytest.raises(OptionError, match=r"two tensors that would both be called 'a\.b'"):
        run(LAYERS, into={"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)})


# What does not fit


def test_everything_that_does_not_fit_is_listed_at_once() -> None:
    checkpoint = manifest(
        fine=("F32", (2,)),
        shape=("F32", (2, 3)),
        dtype=("BF16", (2,)),
        expanded=("F32", (4,)),
        sparse=("F32", (2, 2)),
        extra1=("F32", ()),
        extra2=("F32", ()),
    )
    into: dict[str, Tensor] = {
        "fine": torch.zeros(2),
        "shape": torch.zeros(3, 2),
        "dtype": torch.zeros(2),
        "expanded": torch.zeros(1).expand(4),
        "sparse": torch.zeros(2, 2).to_sparse(),
        "lacking1": torch.zeros(1),
        "lacking2": torch.zeros(1),
    }
    with pytest.raises(MismatchError) as raised:
        run(checkpoint, into=into)
    error = raised.value
    assert error.missing == ("lacking1", "lacking2")
    assert error.unexpected == ("extra1", "extra2")
    assert [line.split(":")[0] for line in error.mismatched] == ["shape", "dtype", "expanded", "sparse"]
    assert "shape [2, 3] in the checkpoint, [3, 2] in into=" in error.mismatched[0]
    assert "dtype torch.bfloat16 in the checkpoint, torch.float32 in into=" in error.mismatched[1]
    for line in (*error.missing, *error.unexpected, *error.mismatched):
        assert line in str(error)


@pytest.mark.parametrize("strides", [(1, 1), (2, 1), (0, 1), (2, 2), (1, 2)])
def test_elements_that_share_memory_are_refused(strides: tuple[int, int]) -> None:
    checkpoint = manifest(a=("F32", (3, 3)))
    with pytest.raises(MismatchError, match="a: into= has a tensor whose elements share memory"):
        run(checkpoint, into={"a": torch.zeros(16).as_strided((3, 3), strides)})


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((3, 3), (3, 1)), ((3, 3), (1, 3)), ((2, 1, 3), (1, 0, 5)), ((0, 4), (0, 0)), ((), ())],
)
def test_strides_under_which_no_elements_share_memory(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    tensor = torch.zeros(20).as_strided(shape, strides)
    run(manifest(a=("F32", shape)), into={"a": tensor})


def test_not_strict_passes_over_names_but_never_over_shapes() -> None:
    checkpoint = manifest(both=("F32", (2,)), extra=("F32", ()))
    into = {"both": torch.zeros(2), "lacking": torch.zeros(1)}
    assert names_of(run(checkpoint, into=into, strict=False)) == ["both"]
    assert names_of(run(checkpoint, into=into, strict=False, names=["both", "nowhere"])) == ["both"]
    with pytest.raises(MismatchError) as raised:
        run(checkpoint, into={"both": torch.zeros(3)}, strict=False)
    assert (raised.value.missing, raised.value.unexpected) == ((), ())


def test_names_narrow_what_into_must_have() -> None:
    into = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}
    checkpoint = manifest(a=("F32", (2,)), z=("F32", (2,)))
    assert names_of(run(checkpoint, into=into, names="a")) == ["a"]
    with pytest.raises(MismatchError) as raised:
        run(checkpoint, into=into, names=["a", "b", "z"])
    assert (raised.value.missing, raised.value.unexpected) == (("b",), ("z",))


def test_a_destination_of_another_dtype_needs_the_cast_to_be_asked_for() -> None:
    checkpoint = manifest(a=("F32", (2,)), n=("I64", (1,)))
    into = {"a": torch.zeros(2, dtype=torch.bfloat16), "n": torch.zeros(1, dtype=torch.int64)}
    with pytest.raises(MismatchError, match="dtype= casts"):
        run(checkpoint, into=into)
    tensors = run(checkpoint, into=into, dtype=torch.bfloat16).finish()
    assert tensors["a"] is into["a"]
    with pytest.raises(
        MismatchError, match=r"cast to torch.float16 in the checkpoint, torch.bfloat16 in into="
    ):
        run(checkpoint, into=into, dtype=torch.float16)
