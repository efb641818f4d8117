"""Checkpoints of very many very small tensors: how much work a load makes of each."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fastload
from fastload.base.memory import uncollected
from fastload.base.threads import Task
from fastload.storage.local import LocalStorage

_FEW, _MANY = 1000, 3000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two states, of a few and of many tensors, each as a plain file and nested, as fastload saves it."""
    folder = tmp_path_factory.mktemp("tiny")
    for count in (_FEW, _MANY):
        values = torch.randn(count, 4).unbind()
        layers = {str(number): {"w": value.clone()} for number, value in enumerate(values)}
        flat = {f"layers.{number}.w": layer["w"] for number, layer in layers.items()}
        safetensors.torch.save_file(flat, folder / f"{count}.safetensors")
        fastload.save({"layers": layers}, folder / f"{count}")
    return folder


@contextmanager
def counting_calls() -> Iterator[Counter[str]]:
    """Counts the calls of fastload's functions and those that they make in C, by the function.

    In this thread and in those it starts. What else happens in the process, at any time, is not counted.
    Threads that wait for work are held meanwhile, since theirs could not be counted.
    """
    go_on = threading.Event()
    for _ in range(threading.active_count()):
        Task(go_on.wait, "held").start()
    counts: Counter[str] = Counter()
    package = str(Path(fastload.__file__).parent)

    def count(frame: Any, event: str, what: Any) -> None:
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(package):
            counts[f"{frame.f_code.co_name} {getattr(what, '__name__', '')}"] += 1

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        yield counts
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        go_on.set()


@pytest.fixture
def buffer_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many buffers each read fills, from now on."""
    counts: list[int] = []
    read_into: Callable[..., None] = LocalStorage.read_into

    def read(
        storage: LocalStorage, name: str, offset: int, buffers: Sequence[memoryview], *rest: str
    ) -> None:
        counts.append(len(buffers))
        read_into(storage, name, offset, buffers, *rest)

    monkeypatch.setattr(LocalStorage, "read_into", read)
    return counts


@pytest.mark.slow(but=[".safetensors"])
@pytest.mark.parametrize("ending", [".safetensors", ""])
def test_reads_and_garbage_collections_do_not_grow_with_their_number(
    folder: Path, buffer_counts: list[int], ending: str
) -> None:
    collections: list[object] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(info)

    gc.collect()
    gc.callbacks.append(note)
    try:
        state = fastload.load(folder / f"{_MANY}{ending}")
    finally:
        gc.callbacks.remove(note)
    assert sum(buffer_counts) < 32
    assert len(collections) < 32
    if not ending:
        state = {f"layers.{number}.w": layer["w"] for number, layer in state["layers"].items()}
    expected = safetensors.torch.load_file(folder / f"{_MANY}.safetensors")
    assert list(map(torch.equal, state.values(), map(expected.get, state))) == [True] * _MANY
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == _MANY


@pytest.mark.slow(but=[".safetensors"])
@pytest.mark.parametrize(("ending", "allowed"), [(".safetensors", 90), ("", 155)])
def test_a_tensor_more_is_a_few_calls_more(folder: Path, ending: str, allowed: int) -> None:
    with counting_calls() as counts:
        fastload.load(folder / f"{_FEW}{ending}")
        of_few = counts.copy()
        fastload.load(folder / f"{_MANY}{ending}")
    more = counts - of_few - of_few
    assert more.total() < allowed * (_MANY - _FEW), more.most_common(30)


def test_the_collector_is_put_off_and_put_back() -> None:
    assert gc.isenabled()
    with uncollected:
        with uncollected:
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected:
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
