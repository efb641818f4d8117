"""Delta checkpoints: the same files whoever writes, the state bit for bit, and never a mixture."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fastload
from fastload.base import memory
from fastload.errors import (
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    ChecksumError,
    FastloadError,
    IncompleteCheckpoint,
    ManifestError,
    OptionError,
)
from fastload.ext.deltas import save as delta_module
from fastload.loading import targets
from tests.checkpoints import assert_same_bits, flip, record_by_hand, seal
from tests.dist.draws import draw_state, draw_target
from tests.dist.harness import ranks
from tests.dist.test_sharded import MESHES, locals_of, placed
from tests.dist.test_sharded_saves import files, options, save
from tests.pages import page

DRAWS = 4
LOAD = fastload.LoadOptions(timeout_s=20)
ATOMIC = fastload.LoadOptions(timeout_s=20, atomic=True)


def changed(state: Mapping[str, Tensor], seed: int, part: float) -> dict[str, Tensor]:
    """Returns a copy in which a part of the elements of each tensor has other bits."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, tensor in state.items():
        flipped = torch.rand(tensor.shape, generator=generator) < part
        if tensor.dtype == torch.bool:
            found[name] = tensor ^ flipped
            continue
        bits = tensor.clone().contiguous().view(-1).view(torch.uint8).view(-1, tensor.element_size())
        bits[flipped.flatten(), 0] ^= 0xFF
        found[name] = bits.flatten().view(tensor.dtype).view(tensor.shape)
    return found


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    state = {
        "wide": draw(400, 500).bfloat16(),
        "odd": draw(33),
        "frozen": draw(300, 70),
        "deep": draw(9, 8, 7),
    }
    state["wide"][0, :4] = torch.tensor([torch.nan, -0.0, 0.0, torch.inf])
    return {
        **state,
        "none": torch.zeros(0, 3),
        "steps": torch.tensor(3),
        "small": draw(5000).to(torch.float8_e4m3fn),
    }


def step(state: Mapping[str, Tensor], seed: int, part: float = 0.02) -> dict[str, Tensor]:
    return {**changed(state, seed, part), "frozen": state["frozen"]}


@ranks(2)
def test_the_page(rank: int, world: int, tmp_path: Path) -> None:
    first, *_, last, _ = re.findall(
        r"^```python\n(.*?)^```$", page("docs/deltas.md"), re.MULTILINE | re.DOTALL
    )
    model, base = torch.nn.Linear(600, 300), tmp_path / "0"
    torch.manual_seed(0)

    def train(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model.weight[:, ::50] += 1  # type: ignore[index,operator]
            model.weight[7] = 0  # type: ignore[index,operator]

    torch.nn.init.normal_(model.weight)
    torch.nn.init.zeros_(model.bias)
    names = {"model": model, "train": train}
    exec(compile(first.replace("/shared/policy", str(tmp_path)), "first", "exec"), names)
    exec(compile(last, "last", "exec"), names)
    state = fastload.load(base, options=LOAD)
    assert not torch.equal(state["weight"], model.weight)
    (patch,) = names["patches"](tmp_path / "1")  # type: ignore[operator]
    name, shape, indices, values = patch
    assert shape == state[name].shape
    state[name].view(-1)[indices] = values
    assert_same_bits(state, {name: tensor.detach() for name, tensor in model.state_dict().items()})
    assert fastload.load(tmp_path / "1", options=LOAD)["weight"].equal(model.weight)


@ranks(4)
def test_each_mesh_writes_and_loads_the_same_delta(rank: int, world: int, tmp_path: Path) -> None:
    alone = [dist.new_group([each]) for each in range(world)][rank]
    first = weights()
    second = step(first, 1)
    second["wide"][7] = torch.nan  # a segment whose elements differ in part, and one that is shorter complete
    second["deep"] = first["deep"] + 1
    plain = {"step": 2, "own": fastload.PerRank(rank + 1)}
    base, path = tmp_path / "base", tmp_path / "plain"
    fastload.save({**first, "step": 1, "own": fastload.PerRank(rank + 2)}, base, options=options())
    report = save({**second, **plain}, path, base=base)
    assert report.base == str(base)
    assert not report.why_complete
    assert report.nbytes < 0.2 * sum(tensor.nbytes for tensor in first.values())
    assert report.num_tensors == len(first) + world  # and each rank's own
    assert set(files(path)) == {"delta.safetensors", "ranks.safetensors", "fastload.json"}
    expected = files(path)
    for number, (shape, placements) in enumerate(MESHES.values()):
        mesh = init_device_mesh("cpu", shape)
        parts = {name: placed(tensor.clone(), mesh, placements) for name, tensor in second.items()}
        again, wanted = tmp_path / str(number), locals_of(parts)
        save({**parts, **plain}, again, base=base, background=number % 2 == 1)
        dist.barrier()
        assert files(again) == expected, placements
        into = {name: placed(torch.zeros_like(tensor), mesh, placements) for name, tensor in second.items()}
        fastload.load(again, into=into, strict=False, options=ATOMIC if number % 3 else LOAD)
        assert_same_bits(locals_of(into), wanted)
    state = fastload.load(path, options=LOAD)
    assert (state.pop("step"), state.pop("own")) == (2, rank + 1)
    assert_same_bits(state, second)
    some = fastload.load(path, names=["wide", "odd"], dtype="float32", options=LOAD)
    assert_same_bits(some, {name: second[name].float() for name in ("wide", "odd")})
    assert fastload.verify(path, options=LOAD).nbytes == fastload.verify(base, options=LOAD).nbytes
    if rank == 0:
        assert_same_bits(fastload.load(base, names=list(first), process_group=alone), first)


@pytest.mark.slow(but=["1-ranks"])
@ranks(1, 3, deadline_s=100)
def test_any_sequence_of_saves(rank: int, world: int, tmp_path: Path) -> None:
    """Chains of any length of any states: the last state, or an error that names what is wrong."""
    alone = [dist.new_group([each]) for each in range(world)][rank]
    for number in range(DRAWS):
        rng = random.Random(f"{world}/{number}/deltas")
        state = draw_state(rng, rng.randint(1, 8))
        how = {"max_shard_bytes": rng.choice([2000, 1 << 30]), "block_bytes": rng.choice([4096, 8192, None])}
        how["staging_bytes"] = 1 << 22
        root, paths, history = tmp_path / str(number), list[Path](), list[dict[str, Tensor]]()
        for at in range(rng.randint(3, 5)):
            target = draw_target(rng, state, world)
            path = root / f"step {at}"
            base = paths[-1] if paths and rng.random() < 0.8 else None
            parts = target.kind == "pp of fsdp" or target.whole >= 0
            save(target.of(state, rank), path, background=rng.random() < 0.5, base=base, parts=parts, **how)
            dist.barrier()
            paths.append(path)
            history.append(state)
            state = changed(state, rng.randrange(1 << 20), rng.choice([0, 0.001, 0.05, 0.7]))
        for path, saved in zip(paths, history, strict=True):
            loaded = fastload.load(path, process_group=alone)
            assert_same_bits(dict(sorted(loaded.items())), dict(sorted(saved.items())))
        target = draw_target(rng, state, world)
        into, wanted = target.of(state, rank), locals_of(target.of(history[-1], rank))
        fastload.load(paths[-1], into=into, strict=False, options=rng.choice([LOAD, ATOMIC]))
        assert_same_bits(locals_of(into), wanted)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(root)
        dist.barrier()


def refresh(path: Path, into: dict[str, Tensor], rank: int, **how: Any) -> tuple[int, int]:
    """Loads; returns the bytes that all ranks read, and those of this rank that were patched."""
    reports: list[fastload.LoadReport] = []
    chosen = fastload.LoadOptions(timeout_s=20, strategy="allgather", on_report=reports.append, **how)
    fastload.load(path, into=into, strict=False, options=chosen)
    return reports[0].bytes_read, reports[0].ranks[rank].bytes_patched


@ranks(3, ranks_per_host=1)
def test_tensors_that_hold_a_base_are_patched(rank: int, world: int, tmp_path: Path) -> None:
    """Replicated and sharded, one or two deltas behind, or with the result already."""
    first = weights()
    states = [first, step(first, 1), step(step(first, 1), 2)]
    paths = [tmp_path / str(number) for number in range(3)]
    fastload.save(first, paths[0], options=options())
    sizes = [save(states[at], paths[at], base=paths[at - 1]).nbytes for at in (1, 2)]
    nbytes = sum(tensor.nbytes for tensor in first.values())
    for at in (0, 1, 2):
        into = copy.deepcopy(states[at])
        before = into["wide"].data_ptr()
        bytes_read, patched = refresh(paths[2], into, rank, atomic=at == 1)
        assert_same_bits(into, states[2])
        assert patched == nbytes
        assert into["wide"].data_ptr() == before
        assert bytes_read <= sum(sizes[at:])
    for placement in (Shard(0), Shard(1)):
        mesh = init_device_mesh("cpu", (world,))
        parts = {name: placed(tensor.clone(), mesh, [placement]) for name, tensor in states[1].items()}
        expected = locals_of({n: placed(t.clone(), mesh, [placement]) for n, t in states[2].items()})
        bytes_read, patched = refresh(paths[2], parts, rank)
        assert_same_bits(locals_of(parts), expected)
        held = sum(tensor.nbytes for tensor in expected.values())
        # Blocks of 4 KiB at the ends of shards are read with their base; of columns, all.
        assert (0.8 * held < patched < held) if placement.dim == 0 else patched < 0.2 * held
        if placement.dim == 0:
            assert bytes_read < sizes[1] + 3 * world * 4096 * len(first)


@ranks(2)
def test_tensors_that_do_not_hold_a_base_are_loaded(rank: int, world: int, tmp_path: Path) -> None:
    """Each rank patches what fits, and loads the rest: the result is exact whatever was there."""
    first = weights()
    second = step(first, 1)
    fastload.save(first, tmp_path / "0", options=options())
    save(second, tmp_path / "1", base=tmp_path / "0")
    nbytes = sum(tensor.nbytes for tensor in first.values())
    one_bit = copy.deepcopy(first)
    one_bit["wide"].view(torch.int16)[399, 499] ^= 1
    two_bits = copy.deepcopy(one_bit)
    two_bits["frozen"][299, 69] += 1
    mixed = copy.deepcopy(first if rank else second)
    mixed["frozen"][3] = 7
    turned = {**copy.deepcopy(first), "frozen": first["frozen"].t().contiguous().t()}
    apart = step(first, 5, 0.5)
    cases: dict[str, tuple[dict[str, Tensor], int]] = {
        "one bit": (one_bit, nbytes - second["wide"].nbytes),
        "two bits": (two_bits, nbytes - second["wide"].nbytes - second["frozen"].nbytes),
        "another version on each rank": (mixed, 0),
        "strides": (turned, nbytes - first["frozen"].nbytes),
        "anything": (apart, 0),
        "base": ({name: tensor.clone() for name, tensor in first.items()}, nbytes),
    }
    for name, (into, wanted) in cases.items():
        _, patched = refresh(tmp_path / "1", into, rank, atomic=name != "anything")
        assert patched == wanted, name
        assert_same_bits(into, second)
    cast = {"wide": first["wide"].double()}
    fastload.load(tmp_path / "1", into=cast, names=["wide"], dtype="float64", options=LOAD)
    assert_same_bits(cast, {"wide": second["wide"].double()})
    only = {name: first[name].clone() for name in ("wide", "odd")}
    chosen = {**only, "deep": first["deep"].clone()}
    fastload.load(tmp_path / "1", into=chosen, names=["wide", "odd"], options=LOAD)
    assert_same_bits(chosen, {"wide": second["wide"], "odd": second["odd"], "deep": first["deep"]})
    new = fastload.load(tmp_path / "1", names=["wide"], options=LOAD)
    assert_same_bits(new, {"wide": second["wide"]})
    with fastload.prefetch(tmp_path / "1", options=LOAD) as checkpoint:
        checkpoint.wait()
        into = copy.deepcopy(first)
        checkpoint.load(into=into)
        assert checkpoint.report is not None
        assert checkpoint.report.bytes_read == 0
        assert_same_bits(into, second)
        assert_same_bits(checkpoint.load(), second)


@ranks(2, accelerator=True)
def test_tensors_on_a_device(rank: int, world: int, tmp_path: Path) -> None:
    first = {name: tensor for name, tensor in weights().items() if name in ("wide", "odd", "frozen", "deep")}
    second = step(first, 1)
    on_device = lambda state: {name: tensor.to(f"emu:{rank}") for name, tensor in state.items()}  # noqa: E731
    fastload.save(on_device(first), tmp_path / "0", options=options())
    for number, background in ((1, False), (2, True)):
        chosen = options(base=tmp_path / "0")
        if background:
            fastload.async_save(on_device(second), tmp_path / str(number), options=chosen).wait()
        else:
            fastload.save(on_device(second), tmp_path / str(number), options=chosen)
        assert (tmp_path / str(number) / "delta.safetensors").exists()
    into = on_device(first)
    _, patched = refresh(tmp_path / "2", into, rank)
    assert patched == sum(tensor.nbytes for tensor in first.values())
    assert_same_bits({name: tensor.cpu() for name, tensor in into.items()}, second)


def damage(path: Path) -> None:
    flip(path / "delta.safetensors", -500)


def damage_base(path: Path) -> None:
    flip(path.parent / "base" / "model.safetensors", -900_000)


def remove_base(path: Path) -> None:
    shutil.rmtree(path.parent / "base")


def replace_base(path: Path) -> None:
    shutil.rmtree(path.parent / "base")
    shutil.copytree(path.parent / "other", path.parent / "base")


FAULTS = {
    damage: (ChecksumError, r"delta/delta\.safetensors: block \d+ .* of tensor 'wide\..*'"),
    damage_base: (ChecksumError, r"delta/model\.safetensors: block \d+ .* of tensor"),
    remove_base: (IncompleteCheckpoint, r"delta: a delta of .*/base: .*no such checkpoint"),
    replace_base: (ManifestError, "delta: a delta of the checkpoint with digest .*its base was replaced"),
}


@ranks(2)
def test_a_broken_chain_is_named_and_changes_nothing(rank: int, world: int, tmp_path: Path) -> None:
    large = {"wide": torch.randn(800, 700, generator=torch.Generator().manual_seed(3)), "odd": torch.zeros(7)}
    for fault, (kind, text) in FAULTS.items():
        root = tmp_path / fault.__name__
        fastload.save(large, root / "base", options=options())
        fastload.save(changed(large, 1, 0.5), root / "other", options=options())
        save(changed(large, 2, 0.05), root / "delta", base=root / "base")
        dist.barrier()
        if rank == 0:
            fault(root / "delta")
        dist.barrier()
        for call in (fastload.verify, fastload.load):
            with pytest.raises(kind, match=text):
                call(root / "delta", options=LOAD)
        into = changed(large, 3, 0.3)
        before = copy.deepcopy(into)
        with pytest.raises(kind, match=text):
            fastload.load(root / "delta", into=into, options=ATOMIC)
        assert_same_bits(into, before)
        into = copy.deepcopy(large)  # which holds the base
        if fault is damage_base:
            fastload.load(root / "delta", into=into, options=LOAD)
            assert_same_bits(into, changed(large, 2, 0.05))
            continue
        with pytest.raises(kind, match=text) as raised:
            fastload.load(root / "delta", into=into, options=LOAD)
        assert not raised.value.is_partial
        assert_same_bits(into, large)


@ranks(2)
def test_new_tensors_in_memory_that_still_holds_the_base(rank: int, world: int, tmp_path: Path) -> None:
    """Such as after a model was freed; on one rank, all but an element."""
    base = {"wide": torch.randn(800, 700, generator=torch.Generator().manual_seed(3))}
    save(base, tmp_path / "base")
    save(changed(base, 2, 0.05), tmp_path / "delta", base=tmp_path / "base")

    def allocate_used(*given: Any, **how: Any) -> Tensor:
        made = memory.allocate(*given, **how).copy_(base["wide"])
        made[-1, -1] += rank
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "allocate", allocate_used)
        found = fastload.load(tmp_path / "delta", options=LOAD)
    assert_same_bits(found, changed(base, 2, 0.05))


def away(path: Path, base: Path, other: Path) -> None:
    base.rename(base.with_name("away"))


def another(path: Path, base: Path, other: Path) -> None:
    away(path, base, other)
    shutil.copytree(other, base)


def rotten(path: Path, base: Path, other: Path) -> None:
    shutil.copytree(path, path.with_name("kept"))
    flip(path / "delta.safetensors", -300)


def heal(path: Path, base: Path) -> None:
    for there, back in ((path.with_name("kept"), path), (base.with_name("away"), base)):
        if there.exists():
            shutil.rmtree(back, ignore_errors=True)
            there.rename(back)


@pytest.mark.slow
@ranks(3, deadline_s=100)
def test_refreshes_under_random_faults(rank: int, world: int, tmp_path: Path) -> None:
    """A model that is refreshed with each new version has all of that one, or all of the one before."""
    rng = random.Random("refreshes")
    mesh = init_device_mesh("cpu", (world,))
    first = weights()
    versions = [{name: first[name] for name in ("wide", "odd", "small", "steps")}]
    paths = [tmp_path / "0"]
    fastload.save(versions[0], paths[0], options=options())
    fastload.save(changed(versions[0], 99, 0.1), tmp_path / "other", options=options())
    replicated = copy.deepcopy(versions[0])
    shards = {name: placed(tensor.clone(), mesh, [Shard(0)]) for name, tensor in versions[0].items()}
    ends = {"loaded": 0, "raised": 0}
    for number in range(1, 16):
        base = paths[-1] if rng.random() < 0.85 else None
        versions.append(changed(versions[-1], number, rng.choice([0.001, 0.02, 0.3])))
        paths.append(tmp_path / str(number))
        how = {"background": rng.random() < 0.3, "max_chain": 5}
        save(copy.deepcopy(versions[-1]), paths[-1], base=base, **how)
        fault = rng.choice([None, None, away, another, rotten])
        into = rng.choice([replicated, shards])
        sharded = into is shards
        is_delta = (paths[-1] / "delta.safetensors").exists()
        dist.barrier()
        if fault is not None and is_delta and rank == 0:
            fault(paths[-1], paths[-2], tmp_path / "other")
        dist.barrier()
        before = locals_of(into)
        try:
            fastload.load(paths[-1], into=into, options=ATOMIC)
        except CheckpointError:
            assert fault is not None
            assert_same_bits(locals_of(into), before)
            ends["raised"] += 1
        else:
            wanted = versions[-1]
            if sharded:
                wanted = {name: placed(t.clone(), mesh, [Shard(0)]) for name, t in wanted.items()}
            assert_same_bits(locals_of(into), locals_of(wanted))
            ends["loaded"] += 1
        dist.barrier()
        if rank == 0:
            heal(paths[-1], paths[-2])
        dist.barrier()
    assert min(ends.values()) >= 3
    fastload.load(paths[-1], into=shards, options=LOAD)
    wanted = {name: placed(t.clone(), mesh, [Shard(0)]) for name, t in versions[-1].items()}
    assert_same_bits(locals_of(shards), locals_of(wanted))


@ranks(2)
def test_what_becomes_a_complete_checkpoint(rank: int, world: int, tmp_path: Path) -> None:
    state = weights()
    fastload.save(state, tmp_path / "0", options=options())
    for number, others, text in (
        (1, {"more": torch.zeros(3)}, "other tensors"),
        (2, {"odd": torch.zeros(34)}, "other tensors"),
    ):
        path = tmp_path / f"other {number}"
        report = save({**state, **others}, path, base=tmp_path / "0")
        assert text in report.why_complete
        assert not report.base
        assert (path / "model.safetensors").exists()
        assert_same_bits(fastload.load(path, options=LOAD), {**state, **others})
    for number in range(1, 6):
        state = step(state, number)
        report = save(state, tmp_path / str(number), base=tmp_path / str(number - 1), max_chain=2)
        assert bool(report.base) == (number % 3 != 0)
        assert ("max_chain=2" in report.why_complete) == (number % 3 == 0)
    assert_same_bits(fastload.load(tmp_path / "5", options=LOAD), state)


@ranks(2)
def test_bases_that_cannot_be_used(rank: int, world: int, tmp_path: Path) -> None:
    state = weights()
    fastload.save(state, tmp_path / "0", options=options())
    (tmp_path / "foreign").mkdir(exist_ok=True)
    if rank == 0:
        torch.save({"a": torch.zeros(3)}, tmp_path / "foreign" / "pytorch_model.bin")
        shutil.copytree(tmp_path / "0", tmp_path / "damaged")
        (tmp_path / "damaged" / "fastload.json").write_text("{}")
    dist.barrier()
    for base, kind, text in (
        (tmp_path / "none", CheckpointNotFound, "none"),
        (tmp_path / "foreign", OptionError, "fastload did not save it"),
        (tmp_path / "damaged", CheckpointError, "damaged/fastload.json"),
        (tmp_path / "below" / "0", CheckpointNotFound, "below/0"),
        ("/", OptionError, "no directory with a name"),
        ("s3://bucket", OptionError, "no directory with a name"),
        (tmp_path / "new", OptionError, "is the checkpoint to save"),
    ):
        with pytest.raises(kind, match=text):
            save(state, tmp_path / "new", base=base)
        assert not (tmp_path / "new").exists()
    for value in ("", 3):
        with pytest.raises(OptionError, match="base="):
            fastload.SaveOptions(base=value)  # type: ignore[arg-type]


def point_to(link: Path, target: Path | str, rank: int) -> None:
    """Changes a link, on all ranks."""
    if rank == 0:
        link.unlink()
        link.symlink_to(target)
    dist.barrier()


@ranks(2)
def test_a_delta_does_not_replace_its_base_by_another_name(rank: int, world: int, tmp_path: Path) -> None:
    first, second, third = weights(), step(weights(), 1), step(weights(), 2)
    if rank == 0:
        (tmp_path / "x").mkdir()
        (tmp_path / "linked").symlink_to(tmp_path)
        (tmp_path / "latest").symlink_to("0")
    dist.barrier()
    fastload.save(first, tmp_path / "0", options=options())
    save(second, tmp_path / "1", base=tmp_path / "0")
    for path, base in (
        ("0", "x/../0"),
        ("0", "linked/0"),
        ("0", "latest"),
        ("latest", "0"),
        ("linked/0", "1"),
        ("latest", "1"),
    ):
        with pytest.raises(FastloadError, match="same directory, whose contents the delta would replace"):
            save(third, tmp_path / path, base=f"{tmp_path}/{base}", overwrite=True)
        assert_same_bits(fastload.load(tmp_path / "0", options=LOAD), first)
        assert_same_bits(fastload.load(tmp_path / "1", options=LOAD), second)
    # A link may lead elsewhere later, so a delta has the name of its target, if that is next to it.
    for number, (base, target) in enumerate(
        [("latest", "0"), ("latest", "./0"), ("latest", "x/../0"), ("linked/latest", tmp_path / "0")], 2
    ):
        point_to(tmp_path / "latest", target, rank)
        save(third, tmp_path / str(number), base=tmp_path / base)
        delta = fastload.inspect(tmp_path / str(number)).delta
        assert delta is not None
        assert delta.base == "0"
    point_to(tmp_path / "latest", "1", rank)
    for number in range(2, 6):
        assert_same_bits(fastload.load(tmp_path / str(number), options=LOAD), third)
    with pytest.MonkeyPatch.context() as patch:  # or during the save, before another rank looks
        locate_chain = delta_module._locate_chain

        def moved(*given: Any) -> Any:
            point_to(tmp_path / "latest", "0", rank)
            return locate_chain(*given)

        patch.setattr(delta_module, "_locate_chain", moved)
        save(step(third, 3), tmp_path / "6", base=tmp_path / "latest")
    assert_same_bits(fastload.load(tmp_path / "6", options=LOAD), step(third, 3))
    if rank == 0:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "base").symlink_to("../0")
    dist.barrier()
    save(third, tmp_path / "elsewhere" / "3", base=tmp_path / "elsewhere" / "base")
    assert (tmp_path / "elsewhere" / "3" / "delta.safetensors").exists()
    assert_same_bits(fastload.load(tmp_path / "elsewhere" / "3", options=LOAD), third)


@ranks(2)
def test_a_base_in_another_directory(rank: int, world: int, tmp_path: Path) -> None:
    """The record has its name and digest only; where it is, the loader says."""
    complete, deltas = tmp_path / "complete", tmp_path / "deltas"
    states = [weights()]
    for number in (1, 2, 3):
        states.append(step(states[-1], number))
    for number in (0, 1):  # which have the names of deltas
        fastload.save(states[0] if not number else states[3], complete / str(number), options=options())
    fastload.save(states[3], deltas / "0", options=options())
    where = {"timeout_s": 20, "bases": complete}
    load, atomic = fastload.LoadOptions(**where), fastload.LoadOptions(**where, atomic=True)
    report = save(states[1], deltas / "1", base=complete / "0")
    assert report.base == str(complete / "0")
    with pytest.raises(ManifestError, match=r"deltas/0 .*its base was replaced"):
        save(states[2], deltas / "2", base=deltas / "1")
    save(states[2], deltas / "2", base=deltas / "1", bases=complete)
    dist.barrier()
    record = json.loads((deltas / "1" / "fastload.json").read_bytes())
    assert record["delta"]["base"] == "0"
    assert str(tmp_path) not in (deltas / "1" / "fastload.json").read_text()
    for number, path in ((1, deltas / "1"), (2, deltas / "2")):
        assert_same_bits(fastload.load(path, options=load), states[number])
        into = copy.deepcopy(states[0])
        fastload.load(path, into=into, options=atomic)
        assert_same_bits(into, states[number])
        with fastload.open(path, options=load) as checkpoint:
            assert_same_bits(dict(checkpoint.tensors()), states[number])
        with fastload.prefetch(path, options=load) as checkpoint:
            checkpoint.wait()
            assert_same_bits(checkpoint.load(), states[number])
        assert fastload.verify(path, options=load).nbytes == fastload.verify(complete / "0").nbytes
        if rank == 0:
            manifest = fastload.inspect(path, options=load)
            assert {entry.name for entry in manifest.tensors} == set(states[0])
            with pytest.raises(ManifestError, match="its base was replaced"):
                fastload.inspect(path)
    with pytest.raises(ManifestError, match=r"deltas/0 .*its base was replaced"):
        fastload.load(deltas / "1", options=LOAD)
    report = save(states[3], tmp_path / "third" / "3", base=deltas / "2", bases=complete)
    assert "more than two directories" in report.why_complete  # which no load could name
    assert_same_bits(fastload.load(tmp_path / "third" / "3", options=LOAD), states[3])
    dist.barrier()
    if rank == 0:
        shutil.rmtree(deltas / "0")
        (deltas / "0").mkdir()
        (deltas / "0" / "fastload.json").write_text("{}")  # no error of another checkpoint with its name
    dist.barrier()
    assert_same_bits(fastload.load(deltas / "2", options=load), states[2])
    dist.barrier()
    if rank == 0:
        shutil.rmtree(deltas / "0")
    dist.barrier()
    assert_same_bits(fastload.load(deltas / "2", options=load), states[2])
    for chosen, place in ((LOAD, deltas), (replace(load, bases=tmp_path / "none"), tmp_path / "none")):
        with pytest.raises(IncompleteCheckpoint, match=f"deltas/1: a delta of {place}/0: .*bases="):
            fastload.load(deltas / "2", options=chosen)
        if rank == 0:
            with pytest.raises(IncompleteCheckpoint, match=f"deltas/1: a delta of {place}/0: .*bases="):
                fastload.inspect(deltas / "2", options=chosen)
    dist.barrier()
    if rank == 0:
        (complete / "0").rename(complete / "away")
        (complete / "1").rename(complete / "0")
    dist.barrier()
    with pytest.raises(ManifestError, match=r"complete/0 .*its base was replaced"):
        fastload.load(deltas / "2", options=load)


@ranks(2)
def test_a_staged_delta_has_its_bases(rank: int, world: int, tmp_path: Path) -> None:
    complete, deltas, disk = tmp_path / "complete", tmp_path / "deltas", tmp_path / "disk"
    states = [weights()]
    fastload.save(states[0], complete / "0", options=options())
    for number in (1, 2, 3):
        states.append(step(states[-1], number))
        base = (deltas if number > 1 else complete) / str(number - 1)
        save(states[-1], deltas / str(number), base=base, bases=complete)
    reports: list[fastload.StageReport] = []
    chosen = fastload.StageOptions(timeout_s=20, bases=complete, on_report=reports.append)
    with pytest.raises(IncompleteCheckpoint, match="bases="):
        fastload.stage(deltas / "2", disk / "two", options=fastload.StageOptions(timeout_s=20))
    with pytest.raises(OptionError, match="one of its bases has the name"):
        fastload.stage(deltas / "2", disk / "1", options=chosen)
    assert not disk.exists()
    report = fastload.stage(deltas / "2", disk / "two", options=chosen)
    assert report.path == str(disk / "two")
    assert [one.path for one in reports] == [str(disk / name) for name in ("0", "1", "two")]
    assert reports[-1] == report
    assert_same_bits(fastload.load(disk / "two", options=LOAD), states[2])
    reports.clear()
    fastload.stage(deltas / "3", disk / "3", options=chosen)  # of which only the last two are not there
    sizes = [sum(len(data) for data in files(deltas / str(number)).values()) for number in (2, 3)]
    assert sum(one.bytes_read for one in reports) == sum(sizes)
    assert_same_bits(fastload.load(disk / "3", options=LOAD), states[3])
    # What has the name of a base is never replaced.
    dist.barrier()
    other = tmp_path / "other"
    fastload.save(states[2], other / "1", options=options())
    save(states[3], other / "3", base=other / "1")
    overwriting = replace(chosen, overwrite=True, bases=None)
    with pytest.raises(CheckpointExists, match=f"{disk}/1: has the name of a base of .*other/3"):
        fastload.stage(other / "3", disk / "3", options=overwriting)
    assert_same_bits(fastload.load(disk / "3", options=LOAD), states[3])


def bad_counts(stored: dict[str, Tensor]) -> None:
    stored["wide.counts"][0] += 1


def negative_counts(stored: dict[str, Tensor]) -> None:
    stored["wide.counts"][0] -= 10_000
    stored["wide.counts"][1] += 10_000


def far_indices(stored: dict[str, Tensor]) -> None:
    stored["deep.indices"][-1] = 60_000


def more_tensors(stored: dict[str, Tensor]) -> None:
    stored["more.counts"] = torch.zeros(1, dtype=torch.int32)


def few_segments(stored: dict[str, Tensor]) -> None:
    stored["wide.counts"] = stored["wide.counts"][1:].clone()


def other_dtypes(stored: dict[str, Tensor]) -> None:
    stored["wide.values"] = stored["wide.values"].float()


def descending_indices(stored: dict[str, Tensor]) -> None:
    indices = stored["wide.indices"].view(torch.int16)
    indices[:2] = indices[:2].flip(0)


def another_value(stored: dict[str, Tensor]) -> None:
    stored["deep.values"].view(torch.int32)[0] ^= 1


def another_last_value(stored: dict[str, Tensor]) -> None:
    stored["small.values"].view(torch.uint8)[-1] ^= 1


HOSTILE: dict[Callable[[dict[str, Tensor]], None], tuple[type[CheckpointError], str]] = {
    bad_counts: (ManifestError, "the counts of 'wide' contradict"),
    negative_counts: (ManifestError, "the counts of 'wide' contradict"),
    far_indices: (ManifestError, "indices of changes are not ascending, or out of bounds"),
    descending_indices: (ManifestError, "indices of changes are not ascending, or out of bounds"),
    more_tensors: (ManifestError, "no changes of a tensor of the base"),
    few_segments: (ManifestError, "the changes of tensor 'wide' do not fit"),
    other_dtypes: (ManifestError, "the changes of tensor 'wide' do not fit"),
    another_value: (ChecksumError, "of tensor 'deep': checksum"),
    another_last_value: (ChecksumError, "of tensor 'small': checksum"),
}


@ranks(2)
def test_changes_that_no_save_writes(rank: int, world: int, tmp_path: Path) -> None:
    """Files whose checksums are right, and whose contents are not: refused, and nothing has changed."""
    first = weights()
    fastload.save(first, tmp_path / "0", options=options())
    save(step(first, 1), tmp_path / "1", base=tmp_path / "0")
    for change, (kind, text) in HOSTILE.items():
        path = tmp_path / change.__name__
        if rank == 0:
            rewrite(tmp_path / "1", path, change)
        dist.barrier()
        for into in (first, changed(first, 4, 0.5)):
            tensors = copy.deepcopy(into)
            with pytest.raises(kind, match=text):
                fastload.load(path, into=tensors, options=ATOMIC)
            assert_same_bits(tensors, into)


@ranks(2)
def test_a_table_that_one_rank_reads_is_an_error_on_all(rank: int, world: int, tmp_path: Path) -> None:
    first = weights()
    fastload.save(first, tmp_path / "0", options=options())
    save(step(first, 1), tmp_path / "1", base=tmp_path / "0")
    if rank == 0:
        rewrite(tmp_path / "1", tmp_path / "bad", bad_counts)
    dist.barrier()
    own = ["wide"] if rank == 0 else ["odd", "small"]
    into = {name: first[name].clone() for name in own}
    with pytest.raises(ManifestError, match="bad: the counts of 'wide' contradict"):
        fastload.load(tmp_path / "bad", into=into, names=own, strict=False, options=LOAD)
    assert_same_bits(into, {name: first[name] for name in own})
    fastload.load(tmp_path / "1", into=into, names=own, strict=False, options=LOAD)  # the group is as before
    assert_same_bits(into, {name: step(first, 1)[name] for name in own})


def rewrite(source: Path, path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Copies a delta with other contents, of which the checksums are right."""
    body = json.loads((source / "fastload.json").read_bytes())
    path.mkdir()
    stored = load_file(source / "delta.safetensors")
    change(stored)
    save_file(stored, path / "delta.safetensors")
    record_by_hand(path, 4096, state=body["state"])
    seal(path / "fastload.json", version=2, delta=body["delta"])
