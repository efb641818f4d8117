"""Saves to an S3 store that answers late, next to the same store at once, and to boto3."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fastload
from bench_parts import save_arms
from bench_parts.baselines import State
from bench_parts.job import MIB, run_on_ranks
from bench_parts.latency import Store, by_turns
from bench_parts.slow_storage import BUCKET, Limits, s3_client, s3_storage
from fastload import SaveOptions
from fastload.base.memory import byte_view, host_view

BOTO3 = "boto3, 32 parts in flight"
_PART_BYTES = 16 * MIB
_NUM_PARTS = 32
_SMALL_BYTES = 10_000
_count = itertools.count()


def measure(
    script: str, folder: Path, ranks: list[int], limits: Limits, **settings: Any
) -> Iterator[list[dict[str, Any]]]:
    """Runs a job for each number of ranks; yields a row for each arm."""
    with s3_storage(folder, limits) as server:
        for count in ranks:
            yield run_on_ranks(script, count, str(folder), part="latency", server=server, **settings)


def run(folder: str, size: int, server: dict[str, Any], repeats: int, arms: str) -> list[dict[str, Any]]:
    """Runs all arms by turns against both servers; returns their rows. All ranks have the same state."""
    stores = [Store(name, server[name], True, {}) for name in ("slow", "fast")]
    state = save_arms.make_state(size)
    small = {f"{index}": torch.arange(_SMALL_BYTES // 40, dtype=torch.int32) for index in range(10)}
    made = {
        BOTO3: partial(boto3_save, _bytes_of(state)),
        "fastload": partial(fastload_save, state),
        "boto3, 10 kB": partial(boto3_save, _bytes_of(small)),
        "fastload, 10 kB": partial(fastload_save, small),
    }
    named = {name: save for name, save in made.items() if any(part in name for part in arms.split(","))}
    nbytes = save_arms.nbytes_of(state)
    return by_turns(named, stores, server["log"], nbytes, repeats, clean=partial(clean, server["store"]))


def _bytes_of(state: State) -> bytes:
    """Returns the bytes of all tensors; empty but on rank 0."""
    return b"" if dist.get_rank() else b"".join(host_view(byte_view(tensor)) for tensor in state.values())


def boto3_save(body: bytes, store: Store, reports: list[dict[str, Any]]) -> State:
    """Uploads bytes as one object from rank 0, without hashing them."""
    from boto3.s3.transfer import TransferConfig

    key = f"saved/{next(_count)}"  # on all ranks, which count alike
    if dist.get_rank() == 0:
        config = TransferConfig(
            multipart_threshold=_PART_BYTES, multipart_chunksize=_PART_BYTES, max_concurrency=_NUM_PARTS
        )
        config.max_in_memory_upload_chunks = _NUM_PARTS  # 10 by default, whatever the concurrency
        client = s3_client(store.port, max_pool_connections=_NUM_PARTS)
        client.upload_fileobj(BytesIO(body), BUCKET, key, Config=config)
    return {}


def fastload_save(state: State, store: Store, reports: list[dict[str, Any]]) -> State:
    options = SaveOptions(on_report=lambda report: reports.append(report.to_dict()))
    url = f"s3://{BUCKET}/saved/{next(_count)}"
    fastload.save(state, url, storage_options=store.settings, options=options)
    return {}


def clean(port: int) -> None:
    """Removes what was saved."""
    client = s3_client(port)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="saved/")
    for key in [item["Key"] for page in pages for item in page.get("Contents", ())]:
        client.delete_object(Bucket=BUCKET, Key=key)
