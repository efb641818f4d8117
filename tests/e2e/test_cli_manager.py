"""ls, prune and convert, as a user runs them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import fsspec
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result

import fastload
from fastload import CheckpointManager
from fastload.cli import main
from fastload.errors import OptionError, PeerError, StorageError
from fastload.loading.checkpoint import Checkpoint
from tests.checkpoints import assert_same_bits, flip, load_reference, write_sharded
from tests.e2e.test_cli import CONTROL, one_object, run

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with CheckpointManager(tmp_path / "run") as manager:
        for step in range(1, 7):
            manager.save(step, {"weight": torch.ones(1000, step)}, metrics={"lo[ss]": 1 / step})
    (tmp_path / "run/step_00000007").mkdir()
    (tmp_path / "run/step_00000007/model.safetensors").write_bytes(b"half")
    (tmp_path / "run/other").mkdir()
    flip(tmp_path / "run/step_00000006/fastload.json", 40)
    return tmp_path / "run"


def run_here(*arguments: str) -> Result:
    """The same in this process, which takes a hundredth of the time."""
    return CliRunner().invoke(main, arguments)


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in root.glob("step_*"))


def test_ls(root: Path, tmp_path: Path) -> None:
    done = run("ls", str(root), "--json")
    assert done.returncode == 0, done.stderr
    listed = one_object(done.stdout)["checkpoints"]
    assert [row["step"] for row in listed] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["state"] for row in listed] == ["complete"] * 5 + ["damaged", "incomplete"]
    assert listed[1]["metrics"] == {"lo[ss]": 0.5}
    assert listed[1]["nbytes"] == (root / "step_00000002/model.safetensors").stat().st_size
    assert listed[1]["saved_s"] == pytest.approx((root / "step_00000002/fastload.json").stat().st_mtime)
    shown = run_here("ls", str(root)).stdout
    assert not CONTROL.search(shown)
    assert "lo[ss]" in shown
    assert "incomplete" in shown
    nothing = run_here("ls", str(tmp_path / "nothing"))
    assert (nothing.exit_code, nothing.stdout) == (1, "")
    assert nothing.stderr.startswith("fastload: CheckpointNotFound: ")


def test_prune(root: Path) -> None:
    arguments = ("prune", str(root), "--keep-last", "2", "--keep-every", "2")
    dry = run_here(*arguments, "--dry-run")
    assert dry.exit_code == 0, dry.stderr
    assert [line for line in dry.stdout.splitlines() if "would delete" in line] == [
        f"would delete {root}/step_0000000{step}" for step in (1, 3)
    ]
    assert steps_in(root) == [1, 2, 3, 4, 5, 6, 7]
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert "2 checkpoints, 16.2 kB; 3 stay" in done.stdout
    assert steps_in(root) == [2, 4, 5, 6, 7]
    assert run_here("prune", str(root)).exit_code == 2, "nobody has said how many to keep"
    assert steps_in(root) == [2, 4, 5, 6, 7]
    assert run_here("prune", str(root), "--keep-last", "1").exit_code == 0
    assert steps_in(root) == [5, 6, 7], "the newest that is whole stays, what is not is left alone"
    assert fastload.load(root / "step_00000005")["weight"].shape == (1000, 5)
    assert run_here("prune", str(root), "--keep-last", "0").exit_code == 2


def test_convert_safetensors(tmp_path: Path) -> None:
    rows = [("a", "F32", (300, 7)), ("b", "BF16", (5,))]
    write_sharded(tmp_path / "hub", {"x.safetensors": rows[:1], "y.safetensors": rows[1:]}, index=True)
    done = run("convert", str(tmp_path / "hub"), str(tmp_path / "new"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 tensors, " in done.stdout
    assert_same_bits(fastload.load(tmp_path / "new"), load_reference(tmp_path / "hub"))
    assert fastload.verify(tmp_path / "new").num_blocks == 2
    again = run_here("convert", str(tmp_path / "hub"), str(tmp_path / "new"))
    assert again.stderr.startswith("fastload: CheckpointExists: ")
    assert run_here("convert", str(tmp_path / "hub"), str(tmp_path / "new"), "--overwrite").exit_code == 0


class Unwelcome:
    pass


@pytest.mark.slow(but=["False"])
@pytest.mark.parametrize("zipped", [True, False])
def test_convert_what_torch_saved(tmp_path: Path, zipped: bool) -> None:
    model = torch.nn.Linear(30, 7)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(30)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "tied": model.weight.data,
        "step": 3,
    }
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=zipped)
    done = run_here("convert", str(tmp_path / "old.pt"), str(tmp_path / "new"), "--json")
    assert done.exit_code == 0, done.stderr
    assert one_object(done.stdout)["num_files"] == 1
    found = fastload.load(tmp_path / "new")
    assert torch.equal(found["model"]["weight"], model.weight)
    assert found["tied"].data_ptr() == found["model"]["weight"].data_ptr()
    assert found["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    torch.save({"a": Unwelcome()}, tmp_path / "bad.pt")
    bad = run_here("convert", str(tmp_path / "bad.pt"), str(tmp_path / "never"))
    assert (bad.exit_code, bad.stdout) == (1, "")
    assert bad.stderr.startswith("fastload: ManifestError: ")
    assert "state['a'] is tests.e2e.test_cli_manager.Unwelcome: it is not on the list" in bad.stderr
    assert not (tmp_path / "never").exists()
    direct = run_here("load", str(tmp_path / "old.pt"))
    assert (direct.exit_code, direct.stderr) == (0, "")
    missing = run_here("convert", str(tmp_path / "no.pt"), str(tmp_path / "never"))
    assert missing.stderr.startswith("fastload: CheckpointNotFound: ")


def test_convert_leaves_out_what_cannot_be_loaded_if_told_to(tmp_path: Path) -> None:
    torch.save({"a": Unwelcome(), "b": torch.ones(3)}, tmp_path / "old.pt")
    for to in ("fastload", "torch", "dcp"):
        refused = run_here("convert", str(tmp_path / "old.pt"), str(tmp_path / to), "--to", to)
        assert refused.exit_code == 1
        assert "--no-strict leaves these out, and converts the rest" in refused.stderr
        assert "strict=False" not in refused.stderr
        done = run_here("convert", str(tmp_path / "old.pt"), str(tmp_path / to), "--to", to, "--no-strict")
        assert done.exit_code == 0, done.stderr
        found = fastload.load(tmp_path / to)
        assert (found["a"], found["b"].tolist()) == (None, [1.0] * 3)


@pytest.mark.parametrize("to", ["fastload", "torch", "dcp"])
def test_convert_copies_what_stands_next_to_the_weights(tmp_path: Path, to: str) -> None:
    hub, new = tmp_path / "hub", tmp_path / "new"
    write_sharded(
        hub, {"x.safetensors": [("a", "F32", (3,))], "y.safetensors": [("b", "F32", (3,))]}, index=True
    )
    kept = {"config.json": b"{}", "tokenizer.model": b"\0\1", "vocab.txt": b"a\nb"}
    for name, content in {**kept, "pytorch_model.bin": b"x", ".gitattributes": b"x"}.items():
        (hub / name).write_bytes(content)
    (hub / "original").mkdir()
    done = run_here("convert", str(hub), str(new), "--to", to)
    assert done.exit_code == 0, done.stderr
    names = ", ".join(kept)
    if to == "torch":
        assert f"not copied: {names}\n" in done.stdout
        return
    assert f"copied, too: {names}\n" in done.stdout
    assert {name: (new / name).read_bytes() for name in kept} == kept
    assert not {"pytorch_model.bin", ".gitattributes", "original"} & {path.name for path in new.iterdir()}
    assert fastload.load(new).keys() == {"a", "b"}
    if to == "fastload":
        (hub / "config.json").write_bytes(b'{"new": 1}')
        again = run_here("convert", str(hub), str(new), "--overwrite", "--json")
        assert one_object(again.stdout)["copied"] == list(kept)
        assert (new / "config.json").read_bytes() == b'{"new": 1}'
        away = f"memory://{tmp_path}/away"
        assert run_here("convert", str(hub), away).exit_code == 0
        assert fsspec.filesystem("memory").cat_file(f"{tmp_path}/away/vocab.txt") == kept["vocab.txt"]


def test_states_of_optimizers_are_one_line_and_no_weights(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    unused = torch.optim.SGD(model.parameters())
    fastload.save({"model": model, "parts": [optimizer, unused], "n": torch.ones(2)}, tmp_path / "training")
    lines = run_here("inspect", str(tmp_path / "training")).stdout.splitlines()
    tensors = [line.split()[0] for line in lines if " F32 " in line]
    assert tensors == ["model.weight", "model.bias", "n", "parts.0:"]
    (grouped,) = (line for line in lines if "parts" in line)
    assert re.search(r"parts.0: an optimizer +F32 +6 tensors +168 bytes +model", grouped)
    exported = run_here("convert", str(tmp_path / "training"), str(tmp_path / "hf"), "--to", "hf")
    assert "left out: the optimizer parts.0 (6 tensors); --names '*' takes everything" in exported.stdout
    assert "no config.json" in exported.stdout
    assert sorted(fastload.load(tmp_path / "hf")) == ["model.bias", "model.weight", "n"]
    assert "all names begin with" not in exported.stdout
    everything = ("--to", "hf", "--names", "*")
    assert run_here("convert", str(tmp_path / "training"), str(tmp_path / "all"), *everything).exit_code == 0
    assert len(fastload.load(tmp_path / "all")) == 9


@pytest.mark.parametrize("order", [("model", "opt"), ("opt", "model")])
@pytest.mark.parametrize("save", [fastload.save, torch.save], ids=["fastload", "torch"])
def test_a_weight_that_an_optimizer_shares_is_a_weight(
    save: Callable[..., object], order: tuple[str, str], tmp_path: Path
) -> None:
    """As of optimizers that keep the weights as their ``master`` copy."""
    weight, state = torch.rand(3, 2), {0: {"m": torch.ones(3, 2)}}
    parts = {"model": {"w": weight}, "opt": {"state": state, "param_groups": [{"lr": 0.1}]}}
    state[0]["master"] = weight
    save({name: parts[name] for name in order}, tmp_path / "training")
    lines = run_here("inspect", str(tmp_path / "training")).stdout.splitlines()
    shared, grouped = "opt.state.0.master" if order[0] == "opt" else "model.w", "opt: an optimizer"
    assert sorted(line.split("F32")[0].strip() for line in lines if " F32 " in line) == [shared, grouped]
    assert any(re.search(r"opt: an optimizer +F32 +1 tensor +24 bytes", line) for line in lines)
    exported = run_here("convert", str(tmp_path / "training"), str(tmp_path / "hf"), "--to", "hf")
    assert "left out: the optimizer opt (1 tensor)" in exported.stdout
    assert "all names begin with model.: --strip model. removes it" in exported.stdout
    assert_same_bits(fastload.load(tmp_path / "hf"), {"model.w": weight})
    stripped = ("--to", "hf", "--strip", "model.")
    exported = run_here("convert", str(tmp_path / "training"), str(tmp_path / "stripped"), *stripped)
    assert "all names begin" not in exported.stdout
    assert_same_bits(fastload.load(tmp_path / "stripped"), {"w": weight})


def test_names_that_a_model_has_by_itself_are_not_to_be_stripped(tmp_path: Path) -> None:
    fastload.save({"model.embed": torch.ones(2), "model.norm": torch.ones(3)}, tmp_path / "weights")
    exported = run_here("convert", str(tmp_path / "weights"), str(tmp_path / "hf"), "--to", "hf")
    assert exported.exit_code == 0
    assert "all names begin" not in exported.stdout
    lines = run_here("inspect", str(tmp_path / "hf")).stdout.splitlines()
    assert [line for line in lines if "20 bytes" in line] == ["F32: 2 tensors, 20 bytes in 1 file (fastload)"]


def test_states_of_optimizers_alone_are_no_model(tmp_path: Path) -> None:
    state = {0: {"m": torch.ones(3, 2)}}
    fastload.save({"state": state, "param_groups": [{"lr": 0.1}]}, tmp_path / "optimizer")
    arguments = ("convert", str(tmp_path / "optimizer"), str(tmp_path / "hf"), "--to", "hf")
    refused = run_here(*arguments)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "without the states of optimizers it has no tensors: choose some by --names" in refused.stderr
    assert not (tmp_path / "hf").exists()
    assert "\n an optimizer " in run_here("inspect", str(tmp_path / "optimizer")).stdout
    assert run_here(*arguments, "--names", "*").exit_code == 0


@pytest.mark.slow
def test_convert_exports_the_model_of_a_training(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    fastload.save({"model": model, "optimizer": optimizer, "step": 3}, tmp_path / "training")
    config.save_pretrained(tmp_path / "config")
    arguments = ("convert", str(tmp_path / "training"))
    chosen = ("--names", "model.*", "--strip", "model.", "--dtype", "bfloat16")
    options = ("--to", "hf", *chosen, "--config-from", str(tmp_path / "config"))
    alone = run_here(*arguments, str(tmp_path / "alone"), *options)
    assert alone.exit_code == 0, alone.stderr
    assert "copied, too: config.json" in alone.stdout
    together = run(*arguments, str(tmp_path / "together"), *options, ranks=3)
    assert together.returncode == 0, together.stderr
    for file in (tmp_path / "alone").iterdir():
        assert (tmp_path / "together" / file.name).read_bytes() == file.read_bytes()
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "alone", dtype="auto")
    assert_same_bits(exported.state_dict(), model.bfloat16().state_dict())
    spelt_out = ("--to", "hf", *chosen[:-1], "torch.bfloat16", "--config-from", str(tmp_path / "config"))
    assert run_here(*arguments, str(tmp_path / "spelt out"), *spelt_out).exit_code == 0
    for file in (tmp_path / "alone").iterdir():
        assert (tmp_path / "spelt out" / file.name).read_bytes() == file.read_bytes()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    for wrong, message in (
        (("--to", "hf", *chosen, "--config-from", str(broken)), "config.json is not valid JSON"),
        (("--to", "hf", "--config-from", str(tmp_path / "nowhere")), "nowhere: no such directory"),
        (("--to", "hf", "--config-from", str(broken / "config.json")), "no such directory"),
        (("--to", "torch", *chosen), "need --to hf"),
        (("--to", "hf", "--names", "modle.*"), "missing in the checkpoint: modle.*"),
        (("--to", "hf", "--dtype", "bfloat61"), "'bfloat61': must be a torch.dtype"),
        (("--to", "hf", "--dtype", "int8"), "'int8': must be a floating point dtype"),
    ):
        refused = run_here(*arguments, str(tmp_path / "never"), *wrong)
        assert refused.exit_code != 0
        assert message in refused.stderr
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("to", ["fastload", "hf", "torch", "dcp"])
def test_convert_looks_at_the_destination_before_it_loads(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": torch.arange(5)}, tmp_path / "old.pt")
    arguments = ("convert", str(tmp_path / "old.pt"), str(tmp_path / "new"), "--to", to)
    assert run_here(*arguments).exit_code == 0
    monkeypatch.setattr(Checkpoint, "read", lambda *_, **__: pytest.fail("it loads"))
    refused = run_here(*arguments)
    assert refused.exit_code == 1
    advice = "name a new directory" if to == "dcp" else "pass --overwrite to replace it"
    assert refused.stderr == f"fastload: CheckpointExists: {tmp_path / 'new'} exists: {advice}\n"
    missing = run_here("convert", str(tmp_path / "none"), str(tmp_path / "more" / "new"), "--to", to)
    assert missing.stderr.startswith("fastload: CheckpointNotFound: ")
    assert {path.name for path in tmp_path.iterdir()} == {"old.pt", "new"}


def test_an_option_that_only_one_rank_can_check_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several ranks it comes as a `PeerError`."""
    statuses = []
    for cause in (OptionError("no such directory"), StorageError("no answer")):
        error = PeerError("failed on 1 of 2 ranks", {0: cause})
        monkeypatch.setattr("fastload.ext.formats.convert.separate_call", Mock(side_effect=error))
        statuses.append(run_here("convert", str(tmp_path), str(tmp_path / "new")).exit_code)
    assert statuses == [2, 1]


def test_convert_dequantises(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    weight, scale = torch.randn(6, 4).to(torch.float8_e4m3fn), torch.tensor([[0.3]])
    safetensors.torch.save_file({"a.weight": weight, "a.weight_scale_inv": scale}, old / "model.safetensors")
    config = {"model_type": "llama", "dtype": "float32"}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (old / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    options = ("--to", "hf", "--dequantize", "--dtype", "bfloat16")
    done = run_here("convert", str(old), str(new), *options)
    assert done.exit_code == 0, done.stderr
    assert_same_bits(fastload.load(new), {"a.weight": (weight.float() * 0.3).bfloat16()})
    assert json.loads((new / "config.json").read_text()) == {**config, "dtype": "bfloat16"}


def test_convert_what_only_ends_as_a_file_of_torch(tmp_path: Path) -> None:
    new = str(tmp_path / "new")
    fastload.save({"a": torch.arange(5)}, tmp_path / "dir.ckpt")
    assert run_here("convert", str(tmp_path / "dir.ckpt"), new).exit_code == 0
    assert fastload.load(new)["a"].tolist() == [0, 1, 2, 3, 4]
    (tmp_path / "empty.pt").touch()
    for name, content in {
        "text.pt": b"hello",
        "zip.pt": b"PK\x05\x06" + bytes(18),
        "one.ckpt": b"\x80",
    }.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "nothing.tar").mkdir()
    for name, says in {
        "empty.pt": "empty.pt: the file is empty",
        "text.pt": "text.pt: 5 bytes are too few for a safetensors file",
        "zip.pt": "zip.pt: a zip archive, but not as torch.save writes it: it has no data.pkl",
        "one.ckpt": "one.ckpt: 1 bytes are too few for a safetensors file",
        "nothing.tar": "nothing.tar: no *.safetensors files",
    }.items():
        bad = run_here("convert", str(tmp_path / name), f"{new}-2")
        assert (bad.exit_code, bad.stdout, len(bad.stderr.splitlines())) == (1, "", 1), bad.stderr
        assert says in bad.stderr
    torch.save({"a": torch.arange(3)}, tmp_path / "elsewhere.pt")
    fsspec.filesystem("memory").pipe_file(f"{tmp_path}/old.pt", (tmp_path / "elsewhere.pt").read_bytes())
    assert run_here("convert", f"memory://{tmp_path}/old.pt", f"{new}-3").exit_code == 0
    assert fastload.load(f"{new}-3")["a"].tolist() == [0, 1, 2]
    missing = run_here("convert", f"memory://{tmp_path}/no.pt", f"{new}-2")
    assert missing.stderr.startswith(f"fastload: CheckpointNotFound: memory://{tmp_path}/no.pt: ")
    assert not Path(f"{new}-2").exists()


def test_inspect_says_what_cannot_be_loaded(tmp_path: Path) -> None:
    torch.save({"good": torch.ones(3), "odd": [Unwelcome()]}, tmp_path / "a.pt")
    shown = run_here("inspect", str(tmp_path / "a.pt")).stdout
    assert "1 tensor, 12 bytes in 1 file (torch)" in shown
    line = "state['odd'][0] is tests.e2e.test_cli_manager.Unwelcome: it is not on the list"
    assert f"cannot be loaded: {line}" in shown
    found = one_object(run_here("inspect", str(tmp_path / "a.pt"), "--json").stdout)
    assert [refused.startswith(line) for refused in found["refused"]] == [True]
    (tmp_path / "b.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:-1])
    assert (
        "b.pt: not a zip archive as torch.save writes it: it has no end record"
        in run_here("inspect", str(tmp_path / "b.pt")).stderr
    )
