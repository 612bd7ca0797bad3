"""Echo: OTLP to durable rows against a bare Arrow append of the same rows; the tools on many points; tenant SQL."""

import asyncio
import datetime as dt
import os
import resource
import statistics
import tempfile
import threading
import time
from pathlib import Path

import duckdb
import httpx
import numpy as np
import pyarrow as pa
from tests.support.echo import RunningEcho

from ingero.config.acl import AclEntry
from ingero.echo.db.backup_socket import request_backup
from ingero.echo.db.rows import Chunk, Rows
from ingero.echo.queries.catalog import QUERIES
from ingero.echo.schema.tables import EVENTS
from ingero.otlp.codec import Export, build_attributes, structs
from ingero.otlp.names import Signal

SAYS = "OTLP to durable rows beside bare Arrow append; p95 of each tool; tenant SQL"
TOKEN = "b" * 32
N_POINTS = int(os.environ.get("INGERO_BENCH_POINTS", "5000000"))
SECONDS = float(os.environ.get("INGERO_BENCH_SECONDS", "5"))
POINTS_PER_REQUEST = 1_000  # what a collector's batch processor forwards at least
N_SENDERS = 32
N_NODES = 1000


def request(number):
    """One request of a collector: 100 resources of 10 points; times make every row its own."""
    now_ns = time.time_ns()
    entries = []
    for node in range(100):
        points = [
            structs.Metric(
                f"ingero.node.metric_{i}",
                gauge=structs.Gauge([
                    structs.NumberDataPoint(
                        build_attributes({
                            "ingero.node.state": "active",
                            "ingero.workload_type": "train",
                        }),
                        0,
                        now_ns + number,
                        as_double=0.9 + i,
                    )
                ]),
            )
            for i in range(POINTS_PER_REQUEST // 100)
        ]
        who = structs.Resource(
            build_attributes({"ingero.cluster.id": "c1", "ingero.node.id": f"node-{node}"})
        )
        entries.append(structs.ResourceMetrics(who, [structs.ScopeMetrics(None, points)]))
    export = Export.from_tree(Signal.METRICS, structs.MetricsRequest(entries))
    return export.message.SerializeToString()


def arrow_floor(folder):
    """Rows/s of one core when the same rows are appended as Arrow in commits of 50 000, nothing else done."""
    n_rows = 50_000
    now = dt.datetime.now(dt.UTC).replace(tzinfo=None)
    columns = [
        [now] * n_rows,
        ["c1"] * n_rows,
        [f"node-{i % 100}" for i in range(n_rows)],
        [f"ingero.node.metric_{i % 10}" for i in range(n_rows)],
        [0.9] * n_rows,
        [None] * n_rows,
        ["gauge"] * n_rows,
        [""] * n_rows,
        ['{"ingero.node.state":"active","ingero.workload_type":"train"}'] * n_rows,
        [f"{i % 100:016x}" for i in range(n_rows)],
    ]
    connection = duckdb.connect(str(folder / "floor.db"), config={"threads": 1})
    table = pa.table(
        [
            pa.array(values, type=kind)
            for values, (_, kind) in zip(columns, EVENTS.columns, strict=True)
        ],
        names=list(EVENTS.names),
    )
    connection.register("incoming", table)
    connection.execute("CREATE TABLE events AS SELECT * FROM incoming LIMIT 0")
    cpu, done = time.process_time(), 0
    while time.process_time() - cpu < SECONDS / 2:
        arrays = [
            pa.array(values, type=kind)
            for values, (_, kind) in zip(columns, EVENTS.columns, strict=True)
        ]
        connection.register("incoming", pa.table(arrays, names=list(EVENTS.names)))
        connection.execute("BEGIN")
        connection.execute("INSERT INTO events SELECT * FROM incoming")
        connection.execute("COMMIT")
        done += n_rows
    used = time.process_time() - cpu
    connection.close()
    return done / used


def measure_ingest(echo):
    """Acknowledged rows per second of wall time and per second of processor time of this process."""
    bodies = [request(i * POINTS_PER_REQUEST) for i in range(64)]
    raw = [
        (
            f"POST /v1/metrics HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n"
            f"content-type: application/x-protobuf\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode()
        + body
        for body in bodies
    ]
    latencies, counts = [], [0] * N_SENDERS
    until = time.monotonic() + SECONDS

    async def send(sender):
        reader, writer = await asyncio.open_connection("127.0.0.1", echo.at.otlp_http.port)
        number = sender
        while time.monotonic() < until:
            began = time.monotonic()
            writer.write(raw[number % len(raw)])
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head.partition(b"\r\n")[0] + b" ", head
            latencies.append(time.monotonic() - began)
            counts[sender] += 1
            number += N_SENDERS
        writer.close()

    async def everybody():
        await asyncio.gather(*(send(sender) for sender in range(N_SENDERS)))

    sent = threading.Thread(target=lambda: asyncio.run(everybody()))
    before = echo.service.store.counters
    taken_before = before.written + before.duplicates
    wall, cpu = time.monotonic(), time.process_time()
    sent.start()
    sent.join()
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    after = echo.service.store.counters
    n_rows = after.written + after.duplicates - taken_before
    return n_rows / wall, n_rows / cpu, sorted(latencies), after


def load(echo, n_points):
    """Points of the last day straight into the store, in the order they would have come."""
    rng = np.random.default_rng(7)
    end_us = time.time_ns() // 1000
    chunk, done = 1_000_000, 0
    metrics = [f"ingero.node.metric_{i}" for i in range(9)] + ["ingero.node.health_score"]
    nodes = [f"node-{i:04}" for i in range(N_NODES)]
    step_us = 86_400_000_000 / n_points
    while done < n_points:
        n = min(chunk, n_points - done)
        order = np.arange(done, done + n)
        ts = (end_us - 86_400_000_000 + order * step_us).astype(np.int64)
        node_idx, metric_idx = (order // 10) % N_NODES, order % 10
        values = np.where(node_idx == 17, 0.4, 0.95) + rng.normal(0, 0.005, n)
        arrays = [
            pa.array(ts).cast(pa.timestamp("us")),
            pa.repeat(pa.scalar("c1"), n),
            pa.array(nodes).take(pa.array(node_idx)),
            pa.array(metrics).take(pa.array(metric_idx)),
            pa.array(values),
            pa.nulls(n, pa.string()),
            pa.repeat(pa.scalar("gauge"), n),
            pa.repeat(pa.scalar("1"), n),
            pa.repeat(pa.scalar('{"ingero.node.state":"active"}'), n),
        ]
        rows = Rows(n_rows=n)
        batch = pa.RecordBatch.from_arrays(arrays, names=list(EVENTS.names))
        rows.table(EVENTS).chunks.append(Chunk(batch, order.astype(np.uint64), ts))
        echo.service.store.write(rows)
        done += n


def ask_all(echo):
    """p50 and p95 of every tool over HTTP, one hour of the store, in milliseconds."""
    needed = {
        "fleet.cluster.node_detail": {"node_id": "node-0017"},
        "fleet.cluster.run_analysis": {
            "sql": "SELECT node_id, avg(value_double) FROM events GROUP BY ALL ORDER BY 2 LIMIT 5",
            "time_window": "3m",
        },
    }
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(headers=headers, timeout=60) as client:
        for query in QUERIES:
            took = []
            for _ in range(20):
                began = time.perf_counter()
                answer = client.post(
                    f"{echo.url}/api/v2/tools/{query.name}",
                    json={"args": needed.get(query.name, {})},
                )
                took.append((time.perf_counter() - began) * 1e3)
                assert answer.status_code == 200, answer.text
            took.sort()
            yield query.name, statistics.median(took), took[18]


STATEMENTS = {
    "of two columns": "SELECT metric_name, count(*), quantile_cont(value_double, 0.95) FROM events GROUP BY ALL",
    "of every column": "SELECT * FROM events ORDER BY value_double LIMIT 10",
}


def ask_sql(echo, statement):
    """Tenant SQL over about 100 000 rows: rows handed over, p50 and p95 in milliseconds."""
    headers = {"authorization": f"Bearer {TOKEN}"}
    minutes = max(1, round(100_000 / (N_POINTS / 1440)))
    window = {"time_window": f"{minutes}m", "until": "latest"}

    def ask(sql):
        body = {"sql": sql, **window}
        answer = httpx.post(f"{echo.url}/api/v2/sql", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["rows"]

    ((n_rows,),) = ask("SELECT count(*) FROM events")
    took = []
    for _ in range(20):
        began = time.perf_counter()
        ask(statement)
        took.append((time.perf_counter() - began) * 1e3)
    took.sort()
    return n_rows, statistics.median(took), took[18]


def back_up_beside(echo, folder):
    """Seconds of a backup while it is served, and the copy's MiB."""
    began = time.monotonic()
    request_backup(Path(echo.service.store.path), folder / "copy.db")
    return time.monotonic() - began, (folder / "copy.db").stat().st_size >> 20


def rss_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20


def run():
    settings = {
        "rate_per_second": 1e9,
        "rate_burst": 10**9,
        "group_commit": "50ms",
        "sql_timeout": "60s",
        "retention": "0s",
    }
    with tempfile.TemporaryDirectory(dir=os.environ.get("INGERO_BENCH_DIR")) as name:
        folder = Path(name)
        floor = arrow_floor(folder)
        yield f"floor: bare Arrow append of the same rows, one core: {floor:,.0f} rows/s of processor time"
        with RunningEcho(folder / "ingest.db", [AclEntry("bench", TOKEN, None)], settings) as echo:
            per_wall, per_cpu, latencies, counters = measure_ingest(echo)
            p50, p99 = latencies[len(latencies) // 2], latencies[int(len(latencies) * 0.99)]
            yield (
                f"OTLP/HTTP to durable rows, acknowledged after the commit, {N_SENDERS} senders of "
                f"{POINTS_PER_REQUEST} points (senders in the same process): {per_wall:,.0f} rows/s, "
                f"{per_cpu:,.0f} rows/s of processor time ({per_cpu / floor:.2f} of the floor)"
            )
            yield (
                f"  answer p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms; {counters.commits} commits; "
                f"{counters.duplicates} rows were repeats of a body and dropped; RSS {rss_mib()} MiB"
            )
        with RunningEcho(folder / "tools.db", [AclEntry("bench", TOKEN, None)], settings) as echo:
            began = time.monotonic()
            load(echo, N_POINTS)
            size = (folder / "tools.db").stat().st_size >> 20
            yield f"{N_POINTS:,} points in {time.monotonic() - began:.0f} s, file {size} MiB, RSS {rss_mib()} MiB"
            for tool, p50, p95 in ask_all(echo):
                yield f"  {tool:40} p50 {p50:7.1f} ms  p95 {p95:7.1f} ms"
            for description, statement in STATEMENTS.items():
                n_rows, p50, p95 = ask_sql(echo, statement)
                yield f"tenant SQL {description}, {n_rows:,} rows: p50 {p50:.0f} ms, p95 {p95:.0f} ms"
            seconds, size = back_up_beside(echo, folder)
            yield f"backup while serving: {size} MiB in {seconds:.1f} s; RSS {rss_mib()} MiB"
