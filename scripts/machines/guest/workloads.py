"""Runs every workload of the simulator and prints what each process says of its own calls, one JSON line a workload."""

from __future__ import annotations

import json
from typing import Final

from scripts.machines.guest.running import LIMIT_S

from ingero.sim.runner import SimSettings, Simulation
from ingero.sim.workloads import WORKLOADS

# Emulated time is slow: fewer calls of those that make hundreds of thousands.
KNOBS: Final[dict[str, dict[str, int]]] = {
    "hang": {"wait_ms": 500},
    "storm": {"launches": 5_003},
    "cost": {"launches": 1_009},
    "ranks": {"steps": 7, "count": 1009, "split": 1},
    "leak": {"steps": 53},
}
N_RANKS: Final = 3
# The first process waits until the libraries that all of them share are probed.
_FIRST_WAIT_US: Final = 4_000_000


def main() -> None:
    """Run them all, one after another."""
    for index, workload in enumerate(WORKLOADS):
        knobs = KNOBS.get(workload.name, {}) | ({} if index else {"wait_us": _FIRST_WAIT_US})
        n_ranks = N_RANKS if workload.name == "ranks" else 0
        with Simulation(SimSettings(workload.name, knobs, n_ranks)) as simulation:
            accounts = simulation.wait(LIMIT_S)
        print(json.dumps({"workload": workload.name, "accounts": accounts}), flush=True)


if __name__ == "__main__":
    main()
