"""Draws of odd states, and what has to become of each: everything comes back, or an error says why not.

All ranks make the same draw from the same seed, so each knows what every rank holds.
"""

from __future__ import annotations

import json
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fastload
from fastload.errors import (
    CheckpointError,
    IncompleteCheckpoint,
    MismatchError,
    PlanMismatch,
    ReplicaMismatch,
)
from fastload.integrations.dcp import Reader, Writer

_TIMEOUT_S = 60.0
_LARGE = 150_000  # elements: more than what is compared as a small tensor, and several checksum blocks
_BLOCK_BYTES = 1 << 16
_DTYPES = [
    torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8,
    torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip
_STRATEGIES = ["auto", "allgather", "broadcast", "direct"]


def draws(rank: int, world: int, folder: Path, seed: int, numbers: Sequence[int]) -> list[str]:
    """Runs some draws on the ranks of this world; returns how each ended."""
    warnings.simplefilter("ignore")  # of other programs, and of replicas that differ
    ended = []
    for number in numbers:
        source = random.Random(f"{seed}/{number}")
        kind = source.choice([one for one in KINDS if world >= _LEAST.get(one, 1)])
        here = folder / str(number)
        if rank == 0:
            (here / "memory").mkdir(parents=True)
        _meet()
        try:
            ended.append(f"{kind}: {KINDS[kind](source, here, rank, world)}")
        except BaseException as error:
            raise AssertionError(
                f"draw {number} ({kind}) on {world} ranks: {type(error).__name__}: {error}"
            ) from error
        _meet()
    return ended


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


# Values


def _values(source: random.Random, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(source.randrange(1 << 30))
    if dtype is torch.bool:
        return torch.randint(2, tuple(shape), generator=generator).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, 100, tuple(shape), generator=generator).to(dtype)
    real = torch.randn(tuple(shape), dtype=torch.float64, generator=generator)
    return (torch.complex(real, real.flip(0)) if dtype.is_complex and real.dim() else real).to(dtype)


def _shape(source: random.Random) -> tuple[int, ...]:
    if source.random() < 0.1:
        return (source.choice([1, 2, 300]), _LARGE // 300)
    return tuple(source.choice([0, 1, 1, 2, 3, 5, 7]) for _ in range(source.randrange(5)))


def _tensor(source: random.Random, shape: Sequence[int] | None = None) -> Tensor:
    """Returns a tensor of any strides."""
    shape = _shape(source) if shape is None else tuple(shape)
    dtype = source.choice(_DTYPES)
    order = list(range(len(shape)))
    if source.random() < 0.5:
        source.shuffle(order)
    made = _values(source, [shape[dim] for dim in order], dtype)
    if source.random() < 0.15 and made.dim():  # with gaps
        dim = source.randrange(made.dim() + 1)
        made = torch.stack([made, made], dim).select(dim, 0)
    elif source.random() < 0.1 and made.dim() and made.shape[0] == 1:
        made = made.expand(3, *made.shape[1:])
        return made
    made = made.permute([order.index(dim) for dim in range(len(shape))])
    if source.random() < 0.1 and made.dtype.is_complex:
        made = made.conj()
    if (
        source.random() < 0.2
        and (made.dtype.is_floating_point or made.dtype.is_complex)
        and made.itemsize > 1
    ):
        return nn.Parameter(made, requires_grad=source.random() < 0.8)
    return made


def _state(source: random.Random) -> dict[str, Any]:
    """Returns a state of odd tensors, some of them tied or aliased, in odd containers."""
    state: dict[str, Any] = {}
    for number in range(source.randrange(2, 7)):
        kind = source.random()
        name = source.choice(["a", "a.b", "w~2", "ü", ""]) + str(number)
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        if kind < 0.15 and tensors:
            state[name] = source.choice(tensors)  # tied
        elif kind < 0.25 and tensors:
            one = source.choice(tensors).detach()
            state[name] = (
                one[source.randrange(2) :] if one.dim() and len(one) else one
            )  # overlaps, or is tied
        elif kind < 0.32:
            array = _values(source, (3, 4), torch.float32).numpy()
            state[name] = source.choice([np.asfortranarray(array), array[:, 1:], array[::-1]])
        elif kind < 0.4:
            state[name] = OrderedDict(x=_tensor(source), y=[_tensor(source), (1, None, "text")])
        elif kind < 0.45:
            model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)
            model.load_state_dict(
                {key: _values(source, value.shape, value.dtype) for key, value in model.state_dict().items()}
            )
            state[name] = model.state_dict()
        else:
            state[name] = _tensor(source)
    return state


def _bits(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.view(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        items = [(f"{path}/{key}", each) for key, each in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{path}/{number}", each) for number, each in enumerate(value)]
    else:
        return {path: value}
    return {name: leaf for at, each in items for name, leaf in _leaves(each, at).items()}


def _assert_same(found: Any, wanted: Any, *, strides: bool = True) -> None:
    """Compares states bit for bit, with their strides and ties."""
    found, wanted = _leaves(found), _leaves(wanted)
    assert found.keys() == wanted.keys(), f"{found.keys()} for {wanted.keys()}"
    for name, value in wanted.items():
        one = found[name]
        if isinstance(value, np.ndarray):
            assert one.dtype == value.dtype, name
            assert (one == value).all(), name
            order = np.empty_like(value)  # keeps the order of the dimensions
            assert not strides or one.strides == order.strides, f"{name}: {one.strides} for {order.strides}"
        elif isinstance(value, Tensor):
            assert (one.dtype, one.shape) == (value.dtype, value.shape), name
            assert (one.requires_grad, type(one)) == (value.requires_grad, type(value)), name
            assert torch.equal(_bits(one), _bits(value)), f"{name}: other values"
            assert not strides or _same_order(one, value), (
                f"{name}: strides {one.stride()} for {value.stride()}"
            )
        else:
            assert one == value, name
    for name, other in _tied(wanted):
        assert _memory(found[name]) == _memory(found[other]), f"{name} and {other} are no longer tied"


def _same_order(one: Tensor, saved: Tensor) -> bool:
    if 0 in saved.stride():
        return True  # expanded dimensions have no order
    order = torch.empty_like(saved.detach().resolve_conj().resolve_neg(), device="meta").stride()
    pairs = zip(one.stride(), order, saved.shape, strict=True)
    return not saved.numel() or all(stride == wanted or size == 1 for stride, wanted, size in pairs)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _tied(leaves: Mapping[str, Any]) -> list[tuple[str, str]]:
    first: dict[tuple[Any, ...], str] = {}
    pairs = []
    for name, value in leaves.items():
        if isinstance(value, Tensor) and value.numel() and not value.is_conj():
            other = first.setdefault(_memory(value), name)
            pairs += [(name, other)] if other != name else []
    return pairs


def _load_options(source: random.Random) -> fastload.LoadOptions:
    return fastload.LoadOptions(
        strategy=source.choice(_STRATEGIES),
        chunk_bytes=source.choice([None, 1000, 4096, 100_000]),
        timeout_s=_TIMEOUT_S,
    )


def _save_options(**more: Any) -> fastload.SaveOptions:
    return fastload.SaveOptions(timeout_s=_TIMEOUT_S, block_bytes=_BLOCK_BYTES, **more)


def _fails(call: Callable[[], Any], errors: type | tuple[type, ...], *words: str) -> str:
    """A call has to raise one of these errors, with these words."""
    with pytest.raises(errors) as raised:
        call()
    missing = [word for word in words if word not in str(raised.value)]
    assert not missing, f"{missing} are not in: {raised.value}"
    return f"refused ({raised.typename})"


# Draws


def _any_state(source: random.Random, folder: Path, rank: int, world: int) -> str:
    """A state saved in any way, loaded in any way."""
    state = _state(source)
    how = source.choice(["save", "async", "overlap", "parts", "delta", "per rank", "memory"])
    path = folder / "c"
    wanted: Any = state
    if how == "async":
        fastload.async_save(state, path, options=_save_options()).wait()
    elif how == "overlap":
        handle = fastload.async_save(state, path, options=_save_options(snapshot="overlap"))
        handle.wait_snapshot()
        handle.wait()
    elif how == "parts":
        tied = {name for pair in _tied(_leaves(state)) for name in pair}  # ties between ranks cannot be kept
        wanted = {key: value for key, value in state.items() if f"/{key}" not in tied}
        mine = [key for number, key in enumerate(wanted) if number % world == rank]
        fastload.save({key: wanted[key] for key in mine}, path, options=_save_options(parts=True))
    elif how == "delta":
        base = {"state": state, "step": torch.zeros(_LARGE)}
        fastload.save(base, folder / "base", options=_save_options())
        base["step"] = torch.zeros(_LARGE).index_fill_(0, torch.tensor([3, _LARGE - 1]), 7.0)
        fastload.save(base, path, options=_save_options(base=folder / "base"))
        wanted = base
    elif how == "per rank":
        own = _tensor(random.Random(f"{source.random()}/{rank}"), (3, 5, 2))  # of other strides on each rank
        wanted = {"state": state, "own": {"x": own}}
        fastload.save({"state": state, "own": fastload.PerRank({"x": own})}, path, options=_save_options())
    elif how == "memory":
        memory = folder / "memory"
        with fastload.CheckpointManager(
            folder / "root", memory=memory, memory_every_steps=1, options=_save_options()
        ) as manager:
            assert manager.should_save(1)
            manager.save(1, state)
            assert manager.latest() == 1
            _assert_same(manager.restore(), state)
            assert manager.restored_from == "memory", manager.restored_from
        return how
    else:
        fastload.save(state, path, options=_save_options())
    _assert_same(fastload.load(path, options=_load_options(source)), wanted)
    fastload.verify(path)
    return how


def _other_programs(source: random.Random, folder: Path, rank: int, world: int) -> str:
    """States that torch.save, DCP or fastload's integration of DCP wrote."""
    how = source.choice(["torch.save", "torch.save, legacy", "dcp", "dcp by fastload"])
    state = {key: value for key, value in _state(source).items() if isinstance(value, Tensor)}
    if how.startswith("torch.save"):
        lazy = [key for key, value in state.items() if value.is_conj()]
        if rank == 0:
            torch.save(state, folder / "s.pt", _use_new_zipfile_serialization=how == "torch.save")
        _meet()

        def load() -> Any:
            return fastload.load(folder / "s.pt", options=_load_options(source))

        if lazy:
            return f"{how}, lazy, {_fails(load, CheckpointError, 'resolve_conj()', lazy[0])}"
        _assert_same(load(), state)
        return how
    state = {
        key: value.detach().resolve_conj()
        for key, value in state.items()
        if value.dtype is not torch.complex128
    }
    if how == "dcp":
        dcp.save(state, checkpoint_id=folder / "d")
    else:
        dcp.save(state, storage_writer=Writer(folder / "d"))
    found = fastload.load(folder / "d", options=_load_options(source)) if how == "dcp" else None
    if found is not None:
        for key, value in state.items():
            assert torch.equal(_bits(found[key]), _bits(value)), key
    into = {key: torch.empty_like(value) for key, value in state.items()}
    dcp.load(into, storage_reader=Reader(folder / "d"))
    for key, value in state.items():
        assert torch.equal(_bits(into[key]), _bits(value)), key
    return how


def _one_memory(source: random.Random, folder: Path, rank: int, world: int) -> str:
    """Tensors of a checkpoint that go into one memory, with equal values or others."""
    rows, width = source.choice([(40, 7), (300, 500)])
    first = _values(source, (rows, width), torch.float32)
    cut = source.choice([0, 0, rows // 2])
    second = torch.cat([first[cut:], _values(source, (cut, width), torch.float32)])
    differs = source.random() < 0.5
    if differs:
        second[source.randrange(rows - cut), source.randrange(width)] += 1000.0
    how = source.choice(["plain", "cast", "strided", "module", "sharded"])
    if how in ("module", "sharded") and cut:
        how = "plain"
    tensors = {"a": torch.ones(5), "embed": first, "head": second, "z": torch.ones(3)}
    path = folder / "m.safetensors"
    if source.random() < 0.5:
        path = folder / "c"
        fastload.save(tensors, path, options=_save_options())
    elif rank == 0:
        save_file(tensors, path)
    _meet()
    dtype = torch.float64 if how == "cast" else torch.float32
    memory = (
        torch.zeros(width, rows + cut, dtype=dtype).t()
        if how == "strided"
        else torch.zeros(rows + cut, width, dtype=dtype)
    )
    into: Any = {"embed": memory[:rows], "head": memory[cut:]}
    if how == "module":
        into = nn.Module()
        into.embed = nn.Parameter(torch.zeros(rows, width))
        into.head = into.embed
    elif how == "sharded":
        mesh = init_device_mesh("cpu", (world,))
        memory = distribute_tensor(memory, mesh, [Shard(0)])
        into = {"embed": memory, "head": memory}
    options = _load_options(source)

    def load() -> None:
        fastload.load(path, into=into, strict=False, dtype=dtype if how == "cast" else None, options=options)

    if differs:
        return f"{how}, differing, {_fails(load, MismatchError, 'embed', 'head')}"
    load()
    if how == "module":
        assert torch.equal(into.embed, first)
    else:
        for name, value in (("embed", first), ("head", second)):
            got = into[name].full_tensor() if isinstance(into[name], DTensor) else into[name]
            assert torch.equal(got, value.to(dtype)), name
    return f"{how}, equal"


def _drifted(source: random.Random, folder: Path, rank: int, world: int) -> str:
    """Replicas that have drifted apart: what is saved loads, and holds a value of some rank everywhere."""
    state = {
        "w": _values(source, (300, _LARGE // 300), torch.float32),
        "small": _values(source, (9,), torch.float32),
        "odd": _tensor(source),
    }
    where = source.choice(["large", "large", "small"])
    odd_one = source.randrange(1, world)
    name = "small" if where == "small" else "w"
    apart = state[name].clone()
    if where == "large" and source.random() < 0.5:
        apart += 1.0
    else:
        apart.view(-1)[source.randrange(apart.numel())] += 1.0
    how = source.choice(["off", "small", "full"])
    mine = {**state, name: apart} if rank == odd_one else state
    more = {"base": folder / "base"} if source.random() < 0.3 else {}
    if more:
        fastload.save({**state, "w": torch.zeros_like(state["w"])}, folder / "base", options=_save_options())
    options = _save_options(check_replicas=how, **more)
    in_background = source.random() < 0.5
    path = folder / "c"

    def save() -> None:
        if in_background:
            fastload.async_save(mine, path, options=options).wait()
        else:
            fastload.save(mine, path, options=options)

    if how == "full" or (how == "small" and where == "small"):
        return f"{how}, {where}, {_fails(save, (ReplicaMismatch, PlanMismatch), name)}"
    save()
    found = fastload.load(path, options=_load_options(source))
    fastload.verify(path)
    for key, value in state.items():
        own = found[key] == (apart if key == name else value)
        assert torch.equal(_bits(found[key]), _bits(value)) or ((found[key] == value) | own).all(), key
    return f"{how}, {where}, saved"


def _one_name(source: random.Random, folder: Path, rank: int, world: int) -> str:
    """DTensors of one name on meshes that have no rank in common."""
    meshes = [DeviceMesh("cpu", [number, number + 2]) for number in range(2)]
    rows = source.choice([4, 1000])
    values = [_values(source, (rows, 64), torch.float32)] * 2
    differs = source.random() < 0.6
    if differs:
        other = values[0].clone()
        other[source.randrange(rows), source.randrange(64)] += 1.0
        values = [values[0], other]
    placement = source.choice([Shard(0), Shard(1), Replicate()])
    expert = distribute_tensor(values[rank % 2], meshes[rank % 2], [placement])
    path = folder / "c"
    in_background = source.random() < 0.3

    def save() -> None:
        state = {"expert": expert, "step": 3}
        if in_background:
            fastload.async_save(state, path, options=_save_options()).wait()
        else:
            fastload.save(state, path, options=_save_options())

    if differs:
        return f"differing, {_fails(save, (ReplicaMismatch, PlanMismatch), 'expert')}"
    save()
    assert torch.equal(fastload.load(path, options=_load_options(source))["expert"], values[0])
    return "equal, saved"


def _files(source: random.Random, folder: Path, rank: int, world: int) -> str:
    """Directories of other programs with files that are missing, or left from another checkpoint."""
    stem, ending = source.choice([("model", "safetensors"), ("pytorch_model", "bin")])
    num = source.randrange(2, 5)
    names = [f"{stem}-{number + 1:05}-of-{num:05}.{ending}" for number in range(num)]
    tensors = {f"t{number}": _values(source, (50, 3), torch.float32) for number in range(num)}
    has_index, is_stale = source.random() < 0.5, source.random() < 0.3
    lost = source.sample(names, source.randrange(num)) if source.random() < 0.6 else []
    newer = _values(source, (50, 3), torch.float32)
    dangling = [name for name in lost if source.random() < 0.3]
    path = folder / "hf"
    write = save_file if ending == "safetensors" else torch.save
    if rank == 0:
        path.mkdir()
        for number, name in enumerate(names):
            if name not in lost:
                write({f"t{number}": tensors[f"t{number}"]}, path / name)
            elif name in dangling:
                (path / name).symlink_to(folder / "nowhere")
        if has_index or is_stale:
            weight_map = {f"t{number}": name for number, name in enumerate(names)}
            (path / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": weight_map}))
        if is_stale:
            write({"t0": newer}, path / f"{stem}.{ending}")
    _meet()

    def load() -> Any:
        return fastload.load(path, options=_load_options(source))

    if is_stale:  # transformers takes the single file, whatever the index says
        with suppress(CheckpointError):
            found = load()
            assert found.keys() == {"t0"}, "the old weights"
            assert torch.equal(found["t0"], newer), "the old weights"
            return "stale index, the newer file"
        return "stale index, refused"
    if lost:
        return f"missing, {_fails(load, CheckpointError, *lost[:1])}"
    if not has_index and ending == "bin":
        return f"shards of torch.save without an index, {_fails(load, IncompleteCheckpoint, 'index')}"
    _assert_same(load(), tensors)
    return "complete"


def _without_scales(source: random.Random, folder: Path, rank: int, world: int) -> str:
    """Quantised weights whose scales nobody takes."""
    weight = _values(source, (128, 128), torch.float32).to(
        source.choice([torch.float8_e4m3fn, torch.float8_e5m2])
    )
    if rank == 0:
        save_file({"w.weight": weight, "w.weight_scale_inv": torch.rand(1, 1)}, folder / "m.safetensors")
    _meet()
    strict = source.random() < 0.5
    into = {"w.weight": torch.zeros(128, 128, dtype=torch.bfloat16)}

    def load() -> None:
        fastload.load(folder / "m.safetensors", into=into, strict=strict, options=_load_options(source))

    return f"strict={strict}, {_fails(load, MismatchError, 'dequantize=True')}"


def _training(source: random.Random, folder: Path, rank: int, world: int) -> str:
    """A channels_last training that is restored, with a manager, goes on bit for bit."""
    kind = source.choice(["AdamW", "Adam", "SGD", "Adagrad", "RMSprop"])
    fused = {"fused": True} if kind != "RMSprop" else {}
    momentum = {"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}
    seed = source.randrange(1 << 20)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).to(
            memory_format=torch.channels_last
        )
        return model, getattr(torch.optim, kind)(model.parameters(), lr=1e-2, **momentum, **fused)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> Tensor:
        for step in steps:
            images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            (model(images.to(memory_format=torch.channels_last)) - 1).square().mean().backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    tier = source.choice(["storage", "memory", "deltas"])
    more: dict[str, Any] = {"memory": folder / "memory", "memory_every_steps": 1} if tier == "memory" else {}
    if tier == "deltas":
        more["deltas"] = True
    model, optimizer = make()
    with fastload.CheckpointManager(folder / "root", options=_save_options(), **more) as manager:
        for step in (3, 6):
            train(model, optimizer, range(step - 3, step))
            manager.save(step, {"model": model, "optimizer": optimizer})
    wanted = train(model, optimizer, range(6, 12))
    model, optimizer = make()
    with fastload.CheckpointManager(folder / "root", options=_save_options(), **more) as manager:
        manager.restore({"model": model, "optimizer": optimizer})
        assert manager.restored_step == 6
    assert torch.equal(train(model, optimizer, range(6, 12)), wanted)
    return f"{kind}, {tier}"


KINDS: dict[str, Callable[[random.Random, Path, int, int], str]] = {
    "any state": _any_state,
    "other programs": _other_programs,
    "one memory": _one_memory,
    "drifted": _drifted,
    "one name": _one_name,
    "files": _files,
    "without scales": _without_scales,
    "training": _training,
}
_LEAST = {"drifted": 2, "one name": 4}  # ranks that it takes
