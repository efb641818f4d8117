"""What a structure says of a state, without making it: keys, and the tensors they lead to. Trusts nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

from fastload.formats.untrusted import MemoryBudget
from fastload.formats.values import BARE_NAME, Unknown, crowded, decode_value, key_text, num_chars

__all__ = ["SavedTensor", "charge_names", "children_of", "leaf_of", "leaves_of", "list_of", "read_keys"]

_DICTS = ("dict", "OrderedDict", "Counter")
_NUM_NAMES = 2  # a list of the tensors, and the walk that makes the state
_NUMBER_CHARS = 24  # more than most numbers take
_KINDS = frozenset({None, "Tensor+grad", "Parameter", "Parameter+grad", "ndarray", "json"})


class SavedTensor(NamedTuple):
    """A tensor of a state.

    Attributes:
        name: Its path.
        stored: What it is stored under; tied tensors share that.
        kind: ``Parameter``, ``ndarray`` and the like, ``json`` for a text; None for a plain tensor.
        dtype: What the stored dtype stands for, if not for itself.
    """

    name: str
    stored: str
    kind: str | None = None
    dtype: str | None = None

    @property
    def is_text(self) -> bool:
        """Whether it is no tensor of the state, but the text of a plain value."""
        return self.kind == "json"

    @property
    def is_exact(self) -> bool:
        """Whether no other dtype than the stored one can stand for it: no cast."""
        return self.kind == "ndarray" or self.dtype is not None

    @property
    def is_complex128(self) -> bool:
        """Whether it is stored as pairs of float64, a dimension more."""
        return self.dtype == "complex128" or (self.dtype or "")[1:] == "c16"

    @property
    def own_name(self) -> str:
        """The name it goes by where every name stands for one tensor."""
        if self.stored == self.name:
            return self.name
        return self.stored if self.stored.startswith(f"{self.name}~") else self.name


def children_of(node: Any) -> dict[Any, tuple[str, Any]] | None:
    """Returns the nodes below one by their keys, each with the end of its name; None if it has none."""
    if type(node) is list:
        return {index: (str(index), child) for index, child in enumerate(node)}
    if type(node) is not dict or len(node) != 1:
        return None
    ((tag, payload),) = node.items()
    if tag == "tuple":
        return children_of(list_of(payload))
    if tag in ("state_dict", "defaultdict"):
        payload = list_of(payload)[tag == "defaultdict"]
    elif tag not in _DICTS:
        return None
    keys = read_keys(list_of(payload)[::2])
    return {key: (key_text(key), child) for key, child in zip(keys, payload[1::2], strict=True)}


def leaf_of(node: Any, name: str) -> SavedTensor | None:
    """Returns the tensor, or the NumPy array, that a node stands for; None if it stands for none."""
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


def leaves_of(node: Any, name: str) -> list[SavedTensor]:
    """Returns the tensors and arrays of a node and of all below it, in their order."""
    found: list[SavedTensor] = []
    _collect(node, name, found)
    return found


def _collect(node: Any, name: str, found: list[SavedTensor]) -> None:
    leaf = leaf_of(node, name)
    if leaf is not None:
        found.append(leaf)
        return
    prefix = f"{name}." if name else ""
    for ending, child in (children_of(node) or {}).values():
        _collect(child, prefix + ending, found)
    if type(node) is dict and node.keys() == {"state_dict"}:
        _collect(list_of(node["state_dict"])[1], f"{prefix}_metadata", found)


def charge_names(node: Any, num_prefix_chars: int, budget: MemoryBudget) -> None:
    """Charges the names of all that is below a node, which are made whenever a state is walked through.

    What is malformed is passed over: whoever walks there says so.

    Args:
        node: The node.
        num_prefix_chars: Length of the name that it has.
        budget: What to charge.

    Raises:
        ManifestError: They are over the limit.
    """
    if type(node) not in (list, dict):
        return
    budget.charge(_NUM_NAMES * num_prefix_chars)
    if type(node) is list:
        for child in node:
            charge_names(child, num_prefix_chars + _NUMBER_CHARS, budget)
        return
    if len(node) != 1:
        return
    ((tag, payload),) = node.items()
    if type(payload) is not list:
        return
    if tag == "tuple":
        charge_names(payload, num_prefix_chars, budget)
    elif tag in _DICTS:
        _charge_items(payload, num_prefix_chars, budget)
    elif tag in ("state_dict", "defaultdict"):
        for part in payload:
            if type(part) is list:
                _charge_items(part, num_prefix_chars, budget)
            else:
                charge_names(part, num_prefix_chars + len("._metadata"), budget)
    elif tag == "PerRank":
        for part in payload:
            charge_names(part, num_chars(payload[0]), budget)


def _charge_items(items: list[Any], num_prefix_chars: int, budget: MemoryBudget) -> None:
    for key, child in zip(items[::2], items[1::2], strict=False):
        if type(child) is dict or type(child) is list:
            num_key_chars = len(key) + 1 if type(key) is str and key.isascii() else _num_json_chars(key)
            charge_names(child, num_prefix_chars + num_key_chars, budget)


def _num_json_chars(node: Any) -> int:
    """Returns about how many characters the JSON of a key takes; its part of a name takes fewer."""
    if type(node) is list:
        return sum(map(_num_json_chars, node))
    if type(node) is dict:
        return sum(_NUMBER_CHARS + _num_json_chars(payload) for payload in node.values())
    return _NUMBER_CHARS + num_chars(node)


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


def list_of(payload: Any) -> list[Any]:
    """Returns a payload that has to be a list."""
    if type(payload) is not list:
        raise ValueError("not a list")
    return payload
