"""Checkpoints for tests: files made by hand, byte by byte, and what the reference library reads from them."""

from __future__ import annotations

import json
import math
import os
import random
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import xxhash
from torch import Tensor

from fastload.formats.record import Record, RecordedFile

BITS = {
    **dict.fromkeys("BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ".split(), 8),
    **dict.fromkeys("I16 U16 F16 BF16".split(), 16),
    **dict.fromkeys("I32 U32 F32".split(), 32),
    **dict.fromkeys("C64 F64 I64 U64".split(), 64),
    "F4": 4,
}

Row = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def write_file(
    path: Path,
    rows: Iterable[Row],
    *,
    metadata: Mapping[str, str] | None = None,
    padding: int = 0,
    seed: int = 0,
) -> int:
    """Writes random bytes as the tensors of the rows, one after the other; returns how many bytes of data.

    Unlike the reference's writer it neither sorts nor aligns: `padding` blanks go to the end of the header.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    rng = random.Random(f"{path.name} {seed}")
    data = bytearray()
    for name, dtype, shape in rows:
        nbytes = math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + nbytes]}
        values = rng.randbytes(nbytes)
        data += bytes(value & 1 for value in values) if dtype == "BOOL" else values
    text = json.dumps(header, ensure_ascii=False).encode() + b" " * padding
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return len(data)


def write_sharded(folder: Path, shards: Mapping[str, Iterable[Row]], *, index: bool) -> int:
    """Writes several files, and on request the Hugging Face index; returns how many bytes of data."""
    weight_map, total = {}, 0
    for file, rows in shards.items():
        rows = list(rows)
        total += write_file(folder / file, rows)
        weight_map.update({name: file for name, _, _ in rows})
    if index:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
    return total


def record_by_hand(
    folder: Path, block_bytes: int, *, state: Any = None, metadata: Mapping[str, str] | None = None
) -> Record:
    """Writes the commit record of the safetensors files in a folder, as a save would have."""
    files = []
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        header.pop("__metadata__", None)
        checksums = b""
        for start, end in sorted(entry["data_offsets"] for entry in header.values()):
            for at in range(begin + start, begin + end, block_bytes):
                checksums += xxhash.xxh3_64_digest(data[at : min(at + block_bytes, begin + end)])
        digest = xxhash.xxh3_64_digest(data[:begin])
        files.append(RecordedFile(path.name, len(data), begin, digest, checksums))
    record = Record(block_bytes, tuple(files), state, dict(metadata or {}))
    (folder / "fastload.json").write_bytes(record.to_bytes())
    return record


def seal(record: Path, **changes: Any) -> None:
    """Changes what a commit record says as another version would write it: its own checksum is right."""
    body = {**json.loads(record.read_bytes()), **changes}
    del body["checksum"]
    digest = xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    record.write_text(json.dumps({**body, "checksum": digest}, sort_keys=True, separators=(",", ":")))


def flip(path: Path, at: int) -> None:
    """Flips one bit of the byte at a place, counted from the end if negative."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def rot(path: Path, at: int) -> None:
    """The same as a disk does it: nobody wrote, so the time of the last write stays."""
    before = path.stat()
    flip(path, at)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def write_hub_cache(root: Path, shards: Mapping[str, Iterable[Row]]) -> Path:
    """Writes blobs, and a snapshot of relative symbolic links to them, as huggingface_hub does."""
    repo = root / "models--org--name"
    snapshot = repo / "snapshots" / "0123abcd"
    write_sharded(snapshot, shards, index=True)
    (repo / "blobs").mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        blob = repo / "blobs" / f"{number:064x}"
        file.rename(blob)
        file.symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def load_reference(path: Path) -> dict[str, Tensor]:
    """What the reference library reads from a file, or from all safetensors files of a directory."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(safetensors.torch.load_file(file))
    return tensors


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor, in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same_bits(tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> None:
    """Compares names, dtypes, shapes and bytes."""
    assert tensors.keys() == reference.keys()
    for name, wanted in reference.items():
        found = tensors[name]
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
        assert raw(found) == raw(wanted), name


def assert_own_storage(tensors: Mapping[str, Tensor]) -> None:
    """No tensor is a view: of another one, or of something larger."""
    seen: dict[int, str] = {}
    for name, tensor in tensors.items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
        if tensor.nbytes:
            pointer = tensor.untyped_storage().data_ptr()
            assert pointer not in seen, f"{name} shares memory with {seen[pointer]}"
            seen[pointer] = name
