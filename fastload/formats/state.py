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
``{"PerRank": [name, [node, …]]}``           what each rank has of its own, see `fastload.formats.per_rank`
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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import xxhash
from torch import Tensor

from fastload.base.memory import byte_view, host_view, uncollected
from fastload.errors import FastloadError, ManifestError, OptionError, UnsupportedVersion
from fastload.formats.per_rank import OWN_PREFIX, OwnView, view
from fastload.formats.rebuilder import Rebuilder
from fastload.formats.saved import SavedTensor, charge_names, children_of, leaf_of, leaves_of
from fastload.formats.untrusted import MemoryBudget
from fastload.formats.values import Unknown, show_path

__all__ = [
    "Description",
    "Rebuilder",
    "SavedTensor",
    "check_names",
    "children",
    "describe",
    "leaf",
    "leaves",
    "own_view",
    "rebuild",
    "state_digest",
]

_MAX_PROBLEMS = 20
_DIGEST_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class Description:
    """What a state consists of.

    Attributes:
        tensors: What is to be stored, each tensor once, by name, in the order of the state. They share
            memory with the state where they can; dense, of a dtype that safetensors has, on any device.
        structure: Everything else, JSON types only; the same whoever describes an equal state.
        own_tensors: Those of this rank's own values, likewise.
        own_values: The rest of these, one for each place in `structure`.
        starts: Of each entry of the state, how many of `tensors` are before it.
    """

    tensors: dict[str, Tensor]
    structure: Any
    own_tensors: dict[str, Tensor]
    own_values: list[Any]
    starts: list[int]


def describe(state: Any, rank: int = 0) -> Description:
    """Takes a nested state apart.

    Args:
        state: Dicts (also OrderedDict, defaultdict, Counter), lists, tuples and sets of tensors,
            Parameters, NumPy arrays and scalars, and plain values; any of it in a `PerRank`.
        rank: Whose own values those are.

    Raises:
        OptionError: Something cannot be kept; names the key of each such thing.
    """
    from fastload.formats.describer import Describer  # which a load has no need of

    describer = Describer(rank)
    try:
        structure = describer.value(state, "", "")
    except RecursionError:
        raise OptionError("the state cannot be saved: it is nested too deeply") from None
    if describer.problems:
        shown = describer.problems[:_MAX_PROBLEMS]
        more = len(describer.problems) - len(shown)
        lines = [*shown, *([f"and {more} more"] if more else [])]
        raise OptionError("the state cannot be saved: " + "\n  ".join(lines))
    own = describer.own
    if own is None:
        return Description(describer.tensors, structure, {}, [], describer.starts)
    for name in describer.tensors:
        if name.startswith(OWN_PREFIX):
            raise OptionError(
                f"the state cannot be saved: tensor {name[:200]!r}: with a PerRank in the state, no name may "
                f"begin with {OWN_PREFIX!r}"
            )
    return Description(describer.tensors, structure, own.tensors, own.values, describer.starts)


@uncollected
def rebuild(structure: Any, tensors: Mapping[str, Tensor] | Rebuilder, name: str = "") -> Any:
    """Puts a state together again.

    Args:
        structure: From `describe`, perhaps by way of JSON; untrusted.
        tensors: By name. They become part of the state, they are not copied. Or what has rebuilt other
            parts of the same state: what is tied in the state is then tied across these parts, too.
        name: If this is the structure of a part of the state, the name of that part.

    Raises:
        ManifestError: The structure is malformed or does not fit the tensors; says where.
        UnsupportedVersion: A later version may know what it has.
        CheckpointError: It needs NumPy, which is not installed.
    """
    rebuilder = tensors if isinstance(tensors, Rebuilder) else Rebuilder(tensors)
    rebuilder.path.clear()
    with _distrusting(rebuilder.path):
        return rebuilder.value(structure, "", name)


def children(structure: Any) -> dict[Any, tuple[str, Any]] | None:
    """Returns the keys of a dict, a list or a tuple, each with the end of its name and its structure.

    None if the structure stands for something else.

    Raises:
        ManifestError: It is malformed.
    """
    with _distrusting():
        return children_of(structure)


def leaf(structure: Any, name: str) -> SavedTensor | None:
    """Returns the tensor that a structure stands for; None if it stands for something else.

    Raises:
        ManifestError: It is malformed.
    """
    if structure == {} and name:  # said here, too, since it is asked of very many
        return SavedTensor(name, name)
    with _distrusting():
        return leaf_of(structure, name)


def check_names(structure: Any, where: str, nbytes: int) -> None:
    """Refuses a structure that makes very much of few bytes: long keys above very many tensors.

    Args:
        structure: Of the state.
        where: The checkpoint, for messages.
        nbytes: Length of the text that it was parsed from.

    Raises:
        ManifestError: The names below it are too long.
    """
    budget = MemoryBudget(where)
    budget.add_input(nbytes)
    with _distrusting():
        charge_names(structure, 0, budget)


def own_view(structure: Any, rank: int, size: int) -> OwnView:
    """Returns a structure as a rank of a group of so many is to see it.

    Raises:
        ManifestError: It is malformed.
    """
    with _distrusting():
        return view(structure, rank, size)


def leaves(structure: Any, name: str = "") -> list[SavedTensor]:
    """Returns the tensors, and the NumPy arrays, of a state or a part of it.

    Raises:
        ManifestError: The structure is malformed.
    """
    with _distrusting():
        return leaves_of(structure, name)


@contextmanager
def _distrusting(path: Sequence[Any] | None = None) -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise ManifestError("the structure of the state is nested too deeply") from None
    except FastloadError:
        raise
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        where = "" if path is None else f", at {show_path(path)}"
        why = str(error)[:400]  # however long a hostile text made it
        kind = UnsupportedVersion if isinstance(error, Unknown) else ManifestError
        raise kind(f"the structure of the state{where}: {why}") from None


def state_digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns one xxh3-128 digest of names, dtypes, shapes and bytes, the same wherever the tensors live."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        for piece in byte_view(tensor).split(_DIGEST_PIECE_BYTES):
            digest.update(host_view(piece.cpu()))
    return digest.hexdigest()
