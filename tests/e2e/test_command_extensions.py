"""Commands that other packages bring, by their entry points."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from fastload.base.registry import installed_extensions
from fastload.cli import main


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installs a package with a command, and another whose command cannot be imported."""
    (tmp_path / "greeting.py").write_text(
        "import click\n@click.command(short_help='Greet.')\n@click.argument('name')\n"
        "def greet(name):\n    click.echo(f'hello {name}')\n"
    )
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit('it needs something else')\n")
    info = tmp_path / "greeting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fastload.commands]\ngreet = greeting:greet\nload = greeting:greet\nlost = greeting:lost\n"
        "text = greeting:__name__\nexits = leaving:greet\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    installed_extensions.cache_clear()
    yield
    installed_extensions.cache_clear()


def test_a_command_of_another_package_is_run() -> None:
    done = CliRunner().invoke(main, ["greet", "world"])
    assert (done.exit_code, done.output) == (0, "hello world\n")


def test_a_command_that_cannot_be_imported_says_whose_it_is_and_leaves_the_others_alone() -> None:
    done = CliRunner().invoke(main, ["lost"])
    assert done.exit_code == 2
    assert "'lost' of greeting (entry point fastload.commands = 'greeting:lost')" in done.output
    assert "no command of click" in CliRunner().invoke(main, ["text"]).output
    assert "it needs something else" in CliRunner().invoke(main, ["exits"]).output
    assert CliRunner().invoke(main, ["greet", "again"]).exit_code == 0


def test_help_lists_all_commands_even_if_one_cannot_be_imported() -> None:
    done = CliRunner().invoke(main, ["--help"])
    assert done.exit_code == 0
    lines = {line.split()[0]: line for line in done.output.partition("Commands:")[2].splitlines() if line}
    assert lines["greet"].endswith("Greet.")
    assert all("cannot be imported" in lines[name] for name in ("lost", "text", "exits"))
    assert {"convert", "doctor", "plan"} <= lines.keys()
    assert "Greet" not in lines["load"], "the commands of fastload are its own"
