"""A name server that knows nobody, and loses answers: torch asks it about each connection to its store."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.forked import forking_python

_ADDRESS = ("127.0.7.53", 53)

_PROGRAM = """
import os, socket, sys
import torch.distributed as dist
import fastload

socket.gethostname = lambda: "host" + os.environ["RANK"]  # else they would share memory
path, address = sys.argv[1], (sys.argv[2], int(sys.argv[3]))
marker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
dist.init_process_group("gloo")


def mark(name):
    dist.barrier()
    if dist.get_rank() == 0:
        marker.settimeout(10)
        marker.sendto(name, address)
        assert marker.recv(100) == name
    dist.barrier()


fastload.load(path, options=fastload.LoadOptions(strategy="allgather"))
mark(b"begin")
for _ in range(10):
    fastload.load(path, options=fastload.LoadOptions(strategy="allgather"))
mark(b"end")
dist.destroy_process_group()
"""


@pytest.fixture
def marks() -> Iterator[dict[bytes, int]]:
    """How many questions had been asked at each mark."""
    found: dict[bytes, int] = {}

    def answer() -> None:
        count = 0
        while True:
            question, sender = server.recvfrom(1000)
            if question == b"stop":
                return
            if question in (b"begin", b"end"):
                found[question] = count
                server.sendto(question, sender)
                continue
            count += 1
            if count % 8:
                server.sendto(question[:2] + b"\x81\x83" + question[4:], sender)  # there is no such name

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(_ADDRESS)
        thread = threading.Thread(target=answer)
        thread.start()
        yield found
        server.sendto(b"stop", _ADDRESS)
        thread.join()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for mounts of its own")
@pytest.mark.timeout(120)
def test_loads_ask_nobody_for_names(tmp_path: Path, marks: dict[bytes, int]) -> None:
    save_file({"weight": torch.arange(300_000.0)}, tmp_path / "x.safetensors")
    (tmp_path / "program.py").write_text(_PROGRAM)
    (tmp_path / "resolv.conf").write_text(f"nameserver {_ADDRESS[0]}\n")
    (tmp_path / "nsswitch.conf").write_text("hosts: files dns\n")
    mounts = [f"mount --bind {tmp_path}/{name} /etc/{name}" for name in ("resolv.conf", "nsswitch.conf")]
    launcher = f"{forking_python()} -m torch.distributed.run --standalone --nproc-per-node 2"
    program = f"{launcher} {tmp_path}/program.py {tmp_path}/x.safetensors {_ADDRESS[0]} {_ADDRESS[1]}"
    ranks = f"export PYTHON_EXEC={sys.executable}"  # real ones: a fork has names from its parent
    command = " && ".join([ranks, "touch /etc/resolv.conf /etc/nsswitch.conf", *mounts, f"exec {program}"])
    ran = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, timeout=110
    )
    assert ran.returncode == 0, ran.stderr
    assert marks[b"begin"] > 0, "the group has formed without a question: nothing is tested"
    assert marks[b"end"] == marks[b"begin"]
