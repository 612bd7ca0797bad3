"""A registry of clusters on a clock that is moved by hand, and pushes for it."""

from ingero.config import parse_model
from ingero.fleet.component import PushContext
from ingero.fleet.processors.peer_threshold.config import IngeroConfig
from ingero.fleet.processors.peer_threshold.notifications import Arrival, ClusterEvent
from ingero.fleet.processors.peer_threshold.registry import ClusterRegistry
from ingero.testing.host import ManualHost
from ingero.wire.push import PushFacts, ResourceFacts

MS = 1_000_000


def facts(node="n1", score=0.9, *, cluster="c", state="active", cohort="", workload="", **more):
    resource = ResourceFacts(node, cluster, 0, -1, "", "")
    return PushFacts(
        resource, health_score=score, state=state, cohort=cohort, workload_type=workload, **more
    )


def event(node="n1", value=1, *, cluster="c", event_id="e", **attributes):
    resource = ResourceFacts(node, cluster, 0, -1, "", "")
    return PushFacts(
        resource, straggler_event=value, event_id=event_id, event_attributes=attributes
    )


class Bench:
    """A registry with a host, and shorthands; thresholds do not wait for who is still to come unless a test says so."""

    def __init__(self, **config):
        self.host = ManualHost()
        config["quorum"] = {"settle_time": "0s"} | config.get("quorum", {})
        self.registry = ClusterRegistry(
            parse_model(IngeroConfig, config), self.host.clock, self.host.meter
        )

    def push(self, *pushes, hint=""):
        context = PushContext(cluster_hint=hint)
        clock = self.host.clock
        self.registry.take(pushes, context, Arrival(clock.mono_ns(), clock.wall_ns()))
        return context, self.registry.find_answer(
            context.cluster_id or "", context.cohort, context.node_id
        )

    def wait(self, duration_ns):
        """Move time on, ticking every 200 ms."""
        for _ in range(duration_ns // (200 * MS)):
            self.host.clock.advance(200 * MS)
            self.registry.tick()

    def dropped(self, reason):
        return self.host.read("ingero_fleet_scores_dropped_total", reason=reason)

    def episodes(self, cluster="c"):
        return self.registry.clusters[cluster].episodes.list_episodes()


def told(bench):
    """What is to be announced, as (kind, began)."""
    return [
        (news.kind.value, news.is_on)
        if isinstance(news, ClusterEvent)
        else (news.node_id, news.outcome is None)
        for news in bench.registry.notifications.take()
    ]
