"""Ways to save a state that the ranks of several hosts hold, or parts of, to S3: arms of bench_save_lab.py.

Every arm is a function that all ranks call with the state and a URL below which nothing is; when the
last of them has returned, the whole state is on S3. Libraries are imported inside, so that one that is
missing costs its own arm only. `CONSOLIDATED` is called with a path of a mounted folder instead.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

import fastload
from bench_parts import megatron_arms
from bench_parts.save_arms import State, nbytes_of
from bench_parts.save_shards import dcp_save_consolidated, local_parts
from fastload import SaveOptions, SaveReport
from fastload.base.memory import byte_view, host_view

Save = Callable[[State, str], SaveReport | None]

_PART_BYTES = 16 << 20
_NUM_REQUESTS = 2  # as many as a rank of fastload's has under way


CONSOLIDATED = "dcp.save, consolidating (mount)"


def make_arms(num_hosts: int, *, layout: str) -> dict[str, Callable[..., Any]]:
    """Returns the arms by name; fastload's with 1, 2, 4, … writers, or 1 and all where ranks have shards.

    Args:
        num_hosts: Number of hosts.
        layout: What they have of the state; empty for all.
    """
    counts = [1 << power for power in range(num_hosts.bit_length()) if 1 << power < num_hosts]
    whole = {
        "torch.save to a file, then boto3, rank 0": torch_save_then_upload,
        "torch.save through s3fs, rank 0": torch_save_to_s3fs,
    }
    if layout:
        counts, whole = counts[:1], {CONSOLIDATED: dcp_save_consolidated}
    return {
        **whole,
        "dcp.save through s3fs": dcp_save_to_s3fs,
        "plain parallel upload": plain_upload,
        **{writers_arm(count): FastloadSave(count) for count in [*counts, num_hosts]},
        **({"fastload megatron": megatron_arms.Save(num_hosts)} if layout == megatron_arms.LAYOUT else {}),
    }


def writers_arm(count: int) -> str:
    return f"fastload.save, {count} writer{'s' if count > 1 else ''}"


def torch_save_then_upload(state: State, url: str) -> None:
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "state.pt")
            torch.save(state, path)
            client().upload_file(str(path), *_place(f"{url}/state.pt"))


def torch_save_to_s3fs(state: State, url: str) -> None:
    import s3fs

    if dist.get_rank() == 0:
        with s3fs.S3FileSystem().open(f"{url}/state.pt", "wb") as f:
            torch.save(state, f)


def dcp_save_to_s3fs(state: State, url: str) -> None:
    """DCP spreads the tensors over the ranks; each writes one file."""
    import s3fs  # noqa: F401  (what fsspec takes for s3://)
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    dcp.save(state, storage_writer=FsspecWriter(url))


def plain_upload(state: State, url: str) -> None:
    """Each rank uploads as many bytes as its share, from memory, as an object of its own: the least there is.

    Nothing is gathered, hashed or committed.
    """
    from boto3.s3.transfer import TransferConfig

    config = TransferConfig(
        multipart_threshold=_PART_BYTES, multipart_chunksize=_PART_BYTES, max_concurrency=_NUM_REQUESTS
    )
    body = BytesIO(_share_of(state))
    client().upload_fileobj(body, *_place(f"{url}/part-{dist.get_rank()}"), Config=config)


def _share_of(state: State) -> bytes:
    length, found = -(-nbytes_of(state) // dist.get_world_size()), bytearray()
    for tensor in local_parts(state).values():
        found += host_view(byte_view(tensor))[: length - len(found)]
    return bytes(found)


class FastloadSave:
    """Saves with all defaults but for the number of writers.

    Args:
        writers: How many of the ranks write.
    """

    def __init__(self, writers: int) -> None:
        self._options = SaveOptions(writers=writers)

    def __call__(self, state: State, url: str) -> SaveReport:
        return fastload.save(state, url, options=self._options)


# ---- what is there


@functools.cache
def client() -> Any:
    """Returns boto3's client, from the environment."""
    import boto3
    from botocore.config import Config

    return boto3.client("s3", config=Config(s3={"addressing_style": "path"}))


def make_bucket(url: str, *, within_s: float) -> None:
    """Makes the bucket, once the store that has just been started answers."""
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, prefix = _place(url)
    until = time.monotonic() + within_s
    while True:
        try:
            client().create_bucket(Bucket=bucket)
            client().put_object(Bucket=bucket, Key=f"{prefix}/started", Body=b"x")
            return
        except (BotoCoreError, ClientError):
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def stored(url: str) -> dict[str, int]:
    """Returns key → bytes of what is below a URL."""
    bucket, prefix = _place(url)
    pages = client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
    return {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", ())}


def remove(url: str, keys: Sequence[str]) -> None:
    bucket, _ = _place(url)
    for key in keys:
        client().delete_object(Bucket=bucket, Key=key)


def _place(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.netloc, parts.path.strip("/")
