"""A judge that is killed between sending a report and confirming it: Echo has the report once, and its end too."""

import signal
import threading
import time
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.e2e.agents import find_series
from tests.e2e.test_collectives import PROTOBUF
from tests.fleet.processors.collectives.judged import job
from tests.fleet.test_jetstream import config_of, find_judge, is_followed, push_all, running
from tests.support import local_http
from tests.support.echo import RunningEcho

from ingero.config.acl import AclEntry
from ingero.errors import UnsupportedError
from ingero.model.collectives import CollectiveOp
from ingero.model.progress import RankProgress
from ingero.otlp.codec import decode_export, encode_protobuf, iter_log_rows
from ingero.otlp.names import Signal
from ingero.sim.local_nats import LocalNats, find_nats_server
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_S
from ingero.wire.collectives import build_collectives
from ingero.wire.progress import build_progress
from ingero.wire.record_uids import RECORD_UID

pytestmark = pytest.mark.slow
TOKEN = "f" * 32
AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(autouse=True)
def server():
    try:
        find_nats_server()
    except UnsupportedError as error:
        pytest.skip(str(error))


class Gate(ThreadingHTTPServer):
    """Hands logs on to an Echo; the first record that is waited for is stored there, and its sender is killed."""

    daemon_threads = True

    def __init__(self, echo):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = f"http://127.0.0.1:{echo.at.otlp_http.port}"
        self.passed, self.is_awaited, self.kill = [], None, None
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def count(self, is_meant):
        return sum(map(is_meant, list(self.passed)))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        gate = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        names = ("Content-Type", "Content-Encoding")
        headers = {name: self.headers[name] for name in names if name in self.headers}
        answer = local_http.post(
            gate.target + self.path,
            content=body,
            headers=headers | AUTHORIZED,
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        rows = list(iter_log_rows(decode_export(body, Signal.LOGS, headers["Content-Type"])))
        if gate.kill is not None and any(map(gate.is_awaited, rows)):
            kill, gate.kill = gate.kill, None
            kill()
            self.close_connection = True
        else:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
        gate.passed += rows

    def log_message(self, *_):
        pass


class Site:
    """Two Fleets that judge by turns, and an Echo behind a gate."""

    def __init__(self, stack, folder):
        nats = LocalNats(folder / "nats")
        (folder / "nats").mkdir()
        stack.enter_context(nats.run())
        limits = {"rate_per_second": 100_000, "rate_burst": 100_000}
        acl = [AclEntry("fleet", TOKEN, None)]
        self.echo = stack.enter_context(RunningEcho(folder / "echo.db", acl, limits))
        self.gate = Gate(self.echo)
        stack.callback(self.gate.server_close)
        stack.callback(self.gate.shutdown)
        config = config_of(nats, self.gate)
        config["exporters"]["otlphttp"]["compression"] = "none"
        config["processors"]["nccl"] = {"judge_interval": "100ms", "reorder_window": "100ms"}
        fleets = [stack.enter_context(running(config)) for _ in range(2)]
        push_all(fleets[0], "c")
        self.judge, (self.heir,) = find_judge(fleets, "c")
        wait_until(lambda: is_followed(self.heir))

    def kill_when_stored(self, is_awaited):
        """Kill the judge when Echo has this record and before its sender knows."""
        self.gate.is_awaited = is_awaited
        self.gate.kill = lambda: self.judge.fleet.signal(signal.SIGKILL)

    def push(self, export):
        def try_once():
            return self.heir.push_raw(body, PROTOBUF, path="/v1/logs").status_code == 200

        body = encode_protobuf(export)
        wait_until(try_once)

    def ask(self, sql):
        answer = local_http.post(
            f"{self.echo.url}/api/v2/tools/fleet.cluster.run_analysis",
            json={"args": {"cluster_id": "c", "sql": sql}},
            headers=AUTHORIZED,
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["result"]["rows"]


def test_a_verdict_whose_judge_was_killed_before_it_knew_that_it_had_left_is_in_echo_once(tmp_path):
    def is_culprit(row):
        return row.attributes.get("ingero.verdict.kind") == "culprit"

    with ExitStack() as stack:
        site = Site(stack, tmp_path)
        site.kill_when_stored(is_culprit)
        site.push(build_collectives(job(slow=5), time.time_ns()))
        wait_until(lambda: site.gate.count(is_culprit) == 2)
        wait_until(lambda: site.heir.own("ingero_fleet_stream_takeovers_total"))
        found = site.ask(
            "SELECT node_id, count(*) FROM verdicts WHERE verdict = 'culprit' GROUP BY ALL"
        )
        assert found == [["node5", 1]]
        first, second = filter(is_culprit, site.gate.passed)
        assert first.attributes[RECORD_UID] == second.attributes[RECORD_UID]
        said = "SELECT count(*), count(DISTINCT node_id || verdict || coalesce(before, '')) FROM verdicts"
        ((n_rows, n_different),) = site.ask(said)
        assert n_rows == n_different
        text = local_http.get(f"{site.echo.url}/metrics", headers=AUTHORIZED).text
        assert find_series(text, "ingero_echo_rows_total", outcome="repeated") > 0


def standing(run, seq):
    return RankProgress(
        run.rank, run.comm, run.comm_rank, run.n_ranks, entered=seq - (run.comm_rank == 2),
        left=seq - 1, op=CollectiveOp.ALL_REDUCE, still_ns=300 * NS_PER_S,
    )  # fmt: skip


def test_a_hang_that_ended_while_nobody_judged_is_not_open_in_echo_for_ever(tmp_path):
    def is_hang(row):
        return row.event_name == "ingero.hang"

    with ExitStack() as stack:
        site = Site(stack, tmp_path)
        site.kill_when_stored(is_hang)
        runs = job()
        site.push(build_collectives(runs, time.time_ns()))
        site.push(build_progress([standing(run, 201) for run in runs], time.time_ns()))
        wait_until(lambda: site.gate.count(is_hang))
        for run in runs:
            run.ops["seq"] += 200
            run.ops["entry_ns"] += 10 * NS_PER_S
        site.push(build_collectives(runs, time.time_ns()))

        def find_states():
            return site.ask("SELECT state FROM hangs ORDER BY ts")

        wait_until(lambda: len(find_states()) > 1)
        assert find_states() == [["began"], ["ended"]]
