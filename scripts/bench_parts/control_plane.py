"""What a save and a load of thousands of ranks cost a rank beside the bytes: messages, CPU, memory.

Rank 0 is a process of its own. All others are threads of a second process, which
describe their own state and answer each step; that process is the measured rank's neighbour in the control
tree. Links between ranks, and bytes of tensors, are left out: a tensor has one element in memory.
"""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import struct
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from rich.table import Table

from fastload.comm import rendezvous, steps, tree
from fastload.comm import world as world_module
from fastload.comm.cache import ConnectionCache
from fastload.comm.failures import require_same
from fastload.comm.group import join_in
from fastload.comm.hosts import connect, listen
from fastload.comm.observers import Observers
from fastload.comm.rendezvous import Decision, GroupState, LastStep, Proposal, StoreRendezvous, StoreStep
from fastload.comm.responses import Each, join_responses
from fastload.comm.store import Member
from fastload.comm.tree import TreeLinks, children_of, parent_of
from fastload.comm.world import World
from fastload.ext.hand_cut import Shard
from fastload.formats.manifest import Manifest
from fastload.loading import access, match, prepare
from fastload.loading.access import open_access
from fastload.loading.match import BoxRequest
from fastload.loading.session import Session
from fastload.options import LoadOptions, SaveOptions
from fastload.report import RankReport
from fastload.saving import agree, plan, write
from fastload.saving import save as saving
from fastload.saving.call import SaveCall
from fastload.saving.compare import ShardDigests, StateContent
from fastload.saving.messages import MessagePlan
from fastload.saving.split import WriterShare, split
from fastload.storage.base import DEFAULT_WRITES
from fastload.storage.location import locate
from fastload.transfer import links
from fastload.transfer.demand import RankRequests, SharingGroups
from fastload.transfer.messages import ring_order
from fastload.transfer.routed_plan import plan_routes

from .agree import _end, _serve
from .job import MIB, forget_peak, peak_bytes
from .tables import print_table
from .trillion import Job, state_of

_TIMEOUT_S = 1800.0
_STACK_BYTES = 1 << 20
_NAMESPACE = "control plane"
REPLAYED = "replayed"  # place of a replayed step in the code
_FORM: Any = vars(StateContent)["form"]


class Tally:
    """Messages of a rank along the tree, and its requests to the store."""

    def __init__(self) -> None:
        self.num: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.longest: Counter[str] = Counter()

    def add(self, kind: str, nbytes: int) -> None:
        """Counts one."""
        self.num[kind] += 1
        self.nbytes[kind] += nbytes
        self.longest[kind] = max(self.longest[kind], nbytes)


class _CountedStore:
    def __init__(self, store: Any, tally: Tally) -> None:
        self.store, self._tally = store, tally

    def __getattr__(self, name: str) -> Any:
        ask = getattr(self.store, name)

        def counted(*given: Any) -> Any:
            answer = ask(*given)
            lists = [each if isinstance(each, list) else [each] for each in (*given, answer)]
            texts = (text for texts in lists for text in texts if isinstance(text, str | bytes))
            self._tally.add("store", sum(map(len, texts)))
            return answer

        return counted if callable(ask) else ask


def _count(tally: Tally) -> None:
    """Counts what this process sends and receives from now on."""
    link, send, take = tree._TreeLink, tree._TreeLink.send, tree._TreeLink.take

    def counted_send(self: Any, message: bytes) -> None:
        tally.add("sent", len(message))
        send(self, message)

    def counted_take(self: Any) -> Any:
        messages = take(self)
        for _, table, attachment in messages:
            tally.add("received", tree._HEAD.size + len(table) + len(attachment))
        return messages

    link.send, link.take = counted_send, counted_take  # type: ignore[method-assign]

    def prefixed(prefix: str, store: _CountedStore) -> _CountedStore:
        return _CountedStore(dist.PrefixStore(prefix, store.store), tally)

    rendezvous.dist = SimpleNamespace(PrefixStore=prefixed)  # type: ignore[assignment]


@dataclass(frozen=True)
class Work:
    """What all ranks do.

    Attributes:
        job: The ranks.
        optimizer: See `state_of`.
        num_saves: Saves of the same state.
        num_loads: Loads of it, afterwards.
        staging_bytes: Of a load.
        is_replayed: Whether the answers of all ranks but one are replayed.
    """

    job: Job
    optimizer: str
    num_saves: int = 2
    num_loads: int = 1
    staging_bytes: int = LoadOptions().staging_bytes
    is_replayed: bool = False

    def calls(self) -> list[tuple[str, Callable[[World, Any, Path], None]]]:
        """Returns the calls, each with its name."""
        load = partial(_load, staging_bytes=self.staging_bytes)
        return [("save", _save)] * self.num_saves + [("load", load)] * self.num_loads


# Without bytes


class _Target:
    """A target that takes every byte; the leader's has files as long as those of a real one, with holes.

    Args:
        path: The folder.
    """

    shared, ordered, writes_at_once = True, False, DEFAULT_WRITES

    def __init__(self, path: Path) -> None:
        self.url, self._path = str(path), path
        self.record_bytes = 0

    def align_bytes(self, largest_bytes: int) -> int:
        return 4096

    def prepare(self, files: Sequence[tuple[str, int]], *, overwrite: bool) -> dict[str, Any]:
        self._path.mkdir(exist_ok=True)
        for name, nbytes in files:
            with open(self._path / name, "wb") as file:
                file.truncate(nbytes)
        return {"folder": self.url}

    def join(self, ticket: Mapping[str, Any]) -> None: ...

    def flush(self) -> dict[str, Any]:
        return {"bytes": 0}

    def publish(self, receipts: Sequence[Any], small_files: Sequence[tuple[str, bytes]]) -> None:
        for name, content in small_files:
            (self._path / name).write_bytes(content)

    def abort(self) -> None: ...

    def close(self) -> None: ...


class _Call(SaveCall):
    def open_target(self) -> Any:
        return _Target(Path(self.location.given))


def _checksums_only(plan_: plan.SavePlan, writer: Any, assembler: Any) -> write.WriteReceipt:
    """In place of the write of a share; the leader writes the headers, for loads."""
    if writer is not None and assembler is not None and plan_.group.leader == writer._world.rank:
        for file in plan_.state.layout.files:
            with open(Path(plan_.target.url, file.name), "r+b") as opened:
                opened.write(file.header)
    sums: list[tuple[int, bytes]] = []
    first = number = -1
    for block in plan_.state.layout.blocks_of(plan_.share.ranges):
        if block.number != number:
            if first >= 0:
                sums.append((first, b"01234567" * (number - first)))
            first = number = block.number
        number += 1
    sums.append((first, b"01234567" * (number - first)))
    return write.WriteReceipt({"bytes": plan_.share.nbytes}, sums)


def _same_digests(self: Any, layout: Any, shard_map: Any, reader: Any, rank: int, **_: Any) -> bytes:
    """In place of those of replicas, whose bytes nobody has."""
    return b"\1" * 8 * len(shard_map.replicated(rank))


def _leave_out_bytes() -> None:
    write._write_share = _checksums_only
    ShardDigests.of = _same_digests  # type: ignore[method-assign]
    links.require_reachable = lambda *given, **more: None  # type: ignore[assignment]
    match.overlaps = lambda tensor: False  # type: ignore[assignment]  # nothing is written into them


def save_call(world: World, path: Path) -> SaveCall:
    """Returns the call of a rank that saves to a folder."""
    options = SaveOptions(parts=True, overwrite=True, timeout_s=_TIMEOUT_S)
    return _Call(world, locate(path), {}, None, options, None, Observers(), time.perf_counter())


def _save(world: World, state: Any, path: Path) -> None:
    saving.save(save_call(world, path), state)
    world.acknowledge()


def load_options(staging_bytes: int) -> LoadOptions:
    """Returns the options of a load."""
    return LoadOptions(timeout_s=_TIMEOUT_S, strategy="allgather", staging_bytes=staging_bytes)


def request_of(state: Mapping[str, Any]) -> BoxRequest:
    """Returns the request for the shards of a state."""
    boxes = {name: list(shard.boxes) for name, shard in state.items() if isinstance(shard, Shard)}
    return BoxRequest(boxes, cast=True)


def load_report(world: World) -> RankReport:
    """Returns the report of a rank."""
    return RankReport(
        rank=world.rank, host=world.host, reader=True, bytes_read=1 << 32, read_s=1.5, exchange_s=1.25,
        total_s=1.75,
    )  # fmt: skip


def _load(world: World, state: Mapping[str, Any], path: Path, staging_bytes: int) -> None:
    """Loads the shards of a state up to the first byte, and reports."""
    options, location = load_options(staging_bytes), locate(path)
    opened = open_access(world, location, None, options, {"path": location.given})
    session = Session(world, opened, options, Observers())
    job = prepare.prepare(session.opened, request_of(state))
    with world.step("loading") as step:
        step.answer({"report": Each(load_report(world).pack())})
    assert step.answers
    job.close()
    session.close()
    world.acknowledge()


# The rank that is measured


def _keep_links() -> None:
    """Has the addresses that ranks have exchanged stand for links, which a second save finds again."""
    find, close = links.Links.find, links.Wire.close

    def found(self: Any, addresses: Any) -> None:
        find(self, addresses)
        for connections in self._opening.values():
            for connection in connections:
                connection.give_up()
        self._groups, self._opening = self._groups | {rank: [] for rank in self._opening}, {}

    links.Links.find = found  # type: ignore[method-assign]
    links.Wire.close = lambda self, *, keep: close(self, keep=True)  # type: ignore[method-assign]


def _measured(work: Work, rank: int, port: int, path: Path) -> list[dict[str, Any]]:
    """Returns what each call costs this rank."""
    tally = Tally()
    _count(tally)
    _leave_out_bytes()
    terms_of, left_out = prepare._terms_of, {"transport": ""}
    if work.is_replayed:
        world_module._place = lambda: REPLAYED  # type: ignore[assignment]  # the others know none
        left_out["plan"] = ""
        _keep_links()
    prepare._terms_of = lambda job: terms_of(job) | left_out
    prepare.accept_offers = lambda *given: None
    spent: defaultdict[str, float] = defaultdict(float)
    for module, name in (
        (agree, "describe"),
        (agree, "merge_states"),
        (saving, "make_plan"),
        (saving, "write"),
        (saving, "commit"),
        (access, "read_manifest"),
        (Manifest, "from_bytes"),
        (prepare, "_match"),
        (prepare, "_open_sharded"),
    ):
        setattr(module, name, _timed(getattr(module, name), spent, name))
    store = _CountedStore(dist.TCPStore("127.0.0.1", port, is_master=False), tally)
    namespace: Any = rendezvous.dist.PrefixStore(_NAMESPACE, store)  # type: ignore[arg-type]
    state, cache_ = state_of(work.job, rank, work.optimizer), ConnectionCache()
    rows = []
    for name, do in work.calls():
        for counter in (tally.num, tally.nbytes, tally.longest):
            counter.clear()
        spent.clear()
        before, began_s, began = forget_peak(), time.process_time(), time.perf_counter()
        world = join_in(
            namespace, Member(rank, work.job.num_ranks), call="saving", timeout_s=_TIMEOUT_S, cache=cache_
        )
        _place_on_host(world)
        do(world, state, path)
        rows.append(
            {
                "what": name,
                "cpu_s": time.process_time() - began_s,
                "wall_s": time.perf_counter() - began,
                "peak_MiB": (peak_bytes() - before) / MIB,
                "messages": dict(tally.num),
                "nbytes": dict(tally.nbytes),
                "longest": dict(tally.longest),
                "spent": dict(spent),
            }
        )
    return rows


def _timed(call: Callable[..., Any], spent: dict[str, float], name: str) -> Callable[..., Any]:
    def timed(*given: Any, **more: Any) -> Any:
        began = time.process_time()
        try:
            return call(*given, **more)
        finally:
            spent[name] += time.process_time() - began

    return timed


def _place_on_host(world: World) -> None:
    host = f"host{world.rank // 8}"
    world.host, world.node = host, f"{host}/{world.rank // 8:016x}"


# All others


class _Hub:
    """Decides the steps of the ranks that are threads, together with the one that is not.

    Args:
        size: Number of ranks.
        measured: The rank that is a process.
        store: The store.
    """

    def __init__(self, size: int, measured: int, store: Any) -> None:
        self._size, self._measured, self._store = size, measured, store
        self._turn = threading.Condition()
        self._proposals: dict[int, Proposal] = {}
        self._decision: Decision | None = None
        self._num_decided = 0
        self._num_acknowledged = 0
        self._links: dict[int, TreeLinks] = {}
        self._children = children_of(measured, size)
        self._below = {child: _subtree(child, size) for child in self._children}

    def decide(self, rank: int, number: int, proposal: Proposal) -> Decision:
        """Brings the response of a thread, and returns the decision once there is one."""
        with self._turn:
            self._proposals[rank] = proposal
            turn = self._num_decided
            if len(self._proposals) == self._size - 1:
                self._decision = self._exchange(number, proposal.step)
                self._proposals = {}
                self._num_decided += 1
                self._turn.notify_all()
            else:
                self._turn.wait_for(lambda: self._num_decided > turn)
            assert self._decision is not None
            return self._decision

    def exchange(self, number: int, step: int, proposals: Mapping[int, Proposal]) -> Decision:
        """Brings the responses of all other ranks, and returns the decision."""
        self._proposals = dict(proposals)
        return self._exchange(number, step)

    def acknowledge(self, tag: tuple[int, int]) -> None:
        """Notes that a thread has ended its call."""
        with self._turn:
            self._num_acknowledged += 1
            if self._num_acknowledged == self._size - 1:
                self._num_acknowledged = 0
                self.end(tag)

    def end(self, tag: tuple[int, int]) -> None:
        """Notes that all other ranks have ended a call."""
        for link in self._links.values():
            link.acknowledge(tag)

    def _exchange(self, number: int, step: int) -> Decision:
        tag, others = (number, step), self._proposals
        if not self._links:
            self._links = dict(self._connected(number))
        attached = {rank: each.attachment for rank, each in others.items() if each.attachment}
        for child in self._children:
            below = self._below[child]
            table = join_responses(others[rank].response for rank in below)
            data = next((data for rank, data in attached.items() if rank in below), b"")
            self._links[child].send([self._measured], tag, table, data)
            self._links[child].flush([self._measured], _look)
        parent = parent_of(self._measured)
        if parent is None:
            [first, *_] = found = [self._receive(child, tag) for child in self._children]
            text, data = first
            assert all(each == first for each in found)
        else:
            table, data = self._receive(parent, tag)
            behind = {rank for below in self._below.values() for rank in below}
            rest = [each.response for rank, each in others.items() if rank not in behind]
            text = Decision.write(_TIMEOUT_S, join_responses([table, *rest]), in_tree=True)
            data = data or next(iter(attached.values()), b"")
            place = StoreStep(dist.PrefixStore(str(number), self._store), str(step), self._size)
            place.put_decision(text)
            self._links[parent].send([self._measured], tag, text, data)
            self._links[parent].flush([self._measured], _look)
            for child in self._children:
                self._receive(child, tag)
        return Decision.from_text(text, self._size, data)

    def _receive(self, neighbour: int, tag: tuple[int, int]) -> tuple[str, bytes]:
        [message] = self._links[neighbour].receive([self._measured], tag, _look)
        return message

    def _connected(self, number: int) -> Iterator[tuple[int, TreeLinks]]:
        """Yields the links of the measured rank's neighbours to it."""
        namespace, measured = dist.PrefixStore(str(number), self._store), self._measured
        if (parent := parent_of(measured)) is not None:
            listener, address = listen(parent, self._store)
            namespace.set(f"at/{parent}", address)
            for rank, link in listener.accept([measured], _look):
                yield parent, TreeLinks(parent, {rank: link})
            listener.close()
        if self._children:
            address = str(namespace.get(f"at/{measured}"), "utf-8")
        for child in self._children:
            yield child, TreeLinks(child, {measured: connect(address, child, _look)})


def _subtree(rank: int, size: int) -> frozenset[int]:
    return frozenset({rank}.union(*(_subtree(child, size) for child in children_of(rank, size))))


def _look() -> float:
    return 1.0


class _HubRendezvous(StoreRendezvous):
    """The steps of a rank that is a thread."""

    def __init__(self, hub: _Hub, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._hub = hub

    def ask(self, what: str, limit_s: float, ask: Callable[[], Any]) -> Any:
        return ask()

    def begin(self) -> None:
        self._take_number()

    def _decide(self, proposal: Proposal) -> Decision:
        return self._hub.decide(self.member.rank, self._number, proposal)

    def acknowledge(self, last: LastStep) -> None:
        self._hub.acknowledge((self._number, last.step))

    def withdraw(self, *given: Any, **more: Any) -> None: ...


class _Wire:
    """The offer of a rank that is a thread: as long as a real one, to the ranks that it would connect to."""

    def __init__(self, world: World, num_partners: int, measured: int, token: str = "") -> None:
        self._token, self._at = token, ""
        if token:
            return
        near = {(world.rank + 1 + at) % world.size for at in range(num_partners)} | {measured}
        base = random.Random(world.rank).randbytes(154)  # Gloo's addresses end with two numbers
        addresses = (base + struct.pack("<QQ", 2 * at, 2 * at + 1) for at in range(len(near)))
        at = {
            str(rank): [base64.b64encode(address).decode()]
            for rank, address in zip(sorted(near), addresses, strict=True)
        }
        self._at = links._packed(at)

    def offer(self) -> dict[str, Any]:
        listens = [["10.0.0.1", 40000]] if self._at else []
        return {"token": self._token, "at": self._at, "listens": listens}

    def accept(self, offers: Sequence[Any]) -> Sequence[Any]:
        return ()

    def close(self, *, keep: bool) -> None: ...


def _be_all_others(work: Work, measured: int, port: int, path: Path) -> None:
    """Runs all ranks but one as threads. What is equal on all of them is computed once."""
    job = work.job
    for module, name in ((steps, "split_parts"), (agree, "merge_states"), (agree, "differing_groups")):
        setattr(module, name, _once(getattr(module, name)))

    form = _once(lambda structure, content: _FORM.func(content))
    StateContent.form = property(lambda content: form(content.structure, content))  # type: ignore
    real_plan, typical, lock = plan._plan, list[int](), threading.Lock()
    shares = cache(lambda layout, *given: split(layout.it, *given))

    def light_plan(layout: Any, shard_map: Any, rank: int, groups: Any, align: Any, *lengths: int) -> Any:
        with lock:
            if not typical:  # as many partners as a rank in the middle has
                messages = real_plan(layout, shard_map, job.num_ranks // 2, groups, align, *lengths)[1]
                typical.append(len(messages.partners))
            ranges = shares(_ByIdentity(layout), shard_map, groups[0].writers, align)
        return WriterShare(ranges[rank]), MessagePlan((), (), ())

    plan._plan = light_plan
    _leave_out_bytes()

    @contextmanager
    def connecting(world: World, partners: Any) -> Iterator[_Wire]:
        yield _Wire(world, typical[0], measured)

    write.connecting = connecting  # type: ignore[assignment]
    Manifest.from_bytes = _once(Manifest.from_bytes)  # type: ignore[method-assign]
    plans = _once(_routes)

    def open_light(matched: Any, own: Any, packed: Sequence[bytes]) -> Any:
        return SimpleNamespace(close=lambda: None, digest=plans(packed, matched))

    prepare._open_sharded = open_light
    prepare._terms_of = lambda job: {"transport": "", "plan": job.digest, "offer": _OFFER}
    prepare._accept = lambda what, job, answers: require_same(answers, "transport", "plan")
    write.PartAssembler = lambda *given: SimpleNamespace(nbytes=0, close=lambda: None)  # type: ignore
    store = dist.PrefixStore(_NAMESPACE, dist.TCPStore("127.0.0.1", port, is_master=False))
    hub = _Hub(job.num_ranks, measured, store)
    failed: list[BaseException] = []

    def be(rank: int) -> None:
        try:
            state = state_of(job, rank, work.optimizer)
            for _, do in work.calls():
                member, group = Member(rank, job.num_ranks), GroupState()
                meeting = _HubRendezvous(hub, store, group, member, call="saving", timeout_s=_TIMEOUT_S)
                world = World(meeting, cache=ConnectionCache())
                _place_on_host(world)
                meeting.begin()
                do(world, state, path)
        except BaseException as error:
            failed.append(error)
            raise

    sys.setswitchinterval(10)  # else thousands of threads that wait for their turn wake up all the time
    threading.stack_size(_STACK_BYTES)
    threads = [
        threading.Thread(target=be, args=(rank,), daemon=True)
        for rank in range(job.num_ranks)
        if rank != measured
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.2)
        if failed:
            os._exit(1)


_OFFER = {"at": "x" * 2500, "token": "", "host": None}
"""Of a rank that is a thread, in a load."""


def _routes(packed: Sequence[bytes], matched: Any) -> str:
    """Returns the digest of the plan of a load; see `prepare._open_sharded`."""
    opened, decision = matched.opened, matched.decision
    extents, requests = opened.access.stored.extents, RankRequests.unpack(packed)
    sharing = SharingGroups(extents, requests, opened.block_bytes, contiguous=opened.access.is_mounted)
    plan_ = plan_routes(
        sharing,
        decision.readers_for(opened.world.rank),
        order=ring_order(opened.access.hosts),
        staging_bytes=opened.options.staging_bytes,
        chunk_bytes=opened.options.chunk_bytes,
        supply=opened.access.supply,
        to_device=False,
    )
    return plan_.digest(alone=False)


class _ByIdentity:
    def __init__(self, it: Any) -> None:
        self.it = it

    def __hash__(self) -> int:
        return id(self.it)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self.it is other.it


def _once(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes once for all threads of a step, whose arguments are equal."""
    lock, known = threading.Lock(), dict[str, Any]()

    def once(*given: Any, **more: Any) -> Any:
        with lock:
            first = given[0] if given else None
            key = (len(first), hash(tuple(map(id, first)))) if isinstance(first, list) else id(first)
            if known.get("key") != key:
                known.clear()
                known.update(key=key, keep=first)
                try:
                    known["value"] = call(*given, **more)
                except Exception as error:
                    known["error"] = error.with_traceback(None)
            if "error" in known:
                raise known["error"]
            return known["value"]

    return once


def measure(
    work: Work, rank: int, folder: Path, be_others: Callable[[Work, int, int, Path], None] | None = None
) -> list[dict[str, Any]]:
    """Measures what each call costs one rank.

    Args:
        work: The calls.
        rank: The rank.
        folder: Where files with holes go.
        be_others: Takes the part of all other ranks, given the calls, the rank, the port of the store, and
            the checkpoint; None runs them as threads.
    """
    server, port = _serve()
    path = folder / "saved"
    try:
        children = [_fork(lambda: _measure(work, rank, port, folder))]
        children.append(_fork(lambda: (be_others or _be_all_others)(work, rank, port, path)))
        _await(children)
        return _rows_of(rank, folder)
    finally:
        _end(server)


def measure_all(work: Work, folder: Path) -> dict[int, Any]:
    """Measures the same on all ranks, each of them a process; returns the rows of each rank."""
    server, port = _serve()
    ranks = range(work.job.num_ranks)
    try:
        _await([_fork(partial(_measure, work, rank, port, folder)) for rank in ranks])
        return {rank: _rows_of(rank, folder) for rank in ranks}
    finally:
        _end(server)


def _fork(do: Callable[[], object]) -> int:
    if child := os.fork():
        return child
    code = 1
    try:
        do()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _await(children: Sequence[int]) -> None:
    """Waits for processes; ends the others if one fails."""
    left = set(children)
    while left:
        child, status = os.wait()
        if child in left:
            left.remove(child)
            if status:
                for other in left:
                    os.kill(other, signal.SIGKILL)
                raise SystemExit("a process has failed")


def _measure(work: Work, rank: int, port: int, folder: Path) -> None:
    rows = _measured(work, rank, port, folder / "saved")
    (folder / f"{rank}.json").write_text(json.dumps(rows))


def _rows_of(rank: int, folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / f"{rank}.json").read_text())
    return rows


def print_rows(title: str, rows_of: Mapping[int, Sequence[Mapping[str, Any]]]) -> None:
    """Prints what each call cost some ranks."""
    table = Table(title=title)
    table.add_column("rank", justify="right")
    table.add_column("call", no_wrap=True)
    for name in ("CPU s", "most of it", "messages", "MB", "longest MB", "to the store", "MB ", "memory MiB"):
        table.add_column(name, justify="right")
    for rank, rows in rows_of.items():
        for row in rows:
            num, nbytes, longest = row["messages"], row["nbytes"], row["longest"]
            parts = sorted(row["spent"].items(), key=lambda part: -part[1])[:2]
            table.add_row(
                f"{rank:,}",
                row["what"],
                f"{row['cpu_s']:.2f}",
                ", ".join(f"{name.strip('_')} {seconds:.2f}" for name, seconds in parts),
                f"{num['sent'] + num['received']:,}",
                f"{(nbytes['sent'] + nbytes['received']) / 1e6:,.1f}",
                f"{max(longest.values()) / 1e6:,.1f}",
                f"{num['store']:,}",
                f"{nbytes['store'] / 1e6:,.1f}",
                f"{row['peak_MiB']:,.0f}",
            )
    print_table(table)
