"""The emulated accelerator behaves as a device, and sees the mistakes that it is there for."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from tests.accelerator import MODES, POISON, accelerator
from tests.dist.harness import ranks, run_ranks
from tests.dist.patience import patient

DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.bool, torch.float64)


def side_stream() -> torch.Stream:
    return torch.Stream(device="emu")


def start(call: Callable[..., object], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=call, args=args, name="helper", daemon=True)
    thread.start()
    return thread


def make_group() -> Any:
    """Returns the communicator of a new group of all ranks."""
    return dist.new_group(backend="emccl")._get_backend(torch.device("emu"))


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
        freed = torch.ones(1000).to("emu", non_blocking=True)
        source = torch.ones(1000)
        changed = source.to("emu", non_blocking=True)
        source.fill_(2)
        pinned = torch.ones(1000).pin_memory()
        kept = pinned.to("emu", non_blocking=True)
        address = pinned.data_ptr()
        del pinned
        assert torch.empty(1000, pin_memory=True).data_ptr() != address
        back = torch.zeros(1000, pin_memory=True)
        back.copy_(kept, non_blocking=True)
        again = back.to("emu", non_blocking=True)
    assert set(freed.view(torch.uint8).tolist()) == {POISON}
    assert set(changed.tolist()) == {2}
    assert set(kept.tolist()) == set(again.tolist()) == {1}
    assert emulator.faults() == [
        "host memory: a copy to the device began after its host memory was freed",
        "host memory: a copy to the device read its host memory after that had changed",
    ]


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


@ranks(1, 3, accelerator=True)
def test_collectives_have_the_values_of_gloo(rank: int, world: int) -> None:
    torch.accelerator.set_device_index(rank)
    results = []
    for device in ("cpu", "emu"):
        own = torch.arange(6.0, device=device).add(rank).view(2, 3)
        found = [own.clone() for _ in range(6)]
        dist.all_reduce(found[0])
        dist.all_reduce(found[1], op=dist.ReduceOp.MAX)
        dist.broadcast(found[2], src=world - 1)
        dist.reduce(found[3], dst=0)
        gathered = [torch.empty(2, 3, device=device) for _ in range(world)]
        dist.all_gather(gathered, own.bfloat16().float())
        single = torch.empty(2 * world, 3, device=device)
        dist.all_gather_single(single, own)
        scattered = torch.empty(2, 3, device=device)
        dist.reduce_scatter_single(scattered, single)
        exchanged = torch.empty(world, 3, device=device)
        dist.all_to_all_single(exchanged, own[:1].repeat(world, 1))
        if world > 1:
            requests = [
                dist.P2POp(dist.isend, own, (rank + 1) % world),
                dist.P2POp(dist.irecv, found[4], (rank - 1) % world),
            ]
            for request in dist.batch_isend_irecv(requests):
                request.wait()
        objects: list[int] = [0] * world
        dist.all_gather_object(objects, rank)
        assert objects == list(range(world))
        dist.barrier()
        if rank != 0:
            del found[3]  # undefined but at the root
        results.append([t.tolist() for t in (*found, *gathered, single, scattered, exchanged)])
    assert results[0] == results[1]
    flat = torch.full((2,), 1.0 + rank, device="emu")
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    assert flat.tolist() == [(world + 1) / 2] * 2
    with dist._coalescing_manager(device=torch.device("emu", rank), async_ops=True) as together:
        uneven = [torch.empty(1 + r, device="emu") for r in range(world)]
        dist.all_gather(uneven, torch.full((1 + rank,), float(rank), device="emu"))
    together.wait()
    assert [t.tolist() for t in uneven] == [[r] * (1 + r) for r in range(world)]
    assert accelerator().faults() == []


@ranks(2, accelerator=True)
def test_a_collective_keeps_its_stream_and_not_the_host(rank: int, world: int) -> None:
    emulator = accelerator()
    dist.all_reduce(torch.ones(1, device="emu"))
    tensor = torch.ones(1000, device="emu")
    torch.accelerator.synchronize()
    with emulator.hold():
        tensor += rank
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        tensor *= 2
        assert not work.is_completed()
        assert not torch.accelerator.current_stream().query()
    assert set(tensor.tolist()) == {6}
    assert emulator.faults() == []
    with emulator.hold():
        tensor += 1
        work = dist.all_reduce(tensor, async_op=True)
    tensor.sum()
    (fault,) = emulator.faults()
    assert fault.startswith("race: aten::sum on stream 0 of device 0 reads what ALLREDUCE on stream 1")
    work.wait()


@ranks(2, accelerator=True)
def test_what_a_collective_only_reads_may_be_read_by_others(rank: int, world: int) -> None:
    """The root of a broadcast, and the own part of an all-gather in place."""
    emulator = accelerator()
    whole = torch.arange(6.0, device="emu")
    own = whole[3 * rank : 3 * rank + 3]
    number = torch.full((1,), float(rank), device="emu")
    works = [dist.all_gather_single(whole, own, async_op=True), dist.broadcast(number, 0, async_op=True)]
    assert own.tolist() == [3 * rank, 3 * rank + 1, 3 * rank + 2]
    if rank == 0:
        assert number.item() == 0
    assert emulator.faults() == []
    for work in works:
        work.wait()
    assert whole.tolist() == list(range(6))
    assert number.item() == 0
    assert emulator.faults() == []


@ranks(2, accelerator=True)
def test_ranks_that_call_different_collectives_hang_until_they_abort(rank: int, world: int) -> None:
    emulator = accelerator()
    group = dist.new_group(backend="emccl")
    backend = group._get_backend(torch.device("emu"))
    calls = [lambda t: dist.all_reduce(t, group=group), lambda t: dist.broadcast(t, 0, group=group)]
    tensor = torch.ones(10, device="emu")
    threads = [threading.Thread(target=call, args=(tensor.clone(),)) for call in calls]
    for thread in threads if rank == 0 else reversed(threads):
        thread.start()
        thread.join()
    (own,) = (each for each in emulator.communicators() if each.name == group.group_name)
    assert (own.num_operations, own.num_threads) == (2, 2)
    last = torch.Event("emu")
    last.record()
    while not emulator.faults():
        time.sleep(0.01)
    assert not last.query()
    assert "order: communicator" in emulator.faults()[0]
    assert "ALLREDUCE" in emulator.faults()[0]
    assert "BROADCAST" in emulator.faults()[0]
    backend.abort()
    last.synchronize()
    with pytest.raises(RuntimeError, match="aborted"):
        dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor)  # another communicator works
    assert tensor.tolist() == [2] * 10


@pytest.mark.emulated
@pytest.mark.parametrize("watched", [False, True])
def test_a_rank_that_is_gone_leaves_the_others_hanging(watched: bool) -> None:
    dies = {0: signal.SIGKILL} | ({1: signal.SIGABRT} if watched else {})
    run_ranks(lose_a_rank, 2, accelerator=True, dies=dies, watched=watched)


def lose_a_rank(rank: int, world: int, watched: bool) -> None:
    emulator = accelerator()
    emulator.watchdog(watched)
    tensor = torch.ones(10, device="emu")
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(tensor, async_op=True)
    with pytest.raises(RuntimeError, match="timeout"):
        work.wait(timedelta(seconds=0.2))
    assert not work.is_completed()
    if watched:
        time.sleep(30)
    group = dist.distributed_c10d._get_default_group()
    group._get_backend(torch.device("emu")).abort()
    torch.accelerator.synchronize()
    assert work.is_completed()
    assert set(tensor.view(torch.uint8).tolist()) == {POISON}


@ranks(2, accelerator=True)
def test_modules_are_sharded_on_it(rank: int, world: int) -> None:
    torch.accelerator.set_device_index(rank)
    mesh = init_device_mesh("emu", (world,))
    losses = []
    for device in ("cpu", "emu"):
        torch.manual_seed(1)
        module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(device)
        given = torch.randn(6, 4).to(device)
        if device == "emu":
            for layer in module:
                fully_shard(layer, mesh=mesh)
            fully_shard(module, mesh=mesh)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            loss = module(given).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    weight = module[0].weight
    assert weight.to_local().device == torch.device("emu", rank)
    assert weight.full_tensor().shape == (8, 4)
    spread = distribute_tensor(torch.arange(8.0, device="emu"), mesh, [Shard(0)])
    assert spread.to_local().tolist() == [0.0 + 4 * rank, 1 + 4 * rank, 2 + 4 * rank, 3 + 4 * rank]
    assert accelerator().faults() == []


@ranks(1, accelerator=True)
def test_streams_come_in_turn_from_a_pool_for_each_priority(rank: int, world: int) -> None:
    def next_streams(count: int, priority: int = 0, device: str = "emu:0") -> list[int]:
        return [torch.Stream(device, priority=priority).stream_id for _ in range(count)]

    normal, high = next_streams(65), next_streams(33, priority=-1)
    assert normal[:33] == normal[32:]
    assert high[0] == high[32]
    assert len({*normal, *high}) == 64
    assert next_streams(1, device="emu:1") == [1]
    accelerator().mode("few streams")
    (first,) = next_streams(1)
    dist.all_reduce(torch.ones(1, device="emu"))  # of which the communicator takes the second
    assert next_streams(1) == [first]
    (first,) = next_streams(1, priority=-1)
    os.environ["TORCH_EMCCL_HIGH_PRIORITY"] = "1"
    make_group().eager_connect_single_device(torch.device("emu", 0))
    assert next_streams(1, priority=-1) == [first]


@ranks(1, accelerator=True)
@pytest.mark.parametrize("one_queue", [False, True])
def test_one_hardware_queue_keeps_the_order_of_launches(rank: int, world: int, one_queue: bool) -> None:
    """What runs keeps no other stream waiting; what cannot begin yet does."""
    emulator = accelerator()
    emulator.mode("one queue" if one_queue else "plain")
    busy, other = side_stream(), side_stream()

    def end_of_launch() -> torch.Event:
        with other:
            torch.zeros(1, device="emu")
        return other.record_event()

    with emulator.hold(busy):
        end_of_launch().synchronize()
        end = busy.record_event()  # of what runs
        end_of_launch().synchronize()
        torch.accelerator.current_stream().wait_event(end)
        behind = end_of_launch()
        if not one_queue:
            behind.synchronize()
        time.sleep(0.05)
        assert behind.query() != one_queue
    behind.synchronize()
    with emulator.hold(busy):
        with busy:
            torch.zeros(1, device="emu")
        behind = end_of_launch()
        if not one_queue:
            behind.synchronize()
        time.sleep(0.05)
        assert behind.query() != one_queue
    behind.synchronize()
    assert emulator.faults() == []


@ranks(2, accelerator=True)
@pytest.mark.parametrize("mode", ["plain", "slow aborts"])
def test_an_abort_waits_for_the_device(rank: int, world: int, mode: str) -> None:
    """Also for the kernel of another communicator, which is aborted at the same time, not afterwards."""
    torch.accelerator.set_device_index(rank)
    first, second = make_group(), make_group()
    for group in (first, second):
        group.allreduce([torch.ones(1, device="emu")]).wait()
    torch.accelerator.synchronize()
    accelerator().mode(mode)
    if rank == 0:
        for group in (first, second):
            group.allreduce([torch.ones(1, device="emu")])
        aborting = start(first.abort)
        if mode == "slow aborts":
            aborting.join(0.1)
            assert aborting.is_alive()
        else:
            aborting.join()
        second.abort()
        aborting.join()
        torch.accelerator.synchronize()
    dist.barrier()


def restore_by_setting() -> None:
    torch.accelerator.set_device_index(1)
    torch.accelerator.set_device_index(0)


def restore_by_a_guard() -> None:
    with torch.accelerator.device_index(1):
        torch.ones(1, device="emu")
    assert torch.accelerator.current_device_index() == 0


def restore_in_an_operator() -> None:
    torch.ones(1, device="emu:1").add(1).cpu()
    torch.Stream("emu:1").synchronize()
    torch.ones(1).pin_memory()


def restore_after_an_event() -> None:
    torch.Event("emu:1").record(torch.Stream("emu:1"))


def use_after_a_guard() -> None:
    restore_by_a_guard()
    torch.ones(1, device="emu")


CONTEXTS = {
    restore_by_setting: {0, 1},
    restore_by_a_guard: {1},
    restore_in_an_operator: {1},
    restore_after_an_event: {0, 1},
    use_after_a_guard: {0, 1},
}


@ranks(1, accelerator=True)
@pytest.mark.parametrize("call", CONTEXTS)
def test_contexts_are_made_as_by_cuda(rank: int, world: int, call: Callable[[], None]) -> None:
    """By a thread that begins on device 0, in a process that uses device 1."""
    emulator = accelerator()
    torch.accelerator.set_device_index(1)
    torch.accelerator.set_device_index(1)
    assert emulator.contexts() == {1: ["MainThread"]}
    start(call).join()
    assert emulator.contexts().keys() == CONTEXTS[call]
    assert emulator.contexts()[1] == ["MainThread", "helper"]
    assert emulator.contexts().get(0, ["helper"]) == ["helper"]


@ranks(2, accelerator=True)
def test_a_communicator_that_gets_ready_in_the_background(rank: int, world: int) -> None:
    accelerator().mode("slow aborts")
    group = make_group()
    if rank == 1:
        dist.distributed_c10d._get_default_store().wait(["connects"])
    group.eager_connect_single_device(torch.device("emu", 0))
    if rank == 0:
        dist.distributed_c10d._get_default_store().set("connects", "")
    tensor = torch.ones(1, device="emu")
    group.allreduce([tensor]).wait()
    assert tensor.item() == 2


@ranks(2, accelerator=True, dies={1: signal.SIGKILL})
def test_an_abort_waits_behind_a_call_that_waits_for_a_rank(rank: int, world: int) -> None:
    accelerator().mode("slow aborts")
    os.environ["TORCH_EMCCL_NONBLOCKING_TIMEOUT"] = "2"
    group, unused = make_group(), make_group()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for each in (group, unused):
        each.eager_connect_single_device(torch.device("emu", 0))
    errors = []

    def call() -> None:
        try:
            group.allreduce([torch.ones(1, device="emu")])
        except RuntimeError as error:
            errors.append(str(error))

    calling = start(call)
    time.sleep(patient(0.5))  # it waits by now
    group.abort()
    calling.join()
    assert "not ready in time" in errors[0]
    unused.abort()  # nobody is in the way
    with pytest.raises(RuntimeError, match="aborted"):
        unused.allreduce([torch.ones(1, device="emu")])


@ranks(1, accelerator=True)
def test_a_group_that_stays_open_keeps_all_calls_of_its_thread(rank: int, world: int) -> None:
    first, second = make_group(), make_group()
    given, taken = torch.ones(3, device="emu"), torch.zeros(3, device="emu")
    first._start_coalescing()
    with pytest.raises(RuntimeError, match="contiguous"):
        first._allgather_base(taken, torch.ones(3, 2, device="emu")[:, 0])
    work = second._allgather_base(taken, given)
    work.wait()
    torch.accelerator.synchronize()
    assert work.is_completed()
    assert taken.tolist() == [0, 0, 0]
    elsewhere = torch.zeros(3, device="emu")
    start(lambda: second._allgather_base(elsewhere, given).wait()).join()
    torch.accelerator.synchronize()
    assert elsewhere.tolist() == [1, 1, 1]
    first._end_coalescing()
    torch.accelerator.synchronize()
    assert taken.tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="not opened"):
        first._end_coalescing()


def fail_in_one_group(rank: int, world: int, blocking: bool) -> None:
    accelerator().mode(MODES["watchdog"])
    os.environ["TORCH_EMCCL_ASYNC_ERROR_HANDLING"] = "0"
    if blocking:
        os.environ["TORCH_EMCCL_BLOCKING_WAIT"] = "1"
    aborted, group = make_group(), dist.new_group([0, 1], backend="emccl")
    aborted.allreduce([torch.ones(1, device="emu")]).wait()
    torch.accelerator.synchronize()
    aborted.abort()
    store, tensor = dist.distributed_c10d._get_default_store(), torch.ones(1, device="emu")
    if rank < 2:
        dist.all_reduce(tensor, group=group)
        torch.accelerator.synchronize()
    time.sleep(0.5)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        work = group._get_backend(torch.device("emu")).allreduce([tensor])
        if blocking:
            with pytest.raises(RuntimeError, match="rank 0 is gone"):
                work.wait()
            time.sleep(0.5)
            store.set("lives", "")
    if blocking:
        store.wait(["lives"])
    else:
        time.sleep(30)


@pytest.mark.slow(but=["False"])
@pytest.mark.emulated
@pytest.mark.parametrize("blocking", [False, True])
def test_a_failure_ends_all_processes_of_the_job_unless_no_watchdog_sees_it(blocking: bool) -> None:
    dies = {0: signal.SIGKILL} | ({} if blocking else {1: signal.SIGABRT, 2: signal.SIGABRT})
    run_ranks(fail_in_one_group, 3, accelerator=True, dies=dies, blocking=blocking)


@ranks(1, accelerator=True)
@pytest.mark.parametrize("blocking", [False, True])
def test_waiting_for_a_collective_keeps_the_host_if_it_is_to(rank: int, world: int, blocking: bool) -> None:
    if blocking:
        os.environ["TORCH_EMCCL_BLOCKING_WAIT"] = "1"
    group = make_group()
    with accelerator().hold():
        work = group.allreduce([torch.ones(1, device="emu")])
        work.synchronize()
        waiting = start(work.wait)
        if blocking:
            waiting.join(0.1)
            assert waiting.is_alive()
        else:
            waiting.join()
    waiting.join()
