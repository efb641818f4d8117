"""What of a state cannot be loaded, in the structure of one that fastload did not save.

It is there as ``{"refused": [text]}``: what it is, where, and why not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastload.errors import ManifestError
from fastload.formats.per_rank import NO_VALUE

__all__ = ["raise_refused", "refused_node", "without_refused"]

_TAG = "refused"
_MOST_LINES = 20
_ADVICE = "strict=False leaves these out, and loads the rest"


def refused_node(text: str) -> Any:
    """Returns the node of a value that cannot be loaded.

    Args:
        text: Says where it is, what it is, and why.
    """
    return {_TAG: [text]}


def without_refused(structure: Any, found: list[str]) -> Any:
    """Returns the structure with gaps where values cannot be loaded.

    Args:
        structure: The structure.
        found: Gets the text of each.
    """
    if type(structure) is list:
        return [without_refused(child, found) for child in structure]
    if type(structure) is not dict:
        return structure
    if structure.keys() == {_TAG}:
        found += structure[_TAG]
        return NO_VALUE
    return {tag: without_refused(payload, found) for tag, payload in structure.items()}


def raise_refused(url: str, refused: Sequence[str], advice: str = _ADVICE) -> None:
    """Raises if there is anything that cannot be loaded.

    Args:
        url: Of the checkpoint.
        refused: A line for each thing.
        advice: What to do.

    Raises:
        ManifestError: There is; it lists it.
    """
    if not refused:
        return
    lines = [f"{url}: not all of it can be loaded:", *(f"  {line}" for line in refused[:_MOST_LINES])]
    if len(refused) > _MOST_LINES:
        lines.append(f"  and {len(refused) - _MOST_LINES} more")
    lines.append(advice)
    raise ManifestError("\n".join(lines))
