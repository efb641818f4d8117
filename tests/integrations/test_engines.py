"""Loaders for inference engines: SGLang with a stand-in for it; with vLLM itself: `tests/engines`."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from fastload.errors import ManifestError, MismatchError, PeerError
from tests.dist.harness import ranks
from tests.integrations import engine_stand_ins as stand_ins
from tests.integrations.engine_stand_ins import LoadConfig, Model
from tests.pages import run_program

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


def test_the_plugin_is_where_vllm_looks() -> None:
    """A process without vLLM starts all the same, with a warning; with vLLM: `tests/engines`."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fastload").addHandler(handler)
    entry_point().load()()
    logging.getLogger("fastload").removeHandler(handler)
    if importlib.util.find_spec("vllm") is None:
        (line,) = logged
        assert "load_format='fastload' is not there" in line


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


@pytest.mark.slow
@ranks(2)
def test_the_program_on_the_page(rank: int, world: int, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    run_program("docs/integrations/engines.md")
