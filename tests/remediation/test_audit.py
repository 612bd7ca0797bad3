"""The journal's entries in a real Echo: all of them, once each, whatever happened on the way."""

import json
import sqlite3
from contextlib import ExitStack
from threading import Event, Thread

import pytest
from tests.remediation.live import run_job
from tests.remediation.site import Site, build_config
from tests.support import local_http
from tests.support.echo import RunningEcho

from ingero.cli.main import run_program
from ingero.cli.programs.remediator import cli
from ingero.config.acl import AclEntry
from ingero.config.model import parse_model
from ingero.remediation.audit import AuditSender
from ingero.remediation.config import AuditConfig
from ingero.remediation.journal import Journal
from ingero.remediation.page import RemediatorPage
from ingero.sim.launcher import launch
from ingero.telemetry.clock import SystemClock
from ingero.testing.clock import ManualClock
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_S

BEARER = "audit-" + "a" * 28


@pytest.fixture
def echo(tmp_path):
    with RunningEcho(tmp_path / "echo.db", [AclEntry("operator", BEARER, None)]) as running:
        yield running


@pytest.fixture
def bearer(tmp_path):
    file = tmp_path / "bearer"
    file.write_text(BEARER + "\n")
    return file


@pytest.fixture
def site(tmp_path):
    an_hour_ago = ManualClock(wall_ns=SystemClock().wall_ns() - 3600 * NS_PER_S)
    return Site(tmp_path / "journal.db", build_config(), clock=an_hour_ago, is_audited=True)


@pytest.fixture
def sender(site, bearer):
    """Makes senders."""
    with ExitStack() as stack:

        def make(endpoint):
            config = parse_model(
                AuditConfig, {"endpoint": endpoint, "bearer_file": str(bearer), "interval": "1s"}
            )
            return stack.enter_context(AuditSender(config, site.path, SystemClock()))

        yield make


def endpoint_of(echo):
    return f"http://127.0.0.1:{echo.at.otlp_http.port}"


def ask(echo, tool="remediation", **args):
    answer = local_http.post(
        f"{echo.url}/api/v2/tools/fleet.cluster.{tool}",
        json={"args": {"time_window": "1d", **args}},
        headers={"authorization": f"Bearer {BEARER}"},
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["result"]["rows"]


def written(site):
    """What the journal's own tables say of actions: seq aside, what Echo should have."""
    return [
        (one["state"], one["note"])
        for action in site.journal.actions()
        for one in site.journal.changes(action.action_id)
    ]


def test_every_entry_is_in_echo_once_with_what_it_rested_on(site, echo, sender):
    site.poll(6, ["n2"])
    (action,) = site.journal.actions()
    away = sender("http://127.0.0.1:9")
    away.send_waiting(site.journal)
    assert (away.counts.n_sent, away.counts.n_failures) == (0, 1)
    n_waiting = site.journal.count_waiting()
    assert n_waiting > len(written(site))

    lost = sender(endpoint_of(echo))
    assert lost._send(site.journal.waiting_entries(100))  # killed before it could forget them
    again = sender(endpoint_of(echo))
    again.send_waiting(site.journal)
    assert (again.counts.n_sent, site.journal.count_waiting()) == (n_waiting, 0)
    rows = wait_until(lambda: ask(echo))
    assert [row["seq"] for row in rows] == list(range(n_waiting, 0, -1))

    states = [(row["state"], row["note"]) for row in reversed(rows) if row["entry"] == "action"]
    assert states == written(site)
    done = next(row for row in rows if row["state"] == "done")
    assert (done["action_id"], done["node_id"], done["target"], done["actuator"]) == (
        action.action_id, "n2", action.target, "slurm",
    )  # fmt: skip
    assert json.loads(done["evidence"]) == dict(action.evidence)
    assert json.loads(done["clauses"]) == [dict(clause) for clause in action.clauses]
    first = rows[-1]
    assert (first["entry"], first["action_id"]) == ("decision", None)
    assert "leaves n2 alone: stopped by" in first["note"]
    assert not all(clause["met"] for clause in json.loads(first["clauses"]))
    assert ask(echo, node_id="n3") == []
    assert {row["entry"] for row in ask(echo, action_id=action.action_id)} == {"action"}
    (shown,) = ask(echo, "anomaly_list")
    assert (shown["kind"], shown["node_id"]) == ("log:ingero.remediation", "n2")


def test_a_wrong_bearer_keeps_entries_waiting_until_it_is_right(site, echo, bearer, sender):
    site.poll(1, ["n2"])
    bearer.write_text("wrong-" + "b" * 28)
    audit = sender(endpoint_of(echo))
    audit.send_waiting(site.journal)
    bearer.unlink()
    audit.send_waiting(site.journal)
    assert (audit.counts.n_sent, audit.counts.n_failures) == (0, 2)
    page = RemediatorPage(site.remediator.counts, site.path, audit.counts).render()
    assert "ingero_remediator_audit_failures_total 2\n" in page
    assert "ingero_remediator_audit_waiting 1\n" in page
    bearer.write_text(BEARER)
    audit.send_waiting(site.journal)
    assert (audit.counts.n_sent, site.journal.count_waiting()) == (1, 0)


def test_a_journal_that_cannot_be_read_for_a_while_ends_no_audit(site, echo, sender):
    site.poll(6, ["n2"])
    aside = site.path.with_suffix(".aside")
    audit, stop = sender(endpoint_of(echo)), Event()
    site.journal.close()
    site.path.rename(aside)
    site.path.mkdir()  # SQLite opens no folder
    thread = Thread(target=audit.run, args=(stop,))
    thread.start()
    try:
        wait_until(lambda: audit.counts.n_failures)
        site.path.rmdir()
        aside.rename(site.path)
        wait_until(lambda: audit.counts.n_sent)
    finally:
        stop.set()
        thread.join()


def test_a_journal_from_before_the_audit_goes_on(site):
    site.poll(6, ["n2"])
    before = site.journal.actions()
    site.journal.close()
    with sqlite3.connect(site.path) as database:
        database.executescript(
            "DROP TABLE outbox; DROP TABLE pair_tests; ALTER TABLE actions DROP COLUMN asked_back; PRAGMA user_version = 1;"
        )
    database.close()
    with Journal(site.path, read_only=True) as journal:
        assert (journal.actions(), journal.count_waiting()) == (before, 0)
    with Journal(site.path, is_audited=True) as journal:
        assert (journal.actions(), journal.count_waiting()) == (before, 0)
        journal.put_finding(journal.findings()[0])
        assert journal.count_waiting() == 1
    with Journal(site.path) as journal:  # without an audit nothing piles up
        journal.put_finding(journal.findings()[0])
        assert journal.count_waiting() == 1


def test_a_missing_bearer_file_is_found_by_validate(tmp_path, capsys):
    file = tmp_path / "p.yaml"
    text = "action: {slurm: {}}\naudit: {endpoint: 'http://127.0.0.1:9', bearer_file: /nowhere}\n"
    file.write_text(text)
    assert run_program(cli, ["validate", str(file)]) == 1
    assert "audit.bearer_file: the bearer token cannot be read: /nowhere" in capsys.readouterr().err


@pytest.mark.slow
def test_the_programs_actions_on_what_a_real_fleet_says_are_in_echo(tmp_path, echo, bearer):
    with run_job() as (agents, pushes):
        admin = agents.fleet.url("extensions.ingero_threshold admin")
        file = tmp_path / "policy.yaml"
        file.write_text(
            f"mode: auto\nfleet: {{admin_url: {admin}, poll_interval: 200ms}}\n"
            "findings: {min_persistence: 0s, min_lost_gpu_time: 1s}\n"
            "brakes: {settle_time: 500ms, max_percent_at_once: 100, max_percent_per_hour: 100}\n"
            f"journal: {{file: {tmp_path}/journal.db}}\n"
            "action: {command: {drain: ['true'], undo: ['true']}}\n"
            f"audit: {{endpoint: '{endpoint_of(echo)}', bearer_file: {bearer}, interval: 200ms}}\n"
        )
        with launch("ingero.cli.programs.remediator", ["run", str(file)]) as program:

            def is_done():
                pushes.push()
                return [row for row in ask(echo) if row["state"] == "done"]

            (row,) = wait_until(is_done)
            assert (row["node_id"], row["cluster_id"], row["actuator"]) == ("node5", "job", "command")  # fmt: skip
            undo = ["undo", row["action_id"], "--config", str(file)]
            assert run_program(cli, undo) == 0
            wait_until(lambda: [row for row in ask(echo) if row["state"] == "undone"])
            program.signal(15)
            assert program.wait() == 0
