"""What the failure tests share: small checkpoints, ways to go wrong at chosen places, and what came of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fastload
from fastload.comm import group
from fastload.errors import PeerError
from fastload.loading import access, prepare, session
from fastload.loading.match import LoadRequest
from fastload.storage.local import LocalStorage
from fastload.transfer.buffers import Buffers
from fastload.transfer.host_transport import HostTransport
from fastload.transfer.pipeline import Pipeline, _Placing
from fastload.transfer.read import ChunkReader
from fastload.transfer.transport import LocalTransport
from tests.dist.patience import patient

TIMEOUT_S = 1.6
SLACK_S = 30.0  # for two cores that others keep busy
PATIENT_S = 50.0  # where what happens takes a moment and the wait for it would take this long
TOLD_S = 0.6 * PATIENT_S  # less than any wait
CHUNK_BYTES = 64 << 10
NUM_BYTES = 3 * 12 * CHUNK_BYTES  # with 3 ranks: 12 rounds


@dataclass(frozen=True)
class Outcome:
    """How a call ended on one rank, in a form that can be compared between ranks."""

    kind: str
    causes: dict[int, str]
    text: str
    seconds: float
    details: dict[int, dict[str, Any]]


def checkpoint(path: Path, nbytes: int = NUM_BYTES, fill: int = 0) -> Path:
    """Writes one file whose every byte depends on its place."""
    data = _pattern(nbytes, fill)
    save_file({"a": data[: nbytes // 3].clone(), "b": data[nbytes // 3 :].clone()}, path)
    return path


def is_intact(tensors: dict[str, torch.Tensor], nbytes: int = NUM_BYTES, fill: int = 0) -> bool:
    return bool(torch.equal(torch.cat([tensors["a"], tensors["b"]]), _pattern(nbytes, fill)))


def _pattern(nbytes: int, fill: int) -> torch.Tensor:
    """Bytes of which each tells its place, up to 64 KiB."""
    place = torch.arange(min(nbytes, 1 << 16), dtype=torch.int32)
    once = (place * 31 + (place >> 8) + fill).to(torch.uint8)
    times = -(-nbytes // len(once))
    turn = torch.arange(times, dtype=torch.int32).to(torch.uint8) * 7
    return (once.repeat(times, 1) + turn[:, None]).flatten()[:nbytes]


def options(**changes: Any) -> fastload.LoadOptions:
    given: dict[str, Any] = {"timeout_s": patient(TIMEOUT_S), "chunk_bytes": CHUNK_BYTES}
    given |= {"strategy": "allgather"}
    return fastload.LoadOptions(**{**given, **changes})


def outcome_of(call: Callable[[], Any]) -> Outcome:
    """Calls what has to raise, and says how it ended."""
    began = time.monotonic()
    try:
        call()
    except BaseException as error:
        seconds = time.monotonic() - began
        failures = error.failures if isinstance(error, PeerError) else {}
        return Outcome(
            type(error).__name__,
            {rank: type(cause).__name__ for rank, cause in failures.items()},
            str(error),
            seconds,
            {rank: dict(vars(cause)) for rank, cause in failures.items()},
        )
    raise AssertionError("nothing was raised")


def fastload_threads(*, kept: Collection[str] = ()) -> list[str]:
    """Names the threads that do not end although a busy machine has the time for it.

    A thread that waits for a send ends by the timeout of its load if the connection breaks while Gloo has the
    message in the queue of that connection (``Pair::signalException`` leaves those out).

    Args:
        kept: Those that serve the next load, too.
    """
    limit = time.monotonic() + PATIENT_S + SLACK_S
    while names := [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith("fastload") and thread.name not in (*kept, "fastload-idle")
    ]:
        if time.monotonic() > limit:
            break
        time.sleep(0.005)
    return sorted(names)


def num_descriptors(*, at_most: int | None = None) -> int:
    """Counts this process's descriptors, once there are no more than that or a busy machine had the time."""
    limit = time.monotonic() + SLACK_S
    while (found := len(os.listdir("/proc/self/fd"))) > (found if at_most is None else at_most):
        if time.monotonic() > limit:
            break
        time.sleep(0.05)
    return found


def die(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)


# Where a rank can be hit, in the order of a load. Each takes what to do there and changes this process.
# Loads where ranks want different bytes also have: claims, routes (the plan), pack, rest (that broken readers
# left).

STAGES = (
    "start", "open", "headers", "compare", "prepare", "connect", "read", "exchange", "place", "first",
    "middle", "last", "gather",
)  # fmt: skip


def strike(monkeypatch: pytest.MonkeyPatch, stage: str, act: Callable[[], None]) -> None:
    """Lets this process do something when a load gets to a stage."""

    def before(owner: Any, name: str, when: Callable[..., bool] = lambda *_: True) -> None:
        real = getattr(owner, name)

        def struck(*args: Any, **kwargs: Any) -> Any:
            if when(*args):
                act()
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, struck)

    if stage == "start":
        before(group, "join")
    elif stage == "open":
        before(LocalStorage, "stat")
    elif stage == "headers":
        before(access._Opening, "_read_early")
    elif stage == "compare":
        monkeypatch.setattr(access, "_files_seen", lambda storage: "")  # else there is nothing to compare
        before(access, "_difference")
    elif stage == "prepare":
        before(LoadRequest, "match")
    elif stage == "requests":
        before(prepare, "request_of")
    elif stage == "routes":
        before(prepare, "plan_routes")
    elif stage == "pack":
        before(Buffers, "pack")
    elif stage == "rest":
        before(session, "open_rest")
    elif stage == "connect":
        before(Pipeline, "steps")
    elif stage == "read":
        before(ChunkReader, "_read")
    elif stage == "exchange":
        before(HostTransport, "start")
        before(LocalTransport, "start")
    elif stage == "place":
        before(_Placing, "_place")
    elif stage == "first":
        before(Pipeline, "_finish", lambda self, plan, index, work: index == 0)
    elif stage == "middle":
        before(Pipeline, "_finish", lambda self, plan, index, work: index == plan.num_rounds // 2)
    elif stage == "last":
        before(Pipeline, "_finish", lambda self, plan, index, work: index == plan.num_rounds - 1)
    elif stage == "gather":
        before(session, "_report_rank")
    else:
        raise AssertionError(stage)
