"""Checks of optimizers when their states exist."""

from __future__ import annotations

import torch

from fastload.integrations.frameworks import require_storable_states


def test_optimizers_with_other_hooks_take_their_first_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    calls: list[str] = []
    require_storable_states([optimizer])
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))  # such as of float8 in accelerate
    require_storable_states([optimizer])
    parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.step()
    assert calls == ["after", "after"]
