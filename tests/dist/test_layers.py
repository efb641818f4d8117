"""Layers that other packages bring: found when a checkpoint names them, and not before."""

from __future__ import annotations

import json
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fastload
from fastload.base.memory import host_bytes
from fastload.base.registry import installed_extensions
from fastload.errors import CheckpointNotFound, ManifestError, OptionError, UnsupportedVersion
from fastload.formats.layers import Layer
from fastload.loading.access import Access, OpenCall
from tests.dist import odd_format
from tests.dist.harness import ranks

OPTIONS = fastload.LoadOptions(timeout_s=20)
TENSORS = {"a": torch.arange(60_000.0).view(300, 200), "b": torch.tensor(3.0), "c": torch.ones(7)}


def install(folder: Path) -> None:
    """Installs the layer, in this process only."""
    info = folder / "deflate-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deflate\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fastload.layers]\ndeflate = tests.dist.deflate_layer:layer\njoin = tests.dist.test_layers:join\n"
        "[fastload.formats]\nodd = tests.dist.odd_format\nnpy = tests.unit.npy_format:npy\n"
    )
    sys.path.insert(0, str(folder))
    installed_extensions.cache_clear()


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
def test_what_a_layer_has_decoded_is_saved_without_its_name(
    rank: int, world: int, saved: Path, tmp_path: Path
) -> None:
    install(tmp_path)
    with fastload.open(saved, options=OPTIONS) as checkpoint:
        assert fastload.inspect(saved) == checkpoint.manifest
        fastload.save(checkpoint.load(), tmp_path / "saved", metadata=checkpoint.metadata)
    loaded = fastload.load(tmp_path / "saved", options=OPTIONS)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


@ranks(1)
def test_layers_that_a_checkpoint_cannot_name(rank: int, world: int, tmp_path: Path) -> None:
    """Since they act for other reasons, in an order of their own."""
    for name in ("seal", "delta", "dequantize"):
        save_file(TENSORS, tmp_path / "named.safetensors", {"fastload.layers": name})
        for call in (fastload.inspect, fastload.load):
            with pytest.raises(ManifestError, match=f"names the layer '{name}'"):
                call(tmp_path / "named.safetensors", options=OPTIONS)


@pytest.fixture(params=[0, 8], ids=["inferred", "elsewhere"])
def odd(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    begin = odd_format.INFERRED + request.param
    head = odd_format.START.ljust(begin - len(odd_format.MARKER)) + odd_format.MARKER
    (tmp_path / "a.odd").write_bytes(head + zlib.compress(host_bytes(TENSORS["a"])))
    return tmp_path / "a.odd"


@ranks(1, 2)
def test_a_layer_of_a_format_that_infers_layouts(rank: int, world: int, odd: Path, tmp_path: Path) -> None:
    (packages := tmp_path / str(rank)).mkdir()
    install(packages)
    assert torch.equal(fastload.load(odd, options=OPTIONS)["a"], TENSORS["a"])


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    (folder := tmp_path / "arrays").mkdir()
    np.save(folder / "a.npy", TENSORS["a"].numpy())
    return folder


@ranks(2)
def test_a_rank_that_lacks_the_format(rank: int, world: int, arrays: Path, tmp_path: Path) -> None:
    if rank == 0:
        install(tmp_path)
    with fastload.open(arrays, options=OPTIONS) as checkpoint:
        assert torch.equal(checkpoint.load()["a"], TENSORS["a"])
    assert checkpoint.report is not None
    assert [report.note.partition(",")[0] for report in checkpoint.report.ranks] == [
        "",
        "a checkpoint of format 'npy' needs the extension 'npy'",
    ]


class JoinLayer(Layer):
    """Makes a checkpoint of two."""

    def open(self, access: Access, call: OpenCall) -> Access:
        return replace(access, components=(access, access))


join = JoinLayer()


@ranks(1)
def test_parts_that_are_no_deltas(rank: int, world: int, tmp_path: Path) -> None:
    install(tmp_path)
    save_file(TENSORS, tmp_path / "joined.safetensors", {"fastload.layers": "join"})
    with fastload.prefetch(tmp_path / "joined.safetensors", options=OPTIONS) as checkpoint:
        checkpoint.wait()
        assert checkpoint.load().keys() == TENSORS.keys()
        assert checkpoint.report is not None
        assert checkpoint.report.bytes_read == 0, "all of it was prefetched"
    with pytest.raises(OptionError, match="a layer made it of 2 checkpoints: stage each of them"):
        fastload.stage(tmp_path / "joined.safetensors", tmp_path / "copy")


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
        patch.setattr("fastload.ext.EXTENSIONS", {})
        for path, name in (("delta", "delta"), ("sealed.safetensors", "seal")):
            with pytest.raises(UnsupportedVersion, match=f"needs the layer '{name}'"):
                fastload.load(tmp_path / path, options=OPTIONS)
        with pytest.raises(OptionError, match="saving a delta needs the extension 'delta'"):
            fastload.save(TENSORS, tmp_path / "other", options=options)
        (tmp_path / "items").mkdir()
        (tmp_path / "items" / "metadata.pkl").touch()
        save_file(TENSORS, tmp_path / "items" / "weights_0.safetensors")
        with pytest.raises(CheckpointNotFound, match=r"its metadata\.pkl is for none of the formats"):
            fastload.load(tmp_path / "items", options=OPTIONS)
        with pytest.raises(OptionError, match="dequantize= needs the extension 'dequantize'"):
            fastload.LoadOptions(dequantize=True)
        with pytest.raises(OptionError, match="deltas= needs the extension 'delta'"):
            fastload.CheckpointManager(tmp_path / "run", deltas=True)
        with pytest.raises(OptionError, match="snapshot=\"overlap\" needs the extension 'overlap'"):
            fastload.async_save(TENSORS, tmp_path / "other", options=fastload.SaveOptions(snapshot="overlap"))
        assert fastload.load(tmp_path / "base", options=OPTIONS).keys() == TENSORS.keys()


@ranks(1)
def test_plain_checkpoints_need_no_extension(rank: int, world: int, tmp_path: Path) -> None:
    known = set(sys.modules)
    installed_extensions.cache_clear()
    save_file(TENSORS, tmp_path / "model.safetensors")
    fastload.load(tmp_path / "model.safetensors", options=OPTIONS)
    fastload.load(tmp_path, options=OPTIONS)
    fastload.save(TENSORS, tmp_path / "saved")
    fastload.load(tmp_path / "saved", options=OPTIONS)
    assert installed_extensions.cache_info().misses == 0, "entry points were searched"
    assert not [name for name in set(sys.modules) - known if name.startswith("fastload.ext")]
