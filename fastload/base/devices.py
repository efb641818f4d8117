"""Accelerators through torch's common interface: devices, streams, copies, pinned memory.

Two rules hold wherever fastload uses devices. The host waits for them by polling, so that every wait has a
deadline. And streams are kept: a device has few, which torch hands out in turn to everybody, so that any of
them may be in use by somebody else, too.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache

import torch
from torch import Tensor

from fastload.errors import DeadlineExceeded, Interrupted, OptionError

_LONGEST_PAUSE_S = 0.001


def parse_device(device: torch.device | str) -> torch.device:
    """Returns a device that a user named.

    Raises:
        OptionError: torch has no such device type.
    """
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"device={device!r}: {error}") from None


def is_accelerator(device: torch.device) -> bool:
    """Whether a device has its own memory and streams."""
    return device.type not in ("cpu", "meta")


def accelerators_of(tensors: Iterable[Tensor]) -> list[torch.device]:
    """Returns the accelerators that tensors are on, sorted.

    Raises:
        OptionError: torch does not serve one of them; see `with_index`.
    """
    devices = {tensor.device for tensor in tensors}
    return [with_index(device) for device in sorted(filter(is_accelerator, devices), key=str)]


def with_index(device: torch.device) -> torch.device:
    """Returns a device with an index, by default the current one; ``cpu`` is returned unchanged.

    Raises:
        OptionError: It is not a device of the accelerator that torch serves in this process.
    """
    if not is_accelerator(device):
        return device
    served = torch.accelerator.current_accelerator()
    if served is None or served.type != device.type:
        instead = f", but {served.type}" if served is not None else ""
        raise OptionError(
            f"device='{device}': torch supports no {device.type} device in this process{instead}"
        )
    count = torch.accelerator.device_count()
    index = device.index if device.index is not None else _current_index(count)
    if index >= count:
        raise OptionError(
            f"device='{device}': torch sees {count or 'no'} {device.type} device{'s' * (count > 1)}"
        )
    return torch.device(device.type, index)


def _current_index(count: int) -> int:
    return torch.accelerator.current_device_index() if count else 0


@cache
def can_pin() -> bool:
    """Whether host memory can be page-locked for asynchronous copies to the accelerator."""
    try:
        return torch.empty(1, dtype=torch.uint8, device="cpu", pin_memory=True).is_pinned()
    except (RuntimeError, NotImplementedError):
        return False


def copy_async(source: Tensor, out: Tensor) -> None:
    """Copies a tensor, on the current stream if a device is involved; blocks only for pageable host memory.

    Neither torch nor the drivers promise when an asynchronous copy reads or writes pageable memory.
    """
    on_host = [tensor for tensor in (source, out) if tensor.is_cpu]
    out.copy_(source, non_blocking=not on_host or (len(on_host) == 1 and on_host[0].is_pinned()))


def _never() -> bool:
    return False


def poll(
    is_over: Callable[[], bool], what: str, limit_s: float, give_up: Callable[[], bool] = _never
) -> None:
    """Waits until something is over.

    Args:
        is_over: Polled; at first every few microseconds, later every millisecond.
        what: What it is, for messages.
        limit_s: Longest wait in seconds.
        give_up: Polled; True ends the wait.

    Raises:
        DeadlineExceeded: It took too long.
        Interrupted: `give_up` returned True.
    """
    began, pause_s = time.monotonic(), 0.0
    # `give_up` first: a rank that never has to wait must also notice that another one has failed.
    while not (lost := give_up()) and not is_over():
        if time.monotonic() - began > limit_s:
            raise DeadlineExceeded(f"{what} did not end within {limit_s:.1f} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s + 10e-6, _LONGEST_PAUSE_S)
    if lost:
        raise Interrupted("another rank failed")


def synchronize(stream: torch.Stream, limit_s: float, give_up: Callable[[], bool] = _never) -> None:
    """Waits for the work queued on a stream; arguments and errors are those of `poll`."""
    with use_stream(stream):
        # An event: the stream itself may be given more work meanwhile.
        poll(stream.record_event().query, f"the work queued on {stream.device}", limit_s, give_up)


def follow(devices: Iterable[torch.device]) -> Callable[[], bool]:
    """Returns a function that tells whether the work queued so far on this thread's current streams is over.

    Args:
        devices: The accelerators.
    """
    events = []
    for device in devices:
        with use_stream(stream := torch.accelerator.current_stream(device)):
            events.append(stream.record_event())
    return lambda: all(event.query() for event in events)


_streams: defaultdict[torch.device, list[torch.Stream]] = defaultdict(list)  # that nobody uses now


def take_stream(device: torch.device) -> torch.Stream:
    """Returns a stream of a device, for `give_back_streams` later.

    On CUDA, torch has a pool of streams for each priority. Programs take theirs from those of 0 and -1, and
    torch's process groups from those of 0 and -3.
    """
    try:
        return _streams[device].pop()
    except IndexError:
        return torch.Stream(device, priority=-2)


def give_back_streams(streams: Iterable[torch.Stream]) -> None:
    """Keeps streams for the next `take_stream`; all their work has ended."""
    for stream in streams:
        _streams[stream.device].append(stream)


def use_stream(stream: torch.Stream) -> AbstractContextManager[None]:
    """Makes a stream and its device current in this thread, for a while."""
    return DeviceStreams([stream]).current()


def own_device() -> int | None:
    """Returns the index of this thread's current device; None if this process uses no accelerator."""
    served = torch.accelerator.current_accelerator()
    if served is None:
        return None
    module = torch.get_device_module(served)
    if not getattr(module, "is_initialized", torch.accelerator.is_available)():
        return None  # asking would start it
    return torch.accelerator.current_device_index()


def adopt_device(index: int | None) -> None:
    """Makes the current device of another thread that of this one, which is new.

    A new thread has device 0, and torch starts that wherever it returns to it, also when an event of another
    device is recorded or freed. That would take half a gigabyte of GPU 0 for each other rank of the host.
    """
    if index is not None:
        torch.accelerator.set_device_index(index)


def _return_to(index: int) -> None:
    """Makes a device current again in this thread, without starting it if this process does not use it."""
    maybe_exchange: Callable[[int], object] | None = getattr(
        torch._C, "_accelerator_maybeExchangeDevice", None
    )
    if maybe_exchange is None and torch.cuda.is_available():  # torch 2.6 and 2.7
        maybe_exchange = torch.cuda._maybe_exchange_device
    (maybe_exchange or torch.accelerator.set_device_index)(index)


def record_use(tensor: Tensor) -> None:
    """Keeps a device tensor's memory from being reused before this thread's current stream has used it."""
    if is_accelerator(tensor.device):
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))


class DeviceStreams:
    """One stream on each of some accelerators, for helper threads that use tensors on them.

    Current streams are per thread. A helper thread starts on the default stream, which does not wait for the
    kernels that produce the caller's tensors.

    Args:
        streams: The streams.
    """

    def __init__(self, streams: Iterable[torch.Stream]) -> None:
        self._streams = list(streams)

    @classmethod
    def of_caller(cls, devices: Iterable[torch.device]) -> DeviceStreams:
        """Returns the current streams of this thread on accelerators, which are given with their indexes."""
        return cls(torch.accelerator.current_stream(device) for device in devices)

    def __bool__(self) -> bool:
        return bool(self._streams)

    @property
    def devices(self) -> list[torch.device]:
        """Their accelerators."""
        return [stream.device for stream in self._streams]

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes them current in this thread."""
        if not self._streams:
            yield
            return
        device_before = torch.accelerator.current_device_index()
        before = [torch.accelerator.current_stream(stream.device) for stream in self._streams]
        for stream in self._streams:
            torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            for stream in before:
                torch.accelerator.set_stream(stream)
            _return_to(device_before)

    def for_copies(self) -> DeviceStreams:
        """Returns other streams on the same devices, which begin after the work queued on these.

        They are the same ones for each call, so what waits for one copy waits for everything before it, too.
        """
        copying = [_copy_stream(stream.device) for stream in self._streams]
        for stream, after in zip(copying, self._streams, strict=True):
            stream.wait_stream(after)
        return DeviceStreams(copying)

    def hold_caller(self) -> None:
        """Has this thread's current streams wait for the work queued on these; the host does not wait."""
        for stream in self._streams:
            torch.accelerator.current_stream(stream.device).wait_stream(stream)

    def synchronize(self, limit_s: float) -> None:
        """Waits for the work queued on them; limit and error are those of `synchronize`."""
        for stream in self._streams:
            synchronize(stream, limit_s)


@cache
def _copy_stream(device: torch.device) -> torch.Stream:
    """The stream of a device for copies in the background."""
    return take_stream(device)
