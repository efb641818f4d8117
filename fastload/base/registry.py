"""Extensions of fastload by other packages: entry points of the groups ``fastload.KIND``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fastload.errors import OptionError


@dataclass(frozen=True)
class Extension:
    """An object of another package, which is imported when it is needed.

    Attributes:
        kind: The group of entry points, without ``fastload.``.
        point: The entry point.
    """

    kind: str
    point: EntryPoint

    def __str__(self) -> str:
        package = self.point.dist.name if self.point.dist is not None else "some package"
        return f"{self.point.name!r} of {package} (entry point fastload.{self.kind} = {self.point.value!r})"

    def load(self) -> Any:
        """Imports it.

        Raises:
            OptionError: It cannot be imported.
        """
        try:
            return self.point.load()
        except (Exception, SystemExit) as error:
            raise OptionError(f"{self} cannot be imported: {error}") from error


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
        raise OptionError(
            f"{what} needs the extension {name!r}, which is not installed: install the package that has it "
            f"among its entry points of fastload.{kind}"
        )
    return found.load()


@cache
def extensions(kind: str) -> Mapping[str, Extension]:
    """Returns the extensions of a kind, by name, without importing any."""
    return {point.name: Extension(kind, point) for point in entry_points(group=f"fastload.{kind}")}
