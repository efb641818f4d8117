"""Extensions: modules of ``fastload.ext``, and entry points of the groups ``fastload.KIND``.

Packages may bring commands, formats, layers and storages of any name. Of the other kinds the core asks for
names that it knows, such as the observer ``trace``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fastload.errors import OptionError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_PREFIX = "fastload."


@dataclass(frozen=True)
class Extension:
    """What an entry point stands for, imported when it is needed.

    Attributes:
        kind: The group of entry points, without ``fastload.``.
        point: The entry point.
        rival: Another one of this name, which stands for something else; None without one.
    """

    kind: str
    point: EntryPoint
    rival: EntryPoint | None = None

    def __str__(self) -> str:
        package = self.point.dist.name if self.point.dist is not None else "some package"
        return f"{self.point.name!r} of {package} (entry point fastload.{self.kind} = {self.point.value!r})"

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


def extension(kind: str, name: str, what: str) -> Any:
    """Imports an extension.

    Args:
        kind: As for `extensions`.
        name: Its name.
        what: The work that needs it, for messages.

    Raises:
        OptionError: It is not installed, or cannot be imported.
    """
    found = extensions(kind).get(name)
    if found is None:
        raise OptionError(f"{what} needs the extension {name!r}, {not_installed(kind)}")
    return found.load()


def not_installed(kind: str) -> str:
    """Returns what to do about a missing extension of a kind, for messages."""
    return (
        "which is not installed: install the package that has it among its entry points of "
        f"fastload.{kind} (if it is one of fastload's own, fastload-torch again, whose metadata lack it)"
    )


def extensions(kind: str) -> Mapping[str, Extension]:
    """Returns the extensions of a kind, by name, without importing any."""
    return all_extensions().get(kind, {})


@cache
def all_extensions() -> Mapping[str, Mapping[str, Extension]]:
    """Returns the extensions of all kinds, by kind and name: a search reads the metadata of every package."""
    from importlib.metadata import entry_points  # most programs ask for none

    points = entry_points()
    kinds = {group: group.removeprefix(_PREFIX) for group in points.groups if group.startswith(_PREFIX)}
    return {kind: _by_name(kind, points.select(group=group)) for group, kind in kinds.items()}


def _by_name(kind: str, points: Iterable[EntryPoint]) -> Mapping[str, Extension]:
    found: dict[str, Extension] = {}
    for point in points:
        known = found.setdefault(point.name, Extension(kind, point))
        if known.point.value != point.value:
            found[point.name] = replace(known, rival=point)
    return found
