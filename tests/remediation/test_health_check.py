"""What a node's HealthCheckProgram is told, and that it ends within a second whatever happens."""

import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.remediation.site import Site, build_config

from ingero.cli.metrics_page import serve_metrics
from ingero.model.verdicts import VerdictKind
from ingero.remediation.orders import find_order
from ingero.remediation.page import RemediatorPage
from ingero.remediation.records import ActionState
from ingero.testing.remediation import SchedulerAnswer, build_verdict
from ingero.units import NS_PER_S

PROGRAM = "from ingero.cli.programs.health_check import main; main()"
TOLD = "listen: '127.0.0.1:0'\n"


def build_told(mode="auto", brakes=""):
    config = build_config(TOLD, mode, brakes)
    slurm = config.action.slurm.model_copy(update={"drained_by": "health-check"})
    return config.model_copy(update={"action": config.action.model_copy(update={"slurm": slurm})})


@pytest.fixture
def told(tmp_path):
    """A site whose nodes drain themselves, at the moment when one is to."""
    site = Site(tmp_path / "journal.db", build_told(brakes=f"stop_file: {tmp_path}/stop"))
    site.slurm.answer = SchedulerAnswer.WRONG_YES  # what apply does is nothing
    site.poll(3, ["n2"])
    assert site.states() == ["begun"]
    return site


def order(site, node="n2", max_age_s=5):
    now = site.remediator._read_now()
    return find_order(site.remediator.orders, node, now, max_age_s * NS_PER_S)


class TestOrders:
    def test_a_node_is_told_to_drain_by_a_begun_action_with_its_reason(self, told):
        (action,) = told.journal.actions()
        reason = f"ingero {action.action_id} {action.episode}: culprit rank 0: own time 1.50x that of its 3 peers"
        assert order(told) == f"drain {reason}"
        assert order(told, "n1") == "none"
        assert order(told, "n9") == "report the scheduler has no node n9"

    @pytest.mark.parametrize(
        "brake", ["nothing", "stop", "victim", "panic", "away", "another", "protected"]
    )
    def test_an_order_ends_as_soon_as_the_policy_would_not_begin_its_action(
        self, told, tmp_path, brake
    ):
        told.fleet.say(build_verdict("n2", n_ops=50))
        if brake == "stop":
            (tmp_path / "stop").touch()
        elif brake == "victim":
            told.fleet.say(build_verdict("n2", VerdictKind.VICTIM, n_ops=50))
        elif brake == "panic":
            told.fleet.say(build_verdict("n2", n_ops=50), in_panic=True)
        elif brake == "away":
            told.fleet.clusters = None
        elif brake == "another":
            told.slurm.nodes[
                "n3"
            ].mark = "a9999999999"  # of another remediator: it fills the budget
        elif brake == "protected":
            brakes = told.config.brakes.model_copy(update={"protected_nodes": ("n2",)})
            told.remediator._config = told.config.model_copy(update={"brakes": brakes})
        told.poll()
        assert told.states() == ["begun"]
        assert order(told).partition(" ")[0] == ("drain" if brake == "nothing" else "none")

    def test_an_old_look_orders_nothing(self, told):
        told.clock.advance(6 * NS_PER_S)
        assert order(told) == "report the remediator has not polled lately"

    def test_what_is_out_is_reported_and_given_back_when_a_person_asks(self, told):
        (action,) = told.journal.actions()
        told.slurm.nodes["n2"].mark = action.action_id
        told.poll(1, ["n2"])
        assert told.states() == ["done"]
        assert order(told).startswith("report out of service: ")
        (action,) = told.journal.actions()
        told.journal.change(action, replace(action, state=ActionState.UNDOING, is_asked_back=True))
        told.poll(1, ["n2"])
        assert order(told) == f"undrain {action.action_id}"

    @pytest.mark.parametrize(("is_asked", "verb"), [(False, "none"), (True, "undrain")])
    def test_with_the_stop_file_a_node_gives_back_only_what_a_person_asks_back(
        self, told, tmp_path, is_asked, verb
    ):
        (action,) = told.journal.actions()
        told.slurm.nodes["n2"].mark = action.action_id
        undoing = replace(action, state=ActionState.UNDOING, is_asked_back=is_asked)
        told.journal.change(action, undoing)
        (tmp_path / "stop").touch()
        told.poll(3, ["n2"])
        assert (told.states(), order(told).partition(" ")[0]) == (["undoing"], verb)
        (tmp_path / "stop").unlink()
        told.poll(1, ["n2"])
        assert order(told) == f"undrain {action.action_id}"

    def test_what_a_person_asks_back_is_given_back_in_dry_run_however_late_the_drain_was(
        self, told, tmp_path
    ):
        (action,) = told.journal.actions()
        told.journal.close()
        told.config = build_told("dry-run")
        told.start()
        told.journal.change(action, replace(action, state=ActionState.UNDOING, is_asked_back=True))
        told.slurm.nodes["n2"].mark = action.action_id  # its health check has just done it
        for _ in range(3):
            told.poll(1, ["n2"])
            assert order(told) == f"undrain {action.action_id}"
        (action,) = told.journal.actions()
        assert (action.state, action.took_effect) == (ActionState.UNDOING, True)

    @pytest.mark.parametrize(
        ("mode", "description"),
        [("dry-run", "would be drained: culprit rank 0"), ("ask", "waits for approval: culprit rank 0")],
    )  # fmt: skip
    def test_other_modes_report_alone(self, tmp_path, mode, description):
        site = Site(tmp_path / "journal.db", build_told(mode))
        site.poll(5, ["n2"])
        assert order(site).startswith("report ")
        assert description in order(site)

    def test_who_drains_by_itself_has_nodes_report_alone(self, site):
        site.slurm.answer = SchedulerAnswer.LOST
        site.poll(3, ["n2"])
        assert (site.states(), order(site)) == (["begun"], "none")


@contextmanager
def serve(description, site=None):
    """A remediator's page that tells every node this."""
    page = RemediatorPage(None, Path(), None, lambda _: description)
    with serve_metrics(page, "127.0.0.1:0", "listen") as bound:
        yield f"http://{bound}"


@pytest.fixture
def check(tmp_path):
    """Runs the program with a scontrol that shows this and notes what it is asked."""

    def run(url, shown="NodeName=n2 State=IDLE ", first=""):
        scontrol = tmp_path / "scontrol"
        scontrol.write_text(
            f"#!/bin/sh\n{first}\necho \"$@\" >>{tmp_path}/asked\ncat <<'E'\n{shown}\nE\n"
        )
        scontrol.chmod(0o755)
        begin = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, url, "n2"],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        seconds = time.monotonic() - begin
        asked = tmp_path / "asked"
        return done, asked.read_text().splitlines() if asked.exists() else [], seconds

    return run


REASON = "ingero a0123456789 e0123456789: culprit rank 5: own time 1.4x"


class TestProgram:
    def test_it_drains_its_node_with_the_reason_that_it_is_told(self, check):
        with serve(f"drain {REASON}") as url:
            done, asked, _ = check(url)
        assert (done.returncode, done.stdout) == (0, f"ingero: drained: {REASON}\n")
        assert asked == ["-o show node n2", f"update nodename=n2 state=drain reason={REASON}"]

    def test_a_node_that_somebody_has_taken_out_keeps_its_reason(self, check):
        with serve(f"drain {REASON}") as url:
            done, asked, _ = check(url, "NodeName=n2 State=IDLE+DRAIN Reason=mine [x@y]")
        assert done.stdout == "ingero: to be drained, but it is IDLE+DRAIN already (mine)\n"
        assert asked == ["-o show node n2"]

    def test_it_gives_back_its_own_drain_alone(self, check):
        with serve("undrain a0123456789") as url:
            theirs = f"NodeName=n2 State=IDLE+DRAIN Reason={REASON.replace('a01', 'a91')} [x@y]"
            assert check(url, theirs)[1] == ["-o show node n2"]
            done, asked, _ = check(url, f"NodeName=n2 State=IDLE+DRAIN Reason={REASON} [x@y]")
        assert asked[-1] == "update nodename=n2 state=undrain"
        assert done.stdout == "ingero: given back: a0123456789 is undone\n"

    def test_a_report_is_said_and_nothing_is_silent(self, check):
        with serve("report out of service: x") as url:
            assert check(url)[0].stdout == "ingero: out of service: x\n"
        with serve("none") as url:
            done, asked, _ = check(url)
        assert (done.stdout, done.returncode, asked) == ("", 0, [])

    @pytest.mark.parametrize(
        "description", ["drain somebody else's reason", "shutdown now", "undrain"]
    )
    def test_what_no_remediator_says_is_not_done(self, check, description):
        with serve(description) as url:
            done, asked, _ = check(url)
        assert not any("update" in one for one in asked)
        assert (done.returncode, done.stdout == "") == (0, False)

    @pytest.mark.parametrize(
        "url", ["http://127.0.0.1:9", "http://nowhere.invalid:1", "http://x", "no"]
    )
    def test_without_a_remediator_it_ends_well_and_says_so(self, check, url):
        done, asked, _ = check(url)
        assert (done.returncode, asked) == (0, [])
        assert done.stdout

    def test_a_remediator_that_does_not_answer_is_left_within_a_second(self, check):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            done, _, seconds = check(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert (done.returncode, done.stdout.startswith("ingero: ")) == (0, True)
        assert seconds < 60  # it never ends by itself

    def test_a_scontrol_that_waits_is_killed_with_all_that_it_started(self, check, tmp_path):
        with serve(f"drain {REASON}") as url:
            done, _, seconds = check(url, first=f"sleep 987 & echo $! >{tmp_path}/pid; wait")
        assert done.stdout == "ingero: not done within 0.8 s; the node stays as it is\n"
        assert (done.returncode, seconds < 60) == (0, True)
        status = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/status")
        assert not status.exists() or "zombie" in status.read_text()

    def test_it_starts_with_little(self):
        """What costs time at every interval on every node."""
        script = "import sys, ingero.cli.programs.health_check; print(*sys.modules)"
        loaded = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.split()
        assert {"typing", "subprocess", "json", "click", "pydantic", "numpy", "httpx"}.isdisjoint(
            loaded
        )
