"""One tenant's reading starves nobody: real processes, real HTTP."""

import json
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

from tests.echo.service.conftest import ALL, ONE, TWO, gauge, metrics, resource
from tests.echo.serving import THREE, Asking, Served

from ingero.testing.waiting import wait_until

ENDLESS = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT 1 FROM r) SELECT count(*) FROM r"


def children_of(pid):
    """Processes below one, with the state that the kernel shows."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            found[int(stat.parent.name)] = (int(fields[1]), fields[0])
    below, grown = {pid}, True
    while grown:
        more = {one for one, (parent, state) in found.items() if parent in below and state != "Z"}
        grown = not more <= below
        below |= more
    return below - {pid}


def test_two_tenants_with_slow_sql_do_not_make_a_third_wait(tmp_path):
    with Served(tmp_path, sql_timeout="60s") as echo:
        slow = [Asking(echo.sql, ENDLESS, token) for token in (ONE, TWO) for _ in range(3)]
        while len(children_of(echo.process.pid)) < 3:  # the fork server and one statement of each
            os.sched_yield()
        answer = echo.sql("SELECT 41 + 1", THREE)
        assert answer.json()["rows"] == [[42]]
        assert echo.ask("fleet.cluster.summary", token=THREE).status_code == 200
        assert all(asking.is_alive() for asking in slow)
        # A second one of neither; that of the third may still be ending.
        wait_until(lambda: len(children_of(echo.process.pid)) == 3)
        os.kill(echo.process.pid, signal.SIGKILL)
        for asking in slow:
            asking.join()


def test_a_statement_waits_for_its_turn_only_so_long(tmp_path):
    with Served(tmp_path, sql_timeout="60s", queue_timeout="300ms", max_in_flight=100) as echo:
        first = Asking(echo.sql, ENDLESS, ONE)
        while len(children_of(echo.process.pid)) < 2:
            os.sched_yield()
        late = echo.sql("SELECT 1", ONE)
        assert (late.status_code, late.json()["code"]) == (503, "busy")
        assert int(late.headers["retry-after"]) >= 1
        assert first.is_alive()
        os.kill(echo.process.pid, signal.SIGKILL)
        first.join()


def test_a_client_that_leaves_takes_its_statements_with_it(tmp_path):
    body = json.dumps({"sql": ENDLESS})
    request = (
        f"POST /api/v2/sql HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ONE}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()
    with Served(tmp_path, sql_timeout="50s", queue_timeout="50s") as echo:
        links = []
        for _ in range(4):  # one runs, the others wait
            links.append(socket.create_connection(("127.0.0.1", echo.api)))
            links[-1].sendall(request)
        while len(children_of(echo.process.pid)) < 2:
            os.sched_yield()
        for link in links:
            link.close()
        assert echo.sql("SELECT 1", ONE).json()["rows"] == [[1]]
        while len(gone := [line["status"] for line in echo.audit() if "sql" in line["path"]]) < 5:
            os.sched_yield()  # a line follows its answer
        assert sorted(gone) == [200, 499, 499, 499, 499]  # not one ran to its end
        while len(children_of(echo.process.pid)) > 1:  # the last one is reaped soon
            os.sched_yield()


def large_rows(cluster, n, n_bytes):
    now_ns = time.time_ns()
    points = [gauge("large", float(i), now_ns - i, text=f"{i}" + "x" * n_bytes) for i in range(n)]
    return metrics([(resource(cluster, f"{cluster}-n1"), points)])


def test_a_statement_that_wants_too_many_bytes_is_told_so_and_nobody_else_notices(tmp_path):
    with Served(tmp_path, "--memory-limit", "192MiB", sql_max_bytes_in="16MiB") as echo:
        for _ in range(8):
            assert echo.push(large_rows("c1", 4000, 2000), ONE).status_code == 200
        greedy = [
            Asking(echo.sql, "SELECT attributes FROM events ORDER BY attributes LIMIT 1", ONE)
            for _ in range(6)
        ]
        pushed = [echo.push(large_rows("c2", 100, 10), TWO).status_code for _ in range(40)]
        assert set(pushed) == {200}
        assert echo.ask("fleet.cluster.summary", token=TWO).status_code == 200
        for asking in greedy:
            asking.join()
            assert asking.answer.status_code == 400, asking.answer.text
            assert asking.answer.json()["code"] == "sql_input_too_large"
            assert "more than 16 MiB of your rows: narrow the window" in asking.answer.text
        narrow = echo.sql("SELECT count(*), max(value_double) FROM events", ONE).json()
        assert narrow["rows"] == [[32_000, 3999.0]]


def test_rows_that_a_statement_did_not_see_are_counted(tmp_path):
    with Served(tmp_path, sql_max_rows_in=100) as echo:
        now_ns = time.time_ns()
        points = [gauge("m", float(i), now_ns - 10**9 * (i // 3)) for i in range(250)]
        resources = [(resource("c1", f"n{i}"), [point]) for i, point in enumerate(points)]
        assert echo.push(metrics(resources), ONE).status_code == 200
        answer = echo.sql("SELECT count(*), max(value_double) FROM events", ONE).json()
        assert (answer["rows"], answer["n_unseen"]) == ([[100, 99.0]], 150)
        few = echo.sql("SELECT count(*) FROM events", ONE, time_window="10s").json()
        assert few["n_unseen"] == 0
        assert echo.sql("SELECT 1", ALL).json()["n_unseen"] == 0
