"""Planted counters: which cause is named, with which share, and what is ruled out."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.recording.causal.planted_work import HOG, LINES, MAIN, explain, named, work

from ingero.model.counters import OffCpuTimes, TaskTimes
from ingero.recording.causal.excess import can_be_compared, find_excess_causes, find_fall, find_rise
from ingero.recording.causal.work_rates import MIN_OPS, find_median, find_rates
from ingero.units import NS_PER_MS, NS_PER_S

BEFORE = {"n_ops": 400, "own_ms": 10, "run_ms": 5, "ready_ms": 5, "held_ms": 5, "quota": 0.5}


def test_smaller_quota_is_named_with_the_whole_excess():
    after = work(100, 20, run_ms=5, ready_ms=15, held_ms=15, quota=0.25)
    found = explain(0.5, after, work(**BEFORE), None)
    assert named(found) == [("cpu-quota", 1.0)]
    assert found.excess_ns == 1000 * NS_PER_MS
    assert "its cgroup may use 0.25 processors, 0.5 before" in found.causes[0].evidence
    assert {one.name: one.share for one in found.ruled_out} == {
        "waiting for a free CPU": 0.0,
        "computing on the host": 0.0,
    }
    assert found.todo[0].startswith("raise the container's CPU limit")


def on_gpu(one, period_ms, cuda_ms):
    """Work of which an operation follows the one before after so long, with so much of it in calls of CUDA."""
    last = replace(one.last, mono_ns=round(one.n_ops * period_ms * NS_PER_MS))
    return replace(one, last=last, cuda_ns=one.n_ops * cuda_ms * NS_PER_MS)


# An operation of a job on an H200: own time 9.3 ms, 27 ms in the collective, its host nearly always in calls of CUDA.
GPU_BEFORE = on_gpu(work(400, 9.3, run_ms=36.2), 36.3, 34.0)
GPU_SLOW = on_gpu(work(100, 18.6, run_ms=45.5), 45.6, 43.3)


def test_host_that_spins_until_its_slower_gpu_is_ready_does_not_compute():
    found = explain(0.5, GPU_SLOW, GPU_BEFORE, None)
    assert named(found) == [("gpu-computing", 1.0)]
    assert found.causes[0].evidence == (
        "waiting for its GPU in calls of CUDA 16.3 ms an operation, 7 ms before",
    )
    assert "computing on the host" in {one.name for one in found.ruled_out}
    assert "clocks" in found.todo[0]


def test_peers_that_wait_for_a_slow_gpu_wait_in_calls_of_cuda_too():
    peer = find_rates(on_gpu(work(100, 9.3, run_ms=45.5), 45.6, 43.3))
    found = find_excess_causes(0.5, GPU_SLOW, find_median([peer, peer, peer]), None)
    assert named(found) == [("gpu-computing", 1.0)]
    assert "its peers 7 ms" in found.causes[0].evidence[0]


def test_host_that_computes_more_leaves_its_gpu_idle():
    after = on_gpu(work(100, 30, run_ms=50), 57, 26)
    found = explain(0.69, after, GPU_BEFORE, None)
    assert [kind for kind, _ in named(found)] == ["more-computing", "unexplained"]
    assert {one.name: one.share for one in found.ruled_out}["computing on the GPU"] == 0.0


def test_time_without_a_processor_in_a_call_of_cuda_is_not_the_gpus():
    after = on_gpu(work(100, 18.6, run_ms=36.2, ready_ms=9.3, held_ms=9.3, quota=0.5), 45.6, 43.3)
    found = explain(0.5, after, GPU_BEFORE, None)
    assert named(found) == [("cpu-quota", 1.0)]


def test_nothing_is_said_of_a_gpu_where_calls_of_one_of_the_times_are_not_known():
    found = explain(0.5, GPU_SLOW, replace(GPU_BEFORE, cuda_ns=None), None)
    assert "computing on the GPU" not in {
        *(one.name for one in found.ruled_out),
        *(one.name for one in found.causes),
    }
    unknown = find_median([find_rates(GPU_BEFORE), find_rates(work(**BEFORE))])
    assert unknown.device_ns is None


def with_faults(one, n_faults, kernel_ms):
    """Work of which an operation has so many page faults, and so much time in the kernel."""
    first = replace(one.first, n_minor_faults=1000, kernel_ns=NS_PER_S)
    kernel_ns = NS_PER_S + round(one.n_ops * kernel_ms * NS_PER_MS)
    n_minor_faults = 1000 + one.n_ops * n_faults
    last = replace(one.last, n_minor_faults=n_minor_faults, kernel_ns=kernel_ns)
    return replace(one, first=first, last=last)


def test_memory_that_is_given_back_and_faulted_in_again_is_said_with_what_to_do():
    before = with_faults(work(400, 6.5, run_ms=6.5), 1, 0.5)
    after = with_faults(work(100, 8.2, run_ms=8.2), 256, 1.3)
    (cause,) = (found := explain(0.2, after, before, None)).causes
    assert cause.kind == "more-computing"
    assert cause.evidence[1:] == (
        "in the kernel 1.3 ms an operation, 500 µs before",
        "256 page faults without a disk an operation, 1 before",
    )
    assert "MALLOC_TRIM_THRESHOLD_" in found.todo[0]


@pytest.mark.parametrize(
    ("n_faults", "kernel_ms"),
    [
        (256, 0.5),  # as much time in the kernel as before
        (60, 1.3),  # the kernel does something else
        (1, 1.3),
    ],
)
def test_page_faults_that_explain_nothing_are_not_mentioned(n_faults, kernel_ms):
    before = with_faults(work(400, 6.5, run_ms=6.5), 1, 0.5)
    after = with_faults(work(100, 8.2, run_ms=8.2), n_faults, kernel_ms)
    (cause,) = (found := explain(0.2, after, before, None)).causes
    assert len(cause.evidence) == 1
    assert "MALLOC" not in " ".join(found.todo)


def test_page_faults_of_a_worker_process_and_of_peers_are_not_known():
    after = with_faults(work(100, 8.2, run_ms=8.2), 256, 1.3)
    peers = find_median([find_rates(with_faults(work(100, 6.5, run_ms=6.5), 1, 0.5))] * 3)
    (cause,) = find_excess_causes(0.2, after, peers, None).causes
    assert len(cause.evidence) == 1
    busy = {20: TaskTimes(20 * NS_PER_S, 0)}
    by_child = replace(after, last=replace(after.last, children=busy, boot_ticks=9))
    assert find_rates(by_child).minor_faults is None


def test_throttling_that_was_there_before_explains_nothing():
    after = work(100, 20, run_ms=5, ready_ms=5, held_ms=5, quota=0.5)
    found = explain(0.5, after, work(**BEFORE), OffCpuTimes(50))
    assert named(found) == [("unexplained", 1.0)]
    assert len(found.ruled_out) == 7


def test_quota_that_a_neighbour_uses_up_is_contention_and_names_the_neighbour():
    after = work(100, 20, run_ms=5, ready_ms=15, held_ms=12, quota=0.5, hog=0.4)
    found = explain(0.5, after, work(**BEFORE), None)
    assert named(found) == [("cpu-contention", 1.0)]
    assert found.causes[0].name == "preempted by stress"
    assert f"{HOG.label} uses 0.4 of 0.5 processors" in found.causes[0].evidence


def starts(one, start_ticks):
    """Work whose neighbour began then."""
    hog = replace(HOG, start_ticks=start_ticks)
    first, last = (
        replace(
            reading,
            boot_ticks=ticks,
            quotas=(replace(reading.quotas[0], others_ns={hog: reading.quotas[0].others_ns[HOG]}),),
        )
        for reading, ticks in ((one.first, 200), (one.last, 300))
    )
    return replace(one, first=first, last=last)


def test_a_neighbour_of_which_nothing_is_known_from_before_is_not_to_blame():
    """It was there before, and was not among those that are read."""
    after = work(100, 20, run_ms=5, ready_ms=15, held_ms=15, quota=0.25, hog=0.1)
    before = work(**BEFORE)
    before = replace(before, last=replace(before.last, boot_ticks=100))
    new = explain(0.5, starts(after, 150), before, None)
    assert [kind for kind, _ in named(new)] == ["cpu-quota", "cpu-contention"]
    (cause, *more) = explain(0.5, starts(after, 50), before, None).causes
    assert cause.kind == "cpu-quota"
    assert "what 1 others of its cgroup used before is not known" in cause.evidence
    assert not any("stress" in text for one in more for text in (one.name, *one.evidence))


def test_what_is_not_known_of_a_quota_is_said():
    after = work(100, 20, run_ms=5, ready_ms=15, held_ms=15, quota=0.25, hog=0.1)
    after = starts(after, 50)
    unread = replace(after.first, quotas=(replace(after.first.quotas[0], others_ns={}),))
    (cause, *_) = explain(0.5, replace(after, first=unread), work(**BEFORE), None).causes
    assert cause.kind == "cpu-quota"
    assert cause.evidence[-1] == "what 1 others of its cgroup use is not known"
    unread = replace(unread, throttled={})
    found = explain(0.5, replace(after, first=unread), work(**BEFORE), None)
    assert [kind for kind, _ in named(found)] == ["cpu-contention"]
    ruled_out = {one.name: one.why for one in found.ruled_out}
    assert any("how long it was held back is not known" in why for why in ruled_out.values())


def test_smaller_quota_and_a_neighbour_share_the_throttled_time():
    after = work(100, 20, run_ms=5, ready_ms=15, held_ms=15, quota=0.3, hog=0.1)
    found = explain(0.5, after, work(**BEFORE), None)
    assert named(found) == [
        ("cpu-quota", pytest.approx(2 / 3, abs=0.001)),
        ("cpu-contention", pytest.approx(1 / 3, abs=0.001)),
    ]


def test_run_queue_without_a_quota_names_who_had_the_processor():
    after = work(100, 20, ready_ms=10)
    seen = OffCpuTimes(50, by_others_ns={"stress": 9 * NS_PER_S, "kworker/0": NS_PER_S})
    found = explain(0.5, after, work(400, 10), seen)
    assert named(found) == [("cpu-contention", 1.0)]
    assert found.causes[0].name == "preempted by stress, kworker/0"


def test_stops_are_scaled_from_what_was_watched_to_all_since_onset():
    after = work(100, 20)
    seen = OffCpuTimes(n_ops=50, stopped_ns=400 * NS_PER_MS)
    found = explain(0.5, after, work(400, 10), seen)
    assert named(found) == [("stopped", 0.8), ("unexplained", 0.2)]
    assert found.causes[0].evidence == ("8 ms an operation, of 50 that were watched",)


def test_stops_are_named_without_a_reading_from_before_and_counters_are_not():
    after = work(100, 20, run_ms=5, ready_ms=15, held_ms=15, quota=0.25)
    seen = OffCpuTimes(n_ops=50, stopped_ns=150 * NS_PER_MS)
    found = explain(0.5, after, None, seen)
    assert named(found) == [("stopped", 0.3), ("unexplained", 0.7)]
    assert found.causes[1].evidence == ("no reading from before it was slow, and none of a peer",)


def test_waits_for_a_disk_get_only_what_the_others_leave():
    after = work(100, 20, run_ms=12)
    seen = OffCpuTimes(n_ops=50, io_ns=500 * NS_PER_MS)
    found = explain(0.5, after, work(400, 10), seen)
    assert named(found) == [("more-computing", 0.7), ("blocked-io", 0.3)]
    assert named(explain(0.5, work(100, 20), work(400, 10), seen)) == [("blocked-io", 1.0)]


def test_waits_for_a_disk_get_the_rest_of_what_own_time_has_grown_where_the_excess_is_less():
    seen = OffCpuTimes(n_ops=50, io_ns=50 * 60 * NS_PER_MS)
    found = explain(0.2, work(100, 100, run_ms=15), work(400, 60), seen)
    assert named(found) == [("blocked-io", 0.75), ("more-computing", 0.25)]


def test_waits_for_a_disk_that_are_longer_than_all_own_time_before_are_not_left_to_others():
    """A reader computes a little longer where each of its reads waits, and its quota makes that much longer."""
    seen = OffCpuTimes(n_ops=19, worker_io_ns=19 * 80 * NS_PER_MS)
    before = work(400, 20, run_ms=5, ready_ms=15, held_ms=15, quota=0.25)
    after = work(100, 95, run_ms=15, ready_ms=45, held_ms=45, quota=0.25)
    found = explain(0.2, after, before, seen)
    # Of 100 ms an operation 5 are not its own: 80 - 5 - 20 are new, 10 and 30 are of what it computes more.
    assert named(found) == [("blocked-io", 0.579), ("more-computing", 0.421)]
    long_before = replace(before, own_ns=400 * 75 * NS_PER_MS)
    assert explain(0.2, after, long_before, seen).causes[0].kind == "more-computing"


def test_a_quota_that_holds_back_a_worker_is_named_where_the_process_itself_sleeps():
    """Workers are others in each epoch: the one of then is the reference of the one of now."""

    def loads(one, worker):
        last = replace(
            one.last, threads={MAIN: TaskTimes(1, 0)}, children={worker: one.last.threads[MAIN]}
        )
        return replace(one, first=replace(one.first, threads={MAIN: TaskTimes(0, 0)}), last=last)

    after = loads(work(100, 20, run_ms=5, ready_ms=15, held_ms=15, quota=0.25), 31)
    (cause,) = explain(0.5, after, loads(work(**BEFORE), 30), None).causes
    assert (cause.kind, cause.share) == ("cpu-quota", 1.0)
    assert cause.evidence[1] == "in its child process 31"


def test_a_thread_whose_number_was_given_again_counts_with_all_that_it_did():
    one = work(100, 20)
    first = replace(one.first, threads={MAIN: TaskTimes(3 * NS_PER_S, 0, 10)}, boot_ticks=20)
    last = replace(one.last, threads={MAIN: TaskTimes(4 * NS_PER_S, 0, 30)}, boot_ticks=40)
    found = find_rates(replace(one, first=first, last=last))
    assert found.computing_ns == 40 * NS_PER_MS


def test_a_wait_for_workers_that_wait_for_a_disk_is_a_wait_for_the_disk():
    seen = OffCpuTimes(n_ops=50, io_ns=100 * NS_PER_MS, worker_io_ns=400 * NS_PER_MS)
    (cause,) = explain(0.5, work(100, 20), work(400, 10), seen).causes
    assert (cause.kind, cause.share) == ("blocked-io", 1.0)
    assert cause.evidence == (
        "10 ms an operation, of 50 that were watched",
        "of it 8 ms waiting for its worker processes, which are never idle",
    )


def test_cause_below_a_fifth_is_ruled_out_with_its_share():
    after = work(100, 20, run_ms=6.9)
    found = explain(0.5, after, work(400, 10), None)
    assert named(found) == [("unexplained", 1.0)]
    ruled_out = {one.name: one.share for one in found.ruled_out}
    assert ruled_out["computing on the host"] == 0.19


def test_causes_beyond_the_excess_are_scaled_down_to_it():
    after = work(100, 20, run_ms=15, ready_ms=30)
    found = explain(0.5, after, work(400, 10), None)
    assert named(found) == [("cpu-contention", 0.75), ("more-computing", 0.25)]


@pytest.mark.parametrize(("n_ops", "own_ms"), [(4, 20), (100, 0)])
def test_too_little_to_say_is_unexplained(n_ops, own_ms):
    found = explain(0.5, work(n_ops, own_ms), work(400, 10), OffCpuTimes(50))
    assert named(found) == [("unexplained", 1.0)]
    assert f"{n_ops} operations were seen" in found.causes[0].evidence[0]


def test_fewer_processors_and_a_greater_nice_value_are_said():
    before = work(400, 10, n_processors_allowed=2)
    after = work(100, 20, ready_ms=10, n_processors_allowed=1, nice=10)
    found = explain(0.5, after, before, None)
    assert "it may run on 1 processors, 2 before" in found.causes[0].evidence
    assert "its nice value is 10, 0 before" in found.causes[0].evidence


@given(
    st.integers(MIN_OPS, 200), st.integers(MIN_OPS, 200), st.floats(1.5, 10.0), st.integers(0, 99)
)
def test_rise_is_found_within_a_few_operations_whatever_the_start_took(n_then, n_now, times, seed):
    noise = 1.0 + 0.05 * np.random.default_rng(seed).standard_normal(n_then + n_now)
    own_ns = noise * 10 * NS_PER_MS
    own_ns[n_then:] *= times
    assert find_rise(own_ns.astype(np.int64)) == pytest.approx(n_then, abs=2)


@given(
    st.integers(MIN_OPS, 200), st.integers(MIN_OPS, 200), st.floats(1.5, 10.0), st.integers(0, 99)
)
def test_fall_is_a_rise_read_backwards(n_then, n_now, times, seed):
    noise = 1.0 + 0.05 * np.random.default_rng(seed).standard_normal(n_then + n_now)
    own_ns = noise * 10 * NS_PER_MS
    own_ns[:n_then] *= times
    own_ns = own_ns.astype(np.int64)
    assert find_fall(own_ns) == pytest.approx(n_then, abs=2)
    assert find_fall(own_ns[::-1]) is None


def test_no_rise_among_own_times_that_fall_or_stay_or_are_few():
    flat = np.full(100, 10 * NS_PER_MS)
    assert find_rise(flat) is None
    assert find_rise(flat[: 2 * MIN_OPS - 1]) is None
    falling = flat.copy()
    falling[:10] *= 100
    assert find_rise(falling) is None
    barely = flat.copy()
    barely[50:] = barely[50:] * 105 // 100
    assert find_rise(barely) is None


def test_what_a_process_does_more_takes_its_quota_and_the_quota_is_no_cause():
    after = work(100, 60, run_ms=15, ready_ms=45, held_ms=45, quota=0.25)
    before = work(400, 20, run_ms=5, ready_ms=15, held_ms=15, quota=0.25)
    found = explain(2 / 3, after, before, None)
    assert named(found) == [("more-computing", 1.0)]
    assert found.causes[0].evidence == (
        "on a processor 15 ms an operation, 5 ms before",
        "held back for it by its quota 30 ms an operation",
    )


def test_a_quota_holds_a_process_back_for_no_more_than_it_does_more():
    after = work(100, 40, run_ms=5.5, ready_ms=35, held_ms=35, quota=0.25)
    before = work(400, 20, run_ms=5, ready_ms=15, held_ms=15, quota=0.25)
    found = explain(0.5, after, before, None)
    held_ms = 0.5 * ((5.5 + 1) / 5.5 / 0.25 - 1)  # 1 ms of the other thread
    assert named(found) == [("unexplained", 1.0)]
    assert [(one.name, one.share) for one in found.ruled_out if one.share] == [
        ("computing on the host", pytest.approx((0.5 + held_ms) / 20, abs=0.001))
    ]


def test_all_threads_of_a_process_may_have_done_as_much_more_as_the_busiest():
    assert find_rates(work(100, 10, run_ms=5)).parallel == pytest.approx(1.2)
    assert find_rates(work(100, 10, run_ms=0.5)).parallel == pytest.approx(1.5)
    assert find_rates(work(100, 10, run_ms=0, ready_ms=9)).parallel == 1.0


def with_transport(one, run_ms, ready_ms):
    """Work beside which another thread moves data, and is ready while its quota is used up."""
    amount = TaskTimes(
        round(one.n_ops * run_ms * NS_PER_MS), round(one.n_ops * ready_ms * NS_PER_MS)
    )
    return replace(one, last=replace(one.last, threads=one.last.threads | {MAIN + 1: amount}))


def test_a_thread_that_waits_longer_for_a_used_up_quota_is_not_the_one_that_computes():
    quota = {"quota": 0.25}
    before = work(400, 9, run_ms=3.7, ready_ms=5.2, held_ms=5.8, **quota)
    after = work(100, 18, run_ms=5.2, ready_ms=13.1, held_ms=20.3, **quota)
    moved = with_transport(after, 1.8, 20), with_transport(before, 1.5, 6)
    assert [kind for kind, _ in named(explain(0.5, *moved, None))] == ["more-computing"]


def test_a_smaller_quota_stays_the_cause_where_switching_costs_some_time_too():
    after = work(100, 41, run_ms=5.3, ready_ms=36, held_ms=36, quota=0.125)
    before = work(400, 20, run_ms=5, ready_ms=15, held_ms=15, quota=0.25)
    found = explain(0.5, after, before, None)
    assert named(found) == [("cpu-quota", pytest.approx(0.97, abs=0.02))]


def test_time_to_make_room_is_not_counted_as_computing_and_is_what_the_quota_holds_back():
    after = work(100, 60, run_ms=15, ready_ms=45, held_ms=45, quota=0.25)
    before = work(400, 20, run_ms=5, ready_ms=15, held_ms=15, quota=0.25)
    seen = OffCpuTimes(n_ops=50, reclaim_ns=400 * NS_PER_MS, faults_ns=100 * NS_PER_MS)
    found = explain(2 / 3, after, before, seen)
    assert named(found) == [("memory-reclaim", 0.8), ("page-faults", 0.2)]
    assert "held back for it by its quota 24 ms an operation" in found.causes[0].evidence


def against_peers(after, *peers, share=0.5):
    reference = find_median(filter(None, map(find_rates, peers)))
    return find_excess_causes(share, after, reference, OffCpuTimes(50), LINES)


def test_one_that_was_slow_from_its_first_operation_is_compared_with_its_peers():
    peers = (work(100, 10, run_ms=6), work(90, 10, run_ms=5), work(110, 10, run_ms=4))
    found = against_peers(work(100, 20, run_ms=15), *peers)
    assert named(found) == [("more-computing", 1.0)]
    assert "on a processor 15 ms an operation, its peers 5 ms" in found.causes[0].evidence


def test_a_quota_that_peers_do_not_have_is_named():
    after = work(100, 20, run_ms=5, ready_ms=10, held_ms=10, quota=0.25, n_processors_allowed=2)
    found = against_peers(after, *[work(100, 10, n_processors_allowed=2)] * 3)
    assert named(found) == [("cpu-quota", 1.0)]
    assert "its cgroup may use 0.25 processors, its peers none" in found.causes[0].evidence


def test_neighbours_that_peers_have_too_are_not_to_blame():
    after = work(100, 20, run_ms=15, ready_ms=0, quota=0.5, hog=0.2)
    found = against_peers(after, work(100, 10, run_ms=5, quota=0.5, hog=0.2))
    assert named(found) == [("more-computing", 1.0)]
    held = work(100, 20, run_ms=5, ready_ms=10, held_ms=10, quota=0.5, hog=0.4)
    found = against_peers(held, work(100, 10, run_ms=5, quota=0.5, hog=0.2))
    assert named(found) == [("cpu-contention", 1.0)]
    assert f"{HOG.label} uses 0.2 of 0.5 processors" in found.causes[0].evidence


def test_processors_and_niceness_are_compared_with_the_peers():
    after = work(100, 20, ready_ms=10, n_processors_allowed=1, nice=10)
    found = against_peers(after, *[work(100, 10, n_processors_allowed=4)] * 3)
    assert named(found) == [("cpu-contention", 1.0)]
    assert "it may run on 1 processors, its peers 4" in found.causes[0].evidence
    assert "its nice value is 10, its peers 0" in found.causes[0].evidence


def test_peers_of_too_few_operations_are_none():
    assert find_rates(work(MIN_OPS - 1, 10)) is None
    assert find_median([]) is None


def test_an_earlier_time_that_was_as_slow_is_no_reference():
    after = work(100, 20)
    assert can_be_compared(find_rates(work(100, 10)), after, 0.5)
    assert can_be_compared(find_rates(work(100, 15)), after, 0.5)
    assert not can_be_compared(find_rates(work(100, 15.5)), after, 0.5)
