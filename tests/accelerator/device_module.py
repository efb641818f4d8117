"""`torch.emu`: what torch looks for in the module of a device, and what of `torch.cuda` programs know."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

Stream, Event = torch.Stream, torch.Event
_Device = Any  # a device, its name, its number or None: the current one


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None: ...


def device_count() -> int:
    return torch._C._accelerator_hooks_device_count()


def _number(device: _Device) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def current_device() -> int:
    return torch._C._accelerator_getDeviceIndex()


def set_device(device: _Device) -> None:
    torch._C._accelerator_setDeviceIndex(_number(device))


@contextlib.contextmanager
def device(device: _Device) -> Iterator[None]:
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def get_device_name(device: _Device = None) -> str:
    return "emulated"


def current_stream(device: _Device = None) -> torch.Stream:
    return torch._C._accelerator_getStream(_number(device))


def default_stream(device: _Device = None) -> torch.Stream:
    kind = torch.Stream(device=f"emu:{_number(device)}").device_type
    return torch.Stream(stream_id=0, device_index=_number(device), device_type=kind)


def set_stream(stream: torch.Stream) -> None:
    torch._C._accelerator_setStream(stream)


def stream(stream: torch.Stream | None) -> Any:
    return contextlib.nullcontext() if stream is None else stream


def synchronize(device: _Device = None) -> None:
    torch._C._accelerator_synchronizeDevice(_number(device))


def manual_seed(seed: int) -> None:
    _seed(current_device(), seed)


def manual_seed_all(seed: int) -> None:
    for number in range(device_count()):
        _seed(number, seed)


def _seed(number: int, seed: int) -> None:
    from tests.accelerator import accelerator

    accelerator().seed(number, seed)


def get_rng_state(device: _Device = None) -> torch.Tensor:
    from tests.accelerator import accelerator

    return accelerator().random_state(_number(device))


def set_rng_state(state: torch.Tensor, device: _Device = None) -> None:
    from tests.accelerator import accelerator

    accelerator().set_random_state(_number(device), state)


def empty_cache() -> None:
    torch._C._accelerator_emptyCache()


def memory_allocated(device: _Device = None) -> int:
    return torch.accelerator.memory_allocated(_number(device))


def max_memory_allocated(device: _Device = None) -> int:
    return torch.accelerator.max_memory_allocated(_number(device))


def reset_peak_memory_stats(device: _Device = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_number(device))


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_number(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]
