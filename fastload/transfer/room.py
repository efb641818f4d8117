"""How long chunks are, how many readers have one in a round, and how many rounds fit into staging. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastload.base.memory import PAGE_BYTES, round_up
from fastload.errors import OptionError
from fastload.transfer.windows import num_turns_for

__all__ = ["Room", "Sizes", "choose_sizes", "slot_bytes"]

_MAX_CHUNK_BYTES = 8 << 20
_MIN_CHUNK_BYTES = 1 << 20  # below, the cost of a message shows
_LEAST_CHUNK_BYTES = 256 << 10  # rather readers without a chunk than less than this
_GOOD_NUM_READERS = 64  # in a round, if they take turns
_LEAST_NUM_READERS = 8
_GOOD_NUM_ROUNDS = 128  # what a pipeline of rounds cannot overlap is about one round
_GOOD_NUM_READS = 16  # with nothing to exchange: enough to keep several threads busy to the end
_MAX_DEPTH = 4
_MAX_NUM_OWN = 16  # chunks that a reader reads ahead of its turn, in 1/8 of staging at most
_OWN_PART = 8
# What all readers together read ahead of the rounds, if they take turns: as much as storage delivers while
# a request is under way (80 ms at 50 GB/s), but little of the load, which begins with it.
_MAX_AHEAD_BYTES = 4 << 30
_AHEAD_PART = 64
_LEAST_ROUND_BYTES = 16 << 20


@dataclass(frozen=True)
class Sizes:
    """The measures of a plan.

    Attributes:
        chunk_bytes: Length of a chunk.
        num_turns: Windows that the readers take turns in.
        depth: Rounds in flight.
        ahead: Rounds, from the first in flight, that readers read the chunks of; 0 if each chunk is read
            once its round is in flight.
    """

    chunk_bytes: int
    num_turns: int
    depth: int
    ahead: int


@dataclass(frozen=True)
class Room:
    """How much room a round takes.

    Attributes:
        num_slots: Chunks that it has: those of a window of readers, or one if nothing is exchanged.
        exchanges: Whether chunks go on to others.
        longest_block_bytes: Length of the longest checksum block; 0 without any.
        apart: Whether each slot has to have room for a block more, since they have to be equally long, or
            since chunks of a round do not follow each other.
        num_sharing: Ranks that have one buffer together.
    """

    num_slots: int
    exchanges: bool
    longest_block_bytes: int
    apart: bool
    num_sharing: int = 1

    def nbytes(self, chunk_bytes: int) -> int:
        """Returns the most that the slots of a round take together."""
        return self.num_slots * self.each_bytes(chunk_bytes) + self.once_bytes

    def part_bytes(self, chunk_bytes: int) -> int:
        """Returns what one rank gives of a buffer."""
        return -(-self.nbytes(chunk_bytes) // self.num_sharing)

    def own_bytes(self, chunk_bytes: int) -> int:
        """Returns the most that one chunk takes."""
        return slot_bytes(chunk_bytes + self.longest_block_bytes)

    def each_bytes(self, chunk_bytes: int) -> int:
        """Returns what to reckon for each slot."""
        if self.apart or not self.longest_block_bytes:
            return self.own_bytes(chunk_bytes)
        return slot_bytes(chunk_bytes + PAGE_BYTES)  # lengths that differ are rounded up one by one

    @property
    def once_bytes(self) -> int:
        """What moved bounds add to one chunk they take from the one before it: a block more in all."""
        return 0 if self.apart else round_up(self.longest_block_bytes, PAGE_BYTES)


def slot_bytes(chunk_bytes: int) -> int:
    """Returns how much of a buffer a chunk takes: whole pages."""
    return round_up(chunk_bytes, PAGE_BYTES)


def choose_sizes(
    total_bytes: int,
    num_readers: int,
    num_hosts: int,
    room: Room,
    staging_bytes: int,
    chunk_bytes: int | None,
) -> Sizes:
    """Chooses the measures of a plan.

    Each round has a chunk of every reader, if that leaves chunks of useful size. Else they take turns.

    Args:
        total_bytes: Bytes to be read.
        num_readers: Who reads them.
        num_hosts: On how many hosts they are.
        room: Of a round with all readers.
        staging_bytes: Most bytes for all buffers of one rank, and what it reads ahead, together.
        chunk_bytes: Unit of reading and of exchange; None chooses it.

    Raises:
        OptionError: Not even one chunk fits.
    """
    share_bytes = -(-total_bytes // num_readers)
    # What a round may have.
    spare = staging_bytes * room.num_sharing // _MAX_DEPTH - room.once_bytes
    together = chunk_bytes or _good_chunk_bytes(share_bytes, room, spare)
    together = _whole_blocks(max(1, min(together, share_bytes)), room)
    depth = min(_MAX_DEPTH, staging_bytes // room.part_bytes(together))
    useful = _whole_blocks(max(1, min(share_bytes, _least_useful(spare))), room)
    if room.num_slots == 1 or (chunk_bytes and depth > 1) or (depth == _MAX_DEPTH and together >= useful):
        _require_fit(depth, together, room, staging_bytes)
        return Sizes(together, 1, depth, 0)
    return _in_turns(total_bytes, num_readers, num_hosts, room, staging_bytes, chunk_bytes)


def _in_turns(
    total_bytes: int,
    num_readers: int,
    num_hosts: int,
    room: Room,
    staging_bytes: int,
    chunk_bytes: int | None,
) -> Sizes:
    """Chooses the measures where readers take turns."""
    own_bytes = staging_bytes // _OWN_PART
    spare = (staging_bytes - own_bytes) * room.num_sharing // _MAX_DEPTH - room.once_bytes
    spare = min(spare, max(total_bytes // _AHEAD_PART, _LEAST_ROUND_BYTES))
    share_bytes = -(-total_bytes // num_readers)
    if chunk_bytes is None:
        good_bytes = _whole_blocks(_good_turn_bytes(share_bytes, spare), room)
        num_turns = min(num_readers, num_turns_for(num_hosts, num_readers * good_bytes / spare, 2))
        chunk_bytes = _even_chunk_bytes(share_bytes, min(good_bytes, spare // -(-num_readers // num_turns)))
    chunk_bytes = _whole_blocks(max(1, min(chunk_bytes, max(share_bytes, _LEAST_CHUNK_BYTES))), room)
    fitting = max(1, spare // room.each_bytes(chunk_bytes))
    at_least = -(-num_readers // fitting)
    num_turns = min(num_readers, num_turns_for(num_hosts, at_least, at_least))
    room = replace(room, num_slots=-(-num_readers // num_turns))
    round_bytes = chunk_bytes * room.num_slots
    most_own = min(max(1, own_bytes // room.own_bytes(chunk_bytes)), _MAX_NUM_OWN)
    ahead = min(total_bytes // _AHEAD_PART, _MAX_AHEAD_BYTES) // round_bytes
    ahead = min(max(ahead, _MAX_DEPTH), most_own * num_turns)
    own_bytes = -(-ahead // num_turns) * room.own_bytes(chunk_bytes)
    depth = min(_MAX_DEPTH, (staging_bytes - own_bytes) // room.part_bytes(chunk_bytes))
    _require_fit(depth, chunk_bytes, room, staging_bytes)
    return Sizes(chunk_bytes, num_turns, min(depth, ahead), ahead)


def _whole_blocks(chunk_bytes: int, room: Room) -> int:
    """Makes it whole blocks, else the readers at some places would always get the larger part."""
    longest = room.longest_block_bytes
    return max(1, chunk_bytes // longest) * longest if longest else chunk_bytes


def _good_chunk_bytes(share_bytes: int, room: Room, spare: int) -> int:
    """Chooses chunks short enough for many rounds, long enough for storage, and within staging."""
    num_rounds = _GOOD_NUM_ROUNDS if room.exchanges else _GOOD_NUM_READS
    for_overlap = round_up(-(-share_bytes // num_rounds), PAGE_BYTES)
    besides = room.nbytes(PAGE_BYTES) - room.once_bytes - room.num_slots * PAGE_BYTES
    for_staging = (spare - besides) // room.num_slots // PAGE_BYTES * PAGE_BYTES
    return max(PAGE_BYTES, min(max(for_overlap, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES, for_staging))


def _least_useful(spare: int) -> int:
    """Returns below which length chunks are too short, given what a round may have."""
    return min(max(spare // _LEAST_NUM_READERS // PAGE_BYTES * PAGE_BYTES, PAGE_BYTES), _MIN_CHUNK_BYTES)


def _good_turn_bytes(share_bytes: int, spare: int) -> int:
    """Chooses about how long chunks are to be, so that there are many in a round."""
    for_many = spare // _GOOD_NUM_READERS // PAGE_BYTES * PAGE_BYTES
    for_overlap = round_up(-(-share_bytes // _GOOD_NUM_ROUNDS), PAGE_BYTES)
    return max(_least_useful(spare), min(for_overlap, for_many, _MAX_CHUNK_BYTES))


def _even_chunk_bytes(share_bytes: int, at_most: int) -> int:
    """Chooses chunks up to a length of which all readers have as many, but no tiny ones."""
    at_most = max(PAGE_BYTES, at_most // PAGE_BYTES * PAGE_BYTES)
    if share_bytes <= at_most:
        return max(share_bytes, min(_LEAST_CHUNK_BYTES, at_most))
    return round_up(-(-share_bytes // -(-share_bytes // at_most)), PAGE_BYTES)


def _require_fit(depth: int, chunk_bytes: int, room: Room, staging_bytes: int) -> None:
    if depth < 1:
        longest = room.longest_block_bytes
        why = f" (checksum blocks have {longest}: verify=False reads without)" if longest else ""
        raise OptionError(
            f"chunk_bytes={chunk_bytes}: what one round takes does not fit into "
            f"staging_bytes={staging_bytes}{why}"
        )
