"""Mutated files of torch.save: each is refused with one error that names it, or loaded as it is now.

    python -m tests.soak.torch_files --mutations 20000 --seed 1

It stops at the first unexpected outcome and prints how to repeat it.
"""

from __future__ import annotations

import random
import resource
import shutil
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

import fastload
from fastload.base.memory import host_bytes
from fastload.errors import FastloadError
from fastload.ext.formats.torch_save.archive import read_directory
from tests.torch_files import zipped

MOST_S = 10.0  # for one file on a busy machine
MOST_GROWTH_KIB = 400 << 10  # growth of memory from the first hundred files to the last


def state() -> Any:
    """A small training, with tensors of every layout."""
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    base = torch.arange(40.0).reshape(5, 8)
    views = {
        "whole": base,
        "tied": base,
        "turned": base.t(),
        "part": base[1:4, ::3],
        "one": base[:1, :1].expand(4, 6),
    }
    odd = [
        torch.ones(3, dtype=torch.complex128),
        torch.ones(2).to(torch.float8_e5m2),
        torch.zeros(0, 2),
        True,
    ]
    plain = {
        1: "text",
        ("a", 2): b"bytes",
        None: {1.5, 2.5},
        "size": torch.Size((2, 3)),
        "of": Counter("abc"),
    }
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "views": views,
        "odd": odd,
        "plain": plain,
    }


def sources(folder: Path) -> dict[str, bytes]:
    """The files to be mutated, by what they are."""
    value = state()
    torch.save(value, folder / "zip")
    value["odd"] = [one for one in value["odd"] if getattr(one, "dtype", None) != torch.float8_e5m2]
    # Where torch itself writes what it cannot read again, there is nothing to compare with.
    torch.save(value, folder / "legacy", _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(folder / "zip") as archive:
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    storages = {name: data for name, data in records.items() if name.startswith("data/")}
    (folder / "repacked").write_bytes(zipped(records["data.pkl"], storages))
    return {name: (folder / name).read_bytes() for name in ("zip", "legacy", "repacked")}


def flip(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.randint(1, 4)):
        data[draw.randrange(len(data))] = draw.randrange(256)


def flip_near(data: bytearray, draw: random.Random) -> None:
    """Changes the pickle at the beginning, or the directory at the end."""
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(min(4000, len(data)))
        data[at if draw.random() < 0.5 else -1 - at] = draw.choice(
            (0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256))
        )


def cut(data: bytearray, draw: random.Random) -> None:
    begin = draw.randrange(len(data))
    del data[begin : begin + draw.choice((1, 2, 4, 8, 100, len(data)))]


def insert(data: bytearray, draw: random.Random) -> None:
    begin = draw.randrange(len(data))
    data[begin:begin] = draw.randbytes(draw.choice((1, 2, 4, 8, 100)))


def repeat(data: bytearray, draw: random.Random) -> None:
    begin, at = draw.randrange(len(data)), draw.randrange(len(data))
    data[at:at] = data[begin : begin + draw.choice((4, 46, 200))]


def number(data: bytearray, draw: random.Random) -> None:
    """Puts a number that is large or odd somewhere."""
    width = draw.choice((2, 4, 8))
    value = draw.choice((0, 1, 2 ** (8 * width) - 1, 2 ** (8 * width - 1), 10**9 % 2 ** (8 * width)))
    at = draw.randrange(max(1, len(data) - width))
    data[at : at + width] = value.to_bytes(width, "little")


MUTATIONS: list[Callable[[bytearray, random.Random], None]] = [flip, flip_near, cut, insert, repeat, number]


def mutated(kind: str, data: bytes, draw: random.Random) -> bytes:
    """Returns a mutated file; half of the repacked ones have a mutated pickle in an intact archive."""
    mutate = draw.choice(MUTATIONS)
    if kind != "repacked" or draw.random() < 0.5:
        found = bytearray(data)
        mutate(found, draw)
        return bytes(found)
    with tempfile.TemporaryFile() as file:
        file.write(data)
        with zipfile.ZipFile(file) as archive:
            records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    pickled = bytearray(records.pop("data.pkl"))
    mutate(pickled, draw)
    return zipped(bytes(pickled), {name: each for name, each in records.items() if name.startswith("data/")})


def same(found: Any, wanted: Any) -> bool:
    """Whether two states are the same, to the bit."""
    if isinstance(wanted, torch.Tensor):
        if not isinstance(found, torch.Tensor) or (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
            return False
        return host_bytes(found) == host_bytes(wanted)
    if isinstance(wanted, dict):
        is_alike = isinstance(found, dict) and list(found) == list(wanted)
        return is_alike and all(same(found[key], value) for key, value in wanted.items())
    if isinstance(wanted, list | tuple):
        is_alike = isinstance(found, list | tuple) and len(found) == len(wanted)
        return is_alike and all(same(one, other) for one, other in zip(found, wanted, strict=True))
    if isinstance(wanted, set):
        return type(found) is set and sorted(map(repr, found)) == sorted(
            map(repr, wanted)
        )  # there may be NaNs
    return type(found) is type(wanted) and (found == wanted or (found != found and wanted != wanted))


def torch_reads_other_bytes(path: Path) -> bool:
    """Whether torch reads other bytes than those at the offsets in the directory.

    torch trusts the local headers, and attributes that turn a record into a folder.
    """
    data = path.read_bytes()
    records = read_directory(
        lambda at, length: data[at : at + length], len(data), str(path), exact=False
    ).records
    reader = torch._C.PyTorchFileReader(str(path))
    return any(
        reader.get_record_offset(name.partition("/")[2]) != record.offset
        or reader.get_record(name.partition("/")[2]) != data[record.offset : record.offset + record.nbytes]
        for name, record in records.items()
        if "/data/" in name
    )


def end_of(path: Path, original: Any) -> str:
    """Loads a file; returns the outcome.

    Raises:
        AssertionError: The outcome is not allowed.
    """
    began, why = time.monotonic(), str(path)
    found = None
    try:
        fastload.inspect(path)
        found = fastload.load(path)
    except FastloadError as error:
        why = str(error)
    assert str(path) in why, f"the error does not name the file: {why}"
    assert time.monotonic() - began < MOST_S, "it took too long"
    if why != str(path):
        return "refused"
    if same(found, original):
        return "as it was"
    try:
        by_torch = torch.load(path, weights_only=True)
    except Exception:  # whatever torch makes of it
        return "loaded, torch refuses it"
    if same(found, by_torch):
        return "as torch loads it"
    assert torch_reads_other_bytes(path), "torch loads something else"
    return "as its directory says"


def soak(mutations: int, first: int, seed: int, folder: Path) -> Counter[tuple[str, str]]:
    """Mutates files, loads them, and counts the outcomes.

    Raises:
        SystemExit: An outcome is not allowed.
    """
    torch.manual_seed(seed)
    ends: Counter[tuple[str, str]] = Counter()
    began = time.monotonic()
    files = sources(folder)
    originals = {kind: fastload.load(folder / kind) for kind in files}
    path, at_first = folder / "mutated.pt", 0
    for number in range(first, first + mutations):
        draw = random.Random(f"{seed}/{number}")
        kind = draw.choice(sorted(files))
        path.write_bytes(mutated(kind, files[kind], draw))
        try:
            ends[kind, end_of(path, originals[kind])] += 1
        except Exception as error:
            kept = f"/tmp/mutated-{seed}-{number}.pt"
            shutil.copy(path, kept)
            why = f"{type(error).__name__}: {error}"
            raise SystemExit(f"seed {seed}, mutation {number} of {kind} ({kept}): {why}") from None
        if number == first + 99:
            at_first = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if number % 2000 == 1999:
            click.echo(f"{number + 1} done, {time.monotonic() - began:.0f} s", err=True)
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - at_first
    if at_first and growth > MOST_GROWTH_KIB:
        raise SystemExit(f"memory has grown by {growth} KiB")
    return ends


@click.command()
@click.option("--mutations", default=20_000, show_default=True)
@click.option("--first", default=0, show_default=True, help="Mutation to begin with.")
@click.option("--seed", default=1, show_default=True)
def main(mutations: int, first: int, seed: int) -> None:
    """Run the soak."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        ends = soak(mutations, first, seed, Path(name))
    for (kind, end), count in sorted(ends.items()):
        click.echo(f"{kind:10} {end:28} {count:6d}")
    click.echo(f"{mutations} mutations, seed {seed}: all outcomes as expected")


if __name__ == "__main__":
    main()
