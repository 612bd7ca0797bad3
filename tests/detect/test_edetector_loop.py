"""The detector beside a loop that reads as its specification does, one operation after the other."""

import itertools
import math
import statistics
from functools import cache

import numpy as np
import pytest
from tests.detect.fed_costs import add_bursts, feed, lognormal

from ingero.detect.ranks.e_values import POOLED_KAPPAS, RANK_KAPPAS
from ingero.detect.ranks.edetector import EDetector
from ingero.detect.ranks.settings import ALARM, NOTICE, EDetectorSettings


def slow_dependence(history, limits, reach):
    """τ of each tier for one group, and its far limit, from all residuals so far, oldest first."""
    m = len(history)

    def in_blocks(values, n_kept, width):
        padded = [math.nan] * (n_kept - len(values[-n_kept:])) + values[-n_kept:]
        return [sum(padded[at : at + width]) / width for at in range(0, n_kept, width)]

    lengths, reaches, spreads = [], [], []
    for worker in history:
        clipped = [float(np.float32(min(max(r, -0.7), 0.7))) for r in worker]
        exact = [min(max(r, -0.7), 0.7) for r in worker]
        coarse = [
            float(np.float32(sum(exact[at : at + 8]) / 8)) for at in range(0, len(exact) - 7, 8)
        ]
        length, greatest, far = 1.0, 0.0, 0.0
        for level in range(10):
            means = (
                in_blocks(clipped, 64, 2**level)
                if level < 3
                else in_blocks(coarse, 256, 2 ** (level - 3))
            )
            known = sorted(
                (b - a) ** 2 for a, b in itertools.pairwise(means) if not math.isnan(b - a)
            )
            if len(known) < 6 or known[(len(known) - 1) // 2] <= 0:
                continue
            variance = known[(len(known) - 1) // 2] / (2 * 0.4549)
            greatest = max(greatest, variance)
            length = max(length, 2**level * variance / greatest)
            if level >= 3:
                far = max(far, math.sqrt(variance))
        lengths.append(length)
        reaches.append(far)
        spreads.append(statistics.pstdev(coarse[-256:]) if coarse else 0.0)
    middle = (m - 1) // 2
    length, far = sorted(lengths)[middle], sorted(reaches)[middle]
    if not (reach > min(limits) or 3 * sorted(spreads)[middle] > min(limits)):
        length, far = 1.0, 0.0
    wide = [
        reach > limits[ALARM] or 3 * far > limits[ALARM],
        (2 * far if far else reach) > limits[NOTICE],
    ]
    known = max(reach, 3 * far, 3 * sorted(spreads)[middle], limits[ALARM])
    farthest = math.inf if wide[ALARM] and not far else known
    return [max(math.ceil(length), 2) if is_wide else 1 for is_wide in wide], farthest


@cache
def mean_power(kappa, n):
    """By which a bet on a rank among ``n`` is divided, so that its mean is 1."""
    return sum(j ** (kappa - 1) for j in range(1, n + 1)) / n


def slow_edetector(costs, config):  # noqa: C901, PLR0912, PLR0915 - one loop that reads as the specification does
    """One group, one operation at a time, as the specification reads; returns (op, worker, tier, is_alarm)."""
    n_ops, m = costs.shape
    need = math.log(1 / config.alpha)
    s, half, rank, sums = (np.zeros((2, m)) for _ in range(4))
    far, far_limit = np.zeros((2, m)), math.log1p(config.slowdowns[ALARM])
    clear, sums_peak = np.zeros((2, m)), np.zeros((2, m))
    alarmed, by_sums = np.zeros((2, m), bool), np.zeros((2, m), bool)
    tau, tau_then = [1, 1], np.ones((2, m))
    history = [[] for _ in range(m)]  # residuals against all peers, peeled or not
    residuals = [[] for _ in range(m)]  # (op, residual, is usable) of each worker
    pool, renewed_at, weighed_at, crossings = [[] for _ in range(m)], 0, 0, []
    own, others_own = [0.0] * m, [0.0] * m  # since the last span ended
    spans, span_pool, spans_sorted_at = [[] for _ in range(m)], [[] for _ in range(m)], 0

    def bet(k, n, kappas):
        total = 0.0
        for kappa in kappas:
            total += k ** (kappa - 1) / mean_power(kappa, n)
        return total / len(kappas)

    def majority(k, n):
        upper = n // 2
        return n * 0.95 / upper if k <= upper else n * 0.05 / (n - upper)

    def evidence(tier, i):
        best = max(s[tier, i], half[tier, i], rank[tier, i])
        return max(best / tau[tier], far[tier, i]) + math.log(0.9 / 4)

    def with_sums(tier, i):
        return max(evidence(tier, i), sums[tier, i] / (1 + (tau[tier] - 1) / 8) + math.log(0.1))

    def weigh():
        known = [sorted(own) for own in pool if len(own) >= 8]
        reach = [own[int(len(own) * 0.9) - 1] for own in known]
        typical = sorted(reach)[(len(reach) - 1) // 2] if reach else -math.inf
        nonlocal far_limit
        limits = [math.log1p(d) for d in config.slowdowns]
        tau[:], farthest = slow_dependence(history, limits, typical)
        error = 1 + 1 / math.sqrt(2 * max(t // 8, 1))
        if farthest > far_limit * error:
            far[:] = 0.0
        if farthest > far_limit * error or farthest * error < far_limit:
            far_limit = farthest
        for tier in range(2):
            for i in range(m):
                longer = tau[tier] > tau_then[tier, i]
                if alarmed[tier, i] and longer and with_sums(tier, i) < need:
                    alarmed[tier, i] = by_sums[tier, i] = False
                    clear[tier, i] = 0.0
                    crossings.append((t - 1, i, tier, False))

    def renew(t):
        window = config.window_for(m)
        for i in range(m):
            recent = [r for op, r in residuals[i] if op >= t - window]
            pool[i] = [] if alarmed[ALARM, i] else [r for r in recent if r is not None]

    def renew_spans():
        window = max(config.window_for(m) // 8, 4)
        for i in range(m):
            span_pool[i] = [] if alarmed[ALARM, i] else spans[i][-window:]

    def bet_on_sums(tier, i, ratios, peers, new):
        """Log of the mean of both bets on the spans that just ended."""
        delta, others = config.slowdowns[tier], [r for j, r in peers if j != i]
        rank = bet(
            1 + sum(r > ratios[i] / (1 + delta) for r in others), len(others) + 1, RANK_KAPPAS
        )
        past = [np.float32(r) for j in range(m) if j != i for r in span_pool[j]]
        v = np.float32(new[i] - math.log1p(delta))
        pooled = bet(1 + sum(r >= v for r in past), len(past) + 1, POOLED_KAPPAS)
        return math.log((rank + pooled) / 2)

    for t in range(n_ops):
        gap = min(max(renewed_at // 8, 1), 32, config.window_for(m))
        if t >= renewed_at + gap:
            if t - weighed_at >= min(max(weighed_at // 4, 1), 256):
                weigh()
                weighed_at = t
            renew(t)
            renewed_at = t
        window = max(config.window_for(m) // 8, 4)
        if t // 8 >= spans_sorted_at + min(max(spans_sorted_at // 8, 1), 32, window):
            renew_spans()
            spans_sorted_at = t // 8
        if t % 8 == 0:
            own, others_own = [0.0] * m, [0.0] * m
        new = []
        for i in range(m):
            others = [j for j in range(m) if j != i and not alarmed[ALARM, j]]
            middle = statistics.median(costs[t, j] for j in others)
            new.append(math.log(costs[t, i] / middle))
            history[i].append(
                math.log(costs[t, i] / statistics.median(np.delete(costs[t], i).tolist()))
            )
            for tier, delta in enumerate(config.slowdowns):
                shrunk = costs[t, i] / (1 + delta)
                n = len(others) + 1
                slow = bet(1 + sum(costs[t, j] > shrunk for j in others), n, RANK_KAPPAS)
                fast = bet(1 + sum(costs[t, j] < shrunk for j in others), n, RANK_KAPPAS)
                past = [np.float32(r) for j in range(m) if j != i for r in pool[j]]
                v = np.float32(new[i] - math.log1p(delta))
                slow_p = bet(1 + sum(r >= v for r in past), len(past) + 1, POOLED_KAPPAS)
                fast_p = bet(1 + sum(r <= v for r in past), len(past) + 1, POOLED_KAPPAS)
                upper = majority(1 + sum(costs[t, j] > shrunk for j in others), n)
                s[tier, i] = max(s[tier, i], 0) + math.log((slow + slow_p) / 2)
                half[tier, i] = max(half[tier, i], 0) + math.log(upper)
                rank[tier, i] = max(rank[tier, i], 0) + math.log(slow)
                v = np.float32(new[i] - far_limit)
                beyond = bet(1 + sum(r >= v for r in past), len(past) + 1, POOLED_KAPPAS)
                far[tier, i] = max(far[tier, i], 0) + math.log(beyond)
                if alarmed[tier, i]:
                    clear[tier, i] = max(clear[tier, i], 0) + math.log((fast + fast_p) / 2)
            own[i] += costs[t, i]
            others_own[i] += middle
        for i in range(m):
            residuals[i].append((t, new[i]))
        sums[:] = np.maximum(sums, 0)
        if t % 8 == 7:
            ratios = [a / b for a, b in zip(own, others_own, strict=True)]
            peers = [(j, ratios[j]) for j in range(m) if not alarmed[ALARM, j]]
            new = [
                math.log(ratios[i] / statistics.median(r for j, r in peers if j != i))
                for i in range(m)
            ]
            for tier, i in itertools.product(range(2), range(m)):
                sums[tier, i] += bet_on_sums(tier, i, ratios, peers, new)
            for i in range(m):
                spans[i].append(new[i])
        before = alarmed.copy()
        for tier in range(2):
            for i in range(m):
                is_more = evidence(tier, i) >= need
                if before[tier, i]:
                    sums_peak[tier, i] = max(sums_peak[tier, i], sums[tier, i])
                    left = max(sums_peak[tier, i] - need * (1 + (tau[tier] - 1) / 8), 0)
                    lasts = by_sums[tier, i] and sums[tier, i] > left
                if not before[tier, i] and with_sums(tier, i) >= need:
                    tau_then[tier, i] = tau[tier]
                    crossings.append((t, i, tier, True))
                    alarmed[tier, i], by_sums[tier, i] = True, not is_more
                    sums_peak[tier, i] = sums[tier, i]
                elif before[tier, i] and clear[tier, i] >= need * tau[tier] and not lasts:
                    crossings.append((t, i, tier, False))
                    alarmed[tier, i] = by_sums[tier, i] = False
                    s[tier, i] = half[tier, i] = rank[tier, i] = far[tier, i] = sums[tier, i] = 0.0
                else:
                    continue
                clear[tier, i] = 0.0
        if (before != alarmed).any():
            renew(t + 1)
            renew_spans()
            renewed_at, spans_sorted_at = t + 1, (t + 1) // 8
    return crossings, s


@pytest.mark.parametrize("seed", range(3))
def test_the_detector_agrees_with_a_loop_through_alarms_peeling_and_clearing(seed):
    costs = lognormal(seed, (180, 5), sigma=0.02 + 0.02 * seed)
    costs[20:90, 1] *= 1.6
    costs[40:, 3] *= 1.4
    config = EDetectorSettings(alpha=1e-4)
    expected, evidence = slow_edetector(costs, config)
    found = EDetector(5, config)
    groups = found.add_groups(1)
    crossings = feed(found, groups, costs[:, None, :])
    got = [(c.op, c.worker, c.tier, c.is_alarm) for c in crossings]
    assert sorted(got) == sorted(expected)
    assert {c[1] for c in got} >= {1, 3}
    assert any(not c[3] for c in got), "somebody cleared"
    assert found.wealth.slow[0, :, 0] == pytest.approx(evidence, abs=1e-6)


@pytest.mark.parametrize("seed", [0, 2, 11])
def test_the_detector_agrees_with_the_loop_where_a_worker_is_slow_in_bursts(seed):
    costs = add_bursts(lognormal(seed, (400, 1, 4)), 20, 240, 10, 3.0, seed)
    config = EDetectorSettings(alpha=1e-4)
    expected, evidence = slow_edetector(costs[:, 0], config)
    found = EDetector(4, config)
    crossings = feed(found, found.add_groups(1), costs)
    got = [(c.op, c.worker, c.tier, c.is_alarm) for c in crossings]
    assert sorted(got) == sorted(expected)
    assert any(c.by_sums for c in crossings)
    assert any(not c.is_alarm and c.op > 240 for c in crossings), "it cleared after the bursts"
    assert found.wealth.slow[0, :, 0] == pytest.approx(evidence, abs=1e-6)
