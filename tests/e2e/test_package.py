"""The package as others get it: built, installed away from the checkout, used, and beside its namesake."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.pages import ROOT, python_blocks

pytestmark = pytest.mark.timeout(500)

LISTED = "--cached --others --exclude-standard"  # what git knows of, or would
TO_BUILD = "fastload docs launch scripts tests pyproject.toml README.md LICENSE CHANGELOG.md constraints.txt"

# A load, a save, the first block of the README, and the help of the command line with that of each of its
# commands, in one process.
PROGRAM = """
import contextlib, io, runpy, sys
import torch, fastload
fastload.save({"weight": torch.ones(3), "step": 4}, "saved")
state = fastload.load("saved")
assert state["weight"].tolist() == [1.0] * 3 and state["step"] == 4, state

def told(*arguments):
    sys.argv = ["fastload", *arguments]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
    return output.getvalue()

model = torch.nn.Linear(3, 2)
fastload.save(model.state_dict(), "llama")
exec(sys.argv[2])  # the first block of the README
assert torch.equal(state["weight"], model.weight)

script = sys.argv[1]
commands = [line.split()[0] for line in told("--help").partition("Commands:")[2].splitlines() if line.strip()]
helps = [told(command, "--help").split()[:3] for command in commands]
assert helps == [["Usage:", "fastload", command] for command in commands], helps
print(*sorted(commands), told("--version").split()[-1], fastload.__file__)
"""


def run(*command: str | Path, cwd: Path, status: int = 0) -> str:
    """Runs a program without anything of the checkout in its environment; returns what it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True, timeout=400)
    assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


class Environment:
    """A virtual environment with links to everything that is installed here, except this package.

    So pip finds what the package needs where it looks for it, and fetches nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
        self.site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if "fastload" not in entry.name and entry.suffix != ".pth":
                (self.site / entry.name).symlink_to(entry)

    def python(self, *arguments: str, status: int = 0) -> str:
        return run(self.folder / "bin" / "python", *arguments, cwd=self.folder, status=status)

    def pip(self, *arguments: str) -> str:
        return self.python("-m", "pip", "--disable-pip-version-check", "--no-cache-dir", *arguments)

    def install(self, what: str, *options: str) -> None:
        self.pip("install", "--quiet", "--no-index", "--no-compile", *options, what)


def write_wheel(folder: Path, name: str, files: dict[str, str]) -> Path:
    """Writes a wheel of version 0.0.3 that holds these files."""
    info = f"{name}-0.0.3.dist-info"
    described = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.3\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{name}-0.0.3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in (files | described).items():
            wheel.writestr(file, text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in (*files, *described)))
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that was built from what is in it."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_what_is_built_is_whole(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    tracked = run("git", "ls-files", *LISTED.split(), *TO_BUILD.split(), cwd=ROOT).split()
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert [name for name in tracked if name not in names] == []
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
        (description,) = (name for name in packed.namelist() if name.endswith("/METADATA"))
        metadata = packed.read(description).decode()
    assert names == {name for name in tracked if name.startswith("fastload/")}
    assert wheel.name.startswith("fastload_torch-")
    for field in ("Project-URL", "Keywords", "License-Expression", "Requires-Python", "Author", "Summary"):
        assert f"\n{field}: " in metadata, field
    assert "# fastload\n" in metadata  # README
    links = re.findall(r"\]\(([^)]+)\)", metadata.partition("# fastload\n")[2])
    assert links
    assert [link for link in links if not link.startswith("https://")] == []


@pytest.fixture(scope="module")
def there(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Where the wheel is installed."""
    environment = Environment(tmp_path_factory.mktemp("package") / "venv")
    environment.install(f"{built[1]}[cli,plot,remote]")
    return environment


@pytest.mark.slow
def test_it_works_away_from_the_checkout(built: tuple[Path, Path], there: Environment) -> None:
    assert "No broken requirements" in there.pip("check")
    readme = python_blocks()["Load 1"]
    here = {"/checkpoints/": "", '"cuda"': '"cpu"'}
    for written, replacement in here.items():
        assert written in readme
        readme = readme.replace(written, replacement)
    arguments = [str(there.folder / "bin" / "fastload"), readme]
    *commands, version, module = there.python("-c", PROGRAM, *arguments).split()
    assert {"load", "inspect", "verify", "stage", "convert", "plan"} <= set(commands)
    assert f"-{version}-" in built[1].name
    assert Path(module) == there.site / "fastload" / "__init__.py"


@pytest.mark.slow
def test_beside_its_namesake_it_says_so(built: tuple[Path, Path], there: Environment, tmp_path: Path) -> None:
    other = {"fastload/__init__.py": "from .downloader import FastLoad\n"}
    other["fastload/downloader.py"] = "class FastLoad: ...\n"
    there.install(str(write_wheel(tmp_path, "fastload", other)))  # overwrites what is there
    assert "FastLoad" in there.python("-c", "import fastload; print(dir(fastload))")
    assert "has both fastload-torch and fastload" in there.python("-m", "fastload", "ls", status=1)

    there.install(str(built[1]), "--force-reinstall", "--no-deps")  # and the other way around
    said = there.python("-c", "import fastload", status=1)
    assert "has both fastload-torch and fastload, another project" in said
    assert "pip uninstall -y fastload fastload-torch && pip install fastload-torch" in said

    there.pip("uninstall", "--quiet", "--yes", "fastload", "fastload-torch")  # as that advises
    assert not (there.site / "fastload" / "__init__.py").exists()
