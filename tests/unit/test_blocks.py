"""What is to be copied, cut into blocks: every byte in one block, and what is lacking is what is not held."""

from __future__ import annotations

import random

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fastload.ext.staging.inventory import Inventory, as_ranges, held_by_all, take_inventory
from fastload.ext.staging.stock import journal_entry, parse_journal
from fastload.formats.manifest import FileEntry, Manifest, TensorEntry

HEADER_BYTES = 77


def manifest_of(tensor_bytes: list[list[int]], block_bytes: int) -> Manifest:
    """One file for each list, with a commit record if there is a block length."""
    files, tensors = [], []
    for number, lengths in enumerate(tensor_bytes):
        offset, checksums = HEADER_BYTES, b""
        for nbytes in lengths:
            tensors.append(
                TensorEntry(f"{number}.{offset}.{nbytes}", "U8", (nbytes,), number, offset, nbytes)
            )
            for start in range(0, nbytes, block_bytes) if block_bytes else ():
                checksums += xxhash.xxh3_64_digest(f"{number}/{offset + start}".encode())
            offset += nbytes
        files.append(FileEntry(f"m{number}.safetensors", offset, "v1", "", checksums))
    return Manifest(
        "url",
        tuple(files),
        tuple(tensors),
        block_bytes=block_bytes,
        record_digest="d" * bool(block_bytes),
        format="fastload" if block_bytes else "safetensors",
    )


def others_of(lengths: list[int]) -> list[FileEntry]:
    return [FileEntry(f"{'az'[n % 2]}{n}", nbytes, f"v{n}", "") for n, nbytes in enumerate(lengths)]


lengths = st.lists(st.integers(0, 50), max_size=4)
inventories = st.builds(
    lambda tensors, others, recorded, block: take_inventory(
        manifest_of(tensors, recorded), others_of(others), block_bytes=block, nonce=""
    ),
    st.lists(lengths, min_size=1, max_size=3),
    lengths,
    st.sampled_from([0, 7, 20]),
    st.integers(1, 30),
)


@given(inventories)
def test_every_byte_is_in_one_block(inventory: Inventory) -> None:
    covered = [0] * len(inventory.files)
    for number in range(len(inventory.blocks)):
        block = inventory.blocks[number]
        assert block.number == number
        assert block.offset == covered[block.file]
        assert 0 < block.nbytes <= inventory.block_bytes
        covered[block.file] += block.nbytes
        if recorded := inventory.recorded(number):
            name = inventory.files[block.file].name
            assert recorded == xxhash.xxh3_64_digest(f"{name[1]}/{block.offset}".encode())
        else:
            file = inventory.files[block.file]
            assert not file.checksums or block.offset + block.nbytes <= HEADER_BYTES
    assert covered == [file.nbytes for file in inventory.files]
    assert [file.name for file in inventory.files] == sorted(file.name for file in inventory.files)


@given(inventories, st.randoms(use_true_random=False))
def test_what_is_lacking_is_what_is_not_held(inventory: Inventory, rng: random.Random) -> None:
    held = bytes(rng.choice([0, 1, 1]) for _ in range(len(inventory.blocks)))
    found: set[tuple[int, int]] = set()
    for run in inventory.lacking(held):
        position, number = run.offset, run.first
        while position < run.offset + run.nbytes:
            block = inventory.blocks[number]
            assert not held[number]
            assert (block.file, block.offset) == (run.file, position)
            found.update((run.file, at) for at in range(position, position + block.nbytes))
            position, number = position + block.nbytes, number + 1
        assert position == run.offset + run.nbytes
    index = {file.name: number for number, file in enumerate(inventory.files)}
    there = {
        (index[name], at)
        for name, ranges in inventory.ranges(held).items()
        for begin, end in ranges
        for at in range(begin, end)
    }
    everything = {(n, at) for n, file in enumerate(inventory.files) for at in range(file.nbytes)}
    assert found | there == everything
    assert not found & there


@given(st.lists(st.lists(st.booleans(), min_size=9, max_size=9), max_size=4))
def test_held_by_all(hosts: list[list[bool]]) -> None:
    told = [as_ranges(bytes(held)) for held in hosts]
    assert list(held_by_all(told, 9)) == [all(held[block] for held in hosts) for block in range(9)]


def test_the_identity_is_that_of_the_bytes() -> None:
    def identity(manifest: Manifest, others: list[FileEntry], nonce: str = "") -> str:
        return take_inventory(manifest, others, block_bytes=10, nonce=nonce).identity

    def newer(manifest: Manifest) -> Manifest:
        files = tuple(FileEntry(f.name, f.nbytes, "v2", "", f.checksums) for f in manifest.files)
        return Manifest(
            "other",
            files,
            manifest.tensors,
            block_bytes=manifest.block_bytes,
            record_digest=manifest.record_digest,
            format=manifest.format,
        )

    plain, saved, others = manifest_of([[5, 9]], 0), manifest_of([[5, 9]], 7), others_of([3])
    assert identity(plain, others) == identity(plain, others)
    assert identity(plain, others) != identity(newer(plain), others), "versions are all there is to go by"
    assert identity(saved, others) == identity(newer(saved), others), "the record says more than versions"
    assert identity(saved, others) != identity(saved, [FileEntry("a0", 3, "v9", "")])
    assert identity(saved, others) != identity(saved, others_of([4]))
    assert identity(plain, others) != identity(plain, others, nonce="x")


@given(st.binary(max_size=200))
def test_a_journal_may_be_anything(text: bytes) -> None:
    noted = parse_journal(text, 1 << 20)
    assert len(noted) <= len(text) // len(journal_entry(0, bytes(8)))
    assert all(0 <= number < 1 << 20 and len(digest) == 8 for number, digest in noted.items())
