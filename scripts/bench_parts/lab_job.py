"""One job of scripts/bench_lab.py, on every host: runs the arms in turn; rank 0 writes one line per run.

python -m bench_parts.lab_job SETTINGS.json     (under torchrun)
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fastload
from bench_parts import sharded
from bench_parts.lab_arms import Arm, Places, set_peer_env
from bench_parts.lab_ranks import Ranks, describe, mounted, own_cpu_s
from bench_parts.lab_shards import arms_of, make_target
from bench_parts.tables import DEQUANTISED, FLOOR
from fastload.base.memory import allocate_staging
from fastload.formats.state import state_digest

_MOUNT_S = 10.0
_POLL_S = 0.2


class Job(Ranks):
    """The work of one rank.

    Args:
        settings: What the class Lab wrote, in lab_control.py.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.first_on_host = os.environ["LOCAL_RANK"] == "0"
        layout = settings["shards"]
        arms = {arm.name: arm for arm in arms_of(layout, settings["tuned"])}
        self.arms = [arms[name] for name in settings["arms"]]
        self.targets = {
            (which, dequantised): make_target(layout, settings[which], dequantised=dequantised)
            for which in ("small", "full")
            for dequantised in {False, *(arm.name == DEQUANTISED for arm in self.arms)}
        }

    def run(self) -> None:
        """Runs all arms, first with a small checkpoint: this finishes imports, and finds failing arms."""
        working = self.arms
        for turn in range(-1, self.settings["repeats"]):
            working = [arm for arm in working if self.take_turn(arm, turn)]

    def take_turn(self, arm: Arm, turn: int) -> bool:
        """Runs an arm, or waits until the other job has; returns whether it succeeded on all ranks."""
        if arm.name in self.settings["own"]:
            return self.run_once(arm, "full" if turn >= 0 else "small", turn=turn)
        managed: list[bool | None] = [None]
        while self.rank == 0 and managed[0] is None:
            time.sleep(_POLL_S)
            managed = [self.has_managed(arm, turn)]
        dist.broadcast_object_list(managed)
        return bool(managed[0])

    def has_managed(self, arm: Arm, turn: int) -> bool | None:
        """Returns whether another job has run an arm with success; None if it has not run yet."""
        begin = json.dumps({"begin": arm.name, "turn": turn}) + "\n"
        lines = Path(self.settings["results"]).read_text().splitlines(keepends=True)
        ends = [end for line, end in pairwise(lines) if line == begin and end.endswith("\n")]
        return "error" not in json.loads(ends[0]) if ends else None

    def run_once(self, arm: Arm, which: str, *, turn: int) -> bool:
        """Runs one arm on all ranks; returns whether it succeeded on all of them."""
        self.write({"begin": arm.name, "turn": turn})
        with contextlib.ExitStack() as stack:
            error, folder, client = "", None, 0
            try:
                if arm.reads == "mount":
                    folder, client = stack.enter_context(self.mounted())
            except Exception as caught:
                error = describe(caught)
            if self.gather(error, {}) is None:
                return False
            checkpoint, target = self.settings[which], self.targets[which, arm.name == DEQUANTISED]
            place = folder / checkpoint["name"] if folder else None
            places = Places(checkpoint["http"], checkpoint["s3"], place, target.module)
            warm_memory(max(checkpoint["nbytes"], target.nbytes))
            if target.module is not None:
                sharded.clear(target.module)
            Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins here
            resident = resident_bytes("VmRSS")
            if arm.prepare is not None:
                arm.prepare(places)
            before = self.crossed()
            dist.barrier()
            row = {}
            try:
                row = timed(arm, places, client, "" if turn > 0 else target.digest)
            except Exception as caught:
                error = describe(caught)
            state_bytes = target.nbytes if target.module is None else 0
            row["memory_bytes"] = resident_bytes("VmHWM") - resident - state_bytes
            gc.collect()
            wanted_bytes = self.targets[which, False].nbytes if self.first_on_host else 0  # as stored
            rows = self.gather(error, row | {"wanted_bytes": wanted_bytes})
            if rows is None:
                return False
            crossed = self.crossed() - before
            self.write(
                {
                    "arm": arm.name,
                    "turn": turn,
                    "seconds": max(row["seconds"] for row in rows),
                    "first_s": min(row["seconds"] for row in rows),
                    "cpu_s": sum(row["cpu_s"] for row in rows),
                    "mount_cpu_s": sum(row["mount_cpu_s"] for row in rows),
                    "storage_bytes": crossed.read,
                    "exchanged_bytes": crossed.exchanged,
                    "most_entered_bytes": max(crossed.entered, default=0),
                    "memory_bytes": max(row["memory_bytes"] for row in rows),
                    "wanted_bytes": sum(row["wanted_bytes"] for row in rows),
                    "report": places.reports[0] if places.reports else None,
                }
            )
        return True

    @contextlib.contextmanager
    def mounted(self) -> Iterator[tuple[Path, int]]:
        """Mounts the storage, nothing of it cached; yields where, and the pid of the client.

        It is the same place on all hosts; each has mounts of its own. One rank of a host mounts for all.
        """
        server, port = self.settings["sftp"]
        folder = Path(self.settings["results"]).with_name("mount")
        if not self.first_on_host:
            yield folder, 0
            return
        with mounted(server, port, folder, "ro") as client:
            yield folder, client


def timed(arm: Arm, places: Places, client: int, digest: str) -> dict[str, float]:
    """Runs an arm; returns this rank's seconds and CPU seconds, and the CPU seconds of the mount's client.

    Raises:
        ValueError: The loaded state has another digest.
    """
    used, used_by_mount, began = own_cpu_s(), cpu_s(client), time.perf_counter()
    state = arm.load(places)
    seconds = time.perf_counter() - began
    row = {"seconds": seconds, "cpu_s": own_cpu_s() - used, "mount_cpu_s": cpu_s(client) - used_by_mount}
    if digest and arm.name != FLOOR and state_digest(state) != digest:
        raise ValueError(f"{len(state)} tensors arrived, but they are not those of the checkpoint")
    return row


def warm_memory(nbytes: int) -> None:
    """Touches as much memory as the state takes, and frees it.

    On a virtual machine that returns free memory to its host, the first touch costs several times more and
    depends on the host's other load, which must not affect the comparison.
    """
    allocate_staging(nbytes, pinned=False).zero_()


def resident_bytes(field: str) -> int:
    """Memory of this process: now (``VmRSS``), or at most (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def cpu_s(pid: int) -> float:
    """User and system seconds of a process."""
    if not pid:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    warnings.filterwarnings("ignore")  # deprecations, of the libraries
    set_peer_env()
    torch.set_num_threads(1)  # ranks share the cores
    settings = json.loads(Path(sys.argv[1]).read_text())
    assert Path(fastload.__file__).is_relative_to(settings["library"]), fastload.__file__
    dist.init_process_group("gloo", timeout=timedelta(seconds=settings["timeout_s"]))
    Job(settings).run()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
