"""gRPC's health service, asked by real clients: what it says, whom it tells of a change, and what a hostile client cannot do."""

import json
import queue
import socket
import struct
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from tests.support import local_http
from tests.support.grpc_channels import watch_channel

from ingero.fleet.receivers.otlp import grpc_health
from ingero.otlp.names import GRPC_SERVICES, Signal
from ingero.testing.fleet import run_fleet
from ingero.testing.waiting import wait_until

METRICS = GRPC_SERVICES[Signal.METRICS]
LOGS = GRPC_SERVICES[Signal.LOGS]
STATUS = health_pb2.HealthCheckResponse
SERVING, NOT_SERVING, UNKNOWN = STATUS.SERVING, STATUS.NOT_SERVING, STATUS.SERVICE_UNKNOWN


def ask(service=""):
    return health_pb2.HealthCheckRequest(service=service)


class Watcher:
    """One `Watch`; `next` waits for its next answer."""

    def __init__(self, channel, service=""):
        self.call = health_pb2_grpc.HealthStub(channel).Watch(ask(service))
        self.answers = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        try:
            for answer in self.call:
                self.answers.put(answer.status)
            self.answers.put("end")
        except grpc.RpcError as error:
            self.answers.put(error.code())

    def next(self):
        return self.answers.get(timeout=120)


@pytest.fixture
def dial():
    channels = []

    def open_channel(target, **options):
        channels.append(grpc.insecure_channel(str(target), tuple(options.items())))
        return channels[-1]

    yield open_channel
    for channel in channels:
        channel.close()


def test_each_signal_with_a_pipeline_is_known_and_no_token_is_asked_for(serve, dial, tokens):
    settings = {"auth": {"authenticator": "bearertokenauth"}}
    running = serve(grpc=settings, offers=tokens, signals=(Signal.METRICS,))
    channel = dial(running.grpc)
    check = health_pb2_grpc.HealthStub(channel).Check
    for service in ("", METRICS, "grpc.health.v1.Health"):
        assert check(ask(service), timeout=120).status == SERVING
        assert Watcher(channel, service).next() == SERVING
    for service in (LOGS, "x"):
        with pytest.raises(grpc.RpcError) as caught:
            check(ask(service), timeout=120)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert Watcher(channel, service).next() == UNKNOWN


def test_watches_hold_no_thread_and_a_receiver_that_stops_ends_them(serve, dial):
    running = serve(grpc={})
    channel = dial(running.grpc)
    watchers = [Watcher(channel) for _ in range(24)]
    assert [one.next() for one in watchers] == [SERVING] * 24
    MetricsServiceStub(channel).Export(ExportMetricsServiceRequest(), timeout=120)
    running.start_stopping().result(30)
    assert [(one.next(), one.next()) for one in watchers] == [(NOT_SERVING, "end")] * 24


def test_one_watcher_too_many_is_refused_until_another_ends(serve, dial, monkeypatch):
    monkeypatch.setattr(grpc_health, "MAX_WATCHERS", 2)
    channel = dial(serve(grpc={}).grpc)
    first, second = Watcher(channel), Watcher(channel)
    assert (first.next(), second.next()) == (SERVING, SERVING)
    assert Watcher(channel).next() is grpc.StatusCode.RESOURCE_EXHAUSTED
    first.call.cancel()
    wait_until(lambda: Watcher(channel).next() == SERVING)


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def stall(endpoint, n_watches):
    """A client that never reads: its flow control lets no byte of an answer through (RFC 9113, HPACK without an index)."""

    def text(value):
        return bytes([len(value)]) + value.encode()

    headers = {
        ":method": "POST", ":scheme": "http", ":path": "/grpc.health.v1.Health/Watch", ":authority": "x",
        "content-type": "application/grpc", "te": "trailers",
    }  # fmt: skip
    head = b"".join(b"\x00" + text(name) + text(value) for name, value in headers.items())
    client = socket.create_connection((endpoint.host, endpoint.port))
    no_window = struct.pack(">HI", 4, 0)  # SETTINGS_INITIAL_WINDOW_SIZE
    client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, no_window))
    for number in range(n_watches):
        stream = 2 * number + 1
        client.sendall(frame(1, 4, stream, head) + frame(0, 1, stream, b"\x00" + bytes(4)))
    return client


def test_clients_that_never_read_hold_up_nobody(serve, dial):
    running = serve(grpc={})
    health = running._receiver._health
    with stall(running.grpc, 16):
        wait_until(lambda: health.n_watchers == 16)
        channel = dial(running.grpc)
        watcher = Watcher(channel, METRICS)
        for is_serving in (True, False, True):
            running.call(health.report, METRICS, is_serving=is_serving)
            assert watcher.next() == (SERVING if is_serving else NOT_SERVING)
            health_pb2_grpc.HealthStub(channel).Check(ask(), timeout=120)
            MetricsServiceStub(channel).Export(ExportMetricsServiceRequest(), timeout=120)
    wait_until(lambda: health.n_watchers == 1)


class SlowDestination:
    """Takes a batch only when it is let."""

    def __init__(self):
        self.lets = threading.Semaphore(0)
        destination = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["content-length"]))
                destination.lets.acquire()
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def test_a_fleet_whose_queue_is_full_says_so_until_it_takes_again_and_when_it_ends(dial):
    destination = SlowDestination()
    exporter = {
        "endpoint": f"http://127.0.0.1:{destination.server.server_port}", "timeout": "60s",
        "sending_queue": {"queue_size": 1, "num_consumers": 1},
    }  # fmt: skip
    ports = {name: {"endpoint": "127.0.0.1:0"} for name in ("grpc", "http")}
    config = {
        "receivers": {"otlp": {"protocols": ports}},
        "exporters": {"otlphttp": exporter, "debug": {}},
        "service": {
            "telemetry": {"metrics": {"address": "127.0.0.1:0"}},
            "pipelines": {
                "metrics": {"receivers": ["otlp"], "exporters": ["otlphttp"]},
                "logs": {"receivers": ["otlp"], "exporters": ["debug"]},
            },
        },
    }
    point = {"name": "m", "gauge": {"dataPoints": [{"timeUnixNano": "1", "asDouble": 1}]}}
    body = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [point]}]}]}
    with run_fleet(config) as fleet, ExitStack() as stack:
        target = fleet.addresses["receivers.otlp grpc"]
        channel = dial(target)
        whole, metrics, logs = (Watcher(channel, name) for name in ("", METRICS, LOGS))
        assert [one.next() for one in (whole, metrics, logs)] == [SERVING] * 3
        asked = {"healthCheckConfig": {"serviceName": METRICS}, "loadBalancingConfig": [{"round_robin": {}}]}  # fmt: skip
        balanced = dial(target, **{"grpc.service_config": json.dumps(asked)})
        states = queue.Queue()
        stack.enter_context(watch_channel(balanced, states.put))
        while states.get(timeout=120) is not grpc.ChannelConnectivity.READY:
            pass
        url = f"http://{fleet.addresses['receivers.otlp http']}/v1/metrics"
        wait_until(lambda: local_http.post(url, json=body).status_code == 503)
        assert metrics.next() == NOT_SERVING
        while states.get(timeout=120) is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            pass  # a client that balances load would take another Fleet
        destination.lets.release(1000)
        assert metrics.next() == SERVING
        while states.get(timeout=120) is not grpc.ChannelConnectivity.READY:
            pass
        fleet.process.terminate()
        for one in (whole, metrics, logs):
            assert [one.next(), one.next()] == [NOT_SERVING, "end"]
    destination.server.shutdown()
    destination.server.server_close()
