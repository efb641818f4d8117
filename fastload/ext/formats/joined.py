"""Joins the manifests of several files, and the values of flattened states. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastload.errors import ManifestError
from fastload.formats.manifest import Guard, Manifest, TensorEntry, in_order
from fastload.formats.untrusted import show
from fastload.formats.values import MAX_DEPTH, encode_value

_MAX_HOLES = 1000  # members of lists that were not saved; and one more for each name


def numbered(manifest: Manifest, file: int) -> Manifest:
    """Returns the manifest of a single file, with its tensors in the file of that index."""
    tensors = (
        replace(entry, file=file, pieces=tuple(piece._replace(file=file) for piece in entry.pieces))
        for entry in manifest.tensors
    )
    return replace(manifest, tensors=tuple(tensors))


def join_manifests(
    url: str, parts: Sequence[Manifest], tensors: Iterable[TensorEntry], structure: Any, **about: Any
) -> Manifest:
    """Returns the manifest of several files, each with a manifest of its own.

    Args:
        url: The checkpoint.
        parts: The manifests of the files.
        tensors: The tensors, in any order.
        structure: Structure of the state.
        about: Other attributes of the manifest.
    """
    guards: list[Guard] = []
    heads: list[bytes] = []
    for number, part in enumerate(parts):
        guards += (Guard(number, guard.offset, len(heads) + guard.head) for guard in part.guards)
        heads += part.heads
    return Manifest(
        url,
        tuple(part.files[0] for part in parts),
        tuple(in_order(tensors)),
        structure=structure,
        guards=tuple(guards),
        heads=tuple(heads),
        **about,
    )


class _Leaf:
    """A value without keys below it."""

    def __init__(self, node: Any) -> None:
        self.node = node


_Tree = dict[str | int, Any]


def nested(nodes: Mapping[str, Any], paths: Mapping[str, Sequence[str | int]], where: str) -> Any:
    """Returns the structure of a state, see `fastload.formats.state`.

    Args:
        nodes: The nodes of its values, by flattened name.
        paths: The keys of each name: texts of dicts, numbers of lists. A name without keys is itself a key.
        where: The checkpoint, for messages.

    Raises:
        ManifestError: The paths contradict each other.
    """
    root: _Tree = {}
    for name, node in nodes.items():
        path = paths.get(name, (name,))
        if len(path) > MAX_DEPTH:
            raise ManifestError(f"{where}: {show(name)} is nested deeper than {MAX_DEPTH} levels")
        tree = root
        for key in path[:-1]:
            tree = tree.setdefault(key, {})
            if type(tree) is not dict:
                raise ManifestError(f"{where}: {show(name)} is below what is no dict and no list")
        if path[-1] in tree:
            raise ManifestError(f"{where}: the keys of {show(name)}, {show(path)}, are not its own")
        tree[path[-1]] = _Leaf(node)
    writer = _TreeWriter(where, _MAX_HOLES + len(nodes))
    return writer.dict(root, ())


class _TreeWriter:
    """Writes a tree of keys as a structure."""

    def __init__(self, where: str, max_holes: int) -> None:
        self._where = where
        self._holes_left = max_holes

    def dict(self, tree: _Tree, numbers: Collection[str | int]) -> Any:
        """Writes a dict, with numbers for keys that are texts of numbers."""
        parameters = _parameters(tree)
        parts = []
        for key, below in tree.items():
            parts.append(int(key) if key in numbers else encode_value(key))
            parts.append(self._node(below, parameters if key == "state" else ()))
        return {"dict": parts}

    def _node(self, tree: Any, numbers: Collection[str | int]) -> Any:
        if type(tree) is _Leaf:
            return tree.node
        kinds = set(map(type, tree))
        if len(kinds) > 1:
            raise ManifestError(
                f"{self._where}: keys of one container are texts and numbers: {show([*tree])}"
            )
        return self._list(tree) if kinds == {int} else self.dict(tree, numbers)

    def _list(self, tree: _Tree) -> Any:
        length = 1 + max(map(int, tree))
        self._holes_left -= length - len(tree)
        if self._holes_left < 0:
            raise ManifestError(f"{self._where}: a list of {length} has only {len(tree)} members")
        return [self._node(tree[index], ()) if index in tree else None for index in range(length)]


def _parameters(tree: _Tree) -> set[str]:
    """Returns the keys of parameters in the state of an optimizer that are numbers in its groups.

    Flattening makes all keys texts; an optimizer finds its state by number.
    """
    found = set()
    groups = tree.get("param_groups")
    for group in groups.values() if type(groups) is dict else ():
        params = group.get("params") if type(group) is dict else None
        if type(params) is _Leaf and type(params.node) is list:
            found |= {str(number) for number in params.node if type(number) is int}
    return found
