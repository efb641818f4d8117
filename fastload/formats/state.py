"""Nested state as named tensors and a JSON structure, and back. Nothing is pickled.

The structure, JSON types only:

===========================================  ==========================================================
``null true 1 1.5 "text"``                   itself
``[…]``                                      list
``{"dict": [key, value, key, value, …]}``    dict, in its order whoever sorts the keys of JSON objects;
                                             so are ``OrderedDict`` and ``Counter``
``{"state_dict": [items, metadata]}``        OrderedDict with ``_metadata``, as ``Module.state_dict`` has
``{"defaultdict": [factory, items]}``        defaultdict; the factory by name, or null
``{"tuple": […]}``, ``set``, ``frozenset``   their elements; those of sets are sorted by their JSON
``{}``                                       the tensor that is named by its path
``{"tensor": [name, kind, dtype]}``          any other; nulls at the end are left out. A null name is the
                                             path's; the dtype says what the stored one stands for
other tags                                   plain values, see `fastload.formats.values`
===========================================  ==========================================================

A tensor's name is its path: the keys, as `values.key_text` spells them, joined with dots, so that a model's
state dict keeps its names. Where two paths spell the same name, the later one gets a suffix ``~2``.

What is kept of a tensor is its dtype, shape, values, whether it is a Parameter, and requires_grad; not
its strides, device, gradient or attributes. Tensors that are tied (same memory, shape, strides and
dtype) are stored once and come back as one object, or sharing memory where one is a Parameter and the
other its data. A container that appears twice comes back as two. Tensors that merely overlap are stored
one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fastload.errors import ManifestError, OptionError
from fastload.formats.describer import Describer
from fastload.formats.rebuilder import Rebuilder, children_of
from fastload.formats.values import show_path

__all__ = ["Description", "children", "describe", "rebuild"]

_MAX_PROBLEMS = 20


@dataclass(frozen=True)
class Description:
    """What a state consists of.

    Attributes:
        tensors: What is to be stored, each tensor once, by name, in the order of the state. They share
            memory with the state where they can; dense, of a dtype that safetensors has, on any device.
        structure: Everything else, JSON types only; the same whoever describes an equal state.
    """

    tensors: dict[str, Tensor]
    structure: Any


def describe(state: Any) -> Description:
    """Takes a nested state apart.

    Args:
        state: Dicts (also OrderedDict, defaultdict, Counter), lists, tuples and sets of tensors,
            Parameters, NumPy arrays and scalars, and plain values.

    Raises:
        OptionError: Something cannot be kept; names the key of each such thing.
    """
    describer = Describer()
    try:
        structure = describer.value(state, "", "")
    except RecursionError:
        raise OptionError("the state cannot be saved: it is nested too deeply") from None
    if describer.problems:
        shown = describer.problems[:_MAX_PROBLEMS]
        more = len(describer.problems) - len(shown)
        lines = [*shown, *([f"and {more} more"] if more else [])]
        raise OptionError("the state cannot be saved: " + "\n  ".join(lines))
    return Description(describer.tensors, structure)


def rebuild(structure: Any, tensors: Mapping[str, Tensor], name: str = "") -> Any:
    """Puts a state together again.

    Args:
        structure: From `describe`, perhaps by way of JSON; untrusted.
        tensors: By name. They become part of the state, they are not copied.
        name: If this is the structure of a part of the state, the name of that part.

    Raises:
        ManifestError: The structure is malformed or does not fit the tensors; says where.
        CheckpointError: It needs NumPy, which is not installed.
    """
    rebuilder = Rebuilder(tensors)
    try:
        return rebuilder.value(structure, "", name)
    except RecursionError:
        raise ManifestError("the structure of the state is nested too deeply") from None
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        why = str(error)[:400]  # however long a hostile text made it
        raise ManifestError(f"the structure of the state, at {show_path(rebuilder.path)}: {why}") from None


def children(structure: Any) -> dict[Any, tuple[str, Any]] | None:
    """Returns the keys of a dict, a list or a tuple, each with the end of its name and its structure.

    None if the structure stands for something else.

    Raises:
        ManifestError: It is malformed.
    """
    try:
        return children_of(structure)
    except (ValueError, TypeError, RecursionError) as error:
        raise ManifestError(f"the structure of the state: {str(error)[:400]}") from None
