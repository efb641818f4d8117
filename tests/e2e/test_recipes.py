"""The programs of docs/recipes, on ranks such as torchrun starts."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

import fastload
from tests.e2e.forked import Forked, run_forked
from tests.pages import ROOT

RECIPES = ROOT / "docs" / "recipes"
pytestmark = pytest.mark.timeout(240)


def program(page: str, folder: Path) -> Path:
    """Writes the one program of a page to a file."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", (RECIPES / page).read_text(), re.M | re.S)
    path = folder / "program.py"
    path.write_text(code)
    return path


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), **more}


def run(path: Path, num_ranks: int, **more: str) -> None:
    done = run_forked([str(path)], ranks=num_ranks, cwd=path.parent, env=environment(**more), timeout=100)
    assert done.returncode == 0, done.stderr


def newest(folder: Path) -> Path:
    return max(path for path in (folder / "checkpoints").iterdir() if path.name.startswith("step_"))


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(same(one[k], other[k]) for k in one)
        )
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_ddp_resumes_bit_for_bit(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("straight", "stopped")]
    paths = []
    for folder in folders:
        folder.mkdir()
        paths.append(program("ddp.md", folder))
    run(paths[0], 2)
    slower = (
        paths[1].read_text().replace("scheduler.step()", "scheduler.step(), __import__('time').sleep(0.05)")
    )
    paths[1].write_text(slower)  # else it may end before it is told to
    output = tmp_path / "output"
    stopped = Forked([str(paths[1])], ranks=2, cwd=folders[1], env=environment(), out=output, err=output)
    while not (folders[1] / "checkpoints").is_dir() and stopped.lives():
        time.sleep(0.01)
    os.kill(stopped.pids[0], signal.SIGTERM)
    assert stopped.end(100).returncode == 0, output.read_text()
    options = fastload.LoadOptions(per_rank_mismatch="skip")
    assert fastload.load(newest(folders[1]), options=options)["step"] < 60
    run(paths[1], 2)
    straight, resumed = (fastload.load(newest(folder), options=options) for folder in folders)
    assert straight["step"] == 60
    assert same(straight, resumed)


def test_fsdp2_resumes_on_other_ranks_and_exports(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "pretrained")
    tokenizer = Tokenizer(WordLevel({"hello": 0, "[UNK]": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "pretrained")
    path = program("fsdp2.md", tmp_path)
    run(path, 2, NUM_STEPS="2")
    run(path, 3, NUM_STEPS="4")
    saved = fastload.load(newest(tmp_path))
    assert saved["step"] == 4
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert same(dict(exported.state_dict()), saved["model"])
    assert AutoTokenizer.from_pretrained(tmp_path / "export")("hello")["input_ids"] == [0]
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained").state_dict()
    assert not same(before, saved["model"])


def test_from_dcp(tmp_path: Path) -> None:
    run(program("from-dcp.md", tmp_path), 2)
    state = fastload.load(tmp_path / "new" / "step_2")
    assert state["step"] == 2
    assert {entry["step"].item() for entry in state["optimizer"]["state"].values()} == {2.0}
