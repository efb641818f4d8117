"""``fastload plan`` and ``fastload timeline`` as a user runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import fastload
from fastload.cli import main
from tests.checkpoints import write_file
from tests.e2e.test_cli import one_object, run

WORLD = ["--hosts", "4", "--storage-gbps", "400Mbit/s", "--host-gbps", "2"]


def call(*words: str) -> Result:
    """The command in this process: starting Python and torch takes seconds."""
    return CliRunner().invoke(main, words)


def test_plan_of_a_real_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, [("a", "U8", (3 << 20,)), ("b", "U8", (1001,))])
    done = call("plan", str(path), *WORLD, "--ranks-per-host", "2", "--json")
    assert done.exit_code == 0, done.stderr
    told = one_object(done.stdout)
    assert told["nbytes"] == (3 << 20) + 1001
    assert told["cluster"]["storage_bytes_per_s"] == 50e6
    assert told["cluster"]["host_bytes_per_s"] == 250e6
    assert told["floor_s"] == pytest.approx(told["nbytes"] / 50e6)
    by_name = {one["strategy"]: one for one in told["strategies"]}
    assert set(by_name) == {"allgather", "broadcast", "direct"}
    assert by_name["allgather"]["num_readers"] == 8
    assert by_name["allgather"]["num_turns"] == 1
    share = by_name["allgather"]["share_bytes"]
    assert share["mean"] <= share["max"] <= share["mean"] + by_name["allgather"]["chunk_bytes"]
    assert by_name["direct"]["storage_bytes"] == 8 * told["nbytes"]
    assert by_name["direct"]["total_s"] > by_name["allgather"]["total_s"] > told["floor_s"]


def test_plan_for_people_to_read() -> None:
    done = call("plan", "--size", "512MiB", *WORLD)
    assert done.exit_code == 0, done.stderr
    assert "storage 0.4 Gbit/s = 50 MB/s; each host's link 2 Gbit/s = 250 MB/s" in done.stdout
    assert "floor, one client streams all: 10.7 s" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.lstrip().startswith("allgather"))
    assert re.search(r"10\.9 s +1\.0\d +537 MB +4 .*storage", row), row


@pytest.mark.slow(but=["80"])
@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_cuts_no_number(columns: int) -> None:
    """Where it has no room for a row of each strategy it gets a column of each."""
    runner = CliRunner(env={"FORCE_COLOR": "1", "COLUMNS": str(columns)})
    words = ["plan", "--size", "13.8TB", "--hosts", "48", "--ranks-per-host", "64", *WORLD[2:]]
    shown = re.sub(r"\x1b\[[0-9;]*m", "", runner.invoke(main, words).stdout)
    told = json.loads(call(*words, "--json").stdout)
    cells = [f"{one[name]:,}" for one in told["strategies"] for name in ("num_rounds", "num_readers")]
    cells += [one["bound_by"] for one in told["strategies"]]
    assert "…" not in shown
    assert [cell for cell in cells if cell not in shown] == []
    table = shown[shown.index("÷floor") : shown.rindex("bound by")]
    assert max(map(len, table.splitlines())) <= columns
    sizes = runner.invoke(main, ["size", *"--size 13.8TB --tp 8 --dp 6 --at 273GB/s".split()])
    assert re.search(r"every replica reads all +48 +82\.8 TB", sizes.stdout), sizes.stdout


def test_plan_with_latency() -> None:
    world = ["--size", "1GiB", "--hosts", "1", "--storage-gbps", "100", "--host-gbps", "100", "--json"]
    before = one_object(call("plan", *world).stdout)
    done = one_object(call("plan", *world, "--latency", "50ms", "--connection-rate", "60MB/s").stdout)
    assert done["cluster"]["requests"] == {
        "latency_s": 0.05,
        "connection_bytes_per_s": 60e6,
        "in_flight": None,
    }
    assert before["cluster"]["requests"]["connection_bytes_per_s"] is None
    strategy = done["strategies"][0]
    assert strategy["bound_by"] == "requests in flight"
    # 128 requests of 8 MiB, 64 of them at once, after three that wait for each other.
    assert strategy["total_s"] - done["before_s"] == pytest.approx(2 * (0.05 + (8 << 20) / 60e6), rel=0.01)
    assert done["before_s"] - before["before_s"] == pytest.approx(3 * 0.05)
    shown = call("plan", *world[:-1], "--latency", "50ms", "--connection-rate", "60MB/s").stdout
    assert (
        "requests: 50 ms to the first byte, 0.48 Gbit/s = 60 MB/s each, at most 256 of a rank in flight"
        in shown
    )


def test_plan_of_a_world_that_nobody_here_owns() -> None:
    done = call(
        "plan", "--size", "13.8TB", "--hosts", "8192", "--ranks-per-host", "8", "--device", "cuda",
        "--storage-gbps", "273GB/s", "--host-gbps", "400Gbit/s",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert "13.8 TB into each of 65,536 ranks" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.lstrip().startswith("allgather"))
    assert re.search(r"\d\.\d+ min +1\.\d\d +13\.8 TB +65,536 .*host links", row), row
    ways = "113 PB between hosts (lines of 8 × 8 × 8 × 8 × 2: 29 hops)"
    assert "before the first read: " in done.stdout
    assert f"exchanged: {ways}; 791 PB inside hosts (links between devices: 7 hops)" in done.stdout


def test_plan_of_a_sharded_load(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    layer = [("mlp.up_proj", (64, 32)), ("mlp.down_proj", (32, 64)), ("norm", (32,))]
    tensors = [(f"layers.{index}.{name}.weight", shape) for index in range(4) for name, shape in layer]
    write_file(path, [(name, "F32", shape) for name, shape in tensors])
    job = ["--tp", "2", "--pp", "2", "--dp", "2"]
    done = call("plan", str(path), *WORLD, "--ranks-per-host", "2", *job, "--json")
    assert done.exit_code == 0, done.stderr
    plan = one_object(done.stdout)
    matrices, norms = 4 * 2 * 64 * 32 * 4, 4 * 32 * 4
    assert plan["nbytes"] == matrices + norms
    assert plan["parallel"] == {"tp": 2, "pp": 2, "dp": 2, "fsdp": False}
    assert plan["held_bytes"] == [matrices // 4 + norms // 2] * 2
    by_name = {one["strategy"]: one for one in plan["strategies"]}
    assert by_name["allgather"]["storage_bytes"] == plan["nbytes"]
    # All that 8 ranks hold, but for what they have read.
    rows = 4 * 32 * 64 * 4  # whose reader wants half of what it reads
    assert by_name["allgather"]["exchanged_bytes"] == 8 * plan["held_bytes"][0] - plan["nbytes"] + rows // 2
    assert by_name["direct"]["storage_bytes"] == 8 * plan["held_bytes"][0] + 4 * rows // 2
    fsdp = call("plan", str(path), *WORLD, "--ranks-per-host", "2", *job, "--fsdp", "--json")
    assert one_object(fsdp.stdout)["held_bytes"] == [matrices // 8 + norms // 4] * 2
    replicas = call("plan", str(path), *WORLD, "--dp", "4", "--json")
    assert one_object(replicas.stdout)["held_bytes"] == [plan["nbytes"]] * 2


@pytest.mark.slow
def test_plan_of_a_large_sharded_load(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    done = call(
        "plan", "--size", "13.8TB", "--hosts", "384", "--ranks-per-host", "8", "--tp", "8", "--pp", "64",
        "--dp", "6", "--storage-gbps", "273GB/s", "--host-gbps", "400Gbit/s", "--trace", str(trace),
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert "13.8 TB, of which each of 3,072 ranks holds 27 GB" in done.stdout
    assert "messages over Gloo; TP 8 × PP 64 × DP 6" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.lstrip().startswith("allgather"))
    assert re.search(r"50\.9 s +0\.18 +13\.8 TB +3,072 .*storage", row), row
    assert {event["name"] for event in json.loads(trace.read_text())} >= {"read", "exchange", "place"}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (WORLD, "give either PATH or --size"),
        (["x", "--size", "1GB", *WORLD], "give either PATH or --size"),
        (
            ["--size", "1GB", "--hosts", "2", "--host-gbps", "2"],
            "Give --storage-gbps, --per-host-storage-gbps",
        ),
        (["--size", "1GB", "--hosts", "0", "--host-gbps", "2"], "--hosts: '0' is not a whole number above 0"),
        (["--size", "1GB", "--hosts", "2", "--host-gbps", "0"], "'0 Gbit/s' is not above 0"),
        (["--size", "1GB", "--hosts", "2", "--host-gbps", "-3"], "'-3 Gbit/s' is negative"),
        (["--size", "1GB", "--hosts", "2", "--host-gbps", "2Gb/s"], "'2Gb/s': unknown unit 'Gb/s'"),
        (["--size", "7", *WORLD], "'7': it has no unit"),
        (["--size", "7 parsecs", *WORLD], "unknown unit 'parsecs'"),
        (["--size", "1GB", *WORLD, "--chunk", "1GB"], "does not fit into staging_bytes"),
        (["nowhere", *WORLD], "nowhere: no such checkpoint"),
        (
            ["--size", "1GB", *WORLD, "--tp", "2", "--pp", "4"],
            "TP 2 × PP 4 × DP 1 takes 8 ranks, 4 hosts × 1 have 4",
        ),
        (["--size", "1GB", *WORLD, "--tp", "4", "--fsdp"], "--fsdp shards over the ranks of --dp"),
        (["--size", "1GB", *WORLD, "--tp", "0"], "--tp: '0' is not a whole number above 0"),
    ],
    ids=str,
)
def test_impossible_input_is_one_line(words: list[str], problem: str) -> None:
    done = call("plan", *words)
    assert done.exit_code == (1 if words[0] == "nowhere" else 2)
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert problem in last
    assert "Traceback" not in done.stderr


def test_a_trace_that_cannot_be_written_is_one_object() -> None:
    done = call("plan", "--size", "1GB", *WORLD, "--json", "--trace", "/no/where/t.json")
    assert done.exit_code == 1
    assert one_object(done.stdout)["error"]["type"] == "StorageError"


@pytest.mark.slow
def test_a_picture_of_a_load_and_of_a_prediction(tmp_path: Path) -> None:
    path, trace, png = tmp_path / "model.safetensors", tmp_path / "trace.json", tmp_path / "trace.png"
    write_file(path, [("a", "U8", (5 << 20,))])
    done = run("load", str(path), "--strategy", "allgather", "--trace", str(trace), ranks=2)
    assert done.returncode == 0, done.stderr
    names = {event["name"] for event in json.loads(trace.read_text())}
    assert {"load", "read", "exchange", "place"} <= names
    done = call("timeline", str(trace), "--png", str(png), "--floor-s", "0.01")
    assert (done.exit_code, done.stdout[: len(f"{png}: 2 ranks, ")]) == (0, f"{png}: 2 ranks, "), done.stderr
    assert png.read_bytes().startswith(b"\x89PNG")

    many = call("plan", "--size", "1GB", *WORLD, "--ranks-per-host", "64", "--trace", str(trace))
    assert many.exit_code == 0, many.stderr
    wrong = call("timeline", str(trace), "--png", str(png.with_suffix(".svg")))
    assert (wrong.exit_code, "its name has to end in .png" in wrong.stderr) == (2, True)
    done = call("timeline", str(trace), "--png", str(png))
    assert done.exit_code == 0, done.stderr
    assert png.stat().st_size > 10_000


@pytest.mark.slow
def test_the_floor_of_a_save_is_the_time_of_its_writes(tmp_path: Path) -> None:
    """A save reads nothing."""
    trace, png = tmp_path / "trace.json", tmp_path / "trace.png"
    options = fastload.SaveOptions(trace=trace)
    fastload.save({"a": torch.zeros(5 << 20, dtype=torch.uint8)}, tmp_path / "saved", options=options)
    done = call("timeline", str(trace), "--png", str(png))
    assert done.exit_code == 0, done.stderr
    found = re.fullmatch(r".*: 1 ranks, (\S+) s, floor: the writes without gaps (\S+) s\n", done.stdout)
    assert found is not None, done.stdout
    assert 0 < float(found[2]) <= float(found[1]) + 1e-3
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_trace_without_reads_and_writes_has_no_floor(tmp_path: Path) -> None:
    trace, png = tmp_path / "trace.json", tmp_path / "trace.png"
    trace.write_text(f"[{RANK}, {READ.replace('read', 'exchange') % 2000}]")
    done = call("timeline", str(trace), "--png", str(png))
    assert (done.exit_code, done.stdout) == (0, f"{png}: 1 ranks, 0.002 s\n"), done.stderr


RANK = '{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank 0"}}'
READ = '{"name": "read", "ph": "X", "pid": 0, "ts": 0, "dur": %d}'
ABOUT = '{"name": "fastload", "ph": "M", "pid": 0, "args": {"%s": "much"}}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "[1]",
        '[{"name": "x", "ph": "X"}]',
        "\x89PNG",
        f"[{RANK}, {READ % 9}, {ABOUT % 'floor_s'}]",
        f"[{RANK}, {READ % 9}, {ABOUT % 'bytes_wanted'}]",
        f"[{RANK}, {READ % 0}]",
    ],
)
def test_something_else_than_a_trace(tmp_path: Path, text: str) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(text)
    done = call("timeline", str(trace), "--png", str(tmp_path / "trace.png"))
    assert (done.exit_code, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "trace" in done.stderr
