"""The agent and the sink as their users run them: processes, sockets, signals."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import local_http
from tests.support.collector import open_collector

from ingero.wire.push import ResourceCache, read_push
from ingero.wire.uds import StragglerResolved, StragglerState, decode_message

BIN = Path(sys.executable).parent
SCRIPT = """
steps:
  - {for: 4s}
  - {for: 8s, throughput: 30}
  - {for: 1h}
"""
WAIT_S = 60


@pytest.fixture
def collector():
    with open_collector() as one:
        one.set_threshold("0.9")
        yield one


@pytest.fixture
def start():
    running = []

    def start_one(program, *args):
        process = subprocess.Popen(
            [BIN / program, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start_one
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def agent_args(collector, tmp_path, *more):
    return (
        "fleet-push",
        f"--fleet-endpoint={collector.url}",
        "--fleet-cluster-id=prod a",
        "--fleet-node-id=n1",
        "--fleet-push-interval=1s",
        "--fleet-timeout=1s",
        "--warmup-samples=2",
        f"--fleet-persist-path={tmp_path / 'baseline.json'}",
        "--json",
        *more,
    )


def until(process, wanted):
    """Read an agent's lines until one is wanted."""
    for line in process.stdout:
        record = json.loads(line)
        if wanted(record):
            return record
    raise AssertionError(f"it ended before: {process.stderr.read()}")


def read_messages(path):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(str(path))
        with connection.makefile("rb") as lines:
            for line in lines:
                yield decode_message(line)


def until_page(page, wanted):
    """Ask for a page until it says what is wanted; the number of tries only ends a broken test."""
    for _ in range(20_000):
        text = local_http.get(page).text
        if wanted in text:
            return text
    raise AssertionError(f"never: {wanted}\n{text}")


@pytest.mark.slow
def test_an_episode_reaches_fleet_every_local_reader_and_prometheus(collector, tmp_path, start):
    path = tmp_path / "events.sock"
    script = tmp_path / "day.yaml"
    script.write_text(SCRIPT)
    sink = start("straggler-sink", f"--socket-path={path}", "--listen=127.0.0.1:0",
                 "--reconnect-delay=50ms")  # fmt: skip
    port = re.search(r":(\d+)/metrics", sink.stderr.readline())[1]
    page = f"http://127.0.0.1:{port}/metrics"
    args = agent_args(collector, tmp_path, f"--script={script}", "--remediate",
                      f"--remediate-socket={path}", "--remediate-gid=-1")  # fmt: skip
    agent = start("ingero", *args)
    flagged = until(agent, lambda record: record["straggler"])
    assert flagged["mode"] == "fleet"
    assert flagged["dominant_signal"] == "throughput"

    late = [read_messages(path) for _ in range(2)]
    for reader in late:
        first = next(reader)
        assert isinstance(first, StragglerState)
        assert first.event_id == flagged["event_id"]
    active = 'ingero_sink_active_stragglers{cluster_id="prod a",node_id="n1"} 1'
    until_page(page, active)
    until(agent, lambda record: not record["straggler"])
    for reader in late:
        last = next(message for message in reader if isinstance(message, StragglerResolved))
        assert last.event_id == flagged["event_id"]
        reader.close()
    agent.send_signal(signal.SIGTERM)
    agent.communicate(timeout=WAIT_S)
    assert agent.returncode == 0
    after = until_page(page, "ingero_sink_connected 0")
    assert active not in after
    assert 'ingero_sink_events_total{type="straggler_resolved"} 1' in after
    assert local_http.get(f"http://127.0.0.1:{port}/healthz").text == "ok\n"
    assert local_http.get(f"http://127.0.0.1:{port}/readyz").status_code == 200

    pushes = [p for r in collector.requests for p in read_push(r.export, ResourceCache())]
    events = [p for p in pushes if p.straggler_event is not None]
    assert {event.event_id for event in events} == {flagged["event_id"]}
    assert events[-1].straggler_event == 0
    assert not path.exists()
    assert json.loads((tmp_path / "baseline.json").read_bytes())["sample_count"] >= 2
    sink.send_signal(signal.SIGINT)
    sink.communicate(timeout=WAIT_S)
    assert sink.returncode == 130


@pytest.mark.slow
def test_a_restarted_agent_is_active_at_once(collector, tmp_path, start):
    args = agent_args(collector, tmp_path, "--stub")
    first = start("ingero", *args)
    until(first, lambda record: record["state"] == "active" and record["fleet"]["pushes_taken"] > 2)
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=WAIT_S)
    assert first.returncode == 130
    second = start("ingero", *args)
    record = until(second, lambda record: record["pushed"])
    assert record["state"] == "active"
    assert record["score"] == pytest.approx(0.94)


@pytest.mark.slow
def test_an_agent_whose_fleet_dies_judges_by_itself_and_comes_back(collector, tmp_path, start):
    agent = start("ingero", *agent_args(collector, tmp_path, "--stub"))
    until(agent, lambda record: record["mode"] == "fleet")
    collector.stop()
    record = until(agent, lambda record: not record["fleet"]["reachable"])
    assert record["state"] == "active"
    collector.start()
    until(agent, lambda record: record["fleet"]["reachable"] and record["mode"] == "fleet")


@pytest.mark.slow
def test_nothing_is_called_pushed_that_nobody_took(collector, tmp_path, start):
    collector.status = 401
    agent = start("ingero", *agent_args(collector, tmp_path, "--stub"))
    first = json.loads(agent.stdout.readline())
    assert (first["offered"], first["pushed"]) in {(True, None), (True, False)}
    record = until(agent, lambda record: record["fleet"]["pushes_failed"] >= 3)
    assert record["pushed"] is False
    assert (record["fleet"]["refused"], record["fleet"]["reachable"]) == (True, True)
    assert record["fleet"]["last_answer"] == "wrong or missing token (401 Unauthorized)"
    collector.status = 200
    until(agent, lambda record: record["pushed"])
    agent.send_signal(signal.SIGTERM)
    _, said = agent.communicate(timeout=WAIT_S)
    assert said.count("note: fleet: refused: wrong or missing token (401 Unauthorized)") == 1
    assert "note: fleet: takes pushes again" in said
    assert "unreachable" not in said


@pytest.mark.slow
def test_agent_serves_its_score_its_mode_and_whether_fleet_is_reached(collector, tmp_path, start):
    agent = start("ingero", *agent_args(collector, tmp_path, "--stub", "--prometheus=127.0.0.1:0"))
    address = next(line for line in agent.stderr if line.startswith("serving ")).split()[1]
    page = until_page(address, 'ingero_agent_detection_mode{detection_mode="fleet"} 1\n')
    assert 'ingero_agent_detection_mode{detection_mode="none"} 0\n' in page
    assert "ingero_agent_fleet_reachable 1\n" in page
    assert re.search(r"^ingero_agent_health_score 0\.94", page, re.MULTILINE)
    collector.stop()
    until_page(address, "ingero_agent_fleet_reachable 0\n")


@pytest.mark.slow
def test_line_of_an_agent_without_a_fleet_never_says_pushed(collector, tmp_path, start):
    collector.stop()
    args = [arg for arg in agent_args(collector, tmp_path, "--stub") if arg != "--json"]
    agent = start("ingero", *args)
    lines = [next(agent.stdout)]
    while "0 taken, " not in lines[-1]:
        lines.append(next(agent.stdout))
    agent.send_signal(signal.SIGTERM)
    agent.communicate(timeout=WAIT_S)
    assert lines[-1].rstrip().endswith("failed; no answer")
    assert not any("pushed" in line for line in lines)


@pytest.mark.slow
def test_two_agents_never_fight_over_one_socket(collector, tmp_path, start):
    path = tmp_path / "events.sock"
    args = agent_args(collector, tmp_path, "--stub", "--remediate", f"--remediate-socket={path}",
                      "--remediate-gid=-1")  # fmt: skip
    first = start("ingero", *args)
    until(first, lambda record: record["pushed"])
    second = start("ingero", *args)
    _, errors = second.communicate(timeout=WAIT_S)
    assert second.returncode == 2
    assert "already listens" in errors
    until(first, lambda record: record["readers"]["connected"] == 0)


@pytest.mark.parametrize(
    ("args", "description"),
    [
        (["--stub", "--fleet-timeout=20s", "--fleet-node-rank=3"],
         ["--fleet-timeout: must not be longer", "--fleet-node-rank: must be below"]),
        (["--stub", "--fleet-cluster-id=a\nb"], ["--fleet-cluster-id: must not contain a line"]),
        (["--stub", "--fleet-tls-ca=/nope", "--fleet-tls-key=/nope", "--fleet-insecure"],
         ["--fleet-tls-cert: is missing", "--fleet-insecure: contradicts", "/nope"]),
        (["--stub", "--otlp-enabled", "--fleet-header=x"],
         ["--otlp-endpoint: is required", "--fleet-header"]),
        (["--stub", "--script=x.yaml"], ["exclude each other"]),
        (["--script=/nope.yaml"], ["cannot read /nope.yaml"]),
        (["--stub", "--fleet-push-interval=10"], ["is not a duration"]),
        (["--fleet-push-interval=10", "--fleet-node-rank=x", "--fleet-protocol=udp"],
         ["is not a duration", "'x' is not a valid integer", "'udp' is not one of"]),
    ],
)  # fmt: skip
def test_wrong_options_are_told_all_at_once(collector, tmp_path, start, args, description):
    process = start("ingero", *agent_args(collector, tmp_path), *args)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    for text in description:
        assert text in errors


def test_a_script_says_each_mistake_with_its_line(collector, tmp_path, start):
    script = tmp_path / "bad.yaml"
    script.write_text("steps:\n  - for: 5\n  - for: 5s\n    thruput: 3\n")
    process = start("ingero", *agent_args(collector, tmp_path, f"--script={script}"))
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert "line 2" in errors
    assert "line 4" in errors
    assert "did you mean throughput?" in errors


@pytest.mark.skipif(os.geteuid() == 0, reason="root has the kernel's probes as a source")
def test_without_a_source_it_says_what_to_give(collector, tmp_path, start):
    process = start("ingero", *agent_args(collector, tmp_path))
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 3
    assert "--stub or --script" in errors
