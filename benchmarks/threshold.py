"""The ``ingero`` processor: a push into the score map, an answer out of it, and a recompute of the bars."""

import timeit
from functools import partial

import numpy as np

from ingero.fleet.component import PushContext
from ingero.fleet.processors.peer_threshold.config import IngeroConfig
from ingero.fleet.processors.peer_threshold.notifications import Arrival
from ingero.fleet.processors.peer_threshold.registry import ClusterRegistry
from ingero.telemetry.clock import SystemClock
from ingero.telemetry.metrics import MeterRegistry
from ingero.wire.push import PushFacts, ResourceFacts

SAYS = "score map and bars; the floor of a recompute is np.median on the same scores, twice (median and MAD)"
LAYOUTS = ((64, 1), (10_000, 1), (10_000, 20), (10_000, 2_000))


def fill(n_nodes, n_cohorts):
    """A registry with one cluster, and the pushes that fill it."""
    clock = SystemClock()
    registry = ClusterRegistry(IngeroConfig(), clock, MeterRegistry())
    rng = np.random.default_rng(1)
    scores = np.clip(0.9 + 0.02 * rng.standard_normal(n_nodes), 0, 1)
    pushes = [
        PushFacts(
            ResourceFacts(f"node{index}", "c", 0, -1, "", ""),
            health_score=float(score),
            state="active",
            workload_type="train",
            cohort=f"{index % n_cohorts:016x}",
        )
        for index, score in enumerate(scores)
    ]
    context = PushContext()
    for push in pushes:
        registry.take([push], context, Arrival(clock.mono_ns(), 0))
    return registry, pushes, scores


def best_s(action, number):
    """Seconds per call, the best of five."""
    return min(timeit.repeat(action, number=number, repeat=5)) / number


def run():
    for n_nodes, n_cohorts in LAYOUTS:
        registry, _, scores = fill(n_nodes, n_cohorts)
        cluster, clock = registry.clusters["c"], SystemClock()
        number = 20 if n_nodes > 1000 else 200
        took_s = best_s(
            lambda cluster=cluster, clock=clock: cluster.recompute(clock.mono_ns()), number
        )
        floor_s = 2 * best_s(partial(np.median, scores), number)
        yield (
            f"   recompute, {n_nodes:6} nodes, {n_cohorts:5} cohorts: {took_s * 1e3:7.3f} ms"
            f" = {took_s / floor_s:5.1f} × floor"
        )
    registry, pushes, _ = fill(10_000, 20)
    context, clock = PushContext(), SystemClock()

    def push_all():
        for push in pushes:
            registry.take([push], context, Arrival(clock.mono_ns(), 0))

    took_s = best_s(push_all, 1) / len(pushes)
    floor_s = best_s(lambda: [dict.get({}, push.resource.node_id) for push in pushes], 1) / len(
        pushes
    )
    yield f"   push of a known node: {took_s * 1e6:.2f} µs = {took_s / floor_s:.0f} × one dictionary look-up"
    answer_s = best_s(lambda: registry.find_answer("c", pushes[0].cohort, "node0"), 20_000)
    yield f"   answer to a push: {answer_s * 1e6:.2f} µs"
