"""What is at a path: found and read with no more requests than it takes, and no longer than it is wanted."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fastload
from fastload.errors import IncompleteCheckpoint, ManifestError
from fastload.storage.local import LocalStorage
from tests.e2e.forked import forking_python

INDEX = "model.safetensors.index.json"


def test_the_tensor_that_the_index_names_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    for number, name in enumerate("abc"):
        tensors = {name: torch.full((3,), number), "both": torch.full((5,), 10 + number)}
        safetensors.torch.save_file(tensors, tmp_path / f"{name}.safetensors")
    weight_map = {name: f"{name}.safetensors" for name in "abc"} | {"both": "b.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    loaded = fastload.load(tmp_path)
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        "a": [0] * 3,
        "b": [1] * 3,
        "c": [2] * 3,
        "both": [11] * 5,
    }


@pytest.mark.parametrize("kind", ["directory", "link to nothing"])
def test_an_index_that_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    safetensors.torch.save_file({"a": torch.zeros(3)}, tmp_path / "a.safetensors")
    if kind == "directory":
        (tmp_path / INDEX).mkdir()
    else:
        (tmp_path / INDEX).symlink_to("gone")
    for call in (fastload.load, fastload.inspect):
        with pytest.raises(ManifestError, match=f"{tmp_path}/{INDEX}: the index is no file"):
            call(tmp_path)


def gone(folder: Path) -> None:
    weight_map = {"a": "a.safetensors", "b": "gone.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def cut(folder: Path) -> None:
    file = folder / "a.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(("spoil", "kind"), [(gone, IncompleteCheckpoint), (cut, ManifestError)])
def test_a_bad_checkpoint_that_nobody_replaces_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, kind: type[Exception]
) -> None:
    safetensors.torch.save_file({"a": torch.zeros(3)}, tmp_path / "a.safetensors")
    spoil(tmp_path)
    reads: list[tuple[str, int, int]] = []
    read_into = LocalStorage.read_into

    def counted(
        self: LocalStorage, name: str, offset: int, buffers: Sequence[memoryview], *more: Any
    ) -> None:
        reads.append((name, offset, sum(map(len, buffers))))
        read_into(self, name, offset, buffers, *more)

    monkeypatch.setattr(LocalStorage, "read_into", counted)
    with pytest.raises(kind):
        fastload.inspect(tmp_path)
    once = sorted(reads)
    reads.clear()
    with pytest.raises(kind):
        fastload.load(tmp_path)
    assert sorted(reads) == once


OPENS = """
import signal, sys, fastload
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
fastload.inspect(sys.argv[1])
"""


@pytest.mark.timeout(240)
def test_headers_that_never_come_hold_up_no_exit() -> None:
    """Ctrl+C ends a program whose storage does not answer, long before the storage would be given up."""
    weight_map = json.dumps({"weight_map": {name: f"{name}.safetensors" for name in "abc"}}).encode()
    asked, released = threading.Event(), threading.Event()

    class Hangs(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            if self.path.endswith(tuple(f"/{name}.safetensors" for name in "abc")):
                asked.set()
                released.wait(220)
                return
            found = self.path.endswith(INDEX)
            begin, end = 0, len(weight_map)
            if asks := self.headers.get("Range"):
                first, last = asks.removeprefix("bytes=").split("-")
                begin, end = int(first), min(end, int(last) + 1)
            self.send_response((206 if asks else 200) if found else 404)
            if found:
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(weight_map)}")
            self.send_header("Content-Length", str(end - begin if found else 0))
            self.end_headers()
            if found and self.command == "GET":
                self.wfile.write(weight_map[begin:end])

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hangs)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/model"
    process = subprocess.Popen(
        [forking_python(), "-c", OPENS, url], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert asked.wait(100), "the headers are being read"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=100)  # the storage would be given up after 150 s
        assert b"KeyboardInterrupt" in errors
    finally:
        process.kill()
        released.set()
        server.shutdown()
        server.server_close()
