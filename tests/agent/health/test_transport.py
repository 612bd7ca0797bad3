import threading
from dataclasses import replace

import pytest
from tests.agent.health.pushed import SECOND_NS, push, settings

from ingero.agent.health.cache import HeaderOutcome, ThresholdCache, ThresholdHeaders
from ingero.agent.health.episodes import EpisodeKind, EpisodeOutcome, NodeEpisode, SpanMaker
from ingero.agent.health.poll import ThresholdPoller
from ingero.agent.health.push_body import NodeIdentity
from ingero.agent.health.push_queue import MAX_EXTRAS, MAX_PAUSE_NS, PushQueue
from ingero.agent.health.transport import HttpTransport, PushReply
from ingero.otlp.client.reply import parse_retry_after
from ingero.testing.clock import ManualClock
from ingero.wire.push import ResourceCache, read_push


@pytest.mark.parametrize("is_protobuf", [False, True])
@pytest.mark.parametrize("is_gzip", [False, True])
def test_every_http_encoding_arrives_as_it_was_sent(collector, is_protobuf, is_gzip):
    collector.set_threshold("0.9", "false")
    transport = HttpTransport(
        settings(
            collector.url, is_protobuf=is_protobuf, is_gzip=is_gzip, headers={"X-Tenant": "blue"}
        )
    )
    answer = transport.send(push(), 0)
    transport.close()
    assert answer == PushReply(True, "200 OK", ThresholdHeaders(HeaderOutcome.HIT, 0.9, False))
    request = collector.requests[0]
    assert read_push(request.export, ResourceCache())[0].health_score == 0.94
    assert request.headers["x-tenant"] == "blue"
    assert ("content-encoding" in request.headers) == is_gzip
    kind = "application/x-protobuf" if is_protobuf else "application/json"
    assert request.headers["content-type"] == kind


def test_a_renewed_token_is_used_by_the_next_push(collector, tmp_path):
    token = tmp_path / "token"
    token.write_text("first\n")
    transport = HttpTransport(settings(collector.url, token_file=token))
    transport.send(push(), 0)
    token.write_text("second\n")
    transport.send(push(), 0)
    for body in (b"", b"two\nlines", b"\xff"):
        token.write_bytes(body)
        assert "token" in transport.send(push(), 0).detail
    token.unlink()
    assert "token" in transport.send(push(), 0).detail
    transport.close()
    sent = [request.headers["authorization"] for request in collector.requests]
    assert sent == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize(
    ("status", "retry_after", "pause_s"),
    [(429, "7", 7), (503, "7", 7), (429, None, None), (400, "7", None), (200, "7", None)],
)
def test_silence_is_kept_for_429_and_503_only(collector, status, retry_after, pause_s):
    collector.set_threshold("0.9")
    collector.status = status
    if retry_after:
        collector.headers["Retry-After"] = retry_after
    transport = HttpTransport(settings(collector.url))
    answer = transport.send(push(), 0)
    transport.close()
    assert answer.retry_after_ns == (None if pause_s is None else pause_s * SECOND_NS)
    assert answer.is_taken == (status == 200)
    assert answer.headers.threshold == 0.9, "a refusal tells the threshold, too"


def test_a_redirect_is_not_followed(collector):
    collector.status = 307
    collector.headers = {"Location": f"{collector.url}/elsewhere"}
    transport = HttpTransport(settings(collector.url))
    assert not transport.send(push(), 0).is_taken
    transport.close()
    assert len(collector.requests) == 1


def test_retry_after_is_seconds_or_a_date():
    wall_ns = 1767225600 * SECOND_NS  # 2026-01-01T00:00:00Z
    assert parse_retry_after("7", 0) == 7 * SECOND_NS
    assert parse_retry_after("Thu, 01 Jan 2026 00:00:30 GMT", wall_ns) == 30 * SECOND_NS
    assert parse_retry_after("Wed, 31 Dec 2025 00:00:00 GMT", wall_ns) == 0
    for text in (None, "", "-1", "soon", "7.5", "٧"):
        assert parse_retry_after(text, wall_ns) is None


class Scripted:
    """A transport whose answers a test wrote down; it fails when asked for more."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.sent = []

    def send(self, export, wall_ns):
        self.sent.append(export)
        return self.answers.pop(0)

    def close(self):
        self.answers = None


TAKEN = PushReply(True, "200 OK")
CUT = PushReply(False, "refused", is_cut_off=True)


def make_queue(*answers):
    pauses = []
    transport, cache, clock = Scripted(*answers), ThresholdCache(), ManualClock()
    return PushQueue(transport, cache, clock, pauses.append, lambda: 1.0), transport, cache, pauses


def test_a_cut_off_push_is_tried_once_more_after_a_fifth_of_a_second():
    queue, transport, _, pauses = make_queue(CUT, TAKEN)
    queue.offer(push())
    queue.drain()
    assert len(transport.sent) == 2
    assert pauses == [240_000_000]
    assert (queue.counts.n_taken, queue.counts.n_failed, queue.counts.n_retried) == (1, 0, 1)


def test_a_refused_push_is_not_tried_again():
    queue, transport, _, pauses = make_queue(PushReply(False, "400"))
    queue.offer(push())
    queue.drain()
    assert (len(transport.sent), pauses, queue.counts.n_failed) == (1, [], 1)


def test_the_newest_push_supersedes_and_events_are_kept_in_order():
    queue, transport, _, _ = make_queue(TAKEN, TAKEN, TAKEN)
    old, new, first, second = push(0.1), push(0.2), push(0.3), push(0.4)
    queue.offer(old, [first])
    queue.offer(new, [second])
    queue.drain()
    assert transport.sent == [new, first, second]
    assert (queue.counts.n_superseded, queue.counts.n_extras_taken) == (1, 2)


def test_events_wait_within_a_bound_and_the_oldest_is_dropped_and_counted():
    queue, transport, _, _ = make_queue(*[TAKEN] * MAX_EXTRAS)
    events = [push() for _ in range(MAX_EXTRAS + 3)]
    queue.offer(None, events)
    queue.drain()
    assert transport.sent == events[3:]
    assert queue.counts.n_extras_dropped == 3


def test_events_do_not_count_toward_reachability():
    queue, _, cache, _ = make_queue(CUT)
    queue.offer(None, [push()] * 5)
    queue.drain()
    assert cache.is_reachable
    assert queue.counts.n_extras_failed == 1


PAUSE = PushReply(False, "503", retry_after_ns=SECOND_NS)
AWAY = PushReply(False, "503", is_refused=True, is_retryable=True)


@pytest.mark.parametrize("failure", [CUT, PAUSE, AWAY])
def test_events_that_do_not_get_through_go_out_with_the_next_push_in_order(failure):
    queue, transport, _, _ = make_queue(TAKEN, TAKEN, failure, TAKEN, TAKEN, TAKEN, TAKEN)
    old, new, first, second, third = (push(score) for score in (0.1, 0.2, 0.3, 0.4, 0.5))
    queue.offer(old, [first, second])
    queue.drain()
    queue.drain()
    assert transport.sent == [old, first, second]
    queue.offer(new, [third])
    queue.drain()
    assert transport.sent[3:] == [new, second, third]
    assert (queue.counts.n_extras_taken, queue.counts.n_extras_failed) == (3, 1)


def test_events_are_not_tried_while_pushes_are_cut_off():
    queue, transport, _, _ = make_queue(CUT, CUT, CUT, CUT, TAKEN, TAKEN)
    event = push(0.5)
    for score, extras in ((0.1, [event]), (0.2, []), (0.3, [])):
        queue.offer(push(score), extras)
        queue.drain()
    assert transport.sent[-1] is event
    assert (len(transport.sent), queue.counts.n_extras_taken) == (6, 1)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_an_event_outlasts_a_proxy_that_answers_for_a_fleet_that_is_away(collector, status):
    transport = HttpTransport(settings(collector.url))
    queue = PushQueue(transport, ThresholdCache(), ManualClock(), lambda _ns: None, lambda: 0.0)
    collector.status = status
    queue.offer(push(0.1), [push(0.5)])
    queue.drain()
    assert len(collector.requests) == 1, "events wait while pushes do not get through"
    queue.offer(None)
    queue.drain()
    assert len(collector.requests) == 2, "an event is tried once for each offer"
    collector.status = 200
    queue.offer(push(0.2))
    queue.drain()
    transport.close()
    taken = [read_push(one.export, ResourceCache())[0].health_score for one in collector.requests]
    assert taken == [0.1, 0.5, 0.2, 0.5]
    counts = queue.counts
    assert (counts.n_extras_taken, counts.n_extras_failed, counts.n_extras_dropped) == (1, 1, 0)


def test_events_of_a_long_time_behind_a_proxy_stay_within_their_bound():
    n_offers = MAX_EXTRAS + 9
    queue, transport, _, _ = make_queue(*[AWAY] * n_offers, *[TAKEN] * (MAX_EXTRAS + 1))
    for score in range(n_offers):
        queue.offer(push(score), [push(-score)])
        queue.drain()
    assert len(transport.sent) == n_offers, "one try for each push, and no event beside it"
    queue.offer(push())
    queue.drain()
    assert (queue.counts.n_extras_taken, queue.counts.n_extras_dropped) == (MAX_EXTRAS, 9)


def test_a_refused_event_is_not_tried_again():
    queue, transport, _, _ = make_queue(PushReply(False, "400"), TAKEN)
    queue.offer(None, [push()])
    queue.drain()
    queue.offer(push())
    queue.drain()
    assert (len(transport.sent), queue.counts.n_extras_failed) == (2, 1)


def test_a_closed_lane_tries_its_events_once_more():
    queue, transport, _, _ = make_queue(CUT, CUT)
    queue.offer(None, [push()])
    queue.drain()
    queue.close()
    queue.run()
    assert len(transport.sent) == 2


def test_an_endless_pause_is_bounded():
    year_ns = 365 * 86_400 * SECOND_NS
    queue, _, _, _ = make_queue(PushReply(False, "503", retry_after_ns=year_ns))
    queue.offer(push())
    queue.drain()
    assert queue.pause_ns == MAX_PAUSE_NS
    start_ns = ManualClock().mono_ns()
    assert queue.is_paused(start_ns + MAX_PAUSE_NS - 1)
    assert not queue.is_paused(start_ns + MAX_PAUSE_NS)


def test_a_lane_thread_sends_what_waits_before_it_ends():
    queue, transport, _, _ = make_queue(TAKEN, TAKEN)
    queue.offer(push(), [push()])
    thread = threading.Thread(target=queue.run)
    queue.close()
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    assert len(transport.sent) == 2


def make_poller(collector, cache, clock):
    return ThresholdPoller(settings(collector.url), cache, clock, SECOND_NS, lambda: 0.0)


@pytest.fixture
def polled(collector):
    cache, clock = ThresholdCache(), ManualClock()
    poller = make_poller(collector, cache, clock)
    yield poller, cache, clock
    poller.close()


def test_the_page_fills_the_cache_while_pushes_tell_nothing(collector, polled):
    poller, cache, clock = polled
    collector.body = b'{"threshold":0.91,"quorum_met":true,"more":1}'
    assert poller.poll() == SECOND_NS
    assert cache.cached == (0.91, True, clock.mono_ns())
    assert collector.requests[0].path == "/api/v1/threshold?cluster_id=prod+a"
    cache.record_response(ThresholdHeaders(HeaderOutcome.HIT, 0.8, True), 1)
    poller.poll()
    assert len(collector.requests) == 1, "asleep while answers carry the threshold"
    cache.record_response(ThresholdHeaders(HeaderOutcome.MISS), 2)
    poller.poll()
    assert len(collector.requests) == 2


def test_a_fleet_without_a_threshold_tells_none(collector, polled):
    poller, cache, _ = polled
    collector.body = b'{"threshold":0,"quorum_met":false}'
    poller.poll()
    assert cache.cached is None
    assert cache.counts.n_rejected == 0


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"threshold":"0.9","quorum_met":true}', b'{"threshold":0.9}', b"\xff",
     b'{"threshold":0.9,"quorum_met":true,"x":"' + b"x" * 9000 + b'"}'],
)  # fmt: skip
def test_a_broken_page_is_counted_and_changes_nothing(collector, polled, body):
    poller, cache, _ = polled
    collector.body = body
    assert poller.poll() == SECOND_NS
    assert poller.n_failed == 1
    assert cache.cached is None


@pytest.mark.parametrize(
    ("status", "retry_after", "delay_s"),
    [(429, None, 2), (429, "5", 5), (500, None, 1), (503, "5", 5), (404, "5", 1), (429, "999", 30)],
)
def test_the_poller_waits_as_it_is_told_within_bounds(
    collector, polled, status, retry_after, delay_s
):
    poller, _, _ = polled
    collector.status = status
    collector.headers = {"Retry-After": retry_after} if retry_after else {}
    assert poller.poll() == delay_s * SECOND_NS  # vector 19


def test_a_poller_without_a_fleet_just_waits(collector, polled):
    poller, _, _ = polled
    collector.stop()
    assert poller.poll() == SECOND_NS
    assert poller.n_failed == 1


def test_the_span_of_an_episode_arrives_in_protobuf(collector):
    identity = NodeIdentity(cluster_id="prod a", node_id="n1", cohort="8a5edab282632443")
    episode = NodeEpisode(event_id="e1", kind=EpisodeKind.STRAGGLER, start_ns=5)
    export = SpanMaker(identity, "1.2.3", lambda bits: (1 << bits) - 1).build(
        episode, 9, EpisodeOutcome.RESOLVED
    )
    transport = HttpTransport(replace(settings(collector.url, is_protobuf=True), cluster_id=""))
    assert transport.send(export, 0).is_taken
    transport.close()
    assert collector.requests[0].path == "/v1/traces"
    (entry,) = collector.requests[0].export.tree.resource_spans
    (span,) = entry.scope_spans[0].spans
    assert (span.name, span.start_time_unix_nano, span.end_time_unix_nano) == (
        "ingero.detection.straggler",
        5,
        9,
    )
    assert (len(span.trace_id), len(span.span_id)) == (32, 16)
    headers = {a.key: a.value.string_value for a in [*entry.resource.attributes, *span.attributes]}
    assert headers["service.name"] == "ingero"
    assert headers["k8s.node.name"] == "n1"
    assert headers["ingero.event.id"] == "e1"
    assert headers["ingero.cgroup_path_hash"] == "8a5edab282632443"
