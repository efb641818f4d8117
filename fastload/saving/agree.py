"""What the ranks agree on before they write: that they save the same, and who they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastload.errors import PlanMismatch
from fastload.ranks.world import require_same
from fastload.saving.call import Call
from fastload.saving.describe import Described
from fastload.saving.differences import require_alike
from fastload.saving.holdings import Holdings
from fastload.saving.parts import merge_parts
from fastload.saving.replicas import compare_replicas
from fastload.saving.writers import WriterTuner, tuner

__all__ = ["Agreed", "agree", "foresee", "has_to_meet"]


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of each other.

    Attributes:
        hosts: Host of each rank.
        num_writers: How many ranks are to write, where the options leave it open.
        metadata: Text to keep with the checkpoint.
        holdings: Which ranks hold which bytes; None if each holds all.
    """

    hosts: Sequence[str]
    num_writers: int
    metadata: Mapping[str, str]
    holdings: Holdings | None


def has_to_meet(call: Call, described: Described) -> bool:
    """Whether the ranks have to agree before they know who writes what.

    That follows from state and options alone, unless it matters which hosts the ranks are on, their tensors
    are to be compared, or placements do not tell what each of them holds. An error that only some ranks
    have seen is to be raised by all, too.
    """
    options = call.options
    by_options = options.writers == "host" or options.shared is False
    by_options |= options.check_replicas in ("sample", "full")
    is_told = described.held is None or described.held.foreseen is not None
    return by_options or not is_told or call.raise_earlier is not None


def foresee(call: Call, described: Described) -> Agreed:
    """Returns what the ranks will agree on, as far as who writes what follows from it.

    With `writers="auto"` all ranks write: the more there are, the less each of them has to copy.
    """
    size, held, layout = call.world.size, described.held, described.layout
    writers = WriterTuner.most(size, layout.nbytes, is_sharded=held is not None)
    return Agreed([call.world.host] * size, writers, call.metadata, _foreseen(described))


def _foreseen(described: Described) -> Holdings | None:
    held = described.held
    if held is None or held.foreseen is None:
        return None
    return Holdings(described.layout, held.foreseen)


def agree(
    call: Call, describe: Callable[[], Described], *, went_on: bool = False
) -> tuple[Described, Agreed]:
    """Compares what the ranks are about to save, and learns on which hosts they are.

    Args:
        call: This rank's call.
        describe: Says what this rank is about to save.
        went_on: Whether this rank has copied what it contributes by what it has foreseen.

    Returns:
        What the ranks save together, and what they know of each other.

    Raises:
        FastloadError: Some rank cannot save, or what the ranks save does not go together.
    """
    world, how = call.world, call.options.check_replicas
    made: list[tuple[Described, Holdings | None]] = []

    def introduce() -> dict[str, Any]:
        if call.raise_earlier is not None:
            call.raise_earlier()
        described = describe()
        holdings = _foreseen(described)
        made.append((described, holdings))
        return {
            "host": world.host,
            # Rank 0 says how many are to write: its saves may have ended sooner than those of others.
            "writers": _good_writers(call, described),
            "same": {"call": "save", "path": call.location.given, **call.options.shared_values()},
            "content": described.content.digests(),
            "metadata": call.metadata if world.rank == 0 else {},
            "is_sharded": described.held is not None,
            "holdings": holdings.digest if holdings is not None else "",
            "went_on": went_on,
        }

    ranks = world.agree(call.what, introduce)
    [(described, holdings)] = made
    require_same([each["same"] for each in ranks])
    what = f"{call.what}: comparing replicas"
    if not any(each["is_sharded"] for each in ranks) or _is_foreseen(ranks):
        require_alike(world, what, described.content, [each["content"] for each in ranks])
        writers = ranks[0]["writers"]
    else:
        if by_themselves := [rank for rank, each in enumerate(ranks) if each["went_on"]]:
            raise PlanMismatch(
                f"the ranks hold different parts of the state, which rank {by_themselves[0]} could not "
                "foresee: with SaveOptions(parts=True) they meet before they copy it"
            )
        described, holdings = merge_parts(call, described)
        writers = WriterTuner.most(world.size, described.layout.nbytes, is_sharded=True)
    if how in ("sample", "full") and holdings is None:
        compare_replicas(world, described.layout, described.source, how=how, what=what)
    hosts = [each["host"] for each in ranks]
    return described, Agreed(hosts, writers, ranks[0]["metadata"], holdings)


def _is_foreseen(ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all ranks have the same state, and have foreseen alike who holds what of it."""
    first = ranks[0]["holdings"]
    has_one_form = all(each["content"][0] == ranks[0]["content"][0] for each in ranks)
    return has_one_form and bool(first) and all(each["holdings"] == first for each in ranks)


def _good_writers(call: Call, described: Described) -> int:
    size, nbytes, is_sharded = call.world.size, described.layout.nbytes, described.held is not None
    if call.in_background:
        return WriterTuner.most(size, nbytes, is_sharded=is_sharded)
    return tuner.choose(call.folder, size, nbytes, is_sharded=is_sharded)
