"""Connections that are kept from load to load, and those that are not."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import fastload
from fastload import LoadOptions, PeerError
from fastload.comm.cache import cache_of
from fastload.storage.local import LocalStorage
from tests.dist.harness import ranks


def sockets() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {name for name in found if name.startswith("socket:")}


def load(path: Path, **arguments: Any) -> None:
    options = LoadOptions(strategy="allgather", timeout_s=10, chunk_bytes=4096)
    tensors = fastload.load(path, options=options, **arguments)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected()[name])


def expected() -> dict[str, torch.Tensor]:
    return {name: torch.arange(5000.0) + index for index, name in enumerate("abc")}


def await_sockets(num: int) -> None:
    """Those that are not needed any more are closed in the background.

    That may take the `timeout_s` of the load: where a connection breaks while bytes of a message are queued
    in it, Gloo does not tell who waits for that message.
    """
    until = time.monotonic() + 30
    while len(sockets()) != num and time.monotonic() < until:
        time.sleep(0.01)
    assert len(sockets()) == num
    dist.barrier()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@ranks(4, ranks_per_host=1)
def test_connections_are_kept_until_a_load_fails(rank: int, world: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    if rank == 0:
        save_file(expected(), path)
    dist.barrier()
    before, in_tree = len(sockets()), 2 + (3 if rank == 0 else 1)  # two wake the thread that moves messages
    load(path)
    connected = sockets()
    assert len(connected) == before + 3 + in_tree, "a listener, one to each neighbour, and those of the tree"
    for names in ("*", "a", ["b", "c"]):
        load(path, names=names)
        assert sockets() == connected

    if not (child := os.fork()):
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    load(path)
    assert sockets() == connected, "a child has nothing to do with them"
    dist.barrier()

    if rank == 2:  # of which the others learn when they load
        cache_of(dist.group.WORLD).clear()
    load(path)
    await_sockets(before + 3 + in_tree)
    assert len(sockets() - connected) == 3, "all ranks have connected anew"

    patch = pytest.MonkeyPatch()
    if rank == 1:
        patch.setattr(LocalStorage, "read_into", lambda *_: 1 / 0)
    with pytest.raises(PeerError, match=r"rank 1 .*ZeroDivisionError"):
        load(path)
    patch.undo()
    await_sockets(before)
    load(path)
    await_sockets(before + 3 + in_tree)

    os.environ["GLOO_SOCKET_IFNAME"] = "lo,lo"
    cache_of(dist.group.WORLD).clear()
    load(path)
    await_sockets(before + 6 + in_tree)
    dist.barrier()


@ranks(3, ranks_per_host=1)
def test_two_open_checkpoints_are_loaded_at_once(rank: int, world: int, tmp_path: Path) -> None:
    """The ranks begin in different orders: whoever takes what is kept is not the same on all."""
    path = tmp_path / "x.safetensors"
    if rank == 0:
        save_file(expected(), path)
    dist.barrier()
    load(path)
    options = LoadOptions(strategy="allgather", timeout_s=20, chunk_bytes=4096)
    both = [fastload.open(path, options=options) for _ in range(2)]
    for _ in range(5):
        threads = [threading.Thread(target=checkpoint.load) for checkpoint in both[:: 1 - 2 * (rank % 2)]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(checkpoint.report is not None for checkpoint in both)
    for checkpoint in both:
        checkpoint.close()
    dist.barrier()


@pytest.mark.slow(but=["2-ranks"])
@ranks(1, 2)
def test_threads_that_load_one_open_checkpoint_wait_for_each_other(
    rank: int, world: int, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    if rank == 0:
        save_file(expected(), path)
    dist.barrier()
    options = LoadOptions(strategy="allgather", timeout_s=20, chunk_bytes=4096)
    with fastload.open(path, options=options) as checkpoint, ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(checkpoint.load) for _ in range(12)]
        for each in loads:
            found = each.result()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected().items())
