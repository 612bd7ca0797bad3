"""The program as people use it: what is printed, answered and refused, and its exit status."""

import json
import signal
import sqlite3
from dataclasses import replace
from threading import Event

import pytest
from tests.deploy.promtool import promtool
from tests.e2e.prometheus import needs_prometheus
from tests.remediation.site import QUICK, Site, build_config
from tests.support import local_http

from ingero.cli.main import run_program
from ingero.cli.programs.remediator import cli
from ingero.cli.programs.remediator_run import _poll_until
from ingero.remediation import config
from ingero.remediation.config import write_defaults
from ingero.remediation.lock import JournalLock
from ingero.remediation.page import RemediatorPage
from ingero.remediation.records import ActionState
from ingero.sim.launcher import launch, start
from ingero.testing.waiting import wait_until


def run(*arguments):
    return run_program(cli, [str(one) for one in arguments])


@pytest.fixture
def asked(tmp_path):
    """A journal with a proposal, and the policy that names it."""
    site = Site(tmp_path / "journal.db", build_config(mode="ask"))
    site.slurm.kind = "command"
    site.poll(6, ["n2"])
    site.file = tmp_path / "policy.yaml"
    commands = "{drain: ['true'], undo: ['true']}"
    site.file.write_text(
        f"mode: ask\naction: {{command: {commands}}}\njournal: {{file: {site.path}}}\n{QUICK}}}\n"
    )
    (site.action,) = site.journal.actions()
    return site


def test_the_defaults_are_valid_and_a_wrong_key_is_said_with_its_line(tmp_path, capsys):
    file = tmp_path / "p.yaml"
    file.write_text(write_defaults())
    assert run("validate", file) == 0
    assert capsys.readouterr().out == f"{file}: valid, mode dry-run, acts through slurm\n"
    file.write_text("action: {slurm: {}}\nmoed: auto\n")
    assert run("validate", file) == 2
    assert "line 2: moed: unknown key (did you mean mode?)" in capsys.readouterr().err
    assert run(file, "--once") == 2  # short for run


@pytest.mark.parametrize("is_named", [False, True])
def test_the_former_stop_file_counts_where_the_policy_names_none_and_the_log_says_so(
    tmp_path, monkeypatch, caplog, is_named
):
    former, stop = tmp_path / "former", tmp_path / "stop"
    monkeypatch.setattr(config, "FORMER_STOP_FILE", str(former))
    site = Site(tmp_path / "j.db", build_config(brakes=f"stop_file: {stop}" if is_named else ""))
    site.poll(2, ["n2"])
    former.touch()
    site.poll(3, ["n2"])
    assert site.drained == ({"n2"} if is_named else set())
    over = Event()
    over.set()
    _poll_until(over, site.config, site.remediator, None)
    assert (
        any("remediator/stop, this one may vanish" in one for one in caplog.messages)
        is not is_named
    )
    if not is_named:
        (kept,) = site.journal.findings()
        (clause,) = [one for one in kept.clauses if one["clause"] == "brakes.stop_file"]
        assert clause["says"] == f"{former} is there"
        former.unlink()
        site.poll(3, ["n2"])
        assert site.drained == {"n2"}


def test_a_running_remediator_says_when_it_is_stopped_and_when_no_more(asked, tmp_path):
    stop = tmp_path / "stop"
    policy = f"action: {{command: {{drain: ['true'], undo: ['true']}}}}\nbrakes: {{stop_file: {stop}}}\nfleet: {{poll_interval: 50ms}}\n"
    asked.file.write_text(f"{policy}journal: {{file: {tmp_path}/other.db}}\n")
    with launch("ingero.cli.programs.remediator", ["run", str(asked.file)]) as running:
        stop.touch()
        wait_until(lambda: f"{stop} is there: nothing is done but" in running.log)
        stop.unlink()
        wait_until(lambda: "no stop file is there any more" in running.log)


def test_once_is_for_dry_run_and_says_when_fleet_is_away(asked, capsys):
    assert run("run", asked.file, "--once") == 2
    assert "give --dry-run as well" in capsys.readouterr().err
    asked.file.write_text("fleet: {admin_url: 'http://127.0.0.1:9'}\n" + asked.file.read_text())
    assert run(asked.file, "--dry-run", "--once") == 1
    assert "does not tell verdicts" in capsys.readouterr().err


def test_a_person_approves_rejects_explains_and_reads_the_journal(asked, capsys):
    action = asked.action
    assert run("explain", "n2", "--config", asked.file) == 0
    said = capsys.readouterr().out
    assert "asks to act on n2" in said
    assert "lets    brakes.max_nodes_at_once     would be 1 at once, at most 1" in said
    assert run("approve", action.action_id, "--config", asked.file) == 0
    assert asked.states() == ["approved"]
    assert run("reject", action.action_id, "--config", asked.file) == 0
    assert run("approve", action.action_id, "--config", asked.file) == 1
    assert "does not wait for an answer: it is rejected" in capsys.readouterr().err
    assert run("journal", "--json", "--config", asked.file) == 0
    (shown,) = json.loads(capsys.readouterr().out)["actions"]
    assert (shown["id"], shown["state"], shown["evidence"]["node_id"]) == (
        action.action_id,
        "rejected",
        "n2",
    )
    assert [one["state"] for one in shown["changes"]] == ["proposed", "approved", "rejected"]


def test_undo_is_done_here_when_no_remediator_runs_and_left_to_it_when_one_does(asked, capsys):
    done = replace(asked.action, state=ActionState.DONE, took_effect=True)
    asked.journal.change(asked.action, done)
    assert run("exclude", "--config", asked.file) == 0
    assert capsys.readouterr().out == "--exclude=n2\n"
    with JournalLock(asked.path) as lock:
        assert lock.take()
        assert run("undo", done.action_id, "--config", asked.file) == 0
        assert asked.states() == ["undoing"]
    asked.journal.change(asked.journal.actions()[0], done)
    assert run("undo", done.action_id, "--config", asked.file) == 0
    assert asked.states() == ["undone"]
    assert run("undo", done.action_id, "--config", asked.file) == 1
    assert "nothing to reverse" in capsys.readouterr().err


def test_what_another_way_of_acting_did_is_not_undone_by_this_one(asked, capsys):
    done = replace(asked.action, state=ActionState.DONE, kind="slurm", took_effect=True)
    asked.journal.change(asked.action, done)
    assert run("undo", done.action_id, "--config", asked.file) == 1
    said = capsys.readouterr().err
    assert f"{done.action_id} was done by slurm, and this policy acts through command" in said
    assert asked.states() == ["done"]


def test_what_is_not_in_the_journal_is_said_and_no_journal_is_made(asked, tmp_path, capsys):
    assert run("undo", "a9999999999", "--config", asked.file) == 1
    assert f"waiting for an answer: {asked.action.action_id}" in capsys.readouterr().err
    assert run("explain", "n9", "--config", asked.file) == 1
    none = tmp_path / "none.yaml"
    none.write_text(f"action: {{slurm: {{}}}}\njournal: {{file: {tmp_path}/none.db}}\n")
    for command in (("approve", "a1"), ("undo", "a1"), ("journal",), ("explain",), ("exclude",)):
        assert run(*command, "--config", none) == 4
    assert not (tmp_path / "none.db").exists()


def test_a_file_of_something_else_is_no_journal(asked, capsys):
    other = asked.path.with_name("other.db")
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE x (y)")
    database.close()
    asked.file.write_text(asked.file.read_text().replace("journal.db", "other.db"))
    assert run("journal", "--config", asked.file) == 4
    assert "is no journal of this version" in capsys.readouterr().err


def test_the_page_counts_looks_and_shows_actions_by_state(site):
    site.poll(6, ["n2"])
    text = RemediatorPage(site.remediator.counts, site.path).render()
    assert "ingero_remediator_polls_total 6\n" in text
    assert 'ingero_remediator_actions{state="done"} 1\n' in text
    assert 'ingero_remediator_changes_total{state="done"} 1\n' in text


@needs_prometheus
def test_promtool_objects_to_nothing_on_the_page(site):
    site.poll(6, ["n2"])
    page = RemediatorPage(site.remediator.counts, site.path).render()
    assert promtool("check", "metrics", input=page) == (0, "")


@pytest.mark.slow
def test_a_second_remediator_waits_until_the_first_ends(asked):
    text = "fleet: {admin_url: 'http://127.0.0.1:9', poll_interval: 50ms}\nlisten: 127.0.0.1:0\n"
    asked.file.write_text(text + asked.file.read_text())
    module, arguments = "ingero.cli.programs.remediator", ["run", str(asked.file)]
    with launch(module, arguments) as first, start(module, arguments) as second:
        wait_until(lambda: "waiting until it ends" in second.log)
        page = first.url("metrics", "/metrics")
        assert "ingero_remediator_fleet_away_total" in local_http.get(page).text
        first.process.send_signal(signal.SIGKILL)
        second.wait_until_ready()
        assert "has ended" in second.log
        second.process.send_signal(signal.SIGTERM)
        assert second.wait() == 0
