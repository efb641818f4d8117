"""Parameters by shape and by config: published totals, and what transformers builds."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import OptionError
from fastload.planning.parameters import KNOWN, of_config, of_shape

LLAMA_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def decoder(
    kind: str, hidden: int, inner: int, layers: int, heads: int, shared: int, vocab: int, **more: Any
):  # type: ignore[no-untyped-def]
    return {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": shared, "vocab_size": vocab, **more,
    }  # fmt: skip


PUBLISHED = [
    (124_439_808, {
        "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "vocab_size": 50257, "n_positions": 1024,
    }),
    (6_738_415_616, decoder("llama", 4096, 11008, 32, 32, 32, 32000)),
    (13_015_864_320, decoder("llama", 5120, 13824, 40, 40, 40, 32000)),
    (8_030_261_248, LLAMA_8B),
    (70_553_706_496, decoder("llama", 8192, 28672, 80, 64, 8, 128256)),
    (405_853_388_800, decoder("llama", 16384, 53248, 126, 128, 8, 128256)),
    (7_241_732_096, decoder("mistral", 4096, 14336, 32, 32, 8, 32000)),
    (46_702_792_704, decoder("mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8)),
    (7_615_616_512, decoder("qwen2", 3584, 18944, 28, 28, 4, 152064)),
    (8_190_735_360, decoder("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128)),
    (8_537_680_896, decoder("gemma", 3072, 24576, 28, 16, 16, 256000, head_dim=256)),
    (9_241_705_984, decoder("gemma2", 3584, 14336, 42, 16, 8, 256000, head_dim=256)),
    (3_821_079_552, decoder("phi3", 3072, 8192, 32, 32, 32, 32064)),
    (20_554_567_680, decoder("gpt_neox", 6144, 24576, 44, 64, 64, 50432)),
    (125_239_296, {
        "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12,
        "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 768,
    }),
    (331_196_416, {
        "model_type": "opt", "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24,
        "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 512,
        "do_layer_norm_before": False,
    }),
    (176_247_271_424, {"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "vocab_size": 250880}),
    (109_482_240, {
        "model_type": "bert", "architectures": ["BertModel"], "hidden_size": 768, "intermediate_size": 3072,
        "num_hidden_layers": 12, "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2,
    }),
    (124_697_433, {
        "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "hidden_size": 768,
        "intermediate_size": 3072, "num_hidden_layers": 12, "vocab_size": 50265,
        "max_position_embeddings": 514, "type_vocab_size": 1,
    }),
]  # fmt: skip


@pytest.mark.parametrize(("num", "config"), PUBLISHED, ids=lambda value: str(value)[:16])
def test_published_totals(num: int, config: dict[str, Any]) -> None:
    counted = of_config(config)
    assert (counted.num, counted.exact) == (num, True)


SMALL = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3,
    "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
POSITIONS = {**SMALL, "max_position_embeddings": 33}
OPT = {**POSITIONS, "ffn_dim": 72, "word_embed_proj_dim": 48}
EXPERTS = {
    **GROUPED, "num_hidden_layers": 5, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20, "decoder_sparse_step": 2, "mlp_only_layers": [1, 2],
}  # fmt: skip
BUILT = [
    ("LlamaForCausalLM", SMALL),
    ("LlamaForCausalLM", {**GROUPED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("LlamaModel", {**GROUPED, "head_dim": 16}),
    ("MistralForCausalLM", GROUPED),
    ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 5}),
    ("Qwen2ForCausalLM", GROUPED),
    ("Qwen3ForCausalLM", GROUPED),
    ("Qwen3MoeForCausalLM", EXPERTS),
    ("GemmaForCausalLM", GROUPED),
    ("Gemma2ForCausalLM", GROUPED),
    ("Phi3ForCausalLM", GROUPED),
    ("GPT2LMHeadModel", {**POSITIONS, "n_inner": 50, "tie_word_embeddings": False}),
    ("GPT2Model", POSITIONS),
    ("GPTNeoXForCausalLM", SMALL),
    ("GPTNeoXForCausalLM", {**SMALL, "attention_bias": False, "tie_word_embeddings": True}),
    ("OPTForCausalLM", OPT),
    ("OPTForCausalLM", {**OPT, "word_embed_proj_dim": 24, "do_layer_norm_before": False}),
    ("OPTModel", {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("BloomForCausalLM", SMALL),
    ("BertModel", POSITIONS),
    ("BertForMaskedLM", POSITIONS),
    ("BertForPreTraining", POSITIONS),
    ("RobertaForMaskedLM", POSITIONS),
    ("XLMRobertaModel", POSITIONS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "sizes"), BUILT)
def test_as_many_as_transformers_builds(architecture: str, sizes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, architecture)
    config = kind.config_class(**sizes, architectures=[architecture])
    with torch.device("meta"):
        model = kind(config)
    model.tie_weights()
    counted = of_config(json.loads(config.to_json_string()))
    assert (counted.num, counted.exact) == (sum(p.numel() for p in model.parameters()), True)


def test_every_known_architecture_is_checked_against_transformers() -> None:
    names = {architecture.lower() for architecture, _ in BUILT}
    assert [
        kind
        for kind in KNOWN
        if not any(name.startswith(kind.replace("_", "").replace("-", "")) for name in names)
    ] == []


# Billions, layers, hidden size: Megatron's GPT family with V = 51200, s = 2048.
FAMILY = [
    (1.7, 24, 2304), (3.6, 30, 3072), (7.5, 36, 4096), (18.4, 40, 6144), (39.1, 48, 8192), (76.1, 60, 10240),
    (145.6, 80, 12288), (310.1, 96, 16384), (529.6, 105, 20480), (1008.0, 128, 25600),
]  # fmt: skip


@pytest.mark.parametrize(("billions", "layers", "hidden"), FAMILY)
def test_megatrons_family(billions: float, layers: int, hidden: int) -> None:
    counted = of_shape(num_layers=layers, hidden=hidden, vocabulary=51200, sequence=2048)
    assert abs(counted.num / 1e9 - billions) <= 0.05, "within the precision of the table"
    published = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (51200 + 2048) / (12 * layers * hidden))
    assert counted.num == pytest.approx(published, rel=1e-12)
    assert not counted.exact
    assert "Megatron" in counted.source


def test_an_unknown_architecture_is_an_estimate_that_says_so() -> None:
    counted = of_config({**LLAMA_8B, "model_type": "llama7"})
    assert not counted.exact
    assert "estimate for unknown model_type 'llama7'" in counted.source
    assert counted.num == pytest.approx(8.03e9, rel=0.2)


def test_an_unknown_head_is_not_counted_and_said() -> None:
    counted = of_config({**LLAMA_8B, "architectures": ["LlamaForSequenceClassification"]})
    assert counted.num == 8_030_261_248 - 128256 * 4096
    assert not counted.exact
    assert "its head not counted" in counted.source


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "this llama model has no hidden_size"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"hidden_size": 0}, "hidden_size=0 is not a whole number above 0"),
        ({"hidden_size": -4096}, "hidden_size=-4096"),
        ({"hidden_size": "4096"}, "hidden_size='4096'"),
        ({"hidden_size": float("nan")}, "hidden_size=nan"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"hidden_size": 10**30}, "hidden_size=1000"),
        ({"model_type": None}, "has no model_type"),
        ({"model_type": "mistral", "num_key_value_heads": None}, "mistral model has no num_key_value_heads"),
        ({"model_type": "new", "n_routed_experts": 64}, "mixture of experts of unknown model_type 'new'"),
        ({"model_type": "new", "hidden_size": None}, "has no hidden_size or n_embd"),
    ],
)
def test_configs_that_cannot_be_counted(change: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words) as raised:
        of_config({**LLAMA_8B, **change})
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("bad", [[], "text", 7, None])
def test_no_object(bad: Any) -> None:
    with pytest.raises(OptionError, match="not a JSON object"):
        of_config(bad)


def test_shapes_that_cannot_be_counted() -> None:
    with pytest.raises(OptionError, match="hidden=0"):
        of_shape(num_layers=2, hidden=0, vocabulary=5, sequence=5)


values = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers())
)


@given(
    st.sampled_from([*KNOWN, "other"]),
    st.dictionaries(st.sampled_from([*LLAMA_8B, "mlp_only_layers"]), values),
)
def test_hostile_configs_end_in_a_number_or_one_error(kind: str, change: dict[str, Any]) -> None:
    with contextlib.suppress(OptionError):
        assert of_config({**LLAMA_8B, **change, "model_type": kind}).num > 0
