"""Memory of several tensors: which views share it, and what is written there for which of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fastload
from fastload.errors import MismatchError
from fastload.loading.aliases import AliasedMemory, find_aliases


def test_assignments_are_those_of_a_model_by_the_byte() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        memory, model = AliasedMemory("abc"), dict[int, int]()
        for _ in range(30):
            begin = draw.randrange(60)
            end, number = begin + draw.randrange(20), draw.randrange(3)
            found = {
                at: other
                for first, last, other in memory.assign(begin, end, number)
                for at in range(first, last)
            }
            expected = {
                at: None if model.get(at, number) == number else model[at] for at in range(begin, end)
            }
            assert found == expected, seed
            for at in range(begin, end):
                model.setdefault(at, number)
    memory.note(2, 0)
    memory.note(0, 2)
    assert memory.differing == ["a and c go into the same memory, but have different values"]
    memory.reset()
    assert memory.differing == []
    assert list(memory.assign(0, 60, 1)) == [(0, 60, None)]


def test_only_views_with_common_elements_are_found() -> None:
    base = torch.zeros(40, 30)
    other = torch.zeros(7)
    disjoint = [
        [base[:20], base[20:], other],
        [base[:, :10], base[:, 10:11], base[:, 11:]],
        [base[:10, 20:], base[:20, :20], base[30:, 5:]],
        [base.T[:5], base.T[5:]],
        [base[:, 3], base[:, 4], base[:0]],
        [torch.empty(3, device="meta"), torch.empty(3, device="meta")],
    ]
    for tensors in disjoint:
        assert find_aliases(tensors) == [], [tensor.shape for tensor in tensors]
    shared: list[tuple[list[Tensor], list[list[int]]]] = [
        ([base, other, base], [[0, 2]]),
        ([base[:20], base[19:], other, other[3:]], [[0, 1], [2, 3]]),
        ([base[:, :11], base[:, 10:]], [[0, 1]]),
        ([base, base.T], [[0, 1]]),
        ([base[3:9, 2:8], base[8:, 7:]], [[0, 1]]),
        ([base[:, 29], base.view(-1)[1199:]], [[0, 1]]),
        ([base.view(torch.int32), base[39, 29]], [[0, 1]]),
    ]
    for tensors, expected in shared:
        assert sorted(find_aliases(tensors)) == expected, [tensor.shape for tensor in tensors]


def test_drawn_views() -> None:
    """Whatever shares an element is found; what does not is left alone, or compared for nothing."""
    for seed in range(300):
        draw = random.Random(seed)
        base = torch.zeros(12, 9)
        views = []
        for _ in range(2):
            rows, columns = sorted(draw.sample(range(13), 2)), sorted(draw.sample(range(10), 2))
            view = base[rows[0] : rows[1], columns[0] : columns[1]]
            views.append(view.T if draw.random() < 0.3 else view)
        base.zero_()
        views[0].fill_(1)
        if bool(views[1].any()):
            assert find_aliases(views) == [[0, 1]], seed


@pytest.mark.parametrize("differs", [False, True])
def test_quantised_weights_in_one_memory(tmp_path: Path, differs: bool) -> None:
    values = torch.arange(-64.0, 64.0).reshape(8, 16).to(torch.float8_e4m3fn)
    other = values.clone()
    if differs:
        other[7, 15] = 0
    tensors = {"a.weight": values, "b.weight": other}
    tensors |= {f"{name}_scale_inv": torch.full((1, 1), 0.5) for name in tensors}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shared = torch.zeros(8, 16)
    into = {"a.weight": shared, "b.weight": shared}
    options = fastload.LoadOptions(dequantize=True)
    if differs:
        with pytest.raises(MismatchError, match=r"a\.weight and b\.weight go into the same memory"):
            fastload.load(tmp_path, into=into, options=options)
    else:
        fastload.load(tmp_path, into=into, options=options)
        assert torch.equal(shared, values.float() * 0.5)


def test_flat_memory_with_views_of_several_dtypes(tmp_path: Path) -> None:
    """Bytes that one tensor gets as integers, and another one as numbers of another length."""
    flat = torch.arange(64, dtype=torch.uint8)
    words = flat[3:43].clone().view(torch.int64)
    save_file({"flat": flat, "words": words}, tmp_path / "same.safetensors")
    save_file({"flat": flat, "words": words + 1}, tmp_path / "differ.safetensors")
    for chunk_bytes in (5, 64):
        options = fastload.LoadOptions(chunk_bytes=chunk_bytes)
        memory = torch.zeros(72, dtype=torch.uint8)[5:69]
        memory = memory[-(memory.data_ptr() + 3) % 8 :]  # words are aligned
        given = torch.zeros(64 + 8, dtype=torch.uint8)
        given = given[-(given.data_ptr() + 3) % 8 :][:64]
        into = {"flat": given, "words": given[3:43].view(torch.int64)}
        fastload.load(tmp_path / "same.safetensors", into=into, options=options)
        assert torch.equal(given, flat)
        with pytest.raises(MismatchError, match=r"(flat|words) and (flat|words) go into the same memory"):
            fastload.load(tmp_path / "differ.safetensors", into=into, options=options)


class Renaming(nn.Module):
    """A tied model whose own `load_state_dict` copies both tensors, the later one last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(4))
        self.head = self.embed

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({name: state_dict.pop(name) for name in list(state_dict)}, strict)


def test_a_load_state_dict_that_copies_both(tmp_path: Path) -> None:
    for head in (torch.ones(4), torch.tensor([1.0, 1.0, 2.0, 1.0])):
        save_file({"embed": torch.ones(4), "head": head}, tmp_path / "model.safetensors")
        model = Renaming()
        if bool((head == 1).all()):
            fastload.load(tmp_path, into=model)
            assert model.embed.tolist() == [1, 1, 1, 1]
        else:
            with pytest.raises(MismatchError, match="head and embed go into the same memory"):
                fastload.load(tmp_path, into=model)


class _TransposesHead(nn.Module):
    """A tied model whose hook turns the head of an older layout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_load_state_dict_pre_hook(self._turn)  # type: ignore[no-untyped-call]

    @staticmethod
    def _turn(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        if state["head.weight"].shape == (4, 6):
            state["head.weight"] = state["head.weight"].T


def test_a_hook_that_makes_one_of_two_tied_tensors(tmp_path: Path) -> None:
    """The other one is read into the memory of both, and `load_state_dict` copies the hook's over it."""
    embed, head = torch.randn(6, 4), torch.randn(4, 6)
    fastload.save({"embed.weight": embed, "head.weight": embed.T.contiguous()}, tmp_path / "same")
    model = _TransposesHead()
    fastload.load(tmp_path / "same", into=model)
    assert torch.equal(model.embed.weight, embed)
    fastload.save({"embed.weight": embed, "head.weight": head}, tmp_path / "differ")
    with pytest.raises(MismatchError, match=r"embed\.weight and head\.weight go into the same memory"):
        fastload.load(tmp_path / "differ", into=_TransposesHead())
