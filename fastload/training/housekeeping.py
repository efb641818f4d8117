"""Deletes what newer checkpoints made superfluous and what dead saves left behind, beside the training."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fastload.base.errands import Errand
from fastload.base.threads import background
from fastload.errors import FastloadError
from fastload.training.catalog import Catalog
from fastload.training.retention import Retention

__all__ = ["Housekeeper"]

_log = logging.getLogger(__name__)


class Housekeeper:
    """Keeps one root in order, in the background. What cannot be deleted is no reason for a training to fail.

    Args:
        catalog: The checkpoints.
        retention: Which of them are kept.
        in_use: Returns where the checkpoints are that must be left alone.
    """

    def __init__(self, catalog: Catalog, retention: Retention, in_use: Callable[[], set[str]]) -> None:
        self._catalog = catalog
        self._retention = retention
        self._in_use = in_use
        self._last: Errand | None = None

    def clean(self) -> None:
        """Begins to remove what dead saves left behind."""
        self._begin(self._clean)

    def prune(self, is_committed: Callable[[], bool], step: int, *, damaged: set[int]) -> None:
        """Begins to delete old checkpoints, once a new one is there.

        Args:
            is_committed: Waits until the new one exists, or returns False if it never will.
            step: That of the new one.
            damaged: Steps of checkpoints that do not count, and that nothing is done to.
        """
        if self._retention.keep_last is not None:
            self._begin(lambda: self._prune(step, damaged) if is_committed() else None)

    def wait(self, timeout_s: float) -> None:
        """Waits until all that was begun has ended, for so long at most."""
        if self._last is not None:
            self._last.join(timeout_s)

    def _begin(self, work: Callable[[], object]) -> None:
        before = self._last

        def run() -> None:
            if before is not None:
                before.join()
            try:
                work()
            except Exception as error:  # a defect, too, costs no more than disk space
                defect = not isinstance(error, FastloadError)
                _log.warning("%s: cannot clean up: %s", self._catalog.root, error, exc_info=defect)

        self._last = background(run, "fastload-keep")
        self._last.start()

    def _clean(self) -> None:
        for path in self._catalog.clean_abandoned():
            _log.info("removed %s, which a save that died left behind", path)

    def _prune(self, step: int, damaged: set[int]) -> None:
        entries = self._catalog.entries()
        for old in self._catalog.expendable(entries, self._retention, needed={step}, damaged=damaged):
            if not self._catalog.is_at(old, self._in_use()):
                self._catalog.remove(old)
                _log.info("removed %s", self._catalog.path(old))
