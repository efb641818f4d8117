"""Counts the parameters of a model by its shape, its Hugging Face ``config.json``, or a checkpoint. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastload.base.units import require_whole
from fastload.errors import OptionError
from fastload.formats.manifest import Manifest, TensorEntry
from fastload.formats.state import OWN_PREFIX, optimizer_tensors

_MOST = 10**9  # no size in a config is larger
_FLOATS = ("F", "BF", "C")  # first letters of the safetensors dtypes of parameters
# Names of the state that optimizers of torch and Megatron have for each parameter.
_MOMENTS = frozenset(
    """
    acc_delta exp_avg exp_avg_sq exp_inf fp32_param grad_avg max_exp_avg_sq momentum_buffer square_avg
    """.split()
)
_AVERAGED = re.compile(r"(^|_)(ema|swa|polyak|shadow|averaged?)(_|$)", re.IGNORECASE)
_WITH_HEAD = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True, slots=True)
class Parameters:
    """A number of parameters.

    Attributes:
        num: The number.
        exact: Whether the number is exact for such a model.
        source: Description of its origin.
    """

    num: int
    exact: bool
    source: str


def of_shape(*, num_layers: int, hidden: int, vocabulary: int, sequence: int) -> Parameters:
    """Counts the parameters of a GPT of a given shape.

    ``P = 12·l·h²·(1 + 13/(12h) + (V+s)/(12·l·h))``, which is 12·l·h² + 13·l·h + (V+s)·h: equation 2 of
    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    SC 2021.

    Args:
        num_layers: Transformer layers l.
        hidden: Hidden size h.
        vocabulary: Tokens V.
        sequence: Positions s with an embedding.

    Raises:
        OptionError: An argument is not a whole number above 0.
    """
    require_whole(num_layers=num_layers, hidden=hidden, vocabulary=vocabulary, sequence=sequence)
    num = _megatron(num_layers, hidden, vocabulary, sequence)
    return Parameters(
        num, False, f"Megatron's formula: {num_layers} layers of {hidden}, vocabulary {vocabulary}"
    )


def of_config(config: Mapping[str, Any]) -> Parameters:
    """Counts the parameters of a Hugging Face model by its ``config.json``.

    Exact for the architectures of `KNOWN` as transformers builds them (tied weights count once, buffers
    do not); for any other dense transformer an estimate by Megatron's formula without positions.

    Raises:
        OptionError: Fields are missing or not sizes, or the model is not a known kind.
    """
    fields = _Fields(config)
    kind = fields.kind
    count = KNOWN.get(kind)
    if count is None:
        return _estimate(fields)
    num, exact = count(fields)
    layers, hidden = fields.size("num_hidden_layers", "n_layer"), fields.size(*_HIDDEN)
    label = fields.architecture or kind
    note = "" if exact else ", its head not counted"
    return Parameters(num, exact, f"{label}: {layers} layers of {hidden}{note}")


def of_checkpoint(manifest: Manifest) -> Parameters:
    """Counts the parameters of the model in a checkpoint.

    Optimizer state is not counted: tensors in a dict with ``state`` and ``param_groups``, or next to a tensor
    with a name such as ``exp_avg``. Nor are averages of the model: tensors below a name such as ``ema``, if
    as many others have their shapes.
    """
    floats = [
        entry
        for entry in manifest.tensors
        if entry.dtype.startswith(_FLOATS) and not entry.name.startswith(OWN_PREFIX)
    ]
    kept = _optimizer_names(manifest, [entry.name for entry in floats])
    states = [entry for entry in floats if entry.name in kept]
    copies = _averaged([entry for entry in floats if entry.name not in kept])
    num, num_kept, num_copied = map(_num_elements, (floats, states, copies))
    left_out = [
        f"{num:,} {what}"
        for num, what in ((num_kept, "values of optimizers"), (num_copied, "of averages"))
        if num
    ]
    source = f"{len(manifest.tensors)} tensors of {manifest.url}"
    if left_out:
        source += f", without {' and '.join(left_out)}"
    return Parameters(num - num_kept - num_copied, True, source)


def _num_elements(entries: Iterable[TensorEntry]) -> int:
    return sum(math.prod(entry.shape) for entry in entries)


def _optimizer_names(manifest: Manifest, names: Iterable[str]) -> set[str]:
    """Returns the names of optimizer state."""
    found = set[str]().union(*optimizer_tensors(manifest.structure).stored.values())
    parts = {name: name.split(".") for name in names}
    below = {tuple(part[:-1]) for part in parts.values() if part[-1] in _MOMENTS}
    found.update(
        name for name, part in parts.items() if tuple(part[:-1]) in below or not _MOMENTS.isdisjoint(part)
    )
    return found


def _averaged(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Returns tensors that are averages of others."""
    groups: dict[tuple[str, ...], list[TensorEntry]] = {}
    for entry in entries:
        parts = entry.name.split(".")
        place = next((at for at, part in enumerate(parts[:-1]) if _AVERAGED.search(part)), None)
        groups.setdefault(() if place is None else tuple(parts[: place + 1]), []).append(entry)
    models = Counter(entry.shape for entry in groups.pop((), []))
    return [
        entry for group in groups.values() if Counter(one.shape for one in group) <= models for entry in group
    ]


_HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")


class _Fields:
    """An untrusted config: every field is checked before use."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        if not isinstance(config, Mapping):
            raise OptionError("the config is not a JSON object")
        self._config = config
        kind = config.get("model_type")
        if not isinstance(kind, str):
            raise OptionError("the config has no model_type")
        self.kind = kind
        architectures = config.get("architectures")
        names = architectures if isinstance(architectures, list) else []
        self.architecture = names[0] if names and isinstance(names[0], str) else ""

    def size(self, *names: str, default: int | None = None) -> int:
        """Returns the first of the fields that exists."""
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if type(value) is not int or not 0 < value <= _MOST:
                raise OptionError(f"the config's {name}={value!r:.40} is not a whole number above 0")
            return value
        if default is None:
            raise OptionError(f"the config of this {self.kind} model has no {' or '.join(names)}")
        return default

    def flag(self, name: str, default: bool) -> bool:
        value = self._config.get(name)
        return value if isinstance(value, bool) else default

    def layers(self, name: str) -> frozenset[int]:
        value = self._config.get(name)
        return (
            frozenset(index for index in value if type(index) is int)
            if isinstance(value, list)
            else frozenset()
        )

    def mentions(self, part: str) -> bool:
        return any(part in name for name in self._config)

    @property
    def head(self) -> str:
        """The head: ``lm`` predicts tokens, empty for none, ``?`` for another one."""
        if not self.architecture or self.architecture.endswith(_WITH_HEAD):
            return "lm"
        return "" if self.architecture.endswith("Model") else "?"


def _estimate(fields: _Fields) -> Parameters:
    if fields.mentions("expert"):
        raise OptionError(
            f"cannot estimate a mixture of experts of unknown model_type {fields.kind!r}: "
            "give the number of parameters"
        )
    layers, hidden = fields.size("num_hidden_layers", "n_layer", "num_layers"), fields.size(*_HIDDEN)
    num = _megatron(layers, hidden, fields.size("vocab_size"), 0)
    source = f"estimate for unknown model_type {fields.kind!r}: {layers} layers of {hidden}"
    return Parameters(num, False, source)


def _megatron(num_layers: int, hidden: int, vocabulary: int, sequence: int) -> int:
    return 12 * num_layers * hidden**2 + 13 * num_layers * hidden + (vocabulary + sequence) * hidden


# Each of these functions counts one architecture, and returns (number, whether it is exact).


@dataclass(frozen=True, kw_only=True)
class _Decoder:
    """The differences between Llama-like decoders."""

    qkv_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    tied: bool = False
    head_dim: int | None = None
    experts: bool = False
    expert_size: str = "intermediate_size"

    def __call__(self, fields: _Fields) -> tuple[int, bool]:
        hidden, layers = fields.size("hidden_size"), fields.size("num_hidden_layers")
        embedding = fields.size("vocab_size") * hidden
        sparse = self._num_sparse(fields, layers) if self.experts else 0
        total = embedding + hidden + layers * (self._attention(fields, hidden) + self.norms * hidden)
        if sparse < layers:
            total += (layers - sparse) * self._mlp(fields, hidden, fields.size("intermediate_size"))
        if sparse:
            expert = self._mlp(fields, hidden, fields.size(self.expert_size))
            total += (
                sparse * fields.size("num_experts", "num_local_experts") * (expert + hidden)
            )  # and a row of the router
        if fields.head == "lm" and not fields.flag("tie_word_embeddings", self.tied):
            total += embedding
        return total, fields.head != "?"

    def _attention(self, fields: _Fields, hidden: int) -> int:
        heads = fields.size("num_attention_heads")
        # Only Llama's first configs lack this field: no heads share keys.
        shared = fields.size("num_key_value_heads", default=heads if fields.kind == "llama" else None)
        per_head = fields.size("head_dim", default=self.head_dim or hidden // heads)
        query, key = heads * per_head, shared * per_head
        total = 2 * hidden * (query + key)
        if fields.flag("attention_bias", False):
            total += query + 2 * key + hidden
        elif self.qkv_bias:
            total += query + 2 * key
        return total + (2 * per_head if self.qk_norm else 0)

    def _mlp(self, fields: _Fields, hidden: int, inner: int) -> int:
        return 3 * hidden * inner + (2 * inner + hidden if fields.flag("mlp_bias", False) else 0)

    def _num_sparse(self, fields: _Fields, layers: int) -> int:
        every, dense = fields.size("decoder_sparse_step", default=1), fields.layers("mlp_only_layers")
        return layers // every - sum(1 for index in dense if index < layers and (index + 1) % every == 0)


def _gpt2(fields: _Fields) -> tuple[int, bool]:
    hidden, layers = fields.size("n_embd", "hidden_size"), fields.size("n_layer", "num_hidden_layers")
    inner, embedding = fields.size("n_inner", default=4 * hidden), fields.size("vocab_size") * hidden
    positions = fields.size("n_positions", "max_position_embeddings") * hidden
    total = embedding + positions + layers * _block(hidden, inner) + 2 * hidden
    return total + _untied(fields, embedding, True), fields.head != "?"


def _gpt_neox(fields: _Fields) -> tuple[int, bool]:
    hidden, embedding = fields.size("hidden_size"), fields.size("vocab_size") * fields.size("hidden_size")
    block = _block(hidden, fields.size("intermediate_size"))
    if not fields.flag("attention_bias", True):
        block -= 4 * hidden
    total = embedding + fields.size("num_hidden_layers") * block + 2 * hidden
    return total + _untied(fields, embedding, False), fields.head != "?"


def _opt(fields: _Fields) -> tuple[int, bool]:
    hidden, layers = fields.size("hidden_size"), fields.size("num_hidden_layers")
    width = fields.size("word_embed_proj_dim", default=hidden)
    embedding = fields.size("vocab_size") * width
    total = embedding + (fields.size("max_position_embeddings") + 2) * hidden
    block, inner = _block(hidden, fields.size("ffn_dim")), fields.size("ffn_dim")
    if not fields.flag("enable_bias", True):
        block -= 5 * hidden + inner
    if not fields.flag("layer_norm_elementwise_affine", True):
        block -= 4 * hidden
    total += layers * block + (2 * width * hidden if width != hidden else 0)
    last_norm = fields.flag("do_layer_norm_before", True) and not fields.flag(
        "_remove_final_layer_norm", False
    )
    if last_norm and fields.flag("layer_norm_elementwise_affine", True):
        total += 2 * hidden
    return total + _untied(fields, embedding, True), fields.head != "?"


def _bloom(fields: _Fields) -> tuple[int, bool]:
    hidden, layers = fields.size("hidden_size", "n_embed"), fields.size("n_layer", "num_hidden_layers")
    embedding = fields.size("vocab_size") * hidden
    total = embedding + layers * _block(hidden, 4 * hidden) + 4 * hidden
    return total + _untied(fields, embedding, True), fields.head != "?"


def _bert(fields: _Fields) -> tuple[int, bool]:
    hidden, vocabulary = fields.size("hidden_size"), fields.size("vocab_size")
    tables = vocabulary + fields.size("max_position_embeddings") + fields.size("type_vocab_size")
    block = _block(hidden, fields.size("intermediate_size"))
    total = tables * hidden + 2 * hidden + fields.size("num_hidden_layers") * block
    dense = hidden * hidden + hidden
    masked = dense + 2 * hidden + vocabulary + _untied(fields, vocabulary * hidden, True)
    name = fields.architecture
    if name.endswith("ForMaskedLM"):
        return total + masked, True
    if name == "BertForPreTraining":
        return total + dense + masked + 2 * hidden + 2, True
    return total + dense, not name or name.endswith("Model")


def _block(hidden: int, inner: int) -> int:
    """Counts a plain transformer layer: biases everywhere, two norms with weight and bias."""
    attention, mlp = 4 * (hidden * hidden + hidden), 2 * hidden * inner + inner + hidden
    return attention + mlp + 4 * hidden


def _untied(fields: _Fields, embedding: int, tied: bool) -> int:
    masked = fields.architecture.endswith("ForMaskedLM") or fields.head == "lm"
    return embedding if masked and not fields.flag("tie_word_embeddings", tied) else 0


KNOWN: Mapping[str, Callable[[_Fields], tuple[int, bool]]] = {
    "bert": _bert,
    "bloom": _bloom,
    "gemma": _Decoder(tied=True, head_dim=256),
    "gemma2": _Decoder(tied=True, head_dim=256, norms=4),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _Decoder(),
    "mistral": _Decoder(),
    "mixtral": _Decoder(experts=True),
    "opt": _opt,
    "phi3": _Decoder(),
    "qwen2": _Decoder(qkv_bias=True),
    "qwen3": _Decoder(qk_norm=True, head_dim=128),
    "qwen3_moe": _Decoder(qk_norm=True, experts=True, expert_size="moe_intermediate_size"),
    "roberta": _bert,
    "xlm-roberta": _bert,
}
