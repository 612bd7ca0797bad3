"""Costs of operations for a detector, and how it gets them."""

import numpy as np


def feed(found, groups, costs):
    return found.observe(groups, costs, np.full(groups.size, costs.shape[0]))[0]


def lognormal(seed, shape, sigma=0.03):
    return np.random.default_rng(seed).lognormal(0.0, sigma, shape) * 1e8


def add_bursts(costs, since, until, every, factor, seed=0):
    """Make a worker of the first group slow in one operation of so many, at random."""
    by_sums = np.random.default_rng(seed).random(until - since) < 1 / every
    costs[since:until, 0, 1] *= np.where(by_sums, factor, 1.0)
    return costs
