"""Megatron Core: its `save` and `load` of sharded state dicts, and strategies for its own functions.

A training changes one import::

    from fastload.integrations import megatron as dist_checkpointing

    dist_checkpointing.save(sharded_state_dict, "s3://bucket/iter_0000100")
    state = dist_checkpointing.load(sharded_state_dict, "s3://bucket/iter_0000100")

Megatron's own functions take the strategies, once this module is imported: ``("fastload", 1)``.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import megatron.core
import torch
from torch import Tensor

import fastload
from fastload import Box, LoadOptions, MismatchError, OptionError, PlanMismatch, SaveOptions, Shard, world
from fastload.base.tracebacks import short_tracebacks
from fastload.formats.names import METADATA_NAME, NAMES, own_names_or_dcp
from fastload.formats.values import BYTES_IO
from fastload.geometry.dtensors import is_dtensor
from fastload.integrations.frameworks import refuse, step_of_all, unknown_version
from fastload.loading.selection import GAP, Outline
from fastload.options import chosen_options
from fastload.saving import save as saving
from fastload.saving.background import SaveHandle, await_end
from fastload.saving.call import SaveCall, make_call

TESTED = "0.16.1"
try:
    from megatron.core.dist_checkpointing.core import CheckpointingConfig
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, merge, nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        apply_factory_merges,
        is_main_replica,
    )
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.base import (
        AsyncSaveShardedStrategy,
        LoadShardedStrategy,
        StrategyAction,
        register_default_strategy,
    )
    from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
    from megatron.core.dist_checkpointing.validation import (
        StrictHandling,
        parse_strict_flag,
        validate_integrity_and_strict_load,
    )
except ImportError as error:
    raise unknown_version(megatron.core, TESTED, error) from None

__all__ = ["LoadStrategy", "SaveStrategy", "load", "save"]

BACKEND, VERSION = "fastload", 1
_COMMON, _OBJECTS = "megatron.common", "megatron.objects"
"""Keys of the common state, as bytes of torch.save, and of the sharded objects, next to those of tensors."""
_COMMON_FILE, _CONFIG_FILE, _CONTENT = "common.pt", "metadata.json", "content_metadata"
_OBJECT_KEY = re.compile(r".+/shard_[\d.]*_[\d.]*", re.DOTALL)
_NOT_SERIALIZABLE = "dp_cp_group"  # of the metadata of the content

_BEGUN = replace(NAMES, others=(_COMMON_FILE, _CONFIG_FILE, METADATA_NAME), own=own_names_or_dcp)
"""For `SaveStrategy`, in a directory that Megatron has begun: its two files are no checkpoint, and stay."""


def _own_names(there: Iterable[str], lists: Sequence[bytes]) -> set[str]:
    names = list(there)
    return own_names_or_dcp(names, lists) | {_COMMON_FILE, _CONFIG_FILE}.intersection(names)


_OWN = replace(_BEGUN, own=_own_names)
"""For `save`, which writes Megatron's two files itself, and replaces those at its path."""


def _require_no_strategies(what: str, sharded_strategy: Any, common_strategy: Any) -> None:
    given = {
        "a sharded_strategy": sharded_strategy is not None,
        "a common_strategy": common_strategy is not None,
    }
    refuse(what, given, "leave it out; replicas share the work without a wrapper")


# Saves


@short_tracebacks
def save(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: dict[str, Any] | None = None,
    *,
    process_group: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
) -> AsyncRequest | None:
    """Saves a sharded state dict on all ranks; in place of ``megatron.core.dist_checkpointing.save``.

    The checkpoint is a directory of safetensors with a tensor for each key, and everything that Megatron's
    own ``load`` needs. All of it appears in one step. The replicas of a shard share the writing. As with
    Megatron, it replaces an earlier checkpoint at its path.

    Args:
        sharded_state_dict: The state, with Megatron's sharded tensors, objects and factories. The rest, the
            common state, is saved as rank 0 has it.
        checkpoint_dir: The directory to make, a local path or a URL.
        sharded_strategy: None.
        common_strategy: None.
        validate_access_integrity: Whether each sharded object has to be the main replica on exactly one
            rank. Tensors are always checked on all ranks.
        async_sharded_save: Whether to return an ``AsyncRequest`` once each rank has copied its share.
        preprocess_common_before_consistancy_check: Not called, since the common states of ranks are not
            compared.
        content_metadata: As for Megatron's.
        process_group: As for `fastload.save`; None for all ranks.
        storage_options: As for `fastload.save`.
        options: How to save; None for the defaults. An existing checkpoint is replaced, unless they have
            ``overwrite=False``.

    Returns:
        With `async_sharded_save`, the request for an ``AsyncCallsQueue``; else None.

    Raises:
        OptionError: Something in the state cannot be saved; names its key.
        PlanMismatch: Shards have holes, or different global shapes; on all ranks.
        ReplicaMismatch: Shards that overlap have different values, as far as they are compared.
        FastloadError: As for `fastload.save`.
    """
    what = f"saving to {checkpoint_dir}"
    with step_of_all(f"{what}: the state", process_group=process_group, options=options) as step:
        _require_no_strategies("save a state", sharded_strategy, common_strategy)
        if content_metadata is not None:
            cleaned = {key: value for key, value in content_metadata.items() if key != _NOT_SERIALIZABLE}
            sharded_state_dict[_CONTENT] = cleaned
        sharded, common = save_preprocess(sharded_state_dict, False)
        common_file = _saved(common)
        state = _state_of(sharded, common_file if world.get_rank(process_group) == 0 else None)
        step.answer(_num_objects(sharded) if validate_access_integrity else {})
    _require_each_once(step.answers)
    config = json.dumps(asdict(CheckpointingConfig(BACKEND, VERSION))).encode()
    call = _save_call(
        checkpoint_dir,
        process_group,
        storage_options,
        options,
        in_background=async_sharded_save,
        names=_OWN,
        small_files=((_COMMON_FILE, common_file), (_CONFIG_FILE, config)),
    )
    if async_sharded_save:
        return _request(saving.save_in_background(call, state))
    saving.save(call, state)
    return None


class SaveStrategy(AsyncSaveShardedStrategy):  # type: ignore[misc]
    """Saves the sharded part of a state for ``megatron.core.dist_checkpointing.save``.

    The directory, on a file system that all ranks see, has the common state already, and is complete for
    Megatron once its ``metadata.json`` is there.

    Args:
        options: How to save; None for the defaults.
    """

    def __init__(self, options: SaveOptions | None = None) -> None:
        super().__init__(BACKEND, VERSION)
        self._options = options

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether it saves sharded objects: yes."""
        return True

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
        """Saves; raises as `save`."""
        saving.save(*self._begin(sharded_state_dict, checkpoint_dir, in_background=False))

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]
    ) -> AsyncRequest:
        """Copies this rank's share, and saves in the background; raises as `save`."""
        begun = self._begin(sharded_state_dict, checkpoint_dir, in_background=True)
        return _request(saving.save_in_background(*begun))

    def _begin(
        self, sharded: dict[str, Any], path: str | os.PathLike[str], *, in_background: bool
    ) -> tuple[SaveCall, Any]:
        with step_of_all(f"saving to {path}: the state", options=self._options):
            state = _state_of(sharded, _read(path) if world.get_rank() == 0 else None)
        return _save_call(path, None, None, self._options, in_background=in_background, names=_BEGUN), state


def _save_call(
    path: str | os.PathLike[str],
    process_group: Any,
    storage_options: Mapping[str, Any] | None,
    options: SaveOptions | None,
    **given: Any,
) -> SaveCall:
    chosen = chosen_options(options, SaveOptions)
    chosen = replace(chosen, parts=True, overwrite=chosen.overwrite is not False)
    return make_call(path, process_group, None, storage_options, chosen, **given)


def _state_of(sharded: dict[str, Any], common: bytes | None) -> dict[str, Any]:
    """Returns the state that this rank saves: shards by key, its objects, and on rank 0 the common state.

    Raises:
        OptionError: Something cannot be saved; names its key.
    """
    boxes: dict[str, dict[Box, Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    objects: dict[str, Any] = {}
    for one in nested_values(sharded):
        if isinstance(one, ShardedObject):
            if is_main_replica(one.replica_id):
                objects[one.unique_key] = _storable(one.data)
            continue
        if not isinstance(one, ShardedTensor) or one.data is None:
            raise OptionError(
                f"{getattr(one, 'key', one)}: a {type(one).__name__} without data, or of no known kind"
            )
        shape = shapes.setdefault(one.key, tuple(one.global_shape))
        if shape != tuple(one.global_shape):
            raise OptionError(f"{one.key} has the global shapes {list(shape)} and {list(one.global_shape)}")
        box, data = _box_of(one), _with_all_axes(one)
        known = boxes.setdefault(one.key, {}).setdefault(box, data)
        if known is not data and not _is_same(known, data):
            raise OptionError(f"{one.key} has two different tensors at {list(box.offsets)}")
    state: dict[str, Any] = {}
    for key, of_key in boxes.items():
        try:
            state[key] = Shard.of_boxes(list(of_key.items()), shapes[key])
        except OptionError as problem:
            raise OptionError(f"{key}: {problem}") from None
    if objects:
        state[_OBJECTS] = objects
    if common is not None:
        state[_COMMON] = torch.frombuffer(bytearray(common), dtype=torch.uint8)
    return state


def _box_of(one: ShardedTensor) -> Box:
    sizes = (*(1,) * one.prepend_axis_num, *one.local_shape)
    return Box(tuple(one.global_offset), tuple(sizes))


def _with_all_axes(one: ShardedTensor) -> Tensor:
    """Returns the data with the axes that Megatron's tensor has in front of them."""
    data: Tensor = one.data.detach()
    return data[(None,) * one.prepend_axis_num]


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one box have the same bytes, such as tied weights."""
    is_view = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    bytes_of = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return is_view or (one.dtype == other.dtype and torch.equal(*bytes_of))


def _storable(value: Any) -> Any:
    """Returns the data of an object with each `BytesIO` as marked bytes."""
    if isinstance(value, io.BytesIO):
        return BYTES_IO, value.getvalue()
    if type(value) is dict:
        return {key: _storable(member) for key, member in value.items()}
    return type(value)(map(_storable, value)) if type(value) in (list, tuple) else value


def _saved(common: Any) -> bytes:
    """Returns the common state as torch.save stores it.

    Raises:
        OptionError: It holds objects that could not be loaded, or DTensors, of which these would be the
            shards of one rank.
    """
    if (name := next(_dtensors(common), None)) is not None:
        raise OptionError(
            f"{name}: a DTensor, which Megatron saves with torch.distributed.checkpoint (fsdp_dtensor): take "
            "the Writer of fastload.integrations.dcp"
        )
    data = io.BytesIO()
    torch.save(common, data)
    try:
        _loaded(data.getvalue())
    except pickle.UnpicklingError as problem:
        why = str(problem).partition("\n")[0]
        raise OptionError(f"the common state has what torch.load(weights_only=True) refuses: {why}") from None
    return data.getvalue()


def _dtensors(value: Any, name: str = "") -> Iterator[str]:
    """Yields the names of DTensors in a nested state."""
    if isinstance(value, Tensor) and is_dtensor(value):
        yield name
    elif isinstance(value, dict | list | tuple):
        for key, member in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _dtensors(member, f"{name}.{key}" if name else str(key))


def _loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _read(folder: str | os.PathLike[str]) -> bytes:
    with open(os.path.join(folder, _COMMON_FILE), "rb") as file:
        return file.read()


def _num_objects(sharded: dict[str, Any]) -> dict[str, list[int]]:
    """Returns by key how many objects this rank saves, and how many there have to be."""
    found: dict[str, list[int]] = {}
    for one in nested_values(sharded):
        if isinstance(one, ShardedObject):
            counts = found.setdefault(one.key, [0, torch.Size(one.global_shape).numel()])
            counts[0] += is_main_replica(one.replica_id)
    return found


def _require_each_once(counts: Sequence[Mapping[str, Sequence[int]]]) -> None:
    """Raises unless each sharded object is the main replica on exactly one rank."""
    sums: dict[str, int] = {}
    wanted: dict[str, int] = {}
    for of_rank in counts:
        for key, (num, num_all) in of_rank.items():
            sums[key] = sums.get(key, 0) + num
            wanted[key] = num_all
    wrong = [f"  {key}: {sums[key]} of {num}" for key, num in wanted.items() if sums[key] != num]
    if wrong:
        head = "sharded objects are not the main replica on exactly one rank, so nothing was saved:"
        raise PlanMismatch("\n".join([head, *wrong]))


def _request(handle: SaveHandle) -> AsyncRequest:
    """Returns a request that ends when a save in the background has ended.

    Megatron forks a process that calls its function, and asks whether that has ended. The process learns it
    from a pipe: the communicators, and the threads of the save, are this one's.
    """
    reading, writing = os.pipe()
    parent = os.getpid()

    def notify() -> None:
        await_end(handle)
        os.write(writing, b"\0")

    def wait() -> None:
        if os.getpid() != parent:
            os.close(writing)  # so that it also ends if the parent does
        os.read(reading, 1)

    def finalize() -> None:
        watcher.join()
        os.close(reading)
        os.close(writing)
        handle.wait()

    watcher = threading.Thread(target=notify, name="fastload-megatron", daemon=True)
    watcher.start()
    return AsyncRequest(wait, (), [finalize])


# Loads


@short_tracebacks
def load(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: Any = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    process_group: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions | None = None,
) -> Any:
    """Loads into a sharded state dict on all ranks; in place of ``megatron.core.dist_checkpointing.load``.

    Every byte is read once, however many ranks want it, and verified. Tensors are filled in place, and cast
    if the checkpoint has them in another dtype. Checkpoints of `save` and `SaveStrategy` can be loaded, and
    Megatron's own directories (``torch_dist``).

    Args:
        sharded_state_dict: What each rank wants, as for Megatron's. Another parallelism than that of the save
            may have made it.
        checkpoint_dir: The checkpoint, a local path or a URL.
        sharded_strategy: None.
        common_strategy: None.
        validate_access_integrity: No effect: ranks may want what they like.
        strict: As for Megatron's.
        process_group: As for `fastload.load`; None for all ranks.
        storage_options: As for `fastload.load`.
        options: How to load; None for the defaults.

    Returns:
        The state dict with the common state; with some values of `strict`, also the missing and unexpected
        keys.

    Raises:
        MismatchError: Keys are not in the checkpoint, or have another global shape there.
        FastloadError: As for `fastload.load`.
    """
    what, group = f"loading {checkpoint_dir}", {"process_group": process_group, "options": options}
    with fastload.open(checkpoint_dir, storage_options=storage_options, **group) as checkpoint:
        source = _StoredState(checkpoint, checkpoint.outline())
        with step_of_all(f"{what}: the state", **group) as step:
            _require_no_strategies("load a state", sharded_strategy, common_strategy)
            handling = parse_strict_flag(strict)
            force_all_tensors_to_non_fp8(sharded_state_dict)
            wanted, nonpersistent, factories = load_preprocess(sharded_state_dict)
            wanted, _ = extract_sharded_base(wanted)
            own = sorted({one.key for one in nested_values(wanted)})
            step.answer(own if StrictHandling.requires_global_app_metadata(handling) else [])
        # Megatron's file may have what fastload's closed list of classes has not, such as a Namespace.
        has_file = source.is_megatrons and "://" not in os.fspath(checkpoint_dir)
        accessed = [[SimpleNamespace(key=key) for key in keys] for keys in step.answers]
        with step_of_all(f"{what}: its keys", **group) as step:
            if has_file and world.get_rank(process_group) == 0:
                step.answer(attach=_read(checkpoint_dir))
            stored = None
            if StrictHandling.requires_explicit_ckpt_mismatch_check(handling):
                stored = source.metadata()
            wanted, missing, unexpected = validate_integrity_and_strict_load(
                wanted, handling, False, None, accessed, stored
            )
            request = _StateTargets(source, wanted, with_common=not has_file)
        checkpoint.read(request.boxes, cast=True)
        common_file = step.attachment if has_file else None
        with step_of_all(f"{what}: the result", **group):
            state = request.common() if common_file is None else _loaded(common_file)
            merge(state, nonpersistent)
            merge(state, request.loaded())
            state = apply_factory_merges(state, factories)
    if StrictHandling.requires_returning_mismatch_keys(handling):
        return state, missing, unexpected
    return state


class LoadStrategy(LoadShardedStrategy):  # type: ignore[misc]
    """Loads the sharded part of a state for ``megatron.core.dist_checkpointing.load``.

    Args:
        options: How to load; None for the defaults.
    """

    def __init__(self, options: LoadOptions | None = None) -> None:
        super().__init__()
        self._options = options

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether it loads sharded objects: yes."""
        return True

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> Any:
        """Loads; raises as `load`."""
        with fastload.open(checkpoint_dir, options=self._options) as checkpoint:
            source = _StoredState(checkpoint, checkpoint.outline())
            with step_of_all(f"loading {checkpoint_dir}: its keys", options=self._options):
                request = _StateTargets(source, sharded_state_dict)
            checkpoint.read(request.boxes, cast=True)
            return request.loaded()

    def load_tensors_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
        """Returns the tensors of a checkpoint by key, without data. A call of all ranks."""
        found = self.load_sharded_metadata(checkpoint_dir)
        return {key: one for key, one in found.items() if isinstance(one, ShardedTensor)}

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
        """Returns the tensors and objects of a checkpoint by key, without data. A call of all ranks."""
        with fastload.open(checkpoint_dir, options=self._options) as checkpoint:
            return _StoredState(checkpoint, checkpoint.outline()).metadata()

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Does nothing: `load` recognises the format."""

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Does nothing: `load` refuses a version that it does not know."""


class _StoredState:
    """What a checkpoint holds of a state of Megatron's.

    Args:
        checkpoint: The checkpoint.
        outline: Its state without the data of its tensors.

    Attributes:
        tensors: Tensors by key, on the meta device.
        objects: Sharded objects by ``unique_key``; tensors in them are on the meta device.
        common: The common state, likewise; as bytes of torch.save in a tensor, unless Megatron saved it.
        is_megatrons: Whether Megatron saved it.
    """

    def __init__(self, checkpoint: fastload.Checkpoint, outline: Outline) -> None:
        manifest, self.stored_of = checkpoint.manifest, outline.stored_of
        self.url = manifest.url
        self.is_megatrons = manifest.format == "dcp"
        state = dict(outline.state)
        self.objects: dict[str, Any] = state.pop(_OBJECTS, {})
        self.common: Any = state.pop(_COMMON, {})
        self.tensors: dict[str, Tensor] = {}
        common = {entry.name for entry in manifest.tensors if manifest.files[entry.file].name == _COMMON_FILE}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.is_meta and outline.stored_of(value) not in common:
                self.tensors[key] = value
            elif self.is_megatrons and isinstance(key, str) and _OBJECT_KEY.fullmatch(key):
                self.objects[key] = value[0] if type(value) is list else value
            else:
                self.common[key] = value

    def metadata(self) -> dict[str, Any]:
        """Returns its tensors and objects by key, as Megatron describes them."""
        found = {
            key: ShardedTensor.from_rank_offsets(key, tensor).without_data()
            for key, tensor in self.tensors.items()
        }
        return {**found, **{key: ShardedObject.empty_from_unique_key(key) for key in self.objects}}


class _StateTargets:
    """What one rank loads, and the memory it goes to.

    Args:
        source: The checkpoint.
        sharded: This rank's sharded tensors and objects.
        with_common: Whether it loads the common state, too.

    Attributes:
        boxes: As for `Checkpoint.read`.
    """

    def __init__(self, source: _StoredState, sharded: dict[str, Any], *, with_common: bool = False) -> None:
        self.boxes: dict[str, list[tuple[Box, Tensor]]] = {}
        self._source = source
        self._sharded = sharded
        self._first: dict[tuple[str, Box], Tensor] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        missing, mismatched = dict[str, None](), list[str]()
        self._objects: dict[str, Any] = {}
        for one in nested_values(sharded):
            if isinstance(one, ShardedObject):
                if one.unique_key in source.objects:
                    self._objects[one.unique_key] = self._filled(source.objects[one.unique_key], one.key)
                else:
                    missing[one.unique_key] = None
            elif one.key not in source.tensors:
                missing[one.key] = None
            elif problem := self._add_tensor(one, source.tensors[one.key]):
                mismatched.append(problem)
        if missing or mismatched:
            lines = [f"  missing in the checkpoint: {key}" for key in missing] + [
                f"  {line}" for line in mismatched
            ]
            text = "\n".join([f"the checkpoint at {source.url} does not fit:", *lines])
            raise MismatchError(text, tuple(missing), (), tuple(mismatched))
        self._common = self._filled(source.common, "the common state") if with_common else {}

    def loaded(self) -> Any:
        """Returns the tensors and objects in the structure of the request, once the boxes are read."""
        for target, first in self._copies:
            target.copy_(first)
        return dict_list_map_outplace(
            lambda one: one.data if isinstance(one, ShardedTensor) else self._objects[one.unique_key],
            self._sharded,
        )

    def common(self) -> Any:
        """Returns the common state, once the boxes are read."""
        if isinstance(self._common, Tensor):
            return _loaded(self._common.numpy().tobytes())
        return self._common

    def _add_tensor(self, one: ShardedTensor, stored: Tensor) -> str:
        """Adds a tensor, and memory for it if it has none; returns why it does not fit, or an empty text."""
        can_differ = one.allow_shape_mismatch
        if one.data is None:
            one.init_data("cpu", init_fn=torch.zeros if can_differ else torch.empty)
        elif can_differ:
            one.data.detach().zero_()
        box, data = _box_of(one), _with_all_axes(one)
        if stored.shape == tuple(one.global_shape):
            self._add(stored, box, data)
        elif not can_differ or stored.dim() != len(box.sizes):
            shapes = f"{list(stored.shape)} in the checkpoint, {list(one.global_shape)} in the state dict"
            return f"{one.key}: global shape {shapes}"
        elif (common := box.intersect(Box.whole(stored.shape))) is not None:
            within = common.relative_to(box)
            pairs = zip(within.offsets, within.sizes, strict=True)
            self._add(stored, common, data[tuple(slice(begin, begin + size) for begin, size in pairs)])
        return ""

    def _filled(self, value: Any, what: str) -> Any:
        """Returns a value with memory for its tensors."""
        if isinstance(value, Tensor) and value.is_meta:
            memory = torch.empty(value.shape, dtype=value.dtype)
            self._add(value, Box.whole(value.shape), memory)
            return memory
        if value is GAP:
            raise OptionError(
                f"{what}: the checkpoint has an object of a class that fastload does not load, such as an "
                "argparse.Namespace; if Megatron saved it, load the directory from a mounted file system"
            )
        if isinstance(value, dict):
            for key, member in value.items():
                value[key] = self._filled(member, f"{what}, {key!r}")
        elif type(value) is tuple and len(value) == 2 and value[0] == BYTES_IO and type(value[1]) is bytes:
            return io.BytesIO(value[1])
        elif type(value) in (list, tuple):
            return type(value)(self._filled(member, what) for member in value)
        return value

    def _add(self, meta: Tensor, box: Box, tensor: Tensor) -> None:
        stored = self._source.stored_of(meta)
        if meta.dtype is torch.complex128:  # stored as pairs
            box, tensor = Box((*box.offsets, 0), (*box.sizes, 2)), torch.view_as_real(tensor)
        first = self._first.setdefault((stored, box), tensor)
        if first is not tensor:
            self._copies.append((tensor, first))
        else:
            self.boxes.setdefault(stored, []).append((box, tensor))


register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, VERSION, SaveStrategy())
register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION, LoadStrategy())
