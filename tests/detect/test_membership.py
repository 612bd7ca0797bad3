"""Restarts, spares, joiners, leavers and few peers: no verdict appears or vanishes because peers change."""

from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
from tests.support.synthetic_jobs import JobShape, build_work, follow, normal_noise, run_job

from ingero.detect.judge import Judge, JudgeSettings
from ingero.job_traces.convert import build_job_trace
from ingero.job_traces.model import iter_pushes
from ingero.model.verdicts import VerdictKind
from ingero.units import NS_PER_S

SHAPE = JobShape(n_dp=4, n_stages=2, n_microbatches=6, n_steps=30)


def life(n_steps=30, n_dp=4, seed=0, slow=(), **shape):
    """One life of a job, from its start to its end."""
    rng = np.random.default_rng(seed)
    shape = replace(SHAPE, n_steps=n_steps, n_dp=n_dp, **shape)
    work = build_work(shape, normal_noise(0.02), rng)
    for dp, stage, factor in slow:
        work[:, dp, stage] *= factor
    return build_job_trace(run_job(shape, work), "job")


def beside(trace, job):
    """The same job under another name on the same nodes, with communicators of its own."""
    runs = tuple(
        tuple(
            replace(run, comm=f"{job} {run.comm}", rank=replace(run.rank, job=job))
            for run in of_worker
        )
        for of_worker in trace.runs
    )
    return replace(
        trace, runs=runs, workers=tuple(replace(worker, job=job) for worker in trace.workers)
    )


def test_two_jobs_on_the_same_nodes_are_judged_apart():
    slow, healthy = life(slow=[(1, 1, 1.4)]), beside(life(seed=1), "b")
    found = Judge()
    for trace in (slow, healthy):
        for runs in trace.runs:
            found.observe(runs, 0)
    found.settle(0, final=True)
    first, second = found.judgements()
    assert first.verdicts == at_once(slow).verdicts
    assert second.verdicts == at_once(healthy).verdicts
    assert named(first, *BLAMED) == {("dp1-stage1", "culprit")}
    assert {verdict.kind for verdict in second.verdicts} == {VerdictKind.ORDINARY}


def test_a_verdict_says_where_its_worker_ran_last():
    trace, found = life(slow=[(1, 1, 1.4)]), Judge()
    for pod in ("first", "second", ""):
        place = (("k8s.pod.name", pod),) if pod else ()
        for runs in trace.runs:
            moved = [replace(run, rank=replace(run.rank, resource=place)) for run in runs]
            found.observe(tuple(moved), 0)
    found.settle(0, final=True)
    (judgement,) = found.judgements()
    assert {one.rank.resource for one in judgement.verdicts} == {(("k8s.pod.name", "second"),)}


def at_once(trace):
    found = Judge()
    for runs in trace.runs:
        found.observe(runs, 0)
    found.settle(0, final=True)
    return found.judgements()[0]


def in_pushes(trace):
    found = Judge()
    for push in iter_pushes(trace, 20 * NS_PER_S):
        found.observe(push.runs, push.at_ns)
        found.settle(push.at_ns)
    for after_s in (10, 80, 150, 220):
        found.settle(push.at_ns + after_s * NS_PER_S)
    return found.judgements()[0]


def named(judgement, *kinds):
    return {
        (verdict.rank.node_id, verdict.kind.value)
        for verdict in judgement.verdicts
        if verdict.kind in kinds
    }


BLAMED = (VerdictKind.CULPRIT, VerdictKind.DRAG, VerdictKind.NETWORK)
WAYS = pytest.mark.parametrize("judge", [at_once, in_pushes])


@WAYS
def test_a_restart_of_a_healthy_job_blames_nobody(judge):
    assert named(judge(follow(life(), life(seed=1))), *BLAMED) == set()


@WAYS
def test_a_slow_worker_stays_named_through_a_restart(judge):
    slow = [(2, 1, 1.4)]
    judgement = judge(follow(life(slow=slow), life(seed=1, slow=slow)))
    assert named(judgement, *BLAMED) == {("dp2-stage1", "culprit")}
    (culprit,) = judgement.culprits
    assert culprit.slowdown.median == pytest.approx(1.4, rel=0.03)
    assert culprit.onset.entry_ns < 10 * NS_PER_S, "the onset is in its first life"
    assert culprit.detected_entry_ns < 10 * NS_PER_S, "and what was found there stands"


def test_a_slow_worker_whose_new_group_opens_without_its_peers_stays_named_since_it_was():
    """They report later than is waited for them, and are added then."""
    slow, found = [(2, 0, 1.4)], Judge(JudgeSettings(patience_ns=NS_PER_S))
    first = life(slow=slow)
    trace = follow(first, life(seed=1, slow=slow))
    of_first = {run.comm for runs in first.runs for run in runs}
    (who,) = (at for at, one in enumerate(trace.workers) if one.node_id == "dp2-stage0")
    others = [at for at in range(len(trace.workers)) if at != who]
    for is_first, workers, now_s in (
        (True, [who, *others], 0),
        (False, [who], 10),
        (False, others, 20),
    ):
        for at in workers:
            runs = tuple(run for run in trace.runs[at] if (run.comm in of_first) is is_first)
            found.observe(runs, now_s * NS_PER_S)
        for later_s in (0, 8):
            found.settle((now_s + later_s) * NS_PER_S)
    found.settle(40 * NS_PER_S, final=True)
    (culprit,) = found.judgements()[0].culprits
    assert culprit.rank.node_id == "dp2-stage0"
    assert culprit.detected_entry_ns < 10 * NS_PER_S, "in its first life"


@WAYS
def test_a_worker_that_a_restart_cured_is_cleared(judge):
    judgement = judge(follow(life(slow=[(2, 1, 1.4)]), life(seed=1)))
    assert named(judgement, *BLAMED) == set()


@WAYS
@pytest.mark.parametrize("factor", [1.0, 1.4])
def test_a_spare_is_judged_among_the_peers_that_it_joined(judge, factor):
    trace = follow(life(), life(seed=1, slow=[(1, 0, factor)]), {"dp1-stage0": "spare"})
    judgement = judge(trace)
    expected = {("spare", "culprit")} if factor > 1.0 else set()
    assert named(judgement, *BLAMED) == expected
    (spare,) = [v for v in judgement.verdicts if v.rank.node_id == "spare"]
    assert spare.kind is not VerdictKind.UNKNOWN
    assert {peer.node_id for peer in spare.peers} == {
        "spare", "dp0-stage0", "dp2-stage0", "dp3-stage0",
    }  # fmt: skip


@WAYS
def test_a_slow_worker_stays_named_when_a_spare_joins_its_peers(judge):
    slow = [(2, 0, 1.4)]
    judgement = judge(follow(life(slow=slow), life(seed=1, slow=slow), {"dp1-stage0": "spare"}))
    assert named(judgement, *BLAMED) == {("dp2-stage0", "culprit")}


ONE_STAGE = {"n_dp": 4, "n_stages": 1, "n_microbatches": 18}


@WAYS
def test_who_is_left_behind_by_a_restart_makes_no_stage_of_those_who_went_on(judge):
    healthy = [life(seed=seed, **ONE_STAGE) for seed in range(2)]
    judgement = judge(follow(*healthy, {"dp3-stage0": "spare"}))
    kinds = {verdict.rank.node_id: verdict.kind for verdict in judgement.verdicts}
    assert kinds.pop("dp3-stage0") is VerdictKind.UNKNOWN
    assert set(kinds.values()) == {VerdictKind.ORDINARY}


def give_rank(trace, nodes):
    """The same job as one with an id, its ranks on these nodes in this order."""
    place = {worker.node_id: at for at, worker in enumerate(trace.workers)}

    def rename(rank):
        return replace(rank, node_id=nodes[place[rank.node_id]], job="j")

    runs = tuple(
        tuple(replace(run, rank=rename(run.rank)) for run in of_worker) for of_worker in trace.runs
    )
    return replace(trace, runs=runs, workers=tuple(map(rename, trace.workers)))


def in_two_lives(first, second):
    found = Judge()
    for push in iter_pushes(follow(first, second), 5 * NS_PER_S):
        found.observe(push.runs, push.at_ns)
        found.settle(push.at_ns)
    found.settle(push.at_ns + 10 * NS_PER_S)
    return [one for judgement in found.judgements() for one in judgement.verdicts]


def test_of_a_job_that_shrank_to_half_those_who_are_gone_are_judged_no_more():
    first = life(n_dp=6, slow=[(5, 0, 1.5)], n_stages=1)
    verdicts = in_two_lives(first, life(n_dp=3, seed=1, n_steps=60, n_stages=1))
    kinds = {one.rank.node_id: (one.kind, one.reason) for one in verdicts}
    gone = {kinds.pop(f"dp{at}-stage0") for at in (3, 4, 5)}
    assert gone == {(VerdictKind.UNKNOWN, "its peers went on without it")}
    assert {kind for kind, _ in kinds.values()} == {VerdictKind.ORDINARY}


def test_of_a_job_whose_ranks_got_other_nodes_only_its_present_ranks_are_judged():
    """The slow node is out, a spare is in, and each rank behind it moved up by one node."""
    before = [f"n{at}" for at in range(4)]
    first = give_rank(life(slow=[(1, 0, 1.5)], n_stages=1), before)
    after = ["n2", "n3", "spare", "n0"]
    second = give_rank(life(seed=1, n_steps=40, n_stages=1), after)
    verdicts = in_two_lives(first, second)
    present = [one for one in verdicts if after[one.rank.rank] == one.rank.node_id]
    assert len(present) == 4
    assert {one.kind for one in present} == {VerdictKind.ORDINARY}
    gone = [one for one in verdicts if one not in present]
    assert {one.rank.node_id for one in gone} == set(before)
    assert {one.kind for one in gone} == {VerdictKind.UNKNOWN}


def test_nobody_waits_for_a_slow_worker_that_was_left_behind_and_its_cost_stays_in_the_history():
    slow = life(slow=[(3, 0, 1.5)], **ONE_STAGE)
    trace = follow(slow, life(seed=1, **ONE_STAGE), {"dp3-stage0": "spare"})
    found = Judge()
    for push in iter_pushes(trace, 2 * NS_PER_S):
        found.observe(push.runs, push.at_ns)
        found.settle(push.at_ns)
    found.settle(push.at_ns, final=True)
    (now,) = found.judgements()
    assert named(now, *BLAMED) == set()
    assert now.charged_gpu_ns == 0
    (history,) = found.judgements(with_history=True)
    (culprit,) = history.culprits
    assert culprit.rank.node_id == "dp3-stage0"
    waited = {victim.node_id for victim in culprit.victims}
    assert waited == {"dp0-stage0", "dp1-stage0", "dp2-stage0"}
    (spare,) = [v for v in history.verdicts if v.rank.node_id == "spare"]
    assert spare.charged_to == {}, "it came when the slow one had gone"


@WAYS
@pytest.mark.parametrize(("before", "after"), [(4, 6), (6, 4), (4, 3)])
def test_a_job_that_grows_or_shrinks_keeps_its_culprit_and_finds_no_other(judge, before, after):
    slow = [(2, 1, 1.4)]
    trace = follow(life(n_dp=before, slow=slow), life(n_dp=after, seed=1, slow=slow))
    judgement = judge(trace)
    assert named(judgement, *BLAMED) == {("dp2-stage1", "culprit")}


@pytest.mark.parametrize("n_after", [4, 3, 2])
@pytest.mark.parametrize("factor", [1.0, 1.5], ids=["cured", "slow"])
def test_what_a_slow_worker_cost_before_a_restart_is_charged_after_it(factor, n_after):
    """Whether the restart cured it or not, and although two peers can say nothing of each other."""
    first = life(slow=[(1, 0, 1.5)])
    second = life(n_dp=n_after, seed=1, slow=[(1, 0, factor)])
    found, before = Judge(), None
    for push in iter_pushes(follow(first, second), 5 * NS_PER_S):
        if before is None and push.at_ns > int(first.steps["end_ns"][-1]) + 10 * NS_PER_S:
            (before,) = found.judgements(with_history=True)
        found.observe(push.runs, push.at_ns)
        found.settle(push.at_ns)
    found.settle(push.at_ns, final=True)
    (culprit,) = before.culprits
    (after,) = found.judgements(with_history=True)
    assert [one.rank for one in after.culprits] == [culprit.rank]
    assert before.charged_gpu_ns > 60 * NS_PER_S
    assert after.charged_gpu_ns >= 0.98 * before.charged_gpu_ns
    now = {one.rank.worker: one.kind for one in found.judgements()[0].verdicts}
    compared = VerdictKind.CULPRIT if factor > 1.0 else VerdictKind.ORDINARY
    assert now[culprit.rank.worker] is (VerdictKind.UNKNOWN if n_after == 2 else compared)


@WAYS
def test_a_slow_worker_among_those_that_a_job_grew_by_is_found(judge):
    judgement = judge(follow(life(), life(n_dp=6, seed=1, slow=[(5, 1, 1.4)])))
    assert named(judgement, *BLAMED) == {("dp5-stage1", "culprit")}


def test_a_rank_that_reports_only_later_is_compared_from_then_on():
    """Its peers' comparison began without it, after the patience."""
    trace = life(n_steps=60, slow=[(3, 1, 1.4)])
    found = Judge(JudgeSettings(patience_ns=5 * NS_PER_S))
    for push in iter_pushes(trace, 5 * NS_PER_S):
        is_late = trace.workers[push.worker].node_id == "dp3-stage1"
        if is_late and push.at_ns < 30 * NS_PER_S:
            continue
        found.observe(push.runs, push.at_ns)
        found.settle(push.at_ns)
    found.settle(push.at_ns + 60 * NS_PER_S)
    (judgement,) = found.judgements()
    assert named(judgement, *BLAMED) == {("dp3-stage1", "culprit")}
    assert judgement.counts["late_members"] == 0


def test_two_ranks_that_report_only_later_one_after_the_other_change_nothing_for_their_peers():
    """As when agents are installed node by node: one is no member of the group yet while the other is still away."""
    late_s = {"dp2-stage1": 20, "dp3-stage1": 50}
    trace = life(n_steps=120, n_dp=6, slow=[(1, 1, 1.4)])
    found = Judge(JudgeSettings(patience_ns=5 * NS_PER_S))
    named_since = []
    for at_ns, pushes in groupby(iter_pushes(trace, 5 * NS_PER_S), lambda push: push.at_ns):
        for push in pushes:
            if at_ns >= late_s.get(trace.workers[push.worker].node_id, 0) * NS_PER_S:
                found.observe(push.runs, at_ns)
        found.settle(at_ns)
        named_since += [named(one, *BLAMED) for one in found.judgements()]
    found.settle(push.at_ns + 60 * NS_PER_S)
    named_since += [named(one, *BLAMED) for one in found.judgements()]
    assert push.at_ns > 60 * NS_PER_S
    first = named_since.index({("dp1-stage1", "culprit")})
    assert set(map(frozenset, named_since[first:])) == {frozenset({("dp1-stage1", "culprit")})}
    assert all(not one for one in named_since[:first])


@WAYS
def test_of_three_peers_the_slow_one_is_named(judge):
    judgement = judge(life(n_dp=3, slow=[(1, 0, 1.2)]))
    assert named(judgement, *BLAMED) == {("dp1-stage0", "culprit")}


@WAYS
def test_of_two_peers_neither_is_blamed_and_their_ratio_is_told(judge):
    judgement = judge(life(n_dp=2, slow=[(1, 0, 1.5)]))
    assert {verdict.kind for verdict in judgement.verdicts} == {VerdictKind.UNKNOWN}
    (slow,) = [v for v in judgement.verdicts if v.rank.node_id == "dp1-stage0"]
    assert "1.5" in slow.reason
