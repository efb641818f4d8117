"""The steps of ./scripts/demo: commands of a user, whose processes are forked from this one.

To import torch takes longer than any of the steps, and torchrun would do it once more for itself. Here it is
imported once, and ranks find in their environment what torchrun would say.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import shlex
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

TRAIN = "launch/train.py"
IMPORTED = (
    "fastload.cli",
    "fastload.ext.listings",
    "fastload.training.manager",
    "torch._dynamo",
)  # of optimizers


def main(folder: str) -> None:
    checkpoint, run = f"{folder}/weights", f"{folder}/run"
    print("The commands are those of a user. To save time, one process imports torch and forks the others.")
    print("\n== A checkpoint of 512 MB in 8 safetensors files", flush=True)
    start(1, ["scripts/make_checkpoint.py", checkpoint, "--size", "512MB", "--files", "8"])
    # Each rank reads a quarter.
    torchrun(4, ["-m", "fastload", "load", checkpoint, "--strategy", "allgather", "--digest"])
    train = [TRAIN, "--root", run, "--batch", "16", "--save-every", "20"]
    torchrun(2, [*train, "--steps", "40"])
    fastload("ls", run)
    fastload("verify", f"{run}/step_00000040")
    torchrun(2, [*train, "--steps", "60"])  # goes on at step 40


def torchrun(num_ranks: int, command: Sequence[str]) -> None:
    """Runs a command on the ranks of a job."""
    print(f"\n== torchrun --standalone --nproc-per-node {num_ranks} {shlex.join(command)}", flush=True)
    start(num_ranks, command)


def fastload(*arguments: str) -> None:
    """Runs a command of fastload in one process."""
    print(f"\n== fastload {shlex.join(arguments)}", flush=True)
    start(1, ["-m", "fastload", *arguments])


def start(num_ranks: int, command: Sequence[str]) -> None:
    """Runs a command in forked processes, and waits for them; the first that fails ends the demo."""
    fork, port = multiprocessing.get_context("fork"), free_port()
    ranks = [fork.Process(target=run, args=(command, rank, num_ranks, port)) for rank in range(num_ranks)]
    for rank in ranks:
        rank.start()
    try:
        await_all(ranks)
    finally:
        for rank in ranks:
            rank.terminate()


def await_all(ranks: Sequence[BaseProcess]) -> None:
    while ranks:
        wait([rank.sentinel for rank in ranks])
        if failed := [rank.exitcode for rank in ranks if rank.exitcode]:
            sys.exit(f"demo: a process exited with {failed[0]}")
        ranks = [rank for rank in ranks if rank.is_alive()]


def run(command: Sequence[str], rank: int, num_ranks: int, port: int) -> None:
    """Runs a command in this process."""
    if num_ranks > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        os.environ |= {name: str(value) for name, value in place.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    is_module, program = command[0] == "-m", command[command[0] == "-m"]
    sys.argv = [program, *command[1 + is_module :]]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


if __name__ == "__main__":
    for name in IMPORTED:
        import_module(name)
    runpy.run_path(TRAIN, run_name="imported")
    gc.freeze()  # so that the ranks share these pages
    main(sys.argv[1])
