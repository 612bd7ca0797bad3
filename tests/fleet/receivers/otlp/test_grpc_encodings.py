"""Every encoding that a Collector's exporter may be told to send over gRPC, and what is answered to a bad one."""

import asyncio
import gzip
import zlib
from base64 import b64decode

import cramjam
import pytest
import zstandard
from google.rpc import status_pb2
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from tests.fleet.receivers.otlp.test_grpc import push
from tests.serving.otlp.http2 import Client

BODY = push().SerializeToString()
COMPRESS = {
    "gzip": gzip.compress,
    "zstd": zstandard.compress,
    "deflate": zlib.compress,
    "snappy": lambda body: bytes(cramjam.snappy.compress(body)),  # framed, as Go's codec makes it
}


def export(running, encoding, body, flag=1):
    """The trailers of one call."""

    async def run():
        client = await Client.connect(running.grpc)
        try:
            client.call(1, body, flag=flag, grpc_encoding=encoding)
            return await client.trailers(1)
        finally:
            await client.leave()

    return asyncio.run(run())


@pytest.mark.parametrize("encoding", COMPRESS)
def test_every_encoding_is_taken_a_damaged_message_refused_and_a_bomb_stopped(serve, encoding):
    running = serve(grpc={"max_recv_msg_size_mib": 1})
    compress = COMPRESS[encoding]
    assert export(running, encoding, compress(BODY))["grpc-status"] == "0"
    assert export(running, encoding, BODY, flag=0)["grpc-status"] == "0"
    assert export(running, encoding, compress(b""))["grpc-status"] == "0"
    assert len(running.cluster.batches) == 2
    damaged = export(running, encoding, compress(BODY)[:-9])
    assert damaged["grpc-status"] == "3"
    assert "compress" in damaged["grpc-message"]
    assert running.refused("bad_body", "grpc") == 1
    bomb = ExportMetricsServiceRequest()
    bomb.resource_metrics.add().schema_url = "x" * (5 << 18)
    large = export(running, encoding, compress(bomb.SerializeToString()))
    assert large["grpc-status"] == "8"
    assert "grpc-status-details-bin" not in large  # or OTLP would have it sent again
    assert running.refused("too_large", "grpc") == 1


def test_a_block_of_snappy_is_taken_as_over_http(serve):
    running = serve(grpc={})
    block = bytes(cramjam.snappy.compress_raw(BODY))
    assert export(running, "snappy", block)["grpc-status"] == "0"
    assert len(running.cluster.batches) == 1


def test_an_encoding_that_is_not_known_is_counted_and_not_retried(serve):
    running = serve(grpc={})
    trailers = export(running, "lz4", BODY)
    assert trailers["grpc-status"] == "12"
    assert "zstd" in trailers["grpc-accept-encoding"]
    assert running.refused("content_encoding", "grpc") == 1
    assert not running.cluster.batches


def test_retry_info_is_readable(serve):
    running = serve(grpc={})
    running.host.draining = True
    trailers = export(running, "identity", BODY, flag=0)
    details = dict(trailers)["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(b64decode(details + "=="))
    assert (trailers["grpc-status"], status.code) == ("14", 14)
