"""Extensions: what ``fastload.ext`` names, and entry points of the groups ``fastload.KIND``.

Packages may bring commands, formats, layers, sources and storages of any name. Of the other kinds the core
asks for names that it knows, such as the observer ``trace``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from fastload.errors import OptionError

_PACKAGE = "fastload"
_PREFIX = f"{_PACKAGE}."


@dataclass(frozen=True)
class Extension:
    """What an entry point stands for, imported when it is needed.

    Attributes:
        kind: The group of entry points, without ``fastload.``.
        point: The entry point; of one of fastload's own it has no package.
        rival: Another one of this name, which stands for something else; None without one.
    """

    kind: str
    point: EntryPoint
    rival: EntryPoint | None = None

    def __str__(self) -> str:
        name, value, package = self.point.name, self.point.value, self.point.dist
        if package is None:
            return f"{name!r} of {_PACKAGE} ({value})"
        return f"{name!r} of {package.name} (entry point {_PREFIX}{self.kind} = {value!r})"

    def load(self) -> Any:
        """Imports it.

        Raises:
            OptionError: It cannot be imported, or two packages have one of this name.
        """
        if self.rival is not None:
            raise OptionError(f"{self} and {Extension(self.kind, self.rival)} have one name: uninstall one")
        try:
            return self.point.load()
        except (Exception, SystemExit) as error:
            raise OptionError(f"{self} cannot be imported: {error}") from error


def extension_module(name: str) -> ModuleType:
    """Imports a module of ``fastload.ext``, for a public name that leads there.

    Args:
        name: Its name below ``fastload.ext``.

    Raises:
        OptionError: This installation lacks it.
    """
    path = f"fastload.ext.{name}"
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise  # it lacks something else
        raise OptionError(f"this needs {path}, which this installation of fastload lacks") from None


def extension(kind: str, name: str, user: str) -> Any:
    """Imports an extension.

    Args:
        kind: As for `extensions`.
        name: Its name.
        user: The work that needs it, for messages.

    Raises:
        OptionError: It is not installed, or cannot be imported.
    """
    known = find(kind, name)
    if known is None:
        raise OptionError(f"{user} needs the extension {name!r}, {not_installed(kind, name)}")
    return known.load()


def not_installed(kind: str, name: str) -> str:
    """Returns what to do about a missing extension, for messages."""
    if name in extensions_of_fastload(kind):
        return "which this installation of fastload lacks"
    return (
        f"which is not installed: install the package that has it among its entry points of {_PREFIX}{kind}"
    )


def find(kind: str, name: str) -> Extension | None:
    """Returns an extension without importing it: of fastload's own if possible, without a search."""
    return _own(kind, name) or installed_extensions().get(kind, {}).get(name)


def extensions(kind: str) -> Mapping[str, Extension]:
    """Returns the extensions of a kind, by name, without importing any; first those of fastload."""
    builtin = {
        name: known for name in extensions_of_fastload(kind) if (known := _own(kind, name)) is not None
    }
    return {**builtin, **installed_extensions().get(kind, {}), **builtin}  # first, and in place of others


def extensions_of_fastload(kind: str) -> Mapping[str, str]:
    """Returns the extensions of a kind that fastload itself has: name → where it is."""
    named: Mapping[str, str] = import_module("fastload.ext").EXTENSIONS.get(kind, {})
    return named


def _own(kind: str, name: str) -> Extension | None:
    """Returns one of fastload's own, unless its module was deleted."""
    value = extensions_of_fastload(kind).get(name, "")
    try:
        is_there = bool(value) and find_spec(value.partition(":")[0]) is not None
    except ModuleNotFoundError:  # nor the package that it was in
        is_there = False
    return Extension(kind, EntryPoint(name, value, _PREFIX + kind)) if is_there else None


@cache
def installed_extensions() -> Mapping[str, Mapping[str, Extension]]:
    """Returns those of other packages, by kind and name: a search reads the metadata of every package."""
    points = entry_points()
    kinds = {group: group.removeprefix(_PREFIX) for group in points.groups if group.startswith(_PREFIX)}
    return {kind: _by_name(kind, points.select(group=group)) for group, kind in kinds.items()}


def _by_name(kind: str, points: Iterable[EntryPoint]) -> Mapping[str, Extension]:
    by_name: dict[str, Extension] = {}
    for point in points:
        first = by_name.setdefault(point.name, Extension(kind, point))
        if first.point.value != point.value:
            by_name[point.name] = replace(first, rival=point)
    return by_name
