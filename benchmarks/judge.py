"""The Judge: a whole recording, and one more operation of 10 000 workers."""

import time

import numpy as np

from ingero.cli.commands.replay.offline import judge_trace
from ingero.detect.ranks.edetector import EDetector
from ingero.detect.ranks.settings import EDetectorSettings
from ingero.job_traces.readers import find_packaged, read_trace

SAYS = "replay ≥ 100 000 operations/s; one operation of 10 000 workers ≤ 5 ms; the floor is sorting the same costs"
N_WORKERS = 10_000


def one_operation(n_peers):
    """Milliseconds per operation: the detector's median and mean over 64, and a sort of the same numbers."""
    n_groups = N_WORKERS // n_peers
    rng = np.random.default_rng(0)
    detector = EDetector(n_peers, EDetectorSettings())
    groups = detector.add_groups(n_groups)
    warm = rng.lognormal(0, 0.03, (200, n_groups, n_peers)) * 1e8
    detector.observe(groups, warm, np.full(n_groups, 200))
    took, floor = [], []
    for _ in range(64):
        costs = rng.lognormal(0, 0.03, (1, n_groups, n_peers)) * 1e8
        began = time.perf_counter()
        detector.observe(groups, costs, np.ones(n_groups, np.int64))
        took.append(time.perf_counter() - began)
        began = time.perf_counter()
        np.sort(costs, axis=2)
        floor.append(time.perf_counter() - began)
    return np.median(took) * 1e3, np.mean(took) * 1e3, np.median(floor) * 1e3


def run():
    trace = read_trace(find_packaged("AR"))
    best = min(_timed(trace) for _ in range(5))
    yield f"   AR, {trace.n_ops} operations: {best * 1e3:.0f} ms = {trace.n_ops / best:,.0f} operations/s"
    for n_peers in (4, 8, 64, N_WORKERS):
        median, mean, floor = one_operation(n_peers)
        yield (
            f"   one operation, {N_WORKERS} workers in groups of {n_peers:5}: median {median:5.2f} ms,"
            f" mean {mean:5.2f} ms = {mean / floor:4.0f} × floor"
        )


def _timed(trace):
    began = time.perf_counter()
    judge_trace(trace)
    return time.perf_counter() - began
