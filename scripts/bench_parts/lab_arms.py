"""Ways to load one checkpoint into the ranks of several hosts: the arms of scripts/bench_lab.py.

Every arm is a function that a rank calls; it returns this rank's complete state, or its part, as CPU tensors
that own their memory. Libraries are imported inside, so a missing one disables only its own arm.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch import nn

import fastload
from bench_parts import baselines
from bench_parts.baselines import State
from bench_parts.tables import AS_IT_WAS, DEQUANTISED, FLOOR
from fastload import LoadOptions
from fastload.options import SETTINGS

# Environment variables that the libraries read, at import or later.
PEER_ENV = {
    "FLASHPACK_SAMPLE_PROBE": "0",  # its probe reads parts of a cold file twice
    "FLASHPACK_CPU_PARALLEL_READ": "1",
    "RUNAI_STREAMER_DIST": "1",  # with Gloo too
    "RUNAI_STREAMER_DIST_GLOBAL": "1",  # one group of all hosts, not one per host
    "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    "RUNAI_STREAMER_LOG_LEVEL": "WARNING",
}


@dataclass(frozen=True)
class Places:
    """A checkpoint's places, each with ``safetensors/``, ``dcp/``, ``state.pt``, ``state.flashpack``.

    Attributes:
        http: URL.
        s3: URL.
        folder: The same, mounted on this host; only for arms that read it.
        target: The sharded parameters to load into; None for a load that makes tensors of its own.
        reports: fastload's own reports of this run.
        opened: Checkpoints that were read ahead.
    """

    http: str
    s3: str
    folder: Path | None
    target: nn.Module | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)
    opened: list[fastload.Checkpoint] = field(default_factory=list)

    @property
    def files(self) -> list[str]:
        """The safetensors files in the mounted folder."""
        assert self.folder is not None
        return sorted(str(path) for path in (self.folder / "safetensors").glob("*.safetensors"))


@dataclass(frozen=True)
class Arm:
    """One way to load.

    Attributes:
        name: Its name.
        load: Called on each rank.
        reads: Its source: ``HTTP``, ``S3``, or files that are mounted afresh for every run (``mount``).
        prepare: Called on each rank before, not timed.
    """

    name: str
    load: Callable[[Places], State]
    reads: str = "HTTP"
    prepare: Callable[[Places], None] | None = None


def make_arms(tuned: Sequence[str]) -> list[Arm]:
    """Returns all arms, and fastload once more for each of `tuned`: ``chunk_bytes=1MiB,read_threads=2``."""
    arms = [
        Arm(FLOOR, floor),
        Arm("every rank safetensors", every_rank_safetensors, reads="mount"),
        Arm("torch DCP", torch_dcp, reads="mount"),
        Arm("every rank torch.load", every_rank_torch_load, reads="mount"),
        Arm("rank 0 + broadcast per tensor", first_rank_broadcasts, reads="mount"),
        Arm("fastsafetensors ParallelLoader", fastsafetensors_parallel, reads="mount"),
        Arm("fastsafetensors FileLoader", fastsafetensors_files, reads="mount"),
        Arm("runai streamer (files)", runai_files, reads="mount"),
        Arm("runai streamer (s3)", runai_s3, reads="S3"),
        Arm("flashpack sharded", flashpack_sharded, reads="mount"),
        Arm("transformers from_pretrained", transformers_own, reads="mount"),
        Arm("fastload from_pretrained", transformers_together, reads="mount"),
    ]
    for strategy in ("auto", "allgather", "broadcast", "direct"):
        arms.append(Arm(f"fastload {strategy}", partial(fastload_http, {"strategy": strategy})))
    arms.append(Arm(AS_IT_WAS, partial(fastload_http, {})))
    arms.append(Arm(DEQUANTISED, partial(fastload_http, {"dequantize": True}, dtype="bfloat16")))
    arms.append(Arm("fastload auto (s3)", fastload_s3, reads="S3"))
    arms.append(Arm("fastload prefetched", fastload_prefetched, prepare=prefetch))
    for name, below in (("DCP", "dcp"), ("torch.save", "state.pt")):
        arms.append(Arm(f"fastload {name}", partial(_fastload_other, "http", below)))
        arms.append(Arm(f"fastload {name} (s3)", partial(_fastload_other, "s3", below), reads="S3"))
        arms.append(Arm(f"fastload {name} (mount)", partial(_fastload_other, "folder", below), reads="mount"))
    for strategy in ("auto", "broadcast"):
        load = partial(fastload_mounted, {"strategy": strategy})
        arms.append(Arm(f"fastload {strategy} (mount)", load, reads="mount"))
    arms += [Arm(f"fastload {text}", partial(fastload_http, parse_tuned(text))) for text in tuned]
    return arms


def parse_tuned(text: str) -> dict[str, Any]:
    """Reads options of a load such as ``chunk_bytes=1MiB,read_threads=2``."""
    pairs = dict(pair.split("=", 1) for pair in text.split(","))
    return {name: SETTINGS[name].parse(value) for name, value in pairs.items()}


# ---- the storage itself


def floor(places: Places) -> State:
    """Rank 0 streams every byte once over one connection and drops it."""
    if dist.get_rank() != 0:
        return {}
    at = urlsplit(f"{places.http}/safetensors")
    connection = http.client.HTTPConnection(at.netloc)
    buffer = bytearray(1 << 20)
    connection.request("GET", f"{at.path}/")
    for entry in json.loads(connection.getresponse().read()):
        connection.request("GET", f"{at.path}/{entry['name']}")
        answer = connection.getresponse()
        while answer.readinto(buffer):
            pass
    connection.close()
    return {}


# ---- common ways


def every_rank_safetensors(places: Places) -> State:
    return baselines.every_rank_maps_and_clones(LocalFileSystem(), f"{places.folder}/safetensors")


def first_rank_broadcasts(places: Places) -> State:
    return baselines.first_rank_broadcasts(LocalFileSystem(), f"{places.folder}/safetensors")


def torch_dcp(places: Places) -> State:
    """A replicated state: with DCP each rank reads all of it."""
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(f"{places.folder}/dcp")
    entries: dict[str, Any] = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in entries.items()}
    dcp.load(state, storage_reader=reader)
    return state


def transformers_own(places: Places) -> State:
    from transformers import LlamaModel

    state = _model(places, LlamaModel.from_pretrained)
    # They are mappings, from which nothing has been read yet.
    return {name: tensor.clone() for name, tensor in state.items()}


def every_rank_torch_load(places: Places) -> State:
    state: State = torch.load(f"{places.folder}/state.pt", weights_only=True)
    return state


# ---- libraries that read once


def fastsafetensors_parallel(places: Places) -> State:
    from fastsafetensors import ParallelLoader

    loader = ParallelLoader(
        pg=dist.group.WORLD, hf_weights_files=places.files, device="cpu", nogds=True, use_tqdm_on_load=False
    )
    try:
        return dict(loader.iterate_weights())
    finally:
        loader.close()


def fastsafetensors_files(places: Places) -> State:
    from fastsafetensors import SafeTensorsFileLoader

    ranks = dist.get_world_size()
    loader = SafeTensorsFileLoader(dist.group.WORLD, device="cpu", nogds=True)
    loader.add_filenames({rank: places.files[rank::ranks] for rank in range(ranks)})
    buffers = loader.copy_files_to_device()
    try:
        return {name: buffers.get_tensor(name) for name in loader.get_keys()}
    finally:
        buffers.close()
        loader.close()


def runai_files(places: Places) -> State:
    return _runai(places.files)


def runai_s3(places: Places) -> State:
    from runai_model_streamer import list_safetensors

    return _runai(sorted(list_safetensors(f"{places.s3}/safetensors")))


def _runai(paths: list[str]) -> State:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths, device="cpu", is_distributed=True)
        return dict(streamer.get_tensors())


def flashpack_sharded(places: Places) -> State:
    from flashpack.deserialization import iterate_from_flash_tensor, read_flashpack_file_distributed

    path = f"{places.folder}/state.flashpack"
    storage, metadata = read_flashpack_file_distributed(path, device="cpu", sharded=True)
    return dict(iterate_from_flash_tensor(storage, metadata))


# ---- fastload


def transformers_together(places: Places) -> State:
    from transformers import LlamaModel

    from fastload.integrations.transformers import from_pretrained

    options = LoadOptions(on_report=lambda report: places.reports.append(report.to_dict()))
    return _model(places, partial(from_pretrained, LlamaModel, options=options))


def _model(places: Places, make: Callable[..., Any]) -> State:
    """Makes a Llama with the checkpoint's shapes, which one rank reads."""
    from transformers import LlamaConfig, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    shapes: list[Any] = [None]
    if dist.get_rank() == 0:
        tensors = fastload.inspect(f"{places.http}/safetensors").tensors
        shapes[0] = {entry.name: list(entry.shape) for entry in tensors}
    dist.broadcast_object_list(shapes)
    wide, hidden = shapes[0]["model.layers.0.mlp.up_proj.weight"]
    config = LlamaConfig(
        vocab_size=1,  # layers only
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=sum(name.endswith("input_layernorm.weight") for name in shapes[0]),
        num_attention_heads=1,
    )
    model = make(f"{places.folder}/safetensors", config=config, dtype=torch.bfloat16)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return {name: tensor for name, tensor in state.items() if name in shapes[0]}


def prefetch(places: Places) -> None:
    places.opened.append(fastload.prefetch(f"{places.http}/safetensors"))
    places.opened[0].wait()


def fastload_prefetched(places: Places) -> State:
    with places.opened.pop() as checkpoint:
        state = checkpoint.load(into=places.target.state_dict() if places.target is not None else None)
    assert checkpoint.report is not None
    places.reports.append(checkpoint.report.to_dict())
    return state


def fastload_http(options: dict[str, Any], places: Places, **more: Any) -> State:
    return _fastload(places, places.http, LoadOptions(**options), **more)


def fastload_s3(places: Places) -> State:
    return _fastload(places, places.s3, LoadOptions())


def fastload_mounted(options: dict[str, Any], places: Places) -> State:
    return _fastload(places, str(places.folder), LoadOptions(**options))


def _fastload_other(place: str, below: str, places: Places) -> State:
    return _fastload(places, str(getattr(places, place)), LoadOptions(), below)


def _fastload(
    places: Places, url: str, options: LoadOptions, below: str = "safetensors", dtype: str | None = None
) -> State:
    with fastload.open(f"{url}/{below}", options=options) as checkpoint:
        state = checkpoint.load(dtype=dtype)
    assert checkpoint.report is not None
    places.reports.append(checkpoint.report.to_dict())
    return state


def set_peer_env() -> None:
    """Sets these variables; call it before one of the libraries is imported."""
    for name, value in PEER_ENV.items():
        os.environ.setdefault(name, value)
