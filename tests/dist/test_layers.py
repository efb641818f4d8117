"""Layers that other packages bring: found when a checkpoint names them, and not before."""

from __future__ import annotations

import json
import sys
import zlib
from importlib.metadata import EntryPoints
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fastload
from fastload.base.memory import host_bytes
from fastload.base.registry import all_extensions
from fastload.errors import OptionError, UnsupportedVersion
from tests.dist.harness import ranks

OPTIONS = fastload.LoadOptions(timeout_s=20)
TENSORS = {"a": torch.arange(60_000.0).view(300, 200), "b": torch.tensor(3.0), "c": torch.ones(7)}


def install(folder: Path) -> None:
    """Installs the layer, in this process only."""
    info = folder / "deflate-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deflate\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fastload.layers]\ndeflate = tests.dist.deflate_layer:layer\n")
    sys.path.insert(0, str(folder))
    all_extensions.cache_clear()


def save_deflated(path: Path) -> Path:
    specs = {name: ("F32", list(tensor.shape), tensor.nbytes) for name, tensor in TENSORS.items()}
    texts = {name: bytearray(zlib.compress(host_bytes(tensor))) for name, tensor in TENSORS.items()}
    stored = {name: torch.frombuffer(text, dtype=torch.uint8) for name, text in texts.items()}
    save_file(stored, path, {"fastload.layers": "deflate", "deflate": json.dumps(specs)})
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_deflated(tmp_path / "deflated.safetensors")


@ranks(1, 2)
def test_compressed_tensors(rank: int, world: int, saved: Path, tmp_path: Path) -> None:
    (packages := tmp_path / str(rank)).mkdir()
    install(packages)
    with fastload.open(saved, options=OPTIONS) as checkpoint:
        assert checkpoint.manifest.by_name["a"].shape == (300, 200)
        loaded = checkpoint.load()
        assert loaded.keys() == TENSORS.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
        part = torch.empty(100, 20)
        checkpoint.read({"a": [(fastload.Box((100 * rank, 10), (100, 20)), part)]})
        assert torch.equal(part, TENSORS["a"][100 * rank :][:100, 10:30])
        with pytest.raises(OptionError, match="streams hand out tensors as stored"):
            checkpoint.tensors()
    into = {"a": torch.empty(200, 300).t(), "c": torch.empty(7)}
    fastload.load(saved, into=into, strict=False, options=OPTIONS)
    assert all(torch.equal(into[name], TENSORS[name]) for name in into)


@ranks(1)
def test_a_layer_that_is_not_installed(rank: int, world: int, saved: Path) -> None:
    with pytest.raises(UnsupportedVersion, match="needs the layer 'deflate', which is not installed"):
        fastload.load(saved, options=OPTIONS)
    with pytest.raises(UnsupportedVersion, match="'deflate'"):
        fastload.inspect(saved)


@ranks(1)
def test_without_extensions(rank: int, world: int, tmp_path: Path) -> None:
    """As in a source tree that nobody has installed."""
    options = fastload.SaveOptions(base=tmp_path / "base")
    fastload.save(TENSORS, tmp_path / "base")
    fastload.save(TENSORS, tmp_path / "delta", options=options)
    save_file(TENSORS, tmp_path / "sealed.safetensors")
    fastload.seal(tmp_path / "sealed.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.metadata.entry_points", EntryPoints)
        all_extensions.cache_clear()
        for path, name in (("delta", "delta"), ("sealed.safetensors", "seal")):
            with pytest.raises(UnsupportedVersion, match=f"needs the layer '{name}'"):
                fastload.load(tmp_path / path, options=OPTIONS)
        with pytest.raises(OptionError, match="saving a delta needs the extension 'delta'"):
            fastload.save(TENSORS, tmp_path / "other", options=options)
        assert fastload.load(tmp_path / "base", options=OPTIONS).keys() == TENSORS.keys()


@ranks(1)
def test_plain_checkpoints_need_no_extension(rank: int, world: int, tmp_path: Path) -> None:
    known = set(sys.modules)
    all_extensions.cache_clear()
    save_file(TENSORS, tmp_path / "model.safetensors")
    fastload.load(tmp_path / "model.safetensors", options=OPTIONS)
    fastload.load(tmp_path, options=OPTIONS)
    fastload.save(TENSORS, tmp_path / "saved")
    fastload.load(tmp_path / "saved", options=OPTIONS)
    assert all_extensions.cache_info().misses == 0, "entry points were searched"
    assert not [name for name in set(sys.modules) - known if name.startswith("fastload.ext")]
