"""Files that other programs wrote in their own way, or that are something else than their name says."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import fastload
from fastload.errors import FastloadError, ManifestError
from fastload.ext.formats.torch_save.state import encode_pickle
from fastload.formats.untrusted import MemoryBudget
from fastload.integrations.dcp import Reader

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
PAGE = b"<!DOCTYPE html>\n<html><body>moved</body></html>" + b" " * 500


def test_metadata_that_are_null(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    cases: list[Any] = [None, {}, [], 0, "", {"a": None}]
    for metadata in cases:
        text = json.dumps({"__metadata__": metadata, "a": entry}).encode()
        content = struct.pack("<Q", len(text)) + text + struct.pack("<2f", 1, 2)
        (tmp_path / "m.safetensors").write_bytes(content)
        if metadata in (None, {}):
            assert fastload.load(tmp_path / "m.safetensors")["a"].tolist() == [1, 2]
        else:
            with pytest.raises(ManifestError, match="__metadata__"):
                fastload.load(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    ("content", "words"),
    [(POINTER, "a pointer of git-lfs .*git lfs pull"), (PAGE, "a page of HTML or XML in place of the file")],
)
def test_what_files_are_instead(tmp_path: Path, content: bytes, words: str) -> None:
    for name in ("model.safetensors", "model.pt", "model.bin", "pytorch_model.bin", "model.ckpt"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ManifestError, match=words):
            fastload.load(tmp_path / name)
    folders: dict[str, str] = {
        "safetensors": "model.safetensors",
        "index": "model.safetensors.index.json",
        "torch": "pytorch_model.bin",
        "torch index": "pytorch_model.bin.index.json",
        "dcp": ".metadata",
        "own": "fastload.json",
    }
    for folder, name in folders.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(content)
        with pytest.raises(FastloadError, match=words):
            fastload.load(tmp_path / folder)
    # One of several files.
    save_file({"a": torch.ones(2)}, tmp_path / "safetensors" / "model.safetensors")
    (tmp_path / "safetensors" / "more.safetensors").write_bytes(content)
    with pytest.raises(ManifestError, match=words):
        fastload.load(tmp_path / "safetensors")


@pytest.mark.parametrize("item", [True, None, 7])
def test_long_plain_lists_take_memory_in_proportion_to_the_file(item: Any) -> None:
    values = [item] * 100_000
    num_bytes = len(values)  # at least, in the pickle
    node = encode_pickle(values, num_bytes, "here", budget=MemoryBudget("here", 1 << 12)).structure
    assert node == values
    for repeated in ([values, values], (values,) * 30):
        with pytest.raises(ManifestError, match="repeated"):
            encode_pickle(list(repeated), num_bytes, "here", budget=MemoryBudget("here", 1 << 12))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_bytes_that_dcp_wrote(tmp_path: Path) -> None:
    data = io.BytesIO(bytes(range(256)))
    dcp.save({"a": torch.ones(3), "file": data, "n": 5}, checkpoint_id=tmp_path, no_dist=True)
    loaded = fastload.load(tmp_path)
    assert loaded["file"] == (
        "io.BytesIO",
        bytes(range(256)),
    )  # as of a checkpoint that fastload's Writer saved
    assert loaded["n"] == 5
    state: dict[str, Any] = {"a": torch.zeros(3), "file": io.BytesIO(), "n": 0}
    dcp.load(state, storage_reader=Reader(tmp_path), no_dist=True)
    assert state["a"].tolist() == [1, 1, 1]
    assert state["file"].getvalue() == bytes(range(256))
