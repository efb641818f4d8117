"""The command line as a user runs it: alone, and under torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from fastload.formats.state import state_digest
from tests.checkpoints import flip, load_reference, record_by_hand, write_file, write_sharded
from tests.e2e.forked import forking_python, forking_variables, run_forked

ROOT = Path(__file__).resolve().parents[2]
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # what is for a terminal; tab and newline are text

pytestmark = pytest.mark.timeout(120)


def environ(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FASTLOAD_")}
    return kept | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | variables


def run(*arguments: str, ranks: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_forked(
        ["-m", "fastload", *arguments], ranks=ranks, cwd=ROOT, env=environ(**variables), timeout=100
    )


def torchrun(*arguments: str, ranks: int) -> subprocess.CompletedProcess[str]:
    """The same under torchrun itself, which takes longer."""
    launcher = [forking_python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*launcher, "-m", "fastload", *arguments],
        cwd=ROOT,
        env=environ(**forking_variables()),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    shards = {
        "a.safetensors": [("layers.0.weight", "F32", (300, 7)), ("layers.0.bias", "BF16", (300,))],
        "b.safetensors": [("layers.1.weight", "F32", (301, 7)), ("step", "I64", ())],
    }
    write_sharded(folder, shards, index=True)
    return folder


def test_a_trace_that_cannot_be_written(checkpoint: Path) -> None:
    nowhere = run("load", str(checkpoint), "--trace", str(checkpoint / "no" / "t.json"))
    assert (nowhere.returncode, nowhere.stdout) == (1, ""), "it is told before the data move"
    assert nowhere.stderr == (
        f"fastload: StorageError: {checkpoint}/no/t.json: it cannot be written: No such file or directory\n"
    )
    full = run("load", str(checkpoint), "--trace", "/dev/full")
    assert full.returncode == 1
    assert "4 tensors" in full.stdout
    assert "fastload: StorageError: /dev/full: No space left on device\n" in full.stderr
    told = run("load", str(checkpoint), "--trace", "/dev/full", "--json")
    assert told.returncode == 1
    report = one_object(told.stdout)
    assert (report["num_tensors"], report["error"]["type"]) == (4, "StorageError")
    done = run("load", str(checkpoint), "--trace", str(checkpoint / "t.json"))
    assert done.returncode == 0, done.stderr
    assert json.loads((checkpoint / "t.json").read_text())


def one_object(text: str) -> dict[str, Any]:
    assert len(text.splitlines()) == 1
    value = json.loads(text)
    assert isinstance(value, dict)
    return value


@pytest.mark.slow(but=["2-broadcast"])
@pytest.mark.parametrize(("ranks", "strategy"), [(3, "allgather"), (2, "broadcast")])
def test_load_on_ranks(checkpoint: Path, ranks: int, strategy: str) -> None:
    done = run("load", str(checkpoint), "--json", "--digest", "--strategy", strategy, ranks=ranks)
    assert done.returncode == 0, done.stderr
    report = one_object(done.stdout)
    reference = load_reference(checkpoint)
    assert report["digests"] == [state_digest(reference)] * ranks
    assert report["strategy"] == strategy
    assert report["bytes_read"] == report["bytes_wanted"] == sum(t.nbytes for t in reference.values())
    assert [rank["rank"] for rank in report["ranks"]] == list(range(ranks))
    assert report["read_amplification"] == 1.0
    assert not CONTROL.search(done.stderr)
    assert "Traceback" not in done.stderr


def test_load_alone_for_people_to_read(checkpoint: Path) -> None:
    done = run("load", str(checkpoint), "--names", "layers.*", "--names", "step", "--digest")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert not CONTROL.search(done.stdout), "no colours and no bar where nobody looks"
    assert f"{checkpoint}: 4 tensors" in done.stdout
    assert "direct: one rank: nothing to exchange" in done.stdout
    assert f"digest of rank 0: {state_digest(load_reference(checkpoint))}" in done.stdout


def test_names_load_a_part(checkpoint: Path) -> None:
    done = run("load", str(checkpoint), "--json", "--digest", "--names", "*.bias")
    report = one_object(done.stdout)
    bias = {"layers.0.bias": load_reference(checkpoint)["layers.0.bias"]}
    assert (report["num_tensors"], report["bytes_read"]) == (1, 600)
    assert report["digests"] == [state_digest(bias)]
    wrong = run("load", str(checkpoint), "--json", "--names", "bias")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("fastload: MismatchError: ")
    assert "missing in the checkpoint: bias" in wrong.stderr
    told = one_object(wrong.stdout)["error"]
    assert f"fastload: {told['type']}: {told['message']}\n" == wrong.stderr


def test_an_error_under_torchrun_is_told_once(tmp_path: Path) -> None:
    done = torchrun("load", str(tmp_path / "nothing"), "--json", ranks=2)
    assert done.returncode != 0
    assert one_object(done.stdout)["error"]["type"] == "CheckpointNotFound"
    assert done.stderr.count("fastload: CheckpointNotFound: ") == 1
    assert f"{tmp_path / 'nothing'}: no such checkpoint" in done.stderr
    assert "fastload/api.py" not in done.stderr, "a user's mistake needs no traceback"


def test_a_path_that_is_nearly_right(tmp_path: Path) -> None:
    """A run in place of a checkpoint, a checkpoint in place of a run, and a typing error."""
    for step in (8, 40):
        fastload.save({"a": torch.ones(2)}, tmp_path / "run" / f"step_{step:08d}")
    (tmp_path / "run" / "step_00000050").mkdir()
    path = str(tmp_path / "run")
    for command in ("inspect", "verify", "load"):
        done = run(command, path)
        told = "this is a run: name a checkpoint in it, such as step_00000040; fastload ls lists them"
        assert done.stderr == f"fastload: CheckpointNotFound: {path}: {told}\n"
    done = run("ls", f"{path}/step_00000040")
    assert "this is a checkpoint, not a run: fastload inspect shows it" in done.stderr
    with pytest.raises(fastload.CheckpointNotFound, match=r"; did you mean step_00000040\b"):
        fastload.load(f"{path}/step_0000040")
    with pytest.raises(fastload.CheckpointNotFound, match=r"no such checkpoint on \S+$"):
        fastload.load(f"{path}/other")


def test_errors_alone(tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"junk" * 10)
    for command in ("load", "inspect"):
        done = run(command, str(bad))
        assert (done.returncode, done.stdout) == (1, "")
        assert len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith(f"fastload: ManifestError: {bad}: ")
    variable = run("load", str(bad), FASTLOAD_STRATEGY="fast")
    assert variable.returncode == 2
    assert variable.stderr.startswith("fastload: OptionError: strategy='fast'")
    usage = run("load", str(bad), "--strategy", "fast")
    assert usage.returncode == 2
    assert "'fast' is not one of" in usage.stderr


def test_inspect_as_json(checkpoint: Path) -> None:
    done = run("inspect", str(checkpoint), "--json")
    assert done.returncode == 0, done.stderr
    shown = one_object(done.stdout)
    manifest = fastload.inspect(checkpoint)
    assert shown["url"] == str(checkpoint)
    assert shown["nbytes"] == manifest.nbytes
    assert [file["name"] for file in shown["files"]] == ["a.safetensors", "b.safetensors"]
    assert {tensor["name"]: tensor["nbytes"] for tensor in shown["tensors"]} == {
        "layers.0.weight": 8400, "layers.0.bias": 600, "layers.1.weight": 8428, "step": 8,
    }  # fmt: skip
    first = shown["tensors"][0]
    assert (first["dtype"], first["shape"], first["file"]) == ("F32", [300, 7], "a.safetensors")


def test_inspect_shows_names_as_they_are(tmp_path: Path) -> None:
    names = ["x[/bold]", "a[red]b", ":smile:", "w" * 150, "esc\x1b[31mred", "ünï", "new\nline"]
    path = tmp_path / "m[bold].safetensors"
    write_file(path, [(name, "F32", (2, 3)) for name in names])
    done = run("inspect", str(path))
    assert done.returncode == 0, done.stderr
    for name in names:
        shown = name if name.isprintable() else repr(name)
        row = next(line for line in done.stdout.splitlines() if shown in line)
        assert "[2, 3]" in row
        assert path.name not in row, "which is what was asked for, and the same in all rows"
    assert not CONTROL.search(done.stdout)
    assert "F32: 7 tensors, 168 bytes" in done.stdout
    loaded = run("load", str(path))
    assert loaded.returncode == 0, loaded.stderr
    assert f"{path}: 7 tensors" in loaded.stdout


@pytest.mark.parametrize("ranks", [0, 2])
def test_verify(checkpoint: Path, ranks: int) -> None:
    record_by_hand(checkpoint, 1000)
    done = run("verify", str(checkpoint), "--json", ranks=ranks)
    assert done.returncode == 0, done.stderr
    report = one_object(done.stdout)
    assert (report["num_files"], report["num_blocks"]) == (2, 9 + 1 + 9 + 1)
    assert report["bytes_verified"] == report["nbytes"] == 8400 + 600 + 8428 + 8
    assert len(report["ranks"]) == max(1, ranks)
    flip(checkpoint / "b.safetensors", -1)
    flip(checkpoint / "a.safetensors", -1)
    bad = run("verify", str(checkpoint), ranks=ranks)
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.count(f"fastload: ChecksumError: {checkpoint}: 2 of 20 blocks are damaged:") == 1
    for file, number, tensor in (("a", 9, "layers.0.bias"), ("b", 9, "step")):
        assert f"{checkpoint}/{file}.safetensors: block {number} [bytes " in bad.stderr
        assert f"of tensor '{tensor}'" in bad.stderr


def test_verify_for_people_to_read(checkpoint: Path) -> None:
    none = run("verify", str(checkpoint))
    assert (none.returncode, none.stdout) == (1, "")
    assert none.stderr.startswith("fastload: CheckpointError: ")
    done = run("seal", str(checkpoint))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{checkpoint}: sealed: 4 blocks, 17.4 kB in 2 files" in done.stdout
    record_by_hand(checkpoint, 1000)
    done = run("verify", str(checkpoint))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{checkpoint}: intact: 20 blocks, 17.4 kB in 2 files" in done.stdout
    loaded = run("load", str(checkpoint))
    assert "verified: 17.4 kB" in loaded.stdout


def test_version_and_help() -> None:
    assert run("--version").stdout.strip().endswith(fastload.__version__)
    helped = run("-h").stdout
    assert "inspect" in helped
    assert "load" in helped


@pytest.mark.slow(but=["fsdp"])
@pytest.mark.parametrize(
    ("mesh", "placements", "dim", "num_parts"),
    [("3", "shard(0)", 0, 3), ("2x2", "replicate,shard(1)", 1, 2)],
    ids=["fsdp", "tp"],
)
def test_load_on_a_mesh(checkpoint: Path, mesh: str, placements: str, dim: int, num_parts: int) -> None:
    ranks = 3 if mesh == "3" else 4
    options = ("--mesh", mesh, "--placements", placements, "--strategy", "allgather")
    done = run("load", str(checkpoint), "--json", "--digest", *options, ranks=ranks)
    assert done.returncode == 0, done.stderr
    report, reference = one_object(done.stdout), load_reference(checkpoint)
    for rank, digest in enumerate(report["digests"]):
        part = rank % num_parts  # each tensor is cut as torch.chunk cuts; what lacks the dimension is whole
        cut = {n: t.chunk(num_parts, dim)[part] if t.dim() > dim else t for n, t in reference.items()}
        assert digest == state_digest(cut), f"rank {rank}"
    assert report["bytes_read"] == sum(tensor.nbytes for tensor in reference.values())
    for_people = run("load", str(checkpoint), *options, ranks=ranks)
    assert for_people.returncode == 0, for_people.stderr
    assert f"{checkpoint}: 4 tensors" in for_people.stdout
    assert (
        f" in parts on {ranks} ranks; read from storage: 17.4 kB = 1.00 × the checkpoint" in for_people.stdout
    )


def test_what_one_rank_has_of_its_own_is_not_put_on_a_mesh(tmp_path: Path) -> None:
    state = {"weight": torch.randn(5, 3), "random": fastload.PerRank(torch.randn(7)), "step": 3}
    fastload.save(state, tmp_path / "saved")
    options = ("--mesh", "2", "--placements", "shard(0)", "--json", "--digest")
    done = run("load", str(tmp_path / "saved"), *options, ranks=2)
    assert done.returncode == 0, done.stderr
    parts = state["weight"].split(3)
    assert one_object(done.stdout)["digests"] == [state_digest({"weight": part}) for part in parts]


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        ("--mesh 2x4 --placements replicate,shard(0)", 2, "mesh='2x4' has 8 ranks, the job has 2"),
        ("--mesh 2", 2, "mesh and placements go together: one of them is not given"),
        ("--mesh 1 --placements shard(0)", 0, "mesh='1': there are no ranks of a torchrun or srun job"),
    ],
)
def test_a_mesh_that_cannot_be_is_told_once(checkpoint: Path, options: str, ranks: int, message: str) -> None:
    done = run("load", str(checkpoint), *options.split(), ranks=ranks)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"fastload: OptionError: {message}\n"


def test_a_terminal_sees_the_progress(checkpoint: Path, tmp_path: Path) -> None:
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm"}  # by which rich takes a pipe for one
    single = str(tmp_path / "new.pt")
    for command, titles in (
        (["load", str(checkpoint)], ["loading"]),
        (["seal", str(checkpoint)], ["sealing"]),
        (["verify", str(checkpoint)], ["verifying"]),
        (["stage", str(checkpoint), str(tmp_path / "copy")], ["staging"]),
        (["convert", str(checkpoint), str(tmp_path / "new")], ["loading", "saving"]),
        (["convert", "--to", "torch", str(checkpoint), single], ["loading", "saving"]),
    ):
        done = run(*command, **terminal)
        assert done.returncode == 0, done.stderr
        text = re.sub(r"\x1b\[[\d;?]*\w", "", done.stderr)
        for title in titles:
            assert re.search(rf"{title} .* (\d+\.\d)/\1 kB", text), (command, text)


def test_verbose_logs_events_and_twice_phases(checkpoint: Path) -> None:
    quiet, once, twice = (run(*words, "load", str(checkpoint)) for words in ([], ["-v"], ["-vv"]))
    assert quiet.stderr == ""
    assert once.stderr.startswith(f"INFO:fastload.load:loaded {checkpoint} from storage: 17.4 kB in ")
    assert once.stderr.count("\n") == 1
    assert "DEBUG:fastload.load:rank 0 of " in twice.stderr
