"""What ``names=`` selects of a checkpoint."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence

from fastload.formats.manifest import Manifest
from fastload.formats.state import OWN_PREFIX, SavedTensor, leaves

__all__ = ["Selection", "catalogue"]

_GLOB = re.compile(r"[*?\[]")


def catalogue(manifest: Manifest) -> dict[str, SavedTensor]:
    """Returns what was saved by all of its names: those of tied tensors, too, each name once."""
    catalogue = {entry.name: SavedTensor(entry.name, entry.name) for entry in manifest.tensors}
    if manifest.structure is not None:
        seen: set[str] = set()
        for saved in (saved for saved in leaves(manifest.structure) if not saved.is_text):
            if saved.stored not in seen:  # the first one it is stored for: it may be stored as name~2
                catalogue[saved.stored] = saved
            seen.add(saved.stored)
            catalogue.setdefault(saved.name, saved)
    return catalogue


def _pattern(glob: str, has_own: bool) -> re.Pattern[str]:
    """Compiles a pattern; it matches names of the ranks' own tensors only if it begins like these."""
    leaves_out_own = has_own and not glob.startswith(OWN_PREFIX)
    return re.compile((f"(?!{OWN_PREFIX})" if leaves_out_own else "") + fnmatch.translate(glob))


class Selection:
    """What ``names=`` selects; see `fastload.load`."""

    def __init__(
        self, names: Sequence[str] | str, catalogue: Mapping[str, SavedTensor], has_own: bool
    ) -> None:
        wanted = [names] if isinstance(names, str) else list(names)
        known = catalogue.keys()
        # What looks like a pattern is a name first.
        self._exact = {name for name in wanted if name in known or not _GLOB.search(name)}
        self._patterns = {name: _pattern(name, has_own).match for name in wanted if name not in self._exact}
        self.chosen = {name: saved for name, saved in catalogue.items() if self(name)}
        self.absent = [
            name
            for name in dict.fromkeys(wanted)
            if not (name in known or (name in self._patterns and any(map(self._patterns[name], known))))
        ]

    def __call__(self, name: str) -> bool:
        """Whether it selects a name."""
        return name in self._exact or any(fits(name) for fits in self._patterns.values())

    def has(self, saved: SavedTensor) -> bool:
        """Whether it selects a tensor, by either of its names."""
        return self(saved.own_name) or self(saved.name)
