"""The live replay: a data-parallel job whose slow rank changes, told by real agents' senders, and their thresholds.

The job's times are those of now. Each rank has its queue of runs with a spill on disk, and pushes its health once a
second; what is acknowledged, and each threshold, is noted in the history.
"""

import functools
import random
import threading
import time

import httpx
from tests.chaos.history import Threshold
from tests.chaos.job import CLUSTER, N_RANKS, Job
from tests.chaos.site import TOKEN
from tests.support import local_http
from tests.support.pushes import build_status

from ingero.agent.collectives.run_queue import RunQueue
from ingero.agent.health.cache import HeaderOutcome, ThresholdCache
from ingero.agent.health.failover import FailoverTransport
from ingero.agent.health.push_body import NodeIdentity, build_push
from ingero.agent.health.push_queue import PushQueue
from ingero.agent.health.spill import Spill, SpillSettings
from ingero.agent.health.transport import HttpTransport, TransportSettings
from ingero.otlp.client.endpoint import parse_endpoint
from ingero.telemetry.clock import SystemClock
from ingero.units import NS_PER_S
from ingero.wire.collectives import read_collectives

INTERVAL_NS = NS_PER_S
TIMEOUT_NS = 2 * NS_PER_S


class SteppedClock(SystemClock):
    """An agent's clock, of which the wall's time steps."""

    def __init__(self):
        self.step_ns = 0

    def wall_ns(self):
        return super().wall_ns() + self.step_ns


class NotedTransport:
    """A transport that hands each request and its answer on.

    Args:
        transport: Sends.
        note: Called with both.
    """

    def __init__(self, transport, note):
        self._transport = transport
        self._note = note

    def send(self, export, wall_ns):
        reply = self._transport.send(export, wall_ns)
        self._note(export, reply)
        return reply

    def close(self):
        self._transport.close()


class Workload:
    """All agents, and a client that writes rows to Echo. Threads; `stop` ends them, `settle` waits for what is queued."""

    def __init__(self, site, history, seed, began_s):
        self._site = site
        self._history = history
        self._began_s = began_s
        self._stop = threading.Event()
        self._is_over = threading.Event()
        self._threads = []
        self.job = Job(seed)
        self.clocks = [SteppedClock() for _ in range(N_RANKS)]
        self.queues = []
        self._random = random.Random(seed)

    def begin(self):
        """Start every thread."""
        for rank in range(N_RANKS):
            taken = self._history.acknowledged.setdefault(f"rank {rank}", [])
            clock = self.clocks[rank]
            spill = Spill(SpillSettings(self._site.folder / f"spill-{rank}"), clock)
            transport = NotedTransport(
                self._open_transport(rank), functools.partial(_note_taken, taken)
            )
            queue = RunQueue(transport, clock, INTERVAL_NS, spill)
            self.queues.append(queue)
            self._run(self._push_runs, rank, queue)
            self._run(self._push_health, rank)
        self._run(self._write_rows)

    def end(self):
        """No more operations; what is queued is still sent."""
        self._is_over.set()

    def is_settled(self):
        """Whether nothing waits at any agent."""
        return all(not queue.kept and not queue.is_spilling for queue in self.queues)

    def stop(self):
        """End every thread."""
        self._is_over.set()
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def _run(self, work, *given):
        thread = threading.Thread(target=work, args=given, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _open_transport(self, rank):
        endpoints = self._site.endpoints
        first = rank % len(endpoints)
        transports = [
            HttpTransport(
                TransportSettings(
                    endpoint=parse_endpoint(one, is_insecure=True, option="--fleet"),
                    cluster_id=CLUSTER,
                    timeout_ns=TIMEOUT_NS,
                    is_protobuf=True,
                )
            )
            for one in (*endpoints[first:], *endpoints[:first])
        ]
        return FailoverTransport(transports, TIMEOUT_NS, time.monotonic_ns)

    def _pause(self):
        return self._stop.wait(1.0 + self._random.uniform(-0.1, 0.1))

    def _push_runs(self, rank, queue):
        next_ns = 0
        while not self._stop.wait(0.2):
            queue.drain()
            if time.monotonic_ns() < next_ns:
                continue
            next_ns = time.monotonic_ns() + INTERVAL_NS
            run = None if self._is_over.is_set() else self.job.take(rank)
            queue.put([] if run is None else [run])
            queue.push()

    def _note_threshold(self, rank, _export, reply):
        if reply.headers.outcome is HeaderOutcome.HIT:
            at_s = time.monotonic() - self._began_s
            self._history.thresholds.append(Threshold(rank, at_s, reply.headers.threshold))

    def _push_health(self, rank):
        identity = NodeIdentity(
            cluster_id=CLUSTER, node_id=f"node{rank}", world_size=N_RANKS, rank=rank
        )
        clock = self.clocks[rank]
        transport = NotedTransport(
            self._open_transport(rank), functools.partial(self._note_threshold, rank)
        )
        queue = PushQueue(
            transport,
            ThresholdCache(),
            clock,
            lambda ns: self._stop.wait(ns / NS_PER_S),
            lambda: 0.0,
        )
        while not self._pause():
            queue.offer(build_push(identity, build_status(wall_ns=clock.wall_ns())))
            queue.drain()
        queue.release()

    def _write_rows(self):
        """Rows straight to Echo, each again until it says that it has it."""
        taken = self._history.acknowledged.setdefault("echo", [])
        url = f"http://127.0.0.1:{self._site.echo_port}/v1/logs"
        number = 0
        with local_http.open_client(
            timeout=2, headers={"Authorization": f"Bearer {TOKEN}"}
        ) as client:
            while not self._is_over.wait(0.1):
                try:
                    answer = client.post(url, json=_build_row(number))
                except httpx.HTTPError:
                    continue
                if answer.is_success and "rejected" not in answer.text:
                    taken.append(number)
                    number += 1


def _note_taken(taken, export, reply):
    if reply.is_taken:
        for run in read_collectives(export).runs:
            taken.extend(run.ops["seq"].tolist())


def _build_row(number):
    record = {
        "timeUnixNano": str(time.time_ns()),
        "eventName": "chaos.row",
        "body": {"stringValue": str(number)},
    }
    resource = [{"key": "ingero.cluster.id", "value": {"stringValue": CLUSTER}}]
    return {
        "resourceLogs": [
            {"resource": {"attributes": resource}, "scopeLogs": [{"logRecords": [record]}]}
        ]
    }
