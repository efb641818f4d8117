"""The answers of all ranks but one to a save and a load, encoded as those ranks would, for a real rank.

The other ranks run no code of a save. Their states are described, and their answers to each step are encoded
by the functions that encode them in a save; equal ones once for all replicas. The answers go to the measured
rank through the store and the tree of sockets. What the ranks only compare, such as the digest of the plan of
a load, is left out.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch.distributed as dist
import xxhash

from fastload.comm.cache import ConnectionCache
from fastload.comm.observers import Observers
from fastload.comm.rendezvous import CallCounter, Decision, GroupState, Proposal
from fastload.comm.responses import Each, join_parts, split_parts
from fastload.comm.steps import Step
from fastload.comm.store import Member
from fastload.comm.world import World
from fastload.formats.layers import decoded
from fastload.formats.manifest import Manifest
from fastload.formats.names import NAMES, SEAL_NAME
from fastload.loading import access, prepare
from fastload.loading.session import Session
from fastload.options import Patience
from fastload.saving import agree, write
from fastload.saving.agree import RankState, describe
from fastload.saving.compare import StateContent, digest_by_holders
from fastload.saving.merge import NOTHING_SAVED, MergedState, merge_states, pack_boxes, pack_state
from fastload.saving.per_rank import PerRankFiles
from fastload.saving.plan import SavePlan, make_plan
from fastload.saving.save import published_response
from fastload.saving.split import WriterShare, split
from fastload.storage import open_with_sibling
from fastload.storage.location import locate

from . import control_plane as control
from .trillion import state_of

T = TypeVar("T")


def be_all_others(work: control.Work, measured: int, port: int, path: Path) -> None:
    """Replays the answers of all ranks but one; see `Replayed`."""
    control._leave_out_bytes()
    Replayed(work, measured, port, path).run()


class Replayed:
    """All ranks but one.

    Args:
        work: What the ranks do.
        measured: The real rank.
        port: The store's.
        path: The checkpoint.
    """

    def __init__(self, work: control.Work, measured: int, port: int, path: Path) -> None:
        self._work, self._measured, self._path = work, measured, path
        store = dist.PrefixStore(control._NAMESPACE, dist.TCPStore("127.0.0.1", port, is_master=False))
        self._hub = control._Hub(work.job.num_ranks, measured, store)
        self._ranks = [rank for rank in range(work.job.num_ranks) if rank != measured]
        self._groups = {rank: GroupState() for rank in self._ranks}
        for group in self._groups.values():
            group.counter = CallCounter()
        self._store = store
        self._worlds: dict[int, World] = {}
        self._call = self._step = 0
        self._links_token = ""
        self._states: dict[Any, Mapping[str, Any]] = {}

    def run(self) -> None:
        """Answers all calls."""
        cache = ConnectionCache()
        for number, (name, _) in enumerate(self._work.calls(), 1):
            self._call, self._step, self._worlds = number, 0, {}
            for rank in self._ranks:
                member = Member(rank, self._work.job.num_ranks)
                meeting = control._HubRendezvous(
                    self._hub, self._store, self._groups[rank], member,
                    call="saving", timeout_s=control._TIMEOUT_S,
                )  # fmt: skip
                meeting.begin()
                self._worlds[rank] = World(meeting, cache=cache)
                control._place_on_host(self._worlds[rank])
            self._save() if name == "save" else self._load()
            self._hub.end((number, self._step - 1))

    # Steps

    def _take(self, answer: Callable[[int], Any] | None = None, attached: bytes | None = None) -> Decision:
        """Takes a step.

        Args:
            answer: Returns the answer of a rank; None for no answers.
            attached: Bytes that rank 0 attaches, if it is not the measured one.
        """
        proposals = {}
        for rank, world in self._worlds.items():
            step = Step(world, "", control.REPLAYED)
            with_bytes = attached if rank == 0 else None
            step.__enter__()
            if answer is not None or with_bytes is not None:
                step.answer(answer(rank) if answer is not None else None, attach=with_bytes)
            world.end_step()
            number = world._state.take_step()
            text = world._respond(step._answer, None, number, control.REPLAYED)
            proposals[rank] = Proposal("", number, text, control._TIMEOUT_S, with_bytes or b"")
        decision = self._hub.exchange(self._call, self._step, proposals)
        self._step += 1
        assert not decision.failed, [run for run in decision.runs if run[0] is None or run[0]["error"]]
        return decision

    def _gather(self, data: Callable[[int], bytes]) -> list[bytes]:
        """Takes the two steps in which each rank answers bytes; returns those of all."""
        place, of_rank = f"gathered/{self._step}", {rank: data(rank) for rank in self._ranks}
        for rank, each in of_rank.items():
            self._worlds[rank].show_bytes("", place, each)
        digest = self._of_equal(xxhash.xxh3_128_hexdigest)
        digests = self._take(lambda rank: digest(of_rank[rank])).values
        attached = None
        sources = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
        if self._measured:
            of_rank[self._measured] = self._taken(place, self._measured)
            attached = join_parts([of_rank[rank] for rank in sources.values()])
        decision = self._take(attached=attached)
        parts = dict(zip(sources, split_parts(attached or decision.attachment or b""), strict=True))
        return [parts[digest] for digest in digests]

    def _taken(self, place: str, rank: int) -> bytes:
        data = self._worlds[0].take_bytes("", place, rank, keep=True)
        assert data is not None
        return data

    @staticmethod
    def _of_equal(call: Callable[[Any], T]) -> Callable[[Any], T]:
        """Returns a function that computes once for each argument."""
        known: dict[Any, T] = {}

        def once(given: Any) -> T:
            if given not in known:
                known[given] = call(given)
            return known[given]

        return once

    def _kind(self, rank: int) -> tuple[int, int, bool, bool]:
        """Ranks of equal kinds have equal states."""
        tp, pp, dp = self._work.job.at(rank)
        of_rank = dp if self._work.optimizer == "dp_reshardable" else dp == 0
        return tp, pp, of_rank, rank == 0

    def _by_kind(self, call: Callable[[int], T]) -> Callable[[int], T]:
        """Returns a function of a rank that computes once for ranks with equal states."""
        known: dict[Any, T] = {}

        def once(rank: int) -> T:
            kind = self._kind(rank)
            if kind not in known:
                known[kind] = call(rank)
            return known[kind]

        return once

    def _state(self, rank: int) -> Mapping[str, Any]:
        kind = self._kind(rank)
        if kind not in self._states:
            self._states[kind] = state_of(self._work.job, rank, self._work.optimizer)
        return self._states[kind]

    # A save

    def _save(self) -> None:
        calls = {rank: control.save_call(world, self._path) for rank, world in self._worlds.items()}
        described = self._by_kind(lambda rank: describe(calls[rank], self._state(rank)))
        introduced = self._take(
            lambda rank: agree._introduction(calls[rank], described(rank), has_copied=False)
        )
        packed = self._by_kind(lambda rank: _packed_state(described(rank)))
        forms = self._gather(packed)
        boxes = self._gather(
            self._by_kind(lambda rank: pack_boxes(described(rank).reader.boxes_and_meshes()))
        )
        options = next(iter(calls.values())).options
        merged = merge_states(
            forms, boxes, options=options, stem=next(iter(calls.values())).stem, outcome=NOTHING_SAVED
        )
        assert merged is not None
        self._take(self._by_kind(lambda rank: _replica_digests(merged, rank)))
        typical = self._work.job.num_ranks // 2 + 1
        plan = self._plan(calls[typical], described(typical), merged, introduced.values)
        self._write(calls, plan)

    def _plan(
        self, call: Any, state: RankState, merged: MergedState, introduced: Sequence[Mapping[str, Any]]
    ) -> SavePlan:
        """Returns the plan of a rank in the middle."""
        content = StateContent(merged.structure, merged.layout.digest, merged.specs, {})
        reader = state.reader.with_layout(merged.layout)
        state = replace(state, content=content, layout=merged.layout, reader=reader, strides=merged.strides)
        how = agree._how(call, content, merged.meshes)
        hosts = [each["host"] for each in introduced]
        agreed = agree._agreement(call, state, merged.shard_map, hosts, {}, merged.strides, how)
        self._ranges = split(merged.layout, merged.shard_map, range(agreed.num_writers), 4096)
        return make_plan(call, state, agreed)

    def _write(self, calls: Mapping[int, Any], plan: SavePlan) -> None:
        """Takes the steps from the preparation of the files on."""
        ticket, token = {"folder": str(self._path)}, self._links_token
        num_partners = len(plan.messages.partners) if not token else 0

        def prepared(rank: int) -> dict[str, Any]:
            offer = control._Wire(self._worlds[rank], num_partners, self._measured, token).offer()
            return {"ticket": ticket if rank == 0 else None, "sends": True, "offer": offer}

        offers = [answer["offer"] for answer in self._take(prepared).values]
        if any(offer["at"] for offer in offers):
            self._take()  # connecting
            addresses = {rank: offer["at"] for rank, offer in enumerate(offers)}
            self._links_token = xxhash.xxh3_64_hexdigest(repr(addresses).encode())
        share = {rank: WriterShare(self._ranges.get(rank, ())) for rank in self._ranks}

        def written(rank: int) -> list[Any]:
            planned: Any = SimpleNamespace(state=plan.state, share=share[rank], group=plan.group)
            receipt = control._checksums_only(planned, None, None)
            return [write._hand_in(self._worlds[rank], plan.group, receipt, what=""), {}]

        self._take(written)
        result: Any = SimpleNamespace(write_s=1.5, flush_s=0.25, staging_bytes=1 << 27)
        begun: Any = SimpleNamespace(plan=plan, snapshot=None, stall_s=None)

        def published(rank: int) -> dict[str, Any]:
            planned: Any = SimpleNamespace(share=share[rank], messages=plan.messages)
            began = time.perf_counter()
            return published_response(calls[rank], begun, planned, result, PerRankFiles(), began)

        self._take(published)

    # A load

    def _load(self) -> None:
        location, options = locate(self._path), control.load_options(self._work.staging_bytes)
        call = {"path": location.given, **options.shared_values()}
        first = next(iter(self._worlds.values()))
        patience = Patience(options.retries, first.patience_s / 2)
        storage = open_with_sibling(
            location, NAMES, None, sibling=SEAL_NAME, io=options.io, patience=patience
        )
        opening = access._Opening(first, lambda: storage, access.read_manifest)
        seen = opening._look(storage, call)

        def looked(rank: int) -> dict[str, Any]:
            world = self._worlds[rank]
            machine = Each([access.machine_digest(world.host, rank)])
            return {**seen, "machine": machine, "manifest": seen["manifest"] if rank == 0 else None}

        opened = self._take(looked)
        if (early := opened.values[0]["manifest"]) is None:
            packed = opening._read_packed(storage, is_last=False) if self._measured else None
            decision = self._take(attached=packed)
            early = packed or decision.attachment
        else:
            early = base64.b64decode(early)
        manifest = Manifest.from_bytes(early)
        (machines,) = opened.values[0]["machine"]
        reached = access.Access(
            storage=storage,
            stored=manifest,
            logical=decoded(manifest),
            hosts=tuple(opened.nodes.values()) if opened.nodes is not None else (),
            machines=tuple(machines.values()),
            readers=tuple(range(self._work.job.num_ranks)),
            notes={},
            shared=True,
        )
        session = Session(first, reached, options, Observers())
        start = prepare.LoadStart.now(session.opened)
        request = self._by_kind(lambda rank: control.request_of(self._state(rank)))
        matched = self._by_kind(lambda rank: prepare._match(session.opened, request(rank), None, start)[0])
        proposals = self._take(
            self._by_kind(lambda rank: prepare._proposal(request(rank), matched(rank), None))
        ).values
        surplus = {each["surplus"] for each in proposals}
        if len(surplus) > 1 and all(surplus):
            names = [entry.name for entry in manifest.tensors]
            self._gather(
                self._by_kind(lambda rank: prepare._pack_names(matched(rank).match.surplus.names, names))
            )
        self._gather(
            self._by_kind(lambda rank: prepare.request_of(manifest, matched(rank).match.destinations).packed)
        )
        self._take(lambda rank: {"transport": "", "plan": "", "offer": control._OFFER})
        self._take(lambda rank: {"report": Each(control.load_report(self._worlds[rank]).pack())})
        session.close()


def _packed_state(state: RankState) -> bytes:
    return pack_state(state.content.structure, state.content.specs, state.strides)


def _replica_digests(merged: MergedState, rank: int) -> list[dict[str, str]]:
    digests = control._same_digests(None, merged.layout, merged.shard_map, None, rank)
    return [digest_by_holders(merged.shard_map, rank, digests)]
