"""What a Collector's gRPC exporter may be told to compress with, sent by grpc-go with the Collector's codecs."""

import json
import subprocess
from pathlib import Path

import pytest
from tests.e2e.agents import health

from ingero.otlp.codec import decode_export, encode_protobuf
from ingero.otlp.names import Signal
from ingero.testing.fleet import build_fleet_config, run_fleet

EXPORTER = Path(__file__).parents[2] / ".cache/grpc-go/grpc-go"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not EXPORTER.exists(), reason="no exporter: scripts/install_grpc_go"),
]


def test_each_compression_of_a_collector_is_taken(tmp_path):
    document = json.dumps(health("n1", 0.9, cluster="go")).encode()
    body = encode_protobuf(decode_export(document, Signal.METRICS, "application/json"))
    (tmp_path / "body").write_bytes(body)
    with run_fleet(build_fleet_config({"quorum": {"statistical_min": 3}}, {})) as fleet:
        address = fleet.addresses["receivers.otlp grpc"]
        command = [EXPORTER, address, tmp_path / "body", "none", "gzip", "zstd", "snappy"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr == ""
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        [name, "50"] for name in ("none", "gzip", "zstd", "snappy")
    ]
