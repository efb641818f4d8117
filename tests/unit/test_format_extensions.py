"""Formats that other packages bring, by their entry points."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import fastload
from fastload.base.registry import installed_extensions
from fastload.formats import open as formats
from fastload.formats.names import NAMES
from fastload.formats.open import digest_of
from fastload.storage import locate, open_storage
from tests.checkpoints import write_file
from tests.unit.npy_format import npy

STATE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([7, 8])}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installs a package with a format, and another whose format cannot be imported."""
    info = tmp_path / "site" / "arrays-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: arrays\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fastload.formats]\nlost = nowhere:format\nnpy = tests.unit.npy_format:npy\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    installed_extensions.cache_clear()
    yield
    installed_extensions.cache_clear()


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    folder = tmp_path / "arrays"
    folder.mkdir()
    for name, tensor in STATE.items():
        np.save(folder / f"{name}.npy", tensor.numpy())
    return folder


@pytest.mark.usefixtures("installed")
def test_a_format_of_another_package_is_read(arrays: Path) -> None:
    assert fastload.inspect(arrays).format == "npy"
    loaded = fastload.load(arrays)
    assert loaded.keys() == STATE.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in STATE.items())
    fastload.seal(arrays)
    assert fastload.verify(arrays).bytes_verified == 40
    assert torch.equal(fastload.load(arrays / "a.npy")["array"], STATE["a"])


@pytest.mark.usefixtures("installed")
def test_copies_are_compared_by_the_digests_of_the_format(arrays: Path) -> None:
    manifest = fastload.inspect(arrays)
    assert [digest_of(_open(arrays), manifest, file.name) for file in manifest.files] == [
        file.header_digest for file in manifest.files
    ]
    np.save(arrays / "a.npy", STATE["a"].T.numpy())
    assert digest_of(_open(arrays), manifest, "a.npy") != manifest.files[0].header_digest


@pytest.mark.usefixtures("installed")
def test_what_no_format_knows_is_an_error_that_names_those_that_were_asked(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("nothing to load, in none of the formats")
    with pytest.raises(
        fastload.CheckpointNotFound, match=r"none for the formats of extensions \(.*lost, npy.*\)"
    ):
        fastload.load(tmp_path / "notes")
    with pytest.raises(fastload.ManifestError, match=r"none for the formats of extensions \(.*lost, npy.*\)"):
        fastload.load(tmp_path / "notes" / "todo.txt")


@pytest.mark.parametrize("name", ["fastload", "safetensors", "torch", "dcp"])
def test_a_format_with_the_name_of_another_is_refused(
    name: str, arrays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "extensions", lambda kind: {name: Mock(load=lambda: npy)})
    for path in (arrays, arrays / "a.npy"):
        with pytest.raises(fastload.OptionError, match=f"another package has a format '{name}'"):
            fastload.inspect(path)


def test_a_rank_without_the_format_says_so(arrays: Path) -> None:
    with pytest.raises(fastload.OptionError, match="format 'npy' needs the extension"):
        formats.format_named("npy")


def test_checkpoints_of_built_in_formats_ask_no_extension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hf").mkdir()
    write_file(tmp_path / "hf" / "model.safetensors", [("w", "F32", (3,))])
    shutil.copy(tmp_path / "hf" / "model.safetensors", tmp_path / "without_ending")
    torch.save(STATE, tmp_path / "state.pt")
    torch.save(STATE, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    fastload.save(STATE, tmp_path / "own")

    def ask(*_: Any) -> None:
        raise AssertionError("an extension is asked")

    monkeypatch.setattr(formats, "extensions", ask)
    for name in ("hf", "hf/model.safetensors", "without_ending", "state.pt", "old.pt", "own"):
        assert fastload.load(tmp_path / name)


def _open(path: Path) -> Any:
    return open_storage(locate(path), NAMES)
