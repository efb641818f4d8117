"""The error of a checkpoint that does not fit ``into=``: all of what does not, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from fastload.errors import MismatchError

__all__ = ["FOUND_LATE", "raise_unfit"]

FOUND_LATE = "found after its tensors were loaded: into= is undefined"
_HOW_TO_FILL = (
    "make such buffers before the load: model.to_empty(device=...), then the model's own initialization "
    '(transformers: model.init_weights()); see "DDP, FSDP and tensor parallelism" in README.md'
)


def raise_unfit(
    url: str,
    *,
    missing: Sequence[str] = (),
    absent: Sequence[str] = (),
    unexpected: Sequence[str] = (),
    mismatched: Sequence[str] = (),
    unfilled: Sequence[str] = (),
    advice: str = "",
    is_late: bool = False,
) -> None:
    """Raises if there is anything that does not fit.

    Args:
        url: Of the checkpoint.
        missing: Names that it lacks.
        absent: Places in ``into=`` that it has nothing for.
        unexpected: Names that ``into=`` lacks.
        mismatched: A line for each of those that are different on the two sides.
        unfilled: Names of buffers on the meta device that it cannot fill.
        advice: What to do if only names do not fit.
        is_late: Whether data have moved already.

    Raises:
        MismatchError: There is.
    """
    if not (missing or absent or unexpected or mismatched or unfilled):
        return
    lines = [f"the checkpoint at {url} does not fit:"]
    lines += [f"  missing in the checkpoint: {name}" for name in missing]
    lines += [f"  {place} is missing in the checkpoint" for place in absent]
    lines += [f"  unexpected in the checkpoint: {name}" for name in unexpected]
    lines += [f"  {line}" for line in mismatched]
    lines += [f"  {name} is on the meta device, and no checkpoint holds it" for name in unfilled]
    if advice and not mismatched and (missing or absent or unexpected):
        lines.append(advice)
    if unfilled:
        lines.append(_HOW_TO_FILL)
    if is_late:
        lines.append(FOUND_LATE)
    raise MismatchError(
        "\n".join(lines), (*missing, *absent, *unfilled), tuple(unexpected), tuple(mismatched)
    )
