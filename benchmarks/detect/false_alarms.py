"""``python -m benchmarks.detect.false_alarms``: does the e-detector keep its budget, assumptions met or not?

Workers without a fault, 100 groups of 6, 2 000 operations, a budget of 1e-4. Printed: first alarms per healthy
worker-operation, as a multiple of the budget; up to 1 is kept.
"""

import numpy as np

from ingero.detect.ranks.edetector import EDetector
from ingero.detect.ranks.settings import EDetectorSettings

ALPHA, N_OPS, N_GROUPS, N_PEERS = 1e-4, 2000, 100, 6


def autocorrelated(phi, sigma):
    def draw(rng, shape):
        noise = rng.standard_normal(shape) * sigma
        noise[1:] *= np.sqrt(1 - phi**2)
        for t in range(1, shape[0]):
            noise[t] += phi * noise[t - 1]
        return np.exp(noise)

    return draw


def heavy_twice(rng, shape):
    return np.repeat(np.exp(0.4 * rng.standard_normal((shape[0] // 2, *shape[1:]))), 2, axis=0)


def lasting_spread(rng, shape):
    lasting = 0.03 * rng.standard_normal((1, *shape[1:]))
    return np.exp(lasting + 0.02 * rng.standard_normal(shape))


def drift(rng, shape):
    slope = np.linspace(0, 0.05, shape[0])[:, None, None]
    return np.exp(0.02 * rng.standard_normal(shape) + slope * rng.standard_normal((1, *shape[1:])))


NOISES = {
    "normal, 5 %": lambda rng, shape: np.maximum(1 + 0.05 * rng.standard_normal(shape), 0.01),
    "heavy tails (t with 2 degrees of freedom, 10 %)": lambda rng, shape: np.exp(
        0.1 * rng.standard_t(2, shape)
    ),
    "skewed (exponential, 30 %)": lambda rng, shape: 1 + rng.exponential(0.3, shape),
    "uneven batches, each heavy twice (40 %)": heavy_twice,
    "autocorrelated 0.5, 5 %": autocorrelated(0.5, 0.05),
    "autocorrelated 0.9, 5 %": autocorrelated(0.9, 0.05),
    "autocorrelated 0.5, 20 %": autocorrelated(0.5, 0.20),
    "autocorrelated 0.9, 20 %": autocorrelated(0.9, 0.20),
    "lasting differences, 3 %": lasting_spread,
    "drifting apart to 5 %": drift,
}


def measure(draw, n_ops, alpha, seed=0):
    """First alarms and worker-operations until them, of the alarm tier and the notice tier.

    Args:
        draw: A noise.
        n_ops: Worker-operations in all.
        alpha: The budget per worker-operation.
        seed: Of the generator.
    """
    rng = np.random.default_rng(seed)
    n_groups = max(round(n_ops / N_OPS / N_PEERS), 1)
    totals = [[0, 0], [0, 0]]
    for begin in range(0, n_groups, N_GROUPS):
        size = min(N_GROUPS, n_groups - begin)
        detector = EDetector(N_PEERS, EDetectorSettings(alpha=alpha))
        groups = detector.add_groups(size)
        costs = draw(rng, (N_OPS, size, N_PEERS)) * 1e8
        crossings, _ = detector.observe(groups, costs, np.full(size, N_OPS))
        for tier in (0, 1):
            first = {}
            for crossing in crossings:
                if crossing.is_alarm and crossing.tier == tier:
                    first.setdefault((crossing.group, crossing.worker), crossing.op + 1)
            totals[tier][0] += len(first)
            totals[tier][1] += sum(first.values()) + (size * N_PEERS - len(first)) * N_OPS
    return totals


def main():
    print("| noise of healthy workers | alarm tier (10 %) | notice tier (3 %) |\n|---|---|---|")
    for name, draw in NOISES.items():
        alarm, notice = (
            n / exposed / ALPHA for n, exposed in measure(draw, N_OPS * N_GROUPS * N_PEERS, ALPHA)
        )
        print(f"| {name} | {alarm:.2f} | {notice:.2f} |", flush=True)


if __name__ == "__main__":
    main()
