"""Short tracebacks of expected errors: the frames of the caller, then one of fastload."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import wraps
from traceback import walk_tb
from types import FunctionType
from typing import Any, TypeVar, cast

from fastload.errors import FastloadError, StorageError

T = TypeVar("T", bound=Callable[..., Any])

_log = logging.getLogger(__name__)
_PACKAGE = __name__.partition(".")[0]
_SPECIAL = ("__init__", "__next__", "__exit__")


def short_tracebacks(public: T) -> T:
    """Decorates a public function, or a class with public methods: their errors leave out fastload's frames.

    The log has these at level DEBUG. An error stays as it is if code outside of fastload raised it, or if it
    comes from one that is neither fastload's nor one of storage: a defect, or an error in code of the caller.
    """
    if isinstance(public, type):
        for name, method in list(vars(public).items()):
            if isinstance(method, FunctionType) and (name in _SPECIAL or not name.startswith("_")):
                setattr(public, name, short_tracebacks(method))
        return public

    @wraps(public)
    def call(*args: Any, **kwargs: Any) -> Any:
        handled = sys.exc_info()[1]  # by the caller, whose call may be in an `except` block
        try:
            return public(*args, **kwargs)
        except FastloadError as raised:
            if not _is_expected(raised, handled):
                raise
            _shorten(raised, handled)
            error = raised
        finally:
            del args, kwargs, handled  # else error → traceback → frame → error would keep their memory alive
        try:
            raise error  # all frames are in the log of fastload at level DEBUG
        finally:
            del error  # likewise

    return cast(T, call)


def _is_expected(error: FastloadError, handled: BaseException | None) -> bool:
    """Whether fastload raised an error itself, and all that it comes from is in its message."""
    if _raised_in(error).partition(".")[0] != _PACKAGE:
        return False
    for of, cause in _links(error, handled):
        if not isinstance(cause, FastloadError):
            return isinstance(of, StorageError) and _is_of_storage(cause)
    return True


def _raised_in(error: BaseException) -> str:
    """Returns the name of the module that raised an error."""
    *_, (deepest, _) = walk_tb(error.__traceback__)
    return str(deepest.f_globals.get("__name__"))


def _is_of_storage(error: BaseException) -> bool:
    """Whether the operating system or a library raised an error, not Python."""
    return isinstance(error, OSError) or type(error).__module__ != "builtins"


def _shorten(error: FastloadError, handled: BaseException | None) -> None:
    """Removes the frames, and all causes but the first one with an ``errno``, for callers that test it."""
    if _raised_in(error) != __name__:  # else another public function has called this one
        _log.debug("all frames of an error:", exc_info=error)
    causes = (cause for _, cause in _links(error, handled) if isinstance(cause, OSError) and cause.errno)
    if (first := next(causes, None)) is not None:
        first.__cause__ = first.__traceback__ = None
    error.__cause__, error.__suppress_context__ = first, first is not None
    error.__context__ = error.__traceback__ = None  # Python sets both where it is raised


def _links(error: BaseException, handled: BaseException | None) -> list[tuple[BaseException, BaseException]]:
    """Returns each error of a chain with the one it comes from, up to the one that the caller handles."""
    links: list[tuple[BaseException, BaseException]] = []
    while True:
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if cause is None or cause is handled or any(cause is known for known, _ in links):
            return links
        links.append((error, cause))
        error = cause
