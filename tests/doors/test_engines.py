"""Loaders for inference engines: with stand-ins for vLLM and SGLang, which do not install here."""

from __future__ import annotations

import os
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fastload.errors import OptionError, PeerError
from tests.dist.harness import ranks
from tests.doors import engine_stand_ins as stand_ins
from tests.doors.engine_stand_ins import LoadConfig, Model
from tests.doors.pages import run_program

ROOT = Path(__file__).resolve().parents[2]
UP, NORM = torch.arange(48.0).reshape(6, 8), torch.arange(6.0)


def write(folder: Path, rank: int, *, bad: bool = False) -> None:
    if rank == 0:
        folder.mkdir()
        tensors = {"model.up.weight": UP, "model.norm.weight": NORM}
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


@ranks(2)
def test_the_program_on_the_page(rank: int, world: int, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # where it has met already
    run_program("engines.md")
