"""To whom waiting is charged."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.detect.simulated_jobs import simulate, slow
from tests.support.synthetic_jobs import JobShape

from ingero.detect.charges import ALWAYS, SlowSpan, align_spans, charge_wait, invert_charges
from ingero.detect.judge import Judge, JudgeSettings
from ingero.job_traces.model import iter_pushes
from ingero.model.collectives import CollectiveRun
from ingero.units import NS_PER_S

OPEN = math.inf


def test_slowdowns_beside_each_other_share_the_greatest_excess():
    judged = {1: [SlowSpan(10, OPEN, 60)], 2: [SlowSpan(20, 40, 30)], 3: [SlowSpan(35, 90, 10)]}
    assert charge_wait(1000, 0, judged) == {1: 36, 2: 18, 3: 6}
    assert charge_wait(10, 0, judged) == {1: 6, 2: 3, 3: 1}
    assert charge_wait(1000, 1, judged) == {2: 23, 3: 7}


def test_slowdowns_after_each_other_are_charged_with_all_that_each_took():
    earlier = {1: [SlowSpan(0, 100, 60)]}
    later = {**earlier, 2: [SlowSpan(101, OPEN, 30)]}
    assert charge_wait(60, 0, earlier) == {1: 60}
    assert charge_wait(90, 0, later) == {1: 60, 2: 30}
    assert charge_wait(200, 0, later) == {1: 60, 2: 30}


def test_a_later_slowdown_takes_nothing_back():
    earlier = {1: [SlowSpan(0, 100, 60)]}
    later = {**earlier, 2: [SlowSpan(101, OPEN, 3000)]}
    assert charge_wait(70, 0, later) == {1: 60, 2: 10}
    assert charge_wait(50, 0, later) == {1: 50}


def test_one_workers_slowdowns_count_each_beside_whom_they_were():
    judged = {
        1: [SlowSpan(0, 10, 40), SlowSpan(50, 60, 20)],
        2: [SlowSpan(55, 70, 20)],
        3: [SlowSpan(80, 90, 0)],
    }
    assert charge_wait(1000, 0, judged) == {1: 50, 2: 10}


def test_what_has_no_dates_was_beside_all():
    judged = {1: [SlowSpan(0, 10, 40)], 2: [SlowSpan(*ALWAYS, 40)], 3: [SlowSpan(50, OPEN, 20)]}
    assert charge_wait(1000, 0, judged) == {1: 16, 2: 16, 3: 8}


def test_slowdowns_on_other_clocks_are_brought_to_the_one_that_is_furthest_ahead():
    spans = {1: [SlowSpan(0, 10, 40)], 2: [SlowSpan(-100, OPEN, 20), SlowSpan(*ALWAYS, 5)]}
    aligned = {1: spans[1], 2: [SlowSpan(0, OPEN, 20), SlowSpan(*ALWAYS, 5)]}
    assert align_spans(spans, {1: 7, 2: 107}, 60) == aligned
    assert align_spans(spans, {1: 7, 2: 107}, 100) == spans
    assert align_spans(spans, {2: 107}, 60) == align_spans(spans, {}, 60) == spans


def test_clocks_of_one_rack_that_is_behind_stay_beside_each_other():
    spans = {0: [SlowSpan(-500, -480, 1)], 1: [SlowSpan(0, 20, 10)], 2: [SlowSpan(2, 22, 10)]}
    aligned = align_spans(spans, {0: 0, 1: 59, 2: 61}, 60)
    assert aligned == {0: spans[0], 1: [SlowSpan(59, 79, 10)], 2: [SlowSpan(63, 83, 10)]}


def _charge_pair(later, ahead_ns=0, late_ns=0):
    """Who is charged where workers 1 and 3 are slow, the second from another step on.

    Args:
        later: That step.
        ahead_ns: By how much the clock of worker 3 is ahead.
        late_ns: By how much each of its reports is late.
    """

    def change(work, rng):
        slow(1.5, (1, 0), since=2, until=12)(work, rng)
        return slow(1.5, (3, 0), since=later, until=later + 11)(work, rng)

    trace = simulate(JobShape(n_dp=6, n_stages=1, n_microbatches=8, n_steps=60), change=change)
    pushes = [
        (push.at_ns + (late_ns if push.worker == 3 else 0), at, push)
        for at, push in enumerate(iter_pushes(trace, NS_PER_S))
    ]
    found = Judge(JudgeSettings(patience_ns=5 * NS_PER_S))
    for at_ns, _, push in sorted(pushes, key=lambda one: one[:2]):
        is_third = push.worker == 3
        by_ns = 86_400 * NS_PER_S + (ahead_ns if is_third else 0)
        found.observe([_move(run, by_ns) for run in push.runs], at_ns, late_ns if is_third else 0)
        if not late_ns:
            found.settle(at_ns)
    found.settle(at_ns, final=True)
    (judgement,) = found.judgements(with_history=True)
    return {one.rank: one.charged_to for one in judgement.verdicts}


@pytest.mark.parametrize("ahead_s", [3600, -3600])
@pytest.mark.parametrize("later", [2, 40])
def test_who_is_charged_does_not_depend_on_a_nodes_clock(ahead_s, later):
    charged = _charge_pair(later)
    assert {rank.rank for of_one in charged.values() for rank in of_one} == {1, 3}
    assert _charge_pair(later, ahead_ns=ahead_s * NS_PER_S) == charged


def test_nor_on_how_late_its_reports_are():
    assert _charge_pair(2, late_ns=60 * NS_PER_S) == _charge_pair(2)


def _move(run, ahead_ns):
    ops = np.array(run.ops)
    ops["entry_ns"] += ahead_ns
    return CollectiveRun(run.rank, run.comm, run.comm_rank, run.n_ranks, run.clock, ops)


def test_nobody_is_charged_with_its_own_wait_or_without_a_culprit():
    assert charge_wait(1000, 0, {}) == {}
    assert charge_wait(1000, 0, {0: [SlowSpan(0, OPEN, 5)]}) == {}


SPANS = st.builds(
    lambda start, length, excess: SlowSpan(start, start + length, excess),
    st.integers(0, 1000),
    st.integers(0, 300),
    st.integers(0, 10**12),
)


@given(
    st.integers(0, 10**12),
    st.dictionaries(st.integers(0, 5), st.lists(SPANS, max_size=4), max_size=6),
)
def test_what_is_charged_is_at_most_the_wait_and_at_most_what_each_took(wait_ns, judged):
    charged = charge_wait(wait_ns, 0, judged)
    assert sum(charged.values()) <= wait_ns
    for other, amount in charged.items():
        assert other != 0
        assert 0 < amount <= sum(one.excess_ns for one in judged[other])
    assert invert_charges({0: charged}) == {other: {0: a} for other, a in charged.items()}


@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.dictionaries(st.integers(1, 5), st.lists(SPANS, max_size=4), max_size=5),
    st.integers(1, 10**6),
)
def test_a_slowdown_that_begins_after_all_others_leaves_their_charges_as_they_are(
    wait_ns, more_ns, judged, excess_ns
):
    before = charge_wait(wait_ns, 0, judged)
    after = charge_wait(wait_ns + more_ns, 0, {**judged, 6: [SlowSpan(5000, OPEN, excess_ns)]})
    assert all(after.get(other, 0) >= amount for other, amount in before.items())
