"""The workloads of the simulator and their knobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class SimulatedWorkload:
    """One workload.

    Attributes:
        name: What the user types.
        description: What it shows, in one line.
        knobs: Defaults of its settings by name.
        n_ranks: Processes it runs as.
    """

    name: str
    description: str
    knobs: dict[str, int]
    n_ranks: int = 1


WORKLOADS: Final = (
    SimulatedWorkload(
        "train",
        "A training loop: load, copy in, 40 kernels, wait; may turn slow at a step",
        {
            "steps": 50,
            "batch_bytes": 4 << 20,
            "loader_us": 500,
            "kernels": 40,
            "slow_from": 50,
            "slow_us": 5000,
        },
    ),
    SimulatedWorkload(
        "infer",
        "An inference loop: pauses between requests, small kernels, one copy per token",
        {"requests": 50, "tokens": 16, "idle_us": 2000, "kernels": 6},
    ),
    SimulatedWorkload(
        "serve",
        "A server of requests: a prompt, then a token per step; some tokens may take long; ranks share the work",
        {
            "requests": 40,
            "tokens": 20,
            "idle_us": 5000,
            "prompt_bytes": 16_384,
            "kernels": 12,
            "prompt_kernels": 120,
            "slow_from": 1 << 32,
            "slow_each": 10,
            "slow_us": 30_000,
            "slow_rank": 0,
        },
    ),
    SimulatedWorkload(
        "leak",
        "Device memory that is not all given back, until an allocation fails",
        {"steps": 200, "bytes": 8 << 20, "leak_one_in": 4},
    ),
    SimulatedWorkload(
        "fragment",
        "Enough free device memory in total, and none of it in one piece",
        {
            "pairs": 200,
            "large_bytes": 8 << 20,
            "small_bytes": 1 << 20,
            "attempts": 5,
            "wanted_bytes": 7 << 30,
        },
    ),
    SimulatedWorkload("copy", "Time goes into blocking copies", {"steps": 30, "bytes": 64 << 20}),
    SimulatedWorkload("sync", "A device synchronisation after every kernel", {"steps": 300}),
    SimulatedWorkload(
        "graph", "Capture, instantiate and launch a CUDA graph", {"kernels": 50, "launches": 100}
    ),
    SimulatedWorkload(
        "ranks",
        "Collectives between processes, with a real barrier; one rank may be slow",
        {
            "steps": 30,
            "count": 1 << 20,
            "kernels": 20,
            "slow_rank": 1 << 32,
            "slow_from": 0,
            "slow_us": 0,
            "split": 0,
            "own_stream": 0,
            "init": 0,
        },
        n_ranks=4,
    ),
    SimulatedWorkload("storm", "Launches as fast as one core goes", {"launches": 200_003}),
    SimulatedWorkload("primes", "A prime number of every call, to check a tracer's counts by", {}),
    SimulatedWorkload("hang", "One call that does not return", {"wait_ms": 60_000}),
    SimulatedWorkload("cost", "Bare calls, for the cost of a probe", {"launches": 200_000}),
)


def find_workload(name: str) -> SimulatedWorkload | None:
    """The workload of that name, or None."""
    return next((workload for workload in WORKLOADS if workload.name == name), None)
