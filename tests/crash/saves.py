"""What the crash tests share: states that tell their version, saves that go wrong, and what they leave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import fastload
from fastload.errors import CheckpointNotFound, PeerError
from fastload.geometry.dtensors import local_of
from tests.crash.tracer import Fault, striking
from tests.dist.faults import SLACK_S, fastload_threads
from tests.dist.harness import run_ranks
from tests.dist.patience import patient
from tests.dist.test_sharded import placed

__all__ = [
    "SLACK_S",
    "TIMEOUT_S",
    "End",
    "Struck",
    "attempt",
    "end_of",
    "leftovers",
    "options",
    "require_named",
    "require_whole",
    "save",
    "save_again",
    "save_all_struck",
    "save_struck",
    "shards",
    "state",
    "version_of",
]

TIMEOUT_S = 2.2
_MIB = 1 << 20


def state(version: int, num_mib: int = 9) -> dict[str, Any]:
    """A nested state every byte of which depends on the version; 3 ranks write 3 pieces of it each."""
    place = torch.arange(_MIB // 4 * num_mib // 3, dtype=torch.int32)
    tensors = {f"layer{number}": place * 7 + version * 31 + number for number in range(3)}
    return {"model": tensors, "step": version, "rates": [version / 3, None, "x"]}


def shards(value: Any, mesh: DeviceMesh) -> Any:
    """The same state, sharded: rows; rows that are no neighbours, so that packets come from all; whole."""
    placements = [Shard(0), _StridedShard(0, split_factor=24), Replicate()]
    tensors = value["model"].items()
    parts = {
        name: placed(tensor, mesh, [one]) for (name, tensor), one in zip(tensors, placements, strict=True)
    }
    return {**value, "model": parts}


def options(**changes: Any) -> fastload.SaveOptions:
    """One thread, pieces of 1 MiB and one kind of descriptor: system calls come in a known order."""
    given: dict[str, Any] = {"timeout_s": patient(TIMEOUT_S), "writers": "all", "io": "buffered"}
    given |= {"write_threads": 1, "staging_bytes": 2 * _MIB}
    return fastload.SaveOptions(**{**given, **changes})


def save(
    value: Any,
    path: Path | str,
    *,
    background: bool,
    process_group: Any = None,
    storage: Any = None,
    **changes: Any,
) -> None:
    how: Any = {"process_group": process_group, "storage_options": storage, "options": options(**changes)}
    if background:
        handle = fastload.async_save(value, path, **how)
        for tensor in value["model"].values():
            local_of(tensor).fill_(-1)  # training goes on
        handle.wait(60)
    else:
        fastload.save(value, path, **how)


@dataclass(frozen=True)
class End:
    """How a save ended on one rank.

    Attributes:
        kind: Name of the error's type, or ``saved``.
        causes: Rank → its cause, as text.
        text: The error's.
        seconds: How long it took.
        threads: Of fastload's that are left.
    """

    kind: str
    causes: Mapping[int, str]
    text: str
    seconds: float
    threads: list[str]


def end_of(call: Callable[[], Any]) -> End:
    """Calls, and says how it ended."""
    began, kind, text, causes = time.monotonic(), "saved", "", {}
    try:
        call()
    except BaseException as error:
        kind, text = type(error).__name__, str(error)
        if isinstance(error, PeerError):
            causes = {rank: f"{type(cause).__name__}: {cause}" for rank, cause in error.failures.items()}
    return End(kind, causes, text, time.monotonic() - began, fastload_threads())


@dataclass(frozen=True)
class Struck:
    """A save of version 2 on three ranks, while system calls of some go wrong.

    Attributes:
        path: Where to.
        faults: Rank → what goes wrong there.
        how: Of the save; with ``sharded``, of shards.
    """

    path: Path
    faults: Mapping[int, Sequence[Fault]]
    how: Mapping[str, Any]

    @property
    def dies(self) -> dict[int, signal.Signals]:
        kills = {rank for rank, own in self.faults.items() if any("SIGKILL" in fault for _, fault in own)}
        return dict.fromkeys(kills, signal.SIGKILL)


def attempt(rank: int, world: int, cases: Sequence[Struck]) -> End:
    """A rank's body: three ranks for each case save, all at once, while system calls of some go wrong."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    groups = [dist.new_group(range(first, first + 3)) for first in range(0, world, 3)]
    case, value = cases[rank // 3], state(2)
    how = dict(case.how)
    meshes = [DeviceMesh("cpu", list(range(first, first + 3))) for first in range(0, world, 3)]
    if how.pop("sharded", False):
        value = shards(value, meshes[rank // 3])
    with striking(case.faults.get(rank % 3, ())):
        dist.barrier()  # it takes a while until faults are in place
        return end_of(lambda: save(value, case.path, process_group=groups[rank // 3], **how))


def save_struck(path: Path, faults: Mapping[int, Sequence[Fault]], **how: Any) -> list[End]:
    """Saves version 2 on three ranks, while system calls of some go wrong; returns the ends of who lives."""
    store = how.pop("store", "agent")
    return save_all_struck([Struck(path, faults, how)], store=store)[0]


def save_all_struck(cases: Sequence[Struck], store: Any = "agent") -> list[list[End]]:
    """The same for several at once; returns the ends of each."""
    dies = {
        3 * number + rank: signum for number, case in enumerate(cases) for rank, signum in case.dies.items()
    }
    ends = run_ranks(attempt, 3 * len(cases), dies=dies, store=store, cases=cases)
    return [
        [ends[3 * number + rank] for rank in range(3) if rank not in case.dies]
        for number, case in enumerate(cases)
    ]


def require_named(ends: Sequence[End], causes: Mapping[int, str]) -> None:
    """All raised the same, in time, with these ranks' causes; nothing of the save is left in them."""
    for end in ends:
        assert end.kind == "PeerError", ends
        assert sorted(end.causes) == sorted(causes), ends
        for rank, text in causes.items():
            assert text in end.causes[rank], ends
            assert f"rank {rank}" in end.text, ends
        assert end.seconds < TIMEOUT_S + SLACK_S, ends
        assert end.threads == [], ends
    assert len({tuple(end.causes.items()) for end in ends}) == 1, ends


def version_of(loaded: Any) -> int:
    """Returns the version of a state, all of which must be of that version, bit for bit."""
    version: int = loaded["step"]
    wanted = state(version)
    assert loaded["rates"] == wanted["rates"]
    assert loaded["model"].keys() == wanted["model"].keys()
    for name, tensor in wanted["model"].items():
        assert torch.equal(loaded["model"][name], tensor), f"{name} is not that of version {version}"
    return version


def require_whole(path: Path, version: int | None) -> None:
    """What a reader sees: a whole checkpoint of that version which verifies, or none at all."""
    try:
        found = version_of(fastload.load(path))
    except CheckpointNotFound:
        assert version is None, f"{path} is gone"
        return
    assert found == version
    fastload.verify(path)


def leftovers(root: Path) -> list[str]:
    """Lists what is beside the checkpoints."""
    return sorted(name for name in os.listdir(root) if name.startswith("."))


def _again(rank: int, world: int, paths: Sequence[Path], version: int) -> None:
    for path in paths:
        save(state(version), path, background=False, overwrite=True, timeout_s=20.0)


def save_again(*paths: Path, version: int = 3) -> None:
    """The next saves: they succeed, and clean what is left of those before."""
    run_ranks(_again, 2, paths=paths, version=version)
    for path in paths:
        require_whole(path, version)
        assert leftovers(path.parent) == []
