"""How what ranks want is cut into windows: everything once, in order, as much as there is room for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastload.ext.streams.tensors import cut_windows


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=8, max_size=8), min_size=1, max_size=4),
    st.integers(1, 120),
)
def test_windows_are_full_and_fit(lengths: list[list[int]], room: int) -> None:
    windows = cut_windows(lengths, room)
    assert [index for window in windows for index in window] == list(range(8))
    for window, after in zip(windows, [*windows[1:], None], strict=True):
        sums = [sum(of_rank[index] for index in window) for of_rank in lengths]
        wanted = [index for index in window if any(of_rank[index] for of_rank in lengths)]
        assert max(sums) <= room or len(wanted) == 1
        if after is not None:  # the next one would not have fitted
            assert max(total + of_rank[after[0]] for total, of_rank in zip(sums, lengths, strict=True)) > room
