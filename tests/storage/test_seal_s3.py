"""The seal of a single file in an object store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from fastload.errors import ChecksumError
from fastload.formats.names import SEAL_NAME
from tests.storage.s3_server import BUCKET, client_of


def test_a_single_file_in_a_bucket_has_its_seal_next_to_it(seaweed: dict[str, Any], tmp_path: Path) -> None:
    client, key = client_of(seaweed), "runs/last.pt"
    torch.save({"a": torch.arange(10_000.0)}, tmp_path / "last.pt")
    content = (tmp_path / "last.pt").read_bytes()
    client.put_object(Bucket=BUCKET, Key=key, Body=content)
    url = f"s3://{BUCKET}/{key}"
    fastload.seal(url, storage_options=seaweed)
    stored = client.get_object(Bucket=BUCKET, Key=f"{key}.{SEAL_NAME}")["Body"].read()
    loaded = fastload.load(url, storage_options=seaweed)
    assert torch.equal(loaded["a"], torch.arange(10_000.0))
    assert fastload.verify(url, storage_options=seaweed).bytes_verified == 40_000
    staged = fastload.stage(url, tmp_path / "copy", storage_options=seaweed)
    assert Path(f"{staged.path}.{SEAL_NAME}").read_bytes() == stored
    fastload.verify(staged.path)
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 1
    client.put_object(Bucket=BUCKET, Key=key, Body=bytes(damaged))
    with pytest.raises(ChecksumError, match=rf"{url}: block 0 .* of tensor 'a'"):
        fastload.load(url, storage_options=seaweed)
