"""A running receiver on loopback with a small consumer behind it."""

import asyncio
import contextlib
import json
import threading

import pytest

from ingero.config import parse_model
from ingero.errors import RetryableError
from ingero.fleet.component import Authenticator, ComponentId, PushAnswer, PushAnswerer
from ingero.fleet.receivers.otlp import OtlpReceiver, OtlpReceiverConfig
from ingero.otlp.names import Signal
from ingero.testing.host import ManualHost
from ingero.units import NS_PER_S
from ingero.wire.push import ResourceCache, read_push


class Cluster:
    """Keeps the scores it is pushed and answers with a cohort's lowest score, rounded to six decimals."""

    def __init__(self):
        self.batches = []
        self.scores = {}
        self.raises = None
        self.rejects = 0
        self._cache = ResourceCache()

    def consume(self, batch):
        if self.raises is not None:
            raise self.raises
        self.batches.append(batch)
        batch.push.n_rejected = self.rejects
        batch.push.rejected_why = "they were bad" if self.rejects else ""
        if batch.signal is Signal.METRICS:
            for facts in read_push(batch.export, self._cache):
                batch.push.cluster_id, batch.push.cohort = facts.resource.cluster_id, facts.cohort
                batch.push.node_id = facts.resource.node_id
                if facts.health_score is not None:
                    key = (facts.resource.cluster_id, facts.cohort)
                    self.scores[key] = facts.health_score

    def answer(self, push):
        cluster = push.cluster_id or push.cluster_hint
        own = self.scores.get((cluster, push.cohort))
        known = [score for (name, _), score in self.scores.items() if name == cluster]
        if not known:
            return None
        return PushAnswer(min(known) if own is None else own, quorum_met=len(known) > 1)


class Tokens:
    """An authenticator with one good token, and one that it has no time for."""

    def authenticate(self, authorization):
        if authorization == "Bearer later":
            raise RetryableError("too many new credentials at once", retry_after_ns=3 * NS_PER_S)
        return "agents" if authorization == "Bearer sesame" else None

    def client_headers(self):
        return {}


class Running:
    """A receiver on its own event loop, in its own thread."""

    def __init__(self, protocols, *, signals, offers):
        self.cluster = Cluster()
        self.host = ManualHost()
        for who, capability, provider in offers or [("ingero_threshold", PushAnswerer, None)]:
            found = self.cluster if provider is None else provider
            self.host.offer_as(ComponentId(who), capability, found)
        config = parse_model(OtlpReceiverConfig, {"protocols": protocols})
        outputs = dict.fromkeys(signals, self.cluster)
        self._receiver = OtlpReceiver(ComponentId("otlp"), config, outputs)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        try:
            self.run(self._receiver.start(self.host))
        except BaseException:
            self.close()
            raise
        self.http, self.grpc = self._receiver.http_bound, self._receiver.grpc_bound

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def call(self, function, *arguments, **options):
        """Call a function on the receiver's loop; what it returns."""

        async def run():
            return function(*arguments, **options)

        return self.run(run())

    def url(self, path="/v1/metrics", scheme="http"):
        return f"{scheme}://{self.http}{path}"

    def count(self, name, transport="http", **labels):
        return self.host.read(name, receiver="otlp", transport=transport, **labels)

    def refused(self, reason, transport="http"):
        name = "ingero_fleet_receiver_refused_requests_total"
        return self.count(name, transport, reason=reason)

    def start_stopping(self):
        return asyncio.run_coroutine_threadsafe(self._receiver.stop(), self._loop)

    def close(self):
        self.run(self._receiver.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def serve():
    """``serve(http=…, grpc=…)``: start a receiver with these settings on free ports."""
    with contextlib.ExitStack() as stack:

        def start(http=None, grpc=None, *, signals=tuple(Signal), offers=None):
            protocols = {}
            if http is not None or grpc is None:
                protocols["http"] = {"endpoint": "127.0.0.1:0", **(http or {})}
            if grpc is not None:
                protocols["grpc"] = {"endpoint": "127.0.0.1:0", **grpc}
            running = Running(protocols, signals=signals, offers=offers)
            stack.callback(running.close)
            return running

        yield start


@pytest.fixture
def tokens():
    return [("bearertokenauth", Authenticator, Tokens()), ("ingero_threshold", PushAnswerer, None)]


@pytest.fixture
def recorded(data_dir):
    """Recorded bodies by name, compact as the agent sent them."""

    def load(name):
        document = json.loads((data_dir / f"wire_samples/{name}.json").read_text())
        return json.dumps(document, separators=(",", ":")).encode()

    return load
