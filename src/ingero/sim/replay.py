"""A recording pushed to a Fleet by one agent per worker, and what that Fleet concluded.

Every push is real OTLP/HTTP: a health score as metrics, the collectives as logs, on a connection per agent. Trace time
is kept in the records; ``speed`` only says how much of it passes per second of ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

import httpx

from ingero.agent.health.push_body import NodeIdentity, PushStatus, build_push
from ingero.agent.health.signals.machine import State
from ingero.agent.health.signals.reading import Signals
from ingero.agent.health.transport import HttpTransport, TransportSettings
from ingero.errors import RetryableError
from ingero.job_traces.model import JobTrace, Push, iter_pushes
from ingero.model.verdicts import Judgement, parse_judgement
from ingero.otlp.client.endpoint import OtlpEndpoint
from ingero.otlp.codec import Export
from ingero.telemetry.clock import Clock, SystemClock
from ingero.units import NS_PER_MS, NS_PER_S
from ingero.web_authorities import WebAuthorities
from ingero.wire.collectives import build_collectives
from ingero.wire.names import DetectionMode

VERDICTS_PATH: Final = "/api/v1/admin/verdicts"
PAGE: Final = 1000
PUSH_TIMEOUT_NS: Final = 10 * NS_PER_S
PUSH_TRIES: Final = 5
JUDGE_TIMEOUT_NS: Final = 30 * NS_PER_S
_NOT_JUDGED: Final = ("pending_ops", "stale_ops")
_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class FleetTarget:
    """Which Fleet.

    Attributes:
        otlp: Where to push.
        admin_url: Base of the admin endpoint, such as ``http://127.0.0.1:8081``.
        headers: Sent with each push, such as ``Authorization``.
    """

    otlp: OtlpEndpoint
    admin_url: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """Where a replay is.

    Attributes:
        at_ns: Trace time that has been pushed.
        end_ns: Trace time in all.
        n_pushes: Requests that Fleet took.
        judgement: What Fleet says now; None before it says anything.
    """

    at_ns: int
    end_ns: int
    n_pushes: int
    judgement: Judgement | None


class _Agent:
    """One worker's agent: its connection and its identity."""

    def __init__(self, target: FleetTarget, identity: NodeIdentity, clock: Clock) -> None:
        self._identity = identity
        self._clock = clock
        self._transport = HttpTransport(
            TransportSettings(
                endpoint=target.otlp,
                cluster_id=identity.cluster_id,
                timeout_ns=PUSH_TIMEOUT_NS,
                is_protobuf=True,
                headers=target.headers,
            )
        )

    def push(self, push: Push) -> int:
        """Send what the push holds; returns how many requests that took."""
        exports = [build_collectives(push.runs, self._clock.wall_ns())] if push.runs else []
        if push.health_score is not None:
            exports.append(self._health(push.health_score))
        for export in exports:
            self._send(export)
        return len(exports)

    def _health(self, score: float) -> Export:
        status = PushStatus(
            score=score,
            shares=Signals(None, None, None, None),
            state=State.ACTIVE,
            is_degraded=False,
            mode=DetectionMode.NONE,
            is_reachable=True,
            cohort="",
            wall_ns=self._clock.wall_ns(),
        )
        return build_push(self._identity, status)

    def _send(self, export: Export) -> None:
        pause_ns = 200 * NS_PER_MS
        answer = self._transport.send(export, self._clock.wall_ns())
        for _ in range(PUSH_TRIES - 1):
            if answer.is_settled:
                break
            time.sleep((answer.retry_after_ns or pause_ns) / NS_PER_S)
            pause_ns *= 2
            answer = self._transport.send(export, self._clock.wall_ns())
        if not answer.is_taken:
            raise RetryableError(
                f"Fleet did not take a push of {self._identity.node_id}: {answer.detail}",
                hint="is the endpoint Fleet's OTLP/HTTP receiver, with metrics and logs pipelines?",
            )

    def close(self) -> None:
        self._transport.close()


def name_cluster(trace: JobTrace, cluster_id: str) -> JobTrace:
    """The same job reported under another cluster's name."""
    workers = tuple(replace(worker, cluster_id=cluster_id) for worker in trace.workers)
    runs = tuple(
        tuple(replace(run, rank=worker) for run in of_worker)
        for worker, of_worker in zip(workers, trace.runs, strict=True)
    )
    return replace(trace, workers=workers, runs=runs)


def replay_to_fleet(
    trace: JobTrace,
    target: FleetTarget,
    *,
    speed: float,
    interval_ns: int,
    follow: Callable[[ReplayProgress], None],
) -> Judgement:
    """Push a recording and wait until Fleet has judged all of it.

    Args:
        trace: Its workers' cluster must be new to this Fleet, or what the Fleet remembers counts too.
        target: Which Fleet.
        speed: Seconds of trace time per second.
        interval_ns: Trace time between pushes.
        follow: Called about five times a second.

    Raises:
        RetryableError: Fleet did not take a push, or has not judged everything in time.
    """
    clock = SystemClock()
    cluster_id = trace.workers[0].cluster_id
    end_ns = int(trace.steps["end_ns"][-1])
    began_ns, followed_ns, n_pushes = clock.mono_ns(), 0, 0
    with ExitStack() as stack:
        agents = [
            stack.enter_context(closing(_Agent(target, _identity(trace, at), clock)))
            for at in range(len(trace.workers))
        ]
        # Ends before the agents that its threads use.
        pool = stack.enter_context(ThreadPoolExecutor(min(32, len(agents))))
        admin = stack.enter_context(httpx.Client(timeout=10, verify=WebAuthorities()))
        for at_ns, pushes in _rounds(trace, interval_ns):
            due_ns = began_ns + int(at_ns / speed)
            while (left_ns := due_ns - clock.mono_ns()) > 0:
                time.sleep(min(left_ns / NS_PER_S, _POLL_S))
            n_pushes += sum(pool.map(lambda push: agents[push.worker].push(push), pushes))
            if clock.mono_ns() - followed_ns >= _POLL_S * NS_PER_S:
                followed_ns = clock.mono_ns()
                judgement = ask_judgement(admin, target.admin_url, cluster_id)
                follow(ReplayProgress(min(at_ns, end_ns), end_ns, n_pushes, judgement))
        judgement = _await_all(admin, target.admin_url, trace, clock)
        follow(ReplayProgress(end_ns, end_ns, n_pushes, judgement))
    return judgement


def ask_judgement(
    admin: httpx.Client, admin_url: str, cluster_id: str, *, with_history: bool = False
) -> Judgement | None:
    """What Fleet says of a cluster now, workers in natural order; None when it says nothing yet.

    With history, it also names workers whose alarm has cleared.

    Raises:
        RetryableError: The admin endpoint does not answer.
        BadDataError: It answers something else.
    """
    verdicts: list[Any] = []
    while True:
        query = {"cluster_id": cluster_id, "offset": str(len(verdicts)), "limit": str(PAGE)}
        if with_history:
            query["history"] = "true"
        try:
            response = admin.get(admin_url + VERDICTS_PATH, params=query)
            if response.status_code == httpx.codes.NOT_FOUND:
                return None
            page = response.raise_for_status().json()["clusters"][0]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError) as error:
            raise RetryableError(
                f"Fleet's admin endpoint {admin_url} does not tell verdicts: {error}",
                hint="it listens on loopback only: run this on Fleet's own machine, or forward the port",
            ) from error
        verdicts += page["verdicts"]
        if len(verdicts) >= page["total"] or not page["verdicts"]:
            break
    judgement = parse_judgement({**page, "verdicts": verdicts})
    return replace(judgement, verdicts=tuple(sorted(judgement.verdicts, key=lambda v: v.rank.rank)))


def _identity(trace: JobTrace, at: int) -> NodeIdentity:
    worker = trace.workers[at]
    return NodeIdentity(
        cluster_id=worker.cluster_id,
        node_id=worker.node_id,
        workload_type="training",
        world_size=len(trace.workers),
        rank=worker.rank,
    )


def _rounds(trace: JobTrace, interval_ns: int) -> Iterator[tuple[int, list[Push]]]:
    for at_ns, pushes in groupby(iter_pushes(trace, interval_ns), key=lambda push: push.at_ns):
        yield at_ns, list(pushes)


def _await_all(admin: httpx.Client, admin_url: str, trace: JobTrace, clock: Clock) -> Judgement:
    """Wait until every operation was judged; Fleet gives stragglers of a push its reorder window first."""
    n_before, since_ns = -1, clock.mono_ns()
    while True:
        cluster_id = trace.workers[0].cluster_id
        judgement = ask_judgement(admin, admin_url, cluster_id, with_history=True)
        counts = {} if judgement is None else judgement.counts
        # A push whose answer was lost came twice; its repeats are among the stale.
        n_judged = counts.get("ops", 0) - sum(counts.get(name, 0) for name in _NOT_JUDGED)
        if judgement is not None and n_judged >= trace.n_ops:
            return judgement
        if n_judged > n_before:
            n_before, since_ns = n_judged, clock.mono_ns()
        if clock.mono_ns() - since_ns > JUDGE_TIMEOUT_NS:
            raise RetryableError(
                f"Fleet has judged {n_judged} of {trace.n_ops} operations, and none more for"
                f" {JUDGE_TIMEOUT_NS / NS_PER_S:.0f} s",
                hint="its log and the ingero_fleet_nccl_* counters on port 8888 say what it dropped",
            )
        time.sleep(_POLL_S)
