"""Residuals that are added a block at a time: the same as one operation after another."""

import numpy as np
import pytest

from ingero.detect.ranks.autocorrelation import BlockMeans

N_GROUPS, N_PEERS = 5, 4


def build(draw):
    means = BlockMeans(N_PEERS)
    means.add_groups(N_GROUPS)
    before = draw.normal(0, 0.5, (3, N_GROUPS, N_PEERS))
    means.add(np.arange(N_GROUPS), before, np.full(N_GROUPS, 3))
    return means


@pytest.mark.parametrize("groups", [[0, 1, 2, 3, 4], [1, 2], [0, 2, 3], [1, 4], [3]])
@pytest.mark.parametrize("n_ops", [1, 2, 3, 5, 8, 21, 200])
@pytest.mark.parametrize("is_even", [True, False])
def test_a_block_counts_as_its_operations_do(groups, n_ops, is_even):
    rows, draw = np.array(groups), np.random.default_rng(n_ops)
    together, single = build(draw), build(np.random.default_rng(n_ops))
    for _ in range(3):
        residuals = draw.normal(0, 0.5, (n_ops, rows.size, N_PEERS))
        residuals[draw.random(residuals.shape) < 0.1] = np.nan
        taken = np.full(rows.size, n_ops) if is_even else draw.integers(1, n_ops + 1, rows.size)
        together.add(rows, residuals, taken)
        for op in range(n_ops):
            for at in np.flatnonzero(op < taken):
                single.add(rows[[at]], residuals[op : op + 1, [at]], np.array([1]))
    every = np.arange(N_GROUPS)
    for read in (BlockMeans.spread, BlockMeans.levels):
        np.testing.assert_array_equal(read(together, every), read(single, every))
    for one, other in zip(together.estimate(every), single.estimate(every), strict=True):
        np.testing.assert_array_equal(one, other)
