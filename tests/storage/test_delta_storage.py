"""The files of the result of a delta, of which the base is far away."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch

import fastload
from fastload.ext.deltas.encoding import layered
from fastload.formats.names import NAMES
from fastload.formats.open import read_manifest
from fastload.options import Patience
from fastload.storage import locate, open_patiently
from tests.dist.flaky_server import serve


def test_first_bytes_of_the_base_are_noted(tmp_path: Path) -> None:
    state = {name: torch.randn(50_000) for name in ("same", "other")}
    fastload.save(state, tmp_path / "base")
    state["other"][7] += 1
    options = fastload.SaveOptions(base=tmp_path / "base")
    fastload.save(state, tmp_path / "delta", options=options)
    with serve(tmp_path) as server:
        storages = [
            open_patiently(locate(f"{server.url}/{name}"), NAMES, None, io="auto", patience=Patience(0, 30.0))
            for name in ("base", "delta")
        ]
        base, delta = map(read_manifest, storages)
        result, storage = layered([(base, storages[0]), (delta, storages[1])])
        heard: list[float] = []
        with closing(storage):
            storage.listen(heard.append)
            entry = result.by_name["same"]
            data = bytearray(entry.nbytes)
            storage.read_into(result.files[entry.file].name, entry.offset, [memoryview(data)])
    assert bytes(data) == state["same"].numpy().tobytes()
    assert len(heard) == 1
