"""Loading to a CUDA device and saving from it; with one device, NCCL runs as a world of 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fastload
from fastload.formats.state import state_digest
from fastload.loading import sharded
from fastload.ranks.world import join
from fastload.transfer.device_exchange import DeviceExchange
from fastload.transfer.grid import Grid
from fastload.transfer.rounds import UNREADABLE, Round
from fastload.transfer.route import RoutedPlan
from tests.checkpoints import flip

pytestmark = pytest.mark.gpu


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w{n}": torch.randn(300 + n, 1000, generator=generator) for n in range(8)}
    tensors["half"] = torch.randn(777, generator=generator).bfloat16()
    tensors["scalar"] = torch.tensor(3)
    tensors["empty"] = torch.empty(0, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("strategy", ["direct", "allgather"])
@pytest.mark.usefixtures("nccl")
def test_tensors_are_handed_out_on_the_device(checkpoint: Path, strategy: str) -> None:
    expected = load_file(checkpoint)
    options = fastload.LoadOptions(strategy=strategy, staging_bytes=4 << 20)  # type: ignore[arg-type]
    with fastload.open(checkpoint, options=options) as opened:
        opened.load(names="w0", device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for name, tensor in opened.tensors(device="cuda"):
            assert tensor.is_cuda
            assert torch.equal(tensor.cpu(), expected.pop(name))
        largest_bytes = 307 * 1000 * 4
        # What was taken last is held while the next one comes.
        assert torch.cuda.max_memory_allocated() - before <= (4 << 20) + 2 * largest_bytes + (1 << 20)
    assert not expected


@pytest.mark.parametrize("strategy", ["auto", "direct", "allgather", "broadcast"])
@pytest.mark.parametrize("chunk_bytes", [None, 4097, 1 << 20])
@pytest.mark.usefixtures("nccl")
def test_every_strategy_gives_the_same_bytes(
    checkpoint: Path, strategy: str, chunk_bytes: int | None
) -> None:
    options = fastload.LoadOptions(strategy=strategy, chunk_bytes=chunk_bytes, timeout_s=60)
    with fastload.open(checkpoint, options=options) as opened:
        loaded = opened.load(device="cuda")
    assert opened.report is not None
    assert opened.report.transport == ("nccl" if strategy in ("allgather", "broadcast") else "none")
    assert {tensor.device.type for tensor in loaded.values()} == {"cuda"}
    assert state_digest(loaded) == state_digest(load_file(checkpoint))


@pytest.mark.usefixtures("nccl")
def test_casts_and_strides_on_the_device(checkpoint: Path) -> None:
    into = {"w0": torch.zeros(1000, 300, device="cuda", dtype=torch.bfloat16).t()}
    options = fastload.LoadOptions(strategy="allgather", chunk_bytes=4099, timeout_s=60)
    fastload.load(checkpoint, into=into, names=["w0"], dtype=torch.bfloat16, options=options)
    assert torch.equal(into["w0"].cpu(), load_file(checkpoint)["w0"].bfloat16())


def test_without_a_process_group(checkpoint: Path) -> None:
    loaded = fastload.load(checkpoint, device="cuda")
    assert state_digest(loaded) == state_digest(load_file(checkpoint))


def test_a_meta_module_is_materialized_on_the_device(checkpoint: Path) -> None:
    with torch.device("meta"):
        module = torch.nn.Module()
        module.w0 = torch.nn.Parameter(torch.empty(300, 1000))
    fastload.load(checkpoint, into=module, names=["w0"], device="cuda")
    assert module.w0.device.type == "cuda"
    assert torch.equal(module.w0.cpu(), load_file(checkpoint)["w0"])


@pytest.mark.parametrize("strategy", ["direct", "allgather"])
@pytest.mark.usefixtures("nccl")
def test_boxes_come_to_the_device(checkpoint: Path, strategy: str) -> None:
    """Parcels are packed in host memory, whole rows and columns, and any strides."""
    rows, columns = torch.zeros(100, 1000, device="cuda"), torch.zeros(40, 301, device="cuda").t()
    options = fastload.LoadOptions(strategy=strategy, chunk_bytes=4099, timeout_s=60)
    boxes = {
        "w0": [(fastload.Box((50, 0), (100, 1000)), rows)],
        "w1": [(fastload.Box((0, 7), (301, 40)), columns)],
    }
    with fastload.open(checkpoint, options=options) as opened:
        opened.read(boxes)
    saved = load_file(checkpoint)
    assert torch.equal(rows.cpu(), saved["w0"][50:150])
    assert torch.equal(columns.cpu(), saved["w1"][:, 7:47])


@pytest.mark.parametrize("chunk_bytes", [4099, 1 << 20])
@pytest.mark.usefixtures("nccl")
def test_parcels_are_packed_on_the_device(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    """As if they went to others; with communicators that are kept for the second load."""
    monkeypatch.setattr(RoutedPlan, "exchanges", True)
    monkeypatch.setattr(sharded, "groups_of", lambda plan: ((0,),))
    saved = load_file(checkpoint)
    options = fastload.LoadOptions(strategy="allgather", chunk_bytes=chunk_bytes, timeout_s=60)
    for _ in range(2):
        rows, columns = torch.zeros(100, 1000, device="cuda"), torch.zeros(40, 301, device="cuda").t()
        host = torch.zeros(302, 3)
        boxes = {
            "w0": [(fastload.Box((50, 0), (100, 1000)), rows)],
            "w1": [(fastload.Box((0, 7), (301, 40)), columns)],
            "w2": [(fastload.Box((0, 997), (302, 3)), host)],
        }
        with torch.inference_mode(), fastload.open(checkpoint, options=options) as opened:
            opened.read(boxes)
            assert opened.report is not None
            assert opened.report.transport == "nccl routed"
        assert torch.equal(rows.cpu(), saved["w0"][50:150])
        assert torch.equal(columns.cpu(), saved["w1"][:, 7:47])
        assert torch.equal(host, saved["w2"][:, 997:])


def load_shards(rank: int, world: int, checkpoint: Path) -> None:
    """The body of one rank, on a device of its own: replicas of shards, columns, and what all want."""
    torch.cuda.set_device(rank)
    rendezvous = f"file://{checkpoint.parent}/rendezvous"
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=world)
    mesh = init_device_mesh("cuda", (world // 2, 2))
    saved = load_file(checkpoint)
    layouts = [Replicate(), Shard(0)], [Shard(0), Replicate()], [Replicate(), Shard(1)]
    for layout in layouts:
        state = {
            name: distribute_tensor(tensor.cuda(), mesh, layout, src_data_rank=None)
            if tensor.dim() == 2
            else tensor.cuda()
            for name, tensor in saved.items()
        }
        expected = {
            n: t.to_local().clone() if isinstance(t, DTensor) else t.clone() for n, t in state.items()
        }
        for tensor in state.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
        options = fastload.LoadOptions(strategy="allgather", chunk_bytes=50_001, timeout_s=60)
        with fastload.open(checkpoint, options=options) as opened:
            opened.load(into=state)
            assert opened.report is not None
            assert opened.report.transport == "nccl routed"
        found = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in state.items()}
        assert state_digest(found) == state_digest(expected)
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a device for each rank")
def test_shards_come_to_the_devices_that_want_them(checkpoint: Path) -> None:
    world = min(torch.cuda.device_count() // 2 * 2, 8)
    torch.multiprocessing.spawn(load_shards, args=(world, checkpoint), nprocs=world)


@pytest.mark.usefixtures("nccl")
def test_an_fsdp_module_on_the_meta_device_becomes_real(checkpoint: Path) -> None:
    with torch.device("meta"):
        module = torch.nn.Module()
        module.w0 = torch.nn.Parameter(torch.empty(300, 1000))
    fully_shard(module, mesh=init_device_mesh("cuda", (1,)))
    fastload.load(checkpoint, into=module, names=["w0"], device="cuda")
    assert isinstance(module.w0, DTensor)
    assert module.w0.to_local().device.type == "cuda"
    assert torch.equal(module.w0.full_tensor().cpu(), load_file(checkpoint)["w0"])


@pytest.mark.usefixtures("nccl")
def test_names_into_a_module_and_host_memory_in_one_chunk(checkpoint: Path) -> None:
    module = torch.nn.Module()
    module.w0 = torch.nn.Parameter(torch.zeros(300, 1000, device="cuda"))
    module.register_buffer("w1", torch.zeros(301, 1000, pin_memory=True))
    module.register_buffer("w2", torch.zeros(302, 1000, device="cuda"))
    options = fastload.LoadOptions(strategy="allgather", chunk_bytes=999_999, timeout_s=60)
    fastload.load(checkpoint, into=module, names=["w[01]", "w2"], options=options)
    assert module.w1.is_pinned()
    expected = load_file(checkpoint)
    assert state_digest(module.state_dict()) == state_digest({n: expected[n] for n in ("w0", "w1", "w2")})


@pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.device("cuda")])
@pytest.mark.usefixtures("nccl")
def test_modes_of_the_calling_thread(checkpoint: Path, context: Callable[[], AbstractContextManager]) -> None:
    options = fastload.LoadOptions(strategy="allgather", chunk_bytes=4099, timeout_s=60)
    with context():
        loaded = fastload.load(checkpoint, device="cuda", dtype=torch.bfloat16, options=options)
    expected = {n: t.bfloat16() if t.is_floating_point() else t for n, t in load_file(checkpoint).items()}
    assert state_digest(loaded) == state_digest(expected)


@pytest.fixture
def state() -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    wide = torch.randn(6000, 5000, device="cuda", generator=generator)  # more than a slab of a snapshot
    return {
        "wide": wide,
        "turned": wide[:999, :777].t(),
        "every other": wide[0, ::2].to(torch.float8_e4m3fn),
        "odd": torch.randint(256, (12_345,), device="cuda", dtype=torch.uint8, generator=generator),
        "complex": torch.view_as_complex(wide[1].view(-1, 2)).conj(),
        "on the host": torch.arange(1000),
        "scalar": torch.tensor(True, device="cuda"),
        "empty": torch.empty(0, 3, device="cuda"),
    }


def on_host(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu().resolve_conj().contiguous() for name, tensor in state.items()}


@pytest.mark.parametrize("strategy", ["direct", "allgather"])
@pytest.mark.usefixtures("nccl")
def test_a_state_comes_back_from_a_save_that_a_host_could_have_made(
    tmp_path: Path, state: dict[str, Tensor], strategy: str
) -> None:
    fastload.save(state, tmp_path / "device", options=fastload.SaveOptions(check_replicas="full"))
    fastload.save(on_host(state), tmp_path / "host")
    device, host = ((tmp_path / place / "model.safetensors").read_bytes() for place in ("device", "host"))
    assert device == host
    fastload.verify(tmp_path / "device")
    options = fastload.LoadOptions(strategy=strategy, chunk_bytes=5_000_001, timeout_s=60)
    loaded = fastload.load(tmp_path / "device", device="cuda", options=options)
    assert {tensor.device.type for tensor in loaded.values()} == {"cuda"}
    assert state_digest(loaded) == state_digest(on_host(state))


@pytest.mark.parametrize("aside", [False, True])
def test_a_snapshot_has_all_that_was_computed_before_and_nothing_after(
    tmp_path: Path, state: dict[str, Tensor], aside: bool
) -> None:
    expected = on_host(state) | {"wide": -state["wide"].cpu()}
    state |= {name: state[name].clone() for name in ("turned", "complex")}  # not a part of "wide"
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if aside else torch.cuda.current_stream()):
        for number in range(3):  # the last ones in memory that the first has pinned
            torch.cuda._sleep(100_000_000)
            state["wide"].neg_()
            saving = fastload.async_save(state, tmp_path / str(number))
            state["wide"].neg_()
            saving.wait(60)
    torch.cuda.synchronize()
    for number in range(3):
        fastload.verify(tmp_path / str(number))
        loaded = fastload.load(tmp_path / str(number))
        assert torch.equal(loaded["wide"], expected["wide"])
        assert state_digest(loaded) == state_digest(expected)


@pytest.mark.usefixtures("nccl")
def test_damage_is_told_through_the_device_and_the_group_goes_on(
    tmp_path: Path, state: dict[str, Tensor]
) -> None:
    fastload.save(state, tmp_path / "good")
    fastload.save(state, tmp_path / "bad")
    flip(tmp_path / "bad" / "model.safetensors", 100_000_000)
    options = fastload.LoadOptions(strategy="allgather", chunk_bytes=1 << 20, timeout_s=60)
    with pytest.raises(fastload.ChecksumError):
        fastload.load(tmp_path / "bad", device="cuda", options=options)
    with torch.cuda.stream(torch.cuda.Stream()):
        loaded = fastload.load(tmp_path / "good", device="cuda", options=options)
    assert state_digest(loaded) == state_digest(on_host(state))


@pytest.mark.parametrize("num_lines", [1, 2])
@pytest.mark.usefixtures("nccl")
def test_chunks_and_statuses_come_through_the_device(monkeypatch: pytest.MonkeyPatch, num_lines: int) -> None:
    """With the group's communicator, and with some that are kept for the next load."""
    monkeypatch.setattr(Grid, "num_lines", num_lines)
    monkeypatch.setattr(Grid, "has_line", lambda grid, rank, phase: True)
    world = join(call="testing", timeout_s=60)
    tokens = []
    for load in range(2):
        exchange = DeviceExchange(world, torch.device("cuda", torch.cuda.current_device()), "nccl", ["host"])
        offer = exchange.offer()
        tokens.append(offer["token"] if offer is not None else "")
        exchange.accept([offer])
        exchange.connect(give_up=lambda: False)
        slab, own = exchange.allocate(4096, 4096)
        assert own is not None
        for index, status in enumerate((0, UNREADABLE, 0)):
            slots = slab.cut({0: 4096})
            work = Round(index, slots, slots.each, buffers=[own], own=own, status=status)
            own.fill_(index + 1 + load)
            exchange.post(work)
            exchange.start(work)
            assert work.done.wait(30)
            assert work.error is None
            assert work.statuses == ({0: status} if status else {})
            assert slab.memory.unique().tolist() == [index + 1 + load]
        exchange.close()
    assert tokens[0] == ""
    assert bool(tokens[1]) == (num_lines > 1)
    world.kept.drop()
