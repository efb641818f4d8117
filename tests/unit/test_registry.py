"""The registry of extensions."""

from __future__ import annotations

import importlib.metadata
import json
import marshal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastload.base import registry
from fastload.base.registry import extension, extensions, find, installed_extensions
from fastload.errors import OptionError
from fastload.ext import EXTENSIONS


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    installed_extensions.cache_clear()
    yield
    installed_extensions.cache_clear()


def test_packages_are_searched_once_for_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    search, searches = importlib.metadata.entry_points, []

    def count(**asked: Any) -> Any:
        searches.append(asked)
        return search(**asked)

    monkeypatch.setattr(registry, "entry_points", count)
    for kind in ("layers", "tiers", "commands", "no_such_kind"):
        wanted = {point.name for point in search(group=f"fastload.{kind}")}
        assert extensions(kind).keys() == wanted | EXTENSIONS.get(kind, {}).keys()
    assert len(searches) == 1


def test_those_of_fastload_are_found_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there without metadata, as in a source tree, and no package takes their names."""
    with monkeypatch.context() as patch:
        patch.delattr(registry, "entry_points")
        found = {path: find(kind, name) for kind, named in EXTENSIONS.items() for name, path in named.items()}
    for path, one in found.items():
        assert one is not None, path
        assert one.load() is not None


def test_one_whose_module_was_deleted_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"layers": {"gone": "fastload.ext.gone.layer:layer", "lost": "fastload.ext.prefetch.lost:layer"}}
    monkeypatch.setattr("fastload.ext.EXTENSIONS", gone)
    assert extensions("layers") == {}
    with pytest.raises(OptionError, match="extension 'gone', which this installation"):
        extension("layers", "gone", "loading")


def test_one_of_fastload_that_cannot_be_imported_is_called_no_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastload.ext.EXTENSIONS", {"layers": {"broken": "fastload.ext.prefetch:nothing"}})
    message = r"^'broken' of fastload \(fastload\.ext\.prefetch:nothing\) cannot be imported: .*'nothing'"
    with pytest.raises(OptionError, match=message):
        extension("layers", "broken", "loading")


def test_a_name_of_two_packages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("json", "pickle"):
        info = tmp_path / f"{package}_package-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}_package\nVersion: 1.0\n")
        points = f"loads = {package}:loads\n{package} = {package}:loads\nsame = marshal:loads\n"
        (info / "entry_points.txt").write_text(f"[fastload.layers]\n{points}")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        OptionError, match=r"'loads' of (json|pickle)_.* and 'loads' of (json|pickle)_.* have one name"
    ):
        extension("layers", "loads", "loading")
    assert extension("layers", "json", "loading") is json.loads
    assert extension("layers", "same", "loading") is marshal.loads


def test_a_name_that_is_missing_says_what_to_install() -> None:
    with pytest.raises(OptionError, match=r"needs the extension .x., .* entry points of fastload\.layers"):
        extension("layers", "x", "loading")
