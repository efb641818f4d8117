"""Directories without some of their files, and with the index of a model that was saved before."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor

import fastload
from fastload.cli import main
from fastload.errors import CheckpointNotFound, IncompleteCheckpoint, ManifestError
from fastload.formats.names import missing_files

INDEX = "model.safetensors.index.json"


def put(folder: Path, files: dict[str, dict[str, Tensor]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, tensors in files.items():
        (torch.save if name.endswith(".bin") else save_file)(tensors, folder / name)
    return folder


def put_index(folder: Path, weight_map: dict[str, str], name: str = INDEX) -> Path:
    (folder / name).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def values(*names: str, fill: float = 1.0) -> dict[str, Tensor]:
    return {name: torch.full((3,), fill) for name in names}


@pytest.mark.parametrize(
    ("there", "lacking"),
    [
        (["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"], [2]),
        (["model-00002-of-00003.safetensors"], [1, 3]),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], []),
        (["model-00000-of-00002.safetensors"], [1]),  # counted from 0
        (["model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"], []),
        (["model.fp16-00001-of-00002.safetensors", "other.safetensors"], [2]),
        (["diffusion_pytorch_model-00002-of-00002.fp16.safetensors"], [1]),
        (["pytorch_model-00001-of-00002.bin"], [2]),
        (["a-00001-of-00002.safetensors", "b-00002-of-00002.safetensors"], [2, 1]),
        # DCP: what a rank has of a file; no rank has to have some of each.
        (
            ["shard-00000-model-00001-of-00002.safetensors", "shard-00001-model-00002-of-00002.safetensors"],
            [],
        ),
        (["shard-00000-model-00001-of-00002.safetensors"], [2]),
        (["consolidated.00.safetensors", "consolidated.02.safetensors"], [1]),
        (["consolidated.00.safetensors", "consolidated.01.safetensors"], []),
        (["consolidated.safetensors", "layer.01.safetensors", "layer.03.safetensors", "1-of-2"], []),
        (["model-00001-of-99999999999999999999.safetensors"], None),
    ],
)
def test_numbers_in_names_tell_what_is_missing(there: Sequence[str], lacking: list[int] | None) -> None:
    missing = missing_files(there)
    if lacking is None:
        assert "model-00002-of-99999999999999999999.safetensors" in missing
        assert len(missing) < 100
        return
    numbers = [re.findall(r"(\d+)(?:-of-|\.saf)", name)[0] for name in missing]
    assert list(map(int, numbers)) == lacking
    assert not set(missing) & set(there)


def whole_calls(folder: Path, tmp_path: Path) -> list[Callable[[], Any]]:
    """Everything that takes a checkpoint as a whole."""

    def convert() -> None:
        result = CliRunner().invoke(main, ["convert", str(folder), str(tmp_path / "converted")])
        if result.exit_code:
            raise IncompleteCheckpoint(result.output)

    return [
        lambda: fastload.load(folder),
        lambda: fastload.load(folder, into={"a": torch.zeros(3)}, strict=False),
        lambda: fastload.inspect(folder),
        lambda: fastload.stage(folder, tmp_path / "staged"),
        lambda: fastload.verify(folder),
        lambda: fastload.seal(folder),
        convert,
    ]


@pytest.mark.parametrize("kind", ["missing", "dangling"])
def test_missing_shards_without_an_index(tmp_path: Path, kind: str) -> None:
    files = {f"model-0000{number}-of-00003.safetensors": values(f"{number}") for number in (1, 3)}
    folder = put(tmp_path / "checkpoint", files)
    if kind == "dangling":
        (folder / "model-00002-of-00003.safetensors").symlink_to("../blobs/0123")
    for call in whole_calls(folder, tmp_path):
        with pytest.raises(IncompleteCheckpoint, match=r"model-00002-of-00003\.safetensors"):
            call()
    assert not (tmp_path / "staged").exists()
    assert not (tmp_path / "converted").exists()
    one = fastload.load(folder / "model-00003-of-00003.safetensors")  # by its name
    assert list(one) == ["3"]
    (folder / "model-00002-of-00003.safetensors").unlink(missing_ok=True)
    put(folder, {"model-00002-of-00003.safetensors": values("2")})
    assert sorted(fastload.load(folder)) == ["1", "2", "3"]


def test_files_of_torch_save_without_their_index(tmp_path: Path) -> None:
    folder = put(tmp_path / "checkpoint", {"pytorch_model-00001-of-00002.bin": values("a")})
    with pytest.raises(
        IncompleteCheckpoint, match=r"pytorch_model\.bin\.index\.json.*pytorch_model-00002-of-00002\.bin"
    ):
        fastload.load(folder)
    put(folder, {"pytorch_model-00002-of-00002.bin": values("b")})
    with pytest.raises(IncompleteCheckpoint, match=r"pytorch_model\.bin\.index\.json"):
        fastload.load(folder)
    with pytest.raises(CheckpointNotFound, match="to load a file of torch"):
        fastload.load(put(tmp_path / "other", {"some.bin": values("a")}))


SHARDS = {f"model-0000{number}-of-00002.safetensors": values(name) for number, name in ((1, "a"), (2, "b"))}
MAP = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


def test_a_stale_index_next_to_a_newer_file(tmp_path: Path) -> None:
    """As in transformers, the single file is meant: its shards are gone, or replaced by it."""
    new = {"model.safetensors": values("a", "b", fill=2.0)}
    gone = put_index(put(tmp_path / "gone", new), MAP)
    there = put_index(put(tmp_path / "there", {**SHARDS, **new}), MAP)
    other = put_index(put(tmp_path / "other", {"model.safetensors": values("c")}), MAP)
    for folder, names in ((gone, ["a", "b"]), (there, ["a", "b"]), (other, ["c"])):
        loaded = fastload.load(folder)
        assert sorted(loaded) == names
        assert [file.name for file in fastload.inspect(folder).files] == ["model.safetensors"]
        assert all(tensor.tolist() == [1.0 + (folder != other)] * 3 for tensor in loaded.values())


def test_two_complete_models_with_different_names(tmp_path: Path) -> None:
    both = put_index(put(tmp_path / "both", {**SHARDS, "model.safetensors": values("c")}), MAP)
    with pytest.raises(ManifestError, match=rf"model\.safetensors.*{INDEX}.*: remove one of them, or name"):
        fastload.load(both)
    assert list(fastload.load(both / "model.safetensors")) == ["c"]
    (both / INDEX).unlink()
    assert sorted(fastload.load(both)) == ["a", "b", "c"]  # one model in three files, for all that is known


def test_an_index_that_names_the_single_file(tmp_path: Path) -> None:
    files = {"model.safetensors": values("a"), "more.safetensors": values("b")}
    folder = put(tmp_path / "checkpoint", files)
    put_index(folder, {"a": "model.safetensors", "b": "more.safetensors"})
    assert sorted(fastload.load(folder)) == ["a", "b"]


def test_indexes_of_other_names(tmp_path: Path) -> None:
    """What diffusers and others save: their own libraries prefer the index."""
    stem = "diffusion_pytorch_model"
    index = f"{stem}.safetensors.index.json"
    files = {
        f"{stem}-0000{number}-of-00002.safetensors": values(name) for number, name in ((1, "a"), (2, "b"))
    }
    weight_map = {name: file for file, (name,) in files.items()}
    single = {f"{stem}.safetensors": values("a", "b", fill=2.0)}
    both = put_index(
        put(tmp_path / "both", {**files, **single}), weight_map, f"{stem}.safetensors.index.json"
    )
    with pytest.raises(ManifestError, match=rf"{stem}\.safetensors.*{stem}\.safetensors\.index\.json"):
        fastload.load(both)
    gone = put_index(put(tmp_path / "gone", single), weight_map, index)
    assert fastload.load(gone)["b"].tolist() == [2.0] * 3
    # A variant next to what transformers loads without variant=.
    variant = {"model.fp16-00001-of-00001.safetensors": values("a", fill=3.0)}
    folder = put(tmp_path / "variant", {"model.safetensors": values("a", fill=1.0), **variant})
    put_index(folder, {"a": "model.fp16-00001-of-00001.safetensors"}, "model.fp16.safetensors.index.json")
    assert fastload.load(folder)["a"].tolist() == [1.0] * 3


def test_a_stale_index_of_files_of_torch_save(tmp_path: Path) -> None:
    name = "pytorch_model.bin.index.json"
    weight_map = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    shards = {file: values(tensor) for tensor, file in weight_map.items()}
    new = {"pytorch_model.bin": values("a", "b", fill=2.0)}
    gone = put_index(put(tmp_path / "gone", new), weight_map, name)
    there = put_index(put(tmp_path / "there", {**shards, **new}), weight_map, name)
    for folder in (gone, there):
        assert {key: tensor.tolist() for key, tensor in fastload.load(folder).items()} == {
            "a": [2.0] * 3,
            "b": [2.0] * 3,
        }
    both = put_index(put(tmp_path / "both", {**shards, "pytorch_model.bin": values("c")}), weight_map, name)
    with pytest.raises(ManifestError, match=r"pytorch_model\.bin'.*pytorch_model\.bin\.index\.json"):
        fastload.load(both)
