"""The grid of ranks: every chunk comes to every rank once, into every host once, in few hops."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.transfer.messages import _GOOD_DIM, Grid, dims_of, is_gather
from fastload.transfer.plan import ReaderWindows
from tests.drawn import draws


@pytest.mark.parametrize(
    ("num_hosts", "dims"),
    [(1, ()), (2, (2,)), (8, (8,)), (11, (5, 2)), (12, (6, 2)), (13, (6, 2)), (32, (8, 4)), (127, (7, 6, 3)),
     (384, (8, 8, 6)), (2047, (5, 5, 3, 3, 3, 3)), (2048, (8, 8, 8, 4))],
)  # fmt: skip
def test_hosts_are_factored_into_short_dimensions(num_hosts: int, dims: tuple[int, ...]) -> None:
    assert dims_of(num_hosts) == dims


def test_uneven_hosts_are_one_axis() -> None:
    grid = Grid.of(["a", "b", "a", "a"])
    assert grid == Grid((0, 2, 3, 1), (), 4)
    assert [grid.axis(3, phase) for phase in range(grid.num_phases)] == [(3,), (0, 2, 3, 1)]
    assert [Grid.of(["a"]).axis(0, phase) for phase in range(2)] == [(0,), (0,)]


@draws(40)
@given(num_hosts=st.integers(1, 40), num_locals=st.integers(1, 4), data=st.data())
def test_every_chunk_comes_to_every_rank_once(num_hosts: int, num_locals: int, data: st.DataObject) -> None:
    hosts = data.draw(st.permutations([host for host in range(num_hosts) for _ in range(num_locals)]))
    grid, ranks = Grid.of(hosts), range(len(hosts))
    drawn = data.draw(st.lists(st.sampled_from(ranks), unique=True, max_size=12))
    owners = grid.in_order(drawn)
    assert sorted(owners) == sorted(drawn)
    moves = {rank: grid.moves(owners, rank) for rank in ranks}
    has = {rank: {rank} & set(owners) for rank in ranks}
    entered = dict.fromkeys(((host, owner) for host in set(hosts) for owner in owners), 0)
    for dim in range(grid.num_phases):
        before = {rank: set(chunks) for rank, chunks in has.items()}
        for rank in ranks:
            axis, here = grid.axis(rank, dim), moves[rank][dim]
            assert rank in axis
            assert all(axis == grid.axis(peer, dim) for peer in axis)
            assert len(axis) <= max(9, 2 * _GOOD_DIM, num_locals)
            assert all(here == moves[peer][dim] for peer in axis)  # it is a collective
            assert len({move.root for move in here}) == len(here)
            if is_gather(here, len(axis)):
                assert {move.end - move.begin for move in here} == {
                    (here[-1].end - here[0].begin) // len(axis)
                }
            for move in here:
                coming = owners[move.begin : move.end]
                assert set(coming) <= before[axis[move.root]]
                if axis[move.root] == rank:
                    continue
                again = set(coming) & has[rank]  # its own, in the axis that brings an extra host all others
                assert not again or again == {rank}
                has[rank] |= set(coming)
                if hosts[axis[move.root]] != hosts[rank]:
                    for owner in set(coming) - again:
                        entered[hosts[rank], owner] += 1
    assert all(chunks == set(owners) for chunks in has.values())
    for (host, owner), count in entered.items():
        assert count == (host != hosts[owner])


@pytest.mark.parametrize(
    ("num_hosts", "num_locals", "num_windows"), [(8, 8, 1), (32, 8, 4), (6, 2, 3), (4, 2, 1)]
)
def test_of_windows_of_readers_each_member_has_as_much(
    num_hosts: int, num_locals: int, num_windows: int
) -> None:
    """In the last phases, through which most bytes go: no rank is the root of more than another."""
    hosts = [f"host{rank // num_locals}" for rank in range(num_hosts * num_locals)]
    grid, windows = Grid.of(hosts), ReaderWindows.of(range(len(hosts)), hosts, num_windows, by_local=True)
    for readers in windows.readers:
        assert list(readers) == grid.in_order(readers)
        for rank in range(len(hosts)):
            *_, last = grid.moves(readers, rank)
            assert is_gather(last, num_locals)
