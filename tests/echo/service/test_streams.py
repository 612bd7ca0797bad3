"""Rows in lines and as Arrow: the same as in JSON, batch by batch, and a slow client holds nobody up."""

import datetime as dt
import http.client
import json
import math
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pyarrow as pa
import pytest
from tests.echo.service.conftest import ALL, ONE, TWO, ask, bearers, result, sql
from tests.support import local_http
from tests.support.echo import RunningEcho

from ingero.echo.db.rows import Rows
from ingero.echo.queries.analysis import RUN_ANALYSIS
from ingero.echo.queries.catalog import QUERIES
from ingero.echo.schema.tables import EVENTS, LOGS
from ingero.echo.service.formats import NdjsonFormat, choose_format
from ingero.testing.waiting import wait_until

LINES, ARROW = "application/x-ndjson", "application/vnd.apache.arrow.stream"
N_METRICS = 40_000
STREAMED = [query for query in QUERIES if query.name != RUN_ANALYSIS.name]
FIXED = {"until": "2100-01-01T00:00:00Z", "time_window": "30000d"}
NODE = "fleet.cluster.node_detail"


def many(cluster, n):
    """A node with so many metrics that their rows fill every buffer on the way to a client."""
    rows = Rows(n_rows=n)
    table = rows.table(EVENTS)
    at = dt.datetime.now(dt.UTC).replace(tzinfo=None) - dt.timedelta(minutes=1)
    for i in range(n):
        name = f"m{i:06}" + "x" * 200
        values = (at, cluster, "n1", name, float(i), None, "gauge", "1", "{}", None)
        table.add(hash(cluster) % 2**63, i, values)
    return rows


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    settings = {"rate_per_second": 100_000, "rate_burst": 100_000, "readers": 2}
    with RunningEcho(tmp_path_factory.mktemp("large") / "echo.db", bearers(), settings) as echo:
        echo.service.store.write(many("c1", N_METRICS))
        echo.service.store.write(many("c2", 1))
        yield echo


def readers(echo):
    return echo.service.store.backend.readers


class SlowClient:
    """Asks, reads the head of the answer and then nothing until told."""

    def __init__(self, echo, accept, token=ONE):
        small = socket.socket()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        small.settimeout(60)
        small.connect(("127.0.0.1", echo.at.mcp.port))
        self.connection = http.client.HTTPConnection("127.0.0.1", echo.at.mcp.port)
        self.connection.sock = small
        body = json.dumps({"args": {"node_id": "n1"}, "max_rows": N_METRICS})
        headers = {
            "authorization": f"Bearer {token}",
            "accept": accept,
            "content-type": "application/json",
        }
        self.connection.request("POST", f"/api/v2/tools/{NODE}", body, headers)
        self.answer = self.connection.getresponse()
        assert self.answer.status == 200

    def read_rest(self):
        """The body, and whether it is complete."""
        try:
            return self.answer.read(), True
        except http.client.IncompleteRead as cut:
            return cut.partial, False

    def close(self):
        self.answer.close()
        self.connection.close()


@pytest.fixture
def open_client(large):
    clients = []

    def connect(accept, token=ONE):
        clients.append(SlowClient(large, accept, token))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
    wait_until(lambda: not readers(large)._active)


def wait_until_stalled(echo, n_streams=1):
    """Every stream's thread waits for its client."""

    wait_until(lambda: len(readers(echo)._active) == n_streams)


@pytest.mark.parametrize("query", STREAMED, ids=lambda query: query.name)
def test_every_tool_gives_the_same_rows_in_each_form(site, query):
    args = FIXED | ({"node_id": "c1-n3"} if query.name == NODE else {})
    whole = result(site, query.name, args)
    lines = ask(site, query.name, args, accept=LINES)
    assert lines.headers["content-type"] == LINES
    assert [json.loads(line) for line in lines.text.splitlines()] == whole["rows"]
    head = {name: whole[name] for name in ("window", "coverage", "n_cut")}
    assert json.loads(lines.headers["x-ingero-answer"]) == head
    arrow = ask(site, query.name, args, accept=ARROW)
    table = pa.ipc.open_stream(arrow.content).read_all()
    assert "error" not in table.column_names  # a line with that key is no row
    told = json.loads(msgspec.json.encode(table.to_pylist()))
    assert told == whole["rows"]
    frame = json.loads(table.schema.metadata[b"ingero.answer"])
    assert frame == {name: value for name, value in whole.items() if name != "rows"}


def test_an_answer_without_rows_still_has_its_columns_and_its_coverage(site):
    args = {"until": "2020-01-01T00:00:00Z"}
    arrow = ask(site, "fleet.cluster.timeline", args, accept=ARROW)
    table = pa.ipc.open_stream(arrow.content).read_all()
    assert table.num_rows == 0
    assert table.schema.field("start").type == pa.timestamp("us", tz="UTC")
    assert table.schema.field("n_points").type == pa.int64()
    lines = ask(site, "fleet.cluster.timeline", args, accept=LINES)
    assert lines.content == b""
    assert json.loads(lines.headers["x-ingero-answer"])["coverage"]["n_rows"] == 0


def test_more_rows_than_json_may_have_come_in_batches(large):
    body = {"args": {"node_id": "n1", "cluster_id": "c1"}, "max_rows": 30_000}
    answer = local_http.post(
        f"{large.url}/api/v2/tools/{NODE}",
        json=body,
        headers={"authorization": f"Bearer {ALL}", "accept": ARROW},
        timeout=120,
    )
    assert json.loads(answer.headers["x-ingero-answer"])["n_cut"] == N_METRICS - 30_000
    reader = pa.ipc.open_stream(answer.content)
    sizes, values = [], []
    for batch in reader:
        sizes.append(batch.num_rows)
        values += batch.column("last").to_pylist()
    assert values == [float(i) for i in range(30_000)]
    assert len(sizes) > 10
    assert max(sizes) <= 2048


@pytest.mark.parametrize("max_rows", [0, 1_000_001, "many"])
def test_a_wrong_max_rows_is_refused(site, max_rows):
    answer = local_http.post(
        f"{site.url}/api/v2/tools/fleet.cluster.summary",
        json={"args": {}, "max_rows": max_rows},
        headers={"authorization": f"Bearer {ALL}", "accept": LINES},
    )
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_arguments")


def test_what_fails_before_the_first_row_is_an_ordinary_error(site):
    foreign = ask(site, "fleet.cluster.summary", {"cluster_id": "c2"}, ONE, accept=ARROW)
    assert (foreign.status_code, foreign.json()["code"]) == (403, "tenant_scoped_bearer_refused")
    wrong = ask(site, "fleet.cluster.summary", {"limit": 0}, accept=LINES)
    assert (wrong.status_code, wrong.json()["code"]) == (400, "invalid_arguments")
    unknown = ask(site, "fleet.cluster.nothing", accept=LINES)
    assert (unknown.status_code, unknown.json()["code"]) == (404, "tool_not_found")


def test_a_bearer_streams_its_own_clusters_only(site):
    lines = ask(site, "fleet.cluster.summary", FIXED, TWO, accept=LINES).text.splitlines()
    assert [json.loads(line)["cluster_id"] for line in lines] == ["c2"]


def test_while_a_client_is_slow_rows_are_written_and_others_are_answered(large, open_client):
    client = open_client(LINES)
    wait_until_stalled(large)
    before = large.service.store.counters.written
    rows = Rows(n_rows=1)
    at = dt.datetime.now(dt.UTC).replace(tzinfo=None)
    series = time.time_ns()
    rows.table(EVENTS).add(series, 1, (at, "c9", "n9", "m", 1.0, None, "gauge", "1", "{}", None))
    large.service.store.write(rows)
    assert large.service.store.counters.written == before + 1
    large.service.store.call(lambda connection: connection.execute("CHECKPOINT")).result()
    assert result(large, "fleet.cluster.summary", {}, ONE)["rows"][0]["cluster_id"] == "c1"
    assert len(readers(large)._active) == 1  # it still waits
    body, is_complete = client.read_rest()
    lines = body.splitlines()
    assert is_complete
    assert len(lines) == N_METRICS
    assert json.loads(lines[-1])["last"] == N_METRICS - 1


def test_one_bearers_slow_clients_leave_a_place_to_the_others(large, open_client):
    client = open_client(LINES)
    wait_until_stalled(large)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(open_client, LINES)
        wait_until(lambda: max(large.service.listeners.api.admission.in_flight.values()) == 2)
        answer = ask(large, "fleet.cluster.summary", FIXED, TWO, accept=LINES)
        assert json.loads(answer.text)["cluster_id"] == "c2"
        assert not second.done()
        client.close()
        assert second.result().answer.status == 200


def test_closing_the_database_does_not_wait_for_a_slow_client_which_is_told_in_its_last_line(
    large, open_client
):
    client = open_client(LINES)
    wait_until_stalled(large)
    connection = readers(large)._connection
    readers(large).detach()
    readers(large).attach(connection)
    body, is_complete = client.read_rest()
    *lines, last = body.splitlines()
    assert is_complete
    assert json.loads(last)["code"] == "query_timeout"
    assert set(json.loads(last)) == {"error", "code"}
    assert 0 < len(lines) < N_METRICS
    assert all("metric_name" in json.loads(line) for line in lines)


def test_an_arrow_answer_that_breaks_off_says_so_in_its_last_batch_and_is_cut_off(
    large, open_client
):
    client = open_client(ARROW)
    wait_until_stalled(large)
    connection = readers(large)._connection
    readers(large).detach()
    readers(large).attach(connection)
    body, is_complete = client.read_rest()
    assert not is_complete
    reader = pa.ipc.open_stream(body)
    n_rows, said = 0, None
    while said is None:
        batch, said = reader.read_next_batch_with_custom_metadata()
        n_rows += batch.num_rows
    assert said["code"] == b"query_timeout"
    assert batch.num_rows == 0
    assert 0 < n_rows < N_METRICS


def test_a_client_that_goes_away_frees_its_reader(large, open_client):
    client = open_client(LINES)
    wait_until_stalled(large)
    client.close()
    wait_until(lambda: not readers(large)._active)


def read_chunks(answer):
    """Sizes of the pieces that a body was sent in, and the body."""
    sizes, body = [], b""
    while size := int(answer.fp.readline(), 16):
        sizes.append(size)
        body += answer.fp.read(size + 2)[:-2]
    return sizes, body


@pytest.mark.parametrize("accept", [LINES, ARROW])
def test_rows_of_a_megabyte_are_sent_a_few_at_a_time(open_echo, accept):
    echo = open_echo()
    n, text, rows = 24, "y" * (1 << 20), Rows(n_rows=24)
    at = dt.datetime.now(dt.UTC).replace(tzinfo=None) - dt.timedelta(minutes=1)
    for i in range(n):
        known = {"ts": at, "cluster_id": "c1", "node_id": "n1", "event_name": "ingero.remediation"}
        known |= {"body": f"{i} {text}", "attributes": "{}"}
        rows.table(LOGS).add(7 + i, i, [known.get(name) for name in LOGS.names])
    echo.service.store.write(rows)
    connection = http.client.HTTPConnection("127.0.0.1", echo.at.mcp.port, timeout=60)
    headers = {
        "authorization": f"Bearer {ONE}",
        "accept": accept,
        "content-type": "application/json",
    }
    asked = json.dumps({"args": {}, "max_rows": 100})
    connection.request("POST", "/api/v2/tools/fleet.cluster.remediation", asked, headers)
    sizes, body = read_chunks(connection.getresponse())
    connection.close()
    assert max(sizes) < 5 << 20
    if accept == LINES:
        notes = [json.loads(line)["note"] for line in body.splitlines()]
    else:
        notes = pa.ipc.open_stream(body).read_all()["note"].to_pylist()
    assert sorted(notes) == sorted(f"{i} {text}" for i in range(n))


def test_sql_rows_come_in_each_form_also_those_of_mixed_kinds(site):
    text = (
        "SELECT 1 AS a, 'x' AS a, 2 AS a_2, 170141183460469231731687303715884105727::HUGEINT AS big"
    )
    headers = {"authorization": f"Bearer {ALL}"}
    url = f"{site.url}/api/v2/sql"
    lines = local_http.post(
        url, json={"sql": text}, headers=headers | {"accept": LINES}, timeout=120
    )
    whole = sql(site, text).json()
    assert whole["columns"] == ["a", "a_3", "a_2", "big"]
    assert json.loads(lines.text) == dict(zip(whole["columns"], whole["rows"][0], strict=True))
    arrow = local_http.post(
        url, json={"sql": text}, headers=headers | {"accept": ARROW}, timeout=120
    )
    table = pa.ipc.open_stream(arrow.content).read_all()
    assert table.column_names == whole["columns"]
    assert table.column("a").to_pylist() == [1]


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("", None),
        ("*/*", None),
        ("text/html", None),
        ("application/json", None),
        (LINES, LINES),
        (f"{ARROW};q=0.5, {LINES}", LINES),
        (f"{LINES};q=0.5, {ARROW};q=0.9", ARROW),
        (f"application/json, {LINES}", None),
        (f"{LINES};q=0, */*;q=0.1", None),
        (f"{LINES};q=much", None),
        ("APPLICATION/X-NDJSON , text/html", LINES),
    ],
)
def test_the_form_is_what_accept_likes_best(accept, chosen):
    form = choose_format(accept)
    assert (None if form is None else form.media_type) == chosen


def test_what_json_cannot_say_is_null_in_lines():
    batch = pa.RecordBatch.from_pydict({"a": [math.nan, math.inf]})
    assert NdjsonFormat().write(batch) == b'{"a":null}\n{"a":null}\n'
