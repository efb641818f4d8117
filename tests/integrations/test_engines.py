"""Loaders for inference engines, with stand-ins for them; with vLLM itself: `tests/engines`."""

from __future__ import annotations

import logging
import os
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from fastload.errors import ManifestError, MismatchError, OptionError, PeerError
from tests.dist.harness import ranks
from tests.integrations import engine_stand_ins as stand_ins
from tests.integrations.engine_stand_ins import LoadConfig, Model
from tests.integrations.pages import run_program

ROOT = Path(__file__).resolve().parents[2]
UP, NORM = torch.arange(48.0).reshape(6, 8), torch.arange(6.0)


def write(folder: Path, rank: int, *, bad: bool = False, norm: bool = True) -> None:
    if rank == 0:
        folder.mkdir()
        tensors = {"model.up.weight": UP}
        tensors |= {"model.norm.weight": NORM} if norm else {}
        tensors |= {"bad.weight": NORM + 1} if bad else {}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    torch.distributed.barrier()


def entry_point() -> EntryPoint:
    """The plugin as vLLM finds it, of the checkout and not of what happens to be installed."""
    text = (ROOT / "pyproject.toml").read_text()
    (value,) = re.findall(
        r'^\[project\.entry-points\."vllm\.general_plugins"\]\nfastload = "(.*)"$', text, re.M
    )
    return EntryPoint("fastload", value, "vllm.general_plugins")


@ranks(2)
def test_vllm(rank: int, world: int, tmp_path: Path) -> None:
    registry = stand_ins.install_vllm()
    entry_point().load()()
    write(tmp_path / "llama", rank)
    write(tmp_path / "draft", rank)
    config = LoadConfig(
        "fastload", str(tmp_path), model_loader_extra_config={"staging_bytes": "1MiB", "timeout_s": 30}
    )
    loader = registry["fastload"](config)
    model = Model(rank, world)
    model.secondary_weights = [  # type: ignore[assignment]
        SimpleNamespace(model_or_path="draft", revision=None, subfolder=None, prefix="draft.")
    ]
    model_config: Any = SimpleNamespace(model=str(tmp_path / "llama"), revision="main", model_weights="")
    loader.download_model(model_config)
    assert stand_ins.DOWNLOADS == []
    loader.load_weights(model, model_config)
    assert torch.equal(model.up, UP.chunk(world, dim=1)[rank])
    assert torch.equal(model.norm, NORM)
    assert model.taken[2:] == [f"draft.{name}" for name in model.taken[:2]]
    assert list(stand_ins.DOWNLOADS) == [("draft", str(tmp_path), ("*.safetensors",), None)]

    with pytest.raises(
        OptionError, match="model_loader_extra_config has concurrency: fastload knows chunk_bytes"
    ):
        registry["fastload"](LoadConfig("fastload", model_loader_extra_config={"concurrency": 8}))
    write(tmp_path / "other", rank, bad=True)
    model_config = SimpleNamespace(model=str(tmp_path / "other"), revision=None)
    with pytest.raises(KeyError if rank == 1 else PeerError, match=r"no parameter for bad\.weight"):
        loader.load_weights(Model(rank, world), model_config)

    # As vLLM's own loader: what the checkpoint lacks is an error, but not of layers that make up for it.
    write(tmp_path / "less", rank, norm=False)
    model_config = SimpleNamespace(model=str(tmp_path / "less"), revision=None, quantization=None)
    with pytest.raises(MismatchError, match="parameters that the checkpoint lacks: norm"):
        loader.load_weights(Model(rank, world), model_config)
    model = Model(rank, world)
    model.quant_method = SimpleNamespace(process_weights_after_loading=None)  # type: ignore[assignment]
    loader.load_weights(model, model_config)
    loader.load_weights(Model(rank, world), SimpleNamespace(**{**vars(model_config), "quantization": "fp8"}))


@ranks(1)  # a process of its own for what stands in for vLLM
def test_a_vllm_that_lacks_something_starts(rank: int, world: int) -> None:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fastload").addHandler(handler)
    registry = stand_ins.install_vllm()
    del sys.modules["vllm.distributed.parallel_state"].get_world_group  # type: ignore[attr-defined]
    entry_point().load()()
    with pytest.raises(ImportError, match=r"load_format='fastload': this vLLM has another .*get_world_group"):
        registry["fastload"](LoadConfig("fastload"))
    assert logged == []
    registry.clear()
    del sys.modules["vllm.model_executor.model_loader"].register_model_loader  # type: ignore[attr-defined]
    entry_point().load()()
    assert not registry
    (line,) = logged
    assert re.search("load_format='fastload' is not there: .*register_model_loader", line)


@ranks(2)
def test_sglang(rank: int, world: int, tmp_path: Path) -> None:
    stand_ins.install_sglang()
    from fastload.integrations.sglang import FastloadModelLoader

    write(tmp_path / "llama", rank)
    loader = FastloadModelLoader(LoadConfig(FastloadModelLoader, model_loader_extra_config={"timeout_s": 30}))
    model_config: Any = SimpleNamespace(
        model_path=str(tmp_path / "llama"), revision=None, make=lambda: Model(rank, world)
    )
    model: Any = loader.load_model(model_config=model_config, device_config=SimpleNamespace(device="cpu"))
    assert torch.equal(model.up, UP.chunk(world, dim=1)[rank])
    assert not model.training
    write(tmp_path / "other", rank, bad=True)
    model_config.model_path = str(tmp_path / "other")
    with pytest.raises(KeyError if rank == 1 else PeerError, match=r"no parameter for bad\.weight"):
        loader.load_model(model_config=model_config, device_config=SimpleNamespace(device="cpu"))

    write(tmp_path / "less", rank, norm=False)
    model_config.model_path = str(tmp_path / "less")
    with pytest.raises(MismatchError, match="parameters that the checkpoint lacks: norm"):
        loader.load_model(model_config=model_config, device_config=SimpleNamespace(device="cpu"))
    model_config.is_draft_model = True  # it gets some of the target model's
    loader.load_model(model_config=model_config, device_config=SimpleNamespace(device="cpu"))

    # What `update_weights_from_disk` asks a loader for; here by the ranks of a stage of a pipeline.
    group = stand_ins.world_group()
    loader = FastloadModelLoader(LoadConfig(FastloadModelLoader, load_group=group))
    source: Any = SimpleNamespace(model_or_path=str(tmp_path / "llama"), revision=None, prefix="model.")
    got = dict(loader._get_weights_iterator(source))
    assert torch.equal(got["model.model.up.weight"], UP)
    source.model_or_path = str(tmp_path / "none.safetensors")
    (tmp_path / "none.safetensors").touch()
    dist.barrier()
    with pytest.raises((ManifestError, PeerError)):  # before the model is touched
        loader._get_weights_iterator(source)

    # With weights elsewhere, which SGLang would load in its own way if it were told.
    extra = {"weights": str(tmp_path / "llama")}
    loader = FastloadModelLoader(LoadConfig(FastloadModelLoader, model_loader_extra_config=extra))
    loader.download_model(SimpleNamespace(model_path="config", revision=None))
    assert stand_ins.DOWNLOADS == []
    model_config = SimpleNamespace(model_path="config", revision=None, make=lambda: Model(rank, world))
    model = loader.load_model(model_config=model_config, device_config=SimpleNamespace(device="cpu"))
    assert torch.equal(model.norm, NORM)


@ranks(2)
def test_the_program_on_the_page(rank: int, world: int, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # where it has met already
    run_program("engines.md")
