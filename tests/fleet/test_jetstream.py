"""Several Fleets that meet in a real nats-server: any of them receives, one judges, another takes over."""

import asyncio
import json
import signal
from collections import Counter
from contextlib import ExitStack, contextmanager

import pytest
from click.testing import CliRunner
from tests.e2e.agents import Agents, event, health, told
from tests.fleet.processors.collectives.judged import job
from tests.support.collector import open_collector

from ingero.cli.programs.fleet import cli
from ingero.errors import BadDataError, UnsupportedError
from ingero.fleet.jetstream import messages
from ingero.fleet.jetstream.clock import StreamClock
from ingero.fleet.jetstream.config import NatsConfig
from ingero.fleet.jetstream.connection import NatsConnection
from ingero.fleet.jetstream.ledger import LEDGER_KEY
from ingero.fleet.jetstream.messages import (
    ClusterAnswers,
    ClusterLedger,
    LoggedPush,
    build_token,
    decode_answers,
    decode_ledger,
    decode_push,
    encode_document,
    encode_push,
)
from ingero.fleet.workers.messages import RelayedPush
from ingero.otlp.codec import encode_json, iter_log_rows, iter_points
from ingero.otlp.names import Signal
from ingero.sim.local_nats import LocalNats, find_nats_server
from ingero.telemetry.clock import SystemClock
from ingero.testing.clock import ManualClock
from ingero.testing.fleet import build_fleet_config, run_fleet
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_S
from ingero.wire.collectives import build_collectives

NODES = [f"n{at}" for at in range(5)]
STORED = "ingero_fleet_stream_pushes_total"
JUDGED = "ingero_fleet_stream_judged_total"


@pytest.fixture(scope="module", autouse=True)
def server():
    try:
        find_nats_server()
    except UnsupportedError as error:
        pytest.skip(str(error))


def config_of(nats, collector=None, **more):
    config = build_fleet_config({"max_expected_nodes": 100}, nccl={})
    pipelines = config["service"]["pipelines"]
    pipelines["logs"]["processors"] = ["ingero", "nccl"]
    if collector is not None:
        config["exporters"]["otlphttp"] = {
            "endpoint": collector.url,
            "sending_queue": {"enabled": False},
        }
        pipelines["logs"]["exporters"] = ["otlphttp"]
    config["service"]["storage"] = {"nats": {"servers": [nats.url], "timeout": "20s", **more}}
    return config


@contextmanager
def running(config):
    with run_fleet(config) as fleet:
        agents = Agents(fleet)
        with agents.client:
            yield agents


def push(agents, body):
    """A push that comes again until it is taken, as an agent's does."""

    def try_once():
        answer = agents.push(body)
        assert answer.status_code in {200, 503}
        return answer if answer.status_code == 200 else None

    return wait_until(try_once)


def push_all(agents, cluster, nodes=NODES):
    return [push(agents, health(node, cluster=cluster)) for node in nodes]


def is_judge(agents, cluster):
    return agents.admin("nodes", cluster_id=cluster).get("total") == len(NODES)


def find_judge(fleets, cluster):
    """The Fleet that judges a cluster, and the others."""
    judge = wait_until(lambda: next((one for one in fleets if is_judge(one, cluster)), None))
    return judge, [one for one in fleets if one is not judge]


def list_episodes(collector):
    return [
        (attributes["ingero.episode.incident_id"], attributes["ingero.episode.state"])
        for export in collector.logs
        for row in iter_log_rows(export)
        if "ingero.episode.state" in (attributes := row.attributes)
    ]


def test_any_fleet_takes_a_push_and_answers_with_the_threshold_that_one_of_them_drew(tmp_path):
    nats = LocalNats(tmp_path)
    with ExitStack() as stack:
        stack.enter_context(nats.run())
        fleets = [stack.enter_context(running(config_of(nats))) for _ in range(2)]
        for at, node in enumerate(NODES):
            push(fleets[at % 2], health(node, cluster="one"))
        judge, (other,) = find_judge(fleets, "one")

        def ask(agents):
            return told(push(agents, health("n0", cluster="one")))

        assert wait_until(lambda: ask(judge) == ask(other) == (0.89, "true"))
        assert other.admin("nodes", cluster_id="one").get("total") is None
        polled = wait_until(lambda: other.threshold(cluster_id="one").json().get("threshold"))
        assert polled == pytest.approx(0.89)


def test_a_killed_judge_is_replaced_and_each_episode_is_reported_once(tmp_path):
    nats = LocalNats(tmp_path)
    with ExitStack() as stack:
        stack.enter_context(nats.run())
        collector = stack.enter_context(open_collector())
        config = config_of(nats, collector)
        fleets = [stack.enter_context(running(config)) for _ in range(2)]
        push_all(fleets[0], "two")
        judge, (heir,) = find_judge(fleets, "two")
        push(heir, event("n3", 1, cluster="two"))
        push_all(heir, "two", [node for node in NODES if node != "n3"])
        opened = wait_until(lambda: list_episodes(collector))
        wait_until(lambda: told(push_all(heir, "two")[0]) == (0.89, "true"))

        judge.fleet.signal(signal.SIGKILL)
        assert told(push_all(heir, "two")[0]) == (0.89, "true"), "as the killed judge said"
        wait_until(lambda: is_judge(heir, "two"))
        push(heir, event("n3", 0, cluster="two"))
        wait_until(lambda: len(list_episodes(collector)) > 1)
        incident = opened[0][0]
        assert list_episodes(collector) == [(incident, "open"), (incident, "resolved")]
        assert heir.own("ingero_fleet_stream_takeovers_total") > 0


def test_without_a_server_pushes_are_asked_to_come_again_and_counted(tmp_path):
    nats = LocalNats(tmp_path)
    with ExitStack() as stack:
        first_life = stack.enter_context(ExitStack())
        first_life.enter_context(nats.run())
        agents = stack.enter_context(running(config_of(nats)))
        push_all(agents, "three")
        nats.kill()
        first_life.close()

        refused = agents.push(health("n0", cluster="three"))
        assert refused.status_code == 503

        def refused_often():
            agents.push(health("n0", cluster="three"))
            return agents.own(STORED, outcome="refused") > 30

        wait_until(refused_often)
        lines = [line.partition("ingero.fleet.nats: ") for line in agents.fleet.log.splitlines()]
        said = Counter(text for head, _, text in lines if text and " info " not in head)
        assert said, agents.fleet.log
        assert max(said.values()) == 1, "what fails again and again is said once"
        assert len(said) < 10
        assert int(refused.headers["retry-after"]) > 0
        assert agents.own(STORED, outcome="refused") > 0
        stack.enter_context(nats.run())
        push(agents, health("n0", cluster="three"))
        wait_until(lambda: is_judge(agents, "three"))  # what was acknowledged before is there


def test_a_push_of_several_clusters_is_judged_under_each_of_them(tmp_path):
    nats = LocalNats(tmp_path)
    with nats.run(), running(config_of(nats)) as agents:
        bodies = [health(f"{name}-node", cluster=name) for name in ("east", "a b/ü")]
        joined = {"resourceMetrics": [part for body in bodies for part in body["resourceMetrics"]]}
        push(agents, joined)

        def list_nodes(cluster):
            return [one["node_id"] for one in agents.admin("nodes", cluster_id=cluster)["nodes"]]

        def has_both():
            names = {one["cluster_id"] for one in agents.admin("clusters")["clusters"]}
            return names == {"east", "a b/ü"}

        wait_until(lambda: agents.own(JUDGED, outcome="live") == 2)
        assert has_both()
        assert list_nodes("east") == ["east-node"]
        assert list_nodes("a b/ü") == ["a b/ü-node"]
        assert agents.own("ingero_fleet_scores_total") == 2, "each node under its own cluster alone"


@pytest.mark.parametrize("step_s", [-7200, 7200])
def test_a_receiver_whose_clock_steps_takes_nothing_from_what_its_judge_knows(tmp_path, step_s):
    nats = LocalNats(tmp_path)
    with ExitStack() as stack:
        stack.enter_context(nats.run())
        config = config_of(nats)
        config["processors"]["nccl"]["judge_interval"] = "100ms"
        agents = stack.enter_context(running(config))

        def list_culprits():
            clusters = agents.admin("verdicts", cluster_id="c").get("clusters", [])
            verdicts = [one for cluster in clusters for one in cluster["verdicts"]]
            return [one["rank"]["rank"] for one in verdicts if one["verdict"] == "culprit"]

        def append(runs, received_wall_ns):
            body = encode_json(build_collectives(runs, SystemClock().wall_ns()))
            pushed = build_push(body, "c", received_wall_ns, signal="logs")
            asyncio.run(append_one(nats, pushed))

        append(job(slow=3), SystemClock().wall_ns())
        wait_until(lambda: list_culprits() == [3])
        append(job(n_ranks=2, comm="00000000000000bb"), SystemClock().wall_ns() + step_s * NS_PER_S)
        wait_until(lambda: agents.own(JUDGED, outcome="live") == 2)
        rounds = agents.own("ingero_fleet_nccl_judge_duration_seconds_count")
        wait_until(
            lambda: agents.own("ingero_fleet_nccl_judge_duration_seconds_count") >= rounds + 3
        )
        assert list_culprits() == [3]
        assert not agents.own("ingero_fleet_nccl_evicted_total", what="cluster")


async def append_one(nats, pushed):
    connection = NatsConnection(NatsConfig(servers=(nats.url,)), SystemClock())
    connection.open()
    try:
        await connection.wait()
        await connection.append(build_token(pushed.cluster_id), encode_push(pushed))
    finally:
        await connection.close()


@pytest.mark.parametrize(
    ("stored_s", "is_live", "dated_s"),
    [
        (50, False, 50),
        (50, True, 100),  # the server's clock is behind
        (95, True, 95),  # this Fleet is behind
        (130, True, 100),
        (130, False, 100),  # the server's clock is ahead
        (30, False, 40),  # and no push is before the one before it
    ],
)
def test_a_push_is_dated_by_the_servers_clock_as_far_as_it_can_be_true(stored_s, is_live, dated_s):
    clock = ManualClock(100 * NS_PER_S)
    offset_ns = clock.wall_ns() - clock.mono_ns()
    dating = StreamClock(clock)
    at_ns = dating.date(offset_ns + stored_s * NS_PER_S, 40 * NS_PER_S, is_live=is_live)
    assert at_ns == dated_s * NS_PER_S
    with dating.at(at_ns):
        assert (dating.mono_ns(), dating.wall_ns()) == (at_ns, offset_ns + at_ns)
    assert (dating.mono_ns(), dating.wall_ns()) == (clock.mono_ns(), clock.wall_ns())


def test_what_cannot_be_read_is_refused_before_it_is_stored(tmp_path):
    nats = LocalNats(tmp_path)
    with nats.run(), running(config_of(nats)) as agents:
        assert agents.push_raw(b"{").status_code == 400
        assert agents.own(STORED, outcome="stored") in {None, 0}


def build_push(body=b"{}", cluster="east", received_wall_ns=7, signal="metrics"):
    relayed = RelayedPush(0, 0, signal, "application/json", "", "", None, body)
    return LoggedPush(cluster, False, received_wall_ns, relayed)


@pytest.mark.parametrize("body", [b"{}", b"x" * 100_000])
def test_a_push_comes_out_of_the_stream_as_it_went_in(body):
    assert decode_push(encode_push(build_push(body))) == build_push(body)
    assert len(encode_push(build_push(body))) < 20_000


@pytest.mark.parametrize("stored", [b"", b"\x09abc", b"\x01abc", b"\x02abc"])
def test_what_is_no_push_is_said_to_be_none(stored):
    with pytest.raises(BadDataError):
        decode_push(stored)


@pytest.mark.parametrize(
    ("document", "read"),
    [
        (ClusterLedger({"a": "b"}, vocabulary=1), decode_ledger),
        (ClusterAnswers("east"), decode_answers),
    ],
)
def test_a_document_of_a_later_release_is_not_guessed_at(document, read, monkeypatch):
    assert read(encode_document(document)) == document
    with monkeypatch.context() as later:
        later.setattr(messages, "VERSION", 2)
        written = encode_document(document)
    with pytest.raises(BadDataError, match="later release: version 2"):
        read(written)


def test_clusters_whose_names_cannot_be_subjects_have_tokens_of_their_own():
    names = ["east", "a b", "a.b", "a*", "", "x" * 65, "=east"]
    tokens = [build_token(name) for name in names]
    assert tokens[0] == "east"
    assert len(set(tokens)) == len(names)
    assert not any(set(token) & set(" .*>") for token in tokens)


def test_fleet_accepts_the_settings_and_refuses_them_beside_workers(tmp_path):
    file = tmp_path / "fleet.json"
    config = config_of(LocalNats(tmp_path))
    config["service"]["storage"]["nats"]["servers"] = ["nats://10.0.0.7:4222"]
    file.write_text(json.dumps(config))
    accepted = CliRunner().invoke(cli, ["validate", str(file)])
    assert accepted.exit_code == 0, accepted.output
    config["service"]["workers"] = 2
    file.write_text(json.dumps(config))
    refused = CliRunner().invoke(cli, ["validate", str(file)])
    assert "service.workers: not together with storage.nats" in str(refused.exception)


def is_followed(agents):
    return agents.own("ingero_fleet_stream_followed_clusters") == 1


def has_followed(standby, judge):
    return standby.own(JUDGED, outcome="replayed") == judge.own(JUDGED, outcome="live")


def test_a_standby_takes_over_without_reading_the_stream_again_and_shows_nothing_before(tmp_path):
    nats = LocalNats(tmp_path)
    with ExitStack() as stack:
        stack.enter_context(nats.run())
        collector = stack.enter_context(open_collector())
        fleets = [stack.enter_context(running(config_of(nats, collector))) for _ in range(3)]
        for _ in range(4):
            push_all(fleets[0], "six")
        judge, others = find_judge(fleets, "six")
        standby = wait_until(lambda: next(filter(is_followed, others), None))
        push(judge, event("n3", 1, cluster="six"))
        push_all(judge, "six", [node for node in NODES if node != "n3"])
        opened = wait_until(lambda: list_episodes(collector))
        wait_until(lambda: has_followed(standby, judge))
        assert standby.admin("clusters")["clusters"] == []
        assert standby.admin("nodes", cluster_id="six").get("total") is None
        assert standby.admin("episodes")["episodes"] == []
        for name in (
            "ingero_fleet_known_nodes",
            "ingero_fleet_known_clusters",
            "ingero_fleet_scores_total",
        ):
            assert standby.own(name) in {None, 0}
        (third,) = (one for one in others if one is not standby)
        assert not is_followed(third)

        judge.fleet.signal(signal.SIGKILL)
        wait_until(lambda: is_judge(standby, "six"))
        assert "judging cluster six, of which 0 pushes were replayed" in standby.fleet.log
        push(third, event("n3", 0, cluster="six"))
        wait_until(lambda: len(list_episodes(collector)) > 1)
        assert list_episodes(collector) == [(opened[0][0], "open"), (opened[0][0], "resolved")]
        assert standby.own("ingero_fleet_known_nodes") == len(NODES)
        wait_until(lambda: is_followed(third))


def list_scores(collector):
    exports = [one.export for one in list(collector.requests) if one.signal is Signal.METRICS]
    return Counter(
        round(point.value, 4)
        for export in exports
        for point in iter_points(export)
        if point.name == "ingero.node.health_score"
    )


def test_what_the_judge_had_not_passed_on_is_passed_on_once_by_its_standby(tmp_path):
    nats = LocalNats(tmp_path)
    with ExitStack() as stack:
        stack.enter_context(nats.run())
        collector = stack.enter_context(open_collector())
        config = config_of(nats, collector)
        config["service"]["pipelines"]["metrics"]["exporters"] = ["otlphttp"]
        fleets = [stack.enter_context(running(config)) for _ in range(3)]
        sent = iter(round(0.8 + at / 1000, 4) for at in range(1000))
        pushed = []

        def push_next(agents):
            pushed.append(next(sent))
            push(agents, health("n0", pushed[-1], cluster="ten"))

        push_all(fleets[0], "ten", NODES[1:])
        push_next(fleets[0])
        judge, others = find_judge(fleets, "ten")
        standby = wait_until(lambda: next(filter(is_followed, others), None))
        (third,) = (one for one in others if one is not standby)
        for _ in range(10):
            push_next(third)
        wait_until(lambda: len(list_scores(collector)) == 1 + len(pushed))  # n1 to n4 share one
        wait_until(lambda: has_followed(standby, judge))  # the ledger's mark may be 0.2 s back
        judge.fleet.signal(signal.SIGSTOP)
        for _ in range(20):
            push_next(third)
        wait_until(lambda: is_judge(standby, "ten"))
        judge.fleet.signal(signal.SIGKILL)
        for _ in range(5):
            push_next(third)
        wait_until(lambda: len(list_scores(collector)) == 1 + len(pushed))
        found = list_scores(collector)
        assert {score: found[score] for score in pushed} == dict.fromkeys(pushed, 1)


def test_without_a_standby_another_fleet_reads_the_stream_from_its_beginning(tmp_path):
    nats = LocalNats(tmp_path)
    with ExitStack() as stack:
        stack.enter_context(nats.run())
        fleets = [stack.enter_context(running(config_of(nats, standby=False))) for _ in range(2)]
        push_all(fleets[0], "seven")
        judge, (other,) = find_judge(fleets, "seven")
        assert not is_followed(other)
        judge.fleet.signal(signal.SIGKILL)
        wait_until(lambda: is_judge(other, "seven"))
        assert f"of which {len(NODES)} pushes were replayed" in other.fleet.log


def test_a_cluster_whose_ledger_is_of_a_later_release_is_left_to_others(tmp_path):
    nats = LocalNats(tmp_path)
    later = messages._encoder.encode(ClusterLedger(version=messages.VERSION + 1))

    async def write():
        config = NatsConfig(servers=(nats.url,))
        connection = NatsConnection(config, SystemClock())
        connection.open()
        await connection.wait()
        await connection.write(connection.documents, LEDGER_KEY + "eight", later, 0)
        await connection.close()

    with nats.run(), running(config_of(nats)) as agents:
        asyncio.run(write())
        push_all(agents, "eight")
        push_all(agents, "nine")
        wait_until(lambda: is_judge(agents, "nine"))
        left = wait_until(
            lambda: [
                line for line in agents.fleet.log.splitlines() if "is left to other Fleets" in line
            ]
        )
        assert not is_judge(agents, "eight")
        assert len(left) == 1
        assert "version 2" in left[0]
        assert not is_followed(agents)
        assert agents.own("ingero_fleet_stream_leases_lost_total") == 0
