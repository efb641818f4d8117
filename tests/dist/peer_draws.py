"""Random loads and copies from random peers with random faults, each of which is checked to the end."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

import fastload
from fastload.ext.serve.process import READS, SERVERS
from tests.dist.patience import patient
from tests.dist.peers import FAULTS, FarStorage, faulty_peer

_PEERS = ("good", "good", "faulty", "faulty", "closed", "stopped", "partial", "slow", "another", "nobody")
_SLOW = ("stall", "trickle")
"""Faults that cost the patience with a peer; few draws have one."""


class BrokenStorage(FarStorage):
    """An origin that fails for good after some reads; the scheme ``broken`` in draws."""

    reads_left = 0

    def read_into(self, name: str, offset: int, buffers: Any, version: str = "") -> None:
        type(self).reads_left -= 1
        if self.reads_left < 0:
            raise fastload.StorageError("the origin is gone", self.url)
        super().read_into(name, offset, buffers, version)


fastload.register_storage("broken", lambda url: BrokenStorage(url.replace("broken://", "far://")))


@contextmanager
def stoppable(folder: Path) -> Iterator[tuple[str, int]]:
    """Serves a checkpoint from another process; yields its URL and the number of the process."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        try:
            server = fastload.serve(folder)
            os.write(writing, server.url.encode())
            time.sleep(600)
        finally:
            os._exit(0)
    try:
        yield os.read(reading, 1000).decode(), pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


def make_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Saves a checkpoint, and another one of the same shapes at ``other``; returns the state of the first."""
    generator = torch.Generator().manual_seed(7)
    state = {f"t{number}": torch.randn(50_000 + number, generator=generator) for number in range(6)}
    options = fastload.SaveOptions(block_bytes=16 << 10)
    fastload.save(state, folder / "step", options=options)
    fastload.save({name: tensor + 1 for name, tensor in state.items()}, folder / "other", options=options)
    return state


def run_draw(seed: int, folder: Path, state: dict[str, torch.Tensor]) -> str:
    """Makes a draw; returns what it was.

    Args:
        seed: Its number.
        folder: Where `make_checkpoint` saved.
        state: What it returned.

    Raises:
        AssertionError: A byte was wrong, it took too long, or something was left.
    """
    draw = random.Random(seed)
    READS._until_s.clear()
    kinds = [draw.choice(_PEERS) for _ in range(draw.randint(1, 4))]
    is_broken = draw.random() < 0.2
    copies = draw.random() < 0.4
    BrokenStorage.reads_left = draw.randint(4, 20)
    origin = f"{'broken' if is_broken else 'far'}://{folder / 'step'}"
    files_before, began_s = len(os.listdir("/proc/self/fd")), time.monotonic()
    error: fastload.StorageError | None = None
    with ExitStack() as stack:
        urls = [_open_peer(kind, draw, folder, stack) for kind in kinds]
        SERVERS.clear()
        given: dict[str, Any] = {
            "sources": [fastload.peers(*urls)],
            "timeout_s": 60,
            "retries": 0,
            "chunk_bytes": draw.choice([16, 32, 64, 256]) << 10,
        }
        atomic = draw.random() < 0.3
        try:
            if copies:
                _copy_and_compare(origin, folder, given)
            else:
                options = fastload.LoadOptions(atomic=atomic, **given)
                loaded = fastload.load(origin, options=options)
                assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
        except fastload.StorageError as caught:
            error = caught
        finally:
            for left in folder.glob("*copy*"):
                shutil.rmtree(left)
    assert error is None or (is_broken and "the origin is gone" in str(error)), error
    outcome = "right" if error is None else "the error of the origin"
    del error
    took_s = time.monotonic() - began_s
    assert took_s < patient(60), f"it took {took_s:.1f} s"
    _assert_nothing_left(files_before)
    what = "copy" if copies else "load"
    return f"{seed}: {what} from {', '.join(kinds)}{' of a broken origin' if is_broken else ''}: {outcome}"


def _copy_and_compare(origin: str, folder: Path, given: dict[str, Any]) -> None:
    fastload.stage(origin, folder / "copy", options=fastload.StageOptions(**given))
    for name in ("model.safetensors", "fastload.json"):
        assert (folder / "copy" / name).read_bytes() == (folder / "step" / name).read_bytes(), name


def _open_peer(kind: str, draw: random.Random, folder: Path, stack: ExitStack) -> str:
    """Starts a peer; returns its URL."""
    step = folder / "step"
    if kind == "nobody":
        return "http://127.0.0.1:1"
    if kind == "stopped":
        url, pid = stack.enter_context(stoppable(step))
        signal_number = draw.choice([signal.SIGSTOP, signal.SIGKILL])
        timer = threading.Timer(draw.uniform(0, 0.2), os.kill, (pid, signal_number))
        stack.callback(timer.join)
        timer.start()
        return url
    if kind == "faulty":
        fault = draw.choice(FAULTS)
        if fault in _SLOW and draw.random() < 0.7:
            fault = "flip"
        return stack.enter_context(faulty_peer(step, fault, good_reads=draw.choice([0, 0, 1, 5, 20]))).url
    if kind == "partial":
        peer = stack.enter_context(faulty_peer(step))
        ends = sorted(draw.sample(range(0, 1_200_000, 16 << 10), 6))
        peer.ranges = {"model.safetensors": list(zip(ends[::2], ends[1::2], strict=True))}
        return peer.url
    rate = draw.choice(["100KB", "2MB"]) if kind == "slow" else None
    server = fastload.serve(folder / "other" if kind == "another" else step, rate=rate)
    stack.callback(server.close)
    if kind == "closed":
        timer = threading.Timer(draw.uniform(0, 0.2), server.close)
        stack.callback(timer.join)
        timer.start()
    return server.url


def _assert_nothing_left(files_before: int) -> None:
    """Waits for threads and descriptors that are about to end."""
    until_s = time.monotonic() + patient(30)
    while True:
        threads = [one.name for one in threading.enumerate() if "fastload-peers" in one.name]
        files = len(os.listdir("/proc/self/fd"))
        if not threads and files <= files_before:
            return
        assert time.monotonic() < until_s, f"left: {threads}, {files - files_before} descriptors"
        time.sleep(0.02)
