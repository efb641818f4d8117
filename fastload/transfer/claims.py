"""What each rank wants, if not all want the same: bytes of tensors. Pure; told to all ranks, compactly."""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice

import xxhash

from fastload.geometry.box import Runs

__all__ = ["Claim", "Claims", "Part"]

Part = tuple[Runs, ...]
"""What a rank wants of one tensor: the bytes of its boxes there, each in row-major order."""

_LENGTH_BYTES = 8
_INDEX = "I"


@dataclass(frozen=True)
class Claim:
    """What one rank wants.

    Attributes:
        tensors: Indexes of the tensors that it wants anything of, ascending.
        codes: For each of these, which of `parts` it wants of it.
        parts: What it wants of one tensor or another, without repetitions.
    """

    tensors: array[int]
    codes: array[int]
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, wants: Iterable[tuple[int, Part]]) -> Claim:
        """Makes a claim.

        Args:
            wants: Indexes of tensors, ascending, each with what is wanted of it.
        """
        numbers: dict[Part, int] = {}
        tensors, codes = array(_INDEX), array(_INDEX)
        for tensor, part in wants:
            tensors.append(tensor)
            codes.append(numbers.setdefault(part, len(numbers)))
        return cls(tensors, codes, tuple(numbers))

    def __iter__(self) -> Iterator[tuple[int, Part]]:
        return ((tensor, self.parts[code]) for tensor, code in zip(self.tensors, self.codes, strict=True))

    @cached_property
    def packed(self) -> bytes:
        """The claim, to be sent to other ranks: layers that are alike compress well."""
        parts = zlib.compress(json.dumps(self.parts).encode(), level=1)
        return len(parts).to_bytes(_LENGTH_BYTES, "little") + parts + self.columns

    @cached_property
    def columns(self) -> bytes:
        """`tensors` and `codes`, packed: the same for ranks that want other parts of the same tensors."""
        return zlib.compress(self._steps().tobytes() + self.codes.tobytes(), level=1)

    @classmethod
    def unpack(cls, packed: bytes, known: dict[bytes, tuple[array[int], array[int]]] | None = None) -> Claim:
        """Reads what is in `packed`.

        Args:
            packed: The claim.
            known: What `columns` were found to be, so that claims share those that are equal.
        """
        end = _LENGTH_BYTES + int.from_bytes(packed[:_LENGTH_BYTES], "little")
        parts = tuple(
            tuple(
                Runs(start, length, tuple((count, far) for count, far in steps))
                for start, length, steps in part
            )
            for part in json.loads(zlib.decompress(packed[_LENGTH_BYTES:end]))
        )
        columns, known = packed[end:], {} if known is None else known
        if columns not in known:
            known[columns] = _unpack_columns(columns)
        claim = cls(*known[columns], parts)
        claim.__dict__.update(packed=packed, columns=columns)
        return claim

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of the claim."""
        return xxhash.xxh3_128_hexdigest(self.packed)

    def _steps(self) -> array[int]:
        """Returns how far each tensor is from the one before: mostly the same."""
        before = array(_INDEX, [0, *(tensor + 1 for tensor in self.tensors[:-1])])
        return array(_INDEX, [tensor + 1 - last for tensor, last in zip(self.tensors, before, strict=False)])


def _unpack_columns(columns: bytes) -> tuple[array[int], array[int]]:
    numbers = array(_INDEX)
    numbers.frombytes(zlib.decompress(columns))
    half = len(numbers) // 2
    return array(_INDEX, islice(accumulate(numbers[:half], initial=-1), 1, None)), numbers[half:]


@dataclass(frozen=True)
class Claims:
    """What all ranks want.

    Attributes:
        distinct: The claims that differ.
        ranks: For each of these, the ranks that make it, ascending.
    """

    distinct: tuple[Claim, ...]
    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def join(cls, claims: Sequence[Claim]) -> Claims:
        """Joins the claims of ranks 0, 1, …: those that are equal need not be the same object."""
        found: dict[str, tuple[Claim, list[int]]] = {}
        for rank, claim in enumerate(claims):
            found.setdefault(claim.digest, (claim, []))[1].append(rank)
        distinct, ranks = zip(*found.values(), strict=True)
        return cls(distinct, tuple(map(tuple, ranks)))

    @classmethod
    def unpack(cls, packed: Sequence[bytes]) -> Claims:
        """Joins the claims of ranks 0, 1, …, each as `Claim.packed`."""
        columns: dict[bytes, tuple[array[int], array[int]]] = {}
        known = {data: Claim.unpack(data, columns) for data in dict.fromkeys(packed)}
        return cls.join([known[data] for data in packed])

    def of(self, rank: int) -> Claim:
        """Returns the claim of a rank."""
        return next(claim for claim, ranks in zip(self.distinct, self.ranks, strict=True) if rank in ranks)

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of all of them."""
        text = json.dumps([[claim.digest for claim in self.distinct], self.ranks])
        return xxhash.xxh3_128_hexdigest(text.encode())
