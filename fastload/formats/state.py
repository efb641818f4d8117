"""The structure of a state in JSON, next to its tensors by name. Nothing is pickled.

`fastload.formats.encoder` makes it, `fastload.formats.decoder` makes a state of it. JSON types only:

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
``{"coded": [extension, header, items]}``     a value of an extension, see `fastload.formats.codecs`
``{"PerRank": [name, [node, …]]}``           one node for each rank, see `PerRank`
``{"refused": [text]}``                      what cannot be loaded, of a state that fastload did not save
other tags                                   plain values, see `fastload.formats.values`
===========================================  ==========================================================

A tensor's name is its path: the keys, as `values.key_text` spells them, joined with dots, so that a model's
state dict keeps its names. If two paths spell the same name, the later one gets a suffix ``~2``.

Tensors keep their dtype, shape, values, ``requires_grad``, and whether they are a Parameter; not their
device, gradient or attributes. Strides are kept next to the structure, in the commit record. Tied tensors
(same memory, shape, strides and dtype) are stored once and come back as one object, or sharing memory if one
is a Parameter and the other its data. A container that appears twice comes back as two. Tensors that only
overlap are stored separately.

The names of a rank's own tensors begin with ``@rank3.``. They are in separate files, with those of the other
ranks. Long plain values are tensors of kind ``json``, whose bytes are JSON texts. Each rank's node has at
least one tensor, so that the structure stays short for any number of ranks.

A structure is untrusted: functions here raise `ManifestError` for one that is malformed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Generic, NamedTuple, TypeVar

import xxhash
from torch import Tensor

from fastload.base.memory import byte_view, host_view
from fastload.errors import FastloadError, ManifestError, MismatchError, UnsupportedVersion, first_lines
from fastload.formats.untrusted import MemoryBudget, show
from fastload.formats.values import (
    BARE_NAME,
    Unknown,
    crowded,
    decode_value,
    key_text,
    list_of,
    num_chars,
    show_path,
)
from fastload.options import PerRankMismatch

OWN_PREFIX = "@rank"
NO_VALUE: dict[str, Any] = {"PerRank": []}
"""The node of a place that has no value for this rank."""

_DICTS = ("dict", "OrderedDict", "Counter")
_ITEMS_AT = {"state_dict": 0, "defaultdict": 1, "coded": 2}
_SCALARS = frozenset({int, float, bool, str, type(None)})
_KINDS = frozenset({None, "Tensor+grad", "Parameter", "Parameter+grad", "ndarray", "json"})
_NUM_NAMES = 2  # a list of the tensors, and the walk that makes the state
_NUMBER_CHARS = 24  # more than most numbers take
_ADVICE = "strict=False leaves these out, and loads the rest"
_DIGEST_PIECE_BYTES = 16 << 20

T = TypeVar("T")


@dataclass(eq=False)
class PerRank(Generic[T]):
    """A value that differs between ranks, such as a random state or a position in the data.

    It may be anywhere in a state, except in another `PerRank`::

        state = {"model": model, "sampler": fastload.PerRank(sampler)}

    `fastload.save` saves the value of each rank: at most 1 MiB in all on a rank, and 256 MiB on all ranks. A
    load by the same number of ranks returns each rank its own value, or puts it in `value` of a `PerRank` in
    ``into=``. A load by another number of ranks is an error that names the place, unless
    `LoadOptions.per_rank_mismatch` says what to do.

    Attributes:
        value: The value of this rank, of any type that a state may hold. Tensors that are also elsewhere in
            the state are stored again, and not tied.
    """

    value: T


class RegroupedNode(NamedTuple):
    """Stands in the structure for a value that another number of ranks saved, and a function converts.

    Attributes:
        name: The place.
        nodes: The nodes of these ranks.
        convert: Returns this rank's value, given theirs.
    """

    name: str
    nodes: Sequence[Any]
    convert: Callable[[list[Any]], Any]

    def value(self, values: list[Any]) -> Any:
        """Returns this rank's value.

        Raises:
            MismatchError: The function fails.
        """
        try:
            return self.convert(values)
        except Exception as error:
            line = f"{self.name}: per_rank_mismatch= fails: {type(error).__name__}: {error}"
            raise MismatchError(line, mismatched=(line,)) from error


class SavedTensor(NamedTuple):
    """A tensor of a state.

    Attributes:
        name: Its path.
        stored: The name it is stored under, which tied tensors share.
        kind: ``Parameter``, ``ndarray`` and others, ``json`` for a text; None for a plain tensor.
        dtype: The original dtype, if it is not the stored one.
    """

    name: str
    stored: str
    kind: str | None = None
    dtype: str | None = None

    @property
    def is_text(self) -> bool:
        """Whether it is the text of a plain value."""
        return self.kind == "json"

    @property
    def is_exact(self) -> bool:
        """Whether it is loaded with its stored dtype, without a cast."""
        return self.kind == "ndarray" or self.dtype is not None

    @property
    def is_complex128(self) -> bool:
        """Whether it is stored as pairs of float64, with one more dimension."""
        return self.dtype == "complex128" or (self.dtype or "")[1:] == "c16"

    @property
    def own_name(self) -> str:
        """A name that is unique in the state."""
        if self.stored == self.name:
            return self.name
        return self.stored if self.stored.startswith(f"{self.name}~") else self.name


def structure_error(error: Exception, path: Sequence[Any] | None = None) -> Exception:
    """Returns the error to raise for a malformed structure.

    Args:
        error: The error that it has caused.
        path: The keys that lead to it, if known.
    """
    if isinstance(error, FastloadError):
        return error
    if isinstance(error, RecursionError):
        return ManifestError("the structure of the state is nested too deeply")
    where = "" if path is None else f", at {show_path(path)}"
    kind = UnsupportedVersion if isinstance(error, Unknown) else ManifestError
    why = str(error)[:400]  # however long a hostile text made it
    return kind(f"the structure of the state{where}: {why}")


_Function = TypeVar("_Function", bound=Callable[..., Any])


def checked(function: _Function) -> _Function:
    """Makes a function raise `ManifestError` for a malformed structure."""

    @wraps(function)
    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:
            raise structure_error(error) from None

    return call  # type: ignore[return-value]


# The tree


@checked
def children(node: Any) -> dict[Any, tuple[str, Any]] | None:
    """Returns the keys of a container, each with its part of the name and its node; else None.

    Raises:
        ManifestError: It is malformed.
    """
    if type(node) is list:
        return {index: (str(index), child) for index, child in enumerate(node)}
    if type(node) is not dict or len(node) != 1:
        return None
    ((tag, payload),) = node.items()
    if tag == "tuple":
        return children(list_of(payload))
    if tag in _ITEMS_AT:
        payload = list_of(payload)[_ITEMS_AT[tag]]
    elif tag not in _DICTS:
        return None
    keys = read_keys(list_of(payload)[::2])
    return {key: (key_text(key), child) for key, child in zip(keys, payload[1::2], strict=True)}


def leaf_of(node: Any, name: str) -> SavedTensor | None:
    """Returns the tensor or NumPy array of a node; None for other nodes.

    Raises:
        ValueError: It is malformed; of `leaf`, a `ManifestError`.
    """
    if type(node) is not dict:
        return None
    if not node:
        return SavedTensor(name or BARE_NAME, name or BARE_NAME)
    if node.keys() != {"tensor"}:
        return None
    payload = list_of(node["tensor"])
    stored, kind, dtype = (*payload, None, None)[: max(3, len(payload))]
    if not all(field is None or type(field) is str for field in (stored, kind, dtype)):
        raise ValueError("not a tensor's name, kind and dtype")
    if kind not in _KINDS:
        raise Unknown(f"not a tensor's name, kind and dtype: unknown kind {kind[:40]!r}: update fastload")
    name = name or BARE_NAME
    return SavedTensor(name, name if stored is None else stored, kind, dtype)


leaf = checked(leaf_of)


@checked
def leaves(structure: Any, name: str = "") -> list[SavedTensor]:
    """Returns all tensors and NumPy arrays of a state or a part of it.

    Raises:
        ManifestError: The structure is malformed.
    """
    saved: list[SavedTensor] = []
    _collect(structure, name, saved)
    return saved


def has_only_scalars(node: Any) -> bool:
    """Whether a node is a list or a tuple without containers, such as thousands of numbers."""
    if type(node) is dict and node.keys() == {"tuple"}:
        node = node["tuple"]
    return type(node) is list and _SCALARS.issuperset(map(type, node))


def _collect(node: Any, name: str, collected: list[SavedTensor]) -> None:
    if has_only_scalars(node):
        return
    saved = leaf_of(node, name)
    if saved is not None:
        collected.append(saved)
        return
    for of_rank in node.nodes if type(node) is RegroupedNode else ():
        _collect(of_rank, name, collected)
    prefix = f"{name}." if name else ""
    for ending, child in (children(node) or {}).values():
        _collect(child, prefix + ending, collected)
    if type(node) is dict and node.keys() == {"state_dict"}:
        _collect(list_of(node["state_dict"])[1], f"{prefix}_metadata", collected)


class OptimizerTensors(NamedTuple):
    """The tensors that a state has only as parts of optimizers.

    Attributes:
        stored: Names of the stored tensors, by the place of each optimizer in the state.
        names: Names in the state; some of them may be of tensors that also have others.
    """

    stored: dict[str, set[str]]
    names: set[str]


@checked
def optimizer_tensors(structure: Any) -> OptimizerTensors:
    """Returns the tensors of optimizers; a dict with ``state`` and ``param_groups`` is taken for one.

    Raises:
        ManifestError: The structure is malformed.
    """
    by_name: dict[str, list[SavedTensor]] = {}
    nodes = [("", structure)]
    while nodes:
        name, node = nodes.pop()
        within = children(node) or {}
        if within.keys() >= {"state", "param_groups"}:
            by_name[name] = leaves(node, name)
            continue
        prefix = f"{name}." if name else ""
        nodes += [(prefix + ending, child) for ending, child in within.values()]
    of_optimizers = [saved for states in by_name.values() for saved in states]
    others = Counter(leaves(structure)) - Counter(of_optimizers)
    needed = {saved.stored for saved in others}
    stored = {name: {saved.stored for saved in states} - needed for name, states in sorted(by_name.items())}
    names = {saved.own_name for saved in of_optimizers} - {saved.own_name for saved in others}
    return OptimizerTensors({name: tensors for name, tensors in stored.items() if tensors}, names)


def read_keys(nodes: list[Any]) -> list[Any]:
    """Returns keys of a dict, or members of a set."""
    keys = [_key(node) for node in nodes]
    if why := crowded(keys):
        raise ValueError(why)
    return keys


def _key(node: Any) -> Any:
    if type(node) is dict and node.keys() == {"tuple"}:
        return tuple(map(_key, list_of(node["tuple"])))
    return decode_value(node)


@checked
def check_names(structure: Any, where: str, nbytes: int) -> None:
    """Refuses a structure whose names take far more memory than its text: long keys of many tensors.

    Args:
        structure: Of the state.
        where: The checkpoint, for messages.
        nbytes: Length of the text that it was parsed from.

    Raises:
        ManifestError: The names below it are too long.
    """
    budget = MemoryBudget(where)
    budget.add_input(nbytes)
    _charge_names(structure, 0, budget)


def _charge_names(node: Any, num_prefix_chars: int, budget: MemoryBudget) -> None:
    """Charges the names below a node to a budget. Malformed nodes are left to the walks that make names."""
    if type(node) not in (list, dict):
        return
    budget.charge(_NUM_NAMES * num_prefix_chars)
    if type(node) is list:
        for child in node:
            _charge_names(child, num_prefix_chars + _NUMBER_CHARS, budget)
        return
    if len(node) != 1:
        return
    ((tag, payload),) = node.items()
    if type(payload) is not list:
        return
    if tag == "tuple":
        _charge_names(payload, num_prefix_chars, budget)
    elif tag in _DICTS:
        _charge_items(payload, num_prefix_chars, budget)
    elif tag in _ITEMS_AT:
        for part in payload:
            if type(part) is list:
                _charge_items(part, num_prefix_chars, budget)
            else:
                _charge_names(part, num_prefix_chars + len("._metadata"), budget)
    elif tag == "PerRank":
        for part in payload:
            _charge_names(part, num_chars(payload[0]), budget)


def _charge_items(items: list[Any], num_prefix_chars: int, budget: MemoryBudget) -> None:
    for key, child in zip(items[::2], items[1::2], strict=False):
        if type(child) is dict or type(child) is list:
            num_key_chars = len(key) + 1 if type(key) is str and key.isascii() else _num_json_chars(key)
            _charge_names(child, num_prefix_chars + num_key_chars, budget)


def _num_json_chars(node: Any) -> int:
    """Returns about the number of characters of a key in JSON, which is more than in a name."""
    if type(node) is list:
        return sum(map(_num_json_chars, node))
    if type(node) is dict:
        return sum(_NUMBER_CHARS + _num_json_chars(payload) for payload in node.values())
    return _NUMBER_CHARS + num_chars(node)


# Values that each rank has of its own


def own_prefix(rank: int) -> str:
    """Returns the prefix of the names of a rank's own tensors."""
    return f"{OWN_PREFIX}{rank}."


def fill_places(structure: Any, values: Sequence[Sequence[Any]]) -> Any:
    """Returns the structure with the nodes of all ranks.

    Args:
        structure: As any rank encodes it: its places are ``{"PerRank": [name, number]}``.
        values: The nodes of each rank, in the order of the numbers.
    """

    def filled(place: Any) -> Any:
        name, number = place
        return {"PerRank": [name, [nodes[number] for nodes in values]]}

    return with_replaced(structure, {"PerRank": filled})


def with_replaced(node: Any, replace: Mapping[str, Callable[[Any], Any]]) -> Any:
    """Returns a structure with the nodes of some tags replaced, given their payloads."""
    if type(node) is list:
        return [with_replaced(child, replace) for child in node]
    if type(node) is not dict:
        return node
    if len(node) == 1:
        ((tag, payload),) = node.items()
        if tag in replace:
            return replace[tag](payload)
    return {tag: with_replaced(payload, replace) for tag, payload in node.items()}


@dataclass
class OwnView:
    """The structure as one rank sees it.

    Attributes:
        structure: With this rank's own values, a `RegroupedNode` for those that a function converts, and
            `NO_VALUE` for values that it cannot load.
        elsewhere: The places without a value for this rank: name, and number of ranks with a value.
        together: By name of this rank's own tensors, the names of all ranks' tensors at the same place.
        refused: A line for each value that cannot be loaded.
        is_regrouped: Whether it has a `RegroupedNode`.
    """

    structure: Any = None
    elsewhere: list[tuple[str, int]] = field(default_factory=list)
    together: dict[str, Sequence[str]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    is_regrouped: bool = False


@checked
def own_view(structure: Any, rank: int, size: int, on_mismatch: PerRankMismatch = "error") -> OwnView:
    """Returns the structure as one rank of a group sees it.

    Args:
        structure: The structure; untrusted.
        rank: The rank.
        size: Number of ranks.
        on_mismatch: See `LoadOptions.per_rank_mismatch`.

    Raises:
        ManifestError: It is malformed.
    """
    view = OwnView()

    def own(place: Any) -> Any:
        name, values = list_of(place)
        if type(name) is not str or not list_of(values):
            raise ValueError(f"not a place of the ranks' own values: {show(place)}")
        action = action_at(name, on_mismatch)
        if len(values) != size and isinstance(action, str):
            view.elsewhere.append((name, len(values)))
            return NO_VALUE
        names = [[saved.stored for saved in leaves(value, name)] for value in values]
        everyone = [stored for of_rank in names for stored in of_rank]
        if len(values) != size:
            view.together.update((stored, everyone) for stored in everyone)
            view.is_regrouped = True
            return RegroupedNode(name, values, lambda regrouped: action(regrouped, rank, size))
        view.together.update((stored, everyone) for stored in names[rank])
        return values[rank]

    def refuse(lines: Any) -> Any:
        view.refused += lines
        return NO_VALUE

    view.structure = with_replaced(structure, {"PerRank": own, "refused": refuse})
    return view


def action_at(name: str, on_mismatch: PerRankMismatch) -> Any:
    """Returns what is done with a value of another number of ranks: ``error``, ``skip`` or a function."""
    return on_mismatch.get(name, "error") if isinstance(on_mismatch, Mapping) else on_mismatch


def has_gap(node: Any) -> bool:
    """Whether a node has places without a value for this rank."""
    if type(node) is list:
        return any(map(has_gap, node))
    return type(node) is dict and (node == NO_VALUE or any(map(has_gap, node.values())))


# Values that cannot be loaded


def raise_refused(url: str, refused: Sequence[str], advice: str = _ADVICE) -> None:
    """Raises if any value cannot be loaded.

    Args:
        url: The checkpoint.
        refused: A line for each such value.
        advice: What to do.

    Raises:
        ManifestError: Values cannot be loaded; lists them.
    """
    if not refused:
        return
    lines = "\n  ".join([f"{url}: not all of it can be loaded:", *first_lines(refused)])
    raise ManifestError(f"{lines}\n{advice}")


def state_digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns an xxh3-128 digest of names, dtypes, shapes and bytes, the same on every device."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        for piece in byte_view(tensor).split(_DIGEST_PIECE_BYTES):
            digest.update(host_view(piece.cpu()))
    return digest.hexdigest()
