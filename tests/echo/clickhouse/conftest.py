"""The same rows in DuckDB and in ClickHouse's engine, inside the test (chdb): it has no users and no network."""

import datetime as dt
import json
import random

import pytest
from tests.echo.clickhouse.server import ClickHouseServer

from ingero.echo.db.clickhouse.settings import ClickHouseSettings
from ingero.echo.db.engine import DatabaseSettings
from ingero.echo.db.rows import Rows
from ingero.echo.db.store import Store, StoreSettings
from ingero.echo.db.writer_settings import DatabaseWriterSettings
from ingero.echo.schema.tables import (
    COLLECTIVES,
    COSTS,
    EVENTS,
    HANGS,
    HISTOGRAMS,
    INCIDENTS,
    LOGS,
    SPANS,
    USAGE,
    VERDICTS,
)
from ingero.testing.clock import ManualClock

CLUSTERS = ("c1", "c2", "c3")
N_NODES = 6
MINUTES = 30
BOUNDS = [0.1, 0.5, 1.0, 5.0]
EMBEDDED = ClickHouseSettings("here", 0, is_embedded=True)


def make_store(clickhouse, clock, **writer):
    settings = StoreSettings(
        engine=DatabaseSettings(memory_limit_bytes=256 << 20, threads=1),
        clickhouse=clickhouse,
        writer=DatabaseWriterSettings(**({"group_ns": 1_000_000} | writer)),
    )
    return Store(":memory:" if clickhouse is None else "clickhouse", settings, clock)


def now_of(clock):
    return dt.datetime(1970, 1, 1) + dt.timedelta(microseconds=clock.wall_ns() // 1000)  # noqa: DTZ001


class Filler:
    """Rows of every table, of each kind that a question looks for; no two have one time."""

    def __init__(self, now):
        self.rows = Rows()
        self.random = random.Random(7)
        self.now = now
        self.n = 0

    def add(self, table, minutes, cluster, node, **values):
        self.n += 1
        ts = self.now - dt.timedelta(minutes=minutes) + dt.timedelta(microseconds=self.n)
        known = {"ts": ts, "cluster_id": cluster, "node_id": node, **values}
        row = [known.get(name) for name in table.names]
        assert set(known) <= set(table.names), set(known) - set(table.names)
        self.rows.table(table).add(self.n, self.n, row)
        self.rows.n_rows += 1

    def event(
        self, minutes, cluster, node, name, value, kind="gauge", *, stream=None, **attributes
    ):
        text = json.dumps(attributes, sort_keys=True)
        self.add(
            EVENTS,
            minutes,
            cluster,
            node,
            metric_name=name,
            value_double=value,
            kind=kind,
            attributes=text,
            stream=stream,
        )

    def fill(self):
        for cluster in CLUSTERS:
            for i in range(N_NODES):
                self.node(cluster, f"{cluster}-n{i}", i)
            self.event(1, cluster, "", "ingero_fleet_threshold", 0.8)
            self.collectives(cluster)
            self.judged(cluster)
            self.remedied(cluster)
            self.stored(cluster)
        self.add(COSTS, 5, "c4", "c4-n0", gpu_seconds=2.0)  # all that is known of it
        return self.rows

    def stored(self, cluster):
        """Two bearers, two tables, and what was counted at a start."""
        for n, (bearer, table) in enumerate(
            [("aa", "events"), ("aa", "logs"), ("bb", "events"), ("", "logs")], 1
        ):
            said = {
                "of_table": table,
                "n_rows": 10 * n,
                "n_bytes": 1000 * n,
                "n_series": n if bearer else None,
            }
            self.add(USAGE, 5 * n, cluster, "", bearer=bearer, **said)

    def remedied(self, cluster):
        """A decision against acting, and an action that is done."""
        said = {
            "ingero.remediation.episode": "e1",
            "ingero.remediation.clauses": '[{"met": false}]',
            "ingero.remediation.evidence": '{"rank": 3, "labels": {}, "onset_entry_ns": 200000000}',
        }
        action = {"ingero.remediation.action_id": "a1", "ingero.remediation.target": "h3"}
        for seq, (entry, more) in enumerate([("decision", {}), *[("action", action)] * 2], 1):
            state = {"ingero.remediation.state": ("begun", "done")[seq - 2]} if more else {}
            numbered = {"ingero.remediation.seq": seq, "ingero.remediation.entry": entry}
            self.add(
                LOGS, 8 - seq, cluster, f"{cluster}-n3", event_name="ingero.remediation",
                severity="info", body=f"note {seq}" if seq > 1 else "",
                attributes=json.dumps(numbered | said | more | state, sort_keys=True),
            )  # fmt: skip

    def node(self, cluster, node, i):
        is_slow = i == 3
        said = {
            "ts": self.now,
            "provider": "aws" if i % 2 else None,
            "gpu_model": "H100",
            "gpu_count": 8,
            "state": "active",
        }
        self.rows.nodes[cluster, node] = [said]
        for minutes in range(MINUTES, 0, -3):
            score = 0.3 if is_slow and minutes < 12 else 0.9 + self.random.random() / 100
            self.event(
                minutes,
                cluster,
                node,
                "ingero.node.health_score",
                None if minutes == 9 and i == 1 else score,
                **{
                    "ingero.node.state": "idle" if i == 5 else "active",
                    "ingero.cgroup_path_hash": "ab" if i < 4 else "cd",
                },
            )
            if is_slow and minutes < 12:
                said = {"score": 0.3, "threshold": 0.87, "dominant_signal": "throughput"}
                self.event(
                    minutes,
                    cluster,
                    node,
                    "ingero.node.straggler_event",
                    float(minutes > 5),
                    **said,
                )
            self.event(minutes, cluster, node, "ingero.node.degradation_warning", float(is_slow))
            n = (MINUTES - minutes) * (1000.0 if is_slow else 2000.0) + i
            for stream, before in (
                ("aa", 10**6),
                ("bb", 0),
                (None, 5),
            ):  # three that count under one name
                said = {"kind": "cumulative", "stream": stream}
                self.event(minutes, cluster, node, "gpu.kernel.launch.count", before + n, **said)
            for percentile, us in (("p50", 4.0), ("p99", 9.0 + i)):
                self.event(
                    minutes,
                    cluster,
                    node,
                    "gpu.cuda.operation.duration",
                    us,
                    percentile=percentile,
                    operation="cudaLaunchKernel",
                )
            for direction in ("h2d", "d2h"):
                key = {"ingero.memcpy.direction": direction}
                self.event(
                    minutes, cluster, node, "gpu.memcpy.bytes_total", n * 64, "cumulative", **key
                )
                self.histogram(minutes, cluster, node, key)
            gpu = {"gpu.uuid": f"GPU-{i}"} if i else {}
            share = self.random.random()
            self.event(minutes, cluster, node, "gpu.memory.fragmentation_estimate", share, **gpu)
            self.event(minutes, cluster, node, "gpu.memfrag.ioctl_event_total", n, cmd="x", **gpu)
        self.event(2, cluster, node, "ingero.node.cuda_memcpy_bytes_total", 5.0, "delta")

    def histogram(self, minutes, cluster, node, key):
        counts = [(MINUTES - minutes) * j + self.random.randrange(3) for j in range(5)]
        self.add(
            HISTOGRAMS,
            minutes,
            cluster,
            node,
            metric_name="gpu.memcpy.duration_ms",
            count=sum(counts),
            bounds=BOUNDS,
            bucket_counts=counts,
            kind="cumulative",
            attributes=json.dumps(key),
        )

    def collectives(self, cluster):
        for comm, clock in (("aa", "device"), ("bb", "enqueue"), ("cc", "sync"), ("dd", "device")):
            for rank in range(4):
                last = 5 if comm == "cc" and rank > 1 else 12
                begun = 4 if comm == "dd" else 20  # after the action that `remedied` tells of
                for seq in range(last):
                    slow = rank == 1
                    self.add(
                        COLLECTIVES,
                        begun - seq / 10,
                        cluster,
                        f"{cluster}-n{rank}",
                        rank=rank,
                        comm=comm,
                        comm_rank=rank,
                        n_ranks=5 if comm in {"bb", "dd"} else 4,
                        n_gpus=8 if rank == 0 or comm == "aa" else None,
                        clock=clock,
                        seq=seq,
                        entry_ns=None if seq == 4 else seq * 100_000_000,
                        op="all_reduce",
                        inside_ns=None
                        if comm == "cc" and seq == last - 1
                        else (2_000_000 if slow else 50_000_000 + 1000 * rank + seq),
                        own_ns=60_000_000 if slow else 10_000_000 + seq,
                        n_bytes=1_000_000 * (seq + 1),
                    )

    def judged(self, cluster):
        slow = f"{cluster}-n3"
        if cluster != "c3":
            victims = [f"{cluster}-n0", f"{cluster}-n1"]
            for minutes, verdict in ((9, "drag"), (7, "culprit")):
                self.add(
                    VERDICTS,
                    minutes,
                    cluster,
                    slow,
                    rank=3,
                    worker=slow,
                    verdict=verdict,
                    slowdown=1.5,
                    victims=victims,
                    lost_gpu_seconds=12.5 / minutes,
                    summary="is slow — ä" * 60,
                )
        said = {"verdict": "culprit", "rank": 3}
        self.event(3, cluster, slow, "ingero_fleet_verdict", 1.0, **said)
        self.event(3, cluster, slow, "ingero_fleet_lost_gpu_seconds", 42.0, rank="3")
        if cluster == "c1":
            for seconds, who, currency in ((30.0, slow, "USD"), (7.0, "", None), (4.0, slow, None)):
                self.add(
                    COSTS,
                    5,
                    cluster,
                    who,
                    rank=3 if who else None,
                    victim_node_id="c1-n0",
                    gpu_seconds=seconds,
                    amount=seconds / 100 if currency else None,
                    currency=currency,
                    provider="aws",
                    attributed="charged" if who else "unattributed",
                )
        for minutes, state in ((8, "open"), (4, "resolved" if cluster == "c1" else "open")):
            self.add(
                INCIDENTS,
                minutes,
                cluster,
                slow,
                incident_id="i1",
                kind="straggler" if cluster == "c1" else "hang",
                severity="error",
                state=state,
                summary="score under threshold",
                start_ts=self.now - dt.timedelta(minutes=8),
            )
        if cluster != "c3":  # where nobody told of a hang, silence is asked
            states = [(9, "began")] if cluster == "c1" else [(9, "began"), (7, "ended")]
            for minutes, state in states:
                self.add(
                    HANGS,
                    minutes,
                    cluster,
                    slow,
                    rank=3,
                    comm="cc",
                    state=state,
                    cause="silent",
                    missing_seq=11,
                    blocks=[0, 1],
                    standing_s=4.5 if state == "began" else None,
                )
        self.add(LOGS, 6, cluster, slow, event_name="x.y", severity="warn", body="careful")
        self.add(SPANS, 6, cluster, slow, name="s", trace_id="t", end_ts=self.now)


@pytest.fixture(scope="session")
def clock():
    return ManualClock()


@pytest.fixture(scope="session")
def engine():
    """Keeps the engine's data while stores come and go."""
    pytest.importorskip("chdb", reason="needs chdb, ClickHouse's engine as a package")
    clickhouse_connect = pytest.importorskip("clickhouse_connect")
    client = clickhouse_connect.get_client(interface="chdb")
    yield client
    client.close()


@pytest.fixture(scope="session")
def server(engine):
    """The same engine behind HTTP."""
    clickhouse_connect = pytest.importorskip("clickhouse_connect")
    refusal = clickhouse_connect.driver.exceptions.DatabaseError
    serving = ClickHouseServer(clickhouse_connect.get_client, refusal)
    yield serving
    serving.close()


@pytest.fixture
def database(engine, request):
    """The name of an empty one."""
    name = f"d{abs(hash(request.node.nodeid))}"
    engine.command(f"CREATE DATABASE {name}")
    yield name
    engine.command(f"DROP DATABASE {name}")


@pytest.fixture(scope="session")
def filled(engine, clock):
    """A DuckDB store and a ClickHouse store with the same rows."""
    stores = make_store(None, clock), make_store(EMBEDDED, clock)
    for store in stores:
        store.open()
        store.write(Filler(now_of(clock)).fill())
    yield stores
    for store in stores:
        store.close()
