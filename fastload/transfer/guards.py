"""What has to stand before data, checked as they are read: see `Manifest.guards`."""

from __future__ import annotations

from bisect import bisect_right

from fastload.formats.manifest import Manifest
from fastload.geometry.extents import Span

__all__ = ["Guards"]


class Guards:
    """Knows the guards of a checkpoint; may be used by several threads.

    Args:
        manifest: With guards or without.
        in_parts: Whether data may be wanted without their first byte.

    Attributes:
        is_broken: Whether something else was found before data; set by who reads.
    """

    def __init__(self, manifest: Manifest, *, in_parts: bool) -> None:
        self.is_broken = False
        self._guards = manifest.guards
        guarded = {(guard.file, guard.offset) for guard in manifest.guards}
        # Views of one storage may begin anywhere within it.
        self._inner = {(each.file, each.offset) for each in manifest.extents} - guarded
        self._heads = manifest.heads
        self._in_parts = in_parts
        self._seen = set[int]()

    def before(self, span: Span) -> tuple[int, bytes] | None:
        """Returns what is to be read for a span besides: from which byte, and what has to be there.

        That is right before the span if it begins where data do. If it begins within data, where a tensor
        does or where parts are wanted, it is somewhere before, and only the first time.
        """
        at = bisect_right(self._guards, (span.file, span.offset, len(self._heads))) - 1
        if at < 0 or self._guards[at].file != span.file:
            return None
        guard = self._guards[at]
        if guard.offset != span.offset:
            may_be_first = self._in_parts or (span.file, span.offset) in self._inner
            if not may_be_first or at in self._seen:
                return None
        self._seen.add(at)
        head = self._heads[guard.head]
        return guard.offset - len(head), head
