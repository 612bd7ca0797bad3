"""One poll after another: what is drained, what is left alone, and what becomes of it."""

import sqlite3
from dataclasses import replace

import pytest
from tests.remediation.site import Site, build_config
from tests.remediation.site_work import ask_back

from ingero.errors import PermanentError, RetryableError
from ingero.model.verdicts import VerdictKind
from ingero.remediation.building import read_moment
from ingero.remediation.journal import Journal
from ingero.remediation.records import ActionState
from ingero.remediation.remediator import Remediator
from ingero.testing.remediation import SchedulerAnswer, build_verdict
from ingero.units import NS_PER_S


def test_a_lasting_culprit_is_drained_once_and_the_journal_holds_its_evidence(site):
    site.poll(2, ["n2"])
    assert site.drained == set()
    site.poll(10, ["n2"])
    assert site.drained == {"n2"}
    (action,) = site.journal.actions()
    assert (action.state, action.target, action.took_effect) == (ActionState.DONE, "n2", True)
    assert action.evidence["reason"] == "own time 1.50× that of its 3 peers"
    assert all(clause["met"] for clause in action.clauses)
    assert [one["state"] for one in site.journal.changes(action.action_id)] == [
        "begun",
        "begun",
        "done",
    ]
    assert len(site.slurm.drained) == 1


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [(SchedulerAnswer.RIGHT, None), (SchedulerAnswer.WRONG_NO, "n2 is not for you")],
)
def test_a_single_look_says_what_the_scheduler_would_refuse(tmp_path, answer, refusal):
    site = Site(tmp_path / "j.db", build_config(mode="dry-run"))
    site.slurm.answer = answer
    site.remediator = Remediator(
        site.config, site.fleet, site.slurm, site.journal,
        lambda: read_moment(site.clock, "boot"), is_single_poll=True,
    )  # fmt: skip
    result = site.poll(1, ["n2"])
    (ruling,) = result.rulings
    assert ruling.is_allowed
    assert result.refusals.get(ruling.finding.episode) == refusal
    assert site.drained == set()


def test_in_dry_run_nothing_is_done_and_the_decision_is_kept(tmp_path):
    site = Site(tmp_path / "j.db", build_config(mode="dry-run"))
    site.poll(10, ["n2"])
    assert (site.drained, site.journal.actions()) == (set(), ())
    (kept,) = site.journal.findings()
    assert (kept.decision, kept.is_open) == ("would act on n2", True)


def test_a_flapping_verdict_never_lasts(site):
    for _ in range(20):
        site.poll(2, ["n2"])
        site.poll(1, [])
    assert site.journal.actions() == ()


def test_a_rank_that_does_not_work_any_more_is_not_acted_on(site):
    site.poll(1, ["n2"])
    site.poll(30)
    assert site.journal.actions() == ()


def test_a_finding_is_followed_until_it_is_over(site):
    site.poll(1, ["n2"])
    site.poll(301, [])
    (kept,) = site.journal.findings()
    assert not kept.is_open
    assert kept.decision.startswith("leaves n2 alone: stopped by")


@pytest.mark.parametrize("trouble", ["panic", "away", "scheduler", "started over", "jump"])
def test_after_trouble_nothing_is_done_until_all_answered_for_a_while(site, trouble):
    site.poll(2, ["n2"])
    if trouble == "panic":
        site.fleet.say(build_verdict("n2", n_ops=3), in_panic=True)
        site.poll(1)
    elif trouble == "away":
        site.fleet.clusters = None
        site.poll(1)
    elif trouble == "scheduler":
        site.slurm.is_away = True
        site.poll(1, ["n2"])
        site.slurm.is_away = False
    elif trouble == "jump":
        site.clock.step_wall(-3600 * NS_PER_S)
    else:
        site.n_ops = 0
    site.poll(2, ["n2"])
    assert site.journal.actions() == ()
    site.poll(1 if trouble != "jump" else 300, ["n2"])
    assert site.drained == {"n2"}


def test_while_the_stop_file_is_there_nothing_is_done_but_what_a_person_asked_for(tmp_path):
    stop = tmp_path / "stop"
    site = Site(tmp_path / "j.db", build_config(brakes=f"stop_file: {stop}, cool_down: 0s"))
    site.poll(5, ["n2"])
    stop.touch()
    site.poll(5, ["n2", "n3"])
    assert site.drained == {"n2"}
    (action,) = site.journal.actions()
    ask_back(site, action)
    site.poll(1)
    assert (site.drained, site.states()) == (set(), ["undone"])


def test_a_stop_file_that_comes_within_a_poll_stops_what_the_poll_had_still_to_do(tmp_path):
    """A scheduler that answers slowly makes a poll of several actions last for minutes."""
    stop = tmp_path / "stop"
    limits = f"stop_file: {stop}, max_nodes_at_once: 9, max_nodes_per_hour: 9"
    site = Site(tmp_path / "j.db", build_config(brakes=limits))
    site.before = lambda what: stop.touch() if what == "before apply" else None
    site.poll(9, ["n2", "n3"])
    assert len(site.drained) == 1
    site.before = lambda _: None
    stop.unlink()
    site.poll(3, ["n2", "n3"])
    assert site.drained == {"n2", "n3"}


def test_a_stop_file_that_comes_while_jobs_are_requeued_leaves_the_others_running(tmp_path):
    stop = tmp_path / "stop"
    site = Site(tmp_path / "j.db", build_config(brakes=f"stop_file: {stop}"))
    site.slurm.jobs = {"7": 0, "8": 0}
    site.before = lambda what: stop.touch() if what == "after requeue" else None
    site.poll(9, ["n2"])
    assert site.slurm.requeued == ["7"]
    stop.unlink()
    site.poll(1, ["n2"])
    assert (site.slurm.requeued, site.states()) == (["7", "8"], ["done"])


def test_a_drain_that_the_scheduler_repeats_after_a_person_asked_it_back_is_undone_with_the_stop_file(
    tmp_path,
):
    stop = tmp_path / "stop"
    site = Site(tmp_path / "j.db", build_config(brakes=f"stop_file: {stop}"))
    site.poll(5, ["n2"])
    (action,) = site.journal.actions()
    stop.touch()
    ask_back(site, action)
    site.poll(1)
    assert site.states() == ["undone"]
    site.slurm.nodes["n2"].mark = action.action_id
    site.poll(2)
    assert (site.drained, site.states()) == (set(), ["undone"])


def test_what_a_person_asks_back_while_it_is_undone_stays_asked_for(site):
    site.poll(5, ["n2"])
    (action,) = site.journal.actions()
    undoing = replace(action, state=ActionState.UNDOING)
    site.journal.change(action, undoing)
    site.journal.change(undoing, replace(undoing, is_asked_back=True))
    site.journal.change(undoing, replace(undoing, note="in effect after all"))  # read before that
    (action,) = site.journal.actions()
    assert (action.is_asked_back, action.note) == (True, "in effect after all")
    assert action.as_json()["asked_back"]


def test_a_journal_that_says_only_in_a_remark_what_a_person_asked_back_goes_on(tmp_path):
    site = Site(tmp_path / "j.db", build_config())
    site.poll(5, ["n2"])
    (action,) = site.journal.actions()
    asked = replace(action, state=ActionState.UNDOING, note="a person asked for it back")
    site.journal.change(action, asked)
    site.journal.change(asked, replace(asked, note="in effect after all"))
    site.journal.close()
    with sqlite3.connect(site.path) as database:
        database.executescript(
            "ALTER TABLE actions DROP COLUMN asked_back; PRAGMA user_version = 3;"
        )
    database.close()
    with Journal(site.path, read_only=True) as journal:
        assert [one.is_asked_back for one in journal.actions()] == [True]
    with Journal.copy_in_memory(site.path) as journal:
        journal.add(replace(action, action_id="a0000000000"))
        assert [one.is_asked_back for one in journal.actions()] == [True, False]
    site.config = build_config(mode="dry-run")
    site.start()
    site.poll(1)
    assert (site.drained, site.states()) == (set(), ["undone"])


def test_a_node_that_somebody_took_over_is_left_alone(site):
    site.poll(5, ["n2"])
    site.slurm.nodes["n2"].mark = ""
    site.slurm.nodes["n2"].is_down = True
    site.poll(5, ["n2"])
    assert site.states() == ["left"]
    assert site.slurm.nodes["n2"].is_down


def test_undo_leaves_a_node_that_somebody_else_drained_meanwhile(site):
    site.poll(5, ["n2"])
    (action,) = site.journal.actions()
    site.slurm.nodes["n2"].mark = ""
    site.slurm.nodes["n2"].is_down = True
    ask_back(site, action)
    site.poll(4, [])
    assert site.states() == ["left"]


def test_a_node_that_the_scheduler_refuses_to_give_back_is_asked_for_until_it_is_back(site):
    site.poll(5, ["n2"])
    (action,) = site.journal.actions()
    give_back = site.slurm.reverse

    def refuse(_record):
        raise PermanentError("not for you")

    site.slurm.reverse = refuse
    ask_back(site, action)
    site.poll(5, [])
    assert (site.drained, site.states()) == ({"n2"}, ["undoing"])
    notes = [one["note"] for one in site.journal.changes(action.action_id)]
    assert notes.count("refused to give it back: not for you") == 1
    site.slurm.reverse = give_back
    site.poll(1, [])
    assert (site.drained, site.states()) == (set(), ["undone"])


@pytest.mark.parametrize(("retracts", "states"), [("true", ["undone"]), ("false", ["done"])])
def test_a_retracted_finding_gives_the_node_back_where_the_policy_says_so(
    tmp_path, retracts, states
):
    undo = f"undo: {{when_retracted: {retracts}, retracted_for: 20s}}\n"
    site = Site(tmp_path / "j.db", build_config(undo))
    site.poll(5, ["n2"])
    site.poll(5, [])
    site.fleet.say(build_verdict("n2", VerdictKind.DRAG))
    site.poll(20)
    assert site.states() == ["done"]  # neither silence nor a drag gives it back
    work(site, 10)
    assert site.states() == ["done"]
    work(site, 1)
    assert site.states() == states


def work(site, times):
    """Look so many times while the rank of n2 works like its peers."""
    for _ in range(times):
        site.n_ops += 1
        site.fleet.say(build_verdict("n2", VerdictKind.ORDINARY, n_ops=site.n_ops))
        site.poll(1)


def test_a_rank_that_was_ordinary_when_its_job_ended_gives_no_node_back(tmp_path):
    undo = "undo: {when_retracted: true, retracted_for: 20s}\n"
    site = Site(tmp_path / "j.db", build_config(undo))
    site.poll(5, ["n2"])
    work(site, 3)
    site.poll(60)  # Fleet goes on saying what it found of a rank that reports no more
    assert site.states() == ["done"]
    work(site, 10)
    assert site.states() == ["done"]  # two minutes of silence are a break
    work(site, 1)
    assert site.states() == ["undone"]


def test_in_ask_mode_a_person_decides_and_the_policy_still_must_agree(tmp_path):
    site = Site(tmp_path / "j.db", build_config(mode="ask"))
    site.poll(6, ["n2"])
    (action,) = site.journal.actions()
    assert (site.drained, action.state) == (set(), ActionState.PROPOSED)
    answer(site, action, ActionState.APPROVED)
    site.fleet.say(build_verdict("n2", n_ops=99), in_panic=True)
    site.poll(3)
    assert site.states() == ["approved"]
    site.n_ops = 100
    site.poll(4, ["n2"])
    assert (site.drained, site.states()) == ({"n2"}, ["done"])


def answer(site, action, state):
    site.journal.change(action, replace(action, state=state))


def test_what_was_approved_of_one_way_of_acting_is_not_done_in_another(tmp_path):
    site = Site(tmp_path / "j.db", build_config(mode="ask"))
    site.poll(6, ["n2"])
    answer(site, site.journal.actions()[0], ActionState.APPROVED)
    site.slurm.kind = "kubernetes"
    site.start()
    site.poll(6, ["n2"])
    assert (site.drained, site.states()) == (set(), ["approved"])


def test_what_a_person_refused_is_not_proposed_again(tmp_path):
    site = Site(tmp_path / "j.db", build_config(mode="ask"))
    site.poll(6, ["n2"])
    answer(site, site.journal.actions()[0], ActionState.REJECTED)
    site.poll(6, ["n2"])
    assert site.states() == ["rejected"]


@pytest.mark.parametrize("answered", [ActionState.REJECTED, ActionState.EXPIRED])
def test_what_was_refused_leaves_its_place_to_the_next_and_is_not_said_to_be_asked_for(
    tmp_path, answered
):
    site = Site(tmp_path / "j.db", build_config("approval: {expires: 10s}\n", mode="ask"))
    site.poll(3, ["n2"])
    if answered is ActionState.REJECTED:
        answer(site, site.journal.actions()[0], answered)
    else:
        site.poll(5, ["n2"])
    assert site.states() == [answered]
    site.poll(4, ["n2", "n3"])
    assert [(one.target, one.state) for one in site.journal.actions()] == [
        ("n2", answered),
        ("n3", ActionState.PROPOSED),
    ]
    decisions = {one.node_id: one.decision for one in site.journal.findings()}
    assert decisions["n2"].startswith("leaves n2 alone: stopped by not refused before")
    assert decisions["n3"] == "asks to act on n3"


def test_in_auto_mode_an_earlier_refusal_stops_nothing(tmp_path):
    site = Site(tmp_path / "j.db", build_config(mode="ask"))
    site.poll(6, ["n2"])
    answer(site, site.journal.actions()[0], ActionState.REJECTED)
    site.config = build_config()
    site.start()
    site.poll(6, ["n2"])
    assert site.drained == {"n2"}


def test_a_proposal_that_nobody_answers_expires(tmp_path):
    site = Site(tmp_path / "j.db", build_config("approval: {expires: 10s}\n", mode="ask"))
    site.poll(20, ["n2"])
    assert (site.drained, site.states()) == (set(), ["expired"])


def test_who_answers_what_has_changed_meanwhile_is_refused(tmp_path):
    site = Site(tmp_path / "j.db", build_config(mode="ask"))
    site.poll(6, ["n2"])
    (action,) = site.journal.actions()
    answer(site, action, ActionState.REJECTED)
    with pytest.raises(RetryableError, match="has changed meanwhile"):
        answer(site, action, ActionState.APPROVED)
    assert site.states() == ["rejected"]


@pytest.mark.parametrize(
    ("kind", "states"),
    [
        (SchedulerAnswer.LATE, ["done"]),
        (SchedulerAnswer.WRONG_NO, ["undone"]),
        (SchedulerAnswer.LOST, ["void", "done"]),
        (SchedulerAnswer.WRONG_YES, ["void", "done"]),
    ],
)
def test_a_scheduler_that_answers_wrongly_once_ends_in_a_known_state(tmp_path, kind, states):
    brakes = "settle_time: 10s, cool_down: 0s".replace("settle_time: 10s, ", "")
    site = Site(tmp_path / "j.db", build_config(brakes=brakes))
    site.slurm.late_ns = 3 * NS_PER_S
    site.poll(2, ["n2"])
    site.slurm.answer = kind
    site.poll(1, ["n2"])
    assert len(site.journal.actions()) == 1
    site.slurm.answer = SchedulerAnswer.RIGHT
    site.poll(30, ["n2"])
    assert site.states() == states
    assert (site.drained == {"n2"}) is (states[-1] == "done")


def test_a_drain_that_the_scheduler_repeats_after_its_undo_is_undone_again(site):
    site.slurm.late_ns = 3 * NS_PER_S
    site.poll(2, ["n2"])
    site.slurm.answer = SchedulerAnswer.TWICE
    site.poll(1, ["n2"])
    site.slurm.answer = SchedulerAnswer.RIGHT
    ask_back(site, site.journal.actions()[0])
    site.poll(1, [])
    assert (site.drained, site.states()) == (set(), ["undone"])
    site.poll(4, [])
    assert len(site.slurm.drained) == 2  # it came once more
    assert (site.drained, site.states()) == (set(), ["undone"])


def test_a_scheduler_that_shows_once_that_a_node_is_back_frees_no_place(site):
    site.poll(6, ["n2", "n3"])
    site.slurm.n_lies = 1
    site.poll(10, ["n2", "n3"])
    assert (len(site.slurm.drained), site.states()) == (1, ["done"])
