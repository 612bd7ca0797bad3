"""What a run counts of the agents' own alerts, from the page of a real sink."""

import json
import socket
import threading

from tests.support import local_http

from ingero.agent.events.sink import SinkState
from ingero.sim.cluster.alerts import Alerts, run_sink
from ingero.telemetry.clock import SystemClock


def event(kind, node):
    return json.dumps({"type": kind, "node_id": node, "cluster_id": "c"}).encode()


def test_events_and_hosts_are_read_from_the_sinks_page():
    state, alerts = SinkState(SystemClock(), 10), Alerts()
    stream = state.open_stream()
    alerts.take(state.render(), None)
    assert alerts.as_json() == {"events": {}, "active": [], "after_s": {}}
    for node in ("host-1", "host-2"):
        stream.line(event("straggler_state", node))
    alerts.take(state.render(), 1_500_000_000)
    stream.line(event("straggler_resolved", "host-1"))
    alerts.take(state.render(), 9_000_000_000)
    assert alerts.as_json() == {
        "events": {"straggler_resolved": 1, "straggler_state": 2},
        "active": ["host-2"],
        "after_s": {"host-1": 1.5, "host-2": 1.5},
    }


def test_host_that_was_in_an_episode_before_the_fault_says_so():
    state, alerts = SinkState(SystemClock(), 10), Alerts()
    state.open_stream().line(event("straggler_state", "host-1"))
    alerts.take(state.render(), None)
    alerts.take(state.render(), 5)
    assert alerts.as_json()["after_s"] == {"host-1": None}


def test_one_sink_hears_several_agents(tmp_path):
    """The real program, on sockets that real lines come from; asked until it has heard both."""
    paths = [tmp_path / "a.sock", tmp_path / "b.sock"]
    agents = []
    for path in paths:
        agents.append(socket.socket(socket.AF_UNIX))
        agents[-1].bind(str(path))
        agents[-1].listen()

    def tell(agent, node):
        connection, _ = agent.accept()
        connection.sendall(event("straggler_state", node) + b"\n")
        told.append(connection)

    told = []
    alerts = Alerts()
    with local_http.open_client() as client, run_sink(paths, client) as sink:
        threads = [
            threading.Thread(target=tell, args=(agent, f"host-{i}"))
            for i, agent in enumerate(agents)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        while len(alerts.active) < 2:
            sink.update(alerts, 0)
    for one in (*agents, *told):
        one.close()
    assert alerts.events == {"straggler_state": 2}
    assert alerts.active == ("host-0", "host-1")
