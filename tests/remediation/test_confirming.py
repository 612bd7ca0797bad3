"""A pair test: what its times say, when it runs, what becomes of it, and what an action waits for."""

import json
import sqlite3
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import mannwhitneyu
from tests.remediation.site import Site, build_config
from tests.remediation.test_program import run

from ingero.config.document import parse_document
from ingero.errors import BadDataError, ConfigError, RetryableError
from ingero.remediation import pair_program
from ingero.remediation.actuators.pair_runner import PairJob, PairJobState
from ingero.remediation.actuators.slurm_pair import SlurmPairActuator, read_job
from ingero.remediation.config import SlurmConfig, build_policy
from ingero.remediation.confirm_config import PairTestConfig
from ingero.remediation.journal import Journal
from ingero.remediation.page import RemediatorPage
from ingero.remediation.pair_tests import (
    PairOutcome,
    PairTestState,
    compare_rounds,
    judge_times,
    parse_times,
)
from ingero.testing.remediation import SchedulerAnswer
from ingero.units import NS_PER_S

CONFIRM = "confirm: {pair_test: {max_wait: 30s, time_limit: 30s, retry_after: 20s, tries: 2}}\n"


@pytest.fixture
def start(tmp_path):
    """Makes a site whose policy asks for a test; on it n2 is slow."""

    def make(text=CONFIRM, mode="auto"):
        made = Site(tmp_path / "journal.db", build_config(text, mode))
        made.slurm.slow = {"n2"}
        return made

    return make


def read_tests(site):
    return site.journal.pair_tests.read()


def description(site):
    (finding,) = site.journal.findings()
    (clause,) = [one for one in finding.clauses if one["clause"] == "confirm.pair_test"]
    return clause["says"]


class TestTimes:
    def test_the_interval_holds_the_ratios_that_the_rank_sum_test_does_not_refuse(self):
        suspect = [1.31, 1.52, 1.37, 1.44, 1.29, 1.6, 1.35]
        peer = [1.02, 1.11, 0.97, 1.05, 1.2, 0.99, 1.08]
        ratio = compare_rounds(suspect, peer)
        for bound, inner in ((ratio.low, 1 + 1e-6), (ratio.high, 1 - 1e-6)):
            p_values = [
                mannwhitneyu(suspect, [times * bound * by for times in peer], method="exact").pvalue
                for by in (inner, 1 / inner)
            ]
            assert p_values[0] > 0.05 > p_values[1]
        assert ratio.median == pytest.approx(np.median(np.divide.outer(suspect, peer)))

    def test_one_slow_round_changes_little_and_too_few_rounds_say_nothing(self):
        even = [1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06]
        assert compare_rounds([*even[:-1], 60.0], even).high < 1.06
        with pytest.raises(BadDataError, match="3 rounds of the suspect and 7 of its peer"):
            compare_rounds(even[:3], even)

    def test_what_a_test_prints_is_read_whatever_stands_between(self):
        text = 'srun:~step~created~{"node":~"h1",~"rounds_s":~[0.5,~1]}{"node":"h2","rounds_s":[1,2]}~{"exchange_s":[2,1,4],"exchange_bytes":2000000}'
        times = parse_times(text)
        assert times.rounds_s == {"h1": (0.5, 1.0), "h2": (1.0, 2.0)}
        assert times.says_exchange == "; 1 MB/s between both"

    @pytest.mark.parametrize(
        "text",
        ["python3:~not~found", '{"node":"h1"}', '{"node":"h1","rounds_s":[0]}', '{"node":', "{}", '{"node":"h1","rounds_s":5}'],
    )  # fmt: skip
    def test_what_is_no_result_cannot_tell(self, start, text):
        site = start()
        site.poll(4, ["n2"])
        (record,) = read_tests(site)
        outcome, why, times = judge_times(record, text, 1.1)
        assert (outcome, times) == (PairOutcome.CANNOT_TELL, {})
        assert why.startswith("the test printed no times")

    def test_between_confirming_and_contradicting_it_cannot_tell(self, start):
        site = start()
        site.poll(4, ["n2"])
        (record,) = read_tests(site)
        even = [1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06]
        printed = [{"node": record.suspect, "rounds_s": [1.1 * one for one in even]}, {"node": record.peer, "rounds_s": even}]  # fmt: skip
        text = "".join(map(json.dumps, printed))
        found = {ratio: judge_times(record, text, ratio)[0].value for ratio in (1.05, 1.1, 1.2)}
        assert found == {1.05: "confirms", 1.1: "cannot tell", 1.2: "contradicts"}


def test_a_node_is_tested_once_nothing_else_stops_and_acted_on_when_it_is_confirmed(start):
    site = start()
    site.poll(3, ["n2"])
    (record,) = read_tests(site)
    assert (record.state, record.suspect, record.peer) == (PairTestState.SUBMITTED, "n2", "n1")
    assert site.drained == set()
    site.poll(1, ["n2"])
    assert description(site) == f"tests n2 against n1 as {record.test_id}: job 1"
    site.poll(1, ["n2"])
    assert (site.drained, site.states()) == ({"n2"}, ["done"])
    assert (
        description(site)
        == "confirms: n2 takes 2.00 times as long as n1 (1.94 to 2.06), 0 ns ago, wanted 1.10"
    )
    assert site.remediator.counts.n_tests == {PairOutcome.CONFIRMS: 1}
    site.poll(3, ["n2"])
    assert [one.state for one in read_tests(site)] == [PairTestState.CLOSED]
    assert site.slurm.submitted == [record.test_id]


def test_a_contradicted_node_is_left_alone_until_the_test_is_old_and_then_met_by_another_peer(
    start,
):
    site = start()
    site.slurm.slow = set()
    site.poll(10, ["n2"])
    assert [one.outcome for one in read_tests(site)] == [PairOutcome.CONTRADICTS]
    assert description(site).startswith("contradicts: n2 takes 1.00 times as long as n1")
    site.poll(100, ["n2"])
    assert len(read_tests(site)) == 1
    site.clock.advance(3600 * NS_PER_S)
    site.slurm.slow = {"n2"}
    site.poll(8, ["n2"])
    assert [(one.peer, one.outcome) for one in read_tests(site)][1] == ("n3", PairOutcome.CONFIRMS)
    assert site.drained == {"n2"}


def test_the_journal_and_the_metrics_say_what_came_of_a_test(start, tmp_path, capsys):
    site = start()
    site.slurm.slow = set()
    site.poll(10, ["n2"])
    (record,) = read_tests(site)
    file = tmp_path / "p.yaml"
    file.write_text(f"action: {{slurm: {{}}}}\njournal: {{file: {site.path}}}\n{CONFIRM}")
    assert run("journal", "--config", file) == 0
    shown = capsys.readouterr().out
    assert f"{record.test_id}  contradicts  n2 against n1, episode {record.episode}\n" in shown
    assert run("journal", "--json", "--config", file) == 0
    (test,) = json.loads(capsys.readouterr().out)["pair_tests"]
    assert (test["outcome"], test["suspect"], len(test["rounds_s"]["n1"])) == (
        "contradicts",
        "n2",
        7,
    )
    assert run("explain", record.episode, "--config", file) == 0
    assert "stops   confirm.pair_test" in capsys.readouterr().out
    page = RemediatorPage(site.remediator.counts, site.path).render()
    assert 'ingero_remediator_pair_tests_total{outcome="contradicts"} 1\n' in page
    assert "ingero_remediator_pair_tests_alive 0\n" in page


@pytest.mark.parametrize(("word", "expected"), [("stop", set()), ("let", {"n2"})])
def test_what_cannot_tell_is_tried_again_and_then_lets_nothing_through_unless_it_should(
    start, word, expected
):
    site = start(CONFIRM.replace("tries: 2", f"tries: 2, cannot_tell: {word}"))
    site.slurm.is_busy = True
    site.poll(18, ["n2"])
    (record,) = read_tests(site)
    assert record.outcome is PairOutcome.CANNOT_TELL
    assert record.note == "the nodes were not free for 30 s: Resources"
    assert site.slurm.alive == []
    site.poll(40, ["n2"])
    assert len(read_tests(site)) == 2
    assert site.slurm.alive == []
    assert site.drained == expected
    site.poll(40, ["n2"])
    assert len(site.slurm.submitted) == 2


def test_a_restart_goes_on_with_the_test_and_asks_for_no_second(start):
    site = start()
    site.poll(3, ["n2"])
    site.start()
    site.poll(5, ["n2"])
    assert (site.drained, len(site.slurm.submitted)) == ({"n2"}, 1)


class Killed(BaseException):
    """What kill -9 does."""


@pytest.mark.parametrize("moment", ["before submit_test", "after submit_test"])
def test_a_remediator_that_is_killed_while_it_asks_is_followed_by_one_that_asks_no_second_time(
    start, moment
):
    site = start()
    site.poll(2, ["n2"])

    def kill(what):
        if what == moment:
            raise Killed

    site.before = kill
    with pytest.raises(Killed):
        site.poll(1, ["n2"])
    site.before = lambda _: None
    site.start()
    site.poll(6, ["n2"])
    assert len(site.slurm.submitted) == 1
    assert len(read_tests(site)) == 1
    assert site.drained == ({"n2"} if moment == "after submit_test" else set())


@pytest.mark.parametrize(
    "answer", [SchedulerAnswer.LATE, SchedulerAnswer.LOST, SchedulerAnswer.WRONG_NO]
)
def test_a_job_that_the_scheduler_did_not_own_up_to_is_found_or_cleared_away(start, answer):
    site = start()
    site.poll(2, ["n2"])
    site.slurm.answer, site.slurm.late_ns = answer, 3 * NS_PER_S
    site.poll(1, ["n2"])
    site.slurm.answer = SchedulerAnswer.RIGHT
    site.poll(8, ["n2"])
    (record,) = read_tests(site)
    assert record.state is PairTestState.CLOSED
    expected = {
        SchedulerAnswer.LATE: (PairOutcome.CONFIRMS, "n2 takes 2.00 times as long"),
        SchedulerAnswer.LOST: (PairOutcome.CANNOT_TELL, "the scheduler has no job of it"),
        SchedulerAnswer.WRONG_NO: (PairOutcome.CANNOT_TELL, "refused: "),
    }[answer]
    assert record.outcome is expected[0]
    assert record.note.startswith(expected[1])
    assert site.slurm.alive == []


def test_a_job_that_appears_after_its_test_has_ended_is_cancelled(start):
    site = start()
    site.poll(2, ["n2"])
    site.slurm.answer, site.slurm.late_ns = SchedulerAnswer.LATE, 7 * NS_PER_S
    site.slurm.is_busy = True
    site.poll(1, ["n2"])
    site.slurm.answer = SchedulerAnswer.RIGHT
    site.poll(8, ["n2"])
    assert [one.test_id for one in site.slurm.tests] == site.slurm.submitted
    assert site.slurm.alive == []


def test_the_stop_file_and_the_end_of_the_finding_cancel_a_test(start, tmp_path):
    stop = tmp_path / "stop"
    site = start()
    brakes = site.config.brakes.model_copy(update={"stop_file": str(stop)})
    site.config = site.config.model_copy(update={"brakes": brakes})
    site.start()
    site.slurm.is_busy = True
    site.poll(3, ["n2"])
    assert len(site.slurm.alive) == 1
    stop.touch()
    site.poll(1, ["n2"])
    assert site.slurm.alive == []
    assert read_tests(site)[0].note == "cancelled: nothing may be acted on"


def test_a_test_that_was_cancelled_is_no_try(start, tmp_path):
    stop = tmp_path / "stop"
    site = start(CONFIRM.replace("tries: 2", "tries: 2, cannot_tell: let"))
    brakes = site.config.brakes.model_copy(update={"stop_file": str(stop)})
    site.config = site.config.model_copy(update={"brakes": brakes})
    site.start()
    site.slurm.is_busy = True
    for n_tests in (1, 2, 3):
        site.poll(12, ["n2"])
        assert len(read_tests(site)) == n_tests
        stop.touch()
        site.poll(2, ["n2"])
        stop.unlink()
    assert site.drained == set()
    assert {one.outcome for one in read_tests(site)} == {PairOutcome.CANCELLED}
    page = RemediatorPage(site.remediator.counts, site.path).render()
    assert 'ingero_remediator_pair_tests_total{outcome="cancelled"} 3\n' in page
    site.slurm.is_busy = False
    site.poll(8, ["n2"])
    assert read_tests(site)[-1].outcome is PairOutcome.CONFIRMS
    assert site.drained == {"n2"}


def test_tests_that_were_cancelled_before_there_was_a_word_for_it_are_no_tries(start):
    site = start()
    site.slurm.is_busy = True
    site.poll(18, ["n2"])
    (record,) = read_tests(site)
    site.journal.pair_tests.put(
        replace(record, test_id="p1", note="cancelled: the finding is over")
    )
    site.journal.close()
    with sqlite3.connect(site.path) as database:
        database.execute("PRAGMA user_version = 4")
    database.close()
    with Journal(site.path) as journal:
        outcomes = [one.outcome for one in journal.pair_tests.read()]
    assert outcomes == [PairOutcome.CANNOT_TELL, PairOutcome.CANCELLED]


def test_dry_run_runs_no_test_and_says_so(start):
    site = start(mode="dry-run")
    ruling = site.poll(5, ["n2"]).rulings[0]
    assert ruling.is_allowed
    assert description(site) == "not tested yet; dry-run runs no test"
    assert (site.slurm.submitted, read_tests(site)) == ([], ())


def test_a_scheduler_that_is_away_holds_the_test_up_and_not_the_remediator(start):
    site = start()
    site.poll(3, ["n2"])
    site.slurm.is_away = True
    site.poll(100, ["n2"])
    (record,) = read_tests(site)
    assert record.state is PairTestState.SUBMITTED
    site.slurm.is_away = False
    site.poll(1, ["n2"])
    (record,) = read_tests(site)
    assert record.note == "it did not end in time"


def test_without_a_node_that_is_like_it_nothing_is_asked(start):
    site = start()
    for node in ("n1", "n3", "n4"):
        site.slurm.nodes[node].is_down = True
    site.poll(4, ["n2"])
    (record,) = read_tests(site)
    assert (record.note, record.outcome) == (
        "no other node in service is like it",
        PairOutcome.CANNOT_TELL,
    )
    assert site.slurm.submitted == []


def test_a_journal_from_before_pair_tests_goes_on(start, tmp_path):
    site, other = start(""), Site(tmp_path / "other.db", build_config(CONFIRM))
    other.poll(3, ["n2"])
    site.poll(6, ["n2"])
    site.journal.close()
    with sqlite3.connect(site.path) as database:
        database.executescript(
            "DROP TABLE pair_tests; ALTER TABLE actions DROP COLUMN asked_back; PRAGMA user_version = 2;"
        )
    database.close()
    with Journal(site.path, read_only=True) as journal:
        assert journal.pair_tests.read() == ()
    with Journal(site.path) as journal:
        journal.pair_tests.put(*read_tests(other))
        assert journal.pair_tests.read() == read_tests(other)
        assert [one.state.value for one in journal.actions()] == ["done"]


class TestSlurm:
    NODES = (
        "h1|gpu|mixed|8|gpu:8|(null)\nh2|gpu|allocated|8|gpu:8|(null)\nh3|gpu|idle|8|gpu:8|(null)\n"
        "h4|gpu|idle|8|gpu:4|(null)\nh5|cpu|idle|8|gpu:8|(null)\nh6|gpu|drained|8|gpu:8|(null)\nh7|gpu|idle*|8|gpu:8|x\n"
        "h1|all|mixed|8|gpu:8|(null)\nh5|all|idle|8|gpu:8|(null)\n"
        "h8|gpu|mixed$|8|gpu:8|(null)\nh9|gpu|idle@|8|gpu:8|(null)\nh10|gpu|maint|8|gpu:8|(null)\n"
    )

    @pytest.fixture
    def slurm(self, tmp_path):
        """Slurm's commands as scripts that say what a test wrote."""

        def make(program, body):
            (tmp_path / program).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / program).chmod(0o755)

        make("sinfo", f"cat <<'E'\n{self.NODES}E")
        config = SlurmConfig(bin_dir=str(tmp_path))
        made = SlurmPairActuator(config, PairTestConfig(options=("--account=ops",)))
        return made, make

    def test_a_peer_is_alike_in_service_and_idle_first(self, slurm):
        actuator, _ = slurm
        assert actuator.find_peer("h1", ()) == ("h3", "gpu")
        assert actuator.find_peer("h1", {"h3"}) == ("h5", "all")
        assert actuator.find_peer("h1", {"h3", "h5"}) == ("h2", "gpu")
        assert actuator.find_peer("h1", {"h2", "h3", "h5"}) == ("", "")
        assert actuator.find_peer("h99", ()) == ("", "")

    def test_the_job_is_bounded_named_and_given_the_sites_options(self, slurm, tmp_path, start):
        actuator, make = slurm
        make("sbatch", f'echo "$@" >{tmp_path}/options; cat >{tmp_path}/script; echo "17;cluster"')
        site = start()
        site.poll(3, ["n2"])
        (record,) = read_tests(site)
        assert actuator.submit_test(record) == "17"
        options = (tmp_path / "options").read_text().split()
        assert {"--time=1:00", "--deadline=now+240", "--nodelist=n2,n1", "--account=ops", "--no-requeue"} <= {*options}  # fmt: skip
        assert f"--job-name=ingero-pair-{record.test_id}" in options
        script = (tmp_path / "script").read_text()
        assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0
        assert "coordinate" in script

    @pytest.mark.parametrize(
        ("shown", "expected"),
        [
            (" JobState=PENDING Reason=Resources ", PairJob(PairJobState.WAITING, "7", "Resources")),
            (" JobState=RUNNING Reason=None ", PairJob(PairJobState.RUNNING, "7")),
            (" JobState=COMPLETED Reason=None Comment={}~x ", PairJob(PairJobState.FINISHED, "7", "{}~x")),
            (" JobState=TIMEOUT Reason=TimeLimit ", PairJob(PairJobState.FAILED, "7", "TIMEOUT, TimeLimit")),
        ],
    )  # fmt: skip
    def test_a_job_is_read(self, shown, expected):
        assert read_job("7", shown) == expected

    def test_a_slurm_that_refuses_to_tell_may_tell_later(self, slurm):
        actuator, make = slurm
        make("sinfo", "echo Invalid user >&2; exit 1")
        with pytest.raises(RetryableError, match="Invalid user"):
            actuator.find_peer("h1", ())


def test_a_pair_test_is_for_slurm_and_the_health_check_for_who_listens():
    for text, description in (
        (f"action: {{command: {{drain: [a], undo: [b]}}}}\n{CONFIRM}", "is there for action.slurm only"),
        ("action: {slurm: {drained_by: health-check}}\n", "needs listen, which nodes ask"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=description):
            build_policy(parse_document(text))


def test_a_round_takes_time_on_as_many_processors_as_it_is_told():
    assert 0 < pair_program.time_round(2) < 60
