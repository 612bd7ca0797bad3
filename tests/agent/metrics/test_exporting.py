"""A trace's numbers as others read them.

A page parsed by Prometheus' own client, and pushes decoded by OTLP's own messages.
"""

import gzip
import threading
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from prometheus_client.parser import text_string_to_metric_families

from ingero.agent.capture.discover.identity import Pod, ProcessIdentity
from ingero.agent.capture.kernel.abi import N_COPY_KINDS, get_dtype
from ingero.agent.capture.totals import RetiredCounts, Totals
from ingero.agent.events.sink_server import serve_sink
from ingero.agent.health.transport import HttpTransport, TransportSettings
from ingero.agent.metrics.exporting import (
    MetricObserver,
    OtlpPusher,
    PrometheusPage,
    build_export,
)
from ingero.agent.metrics.recent import RecentDurations
from ingero.agent.metrics.series import Distribution, Kind, Series, iter_call_series
from ingero.config import Endpoint
from ingero.model.events import CudaOp, NcclOp, Source
from ingero.model.latency import build_bucket_edges_ns
from ingero.model.recording import ProcessRank
from ingero.otlp.client.endpoint import parse_endpoint
from ingero.telemetry.clock import SystemClock
from ingero.wire.names import MemcpyDirection

LAUNCH, REDUCE = (Source.CUDA, CudaOp.LAUNCH_KERNEL), (Source.NCCL, NcclOp.ALL_REDUCE)
DURATIONS = {
    (7, LAUNCH): [100, 300, 5000, 5100, 90_000_000_000],
    (8, LAUNCH): [200],
    (7, REDUCE): [2_000_000, 3_000_000],
}


def rows_of(durations):
    """Keys and counts as the kernel keeps them, by a slow loop."""
    keys = np.zeros(len(durations), get_dtype("count_key"))
    counts = np.zeros(len(durations), get_dtype("count"))
    edges = build_bucket_edges_ns()
    for i, ((pid, (source, op)), all_ns) in enumerate(durations.items()):
        keys[i]["pid"], keys[i]["source"], keys[i]["op"] = pid, source, op
        for ns in all_ns:
            bucket = max(int(np.searchsorted(edges, ns, side="right")) - 1, 0)
            counts[i]["hist"][min(bucket, len(edges) - 2)] += 1
        counts[i]["seen"] = counts[i]["entered"] = len(all_ns)
        counts[i]["emitted"] = 1
        counts[i]["sampled"] = len(all_ns) - 1
        counts[i]["total_ns"], counts[i]["bytes"] = sum(all_ns), 1009 * len(all_ns)
        counts[i]["min_ns"], counts[i]["max_ns"] = min(all_ns), max(all_ns)
    return keys, counts


def copies_of(**durations):
    """``struct ig_count`` by direction: the copies took these nanoseconds and moved 1009 bytes each."""
    copies = np.zeros(N_COPY_KINDS, get_dtype("count"))
    edges = build_bucket_edges_ns()
    for direction, all_ns in durations.items():
        count = copies[list(MemcpyDirection).index(direction)]
        for ns in all_ns:
            count["hist"][int(np.searchsorted(edges, ns, side="right")) - 1] += 1
        count["seen"], count["bytes"], count["total_ns"] = (
            len(all_ns),
            1009 * len(all_ns),
            sum(all_ns),
        )
    return copies


def totals_of(durations, **more):
    keys, counts = rows_of(durations)
    nothing = np.zeros(0, [("pid", "<u4")])
    return Totals(
        mono_ns=5, wall_ns=1_700_000_000_000_000_000, elapsed_ns=10, keys=keys, counts=counts,
        changes=counts, losses={"uncounted": 3}, in_flight=nothing, keep_one_in=1, **more,
    )  # fmt: skip


def scrape(url):
    with urllib.request.urlopen(url) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }


def test_a_scraper_reads_exact_counts_and_histograms_by_the_documented_names():
    page = PrometheusPage()
    observer = MetricObserver([page])
    observer.on_process(ProcessIdentity(7, place=ProcessRank(rank=4)))
    with serve_sink(Endpoint("127.0.0.1", 0), page) as bound:
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://{bound}/readyz")
        observer.on_totals(
            totals_of(DURATIONS, copies=copies_of(h2d=[300, 3_000_000], default=[700]))
        )
        told = scrape(f"http://{bound}/metrics")
    launch = {"source": "cuda", "operation": "cudaLaunchKernel"}

    def value(name, **labels):
        return told[name, frozenset({key: str(text) for key, text in labels.items()}.items())]

    assert value("gpu_cuda_operation_count", **launch) == 6
    name = "ingero_cuda_operation_duration_seconds"
    assert value(f"{name}_count", **launch) == 6
    assert value(f"{name}_sum", **launch) == (100 + 300 + 5000 + 5100 + 90e9 + 200) / 1e9
    for log2, n_within in ((7, 1), (8, 2), (9, 3), (12, 3), (13, 5), (36, 5)):
        assert value(f"{name}_bucket", **launch, le=2.0**log2 / 1e9) == n_within, log2
    assert value(f"{name}_bucket", **launch, le="+Inf") == 6
    assert value("gpu_kernel_launch_count", pid=7) == 5
    assert value("ingero_trace_losses_total", what="uncounted") == 3
    assert value("gpu_memcpy_bytes_total", direction="h2d") == 2018
    assert value("gpu_memcpy_bytes_total", direction="default") == 1009
    assert value("gpu_memcpy_duration_ms_count", direction="h2d") == 2
    assert value("gpu_memcpy_duration_ms_sum", direction="h2d") == 3.0003
    assert value("gpu_memcpy_duration_ms_bucket", direction="h2d", le=2.0**21 / 1e6) == 1
    assert not any(("direction", "d2h") in labels for _, labels in told)
    reduce = {"op_type": "ncclAllReduce", "pid": 7, "rank": 4}
    assert value("ingero_nccl_calls_total", **reduce) == 2
    assert value("ingero_nccl_bytes_total", **reduce) == 2018
    assert value("gpu_nccl_collective_count", op_type="ncclAllReduce") == 2
    assert value("gpu_nccl_collective_bytes_total", op_type="ncclAllReduce") == 2018
    assert value("nccl_collective_duration_ms_sum", **reduce) == 5
    assert value("ingero_ringbuf_overflows_total") == 3
    assert value("ingero_trace_calls_total", outcome="sampled") == 5


@contextmanager
def collector(statuses):
    """An OTLP/HTTP receiver that answers with these statuses, then 200, and keeps what it was sent."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, dict(self.headers), body))
            self.send_response(statuses.pop(0) if statuses else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def start_pusher(address, notes):
    endpoint = parse_endpoint(address, is_insecure=True, option="--otlp")
    settings = TransportSettings(
        endpoint=endpoint, timeout_ns=5 * 10**9, is_protobuf=True, is_gzip=True, headers={"X-Key": "k"}
    )  # fmt: skip
    resource = {"service.name": "ingero", "ingero.node.id": "n1"}
    return OtlpPusher(HttpTransport(settings), resource, SystemClock(), notes.append)


def test_the_last_numbers_are_pushed_as_cumulative_sums_and_histograms():
    notes = []
    with collector([]) as (address, received):
        pusher = start_pusher(address, notes)
        observer = MetricObserver([pusher])
        observer.on_totals(totals_of({(7, LAUNCH): [100]}))
        observer.on_totals(totals_of(DURATIONS))
        pusher.close()
    ((path, headers, body),) = received
    assert path == "/v1/metrics"
    assert (headers["X-Key"], headers["Content-Type"]) == ("k", "application/x-protobuf")
    request = ExportMetricsServiceRequest.FromString(gzip.decompress(body))
    (resource,) = request.resource_metrics
    told = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert told == {"service.name": "ingero", "ingero.node.id": "n1"}
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    duration = metrics["ingero.cuda.operation.duration"]
    assert (duration.unit, duration.histogram.aggregation_temporality) == ("s", 2)
    points = {
        tuple(item.value.string_value for item in point.attributes): point
        for point in duration.histogram.data_points
    }
    launches = points["cuda", "cudaLaunchKernel"]
    assert launches.count == sum(launches.bucket_counts) == 6
    assert list(launches.explicit_bounds) == [2.0**k / 1e9 for k in range(7, 37)]
    assert list(launches.bucket_counts)[:3] == [1, 1, 1]
    assert launches.bucket_counts[-1] == 1
    assert launches.start_time_unix_nano > 0
    assert launches.time_unix_nano == 1_700_000_000_000_000_000
    count = metrics["gpu.cuda.operation.count"].sum
    assert (count.is_monotonic, count.aggregation_temporality) == (True, 2)
    assert {point.as_int for point in count.data_points} == {6, 2}
    assert notes == []


def test_a_process_that_has_the_pid_of_a_rank_is_not_that_rank():
    page = PrometheusPage()
    observer = MetricObserver([page])
    observer.on_process(ProcessIdentity(7, place=ProcessRank(rank=4)))
    observer.on_process(ProcessIdentity(7))
    observer.on_totals(totals_of(DURATIONS))
    lines = [line for line in page.render().splitlines() if line.startswith("ingero_nccl_calls")]
    assert lines
    assert not any("rank=" in line for line in lines)


def test_points_that_count_from_a_moment_of_their_own_are_pushed_with_it():
    """Of two engines one is known to run since 5 s after 1970; since when the other does is not known."""
    a, b = ((("server.port", 1),), (("server.port", 2),))
    starts = {a: 5 * 10**9, b: 0}
    tokens = Series("tokens", Kind.SUM, "1", "", ((a, 7.0), (b, 8.0)), starts=starts)
    times = Series(
        "times", Kind.HISTOGRAM, "s", "", ((a, Distribution((), (1,), 1.0)),), starts=starts
    )
    own = Series("own", Kind.SUM, "1", "", ((a, 1.0),))
    export = build_export([tokens, times, own], {}, 10**18, 10**18 + 1)
    metrics = {one.name: one for one in export.root.resource_metrics[0].scope_metrics[0].metrics}
    found = {one.as_int: one.start_time_unix_nano for one in metrics["tokens"].sum.data_points}
    assert found == {7: 5 * 10**9, 8: 0}
    assert metrics["times"].histogram.data_points[0].start_time_unix_nano == 5 * 10**9
    assert metrics["own"].sum.data_points[0].start_time_unix_nano == 10**18


def test_where_processes_ran_is_forgotten_when_there_are_many_and_nothing_is_counted_of_them():
    taken = []

    class Outlet:
        def take(self, series, wall_ns, resources):
            taken.append(resources)

    observer = MetricObserver([Outlet()])
    for pid in range(1, 4098):
        observer.on_process(ProcessIdentity(pid, pod=Pod("u", f"p{pid}", "ml")))
    observer.on_totals(totals_of({(7, LAUNCH): [100]}))
    assert set(taken[0]) == {7}


def shown_percentiles(series):
    return {
        (dict(labels)["operation"], dict(labels)["percentile"]): value for labels, value in series.points
    }  # fmt: skip


def test_percentiles_are_of_the_last_minute_and_within_a_quarter_octave():
    recent = RecentDurations()
    slow = replace(totals_of({(7, LAUNCH): [1_000_000] * 100}), mono_ns=0)
    fast = replace(totals_of({(7, LAUNCH): [1_000] * 98 + [900_000] * 2}), mono_ns=30 * 10**9)
    first = shown_percentiles(recent.take(slow))
    assert first["cudaLaunchKernel", "p50"] == pytest.approx(1_000, rel=0.25)
    both = shown_percentiles(recent.take(fast))
    assert both["cudaLaunchKernel", "p99"] == pytest.approx(1_000, rel=0.25)
    nothing = replace(totals_of({}), mono_ns=65 * 10**9)
    after = shown_percentiles(recent.take(nothing))
    assert after["cudaLaunchKernel", "p50"] == pytest.approx(1, rel=0.25)
    assert after["cudaLaunchKernel", "p95"] == pytest.approx(1, rel=0.25)
    assert after["cudaLaunchKernel", "p99"] == pytest.approx(900, rel=0.25)
    assert recent.take(replace(nothing, mono_ns=200 * 10**9)).points == ()


def test_points_of_a_process_are_on_a_resource_that_says_where_it_runs():
    with collector([]) as (address, received):
        pusher = start_pusher(address, [])
        observer = MetricObserver([pusher])
        observer.on_process(ProcessIdentity(7, pod=Pod("u", "train-0", "ml")))
        observer.on_totals(totals_of(DURATIONS))
        pusher.close()
    ((_, _, body),) = received
    request = ExportMetricsServiceRequest.FromString(gzip.decompress(body))
    told = {}
    for resource in request.resource_metrics:
        place = {item.key: item.value.string_value for item in resource.resource.attributes}
        assert place["ingero.node.id"] == "n1"
        names = [metric.name for metric in resource.scope_metrics[0].metrics]
        told[place.get("k8s.pod.name")] = (place.get("k8s.namespace.name"), names)
    assert set(told) == {None, "train-0"}
    assert told["train-0"][0] == "ml"
    assert "gpu.kernel.launch.count" in told["train-0"][1]
    assert "gpu.cuda.operation.count" in told[None][1]
    assert "gpu.cuda.operation.count" not in told["train-0"][1]


def test_a_collector_that_refuses_is_told_of_once_and_counted():
    notes = []
    with collector([503]) as (address, received):
        pusher = start_pusher(address, notes)
        pusher.take(tuple(iter_call_series(totals_of(DURATIONS), {})), 1, {})
        pusher.close()
    assert (pusher.n_pushed, pusher.n_failed, len(received)) == (0, 1, 1)
    (series,) = pusher.iter_series()
    assert series.prometheus_name == "ingero_trace_otlp_pushes_total"
    assert dict(series.points) == {(("outcome", "taken"),): 0, (("outcome", "failed"),): 1}
    assert len(notes) == 1
    assert notes[0].startswith("503")


def test_calls_of_ended_processes_stay_counted_and_fold_when_there_are_many():
    ended = RetiredCounts(most_rows=2)
    keys, counts = rows_of(DURATIONS)
    ended.add([8], keys, counts)
    assert ended.keys["pid"].tolist() == [8]
    living = {key: value for key, value in DURATIONS.items() if key[0] != 8}
    totals = totals_of(living, ended_keys=ended.keys, ended_counts=ended.counts)
    series = {one.name: dict(one.points) for one in iter_call_series(totals, {})}
    launch = (("source", "cuda"), ("operation", "cudaLaunchKernel"))
    assert series["gpu.cuda.operation.count"][launch] == 6
    ended.add([7], keys, counts)
    assert ended.keys["pid"].tolist() == [0, 0]
    by_op = dict(zip(ended.keys["source"].tolist(), ended.counts, strict=True))
    assert by_op[Source.CUDA]["seen"] == 6
    assert by_op[Source.CUDA]["min_ns"] == 100
    assert by_op[Source.CUDA]["max_ns"] == 90_000_000_000
    assert by_op[Source.CUDA]["hist"].sum() == 6
    assert by_op[Source.NCCL]["bytes"] == 2018
