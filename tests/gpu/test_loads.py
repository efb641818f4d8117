"""Loads to accelerators: every strategy, target and world; the caller's group and streams are as before."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import fastload
from fastload.base import memory
from fastload.formats.state import state_digest
from fastload.saving import snapshot
from fastload.transfer import device_transport
from fastload.transfer.routed_plan import RoutedPlan
from tests.accelerator import accelerator
from tests.checkpoints import assert_same_bits, flip
from tests.dist.patience import patient
from tests.dist.test_sharded import emptied, locals_of, make, write
from tests.dist.test_sharded_failures import break_reads
from tests.gpu.devices import Devices, on_devices

SAVE_OPTIONS = fastload.SaveOptions(overwrite=True)


def written(path: Path, rank: int) -> dict[str, Tensor]:
    """Writes a checkpoint of many dtypes and shapes on rank 0; returns it on all."""
    tensors = make(path)
    if rank == 0:
        write(path, tensors)
    dist.barrier()
    return tensors


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@pytest.mark.slow(but=["2-ranks"])
@on_devices(1, 2, 4)
def test_replicated(devices: Devices, rank: int, world: int, tmp_path: Path) -> None:
    saved = written(tmp_path, rank)
    for seed, strategy in enumerate(("auto", "direct", "allgather", "broadcast")):
        for chunk_bytes in (None, 1021):
            devices.slow(seed)
            devices.check_group()
            options: Any = fastload.LoadOptions(strategy=strategy, chunk_bytes=chunk_bytes, timeout_s=60)  # type: ignore[arg-type]
            with fastload.open(tmp_path, options=options) as opened:
                loaded = opened.load(device=devices.device)
            assert {tensor.device for tensor in loaded.values()} == {devices.device}
            assert_same_bits(on_host(loaded), saved)
            assert opened.report is not None
            exchanges = strategy in ("allgather", "broadcast") or (strategy == "auto" and world > 1)
            assert opened.report.transport == (devices.backend if exchanges else "none")
            assert opened.report.why_transport
            devices.check_group()


@on_devices(4, ranks_per_host=2)
def test_hosts(devices: Devices, rank: int, world: int, tmp_path: Path) -> None:
    """Lines of two dimensions, and connections that are kept for the second load."""
    saved = written(tmp_path, rank)
    for seed in range(3):
        devices.slow(seed)
        options = fastload.LoadOptions(strategy="allgather", chunk_bytes=997 + seed, timeout_s=60)
        with devices.aside():
            loaded = fastload.load(tmp_path, device=devices.device, options=options)
            assert_same_bits(on_host(loaded), saved)
        devices.check_group()


@pytest.mark.slow(but=["2-ranks"])
@on_devices(2, 4, ranks_per_host=2)
def test_shards(devices: Devices, rank: int, world: int, tmp_path: Path) -> None:
    """FSDP, HSDP and tensor parallelism, and ranks that want nothing."""
    saved = written(tmp_path, rank)
    meshes = {2: [(2,), (2, 1)], 4: [(4,), (2, 2)]}[world]
    for shape in meshes:
        mesh = init_device_mesh(devices.device.type, shape)
        layouts: list[list[Any]] = [[Shard(0)], [Shard(1)], [Replicate()]]
        if len(shape) == 2:
            layouts = [
                [Replicate(), Shard(0)],
                [Shard(0), Replicate()],
                [Replicate(), Shard(1)],
                [Shard(0), Shard(1)],
            ]
        for seed, placements in enumerate(layouts):
            state: dict[str, Tensor] = {n: devices.cut(t, mesh, placements) for n, t in saved.items()}
            before = on_host(locals_of(state))
            devices.slow(seed)
            with devices.aside():
                options = fastload.LoadOptions(chunk_bytes=1021, timeout_s=60)
                fastload.load(tmp_path, into=emptied(state), options=options)
            assert_same_bits(on_host(locals_of(state)), before)
            devices.check_group()


@pytest.mark.slow
@on_devices(4, ranks_per_host=2)
def test_tensors_of_other_ranks(devices: Devices, rank: int, world: int, tmp_path: Path) -> None:
    """The state is still being computed when the call begins."""
    saved = make(tmp_path)
    rows = init_device_mesh(devices.device.type, (4,))
    grid = init_device_mesh(devices.device.type, (2, 2))
    for seed in range(3):
        state: dict[str, Tensor] = {n: devices.cut(t, rows, [Shard(0)]) for n, t in saved.items()}
        into: dict[str, Tensor] = {n: devices.cut(t, grid, [Replicate(), Shard(1)]) for n, t in saved.items()}
        expected, into = on_host(locals_of(into)), emptied(into)
        for _ in range(2):  # the second time with the plan of the first
            for tensor in locals_of(into).values():
                tensor.zero_()
            devices.slow(seed)
            with devices.aside():
                options = fastload.LoadOptions(chunk_bytes=1021, timeout_s=60)
                report = fastload.redistribute(state, into, options=options)
            assert report.transport.startswith(devices.backend)
            assert_same_bits(on_host(locals_of(into)), expected)
            devices.check_group()


@on_devices(2)
def test_a_module_of_fsdp_becomes_real_on_the_device(
    devices: Devices, rank: int, world: int, tmp_path: Path
) -> None:
    saved = written(tmp_path, rank)
    with torch.device("meta"):
        module = torch.nn.Module()
        module.even = torch.nn.Parameter(torch.empty(64, 32))
    fully_shard(module, mesh=init_device_mesh(devices.device.type, (world,)))
    fastload.load(tmp_path, into=module, names=["even"], device=devices.device)
    assert isinstance(module.even, DTensor)
    assert module.even.to_local().device == devices.device
    assert_same_bits({"even": module.even.full_tensor().cpu()}, {"even": saved["even"]})


@pytest.mark.slow(but=["allgather-1-ranks", "direct-2-ranks"])
@on_devices(1, 2)
@pytest.mark.parametrize("strategy", ["direct", "allgather"])
def test_casts_and_strides_are_made_on_the_device(
    devices: Devices, rank: int, world: int, tmp_path: Path, strategy: Any
) -> None:
    """No copy from pageable memory, none that the host waits for, in bounded memory; elements are cut."""
    saved = {
        "cast": torch.randn(3_000, 1001),
        "columns": torch.arange(700 * 1001).view(700, 1001),
        "both": torch.randn(300, 1001, dtype=torch.float64),
    }
    if rank == 0:
        save_file(saved, tmp_path / "w.safetensors")
    dist.barrier()
    into = {
        "cast": torch.zeros(3_000, 1001, device=devices.device, dtype=torch.bfloat16),
        "columns": torch.zeros(1001, 700, device=devices.device, dtype=torch.int64).t(),
        "both": torch.zeros(1001, 300, device=devices.device, dtype=torch.bfloat16).t(),
    }
    expected = {name: saved[name].to(tensor.dtype) for name, tensor in into.items()}
    options = fastload.LoadOptions(strategy=strategy, chunk_bytes=500_001, timeout_s=60)
    with fastload.open(tmp_path / "w.safetensors", options=options) as opened:
        opened.load(into=into, dtype=torch.bfloat16)  # what is kept for the next load is allocated
        for tensor in into.values():
            tensor.zero_()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        devices.counts()
        opened.load(into=into, dtype=torch.bfloat16)
        counts = devices.counts()
        taken = torch.accelerator.max_memory_allocated() - before
    assert_same_bits(on_host(into), expected)
    if devices.emulated:
        assert counts["h2d_pinned_bytes"] > 0
        assert "h2d_pageable" not in counts
        assert opened.report is not None
        statuses_bytes = opened.report.num_rounds * world if strategy == "allgather" else 0
        assert counts.get("d2h_pageable_bytes", 0) <= statuses_bytes
        assert counts.get("blocking_copies", 0) == counts.get("d2h_pageable", 0)
    staging = 0 if strategy == "direct" else 4 * (world + 1) * 500_001
    unsplit = 0 if devices.emulated else 2 << 20  # CUDA's allocator does not split off less than 1 MiB
    assert taken <= (8 << 20) + staging + unsplit + (64 << 10)


@pytest.mark.slow(but=["1-ranks"])
@on_devices(1, 2)
def test_casts_strides_and_host_memory_in_one_load(
    devices: Devices, rank: int, world: int, tmp_path: Path
) -> None:
    saved = written(tmp_path, rank)
    for strategy in ("direct", "allgather"):
        into = {
            "even": torch.zeros(32, 64, device=devices.device, dtype=torch.bfloat16).t(),
            "row": torch.zeros(1, 4096, dtype=saved["row"].dtype),
            "vector": torch.zeros(101, dtype=saved["vector"].dtype, device=devices.device),
        }
        options = fastload.LoadOptions(strategy=strategy, chunk_bytes=1021, timeout_s=60)  # type: ignore[arg-type]
        fastload.load(tmp_path, into=into, names=list(into), dtype=torch.bfloat16, options=options)
        assert torch.equal(into["even"].cpu().nan_to_num(), saved["even"].bfloat16().nan_to_num())
        assert_same_bits({"vector": into["vector"].cpu()}, {"vector": saved["vector"]})


@pytest.mark.slow(but=["inference"])
@on_devices(2)
@pytest.mark.parametrize("mode", ["inference", "device"])
def test_modes_of_the_calling_thread(
    devices: Devices, rank: int, world: int, tmp_path: Path, mode: str
) -> None:
    saved = written(tmp_path, rank)
    options = fastload.LoadOptions(strategy="allgather", chunk_bytes=1021, timeout_s=60)
    with torch.inference_mode() if mode == "inference" else torch.device(devices.device):
        loaded = fastload.load(tmp_path, device=devices.device, options=options)
    assert_same_bits(on_host(loaded), saved)


@pytest.mark.slow(but=["2-ranks"])
@on_devices(2, 4)
def test_tensors_one_by_one(devices: Devices, rank: int, world: int, tmp_path: Path) -> None:
    """Consumers on a stream of their own, with collectives of their own in the loop, some of which leave."""
    saved = written(tmp_path, rank)
    for seed, leaves in enumerate((False, True)):
        devices.slow(seed)
        sums, left = {}, dict(saved)
        options = fastload.LoadOptions(
            strategy="allgather", chunk_bytes=1021, staging_bytes=1 << 20, timeout_s=60
        )
        with fastload.open(tmp_path, options=options) as opened, devices.aside():
            for number, (name, tensor) in enumerate(opened.tensors(device=devices.device)):
                bits = (
                    tensor.reshape(-1).view(torch.uint8)
                    if tensor.numel()
                    else tensor.new_empty(0, dtype=torch.uint8)
                )
                sums[name] = bits.clone()  # by a kernel that may run after the tensor has gone
                del tensor, bits
                dist.all_reduce(torch.ones(1, device=devices.device))
                if leaves and number == 3:
                    break
        devices.check_group()
        for name, found in sums.items():
            assert found.cpu().tolist() == left[name].reshape(-1).view(torch.uint8).tolist(), name
        assert len(sums) == (4 if leaves else len(saved))


@pytest.mark.slow(but=["dropped"])
@on_devices(2)
@pytest.mark.parametrize("how", ["open", "dropped"])
def test_a_rank_leaves_a_stream_and_no_context(
    devices: Devices, rank: int, world: int, tmp_path: Path, how: str
) -> None:
    """The other one gets all tensors, from the rank that drops all it has, or uses its checkpoint again."""
    saved = written(tmp_path, rank)
    options = fastload.LoadOptions(strategy="allgather", chunk_bytes=1021, timeout_s=20)
    opened = fastload.open(tmp_path, options=options)
    stream = opened.tensors(device=devices.device)
    if how == "dropped":
        del opened
    names = []
    for name, tensor in stream:
        names.append(name)
        del tensor
        if rank == 0 and len(names) == 2:
            break
    del stream
    assert len(names) == (2 if rank == 0 else len(saved))
    if how == "open":
        assert_same_bits(on_host(opened.load(device=devices.device)), saved)
        opened.close()
    devices.check_group()


@pytest.mark.slow(but=["True"])
@on_devices(2)
@pytest.mark.parametrize("boxes", [False, True])
def test_loops_of_a_caller_with_many_streams(
    devices: Devices, rank: int, world: int, tmp_path: Path, boxes: bool
) -> None:
    """Sooner or later a stream of fastload's is also one of the caller's, or of a process group."""
    saved = {f"w{number}": torch.arange(4000) + number for number in range(6)}
    if rank == 0:
        save_file(saved, tmp_path / "w.safetensors")
    dist.barrier()
    own = [torch.Stream(devices.device, priority=priority) for priority in (0, -1, -2, -3) * 10]
    options = fastload.LoadOptions(strategy="allgather", chunk_bytes=4096, timeout_s=60)
    wanted: Any = {"boxes": {name: fastload.Box((100 * rank,), (3000,)) for name in saved}} if boxes else {}
    sums = []
    for number in range(40 if devices.mode in ("", "plain") else 8):
        devices.slow(number + rank, longest_s=0.001)
        with fastload.open(tmp_path / "w.safetensors", options=options) as opened:
            for _, tensor in opened.tensors(device=devices.device, **wanted):
                first, here = tensor[:1].clone(), torch.accelerator.current_stream(devices.device)
                with devices.aside():
                    dist.all_reduce(first)
                    work = dist.all_reduce(first, async_op=True)
                    assert work is not None
                    work.wait()
                stream = own[number % len(own)]
                stream.wait_stream(here)
                with stream:
                    dist.all_reduce(first)
                here.wait_stream(stream)
                sums.append(first)
    device_sums = torch.cat(sums).cpu().tolist()
    firsts = [sum(int(saved[name][100 * other * boxes]) for other in range(world)) for name in saved]
    assert device_sums == [first * world**2 for first in firsts] * (len(device_sums) // len(firsts))


@pytest.mark.slow(but=["2-ranks"])
@on_devices(2, 4)
def test_boxes(devices: Devices, rank: int, world: int, tmp_path: Path) -> None:
    """Read into place, and handed out by another thread to a consumer on a stream of its own."""
    saved = written(tmp_path, rank)
    options = fastload.LoadOptions(chunk_bytes=1021, staging_bytes=1 << 20, timeout_s=60)
    box = fastload.Box((16 * rank, 0), (16, 32))
    rows, columns = torch.zeros(16, 32, device=devices.device), torch.zeros(5, 64, device=devices.device).t()
    with fastload.open(tmp_path, options=options) as opened:
        devices.slow(rank)
        opened.read({"even": [(box, rows), (fastload.Box((0, 3), (64, 5)), columns)]})
        assert_same_bits(
            {"rows": rows.cpu(), "columns": columns.cpu()},
            {"rows": saved["even"][16 * rank : 16 * (rank + 1)], "columns": saved["even"][:, 3:8]},
        )
    devices.check_group()


@on_devices(2)
def test_boxes_one_by_one(devices: Devices, rank: int, world: int, tmp_path: Path) -> None:
    """A thread of fastload's allocates what the consumer's stream still uses after the tensor was dropped."""
    saved = {f"w{number:02}": torch.arange(100_000) + number for number in range(16)}
    if rank == 0:
        save_file(saved, tmp_path / "w.safetensors")
    dist.barrier()
    options = fastload.LoadOptions(chunk_bytes=200_000, staging_bytes=4 << 20, timeout_s=60)
    wanted = {name: fastload.Box((1000 * rank,), (90_000,)) for name in saved}
    sums = []
    with fastload.open(tmp_path / "w.safetensors", options=options) as opened, devices.aside():
        for _, tensor in opened.tensors(boxes=wanted, device=devices.device):
            devices.busy(0.02)
            sums.append(tensor.sum())
            del tensor
    expected = [int(tensor[1000 * rank : 1000 * rank + 90_000].sum()) for tensor in saved.values()]
    assert [int(total) for total in sums] == expected
    devices.check_group()


@on_devices(4)
def test_where_tensors_are_differs(devices: Devices, rank: int, world: int, tmp_path: Path) -> None:
    """Some ranks load to devices, one to host memory: all go through host memory, and the report says why."""
    saved = written(tmp_path, rank)
    device = "cpu" if rank == 2 else devices.device
    options = fastload.LoadOptions(strategy="allgather", chunk_bytes=1021, timeout_s=60)
    mesh = init_device_mesh(devices.device.type, (world,))
    devices.slow(1)
    for _ in range(2):
        into = {name: torch.zeros_like(tensor, device=device) for name, tensor in saved.items()}
        with fastload.open(tmp_path, options=options) as opened:
            opened.load(into=into)
        assert_same_bits(on_host(into), saved)
        assert opened.report is not None
        assert devices.backend not in opened.report.transport
        assert opened.report.transport != "none"
        assert "not all ranks" in opened.report.why_transport
    few = {"few": devices.cut(saved["few"], mesh, [Shard(0)])}  # two rows: two ranks have none, and no device
    before = on_host(locals_of(few))
    fastload.load(tmp_path, into=emptied(few), names=["few"], options=options)
    assert_same_bits(on_host(locals_of(few)), before)


@on_devices(2)
def test_memory_that_cannot_be_pinned(
    devices: Devices, rank: int, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies from and to pageable memory wait, whatever the streams do."""
    monkeypatch.setattr(memory, "can_pin", lambda: False)
    monkeypatch.setattr(snapshot, "can_pin", lambda: False)
    saved = written(tmp_path, rank)
    devices.counts()
    for seed, strategy in enumerate(("direct", "allgather")):
        devices.slow(seed)
        options = fastload.LoadOptions(strategy=strategy, chunk_bytes=1021, timeout_s=60)  # type: ignore[arg-type]
        loaded = fastload.load(tmp_path, device=devices.device, options=options)
        assert_same_bits(on_host(loaded), saved)
        for _ in range(2):
            saving = fastload.async_save(loaded, tmp_path / f"{strategy} saved", options=SAVE_OPTIONS)
            for tensor in loaded.values():
                tensor.zero_()
            saving.wait(60)
            loaded = fastload.load(tmp_path / f"{strategy} saved", device=devices.device)
            assert_same_bits(on_host(loaded), saved)
    counts = devices.counts()
    assert counts.get("h2d_pinned", 0) == counts.get("d2h_pinned", 0) == 0
    assert counts.get("blocking_copies", 0) == counts.get("h2d_pageable", 0) + counts.get("d2h_pageable", 0)


@on_devices(2)
def test_bytes_go_to_the_device_once(devices: Devices, rank: int, world: int, tmp_path: Path) -> None:
    """From pinned memory, each once on the whole host where ranks share the reading, and by no other copy."""
    saved = {"w": torch.arange(300_000)}
    if rank == 0:
        save_file(saved, tmp_path / "w.safetensors")
    dist.barrier()
    for strategy, times in (("direct", world), ("allgather", 1)):
        into = {"w": torch.zeros(300_000, dtype=torch.int64, device=devices.device)}
        options = fastload.LoadOptions(strategy=strategy, timeout_s=60)  # type: ignore[arg-type]
        devices.counts()
        fastload.load(tmp_path / "w.safetensors", into=into, options=options)
        counts = devices.counts()
        if devices.emulated:
            taken = torch.tensor([counts.get("h2d_pinned_bytes", 0)])
            dist.all_reduce(taken)
            assert 0 <= int(taken) - times * saved["w"].nbytes <= 4096  # slots of a round are of one length
            assert counts.get("h2d_pageable", 0) == 0
            assert (
                counts.get("d2d_bytes", 0) <= saved["w"].nbytes
            )  # from the slab, if ranks shared the reading
        assert torch.equal(into["w"].cpu(), saved["w"])


@on_devices(1)
def test_copies_of_several_rounds_are_in_flight(
    devices: Devices, rank: int, world: int, tmp_path: Path
) -> None:
    """The device is given more to copy while it copies, from page-locked memory that is not wasted."""
    saved = {"w": torch.randn(4_000_000)}
    save_file(saved, tmp_path / "w.safetensors")
    into = {"w": torch.zeros(4_000_000, device=devices.device)}
    options = fastload.LoadOptions(chunk_bytes=550_000, timeout_s=60)
    devices.counts()
    with fastload.open(tmp_path / "w.safetensors", options=options) as opened:
        loading = threading.Thread(target=opened.load, kwargs={"into": into})
        with devices.held():
            loading.start()
            until = time.monotonic() + patient(30.0)
            while devices.emulated and (counts := accelerator().counters()).get("h2d_pinned", 0) < 4:
                assert time.monotonic() < until, counts
                time.sleep(0.01)
        loading.join()
    assert torch.equal(into["w"].cpu(), saved["w"])
    assert opened.report is not None
    if devices.emulated:
        assert not {"h2d_pageable", "stream_syncs"} & counts.keys()
        in_flight = 550_000 * opened.report.depth
        # Where reads went further ahead than that, as much again was taken at once.
        taken = in_flight * (2 if opened.report.ranks[0].peak_staging_bytes > in_flight else 1)
        assert counts["pinned_bytes"] <= 1.2 * taken


@pytest.mark.slow(but=["2-ranks"])
@on_devices(2, 4, ranks_per_host=2)
def test_a_round_allocates_nothing(devices: Devices, rank: int, world: int, tmp_path: Path) -> None:
    """A rank that runs out of device memory does so before data moves, not in the middle of a collective."""
    saved = {"w": torch.arange(500_000)}
    if rank == 0:
        save_file(saved, tmp_path / "w.safetensors")
    dist.barrier()
    into = {"w": torch.zeros(500_000, dtype=torch.int64, device=devices.device)}
    options = fastload.LoadOptions(strategy="allgather", chunk_bytes=20_000, timeout_s=60)
    with devices.no_allocations_once_reading():
        fastload.load(tmp_path / "w.safetensors", into=into, options=options)
    assert torch.equal(into["w"].cpu(), saved["w"])


@on_devices(2)
def test_a_device_that_torch_does_not_serve_is_refused(
    devices: Devices, rank: int, world: int, tmp_path: Path
) -> None:
    written(tmp_path, rank)
    with pytest.raises(
        fastload.FastloadError, match=rf"no xpu device in this process, but {devices.device.type}"
    ):
        fastload.load(tmp_path, device="xpu")
    with pytest.raises(fastload.FastloadError, match=rf"{devices.device.type}:64.*torch sees"):
        fastload.load(tmp_path, device=f"{devices.device.type}:64")
    devices.check_group()


@pytest.mark.slow(but=["2-ranks"])
@on_devices(2, 4)
def test_readers_that_break_drop_out(devices: Devices, rank: int, world: int, tmp_path: Path) -> None:
    saved = written(tmp_path, rank)
    options = fastload.LoadOptions(strategy="allgather", chunk_bytes=1021, timeout_s=60)
    meshes = [((world,), [Shard(0)]), ((2, world // 2), [Replicate(), Shard(0)])]
    for seed, (shape, placements) in enumerate(meshes):
        mesh = init_device_mesh(devices.device.type, shape)
        devices.slow(seed)
        with pytest.MonkeyPatch.context() as patch:
            break_reads(patch, 2 if rank == 1 else None)
            loaded = fastload.load(tmp_path, device=devices.device, options=options)
        assert_same_bits(on_host(loaded), saved)
        state: dict[str, Tensor] = {n: devices.cut(t, mesh, placements) for n, t in saved.items()}
        before = on_host(locals_of(state))
        shown: list[tuple[int, int]] = []
        with pytest.MonkeyPatch.context() as patch:
            break_reads(patch, 2 if rank == 1 else None)
            told = replace(options, progress=lambda *one: shown.append(one))  # noqa: B023
            fastload.load(tmp_path, into=emptied(state), options=told)
        assert_same_bits(on_host(locals_of(state)), before)
        assert shown == sorted(shown), "it goes back"
        assert shown[-1][0] == shown[-1][1]
    devices.check_group()


@pytest.mark.slow(but=["2-ranks"])
@on_devices(2, 4)
def test_an_error_on_one_rank_ends_the_load_and_spares_the_group(
    devices: Devices, rank: int, world: int, tmp_path: Path
) -> None:
    """Damage, an odd error, one of the caller's own in a loop: the group and the next load are as before."""
    saved = written(tmp_path, rank)
    options = fastload.LoadOptions(strategy="allgather", chunk_bytes=1021, timeout_s=60)
    devices.slow(1)
    with pytest.MonkeyPatch.context() as patch:
        break_reads(patch, 2 if rank == 1 else None, RuntimeError("odd bytes"))
        with pytest.raises(fastload.FastloadError, match="odd bytes"):
            fastload.load(tmp_path, device=devices.device, options=options)
    devices.check_group()
    wanted = ArithmeticError if rank == 1 else fastload.FastloadError
    with pytest.raises(wanted, match="of the caller"):  # noqa: SIM117, PT012
        with fastload.open(tmp_path, options=options) as opened, devices.aside():
            for number, _ in enumerate(opened.tensors(device=devices.device)):
                if number == 2 and rank == 1:
                    raise ArithmeticError("of the caller's own")
    devices.check_group()
    fastload.save({"a": torch.arange(100_000.0)}, tmp_path / "damaged")
    if rank == 0:
        flip(tmp_path / "damaged" / "model.safetensors", 200_000)
    dist.barrier()
    with pytest.raises(fastload.ChecksumError):
        fastload.load(tmp_path / "damaged", device=devices.device, options=options)
    devices.check_group()
    assert state_digest(fastload.load(tmp_path, device=devices.device, options=options)) == state_digest(
        saved
    )


@pytest.mark.slow
@on_devices(1)
@pytest.mark.parametrize("chunk_bytes", [4099, 1 << 20])
def test_messages_are_packed_on_the_device(
    devices: Devices, rank: int, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    """As if they went to others, which takes no second device; communicators are kept for the second load."""
    monkeypatch.setattr(RoutedPlan, "exchanges", True)
    monkeypatch.setattr(device_transport, "communicator_ranks", lambda plan: ((0,),))
    saved = {f"w{number}": torch.randn(300 + number, 1000) for number in range(3)}
    save_file(saved, tmp_path / "model.safetensors")
    options = fastload.LoadOptions(strategy="allgather", chunk_bytes=chunk_bytes, timeout_s=60)
    for seed in range(2):
        devices.slow(seed)
        rows = torch.zeros(100, 1000, device=devices.device)
        columns = torch.zeros(40, 301, device=devices.device).t()
        host = torch.zeros(302, 3)
        boxes = {
            "w0": [(fastload.Box((50, 0), (100, 1000)), rows)],
            "w1": [(fastload.Box((0, 7), (301, 40)), columns)],
            "w2": [(fastload.Box((0, 997), (302, 3)), host)],
        }
        with torch.inference_mode(), fastload.open(tmp_path / "model.safetensors", options=options) as opened:
            opened.read(boxes)
            assert opened.report is not None
            assert opened.report.transport == f"{devices.backend} routed"
        assert torch.equal(rows.cpu(), saved["w0"][50:150])
        assert torch.equal(columns.cpu(), saved["w1"][:, 7:47])
        assert torch.equal(host, saved["w2"][:, 997:])
