"""The kinds of recordings that exist, with jitter, counts, sizes and culprits that no rule was tuned to."""

from dataclasses import replace

import numpy as np
import pytest

from ingero.model.events import CopyKind, CudaOp, DriverOp, HostOp, IoOp, OffCpuReason, Source
from ingero.recording.causal.engine import explain
from ingero.recording.export.merge import merge_recordings
from ingero.recording.scenarios.builder import START_NS, RecordingBuilder
from ingero.recording.scenarios.loop import FUNCTION, LAUNCH, SYNC, Loop
from ingero.recording.store.reader import load_recording

PID = 4821
MS = 1_000_000
COPY_NOW = (Source.CUDA, CudaOp.MEMCPY)


def told(built):
    return [(i.rule, i.causes[0].name) for i in explain(built.build()).incidents]


def starved_job(seed, n_batches, least_s, most_s, *, asleep=0.0, reason=OffCpuReason.UNKNOWN):
    """Seven batches back to back, then batches that come late; part of each gap may be off the CPU."""
    rng = np.random.default_rng(seed)
    built = RecordingBuilder().name(PID, "python3")
    at = 0
    for i in range(7 + n_batches):
        if i >= 7:
            gap = int(rng.uniform(least_s, most_s) * 1e9)
            for k in range(20):
                off = int(gap * max(asleep, 0.0005) / 20)
                built.off_cpu(at + gap * k // 20, off, PID, reason)
            at += gap
        copied = int(40 * MS * rng.uniform(0.9, 1.1))
        at = built.call(COPY_NOW, at, copied, PID, arg0=256 << 20, arg1=CopyKind.HOST_TO_DEVICE)
        for k in range(10):
            first = 26 * MS if i == k == 0 else 8000
            at = built.call(LAUNCH, at, first, PID, arg0=FUNCTION + k * 64) + 5000
        at = built.call(SYNC, at, int(5 * MS * rng.lognormal(0, 0.2)), PID)
    return built


STARVED = [
    (1, 3, 1, 2),
    (2, 4, 5, 9),
    (3, 20, 0.1, 0.6),
    (4, 12, 0.5, 8),
]


@pytest.mark.parametrize("job", STARVED, ids=str)
def test_late_batches_are_starvation_whatever_their_number_and_jitter(job):
    assert told(starved_job(*job)) == [
        ("input_starvation", "computing on the host"),
        ("lazy_load", "lazy module loading at first launch"),
    ]


EVENT = 0x2E00_0000


def unsynchronised_loop(*, done_at_once, n_queries=10):
    """Twenty steps that wait for a thread, which waits for a child; nothing waits for the GPU, some events are asked for."""
    built = RecordingBuilder().name(PID, "python3").name(4900, "pt_data_worker")
    built.call((Source.HOST, HostOp.FORK), 0, 0, PID, arg1=4900)
    at = MS
    for i in range(20):
        for k in range(10):
            at = built.call(LAUNCH, at, 8000, PID, arg0=FUNCTION + k * 64) + 5000
        start = at
        asleep = OffCpuReason.SLEEP
        built.off_cpu(start, 99 * MS, PID + 1, asleep, pid=PID, other_pid=4900)
        at = built.off_cpu(start, 100 * MS, PID, asleep, other_pid=PID)
        if i < n_queries:
            built.call((Source.CUDA, CudaOp.EVENT_RECORD), at, 0, PID, arg0=EVENT)
            code = 0 if done_at_once else 600
            built.call(
                (Source.CUDA, CudaOp.EVENT_QUERY),
                at + MS // 10,
                2000,
                PID,
                arg0=EVENT,
                ret_code=code,
            )
            at += MS // 5
    built.call(LAUNCH, at, 8000, PID, arg0=FUNCTION)
    return built


def test_a_loop_that_never_waits_for_the_gpu_is_starved_where_its_events_are_done_at_once():
    assert told(unsynchronised_loop(done_at_once=True)) == [
        ("input_starvation", "waiting for worker pt_data_worker")
    ]


def test_a_loop_whose_events_are_not_done_or_not_asked_for_is_not_called_starved():
    assert told(unsynchronised_loop(done_at_once=False)) == []
    assert told(unsynchronised_loop(done_at_once=True, n_queries=2)) == []


@pytest.mark.parametrize("job", [(5, 1, 5, 5), (6, 2, 3, 3)], ids=str)
def test_a_late_batch_or_two_are_a_stall_and_no_starvation(job):
    assert told(starved_job(*job)) == [
        ("one_off_stall", "computing on the host"),
        ("lazy_load", "lazy module loading at first launch"),
    ]


def test_one_long_gap_among_late_batches_is_a_stall_beside_the_starvation():
    built = RecordingBuilder()
    loop = Loop(built)
    for i in range(41):
        loop.step()
        loop.sleep(1)
        loop.rest(8_000 * MS if i == 20 else 100 * MS)
    assert sorted(told(built)) == [
        ("input_starvation", "computing on the host"),
        ("one_off_stall", "computing on the host"),
    ]


@pytest.mark.parametrize("n_loads", [1, 3])
def test_silence_that_ends_with_new_code_is_no_stall(n_loads):
    built = RecordingBuilder()
    loop = Loop(built)
    loop.step()
    for _ in range(n_loads):
        loop.sleep(1)
        loop.rest(4_000 * MS)
        loop.call((Source.DRIVER, DriverOp.MODULE_LOAD), MS)
        loop.steps(5)
    assert not {"one_off_stall", "input_starvation"} & set(dict(told(built)))


def test_gaps_in_which_the_thread_mostly_sleeps_are_pauses():
    job = starved_job(3, 20, 0.1, 0.6, asleep=0.8, reason=OffCpuReason.SLEEP)
    assert [rule for rule, _ in told(job)] == ["lazy_load"]


def test_gaps_in_which_the_thread_waits_for_the_disk_are_blamed_on_it():
    job = starved_job(3, 20, 0.1, 0.6, asleep=0.9, reason=OffCpuReason.BLOCKED_IO)
    assert told(job)[0] == ("input_starvation", "blocked on I/O")


def busy_job(seed, noise, *, n_switches=0, reason=OffCpuReason.UNKNOWN, hit_share=0.0):
    """Steps of 60 launches and a wait, with short switches between them and in a share of the launches."""
    rng = np.random.default_rng(seed)
    built = RecordingBuilder().name(PID, "python3")
    at = 0
    for _ in range(200):
        for k in range(60):
            length = int(8000 * rng.lognormal(0, noise))
            if rng.uniform() < hit_share:
                lost = int(rng.uniform(1e5, 5e5))
                built.off_cpu(at + 2000, lost, PID, OffCpuReason.UNKNOWN)
                length += lost
            at = built.call(LAUNCH, at, length, PID, arg0=FUNCTION + k * 64)
            at += int(6000 * rng.lognormal(0, noise))
        wait = int(20 * MS * rng.lognormal(0, noise))
        built.off_cpu(at + wait // 20, wait * 9 // 10, PID, reason)
        at = built.call(SYNC, at, wait, PID)
        for _ in range(n_switches):
            at = built.off_cpu(at, int(rng.uniform(5e3, 2e5)), PID, reason)
    return built


@pytest.mark.parametrize("noise", [0.1, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("reason", [OffCpuReason.UNKNOWN, OffCpuReason.SLEEP])
def test_computing_job_is_healthy_however_it_jitters(noise, reason):
    assert told(busy_job(3, noise, reason=reason)) == []


@pytest.mark.parametrize("n_switches", [1, 5, 8])
def test_many_context_switches_without_slowness_are_healthy(n_switches):
    assert told(busy_job(3, 0.3, n_switches=n_switches)) == []


def test_switches_inside_a_few_launches_are_below_what_is_worth_an_incident():
    assert told(busy_job(1, 0.2, hit_share=0.02)) == []


def test_switches_inside_many_launches_are_contention():
    assert [rule for rule, _ in told(busy_job(1, 0.2, hit_share=0.2))] == ["cpu_contention"]


def reading_job(
    seed, requests, *, node="gpu-node-01", op=IoOp.READ, reason=OffCpuReason.UNKNOWN, gpu=False
):
    """A thread whose disk requests and off-CPU spans alternate; `requests` is (number, ms each, ms between)."""
    n_requests, each_ms, between_ms = requests
    rng = np.random.default_rng(seed)
    built = RecordingBuilder(node).name(1887, "python3")
    at = 0
    for i in range(n_requests):
        length = int(each_ms * MS * rng.lognormal(0, 0.4))
        built.call((Source.IO, op), at + 8000, length, 1887, arg0=128, arg1=i * 128)
        at = built.off_cpu(at, length + 22_000, 1887, reason)
        at += int(between_ms * MS * rng.lognormal(0, 0.3))
        if gpu:
            at = built.call((Source.DRIVER, DriverOp.LAUNCH_KERNEL), at, 9000, 1887, arg0=FUNCTION)
            at = built.call(SYNC, at, 3 * MS, 1887) if i % 8 == 7 else at
    return built


READS = [(98, 0.76, 0.9), (30, 5, 1), (400, 0.2, 0.3), (60, 12, 3), (50, 0.5, 4)]


@pytest.mark.parametrize("requests", READS, ids=str)
@pytest.mark.parametrize("has_gpu_calls", [False, True])
@pytest.mark.parametrize("reason", [OffCpuReason.UNKNOWN, OffCpuReason.BLOCKED_IO])
def test_blocking_reads_are_found_at_every_size_and_pace(requests, has_gpu_calls, reason):
    job = reading_job(7, requests, reason=reason, gpu=has_gpu_calls)
    assert told(job) == [("blocking_io", "blocked on disk reads")]


def test_blocking_writes_are_called_writes():
    job = reading_job(7, READS[0], op=IoOp.WRITE)
    assert told(job) == [("blocking_writes", "blocked on disk writes")]


def sleeping_job(node, seed, sleep_ms):
    """Allocations between sleeps, beside the agent's and the journal's writes."""
    rng = np.random.default_rng(seed)
    built = (
        RecordingBuilder(node).name(4599, "worker").name(96, "jbd2/nvme0n1p1").name(900, "ingero")
    )
    at = 0
    for i in range(60):
        if i % 3:
            at = built.call(
                (Source.DRIVER, DriverOp.MEM_ALLOC), at, int(2e5 * rng.lognormal(0, 0.2)), 4599, arg0=1 << 20
            )  # fmt: skip
        at = built.off_cpu(at, sleep_ms * MS + 60_000, 4599, OffCpuReason.UNKNOWN)
        for pid in (96, 900):
            built.call((Source.IO, IoOp.WRITE), at, MS, pid, arg0=64)
    return built


@pytest.mark.parametrize("sleep_ms", [3, 10, 50, 100])
def test_sleeping_loop_beside_a_writing_agent_is_healthy_at_every_pace(sleep_ms):
    assert told(sleeping_job("gpu-node-02", 1, sleep_ms)) == []


@pytest.mark.parametrize("culprit", ["a-01", "m-17", "z-99"])
def test_merged_cluster_names_the_culprit_wherever_it_sorts(culprit, tmp_path):
    parts = []
    for i, node in enumerate(("a-01", "m-17", "z-99")):
        built = (
            reading_job(i, READS[0], node=node) if node == culprit else sleeping_job(node, i, 50)
        )
        parts.append(tmp_path / f"{node}.db")
        built.write(parts[-1])
    merge_recordings(parts, tmp_path / "all.db")
    (incident,) = explain(load_recording(tmp_path / "all.db")).incidents
    assert (incident.node, incident.rule) == (culprit, "blocking_io")


def wait_woken_by_a_thread_of_its_own(*, is_queued):
    """Steps whose thread sleeps until a thread of CUDA's wakes it, which in later steps wants a CPU for 8 ms first."""
    built = RecordingBuilder().name(PID, "train")
    at = MS
    for i in range(120):
        for k in range(10):
            at = built.call(LAUNCH, at, 8000, PID, arg0=FUNCTION + k * 64) + 5000
        queued_ns = 8 * MS if is_queued and i >= 40 else 0
        gpu_ns = 2 * MS if is_queued or i < 40 else 10 * MS
        asleep_ns = gpu_ns + queued_ns
        built.call(SYNC, at, asleep_ns + MS // 10, PID)
        built.off_cpu(at, asleep_ns, PID + 2, OffCpuReason.SLEEP, pid=PID, wait_ns=queued_ns + 2000)
        built.off_cpu(
            at, asleep_ns + MS // 20, PID, OffCpuReason.SLEEP, other_pid=PID, wait_ns=3000
        )
        at += asleep_ns + MS // 5
    return built


def test_a_wait_for_the_gpu_lasts_until_cudas_own_thread_gets_a_cpu():
    """Seen on an H200: three compilers on the CPU of a loop that sleeps for its GPU were not found."""
    assert told(wait_woken_by_a_thread_of_its_own(is_queued=True)) == [
        ("runnable_wait", "waiting for a free CPU")
    ]
    assert "runnable_wait" not in dict(told(wait_woken_by_a_thread_of_its_own(is_queued=False)))


def interrupted_loop(ends):
    """Two stretches of steps of one pid with a minute between of which no row tells; the moments around it."""
    built = RecordingBuilder()
    loop = Loop(built)
    loop.steps(200)
    loop.sleep(MS)
    until = loop.at_ns
    if ends:
        built.call((Source.HOST, HostOp.EXIT), until, 0, PID)
    loop.rest(60_000 * MS)
    since = loop.at_ns
    loop.steps(200)
    return built, START_NS + until, START_NS + since


@pytest.mark.parametrize("is_stop_known", [True, False])
def test_time_between_two_runs_of_the_agent_is_no_stall(is_stop_known):
    built, until, since = interrupted_loop(ends=False)
    recording = built.build()
    (session,) = recording.sessions
    first = replace(session, stopped_wall_ns=until if is_stop_known else 0)
    restarted = replace(recording, sessions=(first, replace(session, started_wall_ns=since)))
    assert [one.rule for one in explain(recording).incidents] == ["one_off_stall"]
    assert explain(restarted).incidents == ()


def test_two_runs_of_the_agent_that_overlap_leave_nothing_unwatched():
    built, until, _ = interrupted_loop(ends=False)
    recording = built.build()
    (session,) = recording.sessions
    first = replace(session, stopped_wall_ns=until + 1_000 * MS)
    sessions = (first, replace(session, started_wall_ns=until))
    found = explain(replace(recording, sessions=sessions)).incidents
    assert [one.rule for one in found] == ["one_off_stall"]


def test_time_between_two_processes_of_one_pid_is_no_stall():
    built, _, _ = interrupted_loop(ends=True)
    assert told(built) == []


def test_compiling_is_not_looked_for_where_nobody_watched():
    built = RecordingBuilder()
    loop = Loop(built)
    moments = []
    for _ in range(5):
        loop.steps(20)
        loop.sleep(MS)
        moments.append(START_NS + loop.at_ns)
        loop.rest(4_000 * MS)
        moments.append(START_NS + loop.at_ns)
        loop.call((Source.DRIVER, DriverOp.MODULE_LOAD), MS)
    loop.steps(20)
    recording = built.build()
    (session,) = recording.sessions
    edges = [START_NS, *moments, 0]
    sessions = tuple(
        replace(session, started_wall_ns=begin, stopped_wall_ns=end)
        for begin, end in zip(edges[::2], edges[1::2], strict=True)
    )
    assert "repeated_compiling" in dict(told(built))
    found = explain(replace(recording, sessions=sessions)).incidents
    assert "repeated_compiling" not in {one.rule for one in found}
