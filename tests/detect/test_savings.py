"""What an action saved, from the records of one job, against what really happened in jobs with and without it."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.detect.acted_jobs import NS, OPS_A_STEP, JobPlan, simulate

from ingero.detect.judge import Judge
from ingero.detect.savings import (
    ActedEpisode,
    Charge,
    JobExtent,
    JobMember,
    OpStretch,
    estimate_savings,
    find_job,
)

WALL = 1_790_000_000 * NS
COST_S = 10.0


def stretches(reports, nodes, keep):
    """Reports of operations as stretches, one for each communicator."""
    by_comm = {}
    for at_s, run in reports:
        rows = run.ops[[keep(at_s, run, int(ns)) for ns in run.ops["entry_ns"]]]
        if len(rows):
            by_comm.setdefault((run.comm, run.n_ranks), []).append((at_s, rows))
    return [
        OpStretch(
            comm, n_ranks, nodes[comm],
            (WALL + int(found[0][0] * NS), WALL + int(found[-1][0] * NS)),
            (int(found[0][1]["entry_ns"][0]), int(found[-1][1]["entry_ns"][-1])),
            (int(found[0][1]["seq"][0]), int(found[-1][1]["seq"][-1])),
        )
        for (comm, n_ranks), found in by_comm.items()
    ]  # fmt: skip


def judge(history, until_s):
    """Fleet's charges to the culprit, as growth every ten seconds, and its verdict when it acted."""
    judge, charges, charged_ns, due_s, verdict = Judge(), [], 0, COST_S, None
    for at_s, run in history.reports:
        judge.observe([run], int(at_s * NS))
        if at_s < due_s:
            continue
        due_s = at_s + COST_S
        judge.settle(int(at_s * NS))
        (judgement,) = judge.judgements(with_history=True)
        for one in judgement.verdicts:
            if one.rank.node_id == f"n{history.plan.slow}":
                if at_s <= until_s and one.onset:
                    verdict = one
                if one.lost_gpu_ns > charged_ns:
                    grown_s = (one.lost_gpu_ns - charged_ns) / NS
                    charges.append(Charge(WALL + int(at_s * NS), grown_s, grown_s * 0.01, "EUR"))
                    charged_ns = one.lost_gpu_ns
    return charges, verdict


@cache
def record(plan):
    """What is known of the action afterwards, from the job's own reports alone."""
    history = simulate(plan)
    charges, verdict = judge(history, plan.acted_s)
    assert verdict is not None, "the culprit was not found before the action"
    nodes, job, members = {}, [], []
    for at_s, run in history.reports:
        nodes.setdefault(run.comm, set()).add(run.rank.node_id)
        if at_s <= plan.acted_s:
            members.append(
                JobMember(
                    run.comm,
                    f"{run.rank.node_id}/{run.rank.rank}",
                    run.rank.node_id,
                    run.rank.n_gpus,
                )
            )
    job = find_job(members, f"n{plan.slow}/{plan.slow}")
    mine = [one for one in history.reports if one[1].rank.rank == plan.slow]
    onset_ns = verdict.onset.entry_ns
    before = stretches(
        mine, nodes, lambda at_s, run, entry_ns: at_s <= plan.acted_s and entry_ns >= onset_ns and run.rank.node_id != "spare",
    )  # fmt: skip
    after = stretches(mine, nodes, lambda at_s, run, _: at_s > plan.acted_s)
    return ActedEpisode(
        WALL + int(plan.acted_s * NS), job, before, after, charges,
    )  # fmt: skip


@pytest.mark.parametrize(
    "plan",
    [
        JobPlan(acted_s=180.0),
        JobPlan(factor=1.3, n_steps=1200, acted_s=200.0, standstill_s=20.0, seed=4),
        JobPlan(n_ranks=4, factor=2.5, acted_s=120.0, standstill_s=90.0, seed=5),
    ],
)
def test_the_estimate_from_one_job_is_within_a_tenth_of_what_the_jobs_without_it_show(plan):
    acted, unaided, healthy = (
        simulate(one) for one in (plan, replace(plan, acted_s=None), replace(plan, acted_s=None, fault_s=1e9))
    )  # fmt: skip
    facts = record(plan)
    found = estimate_savings(facts)
    saved = unaided.gpu_s - acted.gpu_s
    assert saved > 0
    assert found.unknown == ""
    assert found.saved_gpu_s == pytest.approx(saved, rel=0.1)
    assert found.amount == pytest.approx(saved * 0.01, rel=0.1)
    assert found.currency == "EUR"
    assert found.n_gpus == plan.n_ranks
    # what was lost, with the action and without: by those who waited, so all ranks but the culprit
    others = (plan.n_ranks - 1) / plan.n_ranks
    lost = found.lost_gpu_s + others * found.standstill_gpu_s
    assert lost == pytest.approx(others * (acted.gpu_s - healthy.gpu_s), rel=0.1)
    would = found.lost_gpu_s + found.would_have_lost_gpu_s
    assert would == pytest.approx(others * (unaided.gpu_s - healthy.gpu_s), rel=0.1)
    assert found.still_lost_gpu_s < 0.05 * found.lost_gpu_s


def test_steps_done_twice_are_counted_where_they_are_known_and_would_be_taken_for_saved_otherwise():
    plan = JobPlan(acted_s=180.0, checkpoint_steps=200)
    acted, unaided = simulate(plan), simulate(replace(plan, acted_s=None))
    assert acted.n_repeated_steps > 50
    facts = record(plan)
    saved = unaided.gpu_s - acted.gpu_s
    n_repeated = acted.n_repeated_steps * OPS_A_STEP
    assert estimate_savings(replace(facts, n_repeated=n_repeated)).saved_gpu_s == pytest.approx(
        saved, rel=0.1
    )
    blind = estimate_savings(facts).saved_gpu_s
    twice = acted.n_repeated_steps * plan.step_s * plan.factor * plan.n_ranks
    assert blind == pytest.approx(saved + twice, rel=0.1)


def test_an_action_that_changes_nothing_for_the_job_saves_nothing():
    found = estimate_savings(record(JobPlan(acted_s=180.0, is_requeued=False)))
    assert found.unknown == ""
    assert abs(found.saved_gpu_s) < 0.02 * found.n_gpus * found.took_s
    assert found.still_lost_gpu_s > found.lost_gpu_s
    assert found.standstill_gpu_s == 0


def test_a_job_that_went_on_is_not_taken_for_ended_because_another_one_came_later():
    facts = record(JobPlan(acted_s=180.0, is_requeued=False))
    alone = estimate_savings(facts)
    (last,) = facts.after
    later = replace(last, comm="later", wall_ns=(last.wall_ns[1] + NS, last.wall_ns[1] + 900 * NS))
    assert estimate_savings(replace(facts, after=[last, later])) == alone


def test_an_action_just_before_the_jobs_end_costs_more_than_it_saves():
    plan = JobPlan(n_steps=330, acted_s=180.0)
    saved = simulate(replace(plan, acted_s=None)).gpu_s - simulate(plan).gpu_s
    found = estimate_savings(record(plan))
    assert saved < 0
    assert found.saved_gpu_s == pytest.approx(saved, rel=0.1)


def test_what_is_not_known_is_said_and_no_number_stands_for_it():
    facts = record(JobPlan(acted_s=180.0))
    assert estimate_savings(facts).saved_gpu_s is not None
    for gone, description in (
        ({"after": ()}, "no operation of the job is known after the action"),
        ({"before": ()}, "0 operations of the culprit are known"),
        ({"job": JobExtent(frozenset(), None)}, "the GPUs of the job are not known"),
        ({"after": [replace(one, comm="other", n_ranks=2) for one in facts.after]}, "no operation of the job"),
        ({"after": [replace(one, comm="other", nodes=frozenset({"far"})) for one in facts.after]}, "no operation of the job"),
    ):  # fmt: skip
        found = estimate_savings(replace(facts, **gone))
        assert found.unknown.startswith(description)
        assert (found.saved_gpu_s, found.would_have_lost_gpu_s, found.amount) == (None, None, None)
        assert found.lost_gpu_s > 0, "what was charged stays known"
    unpaid = [one._replace(amount=None) for one in facts.charges]
    two = [one._replace(currency="USD") if at % 2 else one for at, one in enumerate(facts.charges)]
    assert {estimate_savings(replace(facts, charges=some)).amount for some in (unpaid, two)} == {
        None
    }
    free = estimate_savings(replace(facts, charges=()))
    assert (free.lost_gpu_s, free.lost_gpu_s_per_s) == (None, None)
    assert free.saved_gpu_s == estimate_savings(facts).saved_gpu_s


JOB = JobExtent(frozenset({"a", "b"}), 2)


def line_up(begin_ns, gaps_ns, cut, comms=("x", "y")):
    """One rank's operations with these gaps, on each communicator, so many in a stretch; and when the last of them was."""
    moments = [begin_ns + sum(gaps_ns[:at]) for at in range(len(gaps_ns) + 1)]
    pieces = [range(at, min(at + cut, len(moments))) for at in range(0, len(moments), cut)]
    spans = [(moments[some[0]], moments[some[-1]], (some[0], some[-1])) for some in pieces]
    found = [
        OpStretch(comm, 2, JOB.nodes, (first, last), (first, last), seq)
        for comm in comms
        for first, last, seq in spans
    ]
    return found, moments[-1]


@pytest.mark.parametrize("cut", [1, 4])
def test_fast_operations_before_a_fault_whose_onset_was_found_early_do_not_lessen_what_was_saved(
    cut,
):
    """A drain five seconds after the onset, which was found a second early: 10 operations of 100 ms, then 26 of 150."""
    fast, slow = 100_000_000, 150_000_000
    before, done_ns = line_up(WALL, [fast] * 10 + [slow] * 26, cut)
    after, _ = line_up(done_ns + 20 * NS, [fast] * 499, 500, ("u", "v"))
    found = estimate_savings(ActedEpisode(done_ns, JOB, before, after))
    assert found.would_have_taken_s == pytest.approx(500 * 0.15, rel=0.02)
    steady, done_ns = line_up(WALL, [slow] * 36, cut)
    found = estimate_savings(ActedEpisode(done_ns, JOB, steady, after))
    assert found.would_have_taken_s == pytest.approx(500 * 0.15)
    assert found.saved_error_gpu_s == pytest.approx(0, abs=1e-6)


def test_the_truth_lies_within_two_standard_errors_as_often_as_statistics_say():
    """Of 400 jobs whose pace before varies at random around 20 ms."""
    generator, n_inside, n_jobs = np.random.default_rng(7), 0, 400
    for _ in range(n_jobs):
        before, done_ns = line_up(WALL, [int(ns) for ns in generator.exponential(20e6, 250)], 4)
        after, _ = line_up(done_ns + 20 * NS, [10_000_000] * 499, 500, ("u", "v"))
        found = estimate_savings(ActedEpisode(done_ns, JOB, before, after))
        off_s = JOB.n_gpus * abs(found.would_have_taken_s - 500 * 0.02)
        n_inside += off_s < 2 * found.saved_error_gpu_s
    assert 0.85 < n_inside / n_jobs < 0.95  # Student's t with five degrees of freedom: 0.90


MEMBERS = st.lists(
    st.builds(lambda comm, worker, n: JobMember(comm, worker, f"n{worker}", n), st.sampled_from("ABCDE"),
              st.sampled_from("123456"), st.just(2)),
    max_size=14,
)  # fmt: skip


@given(MEMBERS, st.sampled_from("123456"))
def test_a_job_is_whoever_can_be_reached_over_communicators(members, worker):
    reached = {worker} if any(one.worker == worker for one in members) else set()
    for _ in members:
        for one in members:
            for other in members:
                if one.comm == other.comm and one.worker in reached:
                    reached.add(other.worker)
    found = find_job(members, worker)
    assert found.nodes == {f"n{name}" for name in reached}
    assert found.n_gpus == (2 * len(reached) or None)
    unknown = [one._replace(n_gpus=None) if one.worker in reached else one for one in members]
    assert find_job(unknown, worker).n_gpus is None


@given(
    st.integers(20, 60), st.integers(1, 80), st.integers(5, 60), st.integers(1, 9), st.integers(1, 9), st.integers(1, 64),
)  # fmt: skip
def test_a_requeued_job_is_counted_operation_by_operation(
    n_before, n_after, gap_s, slow_s, fast_s, n_gpus
):
    """Against a loop over the single operations, for any pace, gap and length."""
    before = [(WALL + n * slow_s * NS, n) for n in range(n_before)]
    here_ns = before[-1][0]
    after = [(here_ns + (gap_s + n * fast_s) * NS, n) for n in range(n_after)]
    would_ns = 0
    for _ in after:
        would_ns += slow_s * NS
    saved_s = n_gpus * (would_ns - (after[-1][0] - here_ns)) / NS
    nodes = frozenset({"a", "b"})
    old, new = (
        OpStretch(comm, 2, nodes, (ops[0][0], ops[-1][0]), (ops[0][0] - 7, ops[-1][0] - 7), (ops[0][1], ops[-1][1]))
        for comm, ops in (("x", before), ("y", after))
    )  # fmt: skip
    found = estimate_savings(ActedEpisode(here_ns, JobExtent(nodes, n_gpus), [old], [new]))
    assert found.saved_gpu_s == pytest.approx(saved_s)
    assert found.standstill_gpu_s == pytest.approx(n_gpus * gap_s)
    assert found.until_ns == after[-1][0]
