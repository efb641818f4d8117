"""The least of SGLang that its loader is made of: names, signatures and what calls what."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

DOWNLOADS: list[tuple[Any, ...]] = []


@dataclass
class LoadConfig:
    load_format: Any = "auto"
    download_dir: str | None = None
    ignore_patterns: Any = None
    device: str | None = None
    model_loader_extra_config: Any = field(default_factory=dict)
    load_group: Any = None


class Model(nn.Module):
    """Two layers, of which each rank takes its columns, as tensor parallelism does; it renames one."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world = rank, world
        self.up = nn.Parameter(torch.zeros(6, 8 // world))
        self.norm = nn.Parameter(torch.zeros(6))
        self.taken: list[str] = []

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        """Returns the names of its parameters that were there, as models of both engines do."""
        loaded = set()
        for name, tensor in weights:
            self.taken.append(name)
            if name == "bad.weight" and self.rank == 1:
                raise KeyError(f"no parameter for {name}")
            if name == "model.up.weight":
                self.up.data.copy_(tensor.chunk(self.world, dim=1)[self.rank])
                loaded.add("up")
            elif name == "model.norm.weight":
                self.norm.data.copy_(tensor)
                loaded.add("norm")
        return loaded


def world_group() -> Any:
    return SimpleNamespace(cpu_group=dist.group.WORLD, device_group=None, rank_in_group=dist.get_rank())


def download(model: str, cache_dir: str | None, patterns: list[str], revision: Any, **how: Any) -> str:
    DOWNLOADS.append((model, cache_dir, tuple(patterns), revision))
    assert how.keys() <= {"ignore_patterns"}
    return f"{cache_dir}/{model}"


def install_sglang() -> None:
    """Puts a stand-in in the place of SGLang."""

    class BaseModelLoader(ABC):
        def __init__(self, load_config: LoadConfig) -> None:
            self.load_config = load_config

        @abstractmethod
        def download_model(self, model_config: Any) -> None: ...

        @abstractmethod
        def load_model(self, *, model_config: Any, device_config: Any) -> nn.Module: ...

    class DefaultModelLoader(BaseModelLoader):
        def __init__(self, load_config: LoadConfig) -> None:
            super().__init__(load_config)
            if unexpected := set(load_config.model_loader_extra_config) - {"num_threads"}:
                raise ValueError(f"Unexpected extra config keys for load format: {unexpected}")

        def download_model(self, model_config: Any) -> None:
            raise AssertionError("overridden")

        def load_model(self, *, model_config: Any, device_config: Any) -> nn.Module:
            model: nn.Module = model_config.make()
            weights = self._get_all_weights(model_config, model)
            self.load_weights_and_postprocess(model, weights, torch.device(device_config.device))
            return model.eval()

        def _get_all_weights(self, model_config: Any, model: nn.Module) -> Any:
            raise AssertionError("overridden")

        def _get_weights_iterator(self, source: Any, *, resolved_source: Any = None) -> Any:
            raise ValueError(f"Unknown load_format: {self.load_config.load_format}")

        @staticmethod
        def load_weights_and_postprocess(model: Any, weights: Any, target_device: torch.device) -> None:
            model.load_weights(weights)

    _install("sglang.srt.distributed", get_world_group=world_group)
    _install(
        "sglang.srt.model_loader.loader",
        BaseModelLoader=BaseModelLoader,
        DefaultModelLoader=DefaultModelLoader,
    )
    _install("sglang.srt.model_loader.weight_utils", download_weights_from_hf=download)


def _install(name: str, **names: Any) -> None:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    vars(sys.modules[name]).update(names)
