"""Versions of libraries that are laid out in another way than those that the integrations are made for."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import fastload
from tests.dist.harness import ranks

INTEGRATIONS = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "peft": "peft",
    "torchtitan": "torchtitan",
    "trainer": "transformers",
    "transformers": "transformers",
}


@ranks(1)
def test_one_clear_error_says_which_version_there_is(rank: int, world: int, tmp_path: Path) -> None:
    libraries = set(INTEGRATIONS.values())
    for name in [*sys.modules]:  # another test may have had the ranks import them
        if name.partition(".")[0] in libraries or name.startswith("fastload.integrations."):
            del sys.modules[name]
    for library in libraries:
        (tmp_path / library).mkdir()
        (tmp_path / library / "__init__.py").write_text("__version__ = '0.1'")
    sys.path.insert(0, str(tmp_path))
    for integration, library in INTEGRATIONS.items():
        with pytest.raises(
            fastload.OptionError, match=rf"does not know {library} 0\.1: .+; it is tested with \d"
        ):
            importlib.import_module(f"fastload.integrations.{integration}")
