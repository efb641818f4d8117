"""HTTP servers that answer unknown names with status 200 and a page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import fastload
from fastload.errors import CheckpointNotFound, ChecksumError, FastloadError, ManifestError
from tests.storage.test_answers import serving

PAGE = b"\n<!DOCTYPE html><html><title>Welcome</title>" + b"<p>nothing here</p>" * 200 + b"</html>"


@pytest.fixture(params=[True, False], ids=["ranges", "no ranges"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Serves files with ranges, and for all other names the same page, with ranges or without."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(b"")

        def do_GET(self) -> None:
            self.answer(None)

        def answer(self, body: bytes | None) -> None:
            path = tmp_path / self.path.lstrip("/")
            data = path.read_bytes() if path.is_file() else PAGE
            wanted, status = self.headers.get("Range"), 200
            total = len(data)
            if wanted and (path.is_file() or request.param):
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                end = min(int(last) + 1, total)
                data, status = data[int(first) : end], 206
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{total}"')
            if status == 206:
                self.send_header("Content-Range", f"bytes {first}-{end - 1}/{total}")
            self.end_headers()
            if body is None:
                self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    with serving(Handler) as url:
        yield url


@pytest.mark.slow(but=["no ranges"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_no_record_is_none(server: str, tmp_path: Path) -> None:
    for name in ("own", "foreign", "one", "torch", "dcp"):
        (tmp_path / name).mkdir()
    state = {"a": torch.arange(5.0)}
    fastload.save(state, tmp_path / "own")
    save_file(state, tmp_path / "foreign" / "x.safetensors")
    index = {"weight_map": {"a": "x.safetensors"}}
    (tmp_path / "foreign" / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(state, tmp_path / "one" / "model.safetensors")
    torch.save(state, tmp_path / "torch" / "pytorch_model.bin")
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name in ("own", "foreign", "one", "torch", "dcp"):
        assert fastload.load(f"{server}/{name}")["a"].tolist() == [0, 1, 2, 3, 4], name
    assert fastload.inspect(f"{server}/own").block_bytes  # its record was found
    (tmp_path / "one" / "config.json").write_text("{}")
    with pytest.raises(FastloadError, match=r"config\.json|quantization_config"):
        fastload.load(f"{server}/one", options=fastload.LoadOptions(dequantize=True))


@pytest.mark.slow(but=["no ranges"])
def test_damaged_records_and_pages_in_place_of_a_file(server: str, tmp_path: Path) -> None:
    fastload.save({"a": torch.arange(5.0)}, tmp_path / "own")
    record = tmp_path / "own" / "fastload.json"
    whole = record.read_bytes()
    flipped = whole.replace(b"block", b"blokc")
    for damaged, kind in ((b"x" + whole[1:], ManifestError), (flipped, ChecksumError)):
        record.write_bytes(damaged)
        with pytest.raises(kind, match=r"fastload\.json"):
            fastload.load(f"{server}/own")
    with pytest.raises(CheckpointNotFound, match=f"{server}/nothing: no such checkpoint"):
        fastload.load(f"{server}/nothing")
    with pytest.raises(FastloadError, match=r"nothing/model\.safetensors.*(a page of HTML|Range request)"):
        fastload.load(f"{server}/nothing/model.safetensors")
