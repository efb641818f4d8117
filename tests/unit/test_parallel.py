"""What ranks of a parallel job want, against what torch and Megatron-LM give them."""

from __future__ import annotations

import pytest

from fastload.errors import OptionError
from fastload.formats.manifest import TensorEntry
from fastload.geometry.box import Runs
from fastload.planning.parallel import Parallel, model_of_size, model_of_tensors, requests_of
from fastload.transfer.demand import RankRequests

NAMES = [
    ("model.embed_tokens.weight", (100, 8)),
    *(
        (f"model.layers.{layer}.{name}", shape)
        for layer in (0, 1, 2, 3)
        for name, shape in (
            ("self_attn.q_proj.weight", (8, 8)),
            ("self_attn.o_proj.weight", (8, 6)),
            ("input_layernorm.weight", (8,)),
        )
    ),
    ("model.norm.weight", (8,)),
    ("lm_head.weight", (100, 8)),
]


def entries() -> list[TensorEntry]:
    made, offset = [], 0
    for name, shape in NAMES:
        nbytes = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        made.append(TensorEntry(name, "BF16", shape, 0, offset, nbytes))
        offset += nbytes
    return made


def held(requests: RankRequests, rank: int) -> dict[str, tuple[Runs, ...]]:
    return {NAMES[tensor][0]: part for tensor, part in requests.of(rank) if part}


def test_tensor_parallel_ranks_cut_columns_and_rows_and_stages_cut_layers() -> None:
    requests = requests_of(model_of_tensors(entries()), Parallel(tp=2, pp=2, dp=2))
    first, second = held(requests, 0), held(requests, 1)
    assert [name.removeprefix("model.") for name in first][:4] == [
        "embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.o_proj.weight",
        "layers.0.input_layernorm.weight",
    ]  # fmt: skip
    assert not any("layers.2" in name or "layers.3" in name or name[6:] == "norm.weight" for name in first)
    assert first["model.layers.1.self_attn.q_proj.weight"] == (Runs(0, 64, ()),)
    assert second["model.layers.1.self_attn.q_proj.weight"] == (Runs(64, 64, ()),)
    assert first["model.layers.1.self_attn.o_proj.weight"] == (Runs(0, 6, ((8, 12),)),)
    assert second["model.layers.1.self_attn.o_proj.weight"] == (Runs(6, 6, ((8, 12),)),)
    assert first["model.layers.0.input_layernorm.weight"] == second["model.layers.0.input_layernorm.weight"]
    assert requests.ranks == ((0, 2), (1, 3), (4, 6), (5, 7))  # replicas are TP ranks apart
    last = held(requests, 7)
    assert {"model.layers.2.input_layernorm.weight", "model.norm.weight", "lm_head.weight"} <= last.keys()
    assert "model.embed_tokens.weight" not in last


def test_fully_sharded_ranks_cut_what_the_tensor_parallel_ones_left() -> None:
    requests = requests_of(model_of_tensors(entries()), Parallel(tp=2, dp=3, fsdp=True))
    assert requests.ranks == tuple((rank,) for rank in range(6))
    query = "model.layers.0.self_attn.q_proj.weight"  # 4 rows for each column: 2, 2 and nothing
    assert [held(requests, rank).get(query) for rank in range(6)] == [
        (Runs(0, 32, ()),), (Runs(64, 32, ()),), (Runs(32, 32, ()),), (Runs(96, 32, ()),), None, None,
    ]  # fmt: skip


@pytest.mark.parametrize("nbytes", [1, 1000, 10**9 + 7, 13_800 * 10**9])
def test_a_model_of_a_size_has_that_size(nbytes: int) -> None:
    parallel = Parallel(tp=8, pp=4)
    model = model_of_size(nbytes, parallel)
    assert model.nbytes == nbytes
    assert model.num_layers % 4 == 0
    assert all(cut.nbytes > 0 for cut in model.tensors)
    requests_of(model, parallel)


def test_more_stages_than_layers() -> None:
    with pytest.raises(OptionError, match="5 stages of a pipeline: the checkpoint has 4 layers"):
        requests_of(model_of_tensors(entries()), Parallel(pp=5))
