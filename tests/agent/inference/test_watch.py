"""Servers watched while they are traced: phases, outliers with causes, series. Rows are made here; no probe."""

import io
import json
import socket

import numpy as np
import pytest
from rich.console import Console

from ingero.agent.capture.discover.identity import ProcessIdentity
from ingero.agent.inference.messages import OutlierMessages, open_outlier_socket
from ingero.agent.inference.series import iter_inference_series, read_losses
from ingero.agent.inference.watch import MAX_REPORTED, InferenceSettings, InferenceWatch
from ingero.cli.commands.trace.inference import (
    build_outlier_line,
    describe_memory,
    describe_outlier,
    draw_phases,
    iter_phase_lines,
)
from ingero.model.arrays import Records
from ingero.model.events import EVENT, CopyKind, CudaOp, HostOp, Source
from ingero.recording.scenarios.builder import START_NS, RecordingBuilder
from ingero.recording.scenarios.loop import COPY, LAUNCH, MALLOC, SYNC, Loop
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_MS, NS_PER_S, NS_PER_US
from ingero.wire.uds import decode_message

PID, THIEF = 4821, 8821


class Server(Loop):
    """Steps of requests, one after another."""

    def serve(self, n_requests=12, n_tokens=20):
        for _ in range(n_requests):
            self.prompt()
            for _ in range(n_tokens):
                self.token()

    def prompt(self, n_bytes=16_384, wait_ms=30):
        self._input(n_bytes)
        self._launches(120, 512)
        self._output()
        self.call(SYNC, wait_ms * NS_PER_MS)

    def token(self, wait_ms=4):
        self._input(8)
        self._launches(12, 8)
        self._output()
        self.call(SYNC, wait_ms * NS_PER_MS)

    def _input(self, n_bytes):
        self.call(COPY, 10 * NS_PER_US, arg0=n_bytes, arg1=CopyKind.HOST_TO_DEVICE)

    def _launches(self, n, blocks):
        for _ in range(n):
            self.call(LAUNCH, 8 * NS_PER_US, arg0=1, arg2=blocks)

    def _output(self):
        self.call(COPY, 10 * NS_PER_US, arg0=4, arg1=CopyKind.DEVICE_TO_HOST)

    def preempted_token(self):
        self._input(8)
        self._launches(12, 8)
        self._output()
        start_ns, _ = self.call(SYNC, 20 * NS_PER_MS)
        self.recording.off_cpu(start_ns, 15 * NS_PER_MS, PID, 1, other_pid=THIEF)


class Totals:
    """The two facts of totals that the watch reads."""

    def __init__(self, wall_ns, *, is_last=False):
        self.wall_ns, self.is_last = wall_ns, is_last


def watch_events(events, *, is_throttled=lambda: False, settings=None, cuts=1):
    told = []
    watch = InferenceWatch(settings or InferenceSettings(), told.append, is_throttled)
    watch.on_process(ProcessIdentity(PID, name="serve", cgroup="/pod"))
    off = np.zeros(1, [("reason", "u1"), ("other_pid", "<u4"), ("other_comm", "S16")])
    off[0] = (1, THIEF, b"compaction")
    watch.on_events("off_cpus", off, np.zeros(0, EVENT))
    for part in np.array_split(events, cuts):
        watch.on_events("calls", Records, part)
        watch.on_totals(Totals(int((part["start_ns"] + part["duration_ns"]).max())))
    watch.on_totals(Totals(int(events["start_ns"].max()) + NS_PER_S, is_last=True))
    return watch, told


@pytest.mark.parametrize("cuts", [1, 7, 100])
def test_every_step_is_counted_once_by_its_phase_wherever_the_seconds_end(cuts):
    server = Server(RecordingBuilder())
    server.serve()
    watch, told = watch_events(server.recording.events(), cuts=cuts)
    steps = {line["phase"]: line["steps"] for line in iter_phase_lines(watch) if "phase" in line}
    assert steps == {"decode": 240, "prefill": 12}
    assert told == []


def test_steps_of_a_short_run_are_counted_without_a_phase():
    server = Server(RecordingBuilder())
    server.serve(n_requests=1)
    watch, told = watch_events(server.recording.events(), cuts=5)
    (line,) = [line for line in iter_phase_lines(watch) if "phase" in line]
    assert (line["phase"], line["steps"], told) == ("unknown", 21, [])


def test_a_preempted_token_is_told_with_who_took_the_cpu():
    server = Server(RecordingBuilder())
    server.serve()
    server.preempted_token()
    watch, (outlier,) = watch_events(server.recording.events())
    assert (outlier.phase, outlier.bucket, outlier.process) == ("decode", "3x", "serve")
    assert outlier.duration_ns == 20 * NS_PER_MS + 116 * NS_PER_US
    (cause,) = outlier.causes
    assert cause.name == "preempted by compaction"
    assert cause.share == pytest.approx(15 / 20.116, abs=1e-3)
    assert outlier.p95_ns == 4 * NS_PER_MS + 116 * NS_PER_US
    assert (
        "decode step took 20.1 ms, p95 is 4.12 ms: preempted by compaction 75%"
        in describe_outlier(outlier)
    )
    line = json.loads(json.dumps(build_outlier_line(outlier)))
    assert line["causes"][0]["name"] == "preempted by compaction"
    assert line["cgroup_path_hash"] == watch.find_cgroup_hash(PID) != ""


def test_a_longer_prompt_is_told_as_more_work():
    server = Server(RecordingBuilder())
    server.serve(n_requests=40)
    server.prompt(n_bytes=163_840, wait_ms=300)
    _, (outlier,) = watch_events(server.recording.events())
    assert outlier.phase == "prefill"
    assert [cause.name for cause in outlier.causes] == ["more work than usual"]
    assert outlier.causes[0].evidence == ("163840 bytes copied in instead of 16384",)


def test_time_inside_an_allocation_is_told_and_what_nothing_says_is_unexplained():
    server = Server(RecordingBuilder())
    server.serve()
    server._input(8)
    server.call(MALLOC, 30 * NS_PER_MS, arg0=1 << 20, arg1=0x7F)
    server.token()
    server.token(wait_ms=40)
    _, (slow, silent) = watch_events(server.recording.events())
    assert [cause.name for cause in slow.causes] == ["inside cudaMalloc"]
    assert slow.causes[0].evidence == ("30 ms in 1 calls",)
    assert [cause.name for cause in silent.causes] == ["unexplained"]
    assert silent.ages_ms == (44,)


def test_outliers_are_counted_all_and_told_up_to_a_limit_the_worst_of_a_second():
    server = Server(RecordingBuilder())
    server.serve()
    for _ in range(MAX_REPORTED + 3):
        server.token(wait_ms=40)
        for _ in range(3):
            server.token()
    watch, told = watch_events(server.recording.events(), is_throttled=lambda: True)
    assert len(told) == MAX_REPORTED
    assert read_losses(watch)["outliers_not_reported"] == 3
    assert watch.counts.outliers.tolist() == [0, 0, 0, MAX_REPORTED + 3]
    assert watch.counts.throttled.tolist() == [0, 0, 0, MAX_REPORTED + 3]


def test_the_series_say_what_was_seen():
    server = Server(RecordingBuilder())
    server.call(MALLOC, NS_PER_US, arg0=1 << 20, arg1=0x7F)
    server.serve()
    server.call((Source.CUDA, CudaOp.FREE), NS_PER_US, arg0=0x7F, arg1=1 << 20)
    server.call(MALLOC, NS_PER_US, arg0=2048, arg1=0x80)
    server.token(wait_ms=40)
    watch, _ = watch_events(server.recording.events())
    series = {one.name: one for one in iter_inference_series(watch)}
    durations = {dict(labels)["ingero.infer.phase"]: value
                 for labels, value in series["ingero.infer.step_duration_ns"].points}  # fmt: skip
    assert sum(durations["decode"].counts) == 241
    assert durations["decode"].counts[durations["decode"].bounds.index(5e6)] == 240
    assert durations["prefill"].total == 12 * (30 * NS_PER_MS + 980 * NS_PER_US)
    ((labels, p95),) = [point for point in series["ingero.infer.baseline_p95_ns"].points
                        if ("ingero.infer.phase", "decode") in point[0]]  # fmt: skip
    assert p95 == 4 * NS_PER_MS + 116 * NS_PER_US
    assert dict(labels)["pid"] == PID
    outliers = {labels[0][1]: n for labels, n in series["ingero.infer.outlier_total"].points}
    assert outliers == {"1.5x": 0, "2x": 0, "3x": 1}
    assert series["ingero.infer.workloads_tracked"].points == (((), 1.0),)
    ((_, ages),) = series["ingero.infer.kvcache.alloc_age_ms"].points
    assert sum(ages.counts) == 1
    assert 12 * 30 < ages.total < 12 * 140
    assert series["ingero.infer.kvcache.held_bytes"].points == (((("pid", PID),), 2048.0),)


def test_memory_of_a_process_that_ended_is_not_held_and_its_counts_stay():
    server = Server(RecordingBuilder())
    server.call(MALLOC, NS_PER_US, arg0=2048, arg1=0x80)
    server.serve()
    server.call((Source.HOST, HostOp.EXIT), 0)
    watch, _ = watch_events(server.recording.events())
    assert len(watch.allocations.held) == 0
    assert len(list(watch.iter_phases())) == 2


def test_a_pid_that_is_used_again_is_another_server(monkeypatch):
    monkeypatch.setattr("ingero.agent.inference.watch.MAX_WORKLOADS", 1)
    server = Server(RecordingBuilder())
    server.serve()
    watch, _ = watch_events(server.recording.events())
    watch.on_process(ProcessIdentity(PID, start_ticks=9, name="other"))
    assert watch.workloads == {}
    rows = server.recording.events()
    rows["start_ns"] += 60 * NS_PER_S
    other = rows.copy()
    other["pid"] = other["tid"] = PID + 1
    watch.on_events("calls", Records, np.concatenate([rows, other]))
    watch.on_totals(Totals(START_NS + 200 * NS_PER_S, is_last=True))
    assert len(watch.workloads) == 1
    assert read_losses(watch)["streams_forgotten"] == 1


def test_an_outlier_reaches_local_readers_as_the_message_of_its_name(tmp_path):
    server = Server(RecordingBuilder())
    server.serve()
    server.token(wait_ms=40)
    _, (outlier,) = watch_events(server.recording.events())
    messages = OutlierMessages("n1", "c1")
    messages.publish(outlier)  # nobody serves yet
    with open_outlier_socket(tmp_path / "s", -1) as (stream, warning):
        assert warning == ""
        messages.stream = stream
        with socket.socket(socket.AF_UNIX) as reader:
            reader.connect(str(tmp_path / "s"))
            wait_until(lambda: stream.n_readers == 1)
            messages.publish(outlier)
            message = decode_message(reader.makefile("rb").readline())
    assert message == messages.build(outlier)
    assert (message.node_id, message.cluster_id, message.bucket) == ("n1", "c1", "3x")
    assert message.step_duration_ns == 40 * NS_PER_MS + 116 * NS_PER_US
    assert message.event_id == OutlierMessages("n1", "c1").build(outlier).event_id


def test_rows_of_another_ring_may_come_a_reading_later_and_steps_are_known_a_second_later():
    server = Server(RecordingBuilder())
    server.serve()
    events = server.recording.events()
    middle = START_NS + int(server.at_ns / 2)
    is_launch = events["op"] == CudaOp.LAUNCH_KERNEL
    is_early = events["start_ns"] < middle
    late_ns = 3 * NS_PER_MS  # the ring of launches was read that much earlier than the others
    is_read = is_early & ~(is_launch & (events["start_ns"] > middle - late_ns))
    watch = InferenceWatch(InferenceSettings(), lambda _outlier: None)
    watch.on_events("kept_calls", Records, events[is_read])
    watch.on_totals(Totals(middle))
    assert watch.workloads == {}, "what ended before these totals may not be complete"
    watch.on_events("calls", Records, events[~is_read])
    watch.on_totals(Totals(START_NS + server.at_ns))
    n_early = sum(
        record.baseline.n_steps
        for one in watch.workloads.values()
        for record in one.phases.values()
    )
    assert n_early == int((is_early & (events["op"] == CudaOp.STREAM_SYNC)).sum())
    watch.on_totals(Totals(START_NS + server.at_ns + NS_PER_S, is_last=True))
    (stream,) = watch.workloads.values()
    assert {name: record.baseline.n_steps for name, record in stream.phases.items()} == {
        "prefill": 12,
        "decode": 240,
    }
    octaves = stream.phases["decode"].work[:, 0]
    assert octaves.tolist() == [np.log2(13)] * len(octaves), "every launch is in its step"


def test_the_table_shows_phases_and_memory():
    server = Server(RecordingBuilder())
    server.call(MALLOC, NS_PER_US, arg0=4096, arg1=0x7F)
    server.serve()
    server.token(wait_ms=40)
    watch, _ = watch_events(server.recording.events())
    console = Console(width=100, file=io.StringIO())
    for table in draw_phases(watch):
        console.print(table)
    head, decode, prefill = (line.split() for line in console.file.getvalue().splitlines())
    assert head == ["inference", "stream", "phase", "steps", "p50", "p95", "too", "long"]
    assert decode == ["serve", "(4821)", "0x0", "decode", "241", "4.12", "ms", "4.12", "ms", "1"]
    assert prefill[3:5] == ["prefill", "12"]
    assert describe_memory(watch) == "device memory: 1 allocations held, 4 KiB"
