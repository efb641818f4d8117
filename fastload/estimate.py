"""Formulas for sizes of checkpoints, parameters of models and save intervals."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastload.planning import cadence, parameters, sizing

__all__ = ["cadence", "parameters", "sizing"]


def __getattr__(name: str) -> Any:
    """Imports the formulas when they are first used."""
    if name in __all__:
        return import_module(f"fastload.planning.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
