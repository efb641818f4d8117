"""``fastload size`` and ``fastload cadence`` as a user runs them."""

from __future__ import annotations

import csv
import io
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result

import fastload as fastload_api
from fastload.cli import main
from tests.checkpoints import write_file
from tests.e2e.test_cli import CONTROL, run
from tests.unit.test_parameters import LLAMA_8B

TRILLION = "size --size 13.8TB --tp 8 --pp 64 --dp 6".split()
JOB = "cadence 70B --gpus 1024 --at 20GB/s --stall 5s --step 6s".split()


def fastload(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def output(*arguments: str) -> str:
    done = fastload(*arguments)
    assert (done.exit_code, done.stderr) == (0, "")
    assert not CONTROL.search(done.stdout)
    return done.stdout


def as_json(*arguments: str) -> dict[str, Any]:
    text = output(*arguments, "--json")
    assert len(text.splitlines()) == 1
    value = json.loads(text)
    assert isinstance(value, dict)
    return value


def as_csv(*arguments: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(output(*arguments, "--csv"))))


# The questions that one command each answers


def test_how_long_does_a_trillion_parameters_take_at_273_gb_per_s() -> None:
    assert "to save it within 50.5 s takes storage of 273 GB/s" in output(
        "size", "--size", "13.8TB", "--at", "273GB/s"
    )
    assert "to save it within 51.3 s" in output("size", "1T", "--at", "273GB/s")


def test_what_restoring_6_replicas_asks_of_storage() -> None:
    text = output(*TRILLION, "--at", "273 GB/s", "--every", "4h")
    assert "TP 8 × PP 64 × DP 6 = 3,072 GPUs on 384 hosts" in text
    rows = {" ".join(line.split()[:4]): line for line in text.splitlines()}
    assert "1.64 TB/s" in rows["restore every replica reads"]
    assert "273 GB/s" in rows["restore read once, then"]
    assert "533 MB/s" in rows["save one replica writes"]
    assert "restoring takes 50.5 s read once, 5.05 min read 6 times" in text
    assert "every 4 h loses 0.351 %" in text


def test_how_often_should_1024_gpus_save() -> None:
    text = output(*JOB, "--memory-copies", "2", "--host-link", "50GB/s")
    assert "save every 16.9 min (169 steps)" in text
    assert "a failure every 28.8 h (128 hosts, 6.5 failures per 1000 host-days)" in text
    assert "2 copies in memory outlive 2 hosts" in text
    assert "why: the peak of the ETTR curve" in text


def test_through_the_real_program() -> None:
    done = run(*TRILLION, "--at", "273GB/s")
    assert (done.returncode, done.stderr) == (0, "")
    assert "1.64 TB/s" in done.stdout
    wrong = run(*TRILLION, "--at", "273GBps")
    assert (wrong.returncode, wrong.stdout, len(wrong.stderr.splitlines())) == (2, "", 1)


# What they say


def test_size_as_json_and_csv() -> None:
    found = as_json(
        "size", "70B", "--tp", "8", "--gpus", "64", "--within", "1min", "--within", "10min", "--every", "1h"
    )
    assert found["checkpoint_bytes"] == 980 * 10**9
    assert found["parameters"] == {"num": 70 * 10**9, "exact": True, "source": "as given"}
    assert {row["recipe"]: row["checkpoint_bytes"] for row in found["recipes"]}["bf16"] == 140 * 10**9
    assert (found["world"]["dp"], found["world"]["num_hosts"]) == (8, 8)
    assert [row["time_s"] for row in found["transfers"]] == [60.0] * 4 + [600.0] * 4
    assert [row["overhead"] for row in found["overheads"]] == [60 / 3600, 600 / 3600]
    rows = as_csv("size", "70B", "--tp", "8", "--gpus", "64", "--within", "1min")
    assert [float(row["storage_bytes_per_s"]) for row in rows] == pytest.approx(
        [row["storage_bytes_per_s"] for row in found["transfers"][:4]]
    )
    assert [row["recipe"] for row in as_csv("size", "70B")] == ["mixed-adam", "fp32-adam", "bf16"]


def test_shapes_and_recipes() -> None:
    shape = ["size", "--layers", "128", "--hidden", "25600"]
    assert as_json(*shape)["parameters"]["num"] == pytest.approx(1008e9, rel=1e-4)
    assert "Megatron's formula" in output(*shape)
    assert as_json("size", "65.2B", "--recipe", "fp32-adam")["checkpoint_bytes"] == 782_400_000_000
    assert as_json("size", "1B", "--bytes-per-parameter", "1.5")["checkpoint_bytes"] == 1_500_000_000


def test_a_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    found = as_json("size", str(path), "--recipe", "bf16")
    assert found["parameters"]["num"] == 8_030_261_248
    assert found["checkpoint_bytes"] == 2 * 8_030_261_248
    text = output("size", str(path))
    assert "8,030,261,248 parameters (8.03B), LlamaForCausalLM: 32 layers of 4096" in text
    path.write_text(json.dumps({**LLAMA_8B, "model_type": "other"}))
    assert output("size", str(path)).startswith("about ")


def test_a_checkpoint_that_exists(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, [("weight", "BF16", (300, 7)), ("bias", "F32", (7,)), ("step", "I64", ())])
    found = as_json("size", str(path))
    assert found["checkpoint_bytes"] == 300 * 7 * 2 + 7 * 4 + 8, "as it is"
    assert found["parameters"]["num"] == 2107
    assert as_json("size", str(path), "--recipe", "mixed-adam")["checkpoint_bytes"] == 14 * 2107


def test_what_optimizers_keep_and_averages_are_no_parameters(tmp_path: Path) -> None:
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    averaged = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    state = {"model": model.state_dict(), "ema": averaged, "optimizer": optimizer.state_dict()}
    fastload_api.save(state, tmp_path / "saved")
    torch.save(state, tmp_path / "a.pt")
    moments = {
        f"optimizer.state.{name}.{key}": tensor
        for number, (name, _) in enumerate(model.named_parameters())
        for key, tensor in optimizer.state_dict()["state"][number].items()
    }
    flat = {f"model.{name}": tensor for name, tensor in model.state_dict().items()} | moments
    safetensors.torch.save_file(flat, tmp_path / "flat.safetensors")
    megatron = [
        ("decoder.weight", "F32", (10, 7)),
        ("optimizer.state.exp_avg.decoder.weight", "F32", (10, 7)),
    ]
    write_file(tmp_path / "megatron.safetensors", megatron)
    for name in ("saved", "a.pt", "flat.safetensors"):
        found = as_json("size", str(tmp_path / name))
        assert found["parameters"]["num"] == 10_100, name
        assert found["recipes"][0]["checkpoint_bytes"] == 14 * 10_100
    assert as_json("size", str(tmp_path / "megatron.safetensors"))["parameters"]["num"] == 70
    text = output("size", str(tmp_path / "saved"))
    assert "10,100 parameters (10.1K), 10 tensors of" in text
    assert ", without 20,202 values of optimizers and 10,100 of averages\n" in text


def test_weights_that_an_optimizer_shares_are_parameters(tmp_path: Path) -> None:
    weight = torch.rand(3, 2)
    optimizer = {"state": {0: {"m": torch.ones(3, 2), "master": weight}}, "param_groups": [{"lr": 0.1}]}
    fastload_api.save({"model": {"w": weight}, "optimizer": optimizer}, tmp_path / "saved")
    assert as_json("size", str(tmp_path / "saved"))["parameters"]["num"] == 6


def test_layers_of_one_shape_are_all_counted(tmp_path: Path) -> None:
    """Also where names only sound like averages, and no other tensors have their shapes."""
    layers = {f"layer{number}": {"weight": torch.zeros(5, 5)} for number in range(4)}
    fastload_api.save({**layers, "averaged": {"pool": torch.zeros(3)}}, tmp_path / "saved")
    assert as_json("size", str(tmp_path / "saved"))["parameters"]["num"] == 4 * 25 + 3


def test_cadence_as_json_and_csv() -> None:
    found = as_json(*JOB)
    assert (found["stall_s"], found["background_s"], found["restart_s"]) == (5, 49, 300)
    assert found["recommendation"]["interval_steps"] == 169
    rules = {row["rule"]: row for row in found["rules"]}
    assert rules["CheckFreq"]["interval_steps"] == 9
    assert rules["budget of 3.5 %"]["overhead"] == pytest.approx(0.035)
    assert rules["Young"]["interval_s"] == pytest.approx((2 * 5 * found["mtbf_s"]) ** 0.5)
    assert [row["rule"] for row in as_csv(*JOB)] == list(rules)
    both = as_json(*JOB, "--concurrent-saves", "3")["rules"]
    assert "PCcheck, 3 saves at once" in [row["rule"] for row in both]


def test_cadence_of_memory_and_storage() -> None:
    """980 GB on 128 hosts with links of 50 GB/s: 7.66 GB from each host to its partner take 0.153 s."""
    options = "--memory-copies 2 --host-link 50GB/s --memory-stall 200ms".split()
    whole = as_json(*JOB, *options)
    found, mtbf_s = whole["memory"], whole["mtbf_s"]
    assert found["background_s"] == pytest.approx(0.153, abs=0.001)
    assert found["loss_probability"] == pytest.approx(0.01, rel=0.01)
    assert found["memory"]["interval_s"] == pytest.approx((2 * 0.2 * mtbf_s / 0.99) ** 0.5, rel=0.02)
    assert found["storage"]["interval_s"] == pytest.approx((2 * 5 * mtbf_s / 0.01) ** 0.5, rel=0.02)
    assert found["ettr"] > found["ettr_storage"] == as_json(*JOB)["recommendation"]["ettr"]
    first = whole["recoverable"][0]
    assert (first["failures"], first["probability"]) == (2, pytest.approx(1 - 1 / 127))
    assert [row["rule"] for row in as_csv(*JOB, *options)][-2:] == ["to memory", "to storage"]
    text = output(*JOB, *options)
    assert "save to memory every 3.4 min (34 steps), to storage every 2.83 h" in text


def test_a_save_that_is_not_asynchronous() -> None:
    found = as_json("cadence", "--size", "13.8TB", "--at", "273GB/s", "--gpus", "3072")
    assert found["stall_s"] == pytest.approx(50.55, abs=0.005)
    assert found["background_s"] == 0
    rules = {row["rule"]: row["interval_s"] for row in found["rules"]}
    assert rules["Young"] == pytest.approx(1870.7, abs=0.1)
    assert rules["Daly"] == pytest.approx(1837.2, abs=0.1)
    assert found["recommendation"]["interval_steps"] is None


@pytest.mark.slow(but=["--stall 5s"])
@pytest.mark.parametrize(
    "facts",
    [
        "--stall 5s --background 49s --mtbf 28h --step 6s",
        "--stall 0s --background 10min --mtbf 40h --step 6s --concurrent-saves 2",
        "--stall 30s --background 10min --mtbf 40min",
        "--stall 1ms --mtbf 1000d --step 1ms",
        "--stall 10d --mtbf 50d",
    ],
)
def test_the_drawing(tmp_path: Path, facts: str) -> None:
    path = tmp_path / "ettr.png"
    output("cadence", *facts.split(), "--png", str(path))
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", head[16:]) == (1440, 800)


def test_no_drawing_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused(1, "a drawing needs matplotlib: pip install 'fastload-torch[plot]'", *JOB, "--png", "ettr.png")
    assert fastload(*JOB).exit_code == 0


# What is wrong is said in one line


def refused(code: int, words: str, *arguments: str) -> None:
    done = fastload(*arguments)
    assert done.exit_code == code, done.output
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert words in done.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("size", "size of what?"),
        ("size 70B --size 1TB", "give one of SOURCE, --size"),
        ("size 70B --layers 3 --hidden 4", "give one of SOURCE, --size"),
        ("size --layers 3", "--layers and --hidden go together"),
        ("size --size 1TB --recipe bf16", "it takes no recipe"),
        ("size 70B --recipe bf16 --bytes-per-parameter 2", "give one of --recipe"),
        ("size 70B --tp 8 --pp 64 --dp 6 --gpus 3000", "TP 8 × PP 64 × DP 6 = 3072 GPUs, not 3000"),
        ("size 70B --dp 8 --hosts 2", "8 GPUs on hosts of 8 take 1, not 2"),
        ("size 70B --within 0s", "time_s=0.0: must be a number above 0"),
        ("size 70B --at 1GB/s --within 5min", "give one of --at and --within"),
        ("size 70B --every 4h", "--every needs --at or --within"),
        ("size 70B --at 1GB/s --every 0s", "interval_s=0.0"),
        ("cadence --gpus 8", "how long does a save take?"),
        ("cadence --stall 5s", "how often does the job fail?"),
        ("cadence --at 1GB/s --gpus 8", "--at needs a checkpoint"),
        ("cadence 1B --at 1GB/s --stall 1s --background 1s --gpus 8", "give one of --background and --at"),
        ("cadence --stall 5s --mtbf 1min", "the job makes no progress"),
        ("cadence --stall 5s --mtbf 0s", "mtbf_s=0.0"),
        ("cadence --stall 5s --mtbf 1d --memory-copies 2", "--memory-copies needs --gpus or --hosts"),
        ("cadence --stall 5s --gpus 16 --memory-copies 3 --memory-background 1s", "3 copies need as many"),
        ("cadence --stall 5s --gpus 16 --hosts-lost 3 --memory-copies 1", "3 lost hosts need as many hosts"),
        ("cadence --stall 5s --gpus 16 --memory-copies 1", "no failure is restored from memory"),
        ("cadence --stall 5s --gpus 16 --memory-copies 2", "how long until all copies are there?"),
        ("cadence 1B --at 1GB/s --gpus 16 --memory-copies 2", "how long does training wait for a copy"),
        ("cadence --stall 5s --gpus 16 --memory-stall 1s", "Give --memory-copies"),
        ("cadence --stall 5s --gpus 12", "12 GPUs do not fill hosts of 8"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_used_are_a_usage_error(command: str, words: str) -> None:
    refused(2, words, *command.split())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("size /no/config.json", "/no/config.json: no such file"),
        ("cadence --stall 5s --mtbf 1d --png /no/where/ettr.png", "cannot write the drawing"),
    ],
)
def test_what_fails_is_no_usage_error(command: str, words: str) -> None:
    refused(1, words, *command.split())


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("size 70B --size 1TB", "OptionError"),
        ("size 70B --at 273", "OptionError"),
        ("plan --size 1GB --hosts 4", "MissingParameter"),
        ("ls", "UsageError"),
        ("ls --jsn", "NoSuchOption"),
    ],
)
def test_a_usage_error_is_an_object_with_json(command: str, kind: str) -> None:
    done = fastload(*command.split(), "--json")
    assert done.exit_code == 2
    told = json.loads(done.stdout)["error"]
    assert told["type"] == kind
    assert told["message"] in done.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("size 70X", "'70X': unknown unit 'X'; known: K, M, B, T; nor is it a path"),
        ("size -- -70B", "is negative"),
        ("size 70B --tp 0", "--tp: '0' is not a whole number above 0"),
        ("size 70B --at 0GB/s", "--at: '0GB/s' is not above 0"),
        ("size 70B --at=-1GB/s", "--at: '-1GB/s' is negative"),
        ("size 70B --at nanGB/s", "--at: 'nanGB/s' is not a number"),
        ("size 70B --at 273", "--at: '273': it has no unit; known: B/s, kB/s"),
        ("size 70B --at 273GB", "unknown unit 'GB'"),
        ("size 70B --within 5m", "unknown unit 'm'; known: ms, s, min, h, d"),
        ("size /no/where", "'/no/where' is not a number such as 70B; nor is it a path"),
        ("cadence --stall 5s --mtbf 1d --budget 0.035", "--budget: '0.035': it has no unit; known: %"),
        ("cadence --stall 5s --gpus 8 --failures-per-1000-host-days=-6", "is negative"),
        ("cadence --stall 5s --mtbf 1d --png x.pgn", "--png: x.pgn: its name has to end in .png"),
    ],
)  # fmt: skip
def test_a_quantity_that_cannot_be_read_is_a_usage_error(command: str, words: str) -> None:
    refused(2, words, *command.split())


def test_cadence_asks_for_what_it_cannot_know(tmp_path: Path) -> None:
    """All of it at once, and nothing that follows from what was given."""
    done = fastload("cadence", "7B")
    assert done.exit_code == 2
    assert done.stderr == (
        "fastload: OptionError: how long does a save take? Give --at, the bandwidth of storage, or --stall; "
        "how often does the job fail? Give --mtbf, or --gpus or --hosts\n"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "the config has no model_type"),
        ('{"model_type": "llama", "hidden_size": 4096}', "this llama model has no num_hidden_layers"),
        ("[1, 2]", "not a JSON object"),
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('"' + "\\u0000" * 10, "not valid JSON"),
        (" " * (1 << 20) + "{}", "bytes are too many for a config"),
        ('{"model_type": "llama", "hidden_size": 1e400}', "hidden_size=inf is not a whole number"),
    ],
    ids=lambda text: text[:12].strip() or "blank",
)
def test_bad_configs(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    refused(1, words, "size", str(path))
    refused(1, f"{path}: ", "size", str(path))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00" * 9)
    refused(1, "not valid JSON", "size", str(path))
