"""A storage that others wrote and registered: the example of docs/storage.md."""

from __future__ import annotations

import re
import sqlite3
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import fastload
from fastload import OptionError, StorageError
from fastload.base.registry import installed_extensions
from fastload.cli import main
from fastload.formats.names import NAMES
from fastload.storage import open_storage
from fastload.storage.process import registered_storages
from tests.dist.harness import ranks
from tests.pages import page

STORAGE, USE, CONTRACT = re.findall(
    r"^```python\n(.*?)^```$", page("docs/storage.md").partition("## A storage of your own")[2], re.M | re.S
)
PAGE: dict[str, Any] = {"__name__": __name__}
exec(compile(STORAGE + CONTRACT, "docs/storage.md", "exec"), PAGE)
SqliteStorage = PAGE["SqliteStorage"]


class TestSqlite(PAGE["TestSqlite"]):  # type: ignore[misc]
    has_directories = False


@pytest.fixture(autouse=True)
def _register() -> Iterator[None]:
    fastload.register_storage("sqlite", SqliteStorage)
    yield
    registered_storages.clear()


@ranks(2)
def test_ranks_save_and_load_together(rank: int, world: int, tmp_path: Path) -> None:
    fastload.register_storage("sqlite", SqliteStorage)
    given: dict[str, Any] = {"storage_options": {"database": str(tmp_path / "files.db")}}
    weights = torch.arange(100_000.0)
    fastload.save({"weights": weights, "rank": fastload.PerRank(rank)}, "sqlite://runs/1", **given)
    state = {"weights": torch.zeros_like(weights), "rank": fastload.PerRank(-1)}
    fastload.load("sqlite://runs/1", into=state, **given)
    assert torch.equal(state["weights"], weights)
    assert state["rank"].value == rank
    assert fastload.verify("sqlite://runs/1", **given).num_files > 0
    with pytest.raises(fastload.CheckpointExists, match=r"^sqlite://runs/1 exists: pass"):
        fastload.save({"weights": weights}, "sqlite://runs/1", **given)


def test_the_use_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"fastload": fastload, "model": torch.nn.Linear(3, 2)}
    exec(USE, names)
    assert names["state"]["step"] == 5
    assert torch.equal(names["state"]["model"]["weight"], names["model"].weight)


def test_the_command_line_imports_what_registers_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    database = tmp_path / "files.db"
    (tmp_path / "our_stores.py").write_text(
        "import functools, fastload\nfrom tests.storage.test_registered import SqliteStorage\n"
        f"fastload.register_storage('sqlite', functools.partial(SqliteStorage, database={str(database)!r}))\n"
    )
    fastload.save({"a": torch.ones(3)}, "sqlite://runs/1", storage_options={"database": str(database)})
    registered_storages.clear()
    unknown = CliRunner().invoke(main, ["inspect", "sqlite://runs/1"])
    assert unknown.exit_code == 2, unknown.output
    known = CliRunner().invoke(main, ["--import", "our_stores", "inspect", "sqlite://runs/1"])
    assert known.exit_code == 0, known.output
    assert "1 tensor, 12 bytes" in known.output
    lost = CliRunner().invoke(main, ["inspect", "sqlite://runs/1"], env={"FASTLOAD_IMPORT": "no_such_module"})
    assert (lost.exit_code, "--import no_such_module: ModuleNotFoundError" in lost.output) == (2, True)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installs a package with a storage for URLs of a scheme."""
    (tmp_path / "in_memory.py").write_text(
        "import fastload\n"
        "class Storage(fastload.Storage):\n"
        "    def __init__(self, location, options, *, io, patience):\n"
        "        super().__init__(location)\n"
        "        if 'password' in options: raise ValueError(f'not {options[\"password\"]}')\n"
        "        self.names, self.given = options['names'], (io, patience.retries)\n"
        "    def stat(self, name): ...\n"
        "    def list(self): return self.names\n"
        "    def read_into(self, name, offset, buffers, version=''): ...\n"
    )
    info = tmp_path / "in_memory-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: in_memory\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fastload.storages]\ninmemory = in_memory:Storage\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed_extensions.cache_clear()
    yield
    installed_extensions.cache_clear()


def test_a_package_brings_a_storage(installed: None) -> None:
    storage: Any = open_storage("inmemory://any/where", NAMES, {"names": ["a"]}, io="direct")
    assert (storage.list(), storage.given) == (["a"], ("direct", 0))
    with pytest.raises(OptionError, match=r"cannot save to inmemory://any: Storage is for loads only"):
        fastload.save({}, "inmemory://any/where", storage_options={"names": []})
    with pytest.raises(OptionError, match=r"cannot open other://any/where"):
        open_storage("other://any/where", NAMES)
    with pytest.raises(OptionError, match=r"is 'inmemory://any' meant\?"):
        open_storage(Path("inmemory://any"), NAMES)


def test_what_a_storage_of_a_package_does_not_take_is_an_error_without_credentials(installed: None) -> None:
    password = "hunter22"
    with pytest.raises(OptionError, match=r"cannot open inmemory://any: not \*\*\*$") as raised:
        fastload.inspect("inmemory://any", storage_options={"password": password})
    assert password not in "".join(traceback.format_exception(raised.value))
    storage = open_storage("inmemory://any", NAMES, {"names": [], "token": password})
    assert storage.secrets.hide(f"the token {password}") == "the token ***"


def test_the_hub_without_its_extension_is_not_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.ext.EXTENSIONS", {})
    with pytest.raises(OptionError, match=r"hf:// needs the extension 'hf', which is not installed"):
        open_storage("hf://org/model", NAMES)


@pytest.mark.parametrize("scheme", ["", "file", "FILE", "my store", "my://", None, 3])
def test_what_is_no_scheme_is_refused(scheme: Any) -> None:
    with pytest.raises(OptionError, match=r"scheme=.*must be the text before"):
        fastload.register_storage(scheme, SqliteStorage)


def test_options_that_the_storage_does_not_take(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"cannot open sqlite://runs: .*'other'"):
        fastload.inspect("sqlite://runs", storage_options={"database": tmp_path / "a.db", "other": 1})
    fastload.register_storage("none", lambda url: None)
    with pytest.raises(OptionError, match=r"cannot open none://a: its factory returned NoneType, not a fast"):
        fastload.inspect("none://a")


def test_a_storage_for_loads_only(tmp_path: Path) -> None:
    class ReadOnly(fastload.Storage):
        stat = SqliteStorage.stat

        def list(self) -> Any: ...

        def read_into(self, *_: Any, **__: Any) -> None: ...

    fastload.register_storage("readonly", ReadOnly)
    with pytest.raises(OptionError, match=r"cannot save to readonly://runs: ReadOnly is for loads only"):
        fastload.save({"a": torch.ones(2)}, "readonly://runs/1")
    with pytest.raises(OptionError, match=r"is 'readonly://a' meant\?"):
        fastload.inspect("readonly:/a")


def test_credentials_stay_out_of_errors(tmp_path: Path) -> None:
    class Failing(SqliteStorage):  # type: ignore[misc, valid-type]
        def __init__(self, url: str, password: str) -> None:
            super().__init__(url, str(tmp_path / "files.db"))
            self.password = password

        def ask(self, statement: str, *values: Any) -> Any:
            if statement.startswith("INSERT"):
                raise sqlite3.OperationalError(f"no room for {self.password}")
            return super().ask(statement, *values)

        def __init_subclass__(cls) -> None: ...

    fastload.register_storage("failing", Failing)
    with pytest.raises(StorageError, match=r"no room for \*\*\*.*|failing://me:\*\*\*@db/runs/1") as raised:
        fastload.save(
            {"a": torch.ones(2)}, "failing://me:hush-hush@db/runs/1", storage_options={"password": "sesame-1"}
        )
    assert "hush-hush" not in str(raised.value)
    assert "sesame-1" not in str(raised.value)
