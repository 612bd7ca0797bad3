"""What raising the notice tier's δ to the peers' own persistent spread buys, and what it costs.

Simulated groups of 16 peers that differ persistently by a standard deviation, with 2 % of noise on each operation.
In a quarter of the groups one worker becomes slower after 500 of 2 000 operations. Counted is who is reported at the
end.
"""

import numpy as np

from ingero.detect.ranks.edetector import EDetector
from ingero.detect.ranks.settings import NOTICE, EDetectorSettings

N_OPS, N_GROUPS, N_PEERS, ONSET = 2000, 32, 16, 500
SPREADS = (0.0, 0.01, 0.03)
MULTIPLES = (0.0, 2.0, 3.0)
FACTORS = (1.05, 1.10, 1.20)


def calibrated_rows(settings):
    """Share of healthy workers and of slow ones that are reported at the end, and δ then."""
    for spread in SPREADS:
        for multiple in MULTIPLES:
            row = {
                "method": "e: all bets (ingero)",
                "dataset": f"lasting differences of {spread:.0%} among {N_PEERS} peers",
                "notice_spread": multiple,
                "n_runs": N_GROUPS * len(FACTORS),
            }
            n_false, n_healthy, limits = 0, 0, []
            for at, factor in enumerate(FACTORS):
                rng = np.random.default_rng([settings["seed"], 97, at])
                is_slow = np.zeros((N_GROUPS, N_PEERS), bool)
                is_slow[: N_GROUPS // 4, 0] = True
                detector, groups = run(rng, spread, multiple, np.where(is_slow, factor, 1.0))
                stands = detector.alarms.in_alarm[NOTICE, groups]
                n_false += int(stands[~is_slow].sum())
                n_healthy += int((~is_slow).sum())
                limits.append(np.median(detector.persistence.limits[NOTICE]))
                row[f"noticed ×{factor:.2f}"] = round(float(stands[is_slow].mean()), 3)
            row["healthy_reported"] = round(n_false / n_healthy, 4)
            row["notice_limit_median"] = round(float(np.median(limits)), 4)
            yield row


def run(rng, spread, multiple, factors):
    """A detector after its last operation."""
    settings = EDetectorSettings(notice_spread=multiple)
    detector = EDetector(N_PEERS, settings)
    groups = detector.add_groups(N_GROUPS)
    lasting = spread * rng.standard_normal(factors.shape)
    costs = np.exp(lasting + 0.02 * rng.standard_normal((N_OPS, *factors.shape))) * 1e8
    costs[ONSET:] *= factors
    detector.observe(groups, costs, np.full(N_GROUPS, N_OPS))
    return detector, groups


def describe(rows):
    """Markdown."""
    named = [f"noticed ×{factor:.2f}" for factor in FACTORS]
    yield (
        "| peers differ for good by | δ raised to | δ, median | healthy workers reported at the end | "
        + " | ".join(f"{name} at the end" for name in named)
        + " |"
    )
    yield "|" + "---|" * (4 + len(named))
    for row in rows:
        raised = f"{row['notice_spread']:.0f} × spread" if row["notice_spread"] else "never"
        shares = " | ".join(f"{row[name]:.0%}" for name in named)
        name = row["dataset"].removeprefix("lasting differences of ").split(" ")[0]
        yield (
            f"| {name} | {raised} | {row['notice_limit_median']:.1%} | {row['healthy_reported']:.1%} | {shares} |"
        )
