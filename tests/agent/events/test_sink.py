import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingero.agent.events.reader import EventLines, EventReader
from ingero.agent.events.sink import RESYNC_NS, SinkState
from ingero.testing.clock import ManualClock
from ingero.testing.open_files import no_more_files

SECOND_NS = 1_000_000_000


@pytest.fixture
def clock():
    return ManualClock(wall_ns=1795230512_327_000_000)


@pytest.fixture
def state(clock):
    return SinkState(clock, max_nodes=10_000)


@pytest.fixture
def stream(state):
    return state.open_stream()


def event(kind="straggler_state", node="n1", cluster="c1"):
    return json.dumps({"type": kind, "node_id": node, "cluster_id": cluster}).encode()


def active(state):
    return [line for line in state.render().splitlines() if line.startswith("ingero_sink_active")]


def value(state, name):
    found = [line for line in state.render().splitlines() if line.startswith(name + " ")]
    return float(found[0].split()[1])


def test_the_page_is_the_existing_sinks_to_the_byte(state, stream, data_dir):
    stream.connected()
    for _ in range(7):
        stream.line(event())
    recorded = (data_dir / "wire_samples" / "sink_metrics.txt").read_text()
    assert state.render() == recorded.rstrip("\n") + "\n"


def test_an_unused_sink_shows_zeros_and_no_series(state):
    assert value(state, "ingero_sink_connected") == 0
    assert value(state, "ingero_sink_last_event_timestamp_seconds") == 0
    assert active(state) == []


def test_recorded_events_open_and_resolve_an_episode(state, stream, data_dir):
    lines = (data_dir / "wire_samples" / "uds_straggler.ndjson").read_bytes().splitlines()
    for line in lines[:3]:
        stream.line(line)
    assert active(state) == ['ingero_sink_active_stragglers{cluster_id="prod a",node_id="n1"} 1']
    stream.line(lines[3])
    assert active(state) == []
    assert 'ingero_sink_events_total{type="straggler_resolved"} 1' in state.render()
    assert 'ingero_sink_events_total{type="straggler_state"} 3' in state.render()


@pytest.mark.parametrize("bad", [b"{", b"[]", b"{}", b'{"type":""}', b'{"type":5}', b"\xff"])
def test_a_line_that_is_no_event_is_counted_and_nothing_else(state, stream, bad):
    stream.line(bad)
    assert value(state, "ingero_sink_parse_errors_total") == 1
    assert value(state, "ingero_sink_last_event_timestamp_seconds") == 0


def test_events_of_unknown_types_are_counted_within_bounds(state, stream):
    for number in range(1000):
        stream.line(event(f"kind{number}"))
    page = state.render()
    assert page.count("ingero_sink_events_total{") == 65
    assert 'ingero_sink_events_total{type="other"} 936' in page
    assert active(state) == []


def test_the_oldest_straggler_makes_room_and_is_counted(clock):
    state = SinkState(clock, max_nodes=2)
    stream = state.open_stream()
    for node in ("a", "b", "a", "c"):
        stream.line(event(node=node))
    assert [line.split('node_id="')[1][0] for line in active(state)] == ["b", "c"]
    assert 'ingero_sink_dropped_total{reason="cap_reached"} 1' in state.render()


def test_hostile_names_are_escaped(state, stream):
    stream.line(event(node='a"} 1\nevil 2\\'))
    assert active(state) == [
        r'ingero_sink_active_stragglers{cluster_id="c1",node_id="a\"} 1\nevil 2\\"} 1'
    ]


def test_a_recovery_missed_while_disconnected_is_noticed_after_the_reconnect(state, stream, clock):
    stream.connected()
    stream.line(event(node="recovered"))
    stream.line(event(node="still"))
    stream.disconnected()
    clock.advance(10 * RESYNC_NS)
    assert len(active(state)) == 2, "as last heard"
    stream.connected()
    stream.line(event(node="still"))
    assert len(active(state)) == 2
    clock.advance(RESYNC_NS)
    assert active(state) == ['ingero_sink_active_stragglers{cluster_id="c1",node_id="still"} 1']


def test_one_agents_reconnect_puts_no_other_agents_straggler_in_doubt(state, stream, clock):
    other = state.open_stream()
    stream.connected()
    assert value(state, "ingero_sink_connected") == 0, "one of two"
    other.connected()
    assert value(state, "ingero_sink_connected") == 1
    stream.line(event(node="here"))
    other.line(event(node="there"))
    stream.disconnected()
    assert value(state, "ingero_sink_connected") == 0
    stream.connected()
    clock.advance(RESYNC_NS)
    assert active(state) == ['ingero_sink_active_stragglers{cluster_id="c1",node_id="there"} 1']


def test_readiness_outlives_a_connection_by_the_window(state, stream, clock):
    window_ns = 60 * SECOND_NS
    assert state.readiness(window_ns) == (False, "not ready: uds_disconnected")
    stream.connected()
    assert state.readiness(window_ns) == (True, "ready")
    stream.line(event())
    stream.disconnected()
    assert state.readiness(window_ns) == (True, "ready (recent event)")
    clock.advance(window_ns)
    assert state.readiness(window_ns) == (False, "not ready: uds_disconnected")


class Collected:
    def __init__(self):
        self.lines, self.n_overlong = [], 0

    def connected(self):
        raise AssertionError

    def disconnected(self):
        raise AssertionError

    def line(self, line):
        self.lines.append(line)

    def overlong(self):
        self.n_overlong += 1


@given(st.binary(max_size=200).map(lambda b: b.replace(b"x", b"\n")), st.lists(st.integers(1, 50)))
def test_lines_do_not_depend_on_how_the_bytes_arrive(stream, cuts):
    collected = Collected()
    lines = EventLines(20, collected)
    rest = stream
    for cut in cuts:
        lines.feed(rest[:cut])
        rest = rest[cut:]
    lines.feed(rest)
    ended = stream.split(b"\n")
    assert collected.lines == [p for p in ended[:-1] if len(p) <= 20 and p.strip()]
    assert collected.n_overlong == sum(len(p) > 20 for p in ended)


def test_a_reader_without_a_descriptor_tries_again(state, stream, tmp_path):
    waits_ns = []

    def wait(duration_ns):
        waits_ns.append(duration_ns)
        return len(waits_ns) == 3

    with no_more_files():
        EventReader(tmp_path / "absent", stream, 1024, SECOND_NS, wait).run()
    assert waits_ns == [SECOND_NS, 2 * SECOND_NS, 4 * SECOND_NS]
    assert value(state, "ingero_sink_connected") == 0
