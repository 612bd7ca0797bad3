"""The real program: starts the shipped and the seed's configuration, reloads, drains, and loses nothing on the way."""

import json
import re
import signal
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families
from tests.e2e.agents import health
from tests.e2e.test_collectives import job
from tests.support import local_http
from tests.support.ports import free_port

from ingero.errors import IngeroError
from ingero.otlp.codec import decode_export, encode_protobuf
from ingero.otlp.names import Signal
from ingero.testing.fleet import run_fleet, wait_for_line
from ingero.testing.waiting import wait_until
from ingero.wire.collectives import build_collectives

ROOT = Path(__file__).parents[2]
SEED = ROOT / "tests" / "data" / "config" / "seed-readme.yaml"
SHIPPED = ROOT / "src" / "ingero" / "fleet" / "fleet-config.yaml"

PLAIN = """
receivers:
  otlp: {protocols: {http: {endpoint: "127.0.0.1:0"}}}
exporters:
  debug: {}
service:
  pipelines:
    metrics: {receivers: [otlp], exporters: [debug]}
  telemetry: {metrics: {address: "127.0.0.1:0"}}
"""
FORWARDING = """
receivers:
  otlp: {protocols: {http: {endpoint: "127.0.0.1:0"}}}
exporters:
  otlphttp:
    endpoint: ${env:UPSTREAM}
    retry_on_failure: {initial_interval: 20ms, max_interval: 50ms}
service:
  shutdown_timeout: 20s
  pipelines:
    metrics: {receivers: [otlp], exporters: [otlphttp]}
  telemetry: {metrics: {address: "127.0.0.1:0"}}
"""


def _listening_on(text, port):
    return text.replace(
        'http: {endpoint: "127.0.0.1:0"}', f'http: {{endpoint: "127.0.0.1:{port}"}}'
    )


def _body(value):
    point = {"timeUnixNano": "1", "asDouble": value}
    metrics = [{"name": "m", "gauge": {"dataPoints": [point]}}]
    return {"resourceMetrics": [{"scopeMetrics": [{"metrics": metrics}]}]}


def _push(fleet, value=1.0):
    where = fleet.addresses["receivers.otlp http"]
    return local_http.post(f"http://{where}/v1/metrics", json=_body(value), timeout=120)


def _scrape(fleet, name):
    where = fleet.addresses["service.telemetry.metrics"]
    text = local_http.get(f"http://{where}/metrics").text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    )


class Upstream:
    """A destination that answers as told and keeps what it took."""

    def __init__(self, port=0, answers=()):
        self.values = []
        self.answers = list(answers)
        self.changed = threading.Condition()
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                upstream.take(self, body)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}"

    def take(self, handler, body):
        import gzip

        with self.changed:
            status = self.answers.pop(0) if self.answers else 200
            if status == 200:
                export = decode_export(
                    gzip.decompress(body), Signal.METRICS, "application/x-protobuf"
                )
                points = export.message.resource_metrics[0].scope_metrics[0].metrics
                self.values += [metric.gauge.data_points[0].as_double for metric in points]
            self.changed.notify_all()
        handler.send_response(status)
        handler.send_header("content-length", "0")
        handler.end_headers()

    def wait_for(self, n_values):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.values) >= n_values, 30), self.values

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize("file", [SEED, SHIPPED], ids=["seed", "shipped"])
def test_seed_and_shipped_configurations_start_take_a_push_and_end_cleanly(file, tmp_path):
    text = re.sub(r"(0\.0\.0\.0|127\.0\.0\.1|localhost):\d+", "127.0.0.1:0", file.read_text())
    config = tmp_path / "fleet.yaml"
    config.write_text(text)
    with run_fleet(config, ["service.telemetry.metrics.address=127.0.0.1:0"]) as fleet:
        assert _push(fleet).status_code == 200
        scraped = local_http.get(f"http://{fleet.addresses['exporters.prometheus']}/metrics").text
        assert re.search(r"^m\b.* 1(\.0)?$", scraped, re.MULTILINE)
        fleet.signal(signal.SIGTERM)
        assert fleet.wait() == 0


@pytest.mark.slow
def test_sighup_with_a_bad_file_keeps_running_and_with_a_good_one_applies_it(tmp_path):
    config = tmp_path / "fleet.yaml"
    config.write_text(PLAIN)
    with run_fleet(config) as fleet:
        config.write_text(PLAIN.replace("debug: {}", "debug: {verbosty: detailed}"))
        fleet.signal(signal.SIGHUP)
        line = wait_for_line(fleet, "not reloaded")
        assert "exporters.debug.verbosty" in line
        assert "did you mean verbosity?" in line
        assert _push(fleet).status_code == 200
        config.write_text(PLAIN.replace("debug: {}", "debug: {verbosity: detailed}"))
        fleet.signal(signal.SIGHUP)
        fleet.wait_until_ready(2)
        assert _push(fleet).status_code == 200
        wait_for_line(fleet, '"resourceMetrics"')
        assert _scrape(fleet, "ingero_fleet_config_reloads_total") == 2


JUDGING = """
receivers:
  otlp: {protocols: {http: {endpoint: "127.0.0.1:0"}}}
processors:
  ingero: {threshold: {k: 2.0}, quorum: {settle_time: 0s}}
  nccl: {rates: {fallback_rate: 1.0}}
exporters:
  debug: {}
extensions:
  ingero_threshold: {agent_endpoint: "127.0.0.1:0", admin_endpoint: "127.0.0.1:0"}
service:
  extensions: [ingero_threshold]
  pipelines:
    metrics: {receivers: [otlp], processors: [ingero, nccl], exporters: [debug]}
    logs: {receivers: [otlp], processors: [ingero, nccl], exporters: [debug]}
  telemetry: {metrics: {address: "127.0.0.1:0"}}
"""


def _ask_admin(fleet, page, **query):
    where = fleet.addresses["extensions.ingero_threshold admin"]
    return local_http.get(f"http://{where}/api/v1/admin/{page}", params=query)


def _report_job(fleet):
    """Send the records of a job with a slow rank, and wait for its verdict."""
    where = fleet.addresses["receivers.otlp http"]
    for run in job(slow=5):
        content = encode_protobuf(build_collectives([run], 1_795_230_273_280_661_023))
        headers = {"content-type": "application/x-protobuf"}
        local_http.post(f"http://{where}/v1/logs", content=content, headers=headers, timeout=120)
    wait_until(lambda: _ask_admin(fleet, "verdicts", cluster_id="job").is_success)


@pytest.mark.slow
def test_a_reload_of_prices_and_thresholds_forgets_neither_scores_nor_evidence(tmp_path):
    config = tmp_path / "fleet.yaml"
    config.write_text(JUDGING)

    with run_fleet(config) as fleet:
        where = fleet.addresses["receivers.otlp http"]
        for index in range(6):
            body = health(f"n{index}", cluster="c")
            local_http.post(f"http://{where}/v1/metrics", json=body, timeout=120)
        _report_job(fleet)
        config.write_text(
            JUDGING.replace("fallback_rate: 1.0", "fallback_rate: 2.0").replace("k: 2.0", "k: 3.0")
        )
        fleet.signal(signal.SIGHUP)
        fleet.wait_until_ready(2)
        assert _ask_admin(fleet, "verdicts", cluster_id="job").is_success
        assert _ask_admin(fleet, "nodes", cluster_id="c").json()["total"] == 6
        settings = _ask_admin(fleet, "config").json()["settings"]["processors"]
        assert settings["nccl"]["rates"]["fallback_rate"] == 2.0
        config.write_text(JUDGING.replace("rates:", "alarm_slowdown: 0.5, rates:"))
        fleet.signal(signal.SIGHUP)
        fleet.wait_until_ready(3)
        assert _ask_admin(fleet, "verdicts", cluster_id="job").status_code == 404, (
            "judged otherwise"
        )


@pytest.mark.slow
def test_reload_that_cannot_start_goes_back_to_the_old_configuration(tmp_path):
    config = tmp_path / "fleet.yaml"
    config.write_text(PLAIN)
    with run_fleet(config) as fleet, socket.create_server(("127.0.0.1", 0)) as taken:
        config.write_text(_listening_on(PLAIN, taken.getsockname()[1]))
        fleet.signal(signal.SIGHUP)
        line = wait_for_line(fleet, "going back")
        assert "receivers.otlp: cannot listen on" in line
        fleet.wait_until_ready(2)
        assert _push(fleet).status_code == 200


@pytest.mark.slow
def test_a_reload_that_goes_back_forgets_no_evidence_of_what_it_changed(tmp_path):
    config = tmp_path / "fleet.yaml"
    config.write_text(JUDGING)
    with run_fleet(config) as fleet, socket.create_server(("127.0.0.1", 0)) as taken:
        _report_job(fleet)
        changed = JUDGING.replace("rates:", "alarm_slowdown: 0.5, rates:")
        config.write_text(_listening_on(changed, taken.getsockname()[1]))
        fleet.signal(signal.SIGHUP)
        fleet.wait_until_ready(2)
        # Its log comes by another pipe than the word that it is ready.
        wait_until(lambda: "going back" in fleet.log)
        assert _ask_admin(fleet, "verdicts", cluster_id="job").is_success


@pytest.fixture
def certificate(tmp_path):
    issued = trustme.CA().issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "tls.key")
    file = tmp_path / "tls.crt"
    issued.cert_chain_pems[0].write_to_path(file)
    return file


def _serving_tls(text, file):
    tls = f"tls: {{cert_file: {file}, key_file: {file.with_suffix('.key')}}}"
    return text.replace('endpoint: "127.0.0.1:0"}', f'endpoint: "127.0.0.1:0", {tls}}}')


def _push_by_tls(fleet):
    url = f"https://{fleet.addresses['receivers.otlp http']}/v1/metrics"
    return local_http.post(url, json=_body(1.0), timeout=120, verify=False)


@pytest.mark.slow
def test_a_reload_while_a_certificate_is_half_replaced_changes_nothing(tmp_path, certificate):
    config = tmp_path / "fleet.yaml"
    config.write_text(_serving_tls(PLAIN, certificate))
    with run_fleet(config) as fleet:
        other = trustme.CA().issue_cert("127.0.0.1")
        other.cert_chain_pems[0].write_to_path(certificate)
        config.write_text(
            _serving_tls(PLAIN, certificate).replace("debug: {}", "debug: {verbosity: detailed}")
        )
        fleet.signal(signal.SIGHUP)
        line = wait_for_line(fleet, "not reloaded")
        assert f"{certificate}" in line
        assert _push_by_tls(fleet).status_code == 200
        assert _scrape(fleet, "ingero_fleet_config_reloads_total") == 1
        other.private_key_pem.write_to_path(certificate.with_suffix(".key"))
        fleet.signal(signal.SIGHUP)
        fleet.wait_until_ready(2)
        assert _push_by_tls(fleet).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("is_mended", [True, False], ids=["mended", "stopped"])
def test_an_old_configuration_that_no_longer_starts_is_tried_again(
    tmp_path, certificate, is_mended
):
    config = tmp_path / "fleet.yaml"
    config.write_text(_serving_tls(PLAIN, certificate))
    with run_fleet(config) as fleet, socket.create_server(("127.0.0.1", 0)) as taken:
        whole = certificate.read_bytes()
        certificate.write_bytes(whole[:100])
        config.write_text(_listening_on(PLAIN, taken.getsockname()[1]))
        fleet.signal(signal.SIGHUP)
        line = wait_for_line(fleet, "trying again")
        assert f"{certificate}" in line
        if is_mended:
            certificate.write_bytes(whole)
            fleet.wait_until_ready(2)
            assert _push_by_tls(fleet).status_code == 200
        fleet.signal(signal.SIGTERM)
        assert fleet.wait() == 0


@pytest.mark.slow
def test_a_reload_replaces_an_old_configuration_that_no_longer_starts(tmp_path, certificate):
    config = tmp_path / "fleet.yaml"
    config.write_text(_serving_tls(PLAIN, certificate))
    with run_fleet(config) as fleet, socket.create_server(("127.0.0.1", 0)) as taken:
        certificate.write_bytes(b"")
        config.write_text(_listening_on(PLAIN, taken.getsockname()[1]))
        fleet.signal(signal.SIGHUP)
        wait_for_line(fleet, "trying again")
        config.write_text(PLAIN)
        fleet.signal(signal.SIGHUP)
        fleet.wait_until_ready(2)
        assert _push(fleet).status_code == 200


@pytest.mark.slow
def test_port_in_use_at_start_names_the_component_and_ends_with_1(tmp_path):
    config = tmp_path / "fleet.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config.write_text(_listening_on(PLAIN, port))
        with pytest.raises(IngeroError) as ended, run_fleet(config):
            pass
        message = ended.value.message
        assert "ingero-fleet did not start (exit status 1)" in message
        assert f"receivers.otlp: cannot listen on 127.0.0.1:{port}" in message
        assert "hint:" in message


@pytest.mark.slow
def test_nothing_is_lost_while_the_destination_is_away(tmp_path):
    config = tmp_path / "fleet.yaml"
    config.write_text(FORWARDING)
    port = free_port()
    with run_fleet(config, environ={"UPSTREAM": f"http://127.0.0.1:{port}"}) as fleet:
        for value in range(20):
            assert _push(fleet, float(value)).status_code == 200
        upstream = Upstream(port, answers=[503, 429])
        try:
            upstream.wait_for(20)
            fleet.signal(signal.SIGTERM)
            assert fleet.wait() == 0
        finally:
            upstream.close()
    assert sorted(upstream.values) == [float(value) for value in range(20)]


@pytest.mark.slow
def test_waiting_batches_survive_a_reload(tmp_path):
    config = tmp_path / "fleet.yaml"
    config.write_text(FORWARDING)
    port = free_port()
    with run_fleet(config, environ={"UPSTREAM": f"http://127.0.0.1:{port}"}) as fleet:
        for value in range(5):
            assert _push(fleet, float(value)).status_code == 200
        config.write_text(FORWARDING + "  # changed\n")
        fleet.signal(signal.SIGHUP)
        fleet.wait_until_ready(2)
        upstream = Upstream(port)
        try:
            upstream.wait_for(5)
        finally:
            upstream.close()
    assert sorted(upstream.values) == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.slow
def test_permanent_refusal_is_counted_and_not_sent_again(tmp_path):
    upstream = Upstream(answers=[400])
    config = tmp_path / "fleet.yaml"
    config.write_text(FORWARDING)
    try:
        with run_fleet(config, environ={"UPSTREAM": upstream.url}) as fleet:
            assert _push(fleet, 1.0).status_code == 200
            wait_for_line(fleet, "items lost: the destination did not take them")
            assert _push(fleet, 2.0).status_code == 200
            upstream.wait_for(1)
            assert upstream.values == [2.0]
            assert _scrape(fleet, "otelcol_exporter_send_failed_metric_points_total") == 1
    finally:
        upstream.close()


@pytest.mark.slow
def test_sigterm_lets_a_push_in_flight_finish(tmp_path):
    config = tmp_path / "fleet.yaml"
    config.write_text(PLAIN)
    body = json.dumps(_body(1.0)).encode()
    with run_fleet(config) as fleet:
        host, _, port = fleet.addresses["receivers.otlp http"].rpartition(":")
        with socket.create_connection((host, int(port))) as pusher:
            head = f"POST /v1/metrics HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nexpect: 100-continue\r\ncontent-length: {len(body)}\r\n\r\n"
            pusher.sendall(head.encode())
            assert pusher.recv(4096).startswith(b"HTTP/1.1 100")
            fleet.signal(signal.SIGTERM)
            wait_for_line(fleet, "draining")
            pusher.sendall(body)
            assert pusher.recv(4096).startswith(b"HTTP/1.1 200")
        assert fleet.wait() == 0


@pytest.mark.slow
def test_second_signal_ends_at_once(tmp_path):
    config = tmp_path / "fleet.yaml"
    config.write_text(FORWARDING)
    with run_fleet(config, environ={"UPSTREAM": "http://127.0.0.1:9"}) as fleet:
        host, _, port = fleet.addresses["receivers.otlp http"].rpartition(":")
        with socket.create_connection((host, int(port))) as pusher:
            pusher.sendall(
                b"POST /v1/metrics HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n"
            )
            assert pusher.recv(4096).startswith(b"HTTP/1.1 100")
            fleet.signal(signal.SIGTERM)
            wait_for_line(fleet, "draining")
            fleet.signal(signal.SIGTERM)
            assert fleet.wait() == 128 + signal.SIGTERM


@pytest.mark.slow
def test_interrupt_drains_and_ends_with_130(tmp_path):
    config = tmp_path / "fleet.yaml"
    config.write_text(PLAIN)
    with run_fleet(config) as fleet:
        fleet.signal(signal.SIGINT)
        assert fleet.wait() == 130
