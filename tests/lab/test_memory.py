"""The memory tier between lab hosts: partners that cannot reach each other, while the training goes on."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.test_lab import HOST_2, PREFIX, lab, why_not
from tests.lab.test_load import start

pytestmark = [pytest.mark.lab, pytest.mark.timeout(150)]

_PROGRAM = Path(__file__).with_name("memory_program.py")
HOST_3 = f"{PREFIX}host3"


@pytest.fixture(scope="module", autouse=True)
def _lab() -> Iterator[None]:
    if reason := why_not():
        pytest.skip(reason)
    try:
        lab("up", "3")
        yield
    finally:
        lab("down")


def between(one: str, other: str, how: str) -> None:
    """Has a host send nothing to another one, or send to it again."""
    show = ["ip", "-json", "-4", "address", "show", "eth0"]
    found = subprocess.run(["ip", "netns", "exec", other, *show], capture_output=True, check=True, text=True)
    address = json.loads(found.stdout)[0]["addr_info"][0]["local"]
    subprocess.run(["ip", "netns", "exec", one, "ip", "route", how, "blackhole", address], check=True)


def lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / f"{rank}.lines"
    whole = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in whole]


@pytest.mark.slow
def test_partners_that_are_cut_off_from_each_other(tmp_path: Path) -> None:
    """The first host, which has the store, still reaches both: it is not the network that is gone."""
    job = start("python", str(_PROGRAM), str(tmp_path))
    deadline = time.monotonic() + 120

    def until(happened: Any) -> int:
        while not all(any(map(happened, lines(tmp_path, rank))) for rank in range(3)):
            assert time.monotonic() < deadline, [lines(tmp_path, rank)[-3:] for rank in range(3)]
            assert job.poll() is None, job.communicate()
            time.sleep(0.1)
        last: int = lines(tmp_path, 0)[-1]["step"]
        return last

    try:
        until(lambda line: line["counted"] > 3)
        for one, other in ((HOST_2, HOST_3), (HOST_3, HOST_2)):
            between(one, other, "add")
        began = lines(tmp_path, 0)[-1]["step"]
        failed = until(lambda line: line["step"] > began and line["error"])
        assert failed > began + 10, "training went on"
        for one, other in ((HOST_2, HOST_3), (HOST_3, HOST_2)):
            between(one, other, "del")
        until(lambda line: line["counted"] > failed)
    finally:
        job.terminate()
        out, err = job.communicate(timeout=60)
    assert "is not saved to memory" in out + err
