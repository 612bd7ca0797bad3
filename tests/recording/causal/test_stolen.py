"""Processors that a hypervisor gives to others: a cause of its own, however the kernel counts that time."""

from dataclasses import replace

import pytest
from tests.recording.causal.planted_work import explain, named, work

from ingero.model.counters import OffCpuTimes, ProcessorTimes
from ingero.recording.causal.excess import find_excess_causes
from ingero.recording.causal.work_rates import find_median, find_rates
from ingero.units import NS_PER_MS, NS_PER_S


def on_machine(one, worked_ms, stolen_ms, which=3):
    """Work on processors that did so much for each of its operations, and were taken for so long."""
    first = replace(one.first, processors=ProcessorTimes(NS_PER_S, NS_PER_S, 3))
    worked, stolen = (NS_PER_S + one.n_ops * ms * NS_PER_MS for ms in (worked_ms, stolen_ms))
    last = replace(
        one.last, processors=ProcessorTimes(worked, stolen, which), n_processors_allowed=2
    )
    return replace(one, first=first, last=last)


BEFORE = on_machine(work(400, 10, run_ms=5), 20, 0)


@pytest.mark.parametrize(
    ("run_ms", "worked_ms"),
    [
        (5, 20),  # a kernel that leaves it out of what threads ran
        (15, 60),  # one that does not
    ],
)
def test_it_is_named_with_a_thread_s_part_of_what_was_taken(run_ms, worked_ms):
    after = on_machine(work(100, 20, run_ms=run_ms), worked_ms, 40)
    (cause,) = explain(0.5, after, BEFORE, None).causes
    assert (cause.kind, cause.share) == ("cpu-steal", 1.0)
    share = round(100 * 40 / (40 + worked_ms))
    assert cause.evidence == (
        "taken 10 ms an operation, 0 ns before",
        f"its 2 processors: {share}% of the time in which they had work",
    )


def test_what_was_taken_before_explains_nothing():
    before = on_machine(work(400, 10, run_ms=5), 20, 8)
    after = on_machine(work(100, 20, run_ms=5, ready_ms=10), 20, 8)
    found = explain(0.5, after, before, None)
    assert named(found) == [("cpu-contention", 1.0)]


def test_what_it_computes_more_stands_beside_it():
    """Ten more, of which it computes seven and three were taken."""
    after = on_machine(work(100, 20, run_ms=12), 24, 6)
    assert named(explain(0.5, after, BEFORE, None)) == [
        ("more-computing", 0.7),
        ("cpu-steal", 0.3),
    ]


def test_a_normal_wait_for_a_disk_takes_no_part_of_it():
    seen = OffCpuTimes(n_ops=50, io_ns=50 * 8 * NS_PER_MS)
    after = on_machine(work(100, 20, run_ms=5), 20, 40)
    assert named(explain(0.5, after, BEFORE, seen)) == [("cpu-steal", 1.0)]


def test_beside_peers_of_its_machine_only_what_they_do_not_lose_counts():
    one = on_machine(work(400, 10, run_ms=5), 20, 8)
    after = on_machine(work(100, 20, run_ms=5), 20, 40)
    found = find_excess_causes(0.5, after, find_median([find_rates(one)] * 3), None)
    assert named(found) == [("cpu-steal", 0.8), ("unexplained", 0.2)]
    assert found.causes[0].evidence[0] == "taken 10 ms an operation, its peers 2 ms"


def test_without_the_figures_of_all_that_are_compared_it_is_no_cause():
    """Of peers on other nodes they are not known, and their hypervisor may take as much."""
    bare, after = work(400, 10, run_ms=5), on_machine(work(100, 20, run_ms=5), 20, 40)
    for reference in (find_median([find_rates(BEFORE), find_rates(bare)]), find_rates(bare)):
        (cause,) = find_excess_causes(0.5, after, reference, None).causes
        assert cause.kind == "unexplained"
    (cause,) = explain(0.5, work(100, 20, run_ms=5), BEFORE, None).causes
    assert cause.kind == "unexplained"


def test_a_thread_that_ran_longer_than_processors_are_said_to_have_worked_has_all_of_it():
    """Processors are counted by samples of ten milliseconds."""
    assert find_rates(on_machine(work(100, 20, run_ms=5), 0, 3)).stolen_ns == 3 * NS_PER_MS
    assert find_rates(on_machine(work(100, 20, run_ms=5), 4, 3)).stolen_ns == 3 * NS_PER_MS


def test_what_was_taken_from_processors_that_it_could_not_use_at_first_is_not_its_loss():
    """They bring what was taken from them since the machine began; others of the same number do, too."""
    for which in (7, 6):
        after = on_machine(work(100, 20, run_ms=5), 20, 4000, which)
        assert find_rates(after).stolen_ns is None
        (cause,) = explain(0.5, after, BEFORE, None).causes
        assert cause.kind == "unexplained"
