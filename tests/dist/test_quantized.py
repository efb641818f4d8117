"""Quantised checkpoints come dequantised, bit for bit as the libraries that write them compute it."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import json
import random
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, empty
from torch.distributed.tensor.placement_types import _StridedShard

import fastload
from fastload import Box, LoadOptions, ManifestError, OptionError
from fastload.base.memory import byte_view
from fastload.ext.quantized import weights as quantized
from fastload.loading.targets import DestinationBuilder, TensorWriter
from tests.checkpoints import assert_same_bits
from tests.dist.harness import ranks
from tests.dist.test_healing import truncate
from tests.dist.test_readers import copy, own_disk
from tests.dist.test_readers import pytestmark as needs_mounts

RANKS_IMPORT = (
    "torch.distributed.tensor",
    "transformers.integrations.mxfp4",
    *(["compressed_tensors.compressors"] if importlib.util.find_spec("compressed_tensors") else []),
)
OPTIONS = LoadOptions(dequantize=True, timeout_s=20)
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PLAIN = "model.norm.weight"


class Made(NamedTuple):
    """A quantised checkpoint and what it is.

    Attributes:
        tensors: The stored tensors.
        config: The ``quantization_config``.
        weights: The weights, as the library computes them.
    """

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    weights: dict[str, Tensor]


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None) -> Path:
    """Writes two files, scales and weights in either, with an index."""
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, of_file in files.items():
        save_file({name: tensors[name] for name in of_file}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, of_file in files.items() for name in of_file}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    text = {"model_type": "llama"} | ({} if config is None else {"quantization_config": config})
    (folder / "config.json").write_text(json.dumps(text))
    return folder


def random_fp8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Any byte but NaN."""
    raw = torch.randint(0, 256, shape, dtype=torch.uint8)
    return torch.where(raw.view(dtype).float().isfinite(), raw, raw & 0x3F).view(dtype)


def random_scales(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape) * 10.0 ** torch.randint(-6, 3, shape)).to(dtype)


def deepseek(dtype: torch.dtype) -> Made:
    """As torch's reader of them, in blocks that do not divide the weights."""
    tensors = {PLAIN: torch.randn(300).bfloat16()}
    for name, (rows, columns) in {"even": (256, 384), "odd": (300, 450), "small": (5, 7)}.items():
        tensors[f"{name}.weight"] = random_fp8(rows, columns)
        tensors[f"{name}.weight_scale_inv"] = random_scales(-(-rows // 128), -(-columns // 128))
    weights = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale_inv")}
    return Made(tensors, FP8, {name: torch.empty(each.shape, dtype=dtype) for name, each in weights.items()})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_are_as_torch_reads_them(tmp_path: Path, dtype: torch.dtype) -> None:
    torch_reader = pytest.importorskip("torch.distributed.checkpoint.quantized_hf_storage")
    tensors, config, weights = deepseek(dtype)
    write(tmp_path, tensors, config)
    reader = torch_reader.QuantizedHuggingFaceStorageReader(str(tmp_path), target_dtype=dtype)
    dcp.load(weights, storage_reader=reader, no_dist=True)
    assert_same_bits(fastload.load(tmp_path, dtype=dtype, options=OPTIONS), weights)


def transformers_fp8(dtype: torch.dtype) -> Made:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    tensors, weights = {}, {}
    for name, shape, grid in (
        ("blocks", (256, 384), random_scales(2, 3)),
        ("experts", (3, 256, 128), random_scales(3, 2, 1, dtype=torch.bfloat16)),
        ("powers", (128, 256), torch.randint(100, 140, (1, 2), dtype=torch.uint8)),
        ("tensor", (40, 30), random_scales(1, 1)),
    ):
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = random_fp8(*shape), grid
        one = fp8.Fp8Dequantize(None)._dequantize_one(tensors[f"{name}.weight"], grid, dtype)
        weights[f"{name}.weight"] = one
    tensors["tensor.activation_scale"] = torch.ones(())
    return Made(tensors, FP8, weights)


def gpt_oss(dtype: torch.dtype) -> Made:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(0, 256, (3, 48, 5, 16), dtype=torch.uint8)
    scales = torch.randint(0, 256, (3, 48, 5), dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": torch.randn(3, 48)}
    weight = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    bias = tensors[f"{name}_bias"].to(dtype)
    return Made(tensors, {"quant_method": "mxfp4"}, {name: weight, f"{name}_bias": bias})


def compressed(dtype: torch.dtype, name: str, weights: dict[str, Any], tensors: dict[str, Tensor]) -> Made:
    """As compressed-tensors decompresses one weight."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    found = BaseCompressor.get_value_from_registry(name).decompress(tensors, scheme)["weight"].to(dtype)
    config = {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    stored = {f"model.fc.{key}": tensor for key, tensor in tensors.items()}
    return Made(stored | {"model.k_scale": torch.ones(1)}, config, {"model.fc.weight": found})


def compressed_fp8(dtype: torch.dtype, strategy: str, scale: Tensor, **more: Any) -> Made:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, **more}
    tensors = {"weight": random_fp8(200, 256), "weight_scale": scale}
    return compressed(dtype, "float-quantized", weights, tensors)


def compressed_fp4(dtype: torch.dtype, name: str, group: int, scale: Tensor, **more: Tensor) -> Made:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group" if more else "group"}
    packed = torch.randint(0, 256, (40, 160), dtype=torch.uint8)
    tensors = {"weight_packed": packed, "weight_scale": scale, **more}
    return compressed(dtype, name, weights | {"group_size": group}, tensors)


def modelopt(dtype: torch.dtype) -> Made:
    """As compressed-tensors converts it: exact only if the reciprocal of the second scale is."""
    scale = random_fp8(40, 20).abs()
    made = compressed_fp4(
        dtype, "nvfp4-pack-quantized", 16, scale, weight_global_scale=torch.tensor([2.0**9])
    )
    tensors = {
        "model.fc.weight": made.tensors["model.fc.weight_packed"],
        "model.fc.weight_scale": scale,
        "model.fc.weight_scale_2": torch.tensor(2.0**-9),
        "model.fc.input_scale": torch.tensor(0.5),
    }
    return Made(tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, made.weights)


KINDS: dict[str, Callable[[torch.dtype], Made]] = {
    "fp8 of transformers": transformers_fp8,
    "mxfp4 of gpt-oss": gpt_oss,
    "fp8 by tensor": lambda dtype: compressed_fp8(dtype, "tensor", random_scales(1)),
    "fp8 by channel": lambda dtype: compressed_fp8(
        dtype, "channel", random_scales(200, 1, dtype=torch.bfloat16)
    ),
    "fp8 by block": lambda dtype: compressed_fp8(
        dtype, "block", random_scales(2, 2, dtype=torch.bfloat16), block_structure=[128, 128]
    ),
    "fp8 by group": lambda dtype: compressed_fp8(dtype, "group", random_scales(200, 4), group_size=64),
    "nvfp4": lambda dtype: compressed_fp4(
        dtype, "nvfp4-pack-quantized", 16, random_fp8(40, 20), weight_global_scale=torch.tensor([687.3])
    ),
    "mxfp4": lambda dtype: compressed_fp4(
        dtype, "mxfp4-pack-quantized", 32, torch.randint(0, 255, (40, 10), dtype=torch.uint8)
    ),
    "nvfp4 of ModelOpt": modelopt,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_as_their_library_computes_them(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    made = KINDS[kind](dtype)
    write(tmp_path, made.tensors, made.config)
    assert_same_bits(fastload.load(tmp_path, dtype=dtype, options=OPTIONS), made.weights)


SCALES = {
    "normal": 3.0,
    "negative": -0.3,
    "largest": 3e38,
    "subnormal": 1e-40,
    "inf": float("inf"),
    "nan": float("nan"),
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_value_of_fp8(tmp_path: Path, dtype: torch.dtype, scale: str) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype).reshape(2, 128)
    tensors = {"a.weight": every, "a.weight_scale_inv": torch.tensor([[SCALES[scale]]])}
    write(tmp_path, tensors, FP8)
    assert_same_bits(fastload.load(tmp_path, options=OPTIONS), {"a.weight": every.float() * SCALES[scale]})


@pytest.mark.parametrize("factor", [687.3, 1e-30, 1e30])
def test_every_value_of_nvfp4(tmp_path: Path, factor: float) -> None:
    """Each byte with each scale."""
    scale = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(8, 32)
    packed = torch.arange(256, dtype=torch.uint8).reshape(32, 8).repeat(8, 1, 1)
    packed = torch.stack([packed.roll(step, 1) for step in range(32)]).reshape(256, 256)
    scales = scale.repeat(32, 1, 1).reshape(256, 32)
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": torch.tensor([factor])}
    for dtype in (torch.bfloat16, torch.float32):
        made = compressed(dtype, "nvfp4-pack-quantized", weights, tensors)
        write(tmp_path, made.tensors, made.config)
        assert_same_bits(fastload.load(tmp_path, dtype=dtype, options=OPTIONS), made.weights)


@pytest.mark.parametrize("kind", [*KINDS, "fp8 of DeepSeek"])
def test_tensors_of_any_strides(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = KINDS.get(kind, deepseek)(torch.bfloat16)
    write(tmp_path, made.tensors, made.config)
    expected = fastload.load(tmp_path, dtype="bfloat16", options=OPTIONS)
    columns_first = {name: torch.empty_like(each.mT).mT for name, each in expected.items() if each.dim() > 1}
    steps = {
        name: torch.empty(*each.shape, 2, dtype=each.dtype)[..., 0] for name, each in columns_first.items()
    }
    slices = {
        name: torch.empty(*each.shape[:-1], each.shape[-1] + 1, dtype=each.dtype)[..., :-1]
        for name, each in columns_first.items()
    }
    for into in (columns_first, steps, slices):
        if into is slices:
            monkeypatch.setattr(quantized, "_CHUNK_ELEMENTS", 1)  # a row at once
        fastload.load(tmp_path, into=into, dtype="bfloat16", names=list(into), options=OPTIONS)
        assert_same_bits(
            {name: each.contiguous() for name, each in into.items()}, {name: expected[name] for name in into}
        )


def test_without_dtype_weights_have_that_of_their_scales(tmp_path: Path) -> None:
    tensors = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensors |= {f"{dtype}.weight": random_fp8(4, 4), f"{dtype}.weight_scale": torch.ones(1, dtype=dtype)}
    write(tmp_path, tensors, FP8)
    loaded = fastload.load(tmp_path, options=OPTIONS)
    assert {name: str(each.dtype) for name, each in loaded.items()} == {
        name: name.removesuffix(".weight") for name in tensors if name.endswith(".weight")
    }


def test_modules_get_them_in_place(tmp_path: Path) -> None:
    made = deepseek(torch.bfloat16)
    write(tmp_path, {"fc.weight": made.tensors["odd.weight"],
                     "fc.weight_scale_inv": made.tensors["odd.weight_scale_inv"]}, FP8)  # fmt: skip
    expected = fastload.load(tmp_path, dtype="bfloat16", options=OPTIONS)["fc.weight"]
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = nn.ModuleDict({"fc": nn.Linear(450, 300, bias=False, dtype=torch.bfloat16)})
        fastload.load(tmp_path, into=model, dtype="bfloat16", options=OPTIONS)
        assert_same_bits({"": model["fc"].weight.detach()}, {"": expected})
    columns_first = torch.empty(450, 300, dtype=torch.bfloat16).t()
    fastload.load(tmp_path, into={"fc": {"weight": columns_first}}, dtype="bfloat16", options=OPTIONS)
    assert_same_bits({"": columns_first.contiguous()}, {"": expected})


def random_boxes(draw: random.Random, shape: torch.Size, number: int) -> list[Box]:
    """The complete tensor, and some boxes of it."""
    boxes = [Box.whole(shape)]
    for _ in range(number):
        offsets = tuple(draw.randrange(size) for size in shape)
        sizes = (draw.randint(1, size - at) for at, size in zip(offsets, shape, strict=True))
        boxes.append(Box(offsets, tuple(sizes)))
    return boxes


def part_of(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))].contiguous()


@pytest.mark.parametrize("kind", [*KINDS, "fp8 of DeepSeek"])
def test_any_box_of_a_weight(tmp_path: Path, kind: str) -> None:
    made = KINDS.get(kind, deepseek)(torch.bfloat16)
    write(tmp_path, made.tensors, made.config)
    draw = random.Random(kind)
    with fastload.open(tmp_path, options=OPTIONS) as checkpoint:
        complete = checkpoint.load(dtype="bfloat16")
        boxes, expected = {}, {}
        for name, tensor in complete.items():
            boxes[name] = []
            for number, box in enumerate(random_boxes(draw, tensor.shape, 12)):
                boxes[name].append((box, torch.empty(box.sizes, dtype=torch.bfloat16)))
                expected[f"{name} {number}"] = part_of(tensor, box)
        checkpoint.read(boxes, cast=True)
    found = {f"{name} {number}": each for name in boxes for number, (_, each) in enumerate(boxes[name])}
    assert_same_bits(found, expected)


class Arriving:
    """Boxes of the weights of a checkpoint whose bytes a test hands out as it likes.

    Args:
        made: The checkpoint.
        folder: Where to write it.
        boxes: For each weight.
        num_threads: Threads that dequantise.
    """

    def __init__(self, made: Made, folder: Path, boxes: dict[str, list[Box]], num_threads: int) -> None:
        write(folder, made.tensors, made.config)
        complete = fastload.load(folder, dtype="bfloat16", options=OPTIONS)
        manifest = quantized.dequantized(fastload.inspect(folder), {"quantization_config": made.config})
        self.builder = DestinationBuilder(manifest)
        self.targets, self.expected = {}, {}
        for name, of_weight in boxes.items():
            entry = manifest.by_name[name]
            for number, box in enumerate(of_weight):
                key = f"{name} {number}"
                self.targets[key] = target = torch.zeros(box.sizes, dtype=torch.bfloat16)
                self.expected[key] = part_of(complete[name], box)
                self.builder.add(
                    entry, torch.bfloat16, target, None if box == Box.whole(entry.shape) else box
                )
        self.writer = TensorWriter(self.builder.build(), num_threads)
        stored = [
            byte_view(made.tensors[one.entry.name])
            if one.runs is None
            else one.runs.of(byte_view(made.tensors[one.entry.name])).flatten()
            for one in self.writer.destinations
        ]
        self.data = torch.cat(stored)

    def arrive(self, begin: int, end: int, *, in_place: bool) -> None:
        """Bytes of all that is wanted arrive."""
        data = self.data[begin:end]
        if not in_place:
            self.writer.place(begin, data)
            return
        for piece in self.writer.targets(begin, len(data), len(data)):
            piece.copy_(data[: len(piece)])
            data = data[len(piece) :]
        self.writer.count([(begin, end - begin)])


@pytest.mark.parametrize("chunk_elements", [50, 1000])
@pytest.mark.parametrize("kind", [*KINDS, "fp8 of DeepSeek"])
def test_bytes_arrive_in_any_order(
    tmp_path: Path, kind: str, chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut anywhere, in place or in buffers, while threads dequantise what is there."""
    monkeypatch.setattr(quantized, "_CHUNK_ELEMENTS", chunk_elements)
    made, draw = KINDS.get(kind, deepseek)(torch.bfloat16), random.Random(kind)
    boxes = {
        name: random_boxes(draw, each.shape, 4) for name, each in made.weights.items() if "bias" not in name
    }
    arriving = Arriving(made, tmp_path, boxes, num_threads=3)
    nbytes = len(arriving.data)
    cuts = sorted({0, nbytes, *(draw.randrange(nbytes) for _ in range(200))})
    ranges = list(itertools.pairwise(cuts))
    draw.shuffle(ranges)
    for begin, end in ranges:
        arriving.arrive(begin, end, in_place=draw.random() < 0.5)
    arriving.writer.close()
    assert_same_bits(arriving.targets, arriving.expected)
    arriving.builder.copy()
    assert_same_bits(arriving.targets, arriving.expected)


@pytest.mark.parametrize("kind", ["fp8 by channel", "nvfp4 of ModelOpt", "mxfp4 of gpt-oss"])
def test_the_first_rows_do_not_wait_for_the_last(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "_CHUNK_ELEMENTS", 1000)
    made = KINDS[kind](torch.bfloat16)
    name = max(made.weights, key=lambda name: made.weights[name].numel())
    arriving = Arriving(made, tmp_path, {name: [Box.whole(made.weights[name].shape)]}, num_threads=1)
    destinations = arriving.writer.destinations
    values = max(range(len(destinations)), key=lambda index: destinations[index].nbytes)
    starts = [sum(one.nbytes for one in destinations[:index]) for index in range(len(destinations) + 1)]
    half = (starts[values] + starts[values + 1]) // 2
    arriving.arrive(0, starts[values], in_place=True)
    arriving.arrive(starts[values + 1], len(arriving.data), in_place=True)
    arriving.arrive(starts[values], half, in_place=True)
    (target,), (expected,) = arriving.targets.values(), arriving.expected.values()
    deadline, third = time.monotonic() + 20, len(target) // 3
    while not torch.equal(target[:third], expected[:third]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    arriving.arrive(half, starts[values + 1], in_place=True)
    arriving.writer.close()
    assert_same_bits(arriving.targets, arriving.expected)


@pytest.mark.slow
@ranks(2, accelerator=True)
def test_devices_get_them(rank: int, world: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    for number, kind in enumerate(("fp8 of DeepSeek", "fp8 by group", "nvfp4", "mxfp4", "mxfp4 of gpt-oss")):
        if importlib.util.find_spec("compressed_tensors") is None and kind in (
            "fp8 by group",
            "nvfp4",
            "mxfp4",
        ):
            continue
        made, folder = KINDS.get(kind, deepseek)(torch.bfloat16), tmp_path / str(number)
        if rank == 0:
            write(folder, made.tensors, made.config)
        torch.distributed.barrier()
        for dtype in ("bfloat16", "float32"):
            expected = fastload.load(folder, dtype=dtype, options=OPTIONS)
            found = fastload.load(folder, dtype=dtype, device="emu", options=OPTIONS)
            assert {each.device.type for each in found.values()} == {"emu"}
            assert_same_bits({name: each.cpu() for name, each in found.items()}, expected)


MESHES: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "fsdp": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "hsdp": ((2, 2), [Replicate(), Shard(0)]),
    "both": ((2, 2), [Shard(0), Shard(1)]),
    "strided": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
}


@pytest.mark.slow
@ranks(4)
def test_shards_need_the_scales_of_their_blocks_each_read_once(
    rank: int, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "_CHUNK_ELEMENTS", 1000)
    torch.manual_seed(0)
    many = {}
    for kind in ("fp8 of DeepSeek", "nvfp4 of ModelOpt", "mxfp4 of gpt-oss"):
        if "ModelOpt" in kind and importlib.util.find_spec("compressed_tensors") is None:
            continue
        made = KINDS.get(kind, deepseek)(torch.bfloat16)
        folder = tmp_path / kind.replace(" ", "-")
        if rank == 0:
            write(folder, made.tensors, made.config)
        many[folder] = sum(each.nbytes for name, each in made.tensors.items() if "input_" not in name)
    torch.distributed.barrier()
    for folder, nbytes in many.items():
        complete = fastload.load(folder, dtype="bfloat16", options=OPTIONS)
        for shape, placements in MESHES.values():
            mesh = init_device_mesh("cpu", shape)
            into, expected = {}, {}
            for name, tensor in complete.items():
                usable = [
                    one if getattr(one, "dim", -1) < tensor.dim() else Replicate() for one in placements
                ]
                expected[name] = distribute_tensor(tensor, mesh, usable, src_data_rank=None).to_local()
                into[name] = empty(tensor.shape, dtype=torch.bfloat16, device_mesh=mesh, placements=usable)
            reports: list[fastload.LoadReport] = []
            options = LoadOptions(
                dequantize=True, timeout_s=20, strategy="allgather", chunk_bytes=1000,
                on_report=reports.append,
            )  # fmt: skip
            fastload.load(folder, into=into, dtype="bfloat16", options=options)
            assert_same_bits({name: each.to_local() for name, each in into.items()}, expected)
            assert sum(one.bytes_read for one in reports[0].ranks) == nbytes


@pytest.mark.slow
@ranks(3)
def test_replicas_get_them_in_small_rounds(
    rank: int, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "_CHUNK_ELEMENTS", 1000)
    torch.manual_seed(0)
    made = deepseek(torch.bfloat16)
    if rank == 0:
        write(tmp_path, made.tensors, made.config)
    torch.distributed.barrier()
    expected = fastload.load(
        tmp_path, dtype="bfloat16", options=LoadOptions(dequantize=True, strategy="direct")
    )
    for strategy in ("allgather", "broadcast"):
        options = LoadOptions(dequantize=True, timeout_s=20, strategy=strategy, chunk_bytes=777)
        assert_same_bits(fastload.load(tmp_path, dtype="bfloat16", options=options), expected)


@pytest.fixture
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = deepseek(torch.bfloat16)
    return write(tmp_path_factory.mktemp("original"), made.tensors, made.config)


@pytest.mark.slow
@needs_mounts
@ranks(3)
@pytest.mark.parametrize("is_sharded", [False, True], ids=["replicas", "shards"])
def test_others_read_what_a_rank_cannot(
    rank: int,
    world: int,
    tmp_path: Path,
    original: Path,
    is_sharded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantized, "_CHUNK_ELEMENTS", 1000)
    copy(original, own_disk(tmp_path, rank))
    expected = fastload.load(original, dtype="bfloat16", options=replace(OPTIONS, strategy="direct"))
    mesh = init_device_mesh("cpu", (3,))
    into = {
        name: distribute_tensor(torch.zeros_like(each), mesh, [Shard(0)] if is_sharded else [Replicate()])
        for name, each in expected.items()
    }
    options = replace(OPTIONS, strategy="allgather", chunk_bytes=500)
    with fastload.open(tmp_path, options=options) as checkpoint:
        if rank == 1:
            truncate(tmp_path, 0.6)
        checkpoint.load(into=into, dtype="bfloat16")
        assert checkpoint.report is not None
        assert "stopped reading" in checkpoint.report.ranks[1].note
    assert_same_bits({name: each.full_tensor() for name, each in into.items()}, expected)


def test_a_failed_load_keeps_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the garbage collector, in the midst of a weight."""
    monkeypatch.setattr(quantized, "_CHUNK_ELEMENTS", 1000)
    made = deepseek(torch.bfloat16)
    write(tmp_path, made.tensors, made.config)
    options = replace(OPTIONS, chunk_bytes=10_000, retries=0, io="buffered")
    into = {name: torch.zeros_like(each) for name, each in made.weights.items()}
    memory = [weakref.ref(each.untyped_storage()) for each in into.values()]
    gc.collect()
    gc.disable()
    try:
        with fastload.open(tmp_path, options=options) as checkpoint:
            truncate(tmp_path, 0.6)
            with contextlib.suppress(fastload.FastloadError):
                checkpoint.load(into=into, dtype="bfloat16")
                pytest.fail("it loads a file that was cut")
        del into
        until = time.monotonic() + 20
        while kept := [each for each in memory if each() is not None]:
            assert time.monotonic() < until, f"{len(kept)} of {len(memory)} are kept"
            time.sleep(0.05)
    finally:
        gc.enable()


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def only(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for other in tensors.keys() - {name}:
            del tensors[other]

    return change


def changed(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


BAD: dict[str, tuple[dict[str, Any] | None, Callable[[dict[str, Tensor]], None], str]] = {
    "no scale": (FP8, without("odd.weight_scale_inv"), r"'odd.weight'.*'odd.weight_scale_inv' is missing"),
    "no scale of a tensor": (
        {"quant_method": "fp8"},
        only("odd.weight"),
        r"'odd.weight'.*'odd.weight_scale' is missing",
    ),
    "no weight": (FP8, without("odd.weight"), "'odd.weight_scale_inv': a scale, but there is no quantised"),
    "not quantised": (FP8, changed("odd.weight", torch.ones(2)), "'odd.weight_scale_inv': a scale, but"),
    "other shape": (
        FP8,
        changed("odd.weight_scale_inv", torch.ones(3, 3)),
        r"scales of shape \[3, 3\] do not fit 'odd.weight' of shape \[300, 450\] .*128 x 128",
    ),
    "other dtype": (FP8, changed("odd.weight_scale_inv", torch.ones(3, 4).long()), "a scale of dtype I64"),
    "zero points": (
        FP8,
        changed("odd.weight_zero_point", torch.ones(3, 4)),
        "'odd.weight_zero_point': weights with zero points",
    ),
    "no blocks": (
        FP8,
        changed("e_scales", torch.ones(2, 2, 2, dtype=torch.uint8)),
        "'e_scales': a scale, but there is no",
    ),
    "no scales": (FP8, changed("e_blocks", torch.ones(2, 2, 2, 16, dtype=torch.uint8)), "'e_scales' is miss"),
    "another method": ({"quant_method": "gptq"}, without("odd.weight"), "quant_method 'gptq' cannot be deq"),
    "another format": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        without("odd.weight"),
        "the format 'pack-quantized' of compressed-tensors",
    ),
    "not said": (None, without("odd.weight"), "config.json has no quantization_config"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named(tmp_path: Path, case: str) -> None:
    config, change, message = BAD[case]
    tensors = dict(deepseek(torch.bfloat16).tensors)
    change(tensors)
    write(tmp_path, tensors, config)
    with pytest.raises(ManifestError, match=message):
        fastload.load(tmp_path, options=OPTIONS)


@ranks(2)
def test_all_ranks_hear_of_it(rank: int, world: int, tmp_path: Path) -> None:
    if rank == 0:
        write(tmp_path, {"a.weight": random_fp8(2, 2)}, FP8)
    torch.distributed.barrier()
    with pytest.raises(fastload.FastloadError, match=r"'a\.weight_scale_inv' is missing"):
        fastload.load(tmp_path, options=OPTIONS)
    (tmp_path / "config.json").unlink(missing_ok=True)
    torch.distributed.barrier()
    with pytest.raises(fastload.FastloadError, match=r"config\.json"):
        fastload.load(tmp_path, options=OPTIONS)


def test_streams_and_states_of_fastload_are_not_for_it(tmp_path: Path) -> None:
    made = deepseek(torch.bfloat16)
    write(tmp_path / "a", made.tensors, made.config)
    with (
        fastload.open(tmp_path / "a", options=OPTIONS) as checkpoint,
        pytest.raises(OptionError, match="dequantize"),
    ):
        checkpoint.tensors()
    fastload.save({"x": torch.ones(2), "step": 1}, tmp_path / "b")
    with pytest.raises(OptionError, match="dequantize"):
        fastload.load(tmp_path / "b", options=OPTIONS)
