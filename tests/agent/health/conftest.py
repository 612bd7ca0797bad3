import itertools

import pytest
from hypothesis import settings

from ingero.agent.health.cache import ThresholdCache
from ingero.agent.health.episodes import SpanMaker
from ingero.agent.health.loop import HealthLoop, LoopParts
from ingero.agent.health.loop_settings import LoopSettings
from ingero.agent.health.open_episodes import NodeEpisodes
from ingero.agent.health.push_body import NodeIdentity
from ingero.agent.health.push_queue import PushQueue
from ingero.agent.health.signal_script import ScriptConfig, ScriptSource
from ingero.agent.health.signals.classify import ClassifierSettings
from ingero.agent.health.signals.machine import MachineSettings
from ingero.agent.health.threshold_choice import ModeSettings, fresh_max_age
from ingero.agent.health.transport import HttpTransport, TransportSettings
from ingero.config import parse_model
from ingero.otlp.client.endpoint import parse_endpoint
from ingero.otlp.codec.points import iter_points
from ingero.testing.clock import ManualClock
from ingero.wire.push import ResourceCache, read_push

SECOND_NS = 1_000_000_000
IDENTITY = NodeIdentity(cluster_id="prod a", node_id="n1", world_size=8, rank=3)


class Messages:
    """Keeps what was published."""

    def __init__(self):
        self.seen = []

    def publish(self, message):
        self.seen.append(message)


class Rig:
    """A loop on a hand-moved clock, pushing to a real collector over HTTP as part of each look."""

    def __init__(self, collector, steps, *, interval_s=10, sample_s=1, confirm=1, warmup=3, **more):
        self.clock = ManualClock()
        self.collector = collector
        self.cache = ThresholdCache()
        self.pauses = []
        self.transport = HttpTransport(
            TransportSettings(
                endpoint=parse_endpoint(collector.url, is_insecure=True, option="test"),
                timeout_ns=5 * SECOND_NS,
                cluster_id=IDENTITY.cluster_id,
            )
        )
        self.queue = PushQueue(
            self.transport, self.cache, self.clock, self.pauses.append, lambda: 0.0
        )
        ids = itertools.count(1)
        self.spans = []
        self.episodes = NodeEpisodes(
            IDENTITY, lambda: f"episode-{next(ids)}", SpanMaker(IDENTITY, "0", lambda bits: 1)
        )
        self.stream = Messages()
        script = parse_model(ScriptConfig, {"steps": steps, **more.pop("script", {})})
        self.parts = LoopParts(
            source=ScriptSource(script),
            clock=self.clock,
            cache=self.cache,
            queue=self.queue,
            episodes=self.episodes,
            spread=lambda: 0.0,
            stream=self.stream,
            span_queue=self,
        )
        self.settings = LoopSettings(
            push_interval_ns=interval_s * SECOND_NS,
            sample_interval_ns=round(sample_s * SECOND_NS),
            machine=MachineSettings(warmup=warmup),
            classifier=ClassifierSettings(confirm=confirm),
            mode=ModeSettings(fresh_max_age_ns=fresh_max_age(interval_s * SECOND_NS)),
            **more,
        )
        self.loop = HealthLoop(IDENTITY, self.parts, self.settings)

    def offer(self, regular, extras):
        assert regular is None
        self.spans += extras

    def sample(self):
        self.clock.advance(self.loop.next_sample_ns - self.clock.mono_ns())
        sample = self.loop.take_sample()
        self.queue.drain()
        return sample

    def samples(self, seconds):
        """Every look of so many seconds."""
        end_ns = self.clock.mono_ns() + seconds * SECOND_NS
        found = []
        while self.loop.next_sample_ns <= end_ns:
            found.append(self.sample())
        return found

    def pushes(self):
        """Regular pushes as Fleet reads them."""
        return [push for push in self.all_pushes() if push.health_score is not None]

    def events(self):
        """Straggler events as Fleet reads them."""
        return [push for push in self.all_pushes() if push.straggler_event is not None]

    def all_pushes(self):
        return [
            push
            for request in self.collector.requests
            if request.method == "POST"
            for push in read_push(request.export, ResourceCache())
        ]

    def metric(self, name):
        """The values of one metric over all pushes."""
        return [
            point
            for request in self.collector.requests
            for point in iter_points(request.export)
            if point.name == name
        ]


@pytest.fixture
def make_rig(collector):
    rigs = []

    def make(steps, **options):
        rigs.append(Rig(collector, steps, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.transport.close()


settings.register_profile("no-wall-clock", deadline=None)
settings.load_profile("no-wall-clock")
