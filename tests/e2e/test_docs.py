"""The pages as a site, built as strictly as the generator can; and the links of those that are none."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest

import fastload
from fastload import policies, world
from tests.e2e.forked import run_forked
from tests.pages import ROOT, page

needed = ("furo", "myst_parser", "sphinx")
missing = [name for name in needed if importlib.util.find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(missing), reason=f"not installed: {missing}, of the extra docs")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    words = "-m sphinx --quiet --fail-on-warning --keep-going --builder html docs".split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_forked([*words, str(tmp_path)], cwd=ROOT, env=environment, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    start = (tmp_path / "index.html").read_text()
    written = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    shown = {path for path in written if f'href="{path.with_suffix(".html")}"' in start}
    assert {*written} - shown <= {Path("index.md")}  # all of them are in the navigation
    reference = (tmp_path / "api.html").read_text()
    modules = {"estimate", "policies", "world"}
    assert [name for name in fastload.__all__ if f'id="fastload.{name}"' not in reference] == sorted(modules)
    for module in (policies, world):
        named = [f"{module.__name__}.{name}" for name in module.__all__]
        assert [name for name in named if f'id="{name}"' not in reference] == []
    listed = set(re.findall(r'id="fastload\.SaveHandle\.(\w+)"', reference))
    assert listed == {"done", "failed", "report", "wait", "wait_snapshot"}


@pytest.mark.parametrize("name", ["README.md", "launch/README.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page(name))
    assert [link for link in links if not ((ROOT / name).parent / link).exists()] == []


def test_pages_join_a_job_in_one_way() -> None:
    pages = [ROOT / "README.md", ROOT / "launch/README.md", *(ROOT / "docs").rglob("*.md")]
    users = [path.relative_to(ROOT) for path in pages if path.parent.name not in ("decisions", "tested")]
    others = {str(name): page(str(name)).count("init_process_group") for name in users}
    assert {name: count for name, count in others.items() if count} == {"docs/loading.md": 1}


def test_the_index_of_decisions_lists_each_of_them_once() -> None:
    folder = ROOT / "docs/decisions"
    decided = [
        (path.name, heading)
        for path in folder.glob("*.md")
        if path.name != "index.md"
        for heading in re.findall(r"^## (.+)$", path.read_text(), re.MULTILINE)
    ]
    listed = re.findall(r"^- \[(.+)\]\(([\w-]+\.md)#\S+\)$", page("docs/decisions/index.md"), re.MULTILINE)
    assert sorted((name, heading) for heading, name in listed) == sorted(decided)


def test_pages_name_tests_that_are_there() -> None:
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "fastload").rglob("*.py")]
    known = {str(path.relative_to(ROOT)): {*re.findall(r"\w+", path.read_text())} for path in files}
    missing = []
    for path in (ROOT / "docs").rglob("*.md"):
        for file, names in re.findall(r"`([\w/.]*)::([\w:]+)`", path.read_text()):
            for name in names.split("::"):
                if not any(place.endswith(file) and name in known[place] for place in known):
                    missing.append(f"{path.name}: {file}::{name}")
    assert missing == []
