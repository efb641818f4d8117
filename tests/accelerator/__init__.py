"""An emulated accelerator: a device of torch's named ``emu`` that needs no hardware and hides no mistake.

    @ranks(2, accelerator=True)  # the group is "cpu:gloo,emu:emccl", the test is marked `emulated`
    def test_load(rank: int, world: int) -> None:
        emulator = accelerator()
        emulator.delay(0.001, random_s=0.002, seed=7)
        torch.accelerator.set_device_index(rank)
        tensor = torch.ones(3, device="emu")
        ...
        assert emulator.faults() == []

Every process has four devices. As far as the host can see they behave like CUDA devices at their worst:

- **Memory** is the device's own. A host that touches it, by ``data_ptr()``, dies of SIGSEGV.
- **Streams** are threads. Every operator, copy and collective only starts when it is called, and ends after
  the delay that a test has set. Only ``item()``, blocking copies, and operators whose result's shape depends
  on values wait.
- **Pools** of 32 streams, one for each device and priority, hand them out in turn. Communicators take their
  own from them, too, when they connect: of priority -1 with ``TORCH_EMCCL_HIGH_PRIORITY=1`` in the
  environment. So every stream is sooner or later also somebody else's.
- **Copies** with ``non_blocking=True`` are asynchronous both with pinned and with pageable memory: what a
  program reads or frees too early is wrong, on every run that has a delay.
- **Freed memory** belongs to its stream, which gets it again at once. It is filled with 0xDB by an operation
  on that stream, just before the next one, and so is new memory.
- **Collectives** of the backend ``emccl`` behave as those of NCCL. They run on streams, `Work.wait` keeps the
  current stream and not the host, and every communicator runs its operations in the order of the calls. Where
  ranks call different ones, or a rank is gone, the others hang until they abort.
- **Groups**, which ``_start_coalescing`` opens, belong to the calling thread. One that an error leaves open
  keeps the thread's later calls from being launched, on all communicators, though they seem to end.
- **Watchdogs** look after communicators, but for those made with ``TORCH_EMCCL_BLOCKING_WAIT=1`` in the
  environment, whose `Work.wait` keeps the host. See `Emulator.watchdog` and `Mode.dump_s`.
- **Contexts** are made when CUDA makes them; see `Emulator.contexts`.
- **Order** is checked, however the threads run: two operations on the same bytes of which one writes, on
  streams that do not wait for each other, are a fault. So is the reuse of memory that another stream may
  still use. `Emulator.faults` has them; a test ends by asserting that there are none.

Devices, drivers and versions differ in some ways, and fastload has to be right with all: a process is in one
`Mode`, which `Emulator.mode` sets.

Limits: there is no `split_group`, and sends and receives run on the communicator of their group, not on one
for each pair of ranks.

`accelerator` loads the device into a process, for good: call it in ranks or other processes of a test's own,
never in that of pytest. See `build` for how it is built, and tests/accelerator/test_emulator.py for examples.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

__all__ = ["BACKEND", "GROUP", "MODES", "NAME", "POISON", "Communicator", "Emulator", "Mode", "accelerator"]

NAME = "emu"
BACKEND = "emccl"
GROUP = f"cpu:gloo,{NAME}:{BACKEND}"
POISON = 0xDB  # each byte of memory that was freed


class Mode(NamedTuple):
    """How the emulated accelerator behaves where devices, drivers and versions differ."""

    pool: int = 32
    """Streams that a device has for each priority."""
    one_queue: bool = False
    """Whether operations of a device begin in the order of their launches: ``CUDA_DEVICE_MAX_CONNECTIONS=1``.

    One that cannot begin, since its stream is busy or it waits for an event, keeps all that was launched
    later waiting, on any stream. What has begun runs at the same time.
    """
    slow_aborts: bool = False
    """Whether an abort returns when all that was launched on the device has ended: it frees memory."""
    ready_s: float | None = None
    """How long after ``eager_connect_single_device``, which returns at once, connecting begins.

    The first operation waits until all ranks are connected. An ``abort`` waits behind it, for at most
    ``TORCH_EMCCL_NONBLOCKING_TIMEOUT`` seconds (30 min). None: connecting waits, and cannot be aborted.
    """
    dump_s: float | None = None
    """How long a process goes on after a communicator of its job has failed, in any process of the job.

    The failed one has a watchdog, and so has another one in the process that ends. An abort is no failure;
    a timeout and a rank that is gone are. None: it goes on.
    """


MODES = {
    "plain": Mode(),
    "few streams": Mode(pool=2),
    "one queue": Mode(one_queue=True),
    "slow aborts": Mode(slow_aborts=True, ready_s=0.02),
    "watchdog": Mode(dump_s=0.2),
}


class Communicator(NamedTuple):
    """A communicator of this process, open or not."""

    name: str  # of its process group; empty if it has none
    size: int
    num_operations: int
    num_threads: int  # that called them


class Emulator:
    """What a test can see and set of the emulated accelerator in its process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for function in (library.emu_counters, library.emu_faults, library.emu_communicators):
            function.restype = ctypes.c_char_p
        library.emu_delay.argtypes = ctypes.c_double, ctypes.c_double, ctypes.c_uint64
        library.emu_sleep.argtypes = ctypes.c_int, ctypes.c_int64, ctypes.c_double
        library.emu_hold.argtypes = ctypes.c_int, ctypes.c_int64
        library.emu_hold.restype = ctypes.c_int64
        library.emu_let_go.argtypes = (ctypes.c_int64,)
        library.emu_limit.argtypes = ctypes.c_int, ctypes.c_int64
        library.emu_mode.argtypes = (
            ctypes.c_int,
            ctypes.c_bool,
            ctypes.c_bool,
            ctypes.c_double,
            ctypes.c_double,
        )
        library.emu_seed.argtypes = ctypes.c_int, ctypes.c_uint64
        library.emu_get_random.argtypes = library.emu_set_random.argtypes = ctypes.c_int, ctypes.c_void_p
        self._contexts: dict[int, list[str]] = {}
        self._threads: dict[int, str] = {}
        self._on_use = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._note_use)  # as long as the library calls it
        library.emu_on_use(self._on_use)

    def mode(self, mode: str | Mode) -> None:
        """Sets the mode of this process: one of `MODES` by its name, or any other."""
        if isinstance(mode, str):
            mode = MODES[mode]
        off = -1.0
        self._library.emu_mode(
            mode.pool,
            mode.one_queue,
            mode.slow_aborts,
            off if mode.ready_s is None else mode.ready_s,
            off if mode.dump_s is None else mode.dump_s,
        )

    def contexts(self) -> dict[int, list[str]]:
        """Returns the devices that have a context, with the names of the threads that set or used them.

        As with CUDA 12, a thread makes a context by setting a device that is not its present one, so also by
        setting device 0 again, where each begins. `torch.accelerator.device_index` sets it again only if it
        has a context. Recording an event, waiting for it and freeing it set the stream's device and the one
        before.
        """
        return {device: list(names) for device, names in sorted(self._contexts.items())}

    def _note_use(self, device: int) -> None:
        # A thread that ends has no entry any more when it frees its events. Threads of torch never have one,
        # and `threading.current_thread` would add it.
        ident = threading.get_ident()
        if thread := threading._active.get(ident):  # type: ignore[attr-defined]
            self._threads[ident] = thread.name
        self._contexts.setdefault(device, []).append(self._threads.get(ident, "one of torch's"))

    def counters(self, *, reset: bool = False) -> dict[str, int]:
        """Returns what was counted since the last reset; what never happened is not there.

        - ``h2d_pinned``, ``h2d_pageable``, ``d2h_pinned``, ``d2h_pageable``, ``d2d``: copies; their bytes are
          ``h2d_pinned_bytes`` and so on
        - ``blocking_copies``: those that the host waited for; ``items``: single values read
        - ``stream_syncs``, ``event_syncs``, ``device_syncs``: waits of the host
        - ``kernels``: operators that a stream ran; ``fallbacks``: those that the host computed
        - ``collectives``; those that are coalesced count as one
        - ``pinned_bytes``: host memory that was newly pinned
        """
        found: dict[str, int] = json.loads(self._library.emu_counters(reset))
        return found

    def faults(self, *, reset: bool = False) -> list[str]:
        """Returns what went wrong so far, one line each, beginning with the kind.

        - ``race``, ``use after free``: operations that no wait puts in order
        - ``host memory``: memory freed or changed before its copy was over
        - ``error``: an operator that failed on its stream
        - ``order``: ranks called different collectives on a communicator
        """
        return [f"{kind}: {message}" for kind, message in json.loads(self._library.emu_faults(reset))]

    def communicators(self) -> list[Communicator]:
        """Returns the communicators of this process, in the order in which they were made."""
        return [Communicator(*each) for each in json.loads(self._library.emu_communicators())]

    def watchdog(self, on: bool) -> None:
        """Has PyTorch's watchdog end the process when a collective is late or a peer of it is gone.

        Off at first: it waits until the communicator is aborted. Never of a communicator that was made while
        the environment had ``TORCH_EMCCL_BLOCKING_WAIT=1``, or ``TORCH_EMCCL_ASYNC_ERROR_HANDLING=0``, which
        ``TORCH_EMCCL_DESYNC_DEBUG=1`` and ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` override.
        """
        self._library.emu_watchdog(on)

    def delay(self, fixed_s: float, *, random_s: float = 0.0, seed: int = 0) -> None:
        """Has every operation begin so much later, and up to `random_s` more, drawn for each stream."""
        self._library.emu_delay(fixed_s, random_s, seed)

    def sleep(self, seconds: float, stream: torch.Stream | None = None) -> None:
        """Has a stream, or the current one, do nothing for some time, as ``torch.cuda._sleep``."""
        self._library.emu_sleep(*_key(stream), seconds)

    @contextlib.contextmanager
    def hold(self, stream: torch.Stream | None = None) -> Iterator[None]:
        """Has a stream, or the current one, do nothing of what is called from here on before the end."""
        hold = self._library.emu_hold(*_key(stream))
        try:
            yield
        finally:
            self._library.emu_let_go(hold)

    def limit(self, device: int, nbytes: int) -> None:
        """Sets how much memory a device has, at most 16 GiB; of more, `torch.OutOfMemoryError` is raised."""
        self._library.emu_limit(device, nbytes)

    def seed(self, device: int, seed: int) -> None:
        """Seeds a device's default generator; `torch.manual_seed` does it for all."""
        self._library.emu_seed(device, seed)

    def random_state(self, device: int) -> torch.Tensor:
        """Returns the state of a device's default generator."""
        state = torch.empty_like(torch.get_rng_state())  # on the CPU it is of the same kind
        self._library.emu_get_random(device, state.data_ptr())
        return state

    def set_random_state(self, device: int, state: torch.Tensor) -> None:
        """Sets the state of a device's default generator."""
        assert state.is_cpu
        assert state.shape == torch.get_rng_state().shape
        self._library.emu_set_random(device, state.contiguous().data_ptr())


def _key(stream: torch.Stream | None) -> tuple[int, int]:
    stream = stream or torch.accelerator.current_stream()
    return stream.device_index, stream.stream_id


@functools.cache
def accelerator() -> Emulator:
    """Loads the emulated accelerator into this process, if it is not, and returns it.

    Raises:
        RuntimeError: It cannot be built, or this process has another accelerator.
    """
    other = torch.accelerator.current_accelerator(check_available=True)
    if other is not None:
        raise RuntimeError(f"this process has an accelerator: {other}")
    from tests.accelerator import build, device_module  # not above: `build` is also a program

    path = str(build.library())
    torch.ops.load_library(path)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device_module)
    dist.Backend.register_backend(BACKEND, _backend, devices=[NAME])
    return Emulator(ctypes.CDLL(path))


def _backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    group = dist.ProcessGroup(store, rank, size)
    torch.ops.emu.attach(group.boxed(), int(timeout.total_seconds() * 1000))
    return group._get_backend(torch.device(NAME))
