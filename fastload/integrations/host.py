"""What doors ask of where they open: of the library, at set-up, and of directories, whose they are."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parameter import is_lazy

from fastload import LoadOptions, OptionError, world
from fastload.geometry.dtensors import is_dtensor

__all__ = ["is_ours", "live_state", "odd_tensors", "refuse", "require_layout", "state_to_save", "unknown"]

_PLAIN = (Tensor, nn.Parameter)


def unknown(library: ModuleType, tested: str, why: object) -> OptionError:
    """Returns what to raise where a library is not the one that a door opens into.

    Args:
        library: What is installed.
        tested: The version that the door is tested with.
        why: What is not as it is there.
    """
    version = getattr(library, "__version__", "of no version")
    return OptionError(
        f"fastload does not know {library.__name__} {version}: {why}; it is tested with {tested}"
    )


def require_layout(library: ModuleType, tested: str, seams: Mapping[str, tuple[Any, str]]) -> None:
    """Raises unless the functions that a door replaces or calls take what it expects.

    Args:
        library: What is installed.
        tested: The version that the door is tested with.
        seams: What a function is called in messages → the class or module that has it, and its parameters,
            separated by blanks.

    Raises:
        OptionError: One of them is not there, or takes something else.
    """
    for name, (owner, parameters) in seams.items():
        found = getattr(owner, name.rpartition(".")[2], None)
        names = list(inspect.signature(found).parameters) if callable(found) else None
        if names != parameters.split():
            what = "is not there" if names is None else f"takes ({', '.join(names)})"
            raise unknown(library, tested, f"{name} {what}")


def refuse(what: str, reasons: Mapping[str, bool], advice: str = "") -> None:
    """Raises if one of the reasons holds.

    Args:
        what: What fastload cannot do then, such as ``save a training``.
        reasons: What that would be with → whether it is there.
        advice: What to do instead.

    Raises:
        OptionError: Some of them hold; it names them.
    """
    if found := [name for name, is_there in reasons.items() if is_there]:
        problem = f"fastload cannot {what} with {', '.join(found)}"
        raise OptionError(f"{problem}: {advice}" if advice else problem)


def is_ours(folder: str) -> bool:
    """Whether fastload saved what is in a directory: the same answer on all ranks, that of rank 0."""
    seen = partial(os.path.isfile, os.path.join(folder, "fastload.json"))
    answers = world.agree(None, f"looking at {folder}", seen, timeout_s=LoadOptions().timeout_s)
    return bool(answers[0])


def odd_tensors(model: nn.Module) -> str:
    """Says of which classes those tensors of a model are that cannot be saved, such as quantized weights.

    Empty if there are none. What is not materialized yet may become one that can be saved.
    """
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if not is_lazy(tensor)]
    odd = {type(tensor) for tensor in tensors if type(tensor) not in _PLAIN and not is_dtensor(tensor)}
    return ", ".join(sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in odd))


def live_state(model: nn.Module) -> dict[str, Any]:
    """Returns the state dict of a model, whatever wraps it and its parts: the tensors are its own."""
    return get_model_state_dict(model)


def state_to_save(model: nn.Module) -> dict[str, Any]:
    """Returns the state dict of a model, with buffers, such as running statistics, as rank 0 has them.

    That is what frameworks save, whose ranks may each have their own.
    """
    state = live_state(model)
    names = {_bare(name) for name, _ in model.named_buffers()}
    buffers = [name for name in state if _bare(name) in names and type(state[name]) is Tensor]
    if dist.is_initialized():
        for device in sorted({state[name].device for name in buffers}, key=str):
            state |= _of_rank_0({name: state[name] for name in buffers if state[name].device == device})
    return state


def _bare(name: str) -> str:
    return name.removeprefix("module.").replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _of_rank_0(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies of tensors of one device, with the values that rank 0 has."""
    packed = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()])
    dist.broadcast(packed, 0)
    pieces = packed.split([tensor.nbytes for tensor in tensors.values()])
    return {
        name: piece.clone().view(tensor.dtype).view(tensor.shape)
        for (name, tensor), piece in zip(tensors.items(), pieces, strict=True)
    }
