"""A real collector whose destination hangs while it reloads and ends: nothing acknowledged is lost without a word."""

import json
import signal
import socket
import threading

import pytest
from tests.fleet.test_process import FORWARDING, Upstream, _body, _push, _scrape

from ingero.testing.fleet import run_fleet, wait_for_line
from ingero.testing.waiting import wait_until

SENT = "otelcol_exporter_sent_metric_points_total"
LOST = "otelcol_exporter_send_failed_metric_points_total"
QUICK = FORWARDING.replace("shutdown_timeout: 20s", "shutdown_timeout: 1s")


class Hanging(Upstream):
    """Has each request and answers none before it may."""

    def __init__(self):
        super().__init__()
        self.n_requests = 0
        self.may_answer = threading.Event()

    def take(self, handler, body):
        with self.changed:
            self.n_requests += 1
            self.changed.notify_all()
        self.may_answer.wait(60)
        super().take(handler, body)

    def wait_for_requests(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: self.n_requests == count, 30), self.n_requests


@pytest.fixture
def hanging():
    upstream = Hanging()
    try:
        yield upstream
    finally:
        upstream.may_answer.set()
        upstream.close()


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_text(QUICK)
    return path


def push_all(fleet, count):
    for value in range(count):
        assert _push(fleet, float(value)).status_code == 200


@pytest.mark.slow
def test_what_a_destination_takes_during_a_reload_is_sent_once(config, hanging):
    with run_fleet(config, environ={"UPSTREAM": hanging.url}) as fleet:
        push_all(fleet, 3)
        hanging.wait_for_requests(3)
        fleet.signal(signal.SIGHUP)
        fleet.wait_until_ready(2)
        hanging.may_answer.set()
        wait_until(lambda: _scrape(fleet, SENT) == 3)
        push_all(fleet, 1)
        wait_until(lambda: _scrape(fleet, SENT) == 4)
        assert (hanging.n_requests, sorted(hanging.values)) == (4, [0.0, 0.0, 1.0, 2.0])
        assert _scrape(fleet, LOST) == 0


@pytest.mark.slow
def test_what_a_destination_refuses_during_a_reload_is_sent_again_without_a_push(config, hanging):
    hanging.answers = [503, 503, 503]
    with run_fleet(config, environ={"UPSTREAM": hanging.url}) as fleet:
        push_all(fleet, 3)
        hanging.wait_for_requests(3)
        fleet.signal(signal.SIGHUP)
        fleet.wait_until_ready(2)
        hanging.may_answer.set()
        hanging.wait_for(3)
        wait_until(lambda: _scrape(fleet, SENT) == 3)
    assert sorted(hanging.values) == [0.0, 1.0, 2.0]


@pytest.mark.slow
def test_what_an_exporter_had_under_way_when_its_settings_changed_is_counted_and_said(
    config, hanging
):
    hanging.answers = [503, 503]
    with run_fleet(config, environ={"UPSTREAM": hanging.url}) as fleet:
        push_all(fleet, 2)
        hanging.wait_for_requests(2)
        config.write_text(QUICK.replace("initial_interval: 20ms", "initial_interval: 21ms"))
        fleet.signal(signal.SIGHUP)
        fleet.wait_until_ready(2)
        hanging.may_answer.set()
        line = wait_for_line(fleet, "items lost")
        assert "the exporter was changed or removed before the destination took them" in line
        wait_until(lambda: _scrape(fleet, LOST) == 2)
    assert (hanging.n_requests, hanging.values) == (2, [])


@pytest.mark.slow
@pytest.mark.parametrize("is_changed", [False, True])
def test_the_end_says_what_is_still_under_way_also_from_before_a_reload(
    config, hanging, is_changed
):
    with run_fleet(config, environ={"UPSTREAM": hanging.url}) as fleet:
        push_all(fleet, 3)
        hanging.wait_for_requests(3)
        if is_changed:
            config.write_text(QUICK.replace("initial_interval: 20ms", "initial_interval: 21ms"))
            fleet.signal(signal.SIGHUP)
            fleet.wait_until_ready(2)
        fleet.signal(signal.SIGTERM)
        line = wait_for_line(fleet, "did not take them before shutdown_timeout")
        assert "items=3" in line
        assert fleet.wait() == 0


def begin_push(fleet, n_bytes):
    """A push whose body is not sent yet: the receiver that has it cannot stop."""
    host, _, port = fleet.addresses["receivers.otlp http"].rpartition(":")
    pusher = socket.create_connection((host, int(port)))
    head = f"POST /v1/metrics HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nexpect: 100-continue\r\ncontent-length: {n_bytes}\r\n\r\n"
    pusher.sendall(head.encode())
    assert pusher.recv(4096).startswith(b"HTTP/1.1 100")
    return pusher


def is_listening(fleet):
    host, _, port = fleet.addresses["receivers.otlp http"].rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.mark.slow
def test_a_fleet_that_is_to_end_while_it_reloads_loses_nothing(config, hanging):
    config.write_text(QUICK.replace("shutdown_timeout: 1s", "shutdown_timeout: 4s"))
    body = json.dumps(_body(3.0)).encode()
    with run_fleet(config, environ={"UPSTREAM": hanging.url}) as fleet:
        push_all(fleet, 3)
        hanging.wait_for_requests(3)
        with begin_push(fleet, len(body)) as pusher:
            fleet.signal(signal.SIGHUP)
            wait_until(lambda: not is_listening(fleet))
            fleet.signal(signal.SIGTERM)
            wait_for_line(fleet, "draining")
            pusher.sendall(body)
            assert pusher.recv(4096).startswith(b"HTTP/1.1 200")
        fleet.wait_until_ready(2)
        hanging.may_answer.set()
        assert fleet.wait() == 0
        assert "items lost" not in fleet.log
    assert sorted(hanging.values) == [0.0, 1.0, 2.0, 3.0]
