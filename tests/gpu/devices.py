"""Test bodies on ranks with an accelerator: the emulated one, and CUDA where there are enough devices."""

from __future__ import annotations

import inspect
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from tests.accelerator import MODES, NAME, accelerator
from tests.dist.harness import ranks
from tests.dist.patience import patient
from tests.dist.test_sharded_failures import before_reads
from tests.gpu import one_gpu

__all__ = ["Devices", "on_devices"]

BACKENDS = {NAME: "emccl", "cuda": "nccl"}
_WANTED_MODES = "FASTLOAD_TEST_MODES"  # environment: "all", or names of `MODES` with commas
_TIMEOUT_S = 60.0


class Devices:
    """The accelerator of one rank.

    Attributes:
        device: This rank's device.
        backend: What moves data between the devices of ranks.
        emulated: Whether it is the emulated one, which counts copies and finds races.
        mode: Its mode; empty of another one.
    """

    def __init__(self, kind: str, rank: int, mode: str) -> None:
        self.emulated = kind == NAME
        self.mode = mode
        self.backend = BACKENDS[kind]
        index = rank % torch.accelerator.device_count()
        torch.accelerator.set_device_index(index)
        self.device = torch.device(kind, index)
        if self.emulated:
            accelerator().watchdog(True)

    def slow(self, seed: int, *, longest_s: float = 0.003) -> None:
        """Has what streams do begin later, each time by another while."""
        if self.emulated:
            if self.mode == "one queue":  # in which delays of several streams add up
                longest_s /= 10
            accelerator().delay(0.0, random_s=longest_s, seed=seed)

    def busy(self, seconds: float) -> None:
        """Keeps the current stream busy."""
        if self.emulated:
            accelerator().sleep(seconds)
        else:
            torch.cuda._sleep(int(seconds * 1e9))  # clocks

    @contextmanager
    def held(self) -> Iterator[None]:
        """Has the current stream do nothing before the end; on CUDA keeps it busy for a while."""
        if self.emulated:
            with accelerator().hold():
                yield
        else:
            self.busy(4.0)  # at less than a second for each 2e9 clocks
            yield

    def counts(self) -> dict[str, int]:
        """Returns what the emulated accelerator has counted since the last call; nothing of another one."""
        return accelerator().counters(reset=True) if self.emulated else {}

    @contextmanager
    def aside(self) -> Iterator[torch.Stream]:
        """Makes a new stream the current one."""
        before, stream = torch.accelerator.current_stream(self.device), torch.Stream(self.device)
        stream.wait_stream(before)
        torch.accelerator.set_stream(stream)
        try:
            yield stream
        finally:
            torch.accelerator.set_stream(before)
            before.wait_stream(stream)

    @contextmanager
    def no_allocations_once_reading(self) -> Iterator[None]:
        """On the emulated accelerator, there is no more device memory from the first read on."""
        if not self.emulated:
            yield
            return
        index = self.device.index

        def limit(*_: object) -> None:
            accelerator().limit(index, torch.accelerator.memory_reserved(index))

        with pytest.MonkeyPatch.context() as patch:
            before_reads(patch, limit)
            yield
        accelerator().limit(index, 1 << 34)

    def check_group(self) -> None:
        """Reduces something in the caller's own group: it works, and nobody else has used it."""
        ones = torch.ones(1000, device=self.device)
        dist.all_reduce(ones)
        assert ones.cpu().unique().tolist() == [dist.get_world_size()]

    def check_faults(self) -> None:
        """On the emulated accelerator nothing has touched memory in the wrong order."""
        if self.emulated:
            assert accelerator().faults() == []

    def forget_faults(self) -> None:
        """Forgets that memory was touched in the wrong order, on purpose."""
        if self.emulated:
            accelerator().faults(reset=True)

    def cut(self, tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
        """Cuts a host tensor as `distribute_tensor` does, there, and takes the parts to the device."""
        usable = [one if getattr(one, "dim", -1) < tensor.dim() else Replicate() for one in placements]
        host_mesh = DeviceMesh("cpu", mesh.mesh)
        bits = tensor if tensor.dtype != torch.float8_e4m3fn else tensor.view(torch.uint8)
        local = distribute_tensor(bits, host_mesh, usable, src_data_rank=None).to_local().view(tensor.dtype)
        return DTensor.from_local(
            local.to(self.device), mesh, usable, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )


def on_devices(
    *worlds: int, only_emulated: bool = False, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Makes a test of a body ``(devices, rank, world, **fixtures)``, for each accelerator and world size.

    Options are those of `harness.ranks`, and `only_emulated` if a test needs a limit or a fault that only the
    emulated accelerator has. The default process group of the ranks has Gloo for host memory and
    the accelerator's backend for devices. On the emulated accelerator the test fails if anything touched
    memory in the wrong order, even if no byte was wrong, and if a rank made a context on a device of another
    one. It runs in one mode, which depends on its name and is in its output, or in those that the environment
    names as FASTLOAD_TEST_MODES.
    """

    def decorate(body: Callable[..., Any]) -> Any:
        names = [
            name for name in inspect.signature(body).parameters if name not in ("devices", "rank", "world")
        ]

        def on_rank(rank: int, world: int, kind: str, device_mode: str, **fixtures: Any) -> Any:
            with _entered(kind, device_mode, rank, world) as mode:
                return body(devices=Devices(kind, rank, mode), rank=rank, world=world, **fixtures)

        parameters = [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY)
            for n in ("rank", "world", "kind", "device_mode", *names)
        ]
        on_rank.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        on_rank.__module__, on_rank.__qualname__ = body.__module__, body.__qualname__
        on_rank.__name__, on_rank.__doc__ = body.__name__, body.__doc__
        on_rank.pytestmark = getattr(body, "pytestmark", [])  # type: ignore[attr-defined]
        kinds = [
            pytest.param(NAME, mode, id=f"emulated {mode}".rstrip(), marks=pytest.mark.emulated)
            for mode in _modes()
        ]
        if not only_emulated:
            kinds.append(pytest.param("cuda", "", id="cuda", marks=pytest.mark.gpu))
        return pytest.mark.parametrize(("kind", "device_mode"), kinds)(ranks(*worlds, **options)(on_rank))

    return decorate


def _modes() -> list[str]:
    """Returns the modes that each test runs in; an empty one depends on the test's name."""
    named = os.environ.get(_WANTED_MODES, "")
    return list(MODES) if named == "all" else named.split(",")


def _mode_of_test() -> str:
    test, _, _ = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")
    return list(MODES)[zlib.crc32(test.encode()) % len(MODES)]


@contextmanager
def _entered(kind: str, mode: str, rank: int, world: int) -> Iterator[str]:
    """Enters the process group of a test; the context is the mode of the emulated accelerator."""
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    if kind == NAME:
        mode = mode or _mode_of_test()
        print(f"the mode of the emulated accelerator: {mode}", flush=True)
        accelerator().mode(mode)
    elif one_gpu.is_on():
        one_gpu.enter(rank)
    dist.init_process_group(
        f"cpu:gloo,{kind}:{BACKENDS[kind]}",
        store=dist.PrefixStore("devices", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=patient(_TIMEOUT_S)),
    )
    yield mode
    if kind == NAME:
        assert accelerator().faults() == []
        own = rank % torch.accelerator.device_count()
        elsewhere = {device: names for device, names in accelerator().contexts().items() if device != own}
        assert not elsewhere, f"contexts on other ranks' devices, by threads: {elsewhere}"
