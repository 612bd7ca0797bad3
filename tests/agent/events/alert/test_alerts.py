"""Lines of an agent's stream to incidents at real HTTP receivers on loopback."""

import json
import threading
from dataclasses import replace

import pytest

from ingero.agent.events.alert.backends import build_backends
from ingero.agent.events.alert.config import PAGERDUTY_URL, load_config
from ingero.agent.events.alert.delivery import MAX_WAITING, Delivery, build_client
from ingero.agent.events.alert.episodes import RESYNC_NS, Action, Alert, Episodes
from ingero.errors import BadDataError, ConfigError
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S
from ingero.wire.uds import Straggle, StragglerResolved, StragglerState, encode_message


def state(event_id="e1", node="n1", score=0.4):
    return encode_message(
        StragglerState(
            node_id=node,
            cluster_id="c",
            score=score,
            threshold=0.8,
            detection_mode="fleet",
            dominant_signal="throughput",
            timestamp="2026-01-01T00:00:00Z",
            event_id=event_id,
            rank=3,
            world_size=8,
        )
    )


def resolved(event_id="e1", node="n1"):
    return encode_message(
        StragglerResolved(
            node_id=node, cluster_id="c", timestamp="2026-01-01T00:00:05Z", event_id=event_id
        )
    )


@pytest.fixture
def heard():
    return []


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def episodes(heard, clock):
    return Episodes(clock, heard.append)


def write(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


# ── Episodes ────────────────────────────────────────────────────────────────


def test_an_episode_is_told_once_and_resolved_once(episodes, heard):
    for _ in range(5):
        episodes.line(state())
    episodes.line(resolved())
    episodes.line(resolved())
    assert [(alert.action, alert.key) for alert in heard] == [
        (Action.TRIGGER, "e1"),
        (Action.RESOLVE, "e1"),
    ]


def test_two_episodes_of_one_node_are_two_incidents(episodes, heard):
    for event_id in ("e1", "e2"):
        episodes.line(state(event_id))
        episodes.line(resolved(event_id))
    assert [alert.key for alert in heard] == ["e1", "e1", "e2", "e2"]


def test_ids_that_change_with_every_tick_are_one_episode(episodes, heard):
    for event_id in ("id-0", "id-1", "id-2"):
        episodes.line(state(event_id))
    episodes.line(state("id-3", node="n2"))
    episodes.line(resolved("id-4"))
    assert [(alert.action, alert.key, alert.node) for alert in heard] == [
        (Action.TRIGGER, "id-0", "n1"),
        (Action.TRIGGER, "id-3", "n2"),
        (Action.RESOLVE, "id-0", "n1"),
    ]


def test_replay_to_a_new_connection_tells_nothing_again(episodes, heard, clock):
    episodes.connected()
    episodes.line(state())
    episodes.disconnected()
    episodes.connected()
    episodes.line(state())
    clock.advance(2 * RESYNC_NS)
    episodes.settle()
    assert len(heard) == 1


def test_episode_that_a_restarted_agent_does_not_know_is_resolved(episodes, heard, clock):
    episodes.connected()
    episodes.line(state())
    episodes.disconnected()
    clock.advance(2 * RESYNC_NS)
    episodes.settle()
    assert len(heard) == 1, "a silent agent says nothing about its stragglers"
    episodes.connected()
    clock.advance(RESYNC_NS)
    episodes.settle()
    assert [alert.action for alert in heard] == [Action.TRIGGER, Action.RESOLVE]


def test_local_straggler_is_told_once_until_it_was_quiet_for_ten_minutes(episodes, heard, clock):
    line = encode_message(
        Straggle(
            pid=7,
            throughput_drop_pct=40.0,
            sched_switch_count=9,
            preempting_pids=None,
            timestamp_ns=1,
            sustained=True,
        )
    )
    episodes.line(line)
    clock.advance(599 * NS_PER_S)
    episodes.settle()
    episodes.line(line)
    clock.advance(599 * NS_PER_S)
    episodes.settle()
    assert len(heard) == 1
    clock.advance(NS_PER_S)
    episodes.settle()
    assert [alert.action for alert in heard] == [Action.TRIGGER, Action.RESOLVE]


def test_bad_lines_and_other_types_are_passed_over_and_counted(episodes, heard):
    for line in (b"{", b'{"type":"straggler_state"}', b'{"type":"something"}', b"[]"):
        episodes.line(line)
    episodes.overlong()
    assert heard == []
    assert episodes.n_bad == 4


# ── Configuration ───────────────────────────────────────────────────────────


def test_configuration_of_the_existing_alerter_is_accepted(tmp_path):
    config = load_config(
        write(
            tmp_path,
            {
                "uds_path": "/tmp/ingero-remediate.sock",
                "slack": {"webhook_url": "https://hooks", "channel": "#gpu", "username": "ingero"},
                "pagerduty": {"routing_key": "abc", "severity": "critical"},
                "http_client": {"request_timeout_seconds": 3},
            },
        )
    )
    slack, pagerduty = build_backends(config)
    assert (slack.name, pagerduty.name) == ("slack", "pagerduty")
    assert pagerduty.build(ALERT).url == PAGERDUTY_URL
    assert config.http_client.request_timeout_seconds == 3
    assert "abc" not in repr(config)


def test_empty_values_of_the_existing_alerter_are_its_defaults(tmp_path):
    config = load_config(
        write(
            tmp_path,
            {
                "uds_path": "/s",
                "slack": None,
                "pagerduty": {"routing_key": "abc", "severity": ""},
                "http_client": {"request_timeout_seconds": 0},
            },
        )
    )
    assert config.pagerduty.severity == "warning"
    assert config.http_client.request_timeout_seconds == 10


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"slack": {"webhook_url": "https://h"}}, "uds_path"),
        ({"uds_path": "/s"}, "names no receiver"),
        ({"uds_path": "/s", "slack": {}}, "webhook_url"),
        ({"uds_path": "/s", "pagerduty": {"routing_key": "k", "severity": "bad"}}, "severity"),
        ({"uds_path": "/s", "webhook": {"url": "ftp://h"}}, "https://"),
        ({"uds_path": "/s", "webhook": {"url": "http://h"}, "slak": {}}, "slak"),
    ],
)
def test_wrong_configuration_is_refused_and_named(tmp_path, config, said):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, config))
    assert said in str(caught.value)


def test_secrets_come_from_files_and_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HOOK", "https://hooks/secret")
    (tmp_path / "key").write_text("k123\n")
    config = load_config(
        write(
            tmp_path,
            {
                "uds_path": "/s",
                "slack": {"webhook_url": "${env:HOOK}"},
                "pagerduty": {"routing_key_file": str(tmp_path / "key")},
            },
        )
    )
    slack, pagerduty = build_backends(config)
    assert slack.build(ALERT).url == "https://hooks/secret"
    assert pagerduty.build(ALERT).body["routing_key"] == "k123"


def test_a_secret_that_is_replaced_counts_for_the_next_alert(tmp_path):
    hook, key = tmp_path / "hook", tmp_path / "key"
    hook.write_text("https://hooks/one")
    key.write_text("k1")
    secrets = {
        "slack": {"webhook_url_file": str(hook)},
        "pagerduty": {"routing_key_file": str(key)},
    }
    slack, pagerduty = build_backends(load_config(write(tmp_path, {"uds_path": "/s", **secrets})))
    hook.write_text("https://hooks/two")
    key.write_text("k2")
    assert slack.build(ALERT).url == "https://hooks/two"
    assert pagerduty.build(ALERT).body["routing_key"] == "k2"
    hook.unlink()  # as a rotation may for a moment: the alert is tried again
    with pytest.raises(BadDataError, match="cannot be read"):
        slack.build(ALERT)


@pytest.mark.parametrize(
    ("text", "sent"), [("s3cret\r\n", "Bearer s3cret"), ("s3cret\nX: y", None)]
)
def test_a_bearer_is_sent_without_its_line_end_and_not_with_one_inside(tmp_path, text, sent):
    (tmp_path / "token").write_text(text)
    webhook = {"url": "https://hook", "bearer_token_file": str(tmp_path / "token")}
    config = {"uds_path": "/s", "webhook": webhook}
    (backend,) = build_backends(load_config(write(tmp_path, config)))
    if sent:
        assert backend.build(ALERT).headers == {"Authorization": sent}
        return
    with pytest.raises(BadDataError, match="not printable ASCII") as raised:
        backend.build(ALERT)
    assert "s3cret" not in raised.value.message


def test_slack_is_told_what_the_workload_said_last(tmp_path):
    config = {"uds_path": "/s", "slack": {"webhook_url": "https://hooks/one"}}
    (slack,) = build_backends(load_config(write(tmp_path, config)))
    said = replace(ALERT, details={**ALERT.details, "labels": {"step": "41", "phase": "eval"}})
    assert slack.build(said).body["text"].endswith("event_id=e1 step=41 phase=eval")
    assert slack.build(ALERT).body["text"].endswith("event_id=e1")


def test_what_a_jobs_user_wrote_is_no_markup_to_slack_and_unchanged_elsewhere(tmp_path):
    config = {
        "uds_path": "/s",
        "slack": {"webhook_url": "https://hooks/one"},
        "pagerduty": {"routing_key": "k"},
        "webhook": {"url": "https://ops/gpu"},
    }
    labels = {"phase": "<!channel>", "run": "<https://evil.example|Approve>", "state": "a<b&amp;c"}
    said = replace(ALERT, details={**ALERT.details, "labels": labels}, title="of <@U1>")
    slack, pagerduty, webhook = build_backends(load_config(write(tmp_path, config)))
    text = slack.build(said).body["text"]
    assert text.startswith("of &lt;@U1&gt;\n")
    assert text.endswith(
        " phase=&lt;!channel&gt; run=&lt;https://evil.example|Approve&gt; state=a&lt;b&amp;amp;c"
    )
    payload = pagerduty.build(said).body["payload"]
    assert (payload["summary"], payload["custom_details"]["labels"]) == ("of <@U1>", labels)
    assert webhook.build(said).body["details"]["labels"] == labels


def test_missing_secret_file_is_a_wrong_configuration(tmp_path):
    config = load_config(
        write(tmp_path, {"uds_path": "/s", "slack": {"webhook_url_file": str(tmp_path / "no")}})
    )
    with pytest.raises(ConfigError, match="cannot be read"):
        build_backends(config)


# ── Delivery ────────────────────────────────────────────────────────────────

ALERT = Alert(
    Action.TRIGGER,
    "e1",
    "n1",
    "c",
    "Ingero straggler on c/n1",
    {
        "score": 0.4,
        "threshold": 0.8,
        "detection_mode": "fleet",
        "dominant_signal": "throughput",
        "rank": 3,
        "world_size": 8,
        "event_id": "e1",
    },
)
RESOLVE = Alert(Action.RESOLVE, "e1", "n1", "c", "Ingero straggler resolved on c/n1", ALERT.details)


def deliver(tmp_path, collector, part, alerts, on_wait=lambda _: False):
    """Send alerts through one backend to a receiver; returns the delivery."""
    backends = build_backends(load_config(write(tmp_path, {"uds_path": "/s", **part})))
    with build_client(5.0) as client:
        delivery = Delivery(backends[0], client, on_wait)
        for alert in alerts:
            delivery.offer(alert)
        delivery.close()
        thread = threading.Thread(target=delivery.run)
        thread.start()
        thread.join(120)
        assert not thread.is_alive()
    return delivery


def test_pagerduty_gets_one_incident_that_resolves_under_the_same_key(tmp_path, collector):
    part = {"pagerduty": {"routing_key": "k", "url": f"{collector.url}/v2/enqueue"}}
    delivery = deliver(tmp_path, collector, part, [ALERT, RESOLVE])
    first, second = (json.loads(request.body) for request in collector.requests)
    assert (first["event_action"], first["dedup_key"], first["routing_key"]) == (
        "trigger",
        "e1",
        "k",
    )
    assert first["payload"]["source"] == "n1"
    assert first["payload"]["severity"] == "warning"
    assert first["payload"]["class"] == "gpu_straggler"
    assert second == {"routing_key": "k", "event_action": "resolve", "dedup_key": "e1"}
    assert delivery.counts.n_sent == 2


def test_slack_gets_two_lines(tmp_path, collector):
    part = {"slack": {"webhook_url": collector.url, "channel": "#gpu"}}
    deliver(tmp_path, collector, part, [ALERT])
    (request,) = collector.requests
    assert json.loads(request.body) == {
        "text": "Ingero straggler on c/n1\nscore=0.400 threshold=0.800 mode=fleet"
        " dominant=throughput rank=3/8 event_id=e1",
        "channel": "#gpu",
    }


def test_webhook_gets_everything_with_its_headers(tmp_path, collector):
    (tmp_path / "token").write_text("t0k3n\n")
    part = {
        "webhook": {
            "url": collector.url,
            "headers": {"X-Team": "gpu"},
            "bearer_token_file": str(tmp_path / "token"),
        }
    }
    deliver(tmp_path, collector, part, [ALERT])
    (request,) = collector.requests
    assert request.headers["x-team"] == "gpu"
    assert request.headers["authorization"] == "Bearer t0k3n"
    body = json.loads(request.body)
    assert (body["action"], body["episode"], body["details"]["rank"]) == ("trigger", "e1", 3)


def test_failure_is_tried_again_with_delays_that_double_and_start_over(tmp_path, collector):
    delays = []
    collector.status = 503

    def wait(duration_ns):
        delays.append(duration_ns // NS_PER_S)
        collector.status = 200 if len(delays) in {3, 5} else 503
        return False

    part = {"webhook": {"url": collector.url}}

    delivery = deliver(tmp_path, collector, part, [ALERT], wait)
    collector.status = 503
    deliver(tmp_path, collector, part, [RESOLVE], wait)
    assert delays == [1, 2, 4, 1, 2]
    assert delivery.counts.n_retried == 3


def test_receiver_that_is_not_there_is_tried_until_it_comes(tmp_path, collector):
    port = collector.port
    collector.stop()

    def wait(duration_ns):
        collector.start()
        return False

    delivery = deliver(
        tmp_path, collector, {"webhook": {"url": f"http://127.0.0.1:{port}"}}, [ALERT], wait
    )
    assert len(collector.requests) == 1
    assert delivery.counts.n_retried == 1


def test_refusal_drops_the_alert_and_goes_on(tmp_path, collector):
    collector.status = 400
    delivery = deliver(tmp_path, collector, {"webhook": {"url": collector.url}}, [ALERT, RESOLVE])
    assert delivery.counts.n_refused == 2
    assert delivery.counts.n_retried == 0


def test_what_waits_when_the_program_ends_is_counted_and_logged(tmp_path, collector, caplog):
    collector.status = 503
    part = {"webhook": {"url": collector.url}}
    delivery = deliver(tmp_path, collector, part, [ALERT, RESOLVE], lambda _: True)
    assert (delivery.counts.n_failed, delivery.counts.n_dropped) == (1, 2)
    dropped = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert dropped == [
        "webhook: trigger of e1 dropped: the program ends",
        "webhook: resolve of e1 dropped: the program ends",
    ]


def test_too_many_waiting_alerts_lose_the_oldest(tmp_path, collector, caplog):
    backends = build_backends(
        load_config(write(tmp_path, {"uds_path": "/s", "webhook": {"url": collector.url}}))
    )
    with build_client(5.0) as client:
        delivery = Delivery(backends[0], client, lambda _: True)
        for _ in range(MAX_WAITING + 3):
            delivery.offer(ALERT)
    assert delivery.counts.n_dropped == 3
    assert [record.getMessage() for record in caplog.records] == [
        "webhook: trigger of e1 dropped: too many wait"
    ] * 3
