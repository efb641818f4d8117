"""Metrics and spans of loads, saves, restores and stages, by OpenTelemetry's API."""

from __future__ import annotations

import logging
import threading

from fastload.base.tracebacks import short_tracebacks
from fastload.comm.observers import register_listener, register_observer
from fastload.errors import OptionError
from fastload.options import parse_bool

_log = logging.getLogger(__name__)

_switching = threading.Lock()
_is_on = False


@short_tracebacks
def enable(*, each_rank: bool = False) -> None:
    """Publishes metrics and spans from now on, through OpenTelemetry's global providers.

    The program makes the providers, before or after; without any, nothing is published. A second call changes
    nothing. ``FASTLOAD_METRICS=1`` does the same without a line of code, and ``FASTLOAD_METRICS=ranks`` with
    `each_rank`.

    Args:
        each_rank: Whether each rank publishes its own part, with its rank as the attribute ``fastload.rank``.
            Else rank 0 publishes those of all ranks, once.

    Raises:
        OptionError: ``opentelemetry-api`` is not installed.
    """
    global _is_on
    with _switching:
        if _is_on:
            return
        try:
            from fastload.ext.metrics.instruments import Meter
            from fastload.ext.metrics.spans import SpanObserver
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("opentelemetry"):
                raise
            raise OptionError(
                "metrics need opentelemetry-api: pip install 'fastload-torch[metrics]'"
            ) from None
        register_listener(Meter(each_rank=each_rank).record)
        register_observer(lambda world: SpanObserver(world.rank) if each_rank or world.rank == 0 else None)
        _is_on = True


def switch_on(text: str) -> None:
    """Enables them as ``FASTLOAD_METRICS`` says; only warns if OpenTelemetry is not installed.

    Raises:
        OptionError: The text is invalid.
    """
    try:
        is_wanted = text == "ranks" or parse_bool(text)
    except ValueError as error:
        raise OptionError(f"FASTLOAD_METRICS={text!r}: must be 1, ranks or 0 ({error})") from None
    if is_wanted:
        try:
            enable(each_rank=text == "ranks")
        except OptionError as error:
            _log.warning("FASTLOAD_METRICS=%s: %s", text, error)
