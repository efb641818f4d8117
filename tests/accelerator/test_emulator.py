"""The emulated accelerator behaves as a device, and sees the mistakes that it is there for."""

from __future__ import annotations

import ctypes
import signal

import pytest
import torch

from tests.accelerator import POISON, accelerator
from tests.dist.harness import ranks, run_ranks

DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.bool, torch.float64)


def side_stream() -> torch.Stream:
    return torch.Stream(device="emu")


@ranks(1, accelerator=True)
def test_tensors_have_the_values_of_the_cpu(rank: int, world: int) -> None:
    assert torch.accelerator.current_accelerator() == torch.device("emu")
    assert torch.accelerator.device_count() == 4
    for dtype in DTYPES:
        host = torch.arange(24).reshape(2, 3, 4).to(dtype)
        device = host.to("emu:1")
        assert device.device == torch.device("emu:1")
        for of in (
            lambda t: t,
            lambda t: t.transpose(0, 2),
            lambda t: t[:, 1:, ::3],
            lambda t: t.view(-1)[5:],
        ):
            assert of(device).cpu().tolist() == of(host).tolist()
            assert of(device).contiguous().cpu().tolist() == of(host).tolist()
        assert torch.equal(device.view(torch.uint8).cpu(), host.view(torch.uint8))
        assert torch.equal(device.to("emu:3").double().cpu(), host.double())
    numbers = torch.randn(5, dtype=torch.complex64)
    assert torch.equal(numbers.to("emu").conj().cpu(), numbers.conj())
    flat = torch.empty(0, dtype=torch.uint8, device="emu")
    flat.set_(torch.arange(6.0, device="emu").untyped_storage(), 4, (8,), (1,))
    assert flat.cpu().view(torch.float32).tolist() == [1, 2]
    assert accelerator().faults() == []


@ranks(1, accelerator=True)
def test_a_module_learns_on_it_as_on_the_cpu(rank: int, world: int) -> None:
    losses = []
    for device in ("cpu", "emu"):
        torch.manual_seed(1)
        layers = torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)
        module = torch.nn.Sequential(*layers).to(device)
        given = torch.randn(6, 4).to(device)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        accelerator().counters(reset=True)
        for _ in range(5):
            optimizer.zero_grad()
            wanted = torch.zeros(6, dtype=torch.long, device=device)
            loss = torch.nn.functional.cross_entropy(module(given), wanted)
            loss.backward()
            optimizer.step()
        counters = accelerator().counters()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert not {"fallbacks", "blocking_copies", "items", "stream_syncs"} & set(
        counters
    )  # the host never waits
    torch.manual_seed(1)
    first = torch.randn(5, device="emu").cpu()
    torch.manual_seed(1)
    assert torch.equal(torch.randn(5, device="emu").cpu(), first)
    assert accelerator().faults() == []


@ranks(1, accelerator=True)
def test_what_is_called_starts_later_and_copies_say_when(rank: int, world: int) -> None:
    emulator = accelerator()
    tensor = torch.zeros(1000, device="emu")
    pageable, pinned = torch.zeros(1000), torch.zeros(1000, pin_memory=True)
    assert pinned.is_pinned()
    assert pinned[5:].is_pinned()
    assert not pageable.is_pinned()
    emulator.counters(reset=True)
    with emulator.hold():
        tensor += 1
        came = torch.Event("emu")
        for host in (pageable, pinned):
            host.copy_(tensor, non_blocking=True)
        came.record()
        assert not came.query()
        assert pageable.sum() == pinned.sum() == 0  # too early
    came.synchronize()
    assert pageable.sum() == pinned.sum() == 1000
    tensor.copy_(torch.full((1000,), 7.0))
    tensor.clone()
    assert tensor[3].item() == 7
    torch.accelerator.synchronize()
    counters = emulator.counters()
    assert {name: counters[name] for name in counters if "bytes" not in name} == {
        "kernels": 1, "d2h_pageable": 1, "d2h_pinned": 1, "event_syncs": 1, "h2d_pageable": 1,
        "blocking_copies": 1, "d2d": 1, "items": 1, "device_syncs": 1,
    }  # fmt: skip
    assert counters["d2h_pinned_bytes"] == 4000
    assert emulator.faults() == []


@ranks(1, accelerator=True)
def test_a_missing_wait_gives_wrong_bytes_and_a_fault(rank: int, world: int) -> None:
    emulator = accelerator()
    stream = side_stream()
    tensor = torch.zeros(1000, device="emu")
    torch.accelerator.synchronize()
    with emulator.hold():
        tensor += 1
        with stream:
            assert tensor.sum().item() == 0
    (fault,) = set(emulator.faults(reset=True))
    assert fault.startswith("race: aten::sum on stream 1 of device 0 reads what aten::add on stream 0")
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        assert tensor.sum().item() == 1000
        tensor[:500] += 1
    tensor[500:] += 1  # other bytes
    torch.accelerator.synchronize()
    assert tensor.sum().item() == 2000
    assert emulator.faults() == []


@ranks(1, accelerator=True)
def test_freed_memory_is_another_ones(rank: int, world: int) -> None:
    emulator = accelerator()
    stream = side_stream()

    def used_late(recorded: bool) -> tuple[bool, set[float]]:
        tensor = torch.zeros(1000, device="emu")
        address = tensor.data_ptr()
        stream.wait_stream(torch.accelerator.current_stream())
        with emulator.hold(stream):
            with stream:
                copy = tensor.clone()
            if recorded:
                tensor.record_stream(stream)
            del tensor
            again = torch.empty(1000, device="emu")
            torch.accelerator.current_stream().synchronize()
        with stream:
            values = set(copy.cpu().tolist())
        return again.data_ptr() == address, values

    poison = torch.full((4,), POISON, dtype=torch.uint8).view(torch.float32).item()
    assert used_late(recorded=True) == (False, {0.0})
    assert emulator.faults() == []
    assert used_late(recorded=False) == (True, {poison})
    (fault,) = emulator.faults()
    assert fault.startswith("use after free: free on stream 0 of device 0 writes what copy on stream 1")


@ranks(1, accelerator=True)
def test_host_memory_that_goes_before_its_copy(rank: int, world: int) -> None:
    emulator = accelerator()
    with emulator.hold():
        up = torch.ones(1000).to("emu", non_blocking=True)
        changed = torch.ones(1000)
        wrong = changed.to("emu", non_blocking=True)
        changed.fill_(2)
        pinned = torch.ones(1000).pin_memory()
        right = pinned.to("emu", non_blocking=True)
        address = pinned.data_ptr()
        del pinned
        assert torch.empty(1000, pin_memory=True).data_ptr() != address
    assert set(up.view(torch.uint8).tolist()) == {POISON}
    assert set(wrong.tolist()) == {2}
    assert set(right.tolist()) == {1}
    assert emulator.faults() == ["host memory: a copy to the device began after its host memory was freed"]


def touch_device_memory(rank: int, world: int) -> None:
    ctypes.string_at(torch.ones(3, device="emu").data_ptr(), 4)


@pytest.mark.emulated
def test_a_host_that_touches_device_memory_dies() -> None:
    run_ranks(touch_device_memory, 1, accelerator=True, dies={0: signal.SIGSEGV})


@ranks(1, accelerator=True)
def test_memory_is_counted_and_ends(rank: int, world: int) -> None:
    before = torch.accelerator.memory_allocated()
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device="emu")
    assert torch.accelerator.memory_allocated() == before + (1 << 20)
    accelerator().limit(0, before + (2 << 20))
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 << 20, dtype=torch.uint8, device="emu")
    del tensor
    torch.empty(2 << 20, dtype=torch.uint8, device="emu")
    assert torch.accelerator.max_memory_allocated() >= 2 << 20


@ranks(1, accelerator=True)
def test_what_fails_on_a_stream_is_told_at_the_next_wait(rank: int, world: int) -> None:
    table, index = torch.ones(3, 2, device="emu"), torch.tensor([7], device="emu")
    table.index_select(0, index)
    with pytest.raises(RuntimeError, match="index out of range"):
        torch.accelerator.synchronize()
    assert accelerator().faults()[0].startswith("error: stream 0 of device 0: index out of range")
