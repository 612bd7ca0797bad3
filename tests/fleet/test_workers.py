"""The real program with `service.workers: 2`: the same answers, one set of counters, and no push lost with a worker."""

import asyncio
import http.client
import json
import signal
import threading
from contextlib import contextmanager

import grpc
import psutil
import pytest
import yaml
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from tests.e2e.agents import JSON, Agents, find_series, health, told

from ingero.errors import IngeroError
from ingero.fleet.component import WITHHELD, PushAnswer
from ingero.fleet.receivers.otlp.relayed import RelayedIntake
from ingero.fleet.workers.messages import (
    READ_WORKER,
    FrameBuffer,
    RelayedAnswer,
    RelayedPush,
    WorkerReady,
    encode_frame,
    pack_threshold,
    unpack_threshold,
)
from ingero.otlp.codec import decode_export
from ingero.otlp.names import Signal
from ingero.serving.otlp.answers import AnswerStatus
from ingero.serving.otlp.handler import OtlpRequest
from ingero.testing.fleet import build_fleet_config, run_fleet, wait_for_line
from ingero.testing.waiting import wait_until
from ingero.wire.names import Header

HTTP, OWN = "receivers.otlp http", "service.telemetry.metrics"
REFUSED = "ingero_fleet_receiver_refused_requests_total"
POINTS = "otelcol_receiver_accepted_metric_points_total"


def config_of(**service):
    config = build_fleet_config({"max_expected_nodes": 100}, nccl={})
    config["service"] |= {"workers": 2, **service}
    return config


@contextmanager
def running(config):
    with run_fleet(config) as fleet:
        agents = Agents(fleet)
        try:
            yield agents
        finally:
            agents.client.close()


@pytest.fixture(scope="module")
def agents():
    with running(config_of()) as found:
        yield found


def list_workers(agents):
    return psutil.Process(agents.fleet.process.pid).children()


def read_series(agents, name, **labels):
    return find_series(agents.metrics(OWN), name, **labels)


def sum_points(agents):
    return sum(read_series(agents, POINTS, transport=one) for one in ("http", "grpc"))


def post(agents, content, headers=JSON, query="", method="POST"):
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection(agents.fleet.addresses[HTTP], timeout=120)
    try:
        connection.request(method, f"/v1/metrics{query}", content, headers)
        answer = connection.getresponse()
        answer.read()
    finally:
        connection.close()
    return answer


def push_from_many(agents, cluster, n_connections=20):
    """One push on each of many connections, of which each worker gets some; the last answer of each."""
    bodies = [json.dumps(health(f"n{at}", cluster=cluster)) for at in range(n_connections)]
    return [post(agents, body) for body in bodies]


def test_every_worker_answers_with_the_threshold_that_knows_the_push(agents):
    answers = push_from_many(agents, "spread")
    assert [answer.status for answer in answers] == [200] * 20
    assert {told(answer) for answer in answers[4:]} == {(0.89, "true")}
    assert "x-ingero-threshold" not in answers[3].headers
    assert all(worker.net_connections() for worker in list_workers(agents))
    assert agents.admin("nodes", cluster_id="spread")["total"] == 20


def test_grpc_is_answered_through_the_judge_too(agents):
    push_from_many(agents, "rpc", 5)
    content = json.dumps(health("n9", cluster="rpc")).encode()
    message = decode_export(content, Signal.METRICS, "application/json").message
    with grpc.insecure_channel(agents.fleet.addresses["receivers.otlp grpc"]) as channel:
        _, call = MetricsServiceStub(channel).Export.with_call(message, timeout=120)
    assert dict(call.initial_metadata())["ingero-threshold"] == "0.890000"
    assert read_series(agents, POINTS, transport="grpc") > 0


def test_an_answer_that_the_judge_never_saw_has_the_threshold_of_its_cluster(agents):
    push_from_many(agents, "seen", 5)

    def ask():
        wrong = {"content-type": "text/html"}
        answers = [post(agents, b"x", wrong, "?cluster_id=seen") for _ in range(8)]
        assert {answer.status for answer in answers} == {415}
        return all("x-ingero-threshold" in answer.headers for answer in answers) and answers

    assert {told(answer) for answer in wait_until(ask)} == {(0.89, "true")}


def test_refusals_of_all_workers_and_of_the_judge_are_counted_once_each(agents):
    packed = {**JSON, "content-encoding": "gzip"}
    for _ in range(12):
        assert post(agents, b"{").status == 400
        assert post(agents, b"not gzip", packed).status == 400
        assert post(agents, b"", method="PUT").status == 405

    def count(reason):
        return read_series(agents, REFUSED, transport="http", reason=reason)

    assert wait_until(lambda: count("method") >= 12 and count("bad_body") >= 24)
    assert (count("method"), count("bad_body")) == (12, 24)


def test_memory_and_workers_are_told_for_all_processes(agents):
    processes = [psutil.Process(agents.fleet.process.pid), *list_workers(agents)]
    assert len(processes) == 3
    told_bytes = wait_until(lambda: read_series(agents, "otelcol_process_memory_rss_bytes"))
    seen_bytes = sum(process.memory_info().rss for process in processes)
    assert told_bytes == pytest.approx(seen_bytes, rel=0.2)
    assert read_series(agents, "ingero_fleet_workers") == 2


def test_a_worker_that_is_killed_is_replaced_and_nothing_acknowledged_is_lost():
    with running(config_of()) as agents:
        n_taken, stop = [0, 0], threading.Event()
        bodies = [json.dumps(health(f"n{at}", cluster="c")).encode() for at in range(5)]
        n_points = decode_export(bodies[0], Signal.METRICS, "application/json").n_items

        def push(at):
            while not stop.is_set():
                for body in bodies:
                    try:
                        n_taken[at] += post(agents, body).status == 200
                    except (OSError, http.client.HTTPException):
                        continue

        pushers = [threading.Thread(target=push, args=(at,)) for at in range(2)]
        for pusher in pushers:
            pusher.start()
        try:
            wait_until(lambda: min(n_taken) > 5)
            victim = list_workers(agents)[0]
            victim.kill()
            wait_for_line(agents.fleet, f"worker {victim.pid} ended (status -9)")
            wait_until(lambda: read_series(agents, "ingero_fleet_workers") == 2)
            n_before = sum(n_taken)
            wait_until(lambda: sum(n_taken) > n_before + 10)
        finally:
            stop.set()
            for pusher in pushers:
                pusher.join()
        assert read_series(agents, "ingero_fleet_worker_restarts_total") == 1
        assert victim.pid not in {worker.pid for worker in list_workers(agents)}
        assert sum_points(agents) >= sum(n_taken) * n_points
        assert told(post(agents, bodies[0])) == (0.89, "true")
        left = list_workers(agents)
        agents.fleet.process.kill()
        psutil.wait_procs(left, timeout=120)
        assert not any(worker.is_running() for worker in left), "workers end with their judge"


def test_a_reload_keeps_scores_and_tokens_and_the_end_leaves_no_process(tmp_path):
    file = tmp_path / "fleet.yaml"
    config = config_of()
    config["extensions"]["bearertokenauth"] = {"token": "sesame"}
    config["service"]["extensions"] = ["ingero_threshold", "bearertokenauth"]
    config["receivers"]["otlp"]["protocols"]["http"]["auth"] = {"authenticator": "bearertokenauth"}
    file.write_text(yaml.safe_dump(config))
    known = {**JSON, "authorization": "Bearer sesame"}
    bodies = [json.dumps(health(f"n{at}", cluster="c")) for at in range(5)]
    with running(file) as agents:
        assert [post(agents, body, known).status for body in bodies] == [200] * 5
        first = list_workers(agents)
        config["service"]["shutdown_timeout"] = "20s"
        file.write_text(yaml.safe_dump(config))
        agents.fleet.signal(signal.SIGHUP)
        agents.fleet.wait_until_ready(2)
        assert not any(worker.is_running() for worker in first)
        assert told(post(agents, bodies[1], known)) == (0.89, "true")
        stranger = post(agents, bodies[1], query="?cluster_id=c")
        assert (stranger.status, told(stranger)) == (401, None)
        workers = list_workers(agents)
        assert len(workers) == 2
        agents.fleet.signal(signal.SIGTERM)
        assert agents.fleet.wait(120) == 0
        assert not any(worker.is_running() for worker in workers)


def test_what_a_worker_cannot_open_ends_the_start_with_its_reason(tmp_path):
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("no certificate")
    config = config_of()
    tls = {"cert_file": str(tmp_path / "cert.pem"), "key_file": str(tmp_path / "key.pem")}
    config["receivers"]["otlp"]["protocols"]["http"]["tls"] = tls
    with pytest.raises(IngeroError, match=r"receivers\.otlp: .*cert\.pem"), run_fleet(config):
        pass


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
def test_frames_are_found_however_they_are_cut(step):
    pushes = [RelayedPush(at, 0, "metrics", "t", "c", "", None, b"x" * at) for at in (0, 5, 300)]
    stream = encode_frame(pushes[:2]) + encode_frame([WorkerReady()]) + encode_frame(pushes[2:])
    buffer, found = FrameBuffer(), []
    for start in range(0, len(stream), step):
        for frame in buffer.add(stream[start : start + step]):
            found += READ_WORKER.decode(frame)
    assert found == [*pushes[:2], WorkerReady(), pushes[2]]


class Asking:
    """A way to the judge, which answers every push with a question."""

    def submit(self, push, on_answer):
        on_answer(RelayedAnswer(push.number, "TAKEN", threshold=(0.5, True), question="why"))
        return True


def test_what_the_judge_asks_a_node_rides_the_answer():
    async def take():
        intake = RelayedIntake(None, Asking(), 0, None, 100)
        request = OtlpRequest(transport="grpc", content_type="application/x-protobuf")
        request.context = intake.open(request)
        assert (await intake.take(request, b"")).status is AnswerStatus.TAKEN
        return dict(intake.find_headers(request).metadata)

    metadata = asyncio.run(take())
    assert metadata[Header.GRPC_DIAGNOSE] == "why"
    assert metadata[Header.GRPC_THRESHOLD] == "0.500000"


def test_a_withheld_threshold_arrives_as_itself():
    assert unpack_threshold(pack_threshold(WITHHELD)) is WITHHELD
    assert unpack_threshold(pack_threshold(None)) is None
    answer = PushAnswer(0.123456789, quorum_met=True)
    assert unpack_threshold(pack_threshold(answer)) == answer
