"""Collective records over the wire to a named culprit, on every door where an operator would look."""

import numpy as np
import pytest
from tests.e2e.agents import find_series, fleet_and_agents

from ingero.model.collectives import COLLECTIVE_OP, ClockKind, CollectiveOp, CollectiveRun, Rank
from ingero.otlp.codec import encode_protobuf
from ingero.testing.fleet import build_fleet_config
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_MS
from ingero.wire.collectives import build_collectives

pytestmark = pytest.mark.slow
PROTOBUF = {"content-type": "application/x-protobuf"}
N_RANKS = 8


def job(slow, n_ops=300):
    """Ranks of one data-parallel job; rank ``slow`` takes 1.4 times as long for its own work."""
    rng = np.random.default_rng(7)
    own = (10 * NS_PER_MS * (1 + 0.02 * rng.standard_normal((N_RANKS, n_ops)))).astype(np.int64)
    own[slow] = (own[slow] * 1.4).astype(np.int64)
    arrived = own.max(axis=0)
    leave = np.cumsum(arrived + NS_PER_MS)
    for rank in range(N_RANKS):
        ops = np.zeros(n_ops, COLLECTIVE_OP)
        ops["seq"], ops["own_ns"] = np.arange(n_ops), own[rank]
        ops["inside_ns"] = arrived - own[rank] + NS_PER_MS
        ops["entry_ns"] = leave - ops["inside_ns"] + 1
        ops["n_bytes"], ops["op"] = 1 << 24, CollectiveOp.ALL_REDUCE
        who = Rank("job", f"node{rank}", rank, 8)
        yield CollectiveRun(who, "00000000000000aa", rank, N_RANKS, ClockKind.DEVICE, ops)


def test_slow_rank_is_the_only_culprit_on_the_page_the_scrape_and_the_own_metrics():
    config = build_fleet_config(nccl={"judge_interval": "100ms", "reorder_window": "100ms"})
    with fleet_and_agents(config) as agents:
        # One push: ranks whose only pushes come further apart than the reorder window did not meet.
        runs = list(job(slow=5))
        body = encode_protobuf(build_collectives(runs, 1_795_230_273_280_661_023))
        assert agents.push_raw(body, PROTOBUF, path="/v1/logs").status_code == 200

        def find_culprits():
            clusters = agents.admin("verdicts")["clusters"]
            verdicts = [verdict for cluster in clusters for verdict in cluster["verdicts"]]
            return [one for one in verdicts if one["verdict"] == "culprit"]

        (culprit,) = wait_until(find_culprits)
        assert culprit["rank"]["node_id"] == "node5"
        assert culprit["slowdown"]["median"] == pytest.approx(1.4, abs=0.05)
        assert len(culprit["victims"]) == N_RANKS - 1
        assert culprit["lost_gpu_ns"] > 0

        def scraped():
            text = agents.metrics()
            return find_series(text, "ingero_fleet_verdict", node_id="node5", verdict="culprit")

        assert wait_until(scraped) == 1
        text = agents.metrics()
        assert find_series(text, "ingero_fleet_verdict", node_id="node4", verdict="culprit") is None
        lag = find_series(text, "nccl_collective_peer_lag_ms_milliseconds", node_id="node5")
        assert lag == pytest.approx(4.0, abs=0.5)
        wait_until(  # the gauge is set once the round that made the verdict has ended
            lambda: (
                agents.own("ingero_fleet_nccl_workers", cluster_id="job", verdict="culprit") == 1
            )
        )


def test_hostile_records_are_refused_and_told_and_the_rest_is_judged():
    config = build_fleet_config(nccl={"judge_interval": "100ms"})
    with fleet_and_agents(config) as agents:
        good, bad = list(job(slow=1))[:2]
        export = build_collectives([good, bad], 1)
        export.tree.resource_logs[1].scope_logs[0].log_records[0].body.bytes_value = (
            b"IGCB" + b"\xff" * 200
        )
        answer = agents.push_raw(encode_protobuf(export), PROTOBUF, path="/v1/logs")
        assert answer.status_code == 200
        assert agents.own("ingero_fleet_nccl_refused_total", reason="bad_record") == 1
        assert agents.own("ingero_fleet_nccl_ops_total") == 300
