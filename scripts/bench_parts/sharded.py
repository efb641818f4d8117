"""Modules of DTensors, as targets of a benchmark's loads, and the ways to load into them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import fastload
from bench_parts import baselines
from fastload import LoadOptions, LoadReport
from fastload.formats.dtypes import torch_spec
from fastload.formats.state import state_digest

Load = Callable[[nn.Module], None]


def module_of(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Returns a module, and modules within, that has these parameters."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        part = root
        for word in path:
            if not hasattr(part, word):
                part.add_module(word, nn.Module())
            part = part.get_submodule(word)
        part.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
    return root


def fully_sharded(folder: Path) -> nn.Module:
    """Returns a module for the tensors in a folder, with FSDP2 over all ranks: a unit for each layer."""
    specs = {entry.name: torch_spec(entry) for entry in fastload.inspect(folder).tensors}
    made = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in specs.items()}
    module = module_of(made)
    for layer in module.get_submodule("layers").children():
        fully_shard(layer)
    fully_shard(module)
    return module.to_empty(device="cpu")


def local_parts(module: nn.Module) -> dict[str, Tensor]:
    """Returns what this rank has of each parameter, by name."""
    return {name: tensor.to_local() for name, tensor in _sharded_tensors(module).items()}


def clear(module: nn.Module) -> None:
    """Fills this rank's parts with zeros: nothing of an earlier load is left, and their memory is there."""
    for part in local_parts(module).values():
        part.zero_()


def mapped(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of a folder's files, mapped."""
    return baselines.every_rank_maps(LocalFileSystem(), str(folder))


def expected_digest(module: nn.Module, whole: Mapping[str, Tensor]) -> str:
    """Returns the digest that this rank's parts have when they hold parts of complete tensors.

    torch cuts them, and nothing travels between the ranks.
    """
    parts = {
        name: distribute_tensor(whole[name], tensor.device_mesh, tensor.placements, src_data_rank=None)
        for name, tensor in _sharded_tensors(module).items()
    }
    return state_digest({name: part.to_local() for name, part in parts.items()})


def _sharded_tensors(module: nn.Module) -> dict[str, DTensor]:
    return dict(module.state_dict())


# ---- ways to load


def dcp_directory(folder: Path, module: nn.Module) -> None:
    """torch DCP, from what it saved itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(module.state_dict(), storage_reader=dcp.FileSystemReader(folder))


def dcp_safetensors(folder: Path, module: nn.Module) -> None:
    """torch DCP, from safetensors files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(module.state_dict(), storage_reader=HuggingFaceStorageReader(str(folder)))


def first_rank_sets(folder: Path, module: nn.Module) -> None:
    """Rank 0 has all tensors of the files; torch broadcasts one after the other, and each rank cuts."""
    first = dist.get_rank() == 0
    whole = baselines.every_rank_maps(LocalFileSystem(), str(folder)) if first else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(module, whole, options=options)


def by_fastload(url: str, options: LoadOptions, module: nn.Module, dtype: str | None = None) -> LoadReport:
    with fastload.open(url, options=options) as checkpoint:
        checkpoint.load(into=module.state_dict(), dtype=dtype)
    assert checkpoint.report is not None
    return checkpoint.report
