"""Each rule fires on its own fault, alone, and on nothing healthy."""

from dataclasses import replace

import numpy as np
import pytest
from tests.recording.scenarios import serving as serving_faults
from tests.recording.scenarios.faults import FAULTS, device_full
from tests.recording.scenarios.healthy import HEALTHY

from ingero.model.events import CudaOp, NcclOp, OffCpuReason, Source
from ingero.model.gpu_view import UNKNOWN, GpuView
from ingero.model.recording import AGGREGATE
from ingero.recording.causal.engine import explain
from ingero.recording.causal.rules import RULES
from ingero.recording.scenarios.builder import START_NS, RecordingBuilder
from ingero.recording.scenarios.catalog import SCENARIOS, healthy
from ingero.recording.scenarios.loop import FREE, LAUNCH, MALLOC, SYNC, Loop, LoopStep
from ingero.recording.store.reader import load_recording

PID = 4821
MS = 1_000_000


def rules_of(built):
    return [incident.rule for incident in explain(built.build()).incidents]


def test_every_rule_has_a_firing_recording():
    shown = {rule for scenario in SCENARIOS for rule in rules_of(scenario.build())}
    assert {rule.name for rule in RULES} == shown | set(FAULTS)
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("rule", sorted(FAULTS))
def test_fault_is_named_alone(rule):
    assert rules_of(FAULTS[rule]()) == [rule]


def test_a_slow_first_allocation_is_no_churn():
    built = RecordingBuilder()
    loop = Loop(built)
    for i in range(300):
        loop.call(MALLOC, MS // 50 if i else 400 * MS, arg0=8 << 20, arg1=0x7D00_0000_0000)
        loop.step(LoopStep(n_launches=4, copy_ns=0, sync_ns=4 * MS))
        loop.call(FREE, MS // 50, arg0=0x7D00_0000_0000)
    assert rules_of(built) == ["lazy_load"]


@pytest.mark.parametrize(
    ("source", "comms", "rules"),
    [
        (Source.NCCL, (7, 7), []),
        (Source.NCCL, (7, 8), ["gpu_sharing"]),
        (
            Source.NCCL,
            (0, 0),
            ["gpu_sharing"],
        ),  # made before the probes: whose they are is not known
        (Source.GLOO, (7, 7), ["gpu_sharing"]),  # Gloo does not ask where its ranks are
    ],
)
def test_ranks_of_one_nccl_communicator_share_no_gpu_whatever_number_each_has_for_its_own(
    source, comms, rules
):
    built = next(one for one in SCENARIOS if one.name == "gpu-steal").build()
    after_ns = int(built.build().events["start_ns"].max()) - START_NS + 50 * MS
    for pid, comm in zip((4821, 5100), comms, strict=True):
        built.call((source, NcclOp.ALL_REDUCE), after_ns, 1000, pid, arg1=comm)
    assert rules_of(built) == rules


HOST = ("nvidia0", "nvidia1")


@pytest.mark.parametrize(
    ("views", "gpus"),
    [
        ((GpuView(HOST), GpuView(HOST)), [0]),
        ((GpuView(HOST, "1"), GpuView(HOST, "1")), [0]),
        ((GpuView(HOST, "0"), GpuView(HOST, "1")), []),
        ((GpuView(("nvidia0",)), GpuView(("nvidia1",))), []),
        ((GpuView(("nvidia1",)), GpuView(("nvidia1",))), [0]),
        ((GpuView(HOST), UNKNOWN), []),
    ],
)
def test_a_gpu_is_shared_by_those_who_are_shown_the_same_one(views, gpus):
    recording = next(one for one in SCENARIOS if one.name == "gpu-steal").build().build()
    shown = dict(zip([(0, 4821), (0, 5100)], views, strict=True))
    told = explain(replace(recording, gpu_views=shown)).incidents
    assert [one.rule for one in told] == ["gpu_sharing" for _ in gpus]
    assert all(f"GPU {gpu} is shared" in one.title for one, gpu in zip(told, gpus, strict=True))


def test_a_gpu_is_shared_though_each_has_a_number_of_its_own_for_it():
    recording = next(one for one in SCENARIOS if one.name == "gpu-steal").build().build()
    recording.events["gpu_id"][recording.events["pid"] == 5100] = 1
    views = {(0, 4821): GpuView(HOST, "1"), (0, 5100): GpuView(HOST)}
    told = explain(replace(recording, gpu_views=views)).incidents
    assert [one.rule for one in told] == ["gpu_sharing"]
    assert explain(recording).incidents == ()


@pytest.mark.parametrize("name", sorted(HEALTHY))
def test_healthy_recording_gives_no_incident(name):
    assert rules_of(HEALTHY[name]()) == []


def test_healthy_training_gives_no_incident():
    assert rules_of(healthy()) == []


BUILDERS = {scenario.name: scenario.build for scenario in SCENARIOS} | FAULTS


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_answer_is_the_same_from_memory_and_from_the_file(name, tmp_path):
    built = BUILDERS[name]()
    built.write(tmp_path / "r.db")
    assert explain(load_recording(tmp_path / "r.db")).incidents == explain(built.build()).incidents


@pytest.mark.parametrize("rule", sorted(FAULTS))
def test_order_of_the_rows_does_not_matter(rule):
    built = FAULTS[rule]()
    told = explain(built.build())
    built._rows = [built._rows[i] for i in np.random.default_rng(3).permutation(len(built._rows))]
    assert explain(built.build()).incidents == told.incidents


def hit_every(n, stolen_ms, call_ms=10):
    """Forty slow synchronisations, one in `n` with `stolen_ms` taken by a named task, after a healthy start."""
    built = RecordingBuilder().name(8821, "backup")
    loop = Loop(built)
    loop.steps(60, LoopStep(sync_ns=2 * MS))
    for i in range(40):
        loop.step(LoopStep(sync_ns=0))
        stolen = () if i % n else (stolen_ms * MS,)
        loop.preempted_call(SYNC, call_ms * MS, stolen, 8821)
    return built


def test_share_is_the_overlap_and_the_rest_is_unexplained():
    (incident,) = explain(hit_every(1, stolen_ms=4).build()).incidents
    shares = {cause.name: cause.share for cause in incident.causes}
    assert shares == {
        "preempted by backup": pytest.approx(0.40, abs=0.01),
        "unexplained": pytest.approx(0.60, abs=0.01),
    }
    assert incident.lost_ns == pytest.approx(40 * 10 * MS, rel=0.01)


def test_cause_below_a_fifth_of_the_lost_time_is_not_named():
    assert rules_of(hit_every(1, stolen_ms=1)) == []


def test_many_small_preemptors_are_one_cause_together():
    built = RecordingBuilder()
    loop = Loop(built)
    loop.steps(60, LoopStep(sync_ns=2 * MS))
    for i in range(40):
        loop.step(LoopStep(sync_ns=0))
        loop.preempted_call(SYNC, 10 * MS, (6 * MS,), 9000 + i)
    (incident,) = explain(built.build()).incidents
    assert [(cause.name, round(cause.share, 1)) for cause in incident.causes] == [
        ("preempted by 40 other tasks", 0.6),
        ("unexplained", 0.4),
    ]


def test_preemption_outside_the_feeding_thread_is_not_blamed():
    built = RecordingBuilder().name(8821, "backup")
    loop = Loop(built)
    for _ in range(60):
        loop.step(LoopStep(sync_ns=10 * MS))
        built.off_cpu(
            loop.at_ns - 9 * MS, 8 * MS, PID + 1, OffCpuReason.PREEMPTED, pid=PID, other_pid=8821
        )
    assert rules_of(built) == []


def test_driver_call_inside_a_runtime_call_is_counted_once():
    built = RecordingBuilder()
    loop = Loop(built)
    for _ in range(40):
        for i in range(400):
            start_ns, end_ns = loop.call(LAUNCH, 8_000, arg0=0x1000 + i)
            built.call((Source.DRIVER, 1), start_ns + 1_000, end_ns - start_ns - 2_000, PID)
            loop.rest(5_000)
        loop.call(SYNC, 20_000)
    (incident,) = explain(built.build()).incidents
    assert (incident.rule, incident.n_cases) == ("launch_bound", 40 * 400)


def test_silence_without_proof_that_the_gpu_is_idle_is_no_starvation():
    built = RecordingBuilder()
    loop = Loop(built)
    for _ in range(20):
        loop.step(LoopStep(sync_ns=0))
        loop.rest(100 * MS)  # the host computes while the GPU works on what it was given
        loop.wait(80 * MS)  # and is still busy when asked
    assert rules_of(built) == []


def test_starvation_with_unrecorded_switches_is_not_called_computing():
    built = RecordingBuilder()
    for i in range(20):
        built.call(LAUNCH, i * 200 * MS, 12_000, PID, arg0=1)
        built.call(SYNC, i * 200 * MS + 20_000, 5 * MS, PID)
    assert rules_of(built) == []


def test_full_device_is_told_from_a_fragmented_one():
    (fragmented,) = explain(FAULTS["device_memory"]().build()).incidents
    (full,) = explain(device_full().build()).incidents
    assert fragmented.title == "Fragmented device memory: train was refused 512 MiB"
    assert "1.25 GiB in 20 pieces of at most 64 MiB" in " ".join(fragmented.causes[0].evidence)
    assert full.title == "Device out of memory: train was refused 1 GiB"
    assert "8 GiB held" in " ".join(full.causes[0].evidence)


def test_pinned_memory_that_the_host_refuses_is_no_full_device():
    built = RecordingBuilder()
    loop = Loop(built)
    loop.call(MALLOC, MS // 10, arg0=1 << 20, arg1=0x7E00_0000_0000)
    for _ in range(3):
        loop.step(LoopStep(n_launches=4, copy_ns=0, sync_ns=4 * MS))
        loop.call((Source.CUDA, CudaOp.HOST_ALLOC), MS // 10, arg0=64 << 30, ret_code=2)
    assert rules_of(built) == []


def test_waking_up_is_not_waiting_for_a_cpu():
    built = RecordingBuilder()
    loop = Loop(built)
    for _ in range(400):
        loop.step(LoopStep(n_launches=2, copy_ns=0, sync_ns=0))
        loop.sleep(200_000, wait_ns=40_000)
    assert rules_of(built) == []


def test_incident_keeps_its_id_when_the_recording_goes_on():
    short, long = FAULTS["blocking_io"](), FAULTS["blocking_io"]()
    last_ns = int((long.events()["start_ns"] + long.events()["duration_ns"]).max()) - START_NS
    Loop(long, PID, "train", at_ns=last_ns).steps(20)
    (before,), (after,) = explain(short.build()).incidents, explain(long.build()).incidents
    assert before.id == after.id


def test_tasks_of_one_other_cgroup_are_one_neighbour():
    (incident,) = explain(FAULTS["noisy_neighbour"]().build()).incidents
    (cause,) = incident.causes
    assert cause.name == "preempted by cgroup 90 (8 tasks: make, cc1, ld)"
    assert (incident.lost_ns, cause.share) == (80 * 6 * MS, 1.0)
    assert "by cgroup 90 (8 tasks: make, cc1, ld): 80 times" in incident.title


def test_capture_that_loses_its_cpu_names_who_has_it():
    (incident,) = explain(FAULTS["graph_contended"]().build()).incidents
    assert (incident.n_cases, incident.causes[0].name) == (8, "preempted by backup")
    assert incident.causes[0].share == pytest.approx(0.965, abs=0.005)


def test_overflowing_managed_memory_shows_dose_and_response():
    (incident,) = explain(FAULTS["managed_memory"]().build()).incidents
    assert "holds 24 GiB of it on a device of 15 GiB" in incident.title
    assert incident.lost_ns == pytest.approx(9 * 6 * 48 * MS, rel=0.03)
    assert "59.8 ms since then, 12 ms before" in " ".join(incident.causes[0].evidence)


def test_slow_decode_is_explained_by_what_overlaps_it_or_by_nothing():
    (unknown,) = explain(serving_faults.decode_outlier().build()).incidents
    assert (unknown.rule, unknown.n_cases) == ("decode_outlier", 160)
    assert unknown.causes[0].name == "unexplained"
    assert unknown.lost_ns == pytest.approx(160 * 16 * MS, rel=0.02)
    (stolen,) = explain(serving_faults.decode_preempted().build()).incidents
    assert stolen.causes[0].name == "preempted by compaction"
    assert stolen.causes[0].share == pytest.approx(0.75, abs=0.02)


def test_wait_behind_a_prompt_is_told_with_its_connections_and_share():
    (incident,) = explain(serving_faults.head_of_line_blocking().build()).incidents
    assert incident.rule == "head_of_line_blocking"
    assert "3 connections of serve wait" in incident.title
    (cause,) = incident.causes
    assert (cause.name, cause.share) == (
        "prompts of other requests go first",
        pytest.approx(0.94, abs=0.02),
    )
    # Forty prompts, the first of them before any token: each holds up three connections.
    assert incident.n_cases == 39 * 3
    assert incident.lost_ns == pytest.approx(39 * 65.6 * MS, rel=0.02)


def test_slow_prompts_are_measured_against_other_prompts():
    (incident,) = explain(serving_faults.prefill_outlier().build()).incidents
    assert (incident.rule, incident.n_cases) == ("prefill_outlier", 10)
    assert incident.lost_ns == pytest.approx(10 * 120 * MS, rel=0.02)


def test_writes_of_the_training_thread_are_told_from_reads():
    (incident,) = explain(FAULTS["blocking_writes"]().build()).incidents
    assert incident.causes[0].name == "blocked on disk writes"
    assert "40 of 40 writes by this thread lie inside its off-CPU spans" in " ".join(
        incident.causes[0].evidence
    )


def test_small_loss_in_a_long_watch_is_no_incident():
    def contended(n_after):
        built = RecordingBuilder()
        loop = Loop(built)
        loop.steps(20)
        for _ in range(20):
            loop.step(LoopStep(sync_ns=0))
            loop.preempted_call(SYNC, 10 * MS, (6 * MS,), 8821)
        loop.steps(n_after)
        return built

    assert rules_of(contended(20)) == ["preemption"]
    assert rules_of(contended(200)) == []


def test_short_look_is_never_high():
    built = RecordingBuilder()
    loop = Loop(built)
    loop.steps(10, LoopStep(n_launches=4, copy_ns=0, sync_ns=MS))
    for _ in range(12):
        loop.preempted_call(SYNC, 10 * MS, (8 * MS,), 8821)
    (incident,) = explain(built.build()).incidents
    assert incident.watched_ns < 200 * MS
    assert (incident.window_share > 0.5, incident.severity) == (True, "MEDIUM")


def test_steps_whose_rows_were_sampled_are_no_baseline():
    recording = serving_faults.decode_outlier().build()
    counted = np.zeros(1, AGGREGATE)
    counted["bucket_ns"], counted["pid"], counted["count"] = START_NS, PID, 10_000_000
    counted["source"], counted["op"] = LAUNCH
    assert explain(replace(recording, aggregates=counted)).incidents == ()


def test_calls_counted_a_minute_after_their_rows_are_not_taken_for_lost():
    # A trace that began shortly before a minute ended: its writer tallies rows by their own minute, and the calls of
    # both are counted in the second.
    built = RecordingBuilder()
    loop = Loop(built, at_ns=59_000 * MS)
    for i in range(800):
        loop.call(MALLOC, 5 * MS if i % 100 == 50 else 5_000, arg0=512)
        loop.step(LoopStep(n_launches=4, copy_ns=0, sync_ns=2 * MS))
    recording = built.build()
    is_alloc = recording.events["op"] == MALLOC[1]
    minute = 60_000 * MS
    stamps = recording.events["start_ns"][is_alloc & (recording.events["source"] == Source.CUDA)]
    n_first = int((stamps < START_NS + minute).sum())
    assert 0 < n_first < len(stamps) == 800
    tallies = np.zeros(2, AGGREGATE)
    tallies["pid"], tallies["source"], tallies["op"] = PID, *MALLOC
    tallies["bucket_ns"] = START_NS, START_NS + minute
    tallies["stored"], tallies["count"] = [n_first, 800 - n_first], [0, 800]
    (incident,) = explain(replace(recording, aggregates=tallies)).incidents
    assert (incident.rule, incident.coverage.state) == ("periodic_spike", "exact")
    assert incident.coverage.seen == incident.coverage.stored


def spiky(is_slow, n_calls=800, others=None):
    """Allocations of which some take 5 ms, or as long as `others` says, each in a step of its own."""
    loop = Loop(RecordingBuilder())
    for i in range(n_calls):
        usual_ns = (others or {}).get(i, 5_000)
        loop.call(MALLOC, 5 * MS if is_slow(i) else usual_ns, arg0=512)
        loop.step(LoopStep(n_launches=4, copy_ns=0, sync_ns=2 * MS))
    return loop.recording


def test_spikes_keep_their_rhythm_when_another_call_is_slow_for_a_reason_of_its_own():
    strays = {130, 131, 377}  # the first two are one
    (incident,) = explain(spiky(lambda i: i % 80 == 40 or i in strays).build()).incidents
    assert incident.rule == "periodic_spike"
    (cause,) = incident.causes
    assert cause.name.startswith("something that happens every 80 calls ")
    assert incident.lost_ns == 10 * (5 * MS - 5_000)
    assert "10 spikes of 10 calls among 800" in cause.evidence


def test_many_slow_calls_outside_of_it_are_no_rhythm():
    strays = {130, 250, 377}
    assert rules_of(spiky(lambda i: i % 80 == 40 or i in strays)) == []


def test_small_slow_calls_hide_no_rhythm_of_spikes_that_lose_far_more():
    others = dict.fromkeys((17, 130, 133, 250, 377, 461, 583, 601, 777, 790), 150_000)
    (incident,) = explain(spiky(lambda i: i % 80 == 40, others=others).build()).incidents
    assert incident.rule == "periodic_spike"
    assert "10 spikes of 10 calls among 800" in incident.causes[0].evidence


def test_slow_calls_a_quarter_as_long_as_the_spikes_are_no_small_ones():
    others = dict.fromkeys((130, 250, 377), 1_400_000)
    assert rules_of(spiky(lambda i: i % 80 == 40, others=others)) == []


def test_four_spikes_need_every_call_in_their_rhythm():
    assert rules_of(spiky(lambda i: i % 200 == 40)) == ["periodic_spike"]
    assert rules_of(spiky(lambda i: i % 200 == 40 or i == 510)) == []


def test_slow_calls_beside_each_other_are_one_spike_and_no_rhythm():
    assert rules_of(spiky(lambda i: 400 <= i < 410)) == []


def test_a_rhythm_is_found_in_what_many_calls_do_for_one_spike():
    (incident,) = explain(spiky(lambda i: i % 80 in {40, 42, 43}).build()).incidents
    assert (incident.rule, incident.n_cases) == ("periodic_spike", 10)
    assert "10 spikes of 30 calls among 800" in incident.causes[0].evidence
