"""Directories of torch.distributed.checkpoint: what they say, and that they are not believed."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

import fastload
from fastload.errors import IncompleteCheckpoint, ManifestError
from fastload.ext.formats.joined import nested, tiling_problem
from fastload.formats.decoder import decode_state
from fastload.geometry.box import Box
from tests.e2e.forked import run_forked
from tests.unit.test_pieces import tilings


def state() -> dict[str, Any]:
    generator = torch.manual_seed(3)
    return {
        "w": torch.randn(4, 6, generator=generator),
        "v": torch.randn(4, 6, generator=generator),
        "turned": torch.randn(4, 6, generator=generator).t(),
        "deep": {"list": [{"x": torch.arange(5)}, 7], "step": torch.tensor(3), "pair": (1, "two")},
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp") / "saved"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state(), checkpoint_id=path)
    return path


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def change(folder: Path, edit: Callable[[Metadata], Any]) -> None:
    """Writes other metadata than DCP did."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edited = edit(metadata)
    path.write_bytes(pickle.dumps(metadata if edited is None else edited, protocol=4))


def relocate(name: str, **fields: Any) -> Callable[[Metadata], None]:
    def edit(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == name:
                metadata.storage_data[index] = replace(info, **fields)

    return edit


def with_chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Metadata], None]:
    """Says that the tensor w lies in these boxes."""

    def edit(metadata: Metadata) -> None:
        info = metadata.storage_data.pop(MetadataIndex("w", torch.Size((0, 0))))
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
        metadata.state_dict_metadata["w"].chunks = chunks
        for chunk in chunks:
            metadata.storage_data[MetadataIndex("w", chunk.offsets)] = info

    return edit


def negative(metadata: Metadata) -> None:
    metadata.state_dict_metadata["w"].chunks[0].sizes = (4, -6)  # type: ignore[assignment]


def huge(metadata: Metadata) -> None:
    metadata.state_dict_metadata["w"].size = (1 << 40, 1 << 40)  # type: ignore[assignment]


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def swap(metadata: Metadata) -> None:
    """What is said to be at one place is at the other, and the other way round."""
    data = metadata.storage_data
    one, other = MetadataIndex("deep.step", torch.Size(())), MetadataIndex("deep.list.0.x", torch.Size((0,)))
    data[one], data[other] = data[other], data[one]


BAD: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "above": (relocate("w", relative_path="../x.distcp"), "not a plain name"),
    "absolute": (relocate("w", relative_path="/etc/passwd"), "not a plain name"),
    "below": (relocate("w", relative_path="a/b.distcp"), "not a plain name"),
    "not there": (relocate("w", relative_path="__7_0.distcp"), "missing"),
    "no text": (relocate("w", relative_path=5), "is said to lie at"),
    "before": (relocate("w", offset=-1), "is said to lie at"),
    "behind": (relocate("w", offset=1 << 62), "cut off"),
    "too long": (relocate("w", length=1 << 62), "cut off"),
    "no number": (relocate("w", length="9"), "is said to lie at"),
    "too short": (relocate("v", length=700), "zip archive"),
    "in another": (relocate("w", offset=3), "overlap"),
    "transformed": (relocate("w", transform_descriptors=["stream.zstd/1"]), "stream.zstd/1"),
    "hole": (with_chunks(((0, 0), (3, 6))), "18 of 24 elements"),
    "twice": (with_chunks(((0, 0), (4, 6)), ((1, 1), (1, 1))), "overlap"),
    "the same one twice": (with_chunks(((0, 0), (4, 6)), ((0, 0), (4, 6))), "listed twice"),
    "outside": (with_chunks(((0, 1), (4, 6))), "out of bounds for a tensor of shape"),
    "other shape": (with_chunks(((0, 0), (4, 3)), ((0, 3), (4, 3))), "overlap"),
    "negative": (negative, "in place of sizes"),
    "huge": (huge, "24 of"),
    "swapped": (swap, "where a tensor of"),
    "lost": (
        lambda metadata: metadata.storage_data.pop(MetadataIndex("w", torch.Size((0, 0)))) and None,
        "'w'",
    ),
    "no dict": (lambda metadata: replace(metadata, storage_data=[1]), "storage_data"),
    "no metadata": (lambda metadata: {"state_dict_metadata": {}}, "Metadata"),
    "path": (lambda metadata: metadata.planner_data.update(w=("v",)), "not its own"),
    "path below": (lambda metadata: metadata.planner_data.update(v=("w", "x")), "below"),
    "list": (lambda metadata: metadata.planner_data.update(w=("list", 1 << 40)), "a list of"),
    "mixed": (lambda metadata: metadata.planner_data.update(w=("deep", 1)), "texts and numbers"),
    "no path": (lambda metadata: metadata.planner_data.update(w=5), "keys of 'w'"),
}


@pytest.mark.parametrize("what", BAD)
def test_metadata_that_contradict_themselves_or_the_files(folder: Path, what: str) -> None:
    edit, why = BAD[what]
    change(folder, edit)
    with pytest.raises(IncompleteCheckpoint if what == "not there" else ManifestError, match=why) as caught:
        fastload.inspect(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("args", "says"),
    [(b"K\x04\x94\x85\x94K\x040", "in place of sizes"), (b"K\x04\x94\x94N0N0", "must be a tuple")],
)
def test_sizes_of_something_that_is_no_tuple(folder: Path, args: bytes, says: str) -> None:
    change(folder, lambda metadata: None)
    good = (folder / ".metadata").read_bytes()
    bad = good.replace(b"K\x04K\x06\x86\x94\x85\x94R", args + b"R")  # torch.Size(4)
    assert bad != good
    (folder / ".metadata").write_bytes(bad)
    with pytest.raises(ManifestError, match=says):
        fastload.inspect(folder)


def test_nothing_in_the_metadata_runs(folder: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    good = (folder / ".metadata").read_bytes()
    for place in ("planner_data", "storage_data", "state_dict_metadata", "storage_meta"):
        (folder / ".metadata").write_bytes(good)
        change(folder, lambda metadata, place=place: replace(metadata, **{place: Canary(canary)}))
        if place in ("planner_data", "storage_meta"):  # without which all is there
            fastload.inspect(folder)
        else:
            with pytest.raises(ManifestError, match=place):
                fastload.inspect(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Canary(canary)))
    with pytest.raises(ManifestError, match="Metadata"):
        fastload.inspect(folder)
    assert not canary.exists()


def test_megatron_directories(tmp_path: Path) -> None:
    """As `megatron.core.dist_checkpointing` lays them out: what ranks share beside what DCP saves."""
    sharded = {"decoder.layers.weight": torch.randn(2, 3, 4), "decoder.bias": torch.ones(3)}
    objects = {"rng_state/shard_0_1": {"seed": 7, "cuda": torch.arange(4)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
        dcp.save({**sharded, **objects}, checkpoint_id=tmp_path / "m", planner=planner)
    common = {"iteration": 9, "args": {"lr": 0.5}, "scale": torch.tensor(3.0)}
    torch.save(common, tmp_path / "m" / "common.pt")
    (tmp_path / "m" / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "common_backend": "torch"}'
    )
    found = fastload.load(tmp_path / "m")
    assert found.keys() == {*common, *objects, *sharded}
    assert (found["iteration"], found["args"], found["scale"]) == (9, {"lr": 0.5}, torch.tensor(3.0))
    assert all(torch.equal(found[name], tensor) for name, tensor in sharded.items())
    assert found["rng_state/shard_0_1"]["seed"] == 7
    assert torch.equal(found["rng_state/shard_0_1"]["cuda"], torch.arange(4))


def test_files_that_are_cut_off(folder: Path) -> None:
    for name in ("__0_0.distcp", ".metadata"):
        data = (folder / name).read_bytes()
        for length in (0, 1, len(data) // 2, len(data) - 1):
            (folder / name).write_bytes(data[:length])
            with pytest.raises(ManifestError, match=name):
                fastload.inspect(folder)
        (folder / name).write_bytes(data)
    fastload.inspect(folder)


def test_a_link_to_something_else(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    (folder / "__0_0.distcp").symlink_to("/etc/hostname")
    with pytest.raises(ManifestError, match="cut off"):
        fastload.inspect(folder)


def test_directories_of_items_that_lie(folder: Path, saved: Path) -> None:
    path = folder / "__0_0.distcp"
    good = path.read_bytes()
    expected = fastload.load(saved)
    for place in range(good.index(b"PK\1\2"), len(good)):
        if good.startswith((b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7"), place):
            data = bytearray(good)
            data[place + 16 : place + 28] = b"\xff" * 12
            path.write_bytes(data)
            try:
                found = fastload.load(folder)
            except fastload.FastloadError:
                continue
            assert torch.equal(found["w"], expected["w"])
            assert torch.equal(found["turned"], expected["turned"])


@pytest.mark.slow
def test_mutated_directories_are_refused_or_read_right() -> None:
    script = Path(__file__).parents[2] / "scripts" / "fuzz_folders.py"
    words = [str(script), "--count", "120"]
    done = run_forked(words, cwd=script.parent, env=os.environ, timeout=100)
    assert done.returncode == 0, done.stderr
    assert " refused" in done.stdout


@given(st.lists(st.integers(1, 5), max_size=3).map(tuple), st.data())
@settings(deadline=None)
def test_boxes_make_up_a_tensor_or_do_not(shape: tuple[int, ...], data: st.DataObject) -> None:
    boxes = data.draw(tilings(Box.whole(shape)).flatmap(st.permutations))
    assert tiling_problem(boxes, shape) == ""
    assert tiling_problem(boxes[1:], shape) != ""
    assert "overlap" in tiling_problem([*boxes, boxes[0]], shape)


def test_very_many_boxes_are_told_apart_in_time() -> None:
    rows = [Box((row, 0), (1, 8)) for row in range(20_000)]
    assert tiling_problem(rows, (20_000, 8)) == ""
    grid = [Box((row, column), (1, 1)) for row in range(300) for column in range(300)]
    assert tiling_problem(grid, (300, 300)) == ""
    nested_boxes = [Box((row, 0), (20_000 - row, 1)) for row in range(20_000)]
    assert tiling_problem(nested_boxes, (20_000, 1)) != ""


def test_a_state_is_nested_again() -> None:
    paths: dict[str, tuple[str | int, ...]] = {
        "a.b": ("a", "b"),
        "a.0": ("a", "0"),
        "l.2": ("l", 2),
        "l.0": ("l", 0),
        "o.state.1.x": ("o", "state", "1", "x"),
        "o.param_groups.0.params": ("o", "param_groups", 0, "params"),
    }
    nodes = {
        "a.b": 1,
        "a.0": 2,
        "l.2": 3,
        "l.0": 4,
        "o.state.1.x": 5,
        "o.param_groups.0.params": [1],
        "free.x": 6,
    }
    assert decode_state(nested(nodes, paths, "x"), {}) == {
        "a": {"b": 1, "0": 2},
        "l": [4, None, 3],
        "o": {"state": {1: {"x": 5}}, "param_groups": [{"params": [1]}]},
        "free.x": 6,
    }
