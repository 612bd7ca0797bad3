"""A judge of a large job is killed: how long until another Fleet names its culprit, with a standby and without.

Two Fleets meet in a real nats-server. Hosts of eight ranks push every five seconds, in real time; one communicator has all
ranks, four operations a second; one rank is 1.3 times as slow. Records are made before; what is measured is what Fleets do.

Environment: ``INGERO_BENCH_RANKS`` (10000), ``INGERO_BENCH_SECONDS`` (60) of the job before the kill.
"""

import concurrent.futures
import itertools
import os
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import psutil

from ingero.errors import UnsupportedError
from ingero.model.collectives import COLLECTIVE_OP, ClockKind, CollectiveOp, CollectiveRun, Rank
from ingero.otlp.codec import encode_protobuf
from ingero.sim.local_nats import LocalNats, find_nats_server
from ingero.testing.fleet import build_fleet_config, run_fleet
from ingero.units import NS_PER_MS, NS_PER_S
from ingero.wire.collectives import build_collectives

SAYS = "a judge process takes over in ≤ 5 s for a 10 000-rank job; the lease is 2 s"
HOST_RANKS, PUSH_S, OPS_PER_S, SLOWDOWN = 8, 5, 4, 1.3
PROTOBUF = {"content-type": "application/x-protobuf"}
_CLUSTER = "large"
_SENDERS = 8
_WAIT_S = 240


def build_pushes(n_ranks, n_pushes, slow, first_ns):
    """Bodies by push, then host; their records are dated as pushed without delay, the first ones at a moment to come."""
    rng = np.random.default_rng(11)
    n_ops = PUSH_S * OPS_PER_S
    own = (
        100 * NS_PER_MS * (1 + 0.02 * rng.standard_normal((n_ranks, n_pushes * n_ops), np.float32))
    )
    own[slow] *= SLOWDOWN
    arrived = own.max(axis=0)
    leave = np.cumsum(arrived.astype(np.int64) + NS_PER_MS)
    hosts = range(0, n_ranks, HOST_RANKS)
    for at in range(n_pushes):
        now = slice(at * n_ops, (at + 1) * n_ops)
        yield [
            encode_protobuf(
                build_collectives(
                    [
                        _build_run(
                            rank, n_ranks, at * n_ops, own[rank, now], arrived[now], leave[now]
                        )
                        for rank in range(host, min(host + HOST_RANKS, n_ranks))
                    ],
                    first_ns + at * PUSH_S * NS_PER_S,
                )
            )
            for host in hosts
        ]


def _build_run(rank, n_ranks, first, own, arrived, leave):
    ops = np.zeros(own.size, COLLECTIVE_OP)
    ops["seq"], ops["own_ns"] = np.arange(first, first + own.size), own
    ops["inside_ns"] = arrived - own + NS_PER_MS
    ops["entry_ns"] = leave - ops["inside_ns"] + 1
    ops["n_bytes"], ops["op"] = 1 << 24, CollectiveOp.ALL_REDUCE
    who = Rank(_CLUSTER, f"node{rank // HOST_RANKS}", rank, HOST_RANKS)
    return CollectiveRun(who, "00000000000000aa", rank, n_ranks, ClockKind.DEVICE, ops)


class Site:
    """Two Fleets and whoever pushes to the second."""

    def __init__(self, stack, nats, *, standby):
        config = build_fleet_config(nccl={})
        config["service"]["pipelines"]["logs"]["processors"] = ["nccl"]
        storage = {"servers": [nats.url], "timeout": "20s", "standby": standby}
        config["service"]["storage"] = {"nats": storage}
        self.first = stack.enter_context(run_fleet(config))
        self.client = stack.enter_context(httpx.Client(timeout=60))
        self._config, self._stack = config, stack
        self.second = None
        self.n_refused = 0

    def start_second(self):
        self.second = self._stack.enter_context(run_fleet(self._config))

    def push(self, bodies, until):
        """Spread over the time until then; what is refused is counted and lost, as no agent would let it be."""
        url = (self.second or self.first).url("receivers.otlp http", "/v1/logs")
        began, count = time.monotonic(), len(bodies)

        def send(part):
            with httpx.Client(timeout=60) as client:
                for at in part:
                    due = began + (until - began) * at / count
                    time.sleep(max(0.0, due - time.monotonic()))
                    answer = client.post(url, content=bodies[at], headers=PROTOBUF)
                    self.n_refused += answer.status_code != 200

        with concurrent.futures.ThreadPoolExecutor(_SENDERS) as pool:
            list(pool.map(send, [range(at, count, _SENDERS) for at in range(_SENDERS)]))

    def find_culprits(self, fleet):
        url = fleet.url("extensions.ingero_threshold admin", "/api/v1/admin/findings")
        answer = self.client.get(url, params={"cluster_id": _CLUSTER})
        if answer.status_code != 200:
            return None
        return [one["rank"] for one in answer.json()["findings"] if one["verdict"] == "culprit"]

    def wait_for(self, fleet, slow, bodies):
        """Seconds until a Fleet judges, and until it names the culprit, while hosts go on to push."""
        began, judged = time.monotonic(), None
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pushing = None
            while time.monotonic() - began < _WAIT_S:
                if (pushing is None or pushing.done()) and (more := next(bodies, None)) is not None:
                    pushing = pool.submit(self.push, more, time.monotonic() + PUSH_S)
                found = self.find_culprits(fleet)
                if found is not None and judged is None:
                    judged = time.monotonic() - began
                if found == [slow]:
                    return judged, time.monotonic() - began
                time.sleep(0.05)
        return judged, None


def measure(n_ranks, n_pushes, *, standby):
    slow = n_ranks * 2 // 5
    first_s = time.time() + 10 + n_ranks * n_pushes / 4000
    bodies = build_pushes(n_ranks, n_pushes + 20, slow, int(first_s * NS_PER_S))
    made = list(itertools.islice(bodies, n_pushes))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nats = LocalNats(folder)
        stack.enter_context(nats.run())
        site = Site(stack, nats, standby=standby)
        began = time.monotonic() + first_s - time.time()
        time.sleep(max(0.0, began - time.monotonic()))
        site.push(made[0], began + PUSH_S)
        site.start_second()
        for at, some in enumerate(made[1:], 2):
            site.push(some, began + at * PUSH_S)
        named, _ = site.wait_for(site.first, slow, iter(()))
        used = [_cpu_s(one) for one in (site.first, site.second)]
        site.first.signal(signal.SIGKILL)
        judged, found = site.wait_for(site.second, slow, bodies)
        log = [line for line in site.second.log.splitlines() if "judging cluster" in line]
        return named is not None, judged, found, site.n_refused, used, log


def _cpu_s(program):
    times = psutil.Process(program.process.pid).cpu_times()
    return times.user + times.system


def run():
    try:
        find_nats_server()
    except UnsupportedError as error:
        yield f"   left out: {error}"
        return
    n_ranks = int(os.environ.get("INGERO_BENCH_RANKS", "10000"))
    seconds = int(os.environ.get("INGERO_BENCH_SECONDS", "60"))
    yield f"   {n_ranks} ranks, {seconds} s before the kill, load of the machine {os.getloadavg()[0]:.1f}"
    for standby in (True, False):
        was_named, judged, found, n_refused, used, log = measure(
            n_ranks, max(seconds // PUSH_S, 2), standby=standby
        )
        what = "with a standby" if standby else "without one"
        times = "never" if judged is None else f"{judged:.1f} s"
        culprit = "never" if found is None else f"{found:.1f} s"
        yield (
            f"   {what:<15} the first verdict after {times}, the culprit after {culprit}"
            f"{'' if was_named else ' (the first judge had not named it)'}; {n_refused} pushes refused; CPU before: judge"
            f" {used[0] / seconds:.2f} cores, the other, which receives, {used[1] / seconds:.2f}"
        )
        yield f"   {'':<15} its log: {log[0].partition('nats: ')[2] if log else 'pushed out by other lines'}"
