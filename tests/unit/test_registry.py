"""The registry of extensions."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest

from fastload.base.registry import all_extensions, extensions


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    all_extensions.cache_clear()
    yield
    all_extensions.cache_clear()


def test_packages_are_searched_once_for_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    search, searches = importlib.metadata.entry_points, []

    def count(**asked: Any) -> Any:
        searches.append(asked)
        return search(**asked)

    monkeypatch.setattr(importlib.metadata, "entry_points", count)
    for kind in ("layers", "tiers", "commands", "no_such_kind"):
        wanted = {point.name for point in search(group=f"fastload.{kind}")}
        assert extensions(kind).keys() == wanted
    assert len(searches) == 1
