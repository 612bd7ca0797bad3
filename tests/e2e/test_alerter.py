"""`ingero-alerter` as a process: a real agent stream in, a real HTTP receiver out."""

import json
import signal
import socket
import subprocess
import sys
import threading

from tests.support import local_http

from ingero.agent.events.socket import LocalEventServer, open_listener
from ingero.wire.uds import StragglerResolved, StragglerState

PROGRAM = "from ingero.cli.programs.alerter import main; main()"


def start(path, *more):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "--config", str(path), "--verbose", *more],
        stderr=subprocess.PIPE,
        text=True,
    )


def test_episode_of_an_agent_becomes_one_incident_that_resolves(tmp_path, collector):
    socket_path = tmp_path / "remediate.sock"
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"uds_path": str(socket_path), "webhook": {"url": collector.url}}))
    begun = StragglerState(
        node_id="n", cluster_id="c", score=0.4, threshold=0.8, detection_mode="fleet",
        dominant_signal="throughput", timestamp="2026-01-01T00:00:00Z", event_id="e1",
    )  # fmt: skip
    ended = StragglerResolved(
        node_id="n", cluster_id="c", timestamp="2026-01-01T00:00:05Z", event_id="e1"
    )
    with open_listener(socket_path, -1) as (listener, _):
        stream = LocalEventServer(listener)
        thread = threading.Thread(target=stream.run, daemon=True)
        thread.start()
        for _ in range(3):  # an open episode is replayed to who connects late
            stream.publish(begun)
        process = start(config)
        collector.wait_for(1)
        stream.publish(ended)
        requests = collector.wait_for(2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        assert process.stderr is not None
        process.stderr.close()
        stream.close()
        thread.join(120)
    bodies = [json.loads(request.body) for request in requests]
    assert [(body["action"], body["episode"]) for body in bodies] == [
        ("trigger", "e1"),
        ("resolve", "e1"),
    ]


AGENT_LINE = (
    '{"type":"straggler_state","node_id":"n1","cluster_id":"prod a","score":0.42,"threshold":0.9,"detection_mode":'
    '"fleet","dominant_signal":"throughput","timestamp":"2026-11-21T03:04:36.386542555Z","event_id":"%s","rank":3,'
    '"world_size":8}\n'
)
AGENT_END = (
    '{"type":"straggler_resolved","node_id":"n1","cluster_id":"prod a","timestamp":"2026-11-21T03:04:46Z",'
    '"event_id":"%s","rank":3,"world_size":8}\n'
)


def test_existing_agent_with_an_id_a_tick_is_one_incident_that_resolves(tmp_path, collector):
    path, config = tmp_path / "remediate.sock", tmp_path / "config.json"
    config.write_text(json.dumps({"uds_path": str(path), "webhook": {"url": collector.url}}))
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(path))
        agent.listen()
        agent.settimeout(30)
        process = start(config, "--listen", "127.0.0.1:0")
        reader, _ = agent.accept()
        with reader:
            for number in range(3):
                reader.sendall((AGENT_LINE % f"id-{number}").encode())
            reader.sendall((AGENT_END % "id-9").encode())
            reader.sendall((AGENT_LINE % "id-10").encode() + b"{\n")
            requests = collector.wait_for(3)
            said = [process.stderr.readline() for _ in range(2)]
            (address,) = [line.split()[1] for line in said if line.startswith("serving ")]
            page = local_http.get(address).text
            while 'sent_total{receiver="webhook"} 3' not in page or "bad_lines_total 1" not in page:
                page = local_http.get(address).text
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    process.stderr.close()
    bodies = [json.loads(request.body) for request in requests]
    assert [(body["action"], body["episode"], body["node_id"]) for body in bodies] == [
        ("trigger", "id-0", "n1"),
        ("resolve", "id-0", "n1"),
        ("trigger", "id-10", "n1"),
    ]
    for line in ("ingero_alerter_connected 1", "ingero_alerter_open_episodes 1",
                 'ingero_alerter_dropped_total{receiver="webhook"} 0'):  # fmt: skip
        assert line in page.splitlines()


def test_wrong_configuration_ends_with_status_2_and_says_why(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"uds_path": "/s", "slack": {"webhook": "x"}}')
    process = start(config)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "slack.webhook" in said
