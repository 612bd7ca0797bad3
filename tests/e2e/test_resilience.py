"""What Fleet knows after the network, the Fleet or the clock failed: everything once, and episodes that end."""

import itertools
from contextlib import ExitStack

import httpx
import numpy as np
import pytest
from tests.agent.health.conftest import Rig
from tests.support import local_http
from tests.support.relay import Network, Relay

from ingero.agent.capture.kernel.abi import get_dtype
from ingero.agent.collectives.host import CollectiveTracker
from ingero.agent.collectives.push import CollectivePusher, PushPace
from ingero.agent.collectives.run_queue import RunQueue
from ingero.agent.health.push_body import NodeIdentity
from ingero.agent.health.transport import HttpTransport, TransportSettings
from ingero.model.events import CudaOp, NcclOp, Source
from ingero.otlp.client.endpoint import parse_endpoint
from ingero.testing.clock import ManualClock
from ingero.testing.fleet import build_fleet_config, run_fleet
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_MS, NS_PER_S

pytestmark = pytest.mark.slow
NCCL = {"judge_interval": "100ms", "reorder_window": "200ms"}
N_RANKS, COMM, STEP_NS, INSIDE_NS = 4, 0xAB, 50 * NS_PER_MS, 2 * NS_PER_MS
HTTP = "receivers.otlp http"


class Host:
    """One rank's agent: kernel records in, real requests out."""

    def __init__(self, rank, clock, address, cluster_id):
        self.pid, self.rank, self.clock = 100 + rank, rank, clock
        self.transport = HttpTransport(
            TransportSettings(
                endpoint=parse_endpoint(address, is_insecure=True, option="test"),
                timeout_ns=NS_PER_S,
                cluster_id=cluster_id,
                is_protobuf=True,
            )
        )
        identity = NodeIdentity(cluster_id=cluster_id, node_id=f"n{rank}")
        pace = PushPace(interval_ns=NS_PER_S, early_gap_ns=NS_PER_S)
        self.pusher = CollectivePusher(
            identity, RunQueue(self.transport, clock), CollectiveTracker(), clock, pace
        )
        self.pusher.note_process(self.pid, rank)

    def step(self, seq):
        entered = np.zeros(1, get_dtype("collective"))
        entered["header"]["mono_ns"] = self.clock.mono_ns()
        entered["seq"], entered["stream"], entered["comm_hash"] = seq, 7, COMM
        entered["pid"], entered["rank"], entered["nranks"] = self.pid, self.rank, N_RANKS
        entered["op"], entered["bytes"] = NcclOp.ALL_REDUCE, 1 << 20
        self.pusher.add_collectives(entered)
        waited = np.zeros(1, get_dtype("call"))
        waited["header"]["mono_ns"] = self.clock.mono_ns() + 1
        waited["duration_ns"], waited["stream"], waited["pid"] = INSIDE_NS, 7, self.pid
        waited["source"], waited["op"] = Source.CUDA, CudaOp.STREAM_SYNC
        self.pusher.add_calls(waited)


class Hosts:
    """A job on a clock of its own; the last rank's host reaches Fleet through a relay."""

    def __init__(self, fleet, relay, stack, cluster_id="job"):
        self.clock, self.seq, self.fleet, self.relay = ManualClock(), 0, fleet, relay
        self.cluster_id = cluster_id
        direct = fleet.addresses[HTTP]
        addresses = [direct] * (N_RANKS - 1) + [relay.address]
        self.hosts = [Host(rank, self.clock, at, cluster_id) for rank, at in enumerate(addresses)]
        for host in self.hosts:
            stack.callback(host.transport.close)

    @property
    def far(self):
        return self.hosts[-1]

    def run(self, seconds):
        for _ in range(round(seconds * NS_PER_S / STEP_NS)):
            self.seq += 1
            self.clock.advance(STEP_NS - INSIDE_NS - 1)
            for host in self.hosts:
                host.step(self.seq)
            self.clock.advance(INSIDE_NS + 1)
            for host in self.hosts:
                host.pusher.push_due()

    def finish(self):
        self.clock.advance(NS_PER_S)
        for host in self.hosts:
            host.pusher.finish()

    def ask(self):
        """What the Fleet says: its counts, and compared operations by rank."""
        page = self.fleet.url("extensions.ingero_threshold admin", "/api/v1/admin/verdicts")
        answer = local_http.get(page, params={"cluster_id": self.cluster_id})
        if answer.status_code == httpx.codes.NOT_FOUND:  # nothing judged yet
            return {}, {}
        (cluster,) = answer.json()["clusters"]
        return cluster["counts"], {
            verdict["rank"]["rank"]: verdict["n_ops"] for verdict in cluster["verdicts"]
        }

    def await_compared(self, n_ops):
        """Go on until every rank was compared on so many operations: the newest wait for what comes after them."""

        def sample():
            self.run(1)
            self.finish()
            compared = self.ask()[1]
            return len(compared) == N_RANKS and min(compared.values()) >= n_ops

        wait_until(sample)


@pytest.fixture(scope="module")
def fleet():
    with run_fleet(build_fleet_config(nccl=NCCL)) as fleet:
        yield fleet


@pytest.fixture
def hosts(fleet, request):
    with ExitStack() as stack:
        relay = stack.enter_context(Relay(fleet.addresses[HTTP]))
        yield Hosts(fleet, relay, stack, request.node.name)


def partition(hosts):
    hosts.relay.network = Network.PARTITION
    hosts.run(2)
    hosts.relay.network = Network.PASS


def lose_answers(hosts):
    hosts.relay.network = Network.NO_ANSWERS
    hosts.run(2)
    hosts.relay.network = Network.PASS


def refuse(hosts):
    hosts.relay.network = Network.REFUSE
    hosts.relay.cut()
    hosts.run(12)
    hosts.relay.network = Network.PASS


def delay(hosts):
    hosts.relay.delay_s = 0.1
    hosts.run(3)
    hosts.relay.delay_s = 0.0


def step_forward(hosts):
    hosts.clock.step_wall(3600 * NS_PER_S)
    hosts.run(5)


def step_back(hosts):
    hosts.clock.step_wall(-3600 * NS_PER_S)
    hosts.run(5)


@pytest.mark.parametrize(
    ("fail", "fails"),
    [
        (partition, True),
        (lose_answers, True),
        (refuse, True),
        (delay, False),
        (step_forward, False),
        (step_back, False),
    ],
)
def test_every_operation_is_compared_once_whatever_failed_between(hosts, fail, fails):
    hosts.run(3)
    fail(hosts)
    hosts.run(3)
    hosts.finish()
    counts = hosts.far.pusher.counts
    assert (counts.n_failed > 0) == fails
    assert counts.n_ops == hosts.seq  # what Fleet acknowledged
    assert counts.n_dropped == 0
    hosts.await_compared(hosts.seq - 1)  # a rank's first operation has no own time to compare
    told, compared = hosts.ask()
    assert told["ops"] - told["stale_ops"] <= N_RANKS * hosts.seq
    assert max(compared.values()) < hosts.seq
    assert told["dropped_ops"] == told["incomplete_ops"] == told["late_members"] == 0
    assert (told["stale_ops"] > 0) == (fail is lose_answers)


def test_a_killed_fleet_is_told_by_its_successor_what_it_did_not_take():
    with ExitStack() as stack:
        fleet = stack.enter_context(run_fleet(build_fleet_config(nccl=NCCL)))
        relays = [stack.enter_context(Relay(fleet.addresses[HTTP])) for _ in range(N_RANKS)]
        hosts = Hosts(fleet, relays[-1], stack)
        for host, relay in zip(hosts.hosts, relays, strict=True):
            endpoint = host.transport.settings.endpoint
            object.__setattr__(endpoint, "base", f"http://{relay.address}")
        hosts.run(5)
        fleet.process.kill()
        fleet.process.wait()
        taken = [host.pusher.counts.n_ops for host in hosts.hosts]
        hosts.run(10)
        assert [host.pusher.counts.n_ops for host in hosts.hosts] == taken
        hosts.fleet = stack.enter_context(run_fleet(build_fleet_config(nccl=NCCL)))
        for relay in relays:
            relay.target = hosts.fleet.addresses[HTTP]
        hosts.run(5)
        hosts.finish()
        assert [host.pusher.counts.n_ops for host in hosts.hosts] == [hosts.seq] * N_RANKS
        # Nothing was on the wire when it was killed, so the two Fleets share everything out.
        rest = hosts.seq - max(taken)
        hosts.await_compared(rest - 1)
        told, _ = hosts.ask()
        assert told["ops"] <= N_RANKS * hosts.seq - sum(taken)
        assert told["stale_ops"] == told["dropped_ops"] == 0


class Node(Rig):
    """A health loop of its own name that reaches Fleet through a relay."""

    def __init__(self, relay, name, steps):
        self.url, self.requests = f"http://{relay.address}", []
        super().__init__(self, steps, sample_s=10, warmup=3)
        identity = NodeIdentity(cluster_id="job", node_id=name, workload_type="training")
        self.loop._identity = self.episodes._identity = identity


def test_an_episode_outlives_a_killed_fleet_under_one_id_and_ends_in_its_successor():
    with ExitStack() as stack:
        fleet = stack.enter_context(run_fleet(build_fleet_config()))
        relay = stack.enter_context(Relay(fleet.addresses[HTTP]))
        slow_steps = [{"for": "100s"}, {"for": "200s", "throughput": 60}, {"for": "100h"}]
        nodes = [Node(relay, f"n{i}", [{"for": "100h"}]) for i in range(7)]
        slow = Node(relay, "slow", slow_steps)
        for node in (*nodes, slow):
            stack.callback(node.transport.close)
        ids = itertools.count(1)
        slow.episodes._new_id = lambda: f"00000000-0000-4000-8000-{next(ids):012d}"

        def sample(n):
            return [[node.sample() for node in (*nodes, slow)][-1] for _ in range(n)][-1]

        def episodes():
            page = fleet.url("extensions.ingero_threshold admin", "/api/v1/admin/episodes")
            return local_http.get(page, params={"cluster_id": "job"}).json()["episodes"]

        assert sample(16).is_straggler
        assert [one["first"]["event_id"] for one in episodes()] == [
            "00000000-0000-4000-8000-000000000001"
        ]
        fleet.process.kill()
        fleet.process.wait()
        assert sample(4).is_straggler
        fleet = stack.enter_context(run_fleet(build_fleet_config()))
        relay.target = fleet.addresses[HTTP]
        assert sample(4).is_straggler
        (known,) = episodes()
        assert known["last"]["event_id"] == "00000000-0000-4000-8000-000000000001"
        assert known["outcome"] is None
        assert not sample(12).is_straggler
        assert (slow.episodes.n_opened, slow.episodes.n_closed) == (1, 1)
        assert [one["outcome"] for one in episodes()] == ["resolved"]
