"""Bets and the small tools under them, each against its definition or an obvious loop."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingero.detect.medians import leave_one_out_median
from ingero.detect.ranks.e_values import POOLED_KAPPAS, RANK_KAPPAS, grid_bet, majority_bet
from ingero.detect.ranks.wealth import accumulate
from ingero.detect.sorted_rows import SortedRows, count_below, count_level, padded_width


@given(st.integers(1, 300))
def test_a_bet_on_a_grid_is_worth_one_on_average(n):
    above = np.arange(n)
    for kappas in (RANK_KAPPAS, POOLED_KAPPAS):
        bets = grid_bet(above, np.zeros(n, np.int64), np.full(n, n), kappas)
        assert bets.mean() == pytest.approx(1.0, rel=1e-9)
        assert (np.diff(bets) <= 1e-12).all()
    bets = majority_bet(above, np.zeros(n, np.int64), np.full(n, n))
    assert bets.mean() == pytest.approx(1.0, rel=1e-9)
    assert (bets[: n // 2] > 1.0).all()
    assert (bets[n // 2 :] <= 1.0 + 1e-12).all()


@given(st.integers(1, 30), st.data())
def test_positions_that_tie_share_the_mean_of_their_weights(n, data):
    above = data.draw(st.integers(0, n - 1))
    level = data.draw(st.integers(0, n - 1 - above))
    shared = grid_bet(np.array([above]), np.array([level]), np.array([n]), RANK_KAPPAS)[0]
    each = grid_bet(
        np.arange(above, above + level + 1),
        np.zeros(level + 1, np.int64),
        np.full(level + 1, n),
        RANK_KAPPAS,
    )
    assert shared == pytest.approx(each.mean())


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=6),
    st.lists(st.integers(-1, 10), min_size=1, max_size=8),
    st.booleans(),
)
def test_counting_below_and_level_agrees_with_the_obvious_loop(rows, queries, padded):
    ordered = np.sort(np.array(rows, float), axis=1)
    if padded:
        wide = np.full((len(rows), padded_width(3)), np.inf)
        wide[:, :3] = ordered
    else:
        wide = ordered
    row_idx = np.arange(len(rows))[:, None]
    wanted = np.broadcast_to(np.array(queries, float), (len(rows), len(queries)))
    below = count_below(wide, row_idx, wanted)
    level = count_level(wide, row_idx, wanted, below)
    for r, row in enumerate(rows):
        for q, query in enumerate(queries):
            assert below[r, q] == sum(v < query for v in row)
            assert level[r, q] == sum(v == query for v in row)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=5, max_size=5),
        min_size=1,
        max_size=6,
    )
)
def test_leave_one_out_median_agrees_with_the_obvious_loop(rows):
    x = np.array([[v for v, _ in row] for row in rows], float)
    is_ref = np.array([[ref for _, ref in row] for row in rows])
    ordered = np.sort(np.where(is_ref, x, np.inf), axis=1)
    position = count_below(ordered, np.arange(len(rows))[:, None], x)
    medians = leave_one_out_median(ordered, is_ref.sum(axis=1, keepdims=True), position, is_ref)
    for r, row in enumerate(rows):
        for i in range(5):
            others = [v for j, (v, ref) in enumerate(row) if ref and j != i]
            if others:
                assert medians[r, i] == statistics.median(others)
            else:
                assert math.isnan(medians[r, i])


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=40), st.floats(-1, 3))
def test_accumulating_agrees_with_the_recursion(gains, before):
    values, starts = accumulate(np.array([[before]]), np.array(gains)[:, None, None])
    s, start = before, -1
    for t, gain in enumerate(gains):
        if s <= 0:
            start, s = t, 0.0
        s += gain
        assert values[t, 0, 0] == pytest.approx(s)
        assert starts[t, 0] == start


@given(st.integers(1, 130), st.integers(0, 2**32 - 1))
def test_sorted_rows_count_as_the_obvious_loop_does_whatever_their_length(n_entries, seed):
    rng = np.random.default_rng(seed)
    rows = SortedRows(n_entries)
    rows.add(3)
    ordered = np.sort(rng.integers(0, 20, (3, n_entries)).astype(np.float32), axis=1)
    ordered[1, n_entries // 2 :] = np.inf
    rows.put(np.array([0, 1, 2]), ordered)
    queries = rng.integers(-1, 22, (2, 3, 4)).astype(float)
    row_idx = np.arange(3)[:, None]
    below = rows.count_below(row_idx, queries)
    level = rows.count_level(row_idx, queries, below)
    for at in np.ndindex(queries.shape):
        row = ordered[at[1]].tolist()
        assert below[at] == sum(value < queries[at] for value in row)
        assert level[at] == sum(value == queries[at] for value in row)
