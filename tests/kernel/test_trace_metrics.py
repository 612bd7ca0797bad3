"""``ingero trace --prometheus --otlp`` as others see it.

A scrape and a push, with the counts that the program itself kept.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from ingero.recording.store.event_loader import LoadFilter
from ingero.recording.store.reader import load_recording

pytestmark = pytest.mark.kernel

INGERO = (sys.executable, "-m", "ingero")
PLAIN = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}


def test_the_counts_of_a_short_program_reach_a_collector_and_the_machine_is_recorded(
    collector, tmp_path
):
    database = tmp_path / "home" / "trace.db"
    result = subprocess.run(
        [
            *INGERO, "trace", "--json", "--db", str(database), "--node", "n1",
            "--otlp", f"127.0.0.1:{collector.port}", "--otlp-insecure",
            "--prometheus", "127.0.0.1:0", "--",
            *INGERO, "sim", "run", "ranks", "--ranks", "2", "steps=41", "wait_us=1500000", "--json",
        ],
        capture_output=True, text=True, env=PLAIN, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert re.search(r"serving http://127\.0\.0\.1:\d+/metrics", result.stderr)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    counted = {
        line["op"]: line["seen"]
        for line in lines
        if line["type"] == "counts" and line["source"] == "nccl"
    }
    pushed = ExportMetricsServiceRequest.FromString(collector.requests[-1].body)
    (resource,) = pushed.resource_metrics
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    operations = {
        point.attributes[1].value.string_value: point.as_int
        for point in metrics["gpu.cuda.operation.count"].sum.data_points
    }
    assert operations["ncclAllReduce"] == 82
    assert counted["ncclAllReduce"] == 41  # of each rank
    ranks = {
        {item.key: item.value for item in point.attributes}["rank"].int_value: point
        for point in metrics["nccl.collective.duration_ms"].histogram.data_points
        if point.attributes[0].value.string_value == "ncclAllReduce"
    }
    assert {rank: point.count for rank, point in ranks.items()} == {0: 41, 1: 41}
    assert 0 < metrics["system.memory.utilization"].gauge.data_points[0].as_double < 1

    recording = load_recording(database, LoadFilter(has_extras=True))
    assert len(recording.snapshots) >= 1
    assert (recording.snapshots["mem_available_mib"] > 0).all()
    assert database.stat().st_mode & 0o777 == 0o600
    assert database.parent.stat().st_mode & 0o777 == 0o700
    assert Path(f"{database}-wal").exists() is False


def test_a_bad_address_is_named_before_anything_is_traced():
    for arguments, said in (
        (["--prometheus", "nowhere"], "--prometheus 'nowhere' is not host:port"),
        (["--otlp", "ftp://x"], "--otlp"),
        (["--max-db", "1g", "--db-rollover-size", "1g"], "exclude each other"),
    ):
        result = subprocess.run(
            [*INGERO, "trace", "--no-record", *arguments],
            capture_output=True, text=True, env=PLAIN, check=False,
        )  # fmt: skip
        assert result.returncode == 2, (arguments, result.stderr)
        assert said in result.stderr
