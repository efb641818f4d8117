"""The device of a stage or rank: the first CUDA device, the emulated accelerator, or host memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "emu": "emccl"}


class Device:
    """A device, entered by the process or thread that makes it.

    Args:
        kind: ``cuda``, ``emu`` or ``cpu``.

    Attributes:
        kind: As given.
        backend: What moves data between the devices of ranks.
        groups: The backends of a process group that has it, for `torch.distributed.init_process_group`.
        device: For torch.
    """

    def __init__(self, kind: str) -> None:
        if kind == "emu":
            from tests.accelerator import accelerator

            accelerator()
        self.kind = kind
        self.backend = BACKENDS[kind]
        self.groups = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{self.backend}"
        self.device = torch.device(kind) if kind == "cpu" else torch.device(kind, 0)
        self.has_streams = kind != "cpu"
        self._module: Any = torch.get_device_module(kind)
        self.enter()

    def enter(self) -> None:
        """Makes it the device of this thread; a thread that did not would use device 0 all the same."""
        if self.has_streams:
            torch.accelerator.set_device_index(0)

    def use_all_cores(self) -> None:
        """Gives torch as many threads as usual, next to a GPU; a process that is to fork has one."""
        # In any case: of the threads of a backward pass, the first ones in a fork to set a number abort it.
        torch.set_num_threads(len(os.sched_getaffinity(0)) if self.kind == "cuda" else 1)

    def synchronize(self) -> None:
        """Waits for all that was queued on it."""
        if self.has_streams:
            torch.accelerator.synchronize(self.device)

    def new_stream(self) -> Any:
        """Returns another stream; None on the CPU, which has none."""
        return torch.Stream(self.device) if self.has_streams else None

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Makes a stream the current one; it begins after the one before, which goes on after it."""
        if stream is None:
            yield
            return
        before = torch.accelerator.current_stream(self.device)
        stream.wait_stream(before)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            before.wait_stream(stream)

    def seconds_until_free(self, limit_s: float) -> float | None:
        """Waits until all that was queued has run; returns the seconds it took, or None beyond the limit."""
        free = threading.Event()

        def wait() -> None:
            self.enter()
            self.synchronize()
            free.set()

        began = time.perf_counter()
        threading.Thread(target=wait, daemon=True).start()
        return time.perf_counter() - began if free.wait(limit_s) else None

    def forget_peak(self) -> int:
        """Returns the bytes allocated on it, from which `peak_bytes` counts."""
        if not self.has_streams:
            return 0
        self._module.reset_peak_memory_stats()
        allocated: int = self._module.memory_allocated()
        return allocated

    def peak_bytes(self) -> int:
        """Returns the most bytes allocated on it since `forget_peak`."""
        return self._module.max_memory_allocated() if self.has_streams else 0

    def free_bytes(self) -> int | None:
        """Returns how much of its memory is free; None for host memory."""
        return self._module.mem_get_info()[0] if self.has_streams else None
