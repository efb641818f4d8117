"""Reads pickles, and obeys none: what a pickle would import, call and make is only described.

The opcodes are interpreted here, in Python. Nothing is imported, called, hashed or compared, so there is
nothing that a pickle could reach; whoever reads the result decides which names it knows, and what they
stand for. Data are never larger than the text they come from, a pickle costs a step for each opcode, and it
may not be made of containers alone: that bounds memory by some twenty times its bytes.

What comes out is plain values, lists and tuples (shared, nested deeply, or holding themselves, as the pickle
has it: walk them with a limit), and the classes of `fastload.formats.pickled`.
"""

from __future__ import annotations

import struct
from typing import Any

from fastload.base.memory import uncollected
from fastload.errors import ManifestError
from fastload.formats.pickle_machine import Ended, Machine

__all__ = ["Truncated", "unpickle", "unpickle_first"]

_MAX_BYTES = 1 << 30


class Truncated(ManifestError):
    """The pickle goes on where the data end."""


def unpickle(data: bytes, where: str) -> Any:
    """Reads a pickle.

    Args:
        data: The pickle; what follows it is not looked at.
        where: What it is, for messages.

    Raises:
        ManifestError: It is malformed, or there are more containers than content.
    """
    return unpickle_first(data, where)[0]


@uncollected
def unpickle_first(data: bytes, where: str, start: int = 0) -> tuple[Any, int]:
    """Reads the pickle that begins at `start`; returns what it holds, and where it ends.

    Raises:
        Truncated: It is not all there.
        ManifestError: It is malformed.
    """
    if len(data) - start > _MAX_BYTES:
        raise ManifestError(
            f"{where}: a pickle of {len(data) - start} bytes is over the limit of {_MAX_BYTES}"
        )
    machine = Machine(data, start)

    def where_it_is() -> str:
        return f"at byte {machine.at - start}"

    try:
        return machine.run(), machine.at
    except (Ended, struct.error):
        raise Truncated(f"{where}: the pickle is cut off {where_it_is()}") from None
    except IndexError:
        if machine.at >= len(data):  # else nothing was left on the stack
            raise Truncated(f"{where}: the pickle is cut off {where_it_is()}") from None
        why = "there is too little on the stack"
    except KeyError as error:
        why = f"{error.args[0]!r} is no opcode that is known, or nothing memorized"
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = str(error)[:400]
    raise ManifestError(f"{where}: the pickle is malformed {where_it_is()}: {why}")
