"""Seals a checkpoint of any format: all ranks compute its checksums together."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from fastload.comm.hosts import host_of
from fastload.comm.responses import Each
from fastload.comm.world import World
from fastload.errors import CheckpointError, ChecksumError
from fastload.ext.checksums.seal import Seal, require_disjoint, url_of_seal
from fastload.formats.manifest import Manifest, blocks_of_files, is_single_file
from fastload.formats.names import NAMES, RECORD_NAME, SEAL_NAME
from fastload.formats.open import read_manifest
from fastload.formats.record import CHECKSUM_BYTES
from fastload.geometry.blocks import good_block_bytes
from fastload.loading.access import open_access
from fastload.loading.session import Session
from fastload.loading.verify import CompleteRead, compare_sha_256, team_of
from fastload.options import LoadOptions, Patience
from fastload.report import VerifyReport
from fastload.storage import FileWithSibling, Location, Storage, locate, put_next_to
from fastload.transfer.read import ChecksumCollector


def seal(
    world: World,
    location: Location,
    storage_options: Mapping[str, Any] | None,
    options: LoadOptions,
) -> VerifyReport:
    """Seals the checkpoint at a location; see `fastload.seal`.

    Raises:
        FastloadError: A rank failed; see `fastload.seal`.
    """
    call = {"call": "seal", "path": location.given}
    access = open_access(world, location, storage_options, options, call, read=_read_unsealed)
    session = Session(world, access, replace(options, verify=False))
    try:
        with session.usable():
            compare_sha_256(session)
            hasher = ChecksumCollector(access.stored)
            reading = CompleteRead(session, hasher)
            with closing(reading):
                reading.compare_calls("seal")
                with world.step(reading.what, is_long=True) as read:
                    read.answer({"report": Each(reading.run().pack())})
            texts = _texts(session, hasher)
            with world.step(f"writing {url_of_seal(access.stored)}"):
                if world.rank in texts:
                    patience = Patience(options.retries, world.patience_s)
                    place, name = location, SEAL_NAME
                    if is_single_file(access.stored):
                        place, name = _next_to(location)
                    put_next_to(place, NAMES, name, texts[world.rank], storage_options, patience=patience)
            world.acknowledge()
            return replace(reading.report(read.answers), outcome="sealed")
    finally:
        session.close()


def _next_to(file: Location) -> tuple[Location, str]:
    """Returns the directory of a single file, and the name of its seal."""
    seal = file.next_to_file(SEAL_NAME)
    assert seal is not None, "as `_read_unsealed` has found"
    folder, _, name = seal.address.rpartition("/")
    return locate(folder or "/"), name


def _read_unsealed(storage: Storage) -> Manifest:
    """Reads the manifest of a checkpoint to seal, with the length of its blocks."""
    if not isinstance(storage, FileWithSibling) and storage.list() is None and storage.stat("") is not None:
        raise CheckpointError(
            f"{storage.url}: cannot be sealed: it is a single file, and neither on a file system nor in an "
            "object store: put it into a directory of its own (a file of torch.save as pytorch_model.bin), "
            "and seal that"
        )
    manifest = read_manifest(storage, exact=True, sealed=False)
    if manifest.block_bytes:
        raise CheckpointError(
            f"{storage.url}: has checksums already, in {RECORD_NAME}: `fastload verify` compares the files "
            "with them"
        )
    require_disjoint(manifest)
    return replace(manifest, block_bytes=good_block_bytes(manifest.nbytes))


def _texts(session: Session, hasher: ChecksumCollector) -> dict[int, bytes]:
    """Gathers all checksums; returns the text of the seal, by rank that writes it: one for each copy.

    Raises:
        ChecksumError: The copies of several hosts differ; the same error on all ranks.
    """
    world, access = session.opened.world, session.opened.access
    manifest = access.stored
    with world.gathering_step(f"gathering the checksums of {manifest.url}") as step:
        step.answer(b"".join([array("Q", hasher.checksums).tobytes(), *hasher.checksums.values()]))
    packed = step.answers
    teams = {team[0]: team for team in (team_of(access, reader) for reader in access.readers)}
    texts = {writer: _text(manifest, [packed[rank] for rank in team]) for writer, team in teams.items()}
    if len(set(texts.values())) > 1:
        hosts = ", ".join(host_of(access.hosts[writer]) for writer in texts)
        raise ChecksumError(f"{manifest.url}: the copies on {hosts} differ: make them anew from one source")
    return texts


def _text(manifest: Manifest, parts: Sequence[bytes]) -> bytes:
    """Returns the text of the seal.

    Args:
        manifest: The manifest, with the length of a block.
        parts: Of each rank, the numbers of its blocks (8 bytes each), then their checksums.
    """
    numbered: dict[int, bytes] = {}
    for part in parts:
        half = len(part) // 2
        numbers = array("Q", part[:half])
        sums = (part[at : at + CHECKSUM_BYTES] for at in range(half, len(part), CHECKSUM_BYTES))
        numbered.update(zip(numbers, sums, strict=True))
    joined = b"".join(numbered[number] for number in range(len(numbered)))
    ends = list(accumulate(blocks_of_files(manifest, manifest.block_bytes), initial=0))
    assert len(numbered) == ends[-1], "each block once"
    checksums = [joined[begin * CHECKSUM_BYTES : end * CHECKSUM_BYTES] for begin, end in pairwise(ends)]
    return Seal.of(manifest, checksums).to_bytes()
