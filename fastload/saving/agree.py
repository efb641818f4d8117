"""What the ranks agree on before they write: that they save the same, and who they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastload.ranks.world import require_same
from fastload.saving.call import Call
from fastload.saving.describe import Described
from fastload.saving.differences import require_alike
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
    """

    hosts: Sequence[str]
    num_writers: int
    metadata: Mapping[str, str]


def has_to_meet(call: Call) -> bool:
    """Whether the ranks have to agree before they know who writes what.

    That follows from state and options alone, unless it matters which hosts the ranks are on, or their
    tensors are to be compared. An error that only some ranks have seen is to be raised by all, too.
    """
    options = call.options
    by_options = options.writers == "host" or options.shared is False
    by_options |= options.check_replicas in ("sample", "full")
    return by_options or call.raise_earlier is not None


def foresee(call: Call, described: Described) -> Agreed:
    """Returns what the ranks will agree on, as far as who writes what follows from it.

    With `writers="auto"` all ranks write: the more there are, the less each of them has to copy.
    """
    size = call.world.size
    return Agreed([call.world.host] * size, WriterTuner.most(size, described.layout.nbytes), call.metadata)


def agree(call: Call, describe: Callable[[], Described]) -> tuple[Described, Agreed]:
    """Compares what the ranks are about to save, and learns on which hosts they are.

    Args:
        call: This rank's call.
        describe: Says what this rank is about to save.

    Raises:
        FastloadError: Some rank cannot save, or the ranks do not save the same.
    """
    world, how = call.world, call.options.check_replicas
    made: list[Described] = []

    def introduce() -> dict[str, Any]:
        if call.raise_earlier is not None:
            call.raise_earlier()
        made.append(described := describe())
        return {
            "host": world.host,
            # Rank 0 says how many are to write: its saves may have ended sooner than those of others.
            "writers": _good_writers(call, described.layout.nbytes),
            "same": {"call": "save", "path": call.location.given, **call.options.shared_values()},
            "content": described.content.digests(),
            "metadata": call.metadata if world.rank == 0 else {},
        }

    ranks = world.agree(call.what, introduce)
    [described] = made
    require_same([each["same"] for each in ranks])
    what = f"{call.what}: comparing replicas"
    require_alike(world, what, described.content, [each["content"] for each in ranks])
    if how in ("sample", "full"):
        compare_replicas(world, described.layout, described.source, how=how, what=what)
    return described, Agreed([each["host"] for each in ranks], ranks[0]["writers"], ranks[0]["metadata"])


def _good_writers(call: Call, nbytes: int) -> int:
    if call.in_background:
        return WriterTuner.most(call.world.size, nbytes)
    return tuner.choose(call.folder, call.world.size, nbytes)
