"""`ingero-alerter` as a process: a real agent stream in, a real HTTP receiver out."""

import json
import signal
import subprocess
import sys
import threading

from ingero.agent.health.remediate import RemediationStream, open_listener
from ingero.wire.uds import StragglerResolved, StragglerState

PROGRAM = "from ingero.cli.alerter import main; main()"


def start(path):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "--config", str(path), "--verbose"],
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
        stream = RemediationStream(listener)
        thread = threading.Thread(target=stream.run, daemon=True)
        thread.start()
        for _ in range(3):  # an open episode is replayed to who connects late
            stream.publish(begun)
        process = start(config)
        collector.wait_for(1)
        stream.publish(ended)
        requests = collector.wait_for(2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr is not None
        process.stderr.close()
        stream.close()
        thread.join(10)
    bodies = [json.loads(request.body) for request in requests]
    assert [(body["action"], body["episode"]) for body in bodies] == [
        ("trigger", "e1"),
        ("resolve", "e1"),
    ]


def test_wrong_configuration_ends_with_status_2_and_says_why(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"uds_path": "/s", "slack": {"webhook": "x"}}')
    process = start(config)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "slack.webhook" in said
