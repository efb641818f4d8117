"""Host memory: what the system is asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastload.memory import allocate, allocate_staging

_NBYTES = 8 << 20


def flags_of(tensor: Tensor) -> set[str]:
    """Returns the kernel's flags of the mapping that holds a tensor's middle."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    mappings = re.findall(
        r"^(\w+)-(\w+) .*?^VmFlags: (.*?)$", Path("/proc/self/smaps").read_text(), re.M | re.S
    )
    return next(
        set(flags.split()) for start, end, flags in mappings if int(start, 16) <= middle < int(end, 16)
    )


@pytest.mark.parametrize("what", ["staging", "destination"])
def test_large_buffers_ask_for_huge_pages_that_only_private_memory_gets(what: str) -> None:
    if what == "staging":
        tensor = allocate_staging(_NBYTES, pinned=False)
    else:
        tensor = allocate((_NBYTES,), torch.uint8, torch.device("cpu"))
    flags = flags_of(tensor)
    assert "hg" in flags
    assert "sh" not in flags
