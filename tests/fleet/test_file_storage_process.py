"""A real collector whose queue is on disk: what it acknowledged arrives, whatever ends it."""

import os
import signal
import subprocess

import pytest
from tests.fleet.test_process import Upstream, _push, _scrape
from tests.support import local_http
from tests.support.ports import free_port

from ingero.testing.fleet import run_fleet, wait_for_line

STORING = """
receivers:
  otlp: {protocols: {http: {endpoint: "127.0.0.1:0"}}}
extensions:
  file_storage: {directory: "${env:STORAGE}", timeout: 5s}
  healthee: {endpoint: "127.0.0.1:0"}
exporters:
  otlphttp:
    endpoint: ${env:UPSTREAM}
    sending_queue: {storage: file_storage, num_consumers: 1}
    retry_on_failure: {initial_interval: 20ms, max_interval: 50ms, max_elapsed_time: 0s}
service:
  extensions: [healthee, file_storage]
  shutdown_timeout: 20s
  pipelines:
    metrics: {receivers: [otlp], exporters: [otlphttp]}
  telemetry: {metrics: {address: "127.0.0.1:0"}}
"""


@pytest.fixture
def start(tmp_path):
    config = tmp_path / "fleet.yaml"
    config.write_text(STORING)

    def open_fleet(port, storage=tmp_path / "storage"):
        url = f"http://127.0.0.1:{port}"
        return run_fleet(config, environ={"UPSTREAM": url, "STORAGE": str(storage)})

    return open_fleet


def _push_all(fleet, values):
    """Push each; those that were acknowledged."""
    return [float(value) for value in values if _push(fleet, float(value)).status_code == 200]


@pytest.mark.slow
def test_what_was_acknowledged_before_kill_9_is_delivered_by_the_next_process_in_order(start):
    port = free_port()
    with start(port) as fleet:
        assert local_http.get(
            f"http://{fleet.addresses['extensions.healthee']}/healthz/ee"
        ).is_success
        taken = _push_all(fleet, range(30))
        fleet.signal(signal.SIGKILL)
        assert fleet.wait() != 0
    assert len(taken) == 30
    upstream = Upstream(port, answers=[503])
    try:
        with start(port) as fleet:
            taken += _push_all(fleet, range(30, 60))
            upstream.wait_for(31)
            fleet.signal(signal.SIGKILL)  # while it delivers
            fleet.wait()
        with start(port) as fleet:
            fleet.signal(signal.SIGTERM)  # the destination works, so that what waits is sent first
            assert fleet.wait() == 0
    finally:
        upstream.close()
    assert len(taken) == 60
    assert list(dict.fromkeys(upstream.values)) == taken


@pytest.fixture
def small_disk(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine mounts no tmpfs")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def _fill(file):
    """Take all room of a disk."""
    with file.open("wb", 0) as opened:
        while True:
            opened.write(b"x" * 4096)


@pytest.mark.slow
def test_full_disk_refuses_for_now_and_a_damaged_batch_costs_only_itself(start, small_disk):
    port, filler = free_port(), small_disk / "filler"
    with start(port, small_disk / "storage") as fleet:
        assert _push_all(fleet, [1, 2]) == [1.0, 2.0]
        with pytest.raises(OSError, match="No space left"):
            _fill(filler)
        assert _push(fleet, 3.0).status_code == 503
        assert _scrape(fleet, "ingero_fleet_storage_write_failures_total") == 1
        assert "No space left" in wait_for_line(fleet, "cannot write")
        filler.unlink()
        assert _push_all(fleet, [4]) == [4.0]
        fleet.signal(signal.SIGKILL)
        fleet.wait()
    (queue,) = (small_disk / "storage").iterdir()
    second = sorted(one for one in queue.iterdir() if one.name.isdigit())[1]
    second.write_bytes(second.read_bytes()[:-3])
    upstream = Upstream(port)
    try:
        with start(port, small_disk / "storage") as fleet:
            upstream.wait_for(2)
            assert str(second) in wait_for_line(fleet, "stored batch is damaged")
            assert _scrape(fleet, "ingero_fleet_storage_damaged_batches_total") == 1
    finally:
        upstream.close()
    assert upstream.values == [1.0, 4.0]
    assert second.with_suffix(".damaged").exists()
