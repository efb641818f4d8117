"""The packages that fastload needs: what it imports is declared, with the lowest version that serves."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The frameworks that integrations and fastload.testing are for: who uses one has it.
FRAMEWORKS = {
    *"accelerate lightning megatron peft pytest sglang torchft torchtitan transformers vllm".split()
}
COMES_WITH = {
    "botocore": "boto3",
    "lightning_utilities": "lightning",
    "opentelemetry": "opentelemetry-api",
}


def declared() -> dict[str, str]:
    """The requirements for users: name → versions."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["cli"], *extras["hub"], *extras["plot"], *extras["remote"]]
    lines += [*extras["metrics"], *extras["serve"]]
    found = [re.fullmatch(r"([\w.-]+)(.*)", line) for line in lines]
    return {match[1]: match[2] for match in found if match is not None}


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level names of absolute imports, those for type checkers alone included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module.partition(".")[0]


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    names = {
        COMES_WITH.get(name, name)
        for path in (ROOT / "fastload").rglob("*.py")
        for name in imported(ast.parse(path.read_text()))
    }
    others = names - set(sys.stdlib_module_names) - FRAMEWORKS - {"fastload"}
    assert others == set(declared())


def test_every_dependency_has_a_lower_bound() -> None:
    assert {name for name, versions in declared().items() if not versions.startswith(">=")} == set()


def test_what_scripts_import_of_fastload_is_there() -> None:
    """No other test runs the benchmarks."""
    lost = []
    for path in (ROOT / "scripts").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fastload":
                module = importlib.import_module(node.module or "")
                lost += [
                    f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}.{alias.name}"
                    for alias in node.names
                    if not hasattr(module, alias.name)
                    and importlib.util.find_spec(f"{node.module}.{alias.name}") is None
                ]
    assert lost == []
