"""PEFT: adapters of a model, which all ranks save and load together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import peft
from torch import Tensor

import fastload
from fastload import LoadOptions, OptionError, SaveOptions
from fastload.base.tracebacks import short_tracebacks
from fastload.geometry.dtensors import local_of
from fastload.integrations.directory_save import DirectorySave
from fastload.integrations.frameworks import (
    live_state,
    require_signatures,
    state_to_save,
    step_of_all,
    unknown_version,
)
from fastload.storage import locate, name_of

TESTED = "0.21"
try:
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
except ImportError as error:
    raise unknown_version(peft, TESTED, error) from None

__all__ = ["load", "save"]

DEFAULT = "default"
"""The adapter whose files are in the directory of a model; others have a directory of their name in it."""

_SIGNATURES = {
    "peft.get_peft_model_state_dict": (
        peft,
        "model state_dict adapter_name unwrap_compiled save_embedding_layers",
    ),
    "peft.set_peft_model_state_dict": (
        peft,
        "model peft_model_state_dict adapter_name ignore_mismatched_sizes low_cpu_mem_usage",
    ),
    "PeftModel.add_adapter": (
        PeftModel,
        "self adapter_name peft_config low_cpu_mem_usage autocast_adapter_dtype",
    ),
    "PeftModel.delete_adapter": (PeftModel, "self adapter_name"),
    "PeftModel._get_base_model_class": (PeftModel, "self is_prompt_tuning"),
}


@short_tracebacks
def save(
    model: PeftModel,
    path: str | os.PathLike[str],
    *,
    adapter_name: str = DEFAULT,
    process_group: Any = None,
    options: SaveOptions | None = None,
) -> None:
    """Saves one adapter of a model on all ranks together, as PEFT does.

    The directory has ``adapter_model.safetensors`` and ``adapter_config.json``, for
    ``PeftModel.from_pretrained`` and other programs. It appears as a whole, once it is durable.

    Args:
        model: The model, plain or sharded.
        path: The directory, on a file system that all ranks see. An existing one is replaced.
        adapter_name: The adapter.
        process_group: As for `fastload.save`.
        options: How to save; None for the defaults.

    Raises:
        OptionError: fastload does not know this version of PEFT, or the model has no such adapter.
        FastloadError: As for `fastload.save`.
    """
    require_signatures(peft, TESTED, _SIGNATURES)
    state = state_to_save(model, process_group)
    with step_of_all(f"saving the adapter {adapter_name!r}", process_group=process_group):
        _require_adapter(model, adapter_name)
        if (location := locate(path)).scheme:
            raise OptionError(f"{location}: an adapter is saved to a file system: give a path")
        if os.path.isfile(location.address):
            raise OptionError(f"{location} is a file: an adapter is saved as a directory")
        tensors = tensors_of(model, adapter_name, state)
    DirectorySave(
        os.path.realpath(locate(path).address),
        {"": tensors},
        adapters=[""],
        add_files=partial(save_config, model, adapter_name),
        process_group=process_group,
        options=options,
    ).wait()


@short_tracebacks
def load(
    model: PeftModel,
    path: str | os.PathLike[str],
    *,
    adapter_name: str = DEFAULT,
    process_group: Any = None,
    options: LoadOptions | None = None,
) -> None:
    """Loads an adapter into a model on all ranks together, in place; each byte is read once.

    Args:
        model: The model, plain or sharded. If it has no such adapter, the adapter is added, by the
            configuration at `path`; it is not made the active one. If loading fails, it is deleted.
        path: A directory that PEFT or `save` made; all ranks see it.
        adapter_name: The adapter.
        process_group: As for `fastload.load`.
        options: How to load; None for the defaults.

    Raises:
        OptionError: fastload does not know this version of PEFT.
        MismatchError: The adapter at `path` is another one, by names or shapes.
        FastloadError: As for `fastload.load`.
    """
    require_signatures(peft, TESTED, _SIGNATURES)
    is_new = adapter_name not in model.peft_config
    try:
        what = f"adding the adapter of {name_of(path)}"
        with step_of_all(what, process_group=process_group, options=options):
            if is_new:
                model.add_adapter(adapter_name, PeftConfig.from_pretrained(os.fspath(path)))
            state = live_state(model)
            into = tensors_of(model, adapter_name, state, unshared=False)
        fastload.load(path, into=into, process_group=process_group, options=options)
        if not _memory_of(into) <= _memory_of(state):  # such as prompts, and ranks that AdaLoRA has selected
            set_peft_model_state_dict(model, into, adapter_name)
    except BaseException:
        if is_new and adapter_name in model.peft_config:
            model.delete_adapter(adapter_name)
        raise


def tensors_of(
    model: PeftModel, adapter_name: str, state: Mapping[str, Any], *, unshared: bool = True
) -> dict[str, Tensor]:
    """Returns the tensors of an adapter under their names in files of PEFT.

    Args:
        model: The model.
        adapter_name: The adapter.
        state: The state dict of the model.
        unshared: Whether tensors that share memory are copied: a file has them all, like one of PEFT.
    """
    found = get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=adapter_name)
    if unshared:
        known: set[int] = set()
        for name, tensor in found.items():
            address = local_of(tensor).data_ptr()
            found[name] = tensor.detach().clone() if address and address in known else tensor
            known.add(address)
    return found  # type: ignore[no-any-return]


def folder_of(adapter_name: str) -> str:
    """Returns the directory of an adapter below that of its model; empty if it is the same."""
    return "" if adapter_name == DEFAULT else adapter_name


def save_config(model: PeftModel, adapter_name: str, folder: str) -> None:
    """Writes the configuration of an adapter, as ``PeftModel.save_pretrained`` does."""
    config = deepcopy(model.peft_config[adapter_name])
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(model.get_base_model(), "name_or_path", None) or None
    config.inference_mode = True
    mapping = None
    if config.task_type is None:
        base = model._get_base_model_class(is_prompt_tuning=config.is_prompt_learning)
        mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
    config.save_pretrained(folder, auto_mapping_dict=mapping)


def _require_adapter(model: PeftModel, adapter_name: str) -> None:
    if adapter_name not in model.peft_config:
        names = ", ".join(map(repr, model.peft_config))
        raise OptionError(f"the model has no adapter {adapter_name!r}: it has {names}")


def _memory_of(tensors: Mapping[str, Any]) -> set[int]:
    """Returns the addresses of the memory that tensors are views of."""
    found = (local_of(tensor) for tensor in tensors.values() if isinstance(tensor, Tensor))
    return {local.untyped_storage().data_ptr() for local in found if local.numel()}
