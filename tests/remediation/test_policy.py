"""The decision, a clause at a time: each one alone stops an action that all others let through."""

from dataclasses import replace

import pytest
from tests.remediation.site import build_config

from ingero.model.collectives import Worker
from ingero.model.verdicts import Slowdown, VerdictKind
from ingero.remediation.config import WindowConfig
from ingero.remediation.findings import CulpritFinding, NodeView
from ingero.remediation.policy import Situation, rule, rule_all
from ingero.remediation.records import ActionRecord, ActionState, Moment
from ingero.testing.remediation import CLUSTER, build_reading, build_verdict
from ingero.units import NS_PER_S

NOW = Moment(10_000 * NS_PER_S, 1_767_225_600 * NS_PER_S, "boot")  # a Thursday, 00:00
WORKER = Worker("n1", "", 0)
WINDOWS = "maintenance: [{days: [thu], end: '01:00'}]"


def finding(node="n1", *, seen_s=60, progressed_s=1, **changed):
    verdict = replace(build_verdict(node), **changed)
    at = NOW.mono_ns
    progressed = None if progressed_s is None else at - progressed_s * NS_PER_S
    return CulpritFinding(
        f"e-{node}", CLUSTER, node, verdict, at - int(seen_s * NS_PER_S), progressed
    )


def situation(**changed):
    whole = Situation(
        now=NOW,
        clusters={CLUSTER: build_reading()},
        nodes={f"n{number}": NodeView(f"n{number}", in_service=True) for number in range(1, 5)},
        can_read_nodes=True,
        targets={(CLUSTER, f"n{number}"): f"n{number}" for number in range(1, 5)},
        records=(),
        settled_ns={CLUSTER: NOW.mono_ns - 60 * NS_PER_S},
    )
    return replace(whole, **changed)


def reading(**changed):
    return {CLUSTER: replace(build_reading(), **changed)}


def record(node="n2", state=ActionState.DONE, ago_s=60, episode="e-other", boot="boot"):
    then = Moment(NOW.mono_ns - ago_s * NS_PER_S, NOW.wall_ns - ago_s * NS_PER_S, boot)
    return ActionRecord(
        action_id="a0123456789", episode=episode, cluster_id=CLUSTER, node_id=node, target=node, kind="slurm",
        state=state, began=then, changed=then, took_effect=True,
    )  # fmt: skip


def stops(ruling):
    return {clause.clause for clause in ruling.stops}


def test_what_is_clear_and_unbraked_is_let_through():
    ruling = rule(build_config(), finding(), situation())
    assert ruling.is_allowed
    assert ruling.target == "n1"


@pytest.mark.parametrize("kind", [one for one in VerdictKind if one is not VerdictKind.CULPRIT])
def test_no_other_verdict_than_culprit_is_acted_on(kind):
    assert stops(rule(build_config(), finding(kind=kind), situation())) == {"culprit"}


@pytest.mark.parametrize(
    ("clause", "changed"),
    [
        ("findings.min_evidence", {"evidence": 3.9}),
        ("findings.min_slowdown", {"slowdown": Slowdown(1.09, 1, 1.2)}),
        ("findings.min_slowdown", {"slowdown": None}),
        ("findings.min_lost_gpu_time", {"lost_gpu_ns": 599 * NS_PER_S}),
        ("findings.min_peers", {"peers": ()}),
        ("findings.min_persistence", {"seen_s": 3.9}),
        ("findings.max_age: works", {"progressed_s": None}),
        ("findings.max_age: works", {"progressed_s": 31}),
    ],
)
def test_a_finding_below_a_limit_is_stopped_by_that_limit_alone(clause, changed):
    assert stops(rule(build_config(), finding(**changed), situation())) == {clause}


@pytest.mark.parametrize(
    ("answered", "is_let", "description"),
    [
        ({}, False, "its agent has not said why yet, wanted cpu-quota or blocked-io"),
        ({WORKER: ""}, False, "its agent says nothing, wanted cpu-quota or blocked-io"),
        ({WORKER: "stopped"}, False, "its agent says stopped, wanted cpu-quota or blocked-io"),
        ({WORKER._replace(rank=1): "cpu-quota"}, False, "its agent has not said why yet"),
        ({WORKER: "blocked-io"}, True, "its agent says blocked-io"),
    ],
)
def test_a_policy_may_wait_for_a_cause_of_the_nodes_own(answered, is_let, description):
    config = build_config("", brakes="")
    wanted = config.findings.model_copy(update={"causes": ("cpu-quota", "blocked-io")})
    config = config.model_copy(update={"findings": wanted})
    ruling = rule(config, finding(), situation(clusters=reading(causes=answered)))
    assert stops(ruling) == (set() if is_let else {"findings.causes"})
    (clause,) = [one for one in ruling.clauses if one.clause == "findings.causes"]
    assert description in clause.description


def test_a_policy_without_causes_does_not_ask_for_a_diagnosis():
    ruling = rule(build_config(), finding(), situation())
    assert "findings.causes" not in {clause.clause for clause in ruling.clauses}


@pytest.mark.parametrize(
    ("clauses", "changed"),
    [
        ({"findings.max_age"}, {"clusters": reading(judged_age_ns=31 * NS_PER_S)}),
        ({"no panic"}, {"clusters": reading(in_panic=True)}),
        ({"findings.require_quorum"}, {"clusters": reading(has_quorum=False)}),
        ({"findings.min_coverage"}, {"clusters": reading(n_active=79)}),
        ({"fleet answers", "brakes.max_percent_at_once", "brakes.max_percent_per_hour"}, {"clusters": None}),
        ({"scheduler answers"}, {"nodes": None}),
        ({"node known"}, {"targets": {}}),
        ({"node in service"}, {"nodes": {"n1": NodeView("n1", in_service=False, state="DOWN")}}),
        ({"brakes.settle_time"}, {"settled_ns": {}}),
        ({"brakes.settle_time"}, {"settled_ns": {CLUSTER: NOW.mono_ns - 3 * NS_PER_S}}),
        ({"brakes.after_clock_jump"}, {"jumped_ns": NOW.mono_ns - 599 * NS_PER_S}),
        ({"brakes.stop_file"}, {"stop_file": "/x"}),
        ({"brakes.max_nodes_at_once"}, {"records": (record(),)}),
        ({"brakes.max_nodes_at_once"}, {"records": (record(state=ActionState.BEGUN),)}),
        ({"brakes.max_nodes_at_once"}, {"records": (record(state=ActionState.VOID, ago_s=3),)}),
        ({"brakes.max_nodes_per_hour"}, {"records": (record("n2", ActionState.UNDONE), record("n3", ActionState.UNDONE))}),
        ({"one action per episode"}, {"records": (record("n3", ActionState.UNDONE, episode="e-n1"),)}),
        ({"brakes.cool_down"}, {"records": (record("n1", ActionState.UNDONE),)}),
        ({"brakes.max_nodes_at_once"}, {"nodes": {"n1": NodeView("n1", in_service=True), "n4": NodeView("n4", in_service=False, mark="a9999999999")}}),
    ],
)  # fmt: skip
def test_a_situation_that_a_brake_is_for_is_stopped_by_that_brake_alone(clauses, changed):
    assert stops(rule(build_config(), finding(), situation(**changed))) == clauses


def test_what_took_no_effect_may_be_tried_three_times():
    void = record("n1", ActionState.VOID, episode="e-n1", ago_s=4000)
    tried = [
        rule(build_config(), finding(), situation(records=(void,) * count)).is_allowed
        for count in range(4)
    ]
    assert tried == [True, True, True, False]


def test_shares_are_rounded_down_so_that_a_small_cluster_loses_nothing():
    config = build_config(brakes="max_nodes_at_once: 9")
    config = config.model_copy(
        update={"brakes": config.brakes.model_copy(update={"max_percent_at_once": 10.0})}
    )
    small, large = (situation(clusters=reading(n_known=n, n_active=n)) for n in (9, 10))
    assert stops(rule(config, finding(), small)) == {"brakes.max_percent_at_once"}
    assert rule(config, finding(), large).is_allowed


def test_of_several_findings_the_costliest_takes_the_budget_and_an_approved_one_comes_first():
    cheap, dear = (
        finding("n1", lost_gpu_ns=3600 * NS_PER_S),
        finding("n2", lost_gpu_ns=7200 * NS_PER_S),
    )
    rulings = rule_all(build_config(), [cheap, dear], situation())
    assert [(one.target, one.is_allowed) for one in rulings] == [("n2", True), ("n1", False)]
    approved = record("n1", ActionState.APPROVED, episode="e-n1")
    rulings = rule_all(build_config(), [cheap, dear], situation(records=(approved,)))
    assert [(one.target, one.is_allowed) for one in rulings] == [("n1", True), ("n2", False)]


def test_protected_nodes_and_windows_stop_an_action():
    assert stops(rule(build_config(brakes="protected_nodes: ['n*']"), finding(), situation())) == {
        "brakes.protected_nodes"
    }
    assert stops(rule(build_config(brakes=WINDOWS), finding(), situation())) == {
        "brakes.maintenance"
    }
    hours = build_config(brakes=WINDOWS.replace("maintenance", "hours").replace("thu", "wed"))
    assert stops(rule(hours, finding(), situation())) == {"brakes.hours"}


@pytest.mark.parametrize(
    ("pattern", "name", "is_protected"),
    [
        ("login1", "login1", True),
        ("login1", "LOGIN1", True),
        ("Login*", "login7", True),
        ("login1", "login1.example.org", True),
        ("login1.example.org", "login1", True),
        ("login*.Example.org", "login7", True),
        ("login1.example.org", "login1.elsewhere.org", False),
        ("login1.example.org", "login2", False),
        ("login1", "login10", False),
        ("login1", "login10.example.org", False),
    ],
)
def test_a_protected_node_is_known_by_its_short_and_its_full_name(pattern, name, is_protected):
    brakes = build_config(brakes=f"protected_nodes: ['{pattern}']").brakes
    assert brakes.protects(name) == is_protected


@pytest.mark.parametrize(
    ("window", "hour", "is_in"),
    [
        ({}, 0, True),
        ({"begin": "08:00", "end": "18:00"}, 8, True),
        ({"begin": "08:00", "end": "18:00"}, 18, False),
        ({"begin": "22:00", "end": "06:00", "days": ("wed",)}, 5, True),
        ({"begin": "22:00", "end": "06:00", "days": ("thu",)}, 5, False),
        ({"begin": "22:00", "end": "06:00", "days": ("sun",)}, 4 * 24 - 1, True),
        ({"begin": "22:00", "end": "06:00", "days": ("sun",)}, 4 * 24 + 5, True),
        ({"days": ("mon",)}, 4 * 24, True),
    ],
)
def test_a_window_has_its_beginning_and_not_its_end_also_over_midnight_and_the_week(
    window, hour, is_in
):
    assert WindowConfig(**window).includes(NOW.wall_ns + hour * 3600 * NS_PER_S) is is_in


def test_hours_are_counted_by_the_steady_clock_and_over_a_boot_by_the_wall_clock_set_back_or_not():
    config = build_config(brakes="max_nodes_per_hour: 1, max_nodes_at_once: 9")
    of_today = record("n2", ActionState.UNDONE, ago_s=3601)
    of_boot = replace(of_today, began=Moment(0, NOW.wall_ns - 3599 * NS_PER_S, "before"))
    of_future = replace(of_today, began=Moment(0, NOW.wall_ns + 9999 * NS_PER_S, "before"))
    jumped = replace(of_today, began=replace(of_today.began, wall_ns=NOW.wall_ns))
    lets = [
        rule(config, finding(), situation(records=(one,))).is_allowed
        for one in (of_today, of_boot, of_future, jumped)
    ]
    assert lets == [True, False, False, True]
