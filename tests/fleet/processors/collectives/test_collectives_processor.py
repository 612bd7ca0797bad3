"""Collective records through the processor: verdicts, lags, refusals."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fleet.processors.collectives.judged import COMM, Judged, gauge_push, job, judge_after

from ingero.errors import BadDataError
from ingero.fleet.processors.collectives.lags import LagTracker, lags_of
from ingero.model.collectives import ClockKind, CollectiveRun
from ingero.otlp.codec import iter_points
from ingero.otlp.names import Signal
from ingero.units import NS_PER_S
from ingero.wire.collectives import build_collectives


def test_slow_rank_is_named_culprit_and_nobody_else():
    judged = Judged()
    for run in job(slow=3):
        judged.push([run])
    judge_after(judged)
    named = {
        (point.attributes["node_id"], point.attributes["verdict"])
        for point in judged.points("ingero_fleet_verdict")
        if point.value == 1
    }
    assert ("node3", "culprit") in named
    assert {node for node, verdict in named if verdict == "culprit"} == {"node3"}
    (slowdown,) = [
        point.value
        for point in judged.points("ingero_fleet_slowdown")
        if point.attributes["node_id"] == "node3"
    ]
    assert slowdown == pytest.approx(1.5, abs=0.05)
    (lost,) = judged.points("ingero_fleet_lost_gpu_seconds")
    assert lost.attributes["node_id"] == "node3"
    assert lost.value > 0
    assert judged.host.read("ingero_fleet_nccl_workers", cluster_id="c", verdict="culprit") == 1


def test_each_of_two_jobs_in_one_cluster_has_its_own_culprit():
    judged = Judged()
    for run in job(slow=3):
        judged.push([run])
    for run in job(slow=5, seed=2, comm="00000000000000bb"):
        other = replace(run.rank, node_id=f"other{run.rank.rank}")
        judged.push([replace(run, rank=other)])
    judge_after(judged)
    culprits = {
        point.attributes["node_id"]
        for point in judged.points("ingero_fleet_verdict")
        if point.value == 1 and point.attributes["verdict"] == "culprit"
    }
    assert culprits == {"node3", "other5"}
    assert judged.host.read("ingero_fleet_nccl_workers", cluster_id="c", verdict="victim") == 14


def test_change_to_culprit_is_a_warning_record_that_names_worker_and_victims():
    judged = Judged()
    judged.push(job(slow=3))
    judge_after(judged)
    (record,) = [
        row for row in judged.records() if row.attributes["ingero.verdict.kind"] == "culprit"
    ]
    assert record.event_name == "ingero.verdict"
    assert record.severity_text == "WARN"
    assert record.attributes["ingero.verdict.worker"] == "dp 3, pp 0"
    assert record.attributes["ingero.node.id"] == "node3"
    assert len(record.attributes["ingero.verdict.victims"]) == 7
    assert "culprit" in record.body
    judged.host.clock.advance(6 * NS_PER_S)
    assert judged.round().records() == []


def test_equal_ranks_have_no_verdict_series_and_no_records():
    judged = Judged()
    judged.push(job())
    judge_after(judged)
    assert judged.points("ingero_fleet_verdict") == []
    assert judged.records() == []


def test_push_passes_on_and_says_who_pushed():
    judged = Judged()
    batch = judged.push(job()[:1])
    assert judged.out[Signal.LOGS].batches == [batch]
    assert (batch.push.cluster_id, batch.push.node_id) == ("c", "node0")


def test_peer_lag_is_positive_for_the_late_rank():
    judged = Judged()
    judged.push(job(n_ranks=4, slow=2))
    judged.round()
    lags = {
        point.attributes["node_id"]: point.value
        for point in judged.points("nccl.collective.peer_lag_ms")
    }
    assert lags["node2"] == pytest.approx(5.0, abs=0.3)
    assert all(abs(lag) < 1 for node, lag in lags.items() if node != "node2")
    assert [p.attributes["approximate"] for p in judged.points("nccl.collective.peer_lag_ms")] == [
        False
    ] * 4
    page = judged.page("collectives", cluster_id="c", comm=COMM)
    assert page["ranks"][2]["peer_lag_ms"] == pytest.approx(5.0, abs=0.3)
    assert judged.page("collectives", cluster_id="c")["comms"] == [COMM]


def test_enqueue_times_are_marked_approximate_and_convict_nobody():
    judged = Judged()
    judged.push(job(slow=3, clock=ClockKind.ENQUEUE))
    judge_after(judged)
    assert judged.points("ingero_fleet_verdict") == []
    judged.push(job(n_ops=10, comm="00000000000000bb", clock=ClockKind.ENQUEUE))
    judged.round()
    points = judged.points("nccl.collective.peer_lag_ms")
    assert {point.attributes["approximate"] for point in points} == {True}


def test_worker_that_is_no_longer_slow_is_taken_back_once():
    judged = Judged()
    judged.push(job(slow=3))
    judge_after(judged)
    healthy = job(n_ops=3000, seed=2)
    for run in healthy:
        run.ops["seq"] += 200
        run.ops["entry_ns"] += 100 * NS_PER_S
    judged.push(healthy)
    judge_after(judged)
    values = [
        (point.attributes["verdict"], point.value)
        for point in judged.points("ingero_fleet_verdict")
        if point.attributes["node_id"] == "node3"
    ]
    assert ("culprit", 0.0) in values
    assert ("culprit", 1.0) not in values


def test_older_agents_gauges_give_approximate_lags():
    judged = Judged()
    for rank, duration in enumerate((10.0, 10.5, 2.0, 10.2)):
        judged.send(Signal.METRICS, gauge_push(f"n{rank}", duration, rank=rank))
    judged.round()
    lags = {p.attributes["node_id"]: p for p in judged.points("nccl.collective.peer_lag_ms")}
    assert lags["n2"].value == pytest.approx(8.2)
    assert lags["n0"].value == pytest.approx(0.2)
    assert lags["n2"].attributes["approximate"] is True
    assert lags["n2"].attributes["nccl.op_type"] == "allreduce"
    assert judged.host.read("ingero_fleet_nccl_event_points_total") == 4


def test_gauges_without_a_communicator_or_rank_are_tolerated_and_not_compared():
    judged = Judged()
    for node in ("a", "b"):
        judged.send(Signal.METRICS, gauge_push(node, 1.0, comm="0000000000000000"))
    judged.round()
    assert judged.points("nccl.collective.peer_lag_ms") == []
    assert judged.host.read("ingero_fleet_nccl_event_points_total") == 2


def test_1970_dated_points_leave_with_their_arrival_time_and_others_unchanged():
    judged = Judged()
    old = gauge_push("n", 1.0)
    judged.send(Signal.METRICS, old)
    new = gauge_push("n", 1.0, time_ns=1_795_230_273_280_661_023)
    judged.send(Signal.METRICS, new)
    first, second = judged.out[Signal.METRICS].batches
    wall_ns = judged.host.clock.wall_ns()
    assert [p.time_unix_nano for p in iter_points(first.export)] == [wall_ns, wall_ns]
    assert [p.time_unix_nano for p in iter_points(old)] == [5_000, 5_000]
    assert second.export is new


def test_old_gauges_are_not_compared_with_new_ones():
    judged = Judged(gauge_window="30s")
    judged.send(Signal.METRICS, gauge_push("a", 1.0, rank=0))
    judged.host.clock.advance(31 * NS_PER_S)
    judged.send(Signal.METRICS, gauge_push("b", 9.0, rank=1))
    judged.round()
    assert judged.points("nccl.collective.peer_lag_ms") == []


def test_gauges_of_communicators_over_the_cap_are_counted():
    judged = Judged(max_gauge_groups=1)
    for comm in ("00000000000000aa", "00000000000000bb"):
        judged.send(Signal.METRICS, gauge_push("n", 1.0, comm=comm))
    judged.round().round()
    assert judged.host.read("ingero_fleet_nccl_refused_total", reason="gauge_cap") == 1


HEALTHY = [f"node{rank}" for rank in range(8) if rank != 3]


def ends(judged):
    """Whose verdicts ended in the last round, and which."""
    rows = [row.attributes for row in judged.records()]
    return {
        row["ingero.node.id"]: row["ingero.verdict.before"]
        for row in rows
        if row["ingero.verdict.kind"] in {"unknown", "ordinary"}
    }


def push_next(judged, name, *, slow, first_seq=0):
    """A job of its own on the same nodes."""
    for run in job(slow=slow, seed=len(name), comm=f"{int(name, 36):016x}"):
        ops = run.ops.copy()
        ops["seq"] += first_seq
        judged.push([replace(run, ops=ops, rank=replace(run.rank, job=name))])


def test_verdicts_of_a_job_that_ended_end_while_other_jobs_run_and_its_cost_is_not_taken_back():
    judged = Judged(idle_timeout="1m", cost_interval="1s")
    push_next(judged, "a", slow=3)
    judge_after(judged)
    push_next(judged, "b", slow=None)
    judged.host.clock.advance(61 * NS_PER_S)
    push_next(judged, "b", slow=None, first_seq=200)
    judged.round()
    assert ends(judged) == {"node3": "culprit"} | dict.fromkeys(HEALTHY, "victim")
    charged = [row.attributes for row in judged.records("ingero.cost")]
    assert all(row["ingero.cost.gpu_seconds"] >= 0 for row in charged)
    judge_after(judged)
    assert ends(judged) == {}
    (page,) = judged.page("verdicts", cluster_id="c")["clusters"]
    assert {row["rank"]["job"] for row in page["verdicts"]} == {"b"}
    assert sum(row["wait_ns"] for row in page["verdicts"]) == page["total_wait_gpu_ns"]


def test_a_cluster_whose_workers_are_mostly_of_jobs_that_ended_has_room_for_new_ones():
    judged = Judged(idle_timeout="1m", max_workers=20)
    for name in ("a", "b", "c", "d", "e"):
        push_next(judged, name, slow=3)
        judge_after(judged)
        (page,) = judged.page("verdicts", cluster_id="c")["clusters"]
        named = {
            (row["rank"]["job"], row["rank"]["node_id"])
            for row in page["verdicts"]
            if row["verdict"] == "culprit"
        }
        assert named == {(name, "node3")}
        judged.host.clock.advance(61 * NS_PER_S)
    assert judged.host.read("ingero_fleet_nccl_evicted_total", what="workers") == 2
    assert judged.host.read("ingero_fleet_nccl_judge_lost_total", reason="refused_workers") == 0


def test_evidence_that_cannot_be_judged_ends_the_judging_of_its_cluster_alone(caplog):
    judged = Judged()
    engine, now_ns = judged.pipe._state.engine, judged.host.clock.mono_ns()
    broken = job(n_ranks=1, cluster="broken")[0]
    engine.add([replace(broken, ops=broken.ops[["seq", "own_ns"]])], now_ns)
    judged.push(job(slow=3))
    judge_after(judged)
    (page,) = judged.page("verdicts", cluster_id="c")["clusters"]
    assert [row["rank"]["node_id"] for row in page["verdicts"] if row["verdict"] == "culprit"] == [
        "node3"
    ]
    assert judged.host.read("ingero_fleet_nccl_evicted_total", what="evidence") == 1
    line = "cannot judge what cluster 'broken' reports"
    assert caplog.text.count(line) == 1
    engine.add([replace(broken, ops=broken.ops[["seq", "own_ns"]])], judged.host.clock.mono_ns())
    judged.round()
    assert judged.host.read("ingero_fleet_nccl_evicted_total", what="evidence") == 2
    assert caplog.text.count(line) == 1, "a sender that goes on does not fill the log"
    judged.push(job(slow=3, cluster="broken"))
    judge_after(judged)
    (page,) = judged.page("verdicts", cluster_id="broken")["clusters"]
    assert page["total"] == 8, "it is judged again from what came since"


def test_cluster_at_its_communicator_cap_starts_over_when_most_are_silent():
    judged = Judged(max_communicators=2, idle_timeout="1m")
    judged.push(job(n_ranks=1, comm="00000000000000aa"))
    judged.push(job(n_ranks=1, comm="00000000000000bb"))
    judged.round()
    judged.host.clock.advance(61 * NS_PER_S)
    judged.push(job(n_ranks=1, comm="00000000000000cc"))
    assert judged.page("collectives", cluster_id="c")["comms"] == ["00000000000000cc"]
    assert judged.host.read("ingero_fleet_nccl_evicted_total", what="communicators") == 2


def test_silent_cluster_is_forgotten_with_its_series():
    judged = Judged(idle_timeout="1m")
    judged.push(job(slow=3))
    judge_after(judged)
    judged.host.clock.advance(61 * NS_PER_S)
    judged.round()
    assert ends(judged) == {"node3": "culprit"} | dict.fromkeys(HEALTHY, "victim")
    judged.round()
    assert judged.page("verdicts") == {"clusters": []}
    assert judged.host.read("ingero_fleet_nccl_workers", cluster_id="c", verdict="culprit") is None
    assert judged.host.read("ingero_fleet_nccl_evicted_total", what="cluster") == 1


def test_operations_that_come_twice_are_counted_once_and_the_repeats_as_lost():
    judged = Judged()
    judged.push(job(slow=3))
    judge_after(judged)
    judged.push(job(slow=3))
    judge_after(judged)
    lost = judged.host.read("ingero_fleet_nccl_judge_lost_total", reason="stale_ops")
    assert lost == 8 * 200
    judged.round()
    assert judged.host.read("ingero_fleet_nccl_judge_lost_total", reason="stale_ops") == lost


def test_worker_over_the_judges_cap_is_counted():
    judged = Judged(max_workers=4)
    judged.push(job())
    judge_after(judged)
    assert judged.host.read("ingero_fleet_nccl_judge_lost_total", reason="refused_workers") == 4


def test_verdict_page_puts_the_strongest_evidence_first():
    judged = Judged()
    judged.push(job(slow=3))
    judge_after(judged)
    (cluster,) = judged.page("verdicts", cluster_id="c", limit="1")["clusters"]
    assert cluster["total"] == 8
    assert cluster["verdicts"][0]["verdict"] == "culprit"
    assert cluster["verdicts"][0]["rank"]["node_id"] == "node3"
    with pytest.raises(KeyError):
        judged.page("verdicts", cluster_id="nobody")
    with pytest.raises(BadDataError):
        judged.page("verdicts", limit="x")
    with pytest.raises(BadDataError):
        judged.page("collectives")


def test_unreadable_batch_is_counted_and_told_and_the_others_taken():
    judged = Judged()
    export = build_collectives(job(n_ranks=2), 1)
    export.tree.resource_logs[0].scope_logs[0].log_records[0].body.bytes_value = b"garbage"
    batch = judged.send(Signal.LOGS, export)
    assert batch.push.n_rejected == 1
    assert judged.host.read("ingero_fleet_nccl_refused_total", reason="bad_record") == 1
    assert judged.host.read("ingero_fleet_nccl_ops_total") == 200


def test_who_waits_for_a_rank_that_became_slow_late_in_a_long_job_is_its_victim():
    judged, at_ns = Judged(), 0
    for part in range(16):  # two days of operations of 100 s, and one slow hour
        runs = job(seed=part, slow=3 if part == 15 else None, n_ops=36 if part == 15 else 120)
        for run in runs:
            for name in ("own_ns", "inside_ns", "entry_ns"):
                run.ops[name] *= 10_000
            run.ops["seq"] += 120 * part
            run.ops["entry_ns"] += at_ns
        at_ns = int(runs[0].ops["entry_ns"][-1] + runs[0].ops["inside_ns"][-1])
        judged.push(runs)
        judge_after(judged)
    (page,) = judged.page("verdicts")["clusters"]
    found = {one["rank"]["rank"]: one for one in page["verdicts"]}
    culprit = found.pop(3)
    assert (culprit["verdict"], len(culprit["victims"])) == ("culprit", 7)
    assert {one["verdict"] for one in found.values()} == {"victim"}
    assert {one.attributes["verdict"] for one in judged.points("ingero_fleet_verdict")} == {
        "culprit", "victim",
    }  # fmt: skip


@given(
    st.integers(2, 9).flatmap(
        lambda m: st.lists(
            st.lists(st.integers(0, 50), min_size=m, max_size=m), min_size=1, max_size=6
        )
    )
)
def test_lag_agrees_with_its_definition(columns):
    inside = np.array(columns, np.float64).T
    lags = lags_of(inside)
    for op in range(inside.shape[1]):
        arrival = inside[:, op].max() - inside[:, op]
        for rank in range(inside.shape[0]):
            others = np.delete(arrival, rank)
            assert lags[rank, op] == pytest.approx(arrival[rank] - np.median(others))


def test_ranks_that_report_different_operations_are_compared_where_they_overlap():
    tracker = LagTracker()
    first, second = job(n_ranks=2, n_ops=100, slow=1)
    tracker.add([CollectiveRun(first.rank, COMM, 0, 2, first.clock, first.ops[:60])])
    assert tracker.lags(COMM) == []
    tracker.add([CollectiveRun(second.rank, COMM, 1, 2, second.clock, second.ops[40:])])
    lags = tracker.lags(COMM)
    assert [lag.n_ops for lag in lags] == [20, 20]
    assert lags[1].lag_ms == pytest.approx(5.0, abs=0.3)
