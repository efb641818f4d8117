"""The layer of deltas: opens their bases, and loads changes only where tensors hold a base."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from fastload.errors import CheckpointNotFound
from fastload.ext.deltas.encoding import (
    is_next_to_base,
    layered,
    location_of_base,
    missing_base,
    read_chain,
    require_base,
    result_of_chain,
)
from fastload.ext.deltas.patch import match_rest
from fastload.formats.layers import Layer
from fastload.formats.manifest import Manifest
from fastload.loading.access import Access, OpenCall
from fastload.options import LoadOptions
from fastload.storage import CheckpointReader, Location

if TYPE_CHECKING:
    from fastload.loading.match import Match, Request
    from fastload.loading.session import Session


class DeltaLayer(Layer):
    """Makes a delta its result: the files of its base, with the changes in place."""

    def inspect(
        self,
        stored: Manifest,
        location: Location,
        connect: Callable[[Location], CheckpointReader],
        options: LoadOptions,
    ) -> Manifest:
        """Returns the manifest of the result.

        Raises:
            CheckpointError: A base is missing, was replaced, or is malformed.
            StorageError: Storage failed.
        """
        chain = read_chain(location, connect, options.bases, head=stored)
        return result_of_chain([manifest for _, manifest in chain])

    def open(self, access: Access, call: OpenCall) -> Access:
        """Opens the bases; returns the access to the result, whose components they are.

        Raises:
            FastloadError: A base is missing, was replaced, or cannot be opened.
        """
        location, chain = call.location, [access]
        try:
            while chain[-1].stored.delta is not None:
                location = _locate_base(chain[-1], location, call)
                try:
                    chain.append(call.open_at(location))
                except CheckpointNotFound as error:
                    raise missing_base(chain[-1].stored, location, error) from None
                require_base(chain[-2].stored, chain[-1].stored)
            result, storage, components = chain[-1].stored, chain[-1].storage, [chain[-1]]
            for part in reversed(chain[:-1]):
                result, storage = layered([(result, storage), (part.stored, part.storage)])
                components.append(replace(part, logical=result))
        except BaseException:
            for part in chain[1:]:
                part.storage.close()
            raise
        return replace(
            access,
            storage=storage,
            stored=result,
            logical=result,
            readers=tuple(sorted(set(access.readers).intersection(*(part.readers for part in chain)))),
            notes={rank: note for part in reversed(chain) for rank, note in part.notes.items()},
            shared=any(part.shared for part in chain),
            components=tuple(reversed(components)),
            layers=(*access.layers, self),
        )

    def serve(self, session: Session, request: Request) -> Match | None:
        """Reads the changes for tensors that hold a base; see `match_rest`."""
        if request.is_same:  # new tensors hold nothing, whatever was in their memory before
            return None
        return match_rest(session, request)


def _locate_base(delta: Access, location: Location, call: OpenCall) -> Location:
    """Returns where the base of a delta is, as one rank sees it."""
    stored, reader, world, bases = delta.stored, delta.readers[0], call.world, call.options.bases
    assert stored.delta is not None
    if bases is None:
        return location_of_base(stored.delta.base, location, None)
    with world.step(f"searching the base of {stored.url}") as step:
        step.answer(world.rank == reader and is_next_to_base(stored, location, call.connect))
    is_near = step.answers[reader]
    return location_of_base(stored.delta.base, location, None if is_near else bases)


layer = DeltaLayer()
