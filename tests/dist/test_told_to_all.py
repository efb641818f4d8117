"""What is the caller's own fails on one rank, before or between the steps: all ranks hear it at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import fastload
from fastload.comm import observers
from fastload.errors import UnsupportedVersion
from fastload.integrations import torch_checkpointing
from tests.dist.harness import ranks

_TIMEOUT_S = 20  # a rank that is waited for would be reported with other words, after most of this time
_MINE = "no room at the inn"


class Mine(Exception):
    """An error of the caller's own code."""


def refuse(*_: Any) -> NoReturn:
    raise Mine(_MINE)


class BadPath(os.PathLike[str]):
    """A path that refuses its text."""

    def __fspath__(self) -> str:
        refuse()

    __str__ = __repr__ = __fspath__


class BadState:
    """Something with a state that cannot be taken."""

    @property
    def state_dict(self) -> Any:
        refuse()

    def load_state_dict(self, state: Any) -> None:
        refuse()


def hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_state_dict_post_hook(refuse)
    return module


@dataclass
class Place:
    """Where a case runs.

    Attributes:
        root: A directory that all ranks share, with the checkpoints ``saved`` and ``plain.safetensors``.
        here: A directory for what this case makes.
        bad: Whether this rank is the one that fails.
    """

    root: Path
    here: Path
    bad: bool

    @property
    def saved(self) -> Path:
        return self.root / "saved"

    def options(self, kind: Any, **fields: Any) -> Any:
        """Returns options; on the bad rank a dict."""
        return {"timeout_s": _TIMEOUT_S} if self.bad else kind(**fields)

    def path(self, name: str | Path) -> Any:
        return BadPath() if self.bad else self.here / name

    def listener(self, kind: Any, name: str = "on_report") -> Any:
        return kind(**{name: refuse if self.bad else None})

    @contextmanager
    def manager(self, **given: Any) -> Iterator[fastload.CheckpointManager]:
        manager = fastload.CheckpointManager(self.here / "run", every_steps=1, **given)
        try:
            yield manager
        finally:
            with suppress(fastload.FastloadError):  # told before
                manager.close()


STATE = {"w": torch.arange(64.0)}


def state(place: Place) -> Any:
    return {**STATE, "own": BadState() if place.bad else nn.Linear(2, 2)}


def hooked_state(place: Place) -> Any:
    return {**STATE, "own": hooked() if place.bad else nn.Linear(2, 2)}


Case = Callable[[Place], Any]
CASES: dict[str, tuple[Case, str]] = {}
"""Name → what all ranks call, and the words of the cause."""


def case(words: str) -> Callable[[Case], Case]:
    def add(body: Case) -> Case:
        CASES[body.__name__] = body, words
        return body

    return add


def each(words: str, calls: dict[str, Case]) -> None:
    CASES.update({name: (body, words) for name, body in calls.items()})


_LOADS: dict[str, Callable[..., Any]] = {
    "load": fastload.load,
    "open": lambda *given, **named: fastload.open(*given, **named).close(),
    "prefetch": lambda *given, **named: fastload.prefetch(*given, **named).close(),
    "verify": fastload.verify,
}
each(
    "options= is a dict",
    {
        **{
            f"{name}: options": lambda p, call=call: call(p.saved, options=p.options(fastload.LoadOptions))
            for name, call in _LOADS.items()
        },
        "seal: options": lambda p: fastload.seal(
            p.root / "plain.safetensors", options=p.options(fastload.LoadOptions)
        ),
        "save: options": lambda p: fastload.save(
            STATE, p.here / "a", options=p.options(fastload.SaveOptions)
        ),
        "async_save: options": lambda p: fastload.async_save(
            STATE, p.here / "a", options=p.options(fastload.SaveOptions)
        ).wait(),
        "save_stream: options": lambda p: fastload.save_stream(
            iter(STATE.items()), p.here / "a", spool=p.root, options=p.options(fastload.SaveOptions)
        ),
        "stage: options": lambda p: fastload.stage(
            p.saved, p.here / "a", options=p.options(fastload.StageOptions)
        ),
        "redistribute: options": lambda p: fastload.redistribute(
            STATE, {"w": torch.zeros(64)}, options=p.options(fastload.LoadOptions)
        ),
        "watch: options": lambda p: fastload.watch(p.here, options=p.options(fastload.LoadOptions)),
        "manager: options": lambda p: fastload.CheckpointManager(
            p.here, options=p.options(fastload.SaveOptions)
        ),
        "torch_checkpointing: options": lambda p: torch_checkpointing.CheckpointManager(
            sync=True, save_options=p.options(fastload.SaveOptions)
        ).save(str(p.here / "a"), STATE),
    },
)
each(
    _MINE,
    {
        **{f"{name}: path": lambda p, call=call: call(p.path(p.saved)) for name, call in _LOADS.items()},
        "seal: path": lambda p: fastload.seal(p.path(p.root / "plain.safetensors")),
        "save: path": lambda p: fastload.save(STATE, p.path("a")),
        "async_save: path": lambda p: fastload.async_save(STATE, p.path("a")).wait(),
        "save_stream: path": lambda p: fastload.save_stream(
            iter(STATE.items()), p.path("a"), spool=p.root
        ),
        "save_stream: spool": lambda p: fastload.save_stream(
            iter(STATE.items()), p.here / "a", spool=BadPath() if p.bad else p.root
        ),
        "stage: source": lambda p: fastload.stage(p.path(p.saved), p.here / "a"),
        "stage: target": lambda p: fastload.stage(p.saved, p.path("a")),
        "watch: path": lambda p: fastload.watch(p.path("a")),
        "manager: path": lambda p: fastload.CheckpointManager(p.path("a")),
        "manager: memory": lambda p: fastload.CheckpointManager(
            p.here, memory=p.path("b"), memory_every_steps=1
        ),
    },
)  # fmt: skip
each(
    "FASTLOAD_RETRIES='many'",
    {
        "load: environment": lambda p: fastload.load(p.saved),
        "save: environment": lambda p: fastload.save(STATE, p.here / "a"),
        "save_stream: environment": lambda p: fastload.save_stream(
            iter(STATE.items()), p.here / "a", spool=p.root
        ),
        "stage: environment": lambda p: fastload.stage(p.saved, p.here / "a"),
        "redistribute: environment": lambda p: fastload.redistribute(STATE, {"w": torch.zeros(64)}),
        "watch: environment": lambda p: fastload.watch(p.here),
        "manager: environment": lambda p: fastload.CheckpointManager(p.here),
        "agree: environment": lambda p: fastload.world.agree("counting", lambda: 1),
        "hosts: environment": lambda p: fastload.world.get_hosts(),
    },
)
each(
    "strategy='fastest': must be",
    {"manager: environment of loads": lambda p: fastload.CheckpointManager(p.here)},
)
each(
    "working directory does not exist",
    {
        "load: no directory": lambda p: fastload.load("saved" if p.bad else p.saved),
        "save: no directory": lambda p: fastload.save(STATE, "a" if p.bad else p.here / "a"),
        "manager: no directory": lambda p: fastload.CheckpointManager("a" if p.bad else p.here / "a"),
    },
)


def saves_in_run(place: Place, make: Callable[[Place], Any], **given: Any) -> None:
    with place.manager(**given) as manager:
        manager.save(1, make(place))
        manager.wait()


def restores(place: Place, **arguments: Any) -> None:
    with place.manager() as manager:
        manager.save(1, STATE)
        manager.restore(**arguments)


each(
    _MINE,
    {
        "save: state": lambda p: fastload.save(state(p), p.here / "a"),
        "save: hook": lambda p: fastload.save(hooked_state(p), p.here / "a"),
        "async_save: state": lambda p: fastload.async_save(state(p), p.here / "a").wait(),
        "async_save: hook": lambda p: fastload.async_save(hooked_state(p), p.here / "a").wait(),
        "redistribute: state": lambda p: fastload.redistribute(state(p), {"w": torch.zeros(64)}),
        "load: into": lambda p: fastload.load(p.saved, into=state(p), strict=False),
        "manager.save: state": lambda p: saves_in_run(p, state),
        "manager.save: state, at once": lambda p: saves_in_run(p, state, async_=False),
        "manager.save: state, two copies": lambda p: saves_in_run(p, state, max_pending_saves=2),
        "save_stream: iterator": lambda p: fastload.save_stream(
            map(refuse, [0]) if p.bad else iter(STATE.items()), p.here / "a", spool=p.root
        ),
        "agree: function": lambda p: fastload.world.agree("counting", refuse if p.bad else lambda: 1),
        "agree: first of two": lambda p: fastload.world.agree(
            "counting", refuse if p.bad else object, lambda: 1
        ),
        "load: on_report": lambda p: fastload.load(p.saved, options=p.listener(fastload.LoadOptions)),
        "load: progress": lambda p: fastload.load(
            p.saved, options=p.listener(fastload.LoadOptions, "progress")
        ),
        "save: on_report": lambda p: fastload.save(
            STATE, p.here / "a", options=p.listener(fastload.SaveOptions)
        ),
        "save: progress": lambda p: fastload.save(
            {"w": torch.ones(40 << 20, dtype=torch.uint8)},  # both ranks write
            p.here / "a",
            options=fastload.SaveOptions(writers="all", progress=refuse if p.bad else None),
        ),
        "async_save: on_report": lambda p: fastload.async_save(
            STATE, p.here / "a", options=p.listener(fastload.SaveOptions)
        ).wait(),
        "save_stream: on_report": lambda p: fastload.save_stream(
            iter(STATE.items()), p.here / "a", spool=p.root, options=p.listener(fastload.SaveOptions)
        ),
        "stage: on_report": lambda p: fastload.stage(
            p.saved, p.here / "a", options=p.listener(fastload.StageOptions)
        ),
        "stage of a delta: on_report": lambda p: fastload.stage(
            p.root / "delta", p.here / "a", options=p.listener(fastload.StageOptions)
        ),
        "redistribute: on_report": lambda p: fastload.redistribute(
            STATE, {"w": torch.zeros(64)}, options=p.listener(fastload.LoadOptions)
        ),
        "manager.save: on_report": lambda p: saves_in_run(
            p, lambda p: STATE, options=p.listener(fastload.SaveOptions)
        ),
        "manager.save: on_report, at once": lambda p: saves_in_run(
            p, lambda p: STATE, async_=False, options=p.listener(fastload.SaveOptions)
        ),
        "manager.restore: on_report": lambda p: restores(p, options=p.listener(fastload.LoadOptions)),
    },
)  # fmt: skip
each(
    "options= is a dict",
    {
        "manager.restore: options": lambda p: restores(p, options=p.options(fastload.LoadOptions)),
        "restore from memory: options": lambda p: restores_from_memory(p),
    },
)


def restores_from_memory(place: Place) -> None:
    memory = place.here / "memory"
    memory.mkdir(mode=0o700, exist_ok=True)
    with place.manager(memory=memory, memory_every_steps=1) as manager:
        assert manager.should_save(1)
        manager.save(1, STATE)
        manager.restore(options=place.options(fastload.LoadOptions))


@case("options= is a dict")
def prefetches_in_run(place: Place) -> None:
    with place.manager() as manager:
        manager.save(1, STATE)
        manager.prefetch(options=place.options(fastload.LoadOptions))


@case("step='one'")
def restores_no_step(place: Place) -> None:
    restores(place, step="one" if place.bad else 1)


@case("unexpected keyword argument 'stirct'")
def restores_with_an_argument_that_is_none(place: Place) -> None:
    restores(place, **({"stirct": True} if place.bad else {"strict": True}))


@case("step='one'")
def saves_no_step(place: Place) -> None:
    with place.manager() as manager:
        manager.should_save(1)
        manager.save("one" if place.bad else 1, STATE)  # type: ignore[arg-type]
        manager.wait()


@case("step=None")
def saves_no_step_with_two_copies(place: Place) -> None:
    with place.manager(max_pending_saves=2) as manager:
        manager.save(1, STATE)
        manager.save(None if place.bad else 2, STATE)  # type: ignore[arg-type]
        manager.wait()


@case("step=-1")
def saves_no_step_at_once(place: Place) -> None:
    with place.manager(async_=False) as manager:
        manager.save(-1 if place.bad else 1, STATE)


@case("returned a value that is not JSON")
def agrees_on_what_is_no_json(place: Place) -> None:
    fastload.world.agree("counting", lambda: {1, 2} if place.bad else 1)


@case("timeout_s=-1: must be")
def agrees_with_a_bad_timeout(place: Place) -> None:
    fastload.world.agree("counting", lambda: 1, timeout_s=-1 if place.bad else None)


@case("there is no function to call")
def agrees_on_nothing(place: Place) -> None:
    fastload.world.agree("counting", *([] if place.bad else [lambda: 1]))


@case("metadata=")
def saves_metadata_that_is_no_text(place: Place) -> None:
    metadata: Any = {"who": object()} if place.bad else {"who": "me"}
    fastload.save(STATE, place.here / "a", metadata=metadata)


@case("no such tensor")
def streams_names_that_are_none(place: Place) -> None:
    with fastload.open(place.saved) as checkpoint:
        list(checkpoint.tensors(refusing_names() if place.bad else ["w"]))


def refusing_names() -> Any:
    class Names(list[str]):
        def __iter__(self) -> Any:
            raise Mine("no such tensor")

    return Names(["w"])


@case("no such tensor")
def reads_boxes_that_are_none(place: Place) -> None:
    class Boxes(dict[str, Any]):
        def items(self) -> Any:
            raise Mine("no such tensor")

    with fastload.open(place.saved) as checkpoint:
        checkpoint.read(Boxes() if place.bad else {})


@contextmanager
def installation(place: Place) -> Iterator[None]:
    """On the bad rank, one without the extensions."""
    with pytest.MonkeyPatch.context() as patch:
        if place.bad:
            patch.setattr("fastload.ext.EXTENSIONS", {})
            patch.setitem(sys.modules, "fastload.ext.prefetch", None)
            patch.setitem(sys.modules, "fastload.ext.streams.tensors", None)
        yield


@case("needs the layer 'delta'")
def loads_what_needs_a_layer(place: Place) -> None:
    with installation(place):
        fastload.load(place.root / "delta")


@case("fastload.ext.prefetch")
def prefetches_without_that(place: Place) -> None:
    with installation(place):
        fastload.prefetch(place.saved).close()


@case("fastload.ext.streams")
def streams_without_that(place: Place) -> None:
    with installation(place), fastload.open(place.saved) as checkpoint:
        list(checkpoint.tensors())


def _observed(call: Callable[[Place], Any]) -> Case:
    def run(place: Place) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(observers, "_registered", [refuse] if place.bad else [])
            call(place)

    return run


each(
    _MINE,
    {
        "load: an observer": _observed(lambda place: fastload.load(place.saved)),
        "save: an observer": _observed(lambda place: fastload.save(STATE, place.here / "a")),
        "async_save: an observer": _observed(
            lambda place: fastload.async_save(STATE, place.here / "a").wait()
        ),
    },
)


@contextmanager
def surroundings(name: str, place: Place) -> Iterator[None]:
    """Gives the bad rank the environment and working directory of a case."""
    before = os.getcwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTLOAD_TIMEOUT_S", str(_TIMEOUT_S))
        if place.bad and name.endswith("environment of loads"):
            patch.setenv("FASTLOAD_STRATEGY", "fastest")
        elif place.bad and name.endswith("environment"):
            patch.setenv("FASTLOAD_RETRIES", "many")
        if place.bad and name.endswith("no directory"):
            gone = place.here / "gone"
            gone.mkdir()
            os.chdir(gone)
            gone.rmdir()
        try:
            yield
        finally:
            os.chdir(before)


def problem_of(name: str, place: Place, victim: int) -> str:
    """Runs a case; returns what is wrong with its outcome on this rank, or nothing."""
    call, words = CASES[name]
    with surroundings(name, place):
        try:
            call(place)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            is_good = words in text and (is_own(error, place) or is_told(error, victim))
        else:
            text, is_good = "returned", False
    return "" if is_good else f"{name}, rank {victim} fails: {text}"


def is_told(error: Exception, victim: int) -> bool:
    """Whether an error names the rank that failed, and no other."""
    is_named = f"rank {victim}" in str(error)
    return isinstance(error, fastload.PeerError) and error.failures.keys() == {victim} and is_named


def is_own(error: Exception, place: Place) -> bool:
    """Whether a rank has its own error, which a save in the background raises before the ranks meet.

    One about the checkpoint is that of all ranks.
    """
    return (place.bad and isinstance(error, Mine | fastload.OptionError)) or isinstance(
        error, UnsupportedVersion
    )


@pytest.mark.slow
@ranks(2, deadline_s=300)
@pytest.mark.parametrize("victim", [0, 1])
def test_what_fails_on_one_rank_is_told_to_all_at_once(
    rank: int, world: int, tmp_path: Path, victim: int
) -> None:
    torch.manual_seed(0)
    fastload.save({**STATE, "own": nn.Linear(2, 2)}, tmp_path / "saved")
    delta = fastload.SaveOptions(base=tmp_path / "saved")
    fastload.save({**STATE, "own": nn.Linear(2, 2)}, tmp_path / "delta", options=delta)
    if rank == 0:
        (tmp_path / "plain.safetensors").write_bytes((tmp_path / "saved/model.safetensors").read_bytes())
    found = []
    for number, name in enumerate(CASES):
        here = tmp_path / str(number)
        here.mkdir(exist_ok=True)
        found.append(problem_of(name, Place(tmp_path, here, rank == victim), victim))
        fastload.world.agree("the next case", lambda: None)  # which all ranks reach in step
    assert not any(found), "\n".join(filter(None, found))
