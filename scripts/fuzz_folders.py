"""Mutates small directories of torch and other programs, and loads them: an error, or correct values.

    .venv/bin/python scripts/fuzz_folders.py --kind dcp --count 20000 --seed 1

A load must raise a `FastloadError`, or return what torch reads from the same bytes: each tensor is the one
that was saved, or the one that `torch.load(weights_only=True)` or the safetensors library finds in that file.
Bytes of tensors are not mutated. A load that takes more than some seconds, or much memory, fails.
"""

from __future__ import annotations

import io
import json
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import fastload
from fastload.errors import FastloadError, ManifestError
from fastload.formats.encoder import encode_state

_LOAD_S = 20
_ROOM_BYTES = 4 << 30  # of address space, beyond what there is at the beginning
_SMALL = (0, 1, 2, 0x7F, 0x80, 0xFF)


def saved_state() -> dict[str, Any]:
    generator = torch.manual_seed(5)
    return {
        "model": {"w": torch.randn(6, 4, generator=generator), "turned": torch.randn(6, 4).t()},
        "optimizer": {
            "state": {0: {"step": torch.tensor(2.0), "exp_avg": torch.randn(6, 4).to(torch.bfloat16)}},
            "param_groups": [{"lr": 0.1, "params": [0], "betas": (0.9, 0.99)}],
        },
        "note": "text",
        "numbers": [1, {"x": torch.arange(3)}, None],
    }


def make_directories(root: Path) -> list[Path]:
    """Saves by DCP in one file, in several, and without collectives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = saved_state()
        dcp.save(state, checkpoint_id=root / "one")
        dcp.save(
            state,
            storage_writer=dcp.FileSystemWriter(root / "items", single_file_per_rank=False),
        )
    shutil.copytree(root / "one", root / "alone")
    (root / "alone" / ".metadata").rename(root / "alone" / "__0.metadata")
    return [root / "one", root / "items", root / "alone"]


def make_megatron(root: Path) -> list[Path]:
    """Lays out a directory as `megatron.core.dist_checkpointing` does: a common file next to DCP's."""
    sharded = {"decoder.weight": torch.randn(2, 3, 4), "decoder.bias": torch.ones(3)}
    objects = {"rng_state/shard_0_1": {"seed": 7, "cuda": torch.arange(4)}}
    with warnings.catch_warnings(action="ignore"):
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
        dcp.save({**sharded, **objects}, checkpoint_id=root / "megatron", planner=planner, no_dist=True)
    common = {"iteration": 9, "args": {"lr": 0.5}, "scale": torch.tensor(3.0), "more": [torch.randn(2, 3)]}
    torch.save(common, root / "megatron" / "common.pt")
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (root / "megatron" / "metadata.json").write_text(json.dumps(backends))
    return [root / "megatron"]


def make_bin(root: Path) -> list[Path]:
    """Lays out a directory as older transformers do: files of torch.save, and an index."""
    (root / "bin").mkdir()
    whole = torch.randn(4, 6)
    parts = [
        {"a.weight": whole, "a.turned": whole.t(), "a.bias": torch.ones(3).to(torch.bfloat16)},
        {"b.weight": torch.randn(5, 2), "b.part": torch.randn(8, 3)[2:5], "b.count": torch.tensor(7)},
    ]
    names = [f"pytorch_model-{number:05d}-of-00002.bin" for number in (1, 2)]
    for name, part in zip(names, parts, strict=True):
        torch.save(part, root / "bin" / name)
    weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    index = {"metadata": {"total_size": 300}, "weight_map": weight_map}
    (root / "bin" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return [root / "bin"]


def make_shards(root: Path) -> list[Path]:
    """Lays out a directory as `HuggingFaceStorageWriter(save_distributed=True)` does on two ranks."""
    (root / "shards").mkdir()
    weight, bias = torch.randn(6, 4), torch.randn(5)
    for rank in range(2):
        part = {"w": weight[3 * rank : 3 * rank + 3].clone(), "v": bias[3 * rank : 3 * rank + 3].clone()}
        part |= {"only": torch.arange(3)} if rank else {}
        offsets = {"w": [3 * rank, 0], "v": [3 * rank], "only": [0]}
        info = json.dumps({name: {"saved_offsets": offsets[name]} for name in part})
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        save_file(part, root / "shards" / name, metadata={"DCP_SHARDING_INFO": info, "format": "pt"})
    return [root / "shards"]


def data_ranges(folder: Path) -> dict[str, list[tuple[int, int]]]:
    """Returns the byte ranges of tensors, by file."""
    manifest = fastload.inspect(folder)
    ranges: dict[str, list[tuple[int, int]]] = {}
    for extent in manifest.extents:
        name = manifest.files[extent.file].name
        ranges.setdefault(name, []).append((extent.offset, extent.offset + extent.nbytes))
    return ranges


def mutate(data: bytearray, at: int, room: int, choose: random.Random) -> None:
    """Changes, removes or inserts at most `room` bytes."""
    kind = choose.randrange(8)
    if kind < 2:
        data[at] ^= 1 << choose.randrange(8)
    elif kind < 4:
        data[at] = choose.choice((*_SMALL, data[at] + 1 & 0xFF, data[at] - 1 & 0xFF, choose.randrange(256)))
    elif kind == 4:
        width = min(choose.choice((2, 4, 8)), room)
        data[at : at + width] = choose.choice((b"\0", b"\xff", b"\x7f"))[:1] * len(data[at : at + width])
    elif kind == 5:
        del data[at : at + min(choose.randint(1, 64), room)]
    elif kind == 6:
        data[at:at] = choose.randbytes(choose.randint(1, 16))
    else:
        other, length = choose.randrange(len(data)), min(choose.randint(1, 64), room)
        data[at : at + length] = data[other : other + length]


def spots(folder: Path, ranges: dict[str, list[tuple[int, int]]]) -> list[tuple[Path, int, int]]:
    """Returns all positions outside of tensors, and the distance of each to the next tensor."""
    found = []
    for path in sorted(folder.iterdir()):
        taken = ranges.get(path.name, [])
        nbytes = path.stat().st_size
        for at in range(nbytes):
            if not any(begin <= at < end for begin, end in taken):
                room = min([begin - at for begin, _ in taken if begin > at], default=nbytes - at)
                found.append((path, at, room))
    return found


def tensors_of(state: Any) -> dict[str, Tensor]:
    return encode_state(state).tensors


def run_one(folder: Path, expected: dict[str, Tensor]) -> str:
    """Loads a directory; returns the outcome."""
    try:
        state = fastload.load(folder)
    except FastloadError as error:
        return "refused" if isinstance(error, ManifestError) else type(error).__name__
    found = tensors_of(state)
    wrong = [
        name for name, tensor in found.items() if not any(is_same(tensor, one) for one in expected.values())
    ]
    if not wrong:
        return "right" if found.keys() == expected.keys() else "right, and named otherwise"
    manifest = fastload.inspect(folder)
    for name in wrong:
        if not is_as_torch_reads(folder, manifest, name, found[name]):
            raise AssertionError(f"tensor {name} is not what torch reads there: {found[name]}")
    return "as torch reads what is there now"


def is_same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def is_as_torch_reads(folder: Path, manifest: fastload.Manifest, name: str, tensor: Tensor) -> bool:
    """Whether torch reads the same values from the item of a tensor."""
    entry = manifest.by_name[name]
    path = folder / manifest.files[entry.file].name
    if path.suffix == ".safetensors":
        return is_same(joined_shards(folder, name, tensor), tensor)
    data = path.read_bytes()
    begin = data.rfind(b"PK\3\4", 0, data.rfind(b"data.pkl", 0, entry.offset))
    end = data.find(b"PK\5\6", entry.offset) + 22
    archive = data[begin:end]
    for readable in (lambda: archive, lambda: repacked(archive)):
        try:
            read = torch.load(io.BytesIO(readable()), weights_only=True)
        except Exception:  # torch does not read it
            continue
        return any(is_same(one, tensor) for one in tensors_of({"it": read}).values())
    return False


def repacked(archive: bytes) -> bytes:
    """Returns an archive with only the same pickle and storages."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as found, zipfile.ZipFile(packed, "w") as made:
        for record in found.infolist():
            _, _, name = record.filename.partition("/")
            if name == "data.pkl" or name.startswith("data/"):
                at = record.header_offset + 30
                at += sum(struct.unpack_from("<HH", archive, at - 4))  # the name, and padding
                made.writestr(f"it/{name}", archive[at : at + record.file_size])
        made.writestr("it/version", "3")
        made.writestr("it/byteorder", "little")
    return packed.getvalue()


def joined_shards(folder: Path, name: str, like: Tensor) -> Tensor:
    """Assembles a tensor from the shards that the safetensors library reads."""
    whole = torch.full_like(like, 99)
    for path in sorted(folder.iterdir()):
        try:
            with safe_open(path, "pt") as file:
                infos = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
                if name in file.keys():  # noqa: SIM118  (it is no dict)
                    part = file.get_tensor(name)
                    offsets = infos.get(name, {}).get("saved_offsets", [0] * part.dim())
                    place = [slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True)]
                    if part.dtype != like.dtype or whole[tuple(place)].shape != part.shape:
                        return torch.empty(0)
                    whole[tuple(place)] = part
        except SafetensorError:
            continue
    return whole


KINDS = {"dcp": make_directories, "megatron": make_megatron, "bin": make_bin, "shards": make_shards}


def outcomes(kind: str, count: int, seed: int) -> Iterator[str]:
    choose = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="fuzz-folders-") as name:
        root = Path(name)
        folders = KINDS[kind](root)
        expected = {folder: tensors_of(fastload.load(folder)) for folder in folders}
        places = {folder: spots(folder, data_ranges(folder)) for folder in folders}
        for number in range(count):
            folder = folders[number % len(folders)]
            by_file: dict[Path, list[tuple[int, int]]] = {}
            for _ in range(choose.choice((1, 1, 1, 2, 4))):
                path, *spot = choose.choice(places[folder])
                by_file.setdefault(path, []).append((spot[0], spot[1]))
            originals = {path: path.read_bytes() for path in by_file}
            for path, chosen in by_file.items():
                data = bytearray(originals[path])
                for at, room in sorted(chosen, reverse=True):
                    if at < len(data):
                        mutate(data, at, room, choose)
                path.write_bytes(data)
            try:
                yield limited(lambda folder=folder: run_one(folder, expected[folder]))
            except BaseException as error:
                print(
                    f"mutation {number} of seed {seed}, in {sorted(p.name for p in by_file)}: {error!r}",
                    file=sys.stderr,
                )
                keep = Path(tempfile.mkdtemp(prefix="fuzz-folders-kept-"))
                shutil.copytree(folder, keep / folder.name)
                print(f"kept in {keep}", file=sys.stderr)
                yield f"WRONG: {type(error).__name__}"
            for path, data in originals.items():
                path.write_bytes(data)


def limited(call: Callable[[], str]) -> str:
    """Calls a function with limits of time and memory."""
    signal.alarm(_LOAD_S)
    try:
        return call()
    finally:
        signal.alarm(0)


def too_long(number: int, frame: object) -> None:
    raise AssertionError(f"it took longer than {_LOAD_S} s")


@click.command()
@click.option("--kind", default="dcp", type=click.Choice([*KINDS]), show_default=True, help="Of directories.")
@click.option("--count", default=20_000, show_default=True, help="Mutations.")
@click.option("--seed", default=1, show_default=True, help="Of the choices.")
def main(kind: str, count: int, seed: int) -> None:
    """Load mutated directories, and count the outcomes."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, too_long)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + _ROOM_BYTES, now + _ROOM_BYTES))
    tally = Counter(outcomes(kind, count, seed))
    for what, times in tally.most_common():
        print(f"{times:8} {what}")
    sys.exit(any(what.startswith("WRONG") for what in tally))


if __name__ == "__main__":
    main()
