"""What a live agent pushes and what it says of it, without probes: the records are the test's."""

import json

import numpy as np
import pytest

from ingero.agent.capture.discover.identity import ProcessIdentity
from ingero.agent.capture.kernel.abi import ProcessEvent, get_dtype
from ingero.agent.capture.probes.state import build_in_flight
from ingero.agent.capture.totals import Totals
from ingero.agent.health.loop_settings import LoopSettings
from ingero.agent.health.push_body import NodeIdentity
from ingero.agent.health.service import AgentSettings
from ingero.agent.health.transport import TransportSettings
from ingero.agent.metrics.exporting import PrometheusPage
from ingero.agent.metrics.health import HealthSeries, iter_collective_series
from ingero.agent.push.live import CounterSource, LiveCallbacks, LiveObserver, open_live
from ingero.cli.commands.fleet_push import _printer
from ingero.model.counters import CudaWait
from ingero.model.events import CudaOp, DriverOp, NcclOp, Source
from ingero.otlp.client.endpoint import parse_endpoint
from ingero.telemetry.clock import SystemClock
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_MS, NS_PER_S
from ingero.wire.collectives import read_collectives


@pytest.fixture
def settings(collector, tmp_path):
    return AgentSettings(
        identity=NodeIdentity(cluster_id="c", node_id="n", workload_type="training"),
        transport=TransportSettings(
            endpoint=parse_endpoint(collector.url, is_insecure=True, option="test"),
            cluster_id="c",
            timeout_ns=5 * NS_PER_S,
        ),
        loop=LoopSettings(push_interval_ns=NS_PER_S, sample_interval_ns=100 * NS_PER_MS),
        persist_path=tmp_path / "baseline.json",
    )


def enter_unknown(observer):
    """Three collectives on a communicator that was made before the probes."""
    records = np.zeros(3, get_dtype("collective"))
    records["pid"], records["source"], records["op"] = 42, Source.NCCL, NcclOp.ALL_REDUCE
    observer.on_events("collectives", records, np.zeros(0))


@pytest.mark.parametrize("as_json", [True, False])
def test_what_fleet_is_not_told_is_said_with_every_look(settings, as_json, capsys):
    series, looks, notes = HealthSeries(), [], []

    def follow(agent, find_counts):
        show = _printer(agent, find_counts, None, as_json=as_json)

        def both(look, notes):
            collective_counts = find_counts()
            series.note(agent, look, collective_counts)
            show(look, notes)
            if look.is_tick and collective_counts.unknown_communicator == 6:
                looks.append(look)

        return both

    callbacks = LiveCallbacks(follow, notify=notes.append)
    with open_live(settings, SystemClock(), callbacks) as observer:
        enter_unknown(observer)
        wait_until(lambda: notes)
        enter_unknown(observer)
        wait_until(lambda: looks)
    (note,) = notes
    assert note.startswith("the collectives of PID 42 are not compared")
    page = PrometheusPage()
    page.take(tuple(series.iter_series()), 0)
    told = page.render().splitlines()
    assert 'ingero_agent_collectives_total{outcome="unknown_communicator"} 6' in told
    last = capsys.readouterr().out.splitlines()[-1]
    if as_json:
        assert json.loads(last)["collectives"]["unknown_communicator"] == 6
    else:
        assert last.endswith("; 6 collectives not sent")


def enter(observer, n_ops):
    records = np.zeros(n_ops, get_dtype("collective"))
    records["seq"], records["pid"], records["op"] = range(1, n_ops + 1), 42, NcclOp.ALL_REDUCE
    records["comm_hash"], records["nranks"] = 0xAB, 4
    observer.on_events("collectives", records, np.zeros(0))


@pytest.mark.parametrize("is_there", [True, False])
def test_what_fleet_did_not_take_when_the_agent_ends_is_said(settings, collector, is_there):
    notes = []
    if not is_there:
        collector.stop()
    with open_live(settings, SystemClock(), LiveCallbacks(notify=notes.append)) as observer:
        enter(observer, 3)
    runs = [run for export in collector.logs for run in read_collectives(export).runs]
    assert [len(run.ops) for run in runs] == ([3] if is_there else [])
    assert notes == ([] if is_there else ["3 collectives were not delivered to Fleet"])


def test_the_plugin_of_a_process_that_ended_without_a_record_is_not_asked_any_more(settings):
    with open_live(settings, SystemClock()) as observer:
        observer.on_process(ProcessIdentity(pid=4242))
        assert 4242 in observer.pusher._device._plugins
        observer.on_unrecorded_ends([4242])
        wait_until(lambda: 4242 not in observer.pusher._device._plugins)


def test_a_fault_in_a_round_of_pushing_is_said_once_and_counted_and_does_not_end_pushing(
    settings, collector
):
    notes, lines = [], []

    def follow(_agent, find_counts):
        return lambda _look, _notes: lines.append(find_counts())

    faults = []

    def fail(_pid, _rank, _ops):
        if len(faults) < 2:
            faults.append(1)
            raise OverflowError("too large")
        return 0

    callbacks = LiveCallbacks(follow, notify=notes.append)
    with open_live(settings, SystemClock(), callbacks) as observer:
        observer.pusher.on_finished = fail
        for n_faults in (1, 2):
            end(observer, n_faults)
            wait_until(lambda n=n_faults: lines and lines[-1].push_faults == n)
        assert lines[-1].describe_loss() == "; 2 rounds of pushing failed"
        end(observer, 3)
        wait_until(lambda: collector.logs)
    (note,) = notes
    assert note.startswith(
        "a round of pushing failed, the next one runs: OverflowError('too large') in "
    )
    page = PrometheusPage()
    page.take(tuple(iter_collective_series(lines[-1])), 0)
    assert "ingero_agent_push_faults_total 2" in page.render().splitlines()


def end(observer, seq):
    """A collective of a process that ended."""
    records = np.zeros(1, get_dtype("collective"))
    records["seq"], records["pid"], records["op"] = seq, 42 + seq, NcclOp.ALL_REDUCE
    records["comm_hash"], records["nranks"] = 0xAB, 4
    observer.on_events("collectives", records, np.zeros(0))
    observer.pusher.note_exit(42 + seq)


def test_times_that_fleet_asks_about_are_turned_back_as_they_were_turned(settings):
    with open_live(settings, SystemClock()) as observer:
        history = observer.pusher.on_finished.__self__
        assert observer.pusher.offset_ns == history.offset_ns


def end_process(observer, pid):
    records = np.zeros(1, get_dtype("process"))
    records["event"], records["pid"] = ProcessEvent.EXIT, pid
    observer.on_events("processes", records, np.zeros(0))


@pytest.mark.parametrize(
    "end_one", [end_process, lambda observer, pid: observer.on_unrecorded_ends([pid])]
)
def test_the_workload_is_another_job_only_when_no_process_of_it_lives(settings, end_one):
    with open_live(settings, SystemClock()) as observer:
        observer.on_process(ProcessIdentity(pid=10, job="a"))
        observer.on_process(ProcessIdentity(pid=11, job="a"))
        observer.on_process(ProcessIdentity(pid=20, job="b"))
        observer.on_process(ProcessIdentity(pid=30))
        assert observer.workload == "a"
        end_one(observer, 10)
        end_one(observer, 30)
        assert observer.workload == "a"
        end_one(observer, 11)
        assert observer.workload == "b"
        observer.on_process(ProcessIdentity(pid=12, job="a"))
        assert observer.workload == "b"
        end_one(observer, 12)
        end_one(observer, 20)
        assert observer.workload == "b", "the job may go on in other processes"
        observer.on_process(ProcessIdentity(pid=40, job="c"))
        assert observer.workload == "c"


class Noting:
    """Keeps what a history is given."""

    def add_calls(self, mono_ns, took_ns):
        self.calls = mono_ns, took_ns

    def note_open_calls(self, calls):
        self.open_calls = calls


class Ignoring:
    def note_in_flight(self, frames):
        pass


def count(pid, source, op, seen, nested, total_ms):
    key, change = np.zeros(1, get_dtype("count_key")), np.zeros(1, get_dtype("count"))
    key["pid"], key["source"], key["op"] = pid, source, op
    change["seen"], change["nested"], change["total_ns"] = seen, nested, total_ms * NS_PER_MS
    return key, change


def build_totals(counts, frames):
    keys, changes = (np.concatenate(parts) for parts in zip(*counts, strict=True))
    in_flight = build_in_flight(len(frames))
    for row, (tid, pid, depth, source, op, entry_ns) in zip(in_flight, frames, strict=True):
        row["tid"], row["pid"], row["depth"] = tid, pid, depth
        row["frame"]["source"], row["frame"]["op"], row["frame"]["entry_ns"] = source, op, entry_ns
    return Totals(
        mono_ns=7 * NS_PER_S, wall_ns=0, elapsed_ns=NS_PER_S, keys=keys, counts=changes,
        changes=changes, losses={}, in_flight=in_flight, keep_one_in=1,
    )  # fmt: skip


def test_time_in_calls_of_cuda_counts_once_and_the_call_of_the_first_thread_is_known():
    observer = LiveObserver(CounterSource(), Ignoring(), Noting())
    counts = [
        count(42, Source.CUDA, CudaOp.STREAM_SYNC, 10, 0, 400),
        count(42, Source.DRIVER, DriverOp.CTX_SYNC, 10, 10, 390),  # inside of those
        count(42, Source.DRIVER, DriverOp.LAUNCH_KERNEL, 4, 1, 8),  # one of four inside of another
        count(42, Source.NCCL, NcclOp.ALL_REDUCE, 5, 0, 50),
        count(43, Source.CUDA_GRAPH, 1, 1, 0, 3),
        count(44, Source.HOST, 1, 9, 0, 900),
    ]
    frames = [
        (42, 42, 0, Source.CUDA, CudaOp.STREAM_SYNC, 5 * NS_PER_S),
        (42, 42, 1, Source.DRIVER, DriverOp.CTX_SYNC, 6 * NS_PER_S),
        (99, 42, 0, Source.CUDA, CudaOp.MALLOC, NS_PER_S),
        (43, 43, 0, Source.NCCL, NcclOp.ALL_REDUCE, NS_PER_S),
    ]
    observer.on_totals(build_totals(counts, frames))
    mono_ns, took_ns = observer.history.calls
    assert mono_ns == 7 * NS_PER_S
    assert took_ns == {42: pytest.approx(406 * NS_PER_MS), 43: pytest.approx(3 * NS_PER_MS)}
    assert observer.history.open_calls == {42: CudaWait("cudaStreamSync", 5 * NS_PER_S)}


def test_a_process_that_becomes_another_program_is_inside_of_no_collective(settings):
    with open_live(settings, SystemClock()) as observer:
        enter(observer, 3)
        positions = observer.pusher._tracker.positions
        wait_until(lambda: positions(42))
        (position,) = positions(42).values()
        assert (position.entered, position.left) == (3, None)
        records = np.zeros(1, get_dtype("process"))
        records["pid"], records["event"] = 42, ProcessEvent.EXEC
        observer.on_events("processes", records, np.zeros(0))
        wait_until(lambda: [(one.entered, one.left) for one in positions(42).values()] == [(3, 3)])
