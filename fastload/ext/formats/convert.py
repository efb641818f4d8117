"""``fastload convert``: saves any checkpoint again, in the format of fastload, torch or DCP."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import click
import torch
import torch.distributed as dist
from rich.filesize import decimal
from torch import Tensor

import fastload
from fastload.base.memory import byte_view, host_view
from fastload.base.units import count
from fastload.cli.console import json_option, print_json, progress, set_rank, shown
from fastload.comm.group import join, rank_in, separate_call
from fastload.comm.launch import initialize
from fastload.comm.world import World
from fastload.errors import CheckpointError, CheckpointExists, OptionError
from fastload.ext.formats.torch_save.writer import TorchLayout, join_crcs, lay_out_torch
from fastload.formats.decoder import decode_state
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest, TensorEntry
from fastload.formats.names import CONFIG_NAME, INDEX_SUFFIX, NAMES, SUFFIX, TORCH_ENDINGS, metadata_names
from fastload.formats.state import children, leaves, optimizer_tensors, own_view, raise_refused
from fastload.formats.untrusted import parse_json
from fastload.geometry.box import Box, row_major, runs_of
from fastload.geometry.dtensors import is_dtensor, local_parts
from fastload.loading.checkpoint import Checkpoint
from fastload.loading.mismatch import raise_mismatch
from fastload.loading.selection import RankView
from fastload.loading.targets import parse_dtype, target_dtype
from fastload.options import LoadOptions, SaveOptions
from fastload.storage import (
    PatientStorage,
    locate,
    name_of,
    open_patiently,
    open_storage,
    open_target,
    put_next_to,
    single_file,
)
from fastload.storage.folders import remove_files, write_all

if TYPE_CHECKING:  # it takes long to import
    from torch.distributed.device_mesh import DeviceMesh

_MIN_SHARDED_BYTES = 1 << 20  # smaller tensors are replicated
_MAX_COPIED_BYTES = 256 << 20
_CHUNK_BYTES = 16 << 20
_WEIGHTS = (
    SUFFIX,
    INDEX_SUFFIX,
    *TORCH_ENDINGS,
    *(f"{ending}.index.json" for ending in TORCH_ENDINGS),
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
)

_log = logging.getLogger(__name__)


@click.command(short_help="Save a checkpoint again in another format.")
@click.argument("src")
@click.argument("dst")
@click.option(
    "--to", type=click.Choice(["fastload", "hf", "torch", "dcp"]), default="fastload", show_default=True,
    help="Format: safetensors files with checksums, only the weights for Hugging Face's libraries, a file "
    "for torch.load, or a directory for dcp.load.",
)  # fmt: skip
@click.option(
    "--names", multiple=True, help="With --to hf: only tensors with these names or patterns. By default all "
    "but the states of optimizers."
)  # fmt: skip
@click.option("--strip", default="", metavar="PREFIX", help="With --to hf: remove this from names.")
@click.option("--dtype", help="With --to hf: cast floating point tensors, for example to bfloat16.")
@click.option("--dequantize", is_flag=True, help="With --to hf: dequantise quantised weights.")
@click.option(
    "--config-from", metavar="DIR", help="With --to hf: copy config.json and other files from here, not SRC."
)
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint at DST.")
@click.option("--no-strict", is_flag=True, help="Leave out values that cannot be loaded.")
@json_option
def convert(
    src: str,
    dst: str,
    to: str,
    names: tuple[str, ...],
    strip: str,
    dtype: str | None,
    dequantize: bool,
    config_from: str | None,
    overwrite: bool,
    no_strict: bool,
    as_json: bool,
) -> None:
    """Save the checkpoint at SRC again at DST, with checksums, or in a format of torch.

    SRC is any checkpoint that fastload loads, such as a file of torch.save, from which no code is run. The
    ranks of a torchrun or srun job share the work, and each holds only its part. Files next to the weights,
    such as config.json and a tokenizer, are copied, unless DST is one file.

    torchrun … -m fastload convert SRC DST
    """
    if to != "hf" and (names or strip or dtype or dequantize or config_from):
        raise click.UsageError("--names, --strip, --dtype, --dequantize and --config-from need --to hf")
    rank, _ = initialize()
    set_rank(rank)
    shows, source = not as_json, config_from or src
    edit = partial(_edit_config, dtype=parse_dtype(dtype), dequantized=dequantize)
    edited: dict[str, bytes] = {}
    what, timeout_s = f"converting {name_of(src)} to {name_of(dst)}", LoadOptions().timeout_s
    with separate_call(None, what, timeout_s=timeout_s) as world, world.step():
        if rank == 0 and (config_from or dtype or dequantize):
            edited = _edited_config(source, edit, is_required=config_from is not None)
    with (
        progress(rank, shown=shows) as show,
        fastload.open(src, options=LoadOptions(progress=show, dequantize=dequantize)) as checkpoint,
    ):
        with separate_call(None, what, timeout_s=timeout_s) as world, world.step():
            if rank == 0:
                _require_writable(dst, to, overwrite=overwrite)
        if to == "hf":
            parts, metadata = load_weights(checkpoint, names, strip=strip, dtype=dtype), {}
        else:
            parts, metadata = load_parts(checkpoint, strict=not no_strict), dict(checkpoint.metadata)
    with progress(rank, shown=shows, what="saving") as show:
        options = SaveOptions(progress=show, overwrite=overwrite)
        if to in ("fastload", "hf"):
            done = fastload.save(parts.state(), dst, metadata=metadata, options=options).to_dict()
        else:
            write = partial(write_torch_file, progress=show) if to == "torch" else write_dcp_folder
            done = write(parts, dst, overwrite=overwrite, timeout_s=options.timeout_s)
    companions = _companions(source) if rank == 0 else []
    copied = _copy(source, dst, companions, edited) if to != "torch" else []
    if rank == 0 and as_json:
        print_json({**done, "copied": copied})
    elif rank == 0:
        tensors, files = count(done["num_tensors"], "tensor"), count(done["num_files"], "file")
        click.echo(f"{done['url']}: {tensors}, {decimal(done['nbytes'])} in {files}")
        if companions:
            click.echo(f"{'copied, too' if copied else 'not copied'}: {shown(', '.join(companions))}")
        if to == "hf":
            left_out = {} if names else optimizer_tensors(checkpoint.manifest.structure).stored
            for name, stored in left_out.items():
                number = count(len(stored), "tensor")
                click.echo(f"left out: the optimizer {shown(name)} ({number}); --names '*' takes everything")
            if not strip and (prefix := _key_of_all(checkpoint.manifest, parts.tensors)):
                click.echo(f"all names begin with {shown(prefix)}: --strip {shown(prefix)} removes it")
            if CONFIG_NAME not in companions:
                click.echo(f"no {CONFIG_NAME}, without which it is no model: --config-from DIR copies one")


def _key_of_all(manifest: Manifest, names: Iterable[str]) -> str:
    """Returns the start of the names that is a key of the saved state, such as ``model.``; else empty.

    Parts of names that a model has by itself, such as ``model.layers``, are no keys of the state.
    """
    keys = children(manifest.structure) if manifest.structure is not None else None
    prefixes = {name.partition(".")[0] for name in names}
    is_key = len(prefixes) == 1 and keys is not None and prefixes <= {name for name, _ in keys.values()}
    return f"{prefixes.pop()}." if is_key and all("." in name for name in names) else ""


def _require_writable(dst: str, to: str, *, overwrite: bool) -> None:
    """Checks that a checkpoint can be saved, before one is loaded.

    Raises:
        CheckpointExists: The path exists, and `overwrite` is off.
        OptionError: The path is invalid for this format, or what is there is never replaced.
        StorageError: There is no permission.
    """
    if to == "torch":
        single_file.remove(single_file.make_pending(local_path(dst), overwrite=overwrite))
    elif to == "dcp":
        _require_new_folder(local_path(dst), overwrite=overwrite)
    else:
        with closing(open_target(dst, NAMES, patience=LoadOptions().patience)) as target:
            target.prepare([], overwrite=overwrite)
            target.abort()


def _require_new_folder(path: str, *, overwrite: bool) -> None:
    if overwrite:
        raise OptionError("--overwrite is not for --to dcp, which writes to new directories only")
    with closing(open_storage(locate(path), NAMES)) as storage:
        if storage.list() or storage.stat("") is not None:
            raise CheckpointExists(f"{path} exists: name a new directory")


@dataclass(frozen=True)
class Parts:
    """A checkpoint that is spread over the ranks of the job, since it may not fit into one of them.

    Attributes:
        structure: Structure of the state; None if it is a dict of the tensors by name.
        entries: The stored tensors.
        tensors: The tensors by name: large ones are DTensors, small ones are replicated.
    """

    structure: Any
    entries: list[TensorEntry]
    tensors: dict[str, Tensor]

    def state(self) -> Any:
        """Returns the state."""
        return self.tensors if self.structure is None else decode_state(self.structure, self.tensors)


def load_parts(checkpoint: Checkpoint, *, strict: bool = True) -> Parts:
    """Loads a part of each tensor into this rank's memory; all ranks of the job call it.

    Values of single ranks (`fastload.PerRank`) are left out.

    Args:
        checkpoint: The open checkpoint.
        strict: Whether to refuse values that cannot be loaded; otherwise they are None in the state.

    Raises:
        ManifestError: A value cannot be loaded, and `strict` is on.
        FastloadError: As for `fastload.load`.
    """
    manifest = checkpoint.manifest
    structure = _structure(manifest, strict=strict)
    entries, unsharded = list(manifest.tensors), set[str]()
    if structure is not None:
        found = leaves(structure)
        unsharded = {saved.stored for saved in found if saved.is_exact or saved.is_text}
        wanted = {saved.stored for saved in found}
        entries = [entry for entry in entries if entry.name in wanted]
    mesh = _mesh()
    tensors = {
        entry.name: _empty(entry, None if entry.name in unsharded else mesh, manifest.strides_of(entry))
        for entry in entries
    }
    checkpoint.read({name: local_parts(tensor) for name, tensor in tensors.items()})
    return Parts(structure, entries, tensors)


def load_weights(
    checkpoint: Checkpoint, names: Sequence[str] = (), *, strip: str = "", dtype: str | None = None
) -> Parts:
    """Loads a part of each selected tensor into this rank's memory; all ranks of the job call it.

    Args:
        checkpoint: The open checkpoint.
        names: Names and patterns; of tied tensors, the first selected name stays. Without any, all but the
            states of optimizers.
        strip: Prefix to remove from the names.
        dtype: The dtype that floating point tensors are cast to; None for none.

    Raises:
        MismatchError: A name or pattern selects nothing.
        OptionError: No tensor is left, or two would have the same name, or there is no such dtype.
        FastloadError: As for `fastload.load`.
    """
    manifest, cast = checkpoint.manifest, parse_dtype(dtype)
    selection = RankView.of(manifest, 0, 0).select(names or "*")
    raise_mismatch(manifest.url, missing=selection.absent)
    texts = (
        {saved.stored for saved in leaves(manifest.structure) if saved.is_text} if manifest.structure else ()
    )
    wanted: dict[str, TensorEntry] = {}
    left_out, names_left_out = set(texts), set[str]()
    if not names and manifest.structure is not None:
        optimizers = optimizer_tensors(manifest.structure)
        left_out, names_left_out = left_out.union(*optimizers.stored.values()), optimizers.names
    for name, saved in selection.chosen.items():
        entry, new = manifest.by_name[saved.stored], name.removeprefix(strip)
        if entry.name in left_out or name in names_left_out:
            continue
        left_out.add(entry.name)
        if new in wanted:
            raise OptionError(f"--strip {strip!r}: two tensors would be called {new!r}")
        wanted[new] = entry
    if not wanted:
        raise OptionError(
            f"{manifest.url}: without the states of optimizers it has no tensors: choose some by --names"
        )
    mesh = _mesh()
    tensors = {name: _empty(entry, mesh, (), cast) for name, entry in wanted.items()}
    boxes = {entry.name: local_parts(tensors[name]) for name, entry in wanted.items()}
    checkpoint.read(boxes, cast=True)
    return Parts(None, list(wanted.values()), tensors)


def _mesh() -> DeviceMesh | None:
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    return dist.init_device_mesh("cpu", (num_ranks,)) if num_ranks > 1 else None


def _structure(manifest: Manifest, *, strict: bool) -> Any:
    if manifest.structure is None:
        return None
    view = own_view(manifest.structure, 0, 0)
    if strict:
        raise_refused(
            manifest.url, view.refused, advice="--no-strict leaves these out, and converts the rest"
        )
    if view.elsewhere:
        _log.warning("%s: left out: %s", manifest.url, ", ".join(name for name, _ in view.elsewhere))
    for line in view.refused:
        _log.warning("%s: left out: %s", manifest.url, line)
    return view.structure


def _empty(
    entry: TensorEntry, mesh: DeviceMesh | None, strides: Sequence[int], cast: torch.dtype | None = None
) -> Tensor:
    """Returns memory for this rank's part; large tensors are sharded along their first long dimension.

    With strides, which leave no gaps, that is the first one in the order of memory.
    """
    stored, shape = torch_spec(entry)
    dtype = target_dtype(stored, cast)
    if mesh is None or entry.nbytes < _MIN_SHARDED_BYTES:
        return torch.empty_strided(shape, strides or torch.empty(shape, device="meta").stride(), dtype=dtype)
    from torch.distributed import tensor

    order = _memory_order(strides or row_major(shape))
    lengths = [shape[dim] for dim in order]
    long = (dim for dim, length in enumerate(lengths) if length >= mesh.size())
    dim = next(long, lengths.index(max(lengths)))
    made = tensor.empty(lengths, dtype=dtype, device_mesh=mesh, placements=[tensor.Shard(dim)])
    return made.permute([order.index(dim) for dim in range(len(order))]) if strides else made


def _memory_order(strides: Sequence[int]) -> list[int]:
    """Returns the dimensions of a tensor without gaps in the order of memory, the outermost one first."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def write_dcp_folder(parts: Parts, dst: str, *, overwrite: bool, timeout_s: float) -> dict[str, Any]:
    """Saves a directory by ``torch.distributed.checkpoint``; all ranks of the job call it.

    The checkpoint exists once its ``.metadata`` does, which DCP writes last. Nothing stays of a save that
    fails.

    Args:
        parts: The tensors of this rank.
        dst: A path that all ranks share.
        overwrite: Must be False, since DCP would leave old files next to the new ones.
        timeout_s: Longest wait for other ranks, in seconds.

    Returns:
        URL and sizes of the checkpoint.

    Raises:
        CheckpointExists: The path exists.
        OptionError: `dst` is not a path, or the state is not a dict.
        CheckpointError: Saving failed on some ranks.
    """
    import torch.distributed.checkpoint as dcp

    path = local_path(dst)
    state = parts.state()
    what = f"checking that {path} can be written"
    with separate_call(None, what, timeout_s=timeout_s) as world, world.step():
        if not isinstance(state, dict):
            raise OptionError(f"the state is a {type(state).__name__}: DCP saves dicts")
        _require_new_folder(path, overwrite=overwrite)
    try:
        with warnings.catch_warnings():  # torch's deprecations of its own code
            warnings.simplefilter("ignore")
            dcp.save(state, storage_writer=dcp.FileSystemWriter(path, overwrite=False))
    except BaseException as error:
        if rank_in(None) == 0:
            remove_files(path, lambda name: name.startswith(".metadata") or name.endswith(".distcp"))
        if not isinstance(error, dcp.CheckpointException):
            raise
        failures = [f"rank {rank}: {wrapped[0]!r}" for rank, wrapped in sorted(error.failures.items())]
        text = f"{path}: torch.distributed.checkpoint failed: {'; '.join(failures)}"
        if "inline_container" in text:
            text += " (torch's error if a file cannot be written: check the space on the disk)"
        raise CheckpointError(text) from None
    made = fastload.inspect(path)
    return {
        "url": made.url,
        "num_tensors": len(made.tensors),
        "nbytes": made.nbytes,
        "num_files": len(made.files),
    }


def _companions(src: str) -> list[str]:
    """Returns the names of the files next to the weights, such as ``config.json``; none for a single file.

    Weights in other formats, hidden files, and files of fastload and DCP are not among them.
    """
    with closing(_open(src)) as storage:
        names = storage.list() or []
    if metadata_names(names):
        return []
    own = NAMES.own(names, [])
    return [name for name in names if not name.endswith(_WEIGHTS) and name[0] != "." and name not in own]


def _edited_config(
    src: str, edit: Callable[[dict[str, Any]], dict[str, Any]], *, is_required: bool
) -> dict[str, bytes]:
    """Returns the new content of the configuration of a model, by the name of its file.

    Args:
        src: The directory that may have one.
        edit: Returns the new configuration; an equal one for none.
        is_required: Whether `src` must be a directory.

    Raises:
        OptionError: It is none.
        ManifestError: The configuration is malformed.
    """
    with closing(_open(src)) as storage:
        names = storage.list()
        if names is None and is_required:
            raise OptionError(f"--config-from {src}: no such directory")
        stat = storage.stat(CONFIG_NAME) if names is not None and CONFIG_NAME in names else None
        if stat is None or stat.nbytes > _MAX_COPIED_BYTES:
            return {}
        config = parse_json(storage.read_all(CONFIG_NAME, stat), storage.label(CONFIG_NAME))
    edited = edit(config)
    return {} if edited == config else {CONFIG_NAME: json.dumps(edited, indent=2).encode()}


def _edit_config(config: dict[str, Any], *, dtype: torch.dtype | None, dequantized: bool) -> dict[str, Any]:
    """Returns the configuration of a model after its weights have been cast or dequantised."""
    if dequantized:
        config = {key: value for key, value in config.items() if key != "quantization_config"}
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        config = {key: name if key in ("dtype", "torch_dtype") else value for key, value in config.items()}
    return config


def _copy(src: str, dst: str, names: list[str], edited: Mapping[str, bytes]) -> list[str]:
    """Copies small files of a directory next to a checkpoint; returns the names of the copied ones.

    Args:
        src: The directory.
        dst: The checkpoint.
        names: The files.
        edited: The files that get another content.
    """
    options, place, copied = LoadOptions(), locate(dst), []
    with closing(_open(src)) as storage:
        for name in names:
            stat = storage.stat(name)
            if stat is not None and stat.nbytes <= _MAX_COPIED_BYTES:
                content = edited[name] if name in edited else storage.read_all(name, stat)
                put_next_to(place, NAMES, name, content, patience=options.patience)
                copied.append(name)
    return copied


def _open(src: str) -> PatientStorage:
    return open_patiently(src, NAMES, patience=LoadOptions().patience)


class _Written(NamedTuple):
    """Bytes of a tensor that this rank has written, and their CRC-32."""

    name: str
    start: int
    nbytes: int
    checksum: int


def local_path(dst: str) -> str:
    """Returns the path of a file that is to be made.

    Raises:
        OptionError: It is no path of a file.
    """
    location = locate(dst)
    if location.scheme or dst.endswith("/"):
        raise OptionError(f"{location}: a file of torch.save is written to a file system: give a path")
    return location.address


def write_torch_file(
    parts: Parts,
    dst: str,
    *,
    overwrite: bool,
    timeout_s: float,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Writes a file for ``torch.load(weights_only=True)``; all ranks of the job call it.

    The file appears in one step, once it is durable.

    Args:
        parts: The tensors of this rank.
        dst: A path that all ranks share.
        overwrite: Whether to replace a file.
        timeout_s: Longest wait without progress, in seconds.
        progress: Called with this rank's (bytes written, bytes to write).

    Returns:
        URL and sizes of the file.

    Raises:
        CheckpointExists: The path exists.
        OptionError: torch cannot read a value of the state.
        PeerError: Some ranks failed, with every cause.
    """
    path = local_path(dst)
    world = join(None, call=f"writing {path}", timeout_s=timeout_s)
    pending = ""  # on rank 0
    try:
        with world.ending():
            with world.step() as preparing:
                strides = {name: tensor.stride() for name, tensor in parts.tensors.items()}
                layout = lay_out_torch(parts.structure, parts.entries, strides)
                if world.rank == 0:
                    pending = single_file.make_pending(path, overwrite=overwrite)
                preparing.answer(pending)
            name = preparing.answers[0]
            with world.step(is_long=True) as writing:
                writing.answer(_write_parts(world, parts, layout, name, progress))
            checksums = _joined(layout, [_Written(*one) for of_rank in writing.answers for one in of_rank])
            with world.step() as ending:
                nbytes = 0
                if world.rank == 0:
                    nbytes = _write_rest(layout, checksums, name, path, overwrite=overwrite)
                ending.answer(nbytes)
            nbytes = ending.answers[0]
    except BaseException:
        if pending:
            single_file.remove(pending)
        raise
    return {"url": path, "num_tensors": len(parts.entries), "nbytes": nbytes, "num_files": 1}


def _write_parts(
    world: World,
    parts: Parts,
    layout: TorchLayout,
    name: str,
    progress: Callable[[int, int], None] | None,
) -> list[_Written]:
    """Writes this rank's shards, and its part of the replicated tensors."""
    written: list[_Written] = []
    own = [
        entry
        for index, entry in enumerate(parts.entries)
        if is_dtensor(parts.tensors[entry.name]) or index % world.size == world.rank
    ]
    total = sum(part.nbytes for entry in own for _, part in local_parts(parts.tensors[entry.name]))
    with single_file.opened(name) as descriptor:
        for entry in own:
            begin = layout.tensors[entry.name].offset
            for start, data in _runs(entry, parts.tensors[entry.name]):
                checksum = 0
                for at in range(0, len(data), _CHUNK_BYTES):
                    chunk = data[at : at + _CHUNK_BYTES]
                    write_all(descriptor, begin + start + at, chunk)
                    checksum = crc32(chunk, checksum)
                    world.note_progress()
                written.append(_Written(entry.name, start, len(data), checksum))
                if progress is not None:
                    progress(sum(one.nbytes for one in written), total)
    return written


def _runs(entry: TensorEntry, tensor: Tensor) -> Iterator[tuple[int, memoryview]]:
    """Yields contiguous bytes of this rank's part of a tensor, each with its offset in all of it."""
    order = _memory_order(tensor.stride())
    shape = [torch_spec(entry)[1][dim] for dim in order]
    for box, part in local_parts(tensor):
        data = host_view(byte_view(part.permute(order)))
        offsets, sizes = ([of[dim] for dim in order] for of in box)
        runs = runs_of(Box(tuple(offsets), tuple(sizes)), shape).scaled(part.itemsize)
        for number, start in enumerate(runs.starts() if len(data) else ()):
            yield start, data[number * runs.length : (number + 1) * runs.length]


def _joined(layout: TorchLayout, written: list[_Written]) -> Mapping[str, int]:
    """Returns the CRC-32 of each tensor."""
    checksums = dict.fromkeys(layout.tensors, 0)
    for one in sorted(written):
        checksums[one.name] = join_crcs(checksums[one.name], one.checksum, one.nbytes)
    return checksums


def _write_rest(
    layout: TorchLayout, checksums: Mapping[str, int], name: str, path: str, *, overwrite: bool
) -> int:
    nbytes = 0
    with single_file.opened(name) as descriptor:
        for offset, content in layout.frame(checksums):
            write_all(descriptor, offset, content)
            nbytes = max(nbytes, offset + len(content))
    single_file.publish(name, path, overwrite=overwrite)
    return nbytes
