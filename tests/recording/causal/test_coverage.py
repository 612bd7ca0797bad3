"""A window that cuts a minute is not charged with the calls of the rest of that minute."""

from dataclasses import replace

import pytest
from tests.support.degrade import degrade, sample

from ingero.model.events import HostOp, OffCpuReason, Source
from ingero.model.sampling import NEVER_SAMPLED
from ingero.recording.causal.coverage import CallCounts
from ingero.recording.causal.engine import explain
from ingero.recording.scenarios.builder import START_NS, RecordingBuilder
from ingero.recording.scenarios.loop import LAUNCH, SYNC

MS = 1_000_000
SECOND = 1000 * MS
PID = 7
SWITCH = (Source.HOST, HostOp.SCHED_SWITCH)


def code(operation):
    return int(operation[0]) << 8 | int(operation[1])


def half_launches_half_waits():
    """Half a minute of sampled launches, then off-CPU spans and waits into the next minute, each with its row."""
    built = RecordingBuilder()
    for i in range(3000):
        built.call(LAUNCH, i * 10 * MS, 1000, PID, arg0=1)
    for i in range(320):
        at = 31 * SECOND + i * 100 * MS
        built.call(SYNC, at, 5 * MS, PID)
        built.off_cpu(at, 5 * MS, PID, reason=OffCpuReason.SLEEP)
    return degrade(built.build(), lambda events: sample(events, 10, NEVER_SAMPLED))


def window(recording, from_ns, to_ns=0):
    first, last = START_NS + from_ns, START_NS + to_ns if to_ns else 0
    stamps = recording.events["start_ns"]
    is_in = (stamps >= first) & (stamps <= (last or stamps.max()))
    return replace(recording, events=recording.events[is_in], asked_ns=(first, last))


def gap_of(recording, operation):
    return CallCounts(recording).gap(0, PID, (code(operation),))


def test_calls_of_the_rest_of_the_minute_are_not_missing_in_a_window():
    part = window(half_launches_half_waits(), 40 * SECOND)
    gap = gap_of(part, LAUNCH)
    assert (gap.stored, gap.seen) == (0, 0)
    assert gap.most > 2000
    told = explain(part)
    assert not [one for one in told.unknown if "cudaLaunchKernel" in one.missing]
    (gpu,) = (one for one in told.groups if one.name == "GPU calls")
    assert gpu.stored == gpu.seen < gpu.most


def test_what_is_missing_in_a_window_is_what_its_rows_stand_for():
    part = window(half_launches_half_waits(), 10 * SECOND, 20 * SECOND)
    gap = gap_of(part, LAUNCH)
    assert gap.stored < 300
    assert gap.seen == pytest.approx(1000, abs=10)
    assert gap.most == pytest.approx(gap.stored + 3000 - 350, abs=50)


@pytest.mark.parametrize("n_late", [21, -21])
def test_calls_counted_in_the_next_minute_are_no_gap_where_every_call_has_a_row(n_late):
    recording = half_launches_half_waits()
    aggregates = recording.aggregates.copy()
    is_switch = (aggregates["source"] == SWITCH[0]) & (aggregates["op"] == SWITCH[1])
    aggregates["count"][is_switch] += [-n_late, n_late]
    recording = replace(recording, aggregates=aggregates)
    for part in (window(recording, 40 * SECOND), window(recording, 0, 50 * SECOND)):
        gap = gap_of(part, SWITCH)
        assert gap.stored == gap.seen == gap.most > 0


@pytest.mark.parametrize("minute", [0, 1])
def test_a_loss_is_a_gap_also_where_it_is_counted_in_the_next_minute(minute):
    recording = half_launches_half_waits()
    aggregates = recording.aggregates.copy()
    is_switch = (aggregates["source"] == SWITCH[0]) & (aggregates["op"] == SWITCH[1])
    lost = aggregates["lost"].copy()
    lost[is_switch.nonzero()[0][minute]] = 5
    aggregates["lost"] = lost
    part = window(replace(recording, aggregates=aggregates), 40 * SECOND, 59_500 * MS)
    assert gap_of(part, SWITCH).unstored == 5
    early = window(replace(recording, aggregates=aggregates), 40 * SECOND, 50 * SECOND)
    assert gap_of(early, SWITCH).unstored == (0 if minute else 5)


def test_rows_without_weights_leave_the_count_of_the_minute():
    part = window(half_launches_half_waits(), 40 * SECOND)
    gap = gap_of(replace(part, has_gpu_ids=False), LAUNCH)
    assert gap.seen == gap.most > 2000
