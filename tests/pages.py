"""The pages that users read, and what is in them to be run."""

from __future__ import annotations

import os
import re
from pathlib import Path
from unittest import mock

__all__ = ["PAGES", "ROOT", "commands", "page", "program", "python_blocks", "run_program"]

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    *(f"docs/{name}.md" for name in "loading saving training failures command-line planning options".split()),
    "launch/README.md",
)


def page(name: str) -> str:
    """Returns the text of a page."""
    return (ROOT / name).read_text()


def program(name: str) -> str:
    """Returns the last python block of a page: a complete program."""
    *_, code = re.findall(r"^```python\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL)
    return str(code)


def run_program(name: str) -> None:
    """Runs that program as one of the ranks it is started on, in the working directory.

    Its ranks have met already, and go on afterwards.
    """
    import torch.distributed as dist

    where_they_met = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} if dist.is_initialized() else {}
    with (
        mock.patch.dict(os.environ, where_they_met),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        exec(compile(program(name), name, "exec"), {"__name__": "__main__"})


def python_blocks() -> dict[str, str]:
    """The python blocks of all pages by heading and number, such as ``Save 1``."""
    found: dict[str, str] = {}
    heading, counts = "", dict[str, int]()
    pattern = re.compile(r"^#+ (?P<heading>[^\n]+)$|^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.M | re.S)
    for match in pattern.finditer("\n".join(map(page, PAGES))):
        heading = match["heading"] or heading
        if match["language"] == "python":
            counts[heading] = counts.get(heading, 0) + 1
            found[f"{heading} {counts[heading]}"] = match["code"]
    return found


def commands() -> list[tuple[str, str]]:
    """The lines of the console blocks of all pages, and the output that follows each."""
    found = []
    for name in PAGES:
        for block in re.findall(r"^```console\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL):
            found += re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    return [(line.partition(" #")[0].strip(), out) for line, out in found]
