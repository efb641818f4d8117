"""Opening checkpoints that have a commit record, or should have one: damage, mix-ups, and what it costs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import fastload
from fastload.errors import CheckpointError, ChecksumError, IncompleteCheckpoint, ManifestError
from fastload.formats.manifest import Manifest
from fastload.formats.open import read_manifest
from fastload.formats.record import parse
from fastload.storage.local import LocalStorage
from tests.checkpoints import flip, record_by_hand, write_file, write_sharded

ROWS = [("a", "F32", (100, 3)), ("empty", "F32", (0, 3)), ("b", "U8", (1001,)), ("c", "BF16", ())]
BLOCK_BYTES = 256


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "ckpt"
    write_sharded(folder, {"x.safetensors": ROWS[:2], "y.safetensors": ROWS[2:]}, index=True)
    record_by_hand(folder, BLOCK_BYTES, state={"deep": [1, 2.5, None]}, metadata={"run": "seven"})
    return folder


def rewrite(folder: Path, **changes: object) -> None:
    path = folder / "fastload.json"
    path.write_bytes(replace(parse(path.read_bytes()), **changes).to_bytes())  # type: ignore[arg-type]


def test_the_manifest_has_what_the_record_says(folder: Path) -> None:
    manifest = fastload.inspect(folder)
    assert (manifest.block_bytes, manifest.structure) == (BLOCK_BYTES, {"deep": [1, 2.5, None]})
    assert manifest.metadata == {"run": "seven"}
    assert [len(file.checksums) // 8 for file in manifest.files] == [5, 4 + 1]
    again = Manifest.from_bytes(manifest.to_bytes())
    assert again == manifest
    assert again.digest() == manifest.digest()
    first = manifest.files[0]
    others = [
        replace(manifest, block_bytes=BLOCK_BYTES + 1),
        replace(manifest, structure=None),
        replace(manifest, files=(replace(first, checksums=first.checksums[::-1]), *manifest.files[1:])),
    ]
    assert len({manifest.digest(), *(other.digest() for other in others)}) == 4


def test_files_that_the_record_does_not_name_are_no_part_of_it(folder: Path) -> None:
    write_file(folder / "z.safetensors", [("a", "F32", (3,))])
    (folder / "model.safetensors.index.json").write_text("not even JSON")
    assert [file.name for file in fastload.inspect(folder).files] == ["x.safetensors", "y.safetensors"]


def test_without_a_record_nothing_is_verified(folder: Path) -> None:
    (folder / "fastload.json").unlink()
    manifest = fastload.inspect(folder)
    assert (manifest.block_bytes, manifest.structure, manifest.files[0].checksums) == (0, None, b"")
    flip(folder / "x.safetensors", -1)
    reports: list[fastload.LoadReport] = []
    fastload.load(folder, options=fastload.LoadOptions(on_report=reports.append))
    assert reports[0].bytes_verified == 0
    with pytest.raises(CheckpointError, match="it has no checksums to verify") as raised:
        fastload.verify(folder)
    assert raised.type is CheckpointError


def test_a_save_that_has_not_ended(folder: Path) -> None:
    (folder / "fastload.saving.json").write_text("{}")
    assert len(fastload.inspect(folder).tensors) == 4  # the record decides
    (folder / "fastload.json").unlink()
    for call in (fastload.inspect, fastload.load, fastload.verify):
        with pytest.raises(IncompleteCheckpoint, match=r"not ended: fastload\.saving\.json but"):
            call(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(IncompleteCheckpoint, match="a save to it has not ended"):
        fastload.load(folder)


def test_missing_files(folder: Path) -> None:
    (folder / "y.safetensors").unlink()
    with pytest.raises(IncompleteCheckpoint, match=r"1 of 2 files missing: .*y.safetensors.*fastload.json"):
        fastload.load(folder)


@pytest.mark.parametrize("change", ["cut", "longer"])
def test_files_of_another_size(folder: Path, change: str) -> None:
    path = folder / "y.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] if change == "cut" else data + b"\0")
    wanted = rf"y.safetensors: has {len(data) + (-1 if change == 'cut' else 1)} bytes, of {len(data)} that"
    with pytest.raises(ManifestError, match=wanted):
        fastload.load(folder)


def test_a_flipped_bit_of_a_header_is_found(folder: Path) -> None:
    path = folder / "x.safetensors"
    length = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    for at in range(0, length, 3):
        flip(path, at)
        with pytest.raises(ChecksumError, match=rf"x.safetensors \[bytes 0-{length}\]: the header"):
            fastload.inspect(folder)
        flip(path, at)
    fastload.inspect(folder)


def test_a_file_of_another_checkpoint_is_found(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_sharded(other, {"x.safetensors": ROWS[:2], "y.safetensors": ROWS[2:]}, index=True)
    write_file(other / "y.safetensors", ROWS[2:], seed=1)
    assert (other / "y.safetensors").stat().st_size == (folder / "y.safetensors").stat().st_size
    shutil.copy(other / "y.safetensors", folder / "y.safetensors")
    with pytest.raises(ChecksumError, match=r"y.safetensors: block \d"):
        fastload.load(folder)
    swapped = [("a", "F32", (3, 100)), *ROWS[1:2]]
    write_file(folder / "x.safetensors", swapped)
    with pytest.raises(ChecksumError, match=r"x.safetensors .* the header is damaged"):
        fastload.load(folder)


def test_a_record_that_does_not_fit_its_files(folder: Path) -> None:
    record = parse((folder / "fastload.json").read_bytes())
    first, second = record.files
    for checksums in (b"", first.checksums[:-8], first.checksums + bytes(8)):
        rewrite(folder, files=(replace(first, checksums=checksums), second))
        with pytest.raises(ManifestError, match=rf"{len(checksums) // 8} checksums for 5 blocks"):
            fastload.load(folder)
    rewrite(folder, files=record.files, block_bytes=BLOCK_BYTES // 2)
    with pytest.raises(ManifestError, match="5 checksums for 10 blocks"):
        fastload.load(folder)
    rewrite(folder, files=record.files, block_bytes=2**63 - 1)
    with pytest.raises(ManifestError, match="5 checksums for 1 blocks"):
        fastload.load(folder)
    rewrite(
        folder, block_bytes=BLOCK_BYTES, files=(replace(first, header_bytes=first.header_bytes + 1), second)
    )
    with pytest.raises(ChecksumError, match="the header is damaged"):
        fastload.load(folder)


def test_a_flipped_bit_of_the_record_is_found(folder: Path) -> None:
    path = folder / "fastload.json"
    for at in range(0, path.stat().st_size, 5):
        flip(path, at)
        with pytest.raises(CheckpointError):
            fastload.inspect(folder)
        flip(path, at)


class CountingStorage(LocalStorage):
    """Counts what would be requests on an object store, whose listing has the sizes."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.reads: list[tuple[str, int, int]] = []

    def read_into(self, name: str, offset: int, buffers: list[memoryview], version: str = "") -> None:  # type: ignore[override]
        self.reads.append((name, offset, sum(map(len, buffers))))
        super().read_into(name, offset, buffers, version)


def test_a_record_costs_no_more_requests_than_an_index(folder: Path) -> None:
    storage = CountingStorage(str(folder))
    read_manifest(storage)
    storage.close()
    sizes = {name: 8 + int.from_bytes((folder / name).read_bytes()[:8], "little") for name in
             ("x.safetensors", "y.safetensors")}  # fmt: skip
    record = ("fastload.json", 0, (folder / "fastload.json").stat().st_size)
    assert sorted(storage.reads) == [record, *((name, 0, size) for name, size in sizes.items())]


def test_a_huge_record_is_refused_unread(folder: Path) -> None:
    with (folder / "fastload.json").open("r+b") as file:
        file.truncate((1 << 30) + 1)  # sparse
    with pytest.raises(ManifestError, match="record of 1073741825 bytes is over the limit"):
        fastload.inspect(folder)


def test_a_record_of_no_files(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    record_by_hand(folder, BLOCK_BYTES, state=json.loads('{"dict": ["step", 1]}'))
    assert fastload.load(folder) == {"step": 1}
    assert fastload.verify(folder).num_blocks == 0
