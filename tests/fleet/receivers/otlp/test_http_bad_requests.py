"""Requests that are wrong, too large, too slow or too many: each has its status and is counted."""

import gzip
import shutil
import socket
import subprocess
import zlib

import cramjam
import pytest
import zstandard
from tests.fleet.receivers.otlp.requests import JSON, PROTOBUF, error_of, post, push
from tests.support import local_http

from ingero.otlp.codec import (
    encode_json,
    encode_protobuf,
)
from ingero.otlp.names import Signal


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"resourceMetrics":3}',
        b'{"resourceMetrics":[{"scopeMetrics":[{"metrics":[{"gauge":{"dataPoints":[{"asInt":"x"}]}}]}]}]}',
        b'{"resourceMetrics":[{"scopeMetrics":[{"metrics":[{"gauge":{"dataPoints":[{"asDouble":NaN}]}}]}]}]}',
        b'{"resourceMetrics":[{"resource":{"attributes":[{"key":"\xff"}]}}]}',
        b'{"resourceMetrics":' + b"[" * 200_000,
        b'{"a":' * 100_000,
    ],
)
def test_a_bad_json_body_is_a_400_with_a_json_status(serve, body):
    running = serve()
    answer = post(running, body)
    code, message = error_of(answer)
    assert (answer.status_code, code) == (400, 3)
    assert "JSON" in message
    assert running.refused("bad_body") == 1
    assert running.cluster.batches == []


@pytest.mark.parametrize("body", [b"\xff", b"\x0a\x05\x01", b"{}", b"\x0a\xff\xff\xff\xff\x0f"])
def test_a_bad_protobuf_body_is_a_400_with_a_protobuf_status(serve, body):
    running = serve()
    answer = post(running, body, headers=PROTOBUF)
    code, message = error_of(answer)
    assert (answer.status_code, code) == (400, 3)
    assert "protobuf" in message
    assert running.refused("bad_body") == 1


@pytest.mark.parametrize("kind", ["text/plain", "", "application/json2", "application/grpc"])
def test_another_content_type_is_a_415(serve, kind):
    running = serve()
    answer = post(running, encode_json(push()), headers={"content-type": kind})
    assert answer.status_code == 415
    assert "application/x-protobuf" in error_of(answer)[1]
    assert running.refused("content_type") == 1


def test_content_type_parameters_and_case_do_not_matter(serve):
    running = serve()
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        answer = post(running, encode_json(push()), headers={"content-type": kind})
        assert answer.status_code == 200
    kind = "application/x-protobuf; messageType=x"
    answer = post(running, b"\xff", headers={"content-type": kind})
    assert answer.headers["content-type"] == "application/x-protobuf"


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS"])
def test_another_method_is_a_405(serve, method):
    running = serve()
    answer = local_http.request(method, running.url())
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert running.refused("method") == 1


def test_a_signal_without_a_pipeline_is_a_404_that_says_so(serve):
    running = serve(signals=(Signal.METRICS,))
    answer = post(running, b"{}", "/v1/logs")
    assert answer.status_code == 404
    assert "no pipeline takes logs" in error_of(answer)[1]


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [
        ("gzip", gzip.compress),
        ("zstd", zstandard.compress),
        ("zlib", zlib.compress),
        ("deflate", zlib.compress),
        ("identity", bytes),
        ("snappy", lambda body: bytes(cramjam.snappy.compress_raw(body))),
        ("snappy", lambda body: bytes(cramjam.snappy.compress(body))),
        ("x-snappy-framed", lambda body: bytes(cramjam.snappy.compress(body))),
        ("lz4", lambda body: bytes(cramjam.lz4.compress(body))),
        ("gzip", lambda body: gzip.compress(body[:50]) + gzip.compress(body[50:])),
        ("zstd", lambda body: zstandard.compress(body[:50]) + zstandard.compress(body[50:])),
    ],
)
def test_compressed_bodies_are_taken(serve, encoding, compress):
    running = serve()
    body = encode_protobuf(push())
    answer = post(running, compress(body), headers={**PROTOBUF, "content-encoding": encoding})
    assert answer.status_code == 200
    assert encode_protobuf(running.cluster.batches[0].export) == body


COMPRESS = {
    "gzip": gzip.compress,
    "zstd": zstandard.compress,
    "deflate": zlib.compress,
    "snappy": lambda body: bytes(cramjam.snappy.compress_raw(body)),
    "x-snappy-framed": lambda body: bytes(cramjam.snappy.compress(body)),
    "lz4": lambda body: bytes(cramjam.lz4.compress(body)),
}


@pytest.mark.parametrize(("encoding", "compress"), COMPRESS.items())
def test_a_bomb_is_a_413_and_is_counted(serve, encoding, compress):
    running = serve({"max_request_body_size": "1MiB"})
    bomb = compress(
        bytes((16 if "snappy" in encoding else 200) << 20)
    )  # snappy gains 21 times at most
    assert len(bomb) < 1 << 20
    answer = post(running, bomb, headers={**JSON, "content-encoding": encoding}, timeout=120)
    assert answer.status_code == 413
    assert "after decompression" in error_of(answer)[1]
    assert running.refused("too_large") == 1


@pytest.mark.parametrize(("encoding", "compress"), COMPRESS.items())
def test_broken_compression_is_a_400(serve, encoding, compress):
    running = serve()
    compressed = compress(encode_json(push()))
    headers = {**JSON, "content-encoding": encoding}
    for body in (b"no such data", compressed[:-9]):
        assert post(running, body, headers=headers).status_code == 400
    assert running.refused("bad_body") == 2


@pytest.mark.parametrize(("encoding", "compress"), COMPRESS.items())
def test_a_body_that_is_cut_short_is_never_taken_for_a_whole_one(serve, encoding, compress):
    running = serve()
    compressed = compress(encode_protobuf(push()))
    headers = {**PROTOBUF, "content-encoding": encoding}
    for n_bytes in {1, len(compressed) // 2, len(compressed) - 1}:
        assert post(running, compressed[:n_bytes], headers=headers).status_code == 400
    assert running.refused("bad_body") == 3
    assert running.cluster.batches == []


@pytest.mark.parametrize(
    ("encoding", "command"),
    [
        ("zstd", ("zstd", "-c")),
        ("lz4", ("lz4", "-c")),
        ("lz4", ("lz4", "-c", "-BD", "-BX")),
        ("gzip", ("gzip", "-c")),
    ],
)
def test_bodies_of_the_reference_programs_are_taken(serve, encoding, command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs the program {command[0]}")
    running = serve()
    body = encode_protobuf(push())
    compressed = subprocess.run(command, input=body, capture_output=True, check=True).stdout
    answer = post(running, compressed, headers={**PROTOBUF, "content-encoding": encoding})
    assert answer.status_code == 200
    assert encode_protobuf(running.cluster.batches[0].export) == body


def test_an_encoding_that_is_not_accepted_is_a_415(serve):
    running = serve({"compression_algorithms": ["", "gzip"]})
    for encoding in ("zstd", "br", "gzip, gzip"):
        answer = post(running, b"", headers={**JSON, "content-encoding": encoding})
        assert answer.status_code == 415
        assert "gzip, identity" in error_of(answer)[1]


def test_a_zstd_window_beyond_8_mib_is_refused(serve):
    running = serve()
    parameters = zstandard.ZstdCompressionParameters(window_log=25)
    writer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    body = writer.compress(bytes(1000)) + writer.flush()
    answer = post(running, body, headers={**JSON, "content-encoding": "zstd"})
    assert answer.status_code == 400


def test_an_oversized_body_is_a_413_whether_its_length_is_declared_or_not(serve):
    running = serve({"max_request_body_size": 10_000})
    body = b" " * 3_000_000
    assert post(running, body).status_code == 413

    def chunks():
        for start in range(0, len(body), 100_000):
            yield body[start : start + 100_000]

    assert post(running, chunks()).status_code == 413
    assert running.refused("too_large") == 2
    assert post(running, encode_json(push())).status_code == 200


def test_a_body_of_exactly_the_limit_is_taken(serve):
    body = encode_json(push())
    assert post(serve({"max_request_body_size": len(body)}), body).status_code == 200
    assert post(serve({"max_request_body_size": len(body) - 1}), body).status_code == 413


def unfinished(running, n_declared=100, begun=b"{"):
    """A connection whose body begins and does not come."""
    link = socket.create_connection((running.http.host, running.http.port), timeout=120)
    head = f"POST /v1/metrics HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {n_declared}\r\n\r\n"
    link.sendall(head.encode() + begun)
    return link


def test_a_body_that_does_not_come_is_a_408(serve):
    running = serve({"read_timeout": "50ms"})
    with unfinished(running) as link:
        assert b" 408 " in link.recv(4096)
    assert running.refused("timeout") == 1


def test_too_many_at_once_are_told_to_come_again_and_others_are_unharmed(serve):
    running = serve({"max_in_flight": 2})
    with unfinished(running), unfinished(running):
        answer = post(running, encode_json(push()))
        while answer.status_code == 200:  # the unfinished ones may not have been seen yet
            answer = post(running, encode_json(push()))
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
        assert error_of(answer)[0] == 8
        assert running.refused("overloaded") == 1
    answer = post(running, encode_json(push()))
    while answer.status_code == 429:
        answer = post(running, encode_json(push()))
    assert answer.status_code == 200


def test_unfinished_bodies_are_bounded_together(serve):
    running = serve({"max_buffered_size": 1000})
    with unfinished(running, 5000, b" " * 2000) as link:
        answer = link.recv(4096).lower()
    assert b" 429 " in answer
    assert b"retry-after: 2\r\n" in answer
    assert post(running, encode_json(push())).status_code == 200


def test_a_sender_that_leaves_mid_body_is_counted(serve):
    running = serve()
    unfinished(running).close()
    while not running.refused("cut_short"):
        post(running, encode_json(push()))
    assert running.refused("cut_short") == 1
