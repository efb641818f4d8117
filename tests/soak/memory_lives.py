"""Lives of managers with both tiers, one after the other, against a model of what has to come back.

Each save has a number of its own, and what is saved later counts as newer, whatever its step. So the model is
simple: of each place (a step on storage, or memory) it knows which saves may be there, and whether one of
them is for sure. A restore returns one of those, as it was saved, and none older than the newest of those.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastload import CheckpointManager, SaveOptions
from fastload.errors import CheckpointError, CheckpointNotFound, FastloadError, UnsupportedVersion
from tests.checkpoints import flip, seal
from tests.dist.harness import run_ranks

__all__ = ["Lives"]

RANKS_IMPORT = ("fastload.ext.memory.tier",)
_TIMEOUT_S = 6.0
_MOST = 1000  # saves in one life


@dataclass(frozen=True)
class Save:
    """One save: its number, which tells the order, and its step."""

    number: int
    step: int


@dataclass
class Slot:
    """A place that may have one of some saves.

    Attributes:
        saves: Which they may be.
        is_sure: Whether one of them is there, and whole.
        hits: Hosts that have lost what they had of it in memory, or whose copy may be damaged.
        moves: Whether it may have been written from memory to storage, and be nowhere else.
    """

    saves: set[Save] = field(default_factory=set)
    is_sure: bool = False
    hits: int = 0
    moves: bool = False

    def begin(self, save: Save) -> None:
        self.saves.add(save)

    def done(self, save: Save) -> None:
        self.saves, self.is_sure, self.hits, self.moves = {save}, True, 0, False

    @property
    def least(self) -> int:
        """The number that what is there has at least; -1 if there may be nothing."""
        return min((save.number for save in self.saves), default=-1) if self.is_sure else -1


@dataclass
class Model:
    """What a root and the memory of its run may have."""

    root: Path
    storage: dict[int, Slot] = field(default_factory=dict)
    memory: Slot = field(default_factory=Slot)

    def slots(self, step: int | None = None) -> Iterable[Slot]:
        """The places, or what of them may be of a step."""
        for slot in (*self.storage.values(), self.memory):
            if step is None:
                yield slot
            elif of_step := {save for save in slot.saves if save.step == step}:
                yield Slot(of_step, slot.is_sure and of_step == slot.saves)

    def allowed(self, step: int | None) -> set[Save]:
        saves = {save for slot in self.slots(step) for save in slot.saves}
        least = max((slot.least for slot in self.slots(step)), default=-1)
        return {save for save in saves if save.number >= least}

    def must(self, step: int | None) -> bool:
        return any(slot.is_sure for slot in self.slots(step))

    def restored(self, save: Save | None, source: str, step: int | None) -> None:
        """Notes what a restore has returned, or that it is not known whether there was one."""
        newer_stored = any(
            each.number > min((old.number for old in self.memory.saves), default=-1)
            for slot in self.storage.values()
            for each in slot.saves
        )
        if save is not None and source == "storage":
            self.storage.setdefault(save.step, Slot()).done(save)
            newer_stored = True
        elif save is not None:
            self.memory.saves, self.memory.moves, newer_stored = {save}, False, False
        if step is None and newer_stored:  # so what is in memory may have been given up
            self.memory.is_sure = False

    def ended_well(self) -> None:
        """Notes that what is newer in memory may have been written to storage, and memory let go of."""
        newest = max((slot.least for slot in self.storage.values()), default=-1)
        if self.memory.least <= newest:
            self.memory.is_sure = False
        self.memory.moves = True
        for save in self.memory.saves:
            self.storage.setdefault(save.step, Slot()).begin(save)


@dataclass(frozen=True)
class Life:
    """One life, as it was drawn.

    Attributes:
        root: Its root.
        memory: Where hosts have their memory.
        journal: Where ranks note what they have done.
        ranks: How many there are.
        per_host: Of them on each host.
        copies: Of what is in memory.
        restores: Whether it restores; `step` says what.
        step: Which one; None for the newest.
        kinds: What it saves: ``m`` to memory, ``s`` to storage, ``b`` to storage in the background.
        strides: Steps between these.
        first: Number of the first save.
        end: ``killed``, ``well`` or ``raised``.
        killed_s: When each rank is killed.
        numel: Size of the state.
        refused: Whether there is a checkpoint of a newer version.
    """

    root: Path
    memory: Path
    journal: Path
    ranks: int
    per_host: int
    copies: int
    restores: bool
    step: int | None
    kinds: str
    strides: tuple[int, ...]
    first: int
    end: str
    killed_s: tuple[float, ...]
    numel: int
    refused: bool


def state_of(save: Save, numel: int) -> dict[str, Any]:
    rows = torch.arange(numel, dtype=torch.float32).view(-1, 10) * 3 + save.number
    return {"rows": rows, "number": save.number, "step": save.step}


class Raised(Exception):
    """How a training ends that is not well."""


def live(rank: int, world: int, life: Life) -> None:
    """Lives once; everything is noted as soon as it is known."""
    logging.getLogger("fastload").setLevel(logging.CRITICAL)
    if life.end == "killed":
        threading.Timer(life.killed_s[rank], lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    with (life.journal / f"{rank}").open("w", buffering=1) as journal:

        def note(*words: object) -> None:
            journal.write(json.dumps(words) + "\n")

        try:
            _live(life, note)
        except Raised:
            pass
        except FastloadError as error:  # others are killed first
            if life.end != "killed":
                raise
            note("failed", str(error)[:200])
        while life.end == "killed":
            time.sleep(1.0)


def _live(life: Life, note: Any) -> None:
    own = life.memory / socket.gethostname()
    own.mkdir(parents=True, exist_ok=True)
    given = {"memory": own, "memory_every_steps": 1, "memory_copies": life.copies}
    options = SaveOptions(timeout_s=_TIMEOUT_S, block_bytes=1 << 14)
    with CheckpointManager(life.root, options=options, **given) as manager:
        if life.refused:
            for ask in (manager.latest, manager.restore):
                try:
                    raise AssertionError(f"there is one that cannot be read: {ask()}")
                except UnsupportedVersion:
                    note("refused")
            raise Raised
        step = 0
        if life.restores:
            latest = manager.latest()
            try:
                found = manager.restore(step=life.step)
            except CheckpointError as error:
                note("nothing", type(error).__name__, str(error)[:300])
            else:
                save = Save(found["number"], found["step"])
                assert torch.equal(found["rows"], state_of(save, life.numel)["rows"]), "other bytes"
                assert manager.restored_step == save.step
                note("restored", save.number, save.step, manager.restored_from)
                assert latest is not None
                step = save.step
        number, in_background = life.first, list[Save]()
        kinds, strides = list(life.kinds), list(life.strides)
        for index in range(_MOST if life.end == "killed" else len(kinds)):
            kind, step = kinds[index % len(kinds)], step + strides[index % len(strides)]
            save = Save(number + index, step)
            if kind == "m":
                assert manager.should_save(step)
            elif in_background:  # which comes first
                manager.wait()
                note("done", "s", *vars(in_background.pop()).values())
            note("begun", kind, save.number, save.step)
            manager.save(step, state_of(save, life.numel))
            if kind == "b":
                in_background.append(save)
                continue
            if kind == "s":
                manager.wait()
            else:
                tier = manager._tier
                assert tier is not None
                assert tier.last is not None
                tier.wait()
                if tier.last.error:
                    note("failed", tier.last.error[:200])
                    assert life.end == "killed", tier.last.error
                    continue
            note("done", kind, save.number, save.step)
        if life.end == "raised":
            raise Raised
    for save in in_background:
        note("done", "s", save.number, save.step)
    note("ended")


class Lives:
    """Lives after each other, and what happens to root and memory in between.

    Args:
        rng: Draws all of it.
        folder: For everything.
    """

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self._rng = rng
        self._folder = folder
        self._hosts = rng.choice([1, 2, 2, 3])
        self._copies = rng.choice([1, 2, 2, 2])
        self._numel = rng.choice([1000, 1000, 200_000])
        self._number = 1
        self._count = 0
        self._now = Model(folder / "root")
        self._aside: list[Model] = []
        self.log: list[str] = [f"{self._hosts} hosts, {self._copies} copies"]
        self.tally: Counter[str] = Counter()

    def run(self, num_lives: int) -> None:
        """Lives so many times."""
        for _ in range(num_lives):
            refused = self._happens()
            self._live(refused)

    def _happens(self) -> Path | None:
        """Lets something happen to root or memory; returns what was made a checkpoint of a newer version."""
        rng, now = self._rng, self._now
        if rng.random() < 0.25:
            self._damage_storage()
        if rng.random() < 0.15:
            self._lose_host()
        if rng.random() < 0.1:
            self._flip_memory()
        what = rng.choices(
            ["", "deleted", "moved", "begun anew", "copied", "returned to", "newer version"],
            [60, 6, 10, 7, 6, 8, 4],
        )[0]
        place = self._folder / f"root-{self._count}"
        if what == "newer version":
            return self._make_newer()
        if not what or not now.root.exists() or (what == "returned to" and not self._aside):
            return None
        self._tell(what)
        if what == "deleted":
            shutil.rmtree(now.root)
            self._now = Model(now.root)
        elif what == "moved":
            now.root = now.root.rename(place)
        elif what == "begun anew":
            root, now.root = now.root, now.root.rename(place)
            self._aside.append(now)
            self._now = Model(root)
        elif what == "copied":
            shutil.copytree(now.root, place)
            self._aside.append(now)
            self._now = Model(place, copy.deepcopy(now.storage))
        else:
            self._aside.append(now)
            self._now = self._aside.pop(rng.randrange(len(self._aside) - 1))
        return None

    def _tell(self, what: str) -> None:
        self.tally[f"root {what}" if "memory" not in what and "storage" not in what else what] += 1
        self.log.append(what)

    def _damage_storage(self) -> None:
        places = sorted(self._now.root.glob("step_*/model.safetensors"))
        if not places:
            return
        newest = max(places, key=lambda place: place.stat().st_mtime_ns)
        place = self._rng.choice([newest, newest, *places[-3:]])
        how = self._rng.choice(["flipped", "cut", "gone", "record"])
        if how == "flipped":
            flip(place, -1 - self._rng.randrange(3000))
        elif how == "cut":
            os.truncate(place, place.stat().st_size - 1)
        elif how == "gone":
            place.unlink()
        else:
            flip(place.with_name("fastload.json"), self._rng.randrange(100))
        step = int(place.parent.name.removeprefix("step_"))
        self._now.storage.pop(step, None)
        memory = self._now.memory
        if memory.moves and any(save.step == step for save in memory.saves):
            memory.is_sure = False
        self._tell(f"storage: {how}")
        self.log.append(place.parent.name)

    def _models(self) -> list[Model]:
        return [self._now, *self._aside]

    def _hit(self) -> None:
        for model in self._models():
            model.memory.hits += 1
            model.memory.is_sure &= model.memory.hits < min(self._copies, self._hosts)

    def _lose_host(self) -> None:
        host = self._folder / "memory" / f"host{self._rng.randrange(self._hosts)}"
        shutil.rmtree(host, ignore_errors=True)
        self._tell("memory: a host is lost")
        self._hit()

    def _flip_memory(self) -> None:
        host = f"host{self._rng.randrange(self._hosts)}"
        part = self._rng.random()
        for file in sorted((self._folder / "memory" / host).glob("fastload-*/*/*/model.safetensors")):
            flip(file, int(part * file.stat().st_size))
        self._tell("memory: a byte is flipped")
        self._hit()

    def _make_newer(self) -> Path | None:
        """Has a good checkpoint look as a newer version would have written it."""
        steps = sorted(step for step, slot in self._now.storage.items() if slot.is_sure)
        if not steps:
            return None
        step = self._rng.choice(steps)
        record = self._now.root / f"step_{step:08d}" / "fastload.json"
        seal(record, version=3)
        self._tell("storage: a newer version")
        return record.parent

    def _draw(self, *, refused: bool) -> Life:
        rng = self._rng
        self._count += 1
        per_host = rng.choice([1, 1, 2]) if self._hosts < 3 else 1
        ranks = self._hosts * per_host
        end = "raised" if refused else rng.choice(["killed", "killed", "killed", "well", "raised"])
        begins, late = rng.uniform(0.6, 3.0), rng.choice([0.0, 0.0, 0.3])
        known = sorted({save.step for slot in self._now.slots() for save in slot.saves})
        journal = self._folder / f"journal-{self._count}"
        journal.mkdir()
        first, self._number = self._number, self._number + _MOST
        step = rng.choice(known) if known and rng.random() < 0.25 else None
        kinds, strides = (
            rng.choices("msb", [6, 2, 2], k=rng.randint(1, 5)),
            [rng.randint(1, 4) for _ in range(5)],
        )
        ahead = [save.step - step for save in self._now.memory.saves if step is not None and save.step > step]
        if ahead and rng.random() < 0.5:  # a step that memory still has is saved again
            kinds, strides[0], end = ["s"], ahead[0], end if refused else "raised"
        return Life(
            root=self._now.root,
            memory=self._folder / "memory",
            journal=journal,
            ranks=ranks,
            per_host=per_host,
            copies=self._copies,
            restores=rng.random() < 0.9,
            step=step,
            kinds="".join(kinds),
            strides=tuple(strides),
            first=first,
            end=end,
            killed_s=tuple(begins + rng.uniform(0, late) for _ in range(ranks)),
            numel=self._numel,
            refused=refused,
        )

    def _live(self, newer: Path | None) -> None:
        life = self._draw(refused=newer is not None)
        self.log.append(f"{life}")
        dies = dict.fromkeys(range(life.ranks), signal.SIGKILL) if life.end == "killed" else None
        run_ranks(live, life.ranks, dies=dies, ranks_per_host=life.per_host, life=life)
        notes = [_notes(life.journal / f"{rank}") for rank in range(life.ranks)]
        self.log.append(f"{max(notes, key=len)[:6]} …")
        if newer is not None:
            assert all(["refused"] in of_rank for of_rank in notes), notes
            self.tally["a newer version is refused"] += 1
            shutil.rmtree(newer)
            self._now.storage.pop(int(newer.name.removeprefix("step_")))
            return
        self._judge(life, notes)
        self._learn(life, notes)

    def _judge(self, life: Life, notes: list[list[list[Any]]]) -> None:
        """Compares what was restored with what had to be; then the model knows of it."""
        if not life.restores:
            self.tally["begins without a restore"] += 1
            return
        now = self._now
        found = {tuple(line) for of_rank in notes for line in of_rank if line[0] == "restored"}
        nothing = [line for of_rank in notes for line in of_rank if line[0] == "nothing"]
        assert len(found) <= 1, f"ranks have restored different ones: {found}"
        how = "by its step" if life.step is not None else "the newest"
        if found:
            [(_, number, step, source)] = found
            save = Save(number, step)
            allowed = now.allowed(life.step)
            assert save in allowed, f"{save} from {source}, of {sorted(allowed, key=lambda one: one.number)}"
            now.restored(save, source, life.step)
            self.tally[f"{how}: restored from {source}"] += 1
            return
        now.restored(None, "", life.step)
        if life.end == "killed":
            self.tally[f"{how}: killed before it was known"] += 1
            return
        assert nothing, "neither restored nor an error"
        assert not now.must(life.step), f"nothing restored, and {now} has something: {nothing[0]}"
        kind = "damaged" if nothing[0][1] != CheckpointNotFound.__name__ else "there is none"
        self.tally[f"{how}: {kind}"] += 1

    def _learn(self, life: Life, notes: list[list[list[Any]]]) -> None:
        lines = [line for of_rank in notes for line in of_rank]
        begun = {(line[2], line[3]): line[1] for line in lines if line[0] == "begun"}
        done = {(line[2], line[3]) for line in lines if line[0] == "done"}
        for (number, step), kind in sorted(begun.items()):
            save = Save(number, step)
            slot = self._now.memory if kind == "m" else self._now.storage.setdefault(step, Slot())
            (slot.done if (number, step) in done else slot.begin)(save)
        self.tally[f"ends: {life.end}"] += 1
        if life.end == "well":
            self._now.ended_well()


def _notes(path: Path) -> list[list[Any]]:
    if not path.exists():  # killed before it began
        return []
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("]")]
