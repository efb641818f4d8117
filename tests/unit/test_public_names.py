"""What README, docs and `help()` say is there: names of the package, kinds of values, defaults."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import fastload
from fastload import _MODULES, options
from fastload.ext.staging.options import StageOptions
from fastload.options import SAVE_SETTINGS, SETTINGS, LoadOptions, SaveOptions
from tests.pages import PAGES, page

PROGRAM = """
import json, sys, torch, torch.distributed
before = set(sys.modules)
import fastload
imported = sorted(set(sys.modules) - before)
early = [name for name in ("parameters", "sizing", "simulate") if f"fastload.planning.{name}" in sys.modules]
missing = [name for name in (*sys.argv[1:], *fastload.__all__) if not hasattr(fastload, name)]
shown = {name for name in dir(fastload) if not name.startswith("_")}
names = [early, missing, shown == {*fastload.__all__}, fastload.estimate.sizing.__name__]
print(json.dumps([imported, names]))
"""


@pytest.fixture(scope="module")
def fresh() -> Any:
    """What a new process imports with fastload, and which names it has then."""
    text = "\n".join(map(page, PAGES))
    text = re.sub(r"--arms \S+", "", text)  # a benchmark's own names of what it compares
    others = {"json", "commands"}  # a file, and a group of entry points
    names = {*re.findall(r"\bfastload\.([A-Za-z_]+)", text)} - others
    assert {"estimate", "load", "CheckpointManager"} <= names
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *sorted(names)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_the_pages_name_is_there_and_costs_nothing_before_it_is_used(fresh: Any) -> None:
    _, names = fresh
    assert names == [[], [], True, "fastload.planning.sizing"]


NOT_FOR_A_LOAD = set("cli estimate ext integrations planning saving training".split())
OF_SOME_STORAGES = set(
    "bucket local_copy local_target object_target objects pending remote s3_target".split()
)


def test_the_import_is_what_a_load_needs(fresh: Any) -> None:
    """Each module costs about half a millisecond, and too many objects a collection of all of torch's."""
    names, _ = fresh
    libraries = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert libraries <= {"fastload", "xxhash"}
    own = [tuple(name.split(".")) for name in names if name.startswith("fastload.")]
    assert not {parts[1] for parts in own} & NOT_FOR_A_LOAD
    assert not {parts[2] for parts in own if parts[1] == "storage" and len(parts) > 2} & OF_SOME_STORAGES


@pytest.mark.parametrize("kind", [LoadOptions, SaveOptions, StageOptions])
def test_signatures_show_the_defaults(kind: Any) -> None:
    shown = inspect.signature(kind).parameters
    assert list(shown) == list(inspect.signature(kind.__init__).parameters)[1:]
    for name, parameter in shown.items():
        setting = {**SETTINGS, **SAVE_SETTINGS}.get(name)
        is_switch = name == "parts" or (name == "overwrite" and kind is StageOptions)  # SaveOptions: open
        assert parameter.default == (setting.default if setting else False if is_switch else None)
    assert "<factory>" not in str(inspect.signature(kind.__init__))


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        (LoadOptions, "strategy", {"auto", "allgather", "broadcast", "direct"}),
        (LoadOptions, "io", {"auto", "buffered", "direct"}),
        (SaveOptions, "io", {"auto", "buffered", "direct"}),
        (StageOptions, "io", {"auto", "buffered", "direct"}),
        (SaveOptions, "check_replicas", {"off", "small", "full"}),
        (SaveOptions, "writers", {int, "auto", "all", "host"}),
        (SaveOptions, "shared", {bool, "auto"}),
    ],
)
def test_type_checkers_know_the_values(kind: Any, name: str, values: set[Any]) -> None:
    hint = eval(kind.__annotations__[name], vars(options))
    flat = {inner for arg in get_args(hint) for inner in (get_args(arg) or (arg,))}
    assert flat == values
    for value in values - {int, bool}:
        assert getattr(kind(**{name: value}), name) == value


@pytest.mark.parametrize("name", ["save_stream", "stage", "redistribute", "watch", "tensors", "prefetch"])
def test_without_its_extension_a_public_name_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    for module in [path for path in sys.modules if path.startswith("fastload.ext.")]:
        monkeypatch.delitem(sys.modules, module)
    for path in (Path(fastload.__file__).parent / "ext").iterdir():
        monkeypatch.setitem(sys.modules, f"fastload.ext.{path.stem}", None)
    if name in _MODULES:
        monkeypatch.delitem(vars(fastload), name, raising=False)
    fastload.save({"a": torch.ones(3)}, tmp_path / "a")
    with (
        fastload.open(tmp_path / "a") as checkpoint,
        pytest.raises(fastload.OptionError, match=r"this needs fastload\.ext\.\w+.*, which .* lacks"),
    ):
        getattr(checkpoint, name)() if hasattr(checkpoint, name) else getattr(fastload, name)


def test_an_extension_that_is_missing_is_no_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(fastload), "seal", raising=False)
    monkeypatch.setitem(sys.modules, "fastload.ext.checksums.api", None)
    assert not hasattr(fastload, "seal")
