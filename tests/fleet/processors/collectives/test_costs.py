"""What waiting costs, as records: they add up to what the Judge charges, and money appears where a price is known."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fleet.processors.collectives.judged import Judged, job, judge_after

from ingero.config import parse_model
from ingero.errors import ConfigError, RetryableError
from ingero.fleet.component import ComponentId, Hardware
from ingero.fleet.consumer import Batch
from ingero.fleet.processors.collectives.conclusions import Conclusion
from ingero.fleet.processors.collectives.config import NcclConfig
from ingero.fleet.processors.collectives.costs import MAX_VICTIMS, CostDeltas
from ingero.fleet.processors.collectives.rates import Rates, RatesConfig
from ingero.fleet.processors.peer_threshold.config import IngeroConfig
from ingero.fleet.processors.peer_threshold.processor import FACTORY as INGERO
from ingero.model.collectives import Rank
from ingero.model.verdicts import Judgement, Verdict, VerdictKind
from ingero.otlp.codec import build_gauge, build_metrics, build_number
from ingero.otlp.names import Signal
from ingero.testing.host import KeptBatches
from ingero.units import NS_PER_MS, NS_PER_S

H100 = "NVIDIA H100 80GB HBM3"


def costs(judged):
    return judged.records("ingero.cost")


def seconds(rows, attributed):
    kind = "ingero.cost.attributed"
    return sum(
        row.attributes["ingero.cost.gpu_seconds"]
        for row in rows
        if row.attributes[kind] == attributed
    )


def next_bill(judged):
    judged.host.clock.advance(10 * NS_PER_S)
    return costs(judged.round())


def test_reports_add_up_to_what_the_judge_charges_and_what_it_cannot():
    judged = Judged(cost_interval="10s")
    told = []
    for part in range(3):
        runs = job(slow=3, n_ops=200)
        for run in runs:
            run.ops["seq"] += 200 * part
            run.ops["entry_ns"] += part * 10_000 * NS_PER_S
        judged.push(runs)
        judge_after(judged)
        told += costs(judged) + next_bill(judged)
    judgement = judged.pipe._state.engine.conclusions()["c"].history
    assert judgement.charged_gpu_ns > NS_PER_S
    assert seconds(told, "charged") == pytest.approx(judgement.charged_gpu_ns / NS_PER_S, abs=0.02)
    rest = judgement.unattributed_gpu_ns / NS_PER_S
    assert seconds(told, "unattributed") == pytest.approx(rest, abs=0.02)
    charged = [row for row in told if row.attributes["ingero.cost.attributed"] == "charged"]
    assert {row.attributes["ingero.node.id"] for row in charged} == {"node3"}
    assert {row.attributes["ingero.rank"] for row in charged} == {3}
    victims = {row.attributes["ingero.cost.victim_node_id"] for row in charged}
    assert victims == {f"node{n}" for n in range(8) if n != 3}
    assert not any("ingero.cost.amount" in row.attributes for row in told)
    assert next_bill(judged) == []


def tell_hardware(judged, node, provider, model):
    """A node's health push, read by the real processor that hears them."""
    export = build_metrics(
        {"ingero.node.id": node, "ingero.cluster.id": "c", "ingero.provider": provider},
        [
            build_gauge("ingero.node.health_score", [build_number(0.9, 1)]),
            build_gauge("ingero.node.info", [build_number(1, 1, {"ingero.gpu_model": model})]),
        ],
        "ingero.health",
    )
    judged.peer_threshold.consume(Batch(Signal.METRICS, export, judged.host.clock.wall_ns()))


def test_a_second_alarm_of_a_rank_takes_nothing_of_the_first_ones_cost_back():
    judged, told = Judged(cost_interval="10s"), []
    for part, slow in enumerate((3, None, None, None, 3, None, None, None)):
        runs = job(slow=slow, n_ops=100 if part == 4 else 200, seed=part)
        for run in runs:
            run.ops["seq"] += 200 * part
            run.ops["entry_ns"] += part * 10_000 * NS_PER_S
        judged.push(runs)
        judge_after(judged)
        told.append(seconds(costs(judged) + next_bill(judged), "charged"))
    assert min(told) >= -0.1
    assert told[4] == pytest.approx(told[0] / 2, rel=0.1)


def test_a_rank_that_alarms_again_and_again_is_charged_with_all_of_it():
    """More episodes than are remembered one by one."""
    judged, told = Judged(cost_interval="10s"), []
    for part in range(24):
        runs = job(slow=3 if part % 2 == 0 else None, n_ops=100, seed=part)
        for run in runs:
            run.ops["seq"] += 100 * part
            run.ops["entry_ns"] += part * 10_000 * NS_PER_S
        judged.push(runs)
        judge_after(judged)
        told.append(seconds(costs(judged) + next_bill(judged), "charged"))
    assert min(told) >= -0.1
    assert sum(told) == pytest.approx(12 * told[0], rel=0.1)


def test_money_is_the_price_of_the_gpus_that_waited_and_absent_without_a_price():
    judged = Judged(
        rates={"currency": "EUR", "providers": {"ec2": {H100: 12.0}, "gcp": {"l4": 1.0}}}
    )
    judged.peer_threshold = INGERO.create(
        ComponentId("ingero"), parse_model(IngeroConfig, {}), Signal.METRICS, KeptBatches()
    )
    asyncio.run(judged.peer_threshold.start(judged.host))
    tell_hardware(judged, "node0", "aws", H100)
    tell_hardware(judged, "node1", "gcp", "NVIDIA L4")
    tell_hardware(judged, "node2", "azure", H100)
    judged.push(job(slow=3))
    judge_after(judged)
    by_victim = {
        row.attributes["ingero.cost.victim_node_id"]: row.attributes
        for row in next_bill(judged)
        if row.attributes["ingero.cost.attributed"] == "charged"
    }
    for victim, rate in (("node0", 12.0), ("node1", 1.0)):
        bill = by_victim[victim]
        expected = bill["ingero.cost.gpu_seconds"] / 3600 * rate
        assert bill["ingero.cost.amount"] == pytest.approx(expected)
        assert bill["ingero.cost.currency"] == "EUR"
    assert by_victim["node0"]["ingero.gpu_model"] == H100
    for victim in ("node2", "node4"):
        assert "ingero.cost.amount" not in by_victim[victim]
        assert "ingero.cost.currency" not in by_victim[victim]
    assert by_victim["node2"]["ingero.provider"] == "azure"
    assert "ingero.provider" not in by_victim["node4"]


def test_what_the_pipeline_refuses_is_counted_and_told_with_the_next_report():
    judged = Judged()
    kept = judged.pipe._state.downstream._following[Signal.LOGS]

    class Refusing:
        def consume(self, batch):
            raise RetryableError("full")

    judged.pipe._state.downstream._following[Signal.LOGS] = Refusing()
    judged.push(job(slow=3))
    judge_after(judged)
    assert next_bill(judged) == []
    assert judged.host.read("ingero_fleet_nccl_reports_lost_total") >= 1
    judged.pipe._state.downstream._following[Signal.LOGS] = kept
    lost = judged.pipe._state.engine.conclusions()["c"].history.charged_gpu_ns / NS_PER_S
    assert seconds(next_bill(judged), "charged") == pytest.approx(lost, abs=0.02)


def test_the_last_report_is_sent_at_the_end():
    judged = Judged(cost_interval="1h")
    judged.push(job(slow=3))
    judge_after(judged)
    assert costs(judged) == []
    asyncio.run(judged.pipes[Signal.LOGS].stop())
    assert seconds(costs(judged), "charged") > 1


def test_what_a_cluster_that_starts_over_forgets_is_not_taken_back():
    judged = Judged()
    judged.push(job(slow=3))
    judge_after(judged)
    assert seconds(next_bill(judged), "charged") > 1
    judged.pipe._state.engine._detections["c"].judge = None  # as at its cap of communicators
    judged.push(job(slow=None, comm="00000000000000bb"))
    judge_after(judged)
    later = costs(judged) + next_bill(judged)
    assert seconds(later, "charged") == 0
    assert seconds(later, "unattributed") >= 0


def conclude(generation, waits):
    """A conclusion in which victim v waited ``waits[v] = (for node A, for node B, for nobody)`` milliseconds."""
    a, b = Rank("c", "A", 0), Rank("c", "B", 1)
    verdicts = tuple(
        Verdict(
            Rank("c", f"v{n}", 2 + n, 2),
            VerdictKind.VICTIM,
            wait_ns=sum(wait) * NS_PER_MS,
            charged_to={a: wait[0] * NS_PER_MS, b: wait[1] * NS_PER_MS},
        )
        for n, wait in enumerate(waits)
    )
    judgement = Judgement("c", verdicts)
    return Conclusion(judgement, judgement, (), (), 0, 1e-6, generation)


def hardware_of(cluster_id, node_id):
    return Hardware("aws" if len(node_id) == 2 else "gcp", "")


amounts = st.lists(st.tuples(*[st.integers(0, 5000)] * 3), max_size=6)
steps = st.lists(st.tuples(st.booleans(), st.booleans(), amounts), min_size=1, max_size=8)


@given(steps)
def test_whatever_the_judge_says_the_sums_follow_it(steps):
    bill, sums, base, generation = CostDeltas(), Counter(), Counter(), 1
    for is_anew, is_taken, waits in steps:
        if is_anew:
            generation, base = generation + 1, sums.copy()
        conclusion = conclude(generation, waits)
        charges, settled = bill.find_deltas(conclusion, hardware_of)
        if not is_taken:
            continue  # told in vain: the next report has it
        bill.settle(conclusion, settled)
        again, settled = bill.find_deltas(conclusion, hardware_of)
        assert again == []
        bill.settle(conclusion, settled)
        for charge in charges:
            sums[charge.parties.node_id] += charge.gpu_ns
        for at, node_id in enumerate(("A", "B", "")):
            now = 2 * NS_PER_MS * sum(wait[at] for wait in waits)
            assert sums[node_id] - base[node_id] == now


def test_many_victims_share_a_record_per_hardware_and_nothing_is_lost():
    waits = [(1000 + n, 0, 0) for n in range(3 * MAX_VICTIMS)]
    charges, _ = CostDeltas().find_deltas(conclude(1, waits), hardware_of)
    named = [charge for charge in charges if charge.parties.victim]
    shared = [charge for charge in charges if not charge.parties.victim]
    assert len(named) == MAX_VICTIMS
    assert min(charge.gpu_ns for charge in named) == 2 * (1000 + 2 * MAX_VICTIMS) * NS_PER_MS
    assert {charge.parties.hardware.provider for charge in shared} == {"aws", "gcp"}
    assert sum(charge.gpu_ns for charge in charges) == 2 * NS_PER_MS * sum(w[0] for w in waits)


TABLE = {
    "aws": {H100: 12.29, "NVIDIA A100-SXM4-80GB": 4.10, "NVIDIA A100-SXM4-40GB": 3.27},
    "gcp": {"h100-80gb": 11.06, "NVIDIA L4 24GB": 0.85},
    "two": {"h100": 1.0, "80gb": 2.0},
}


@pytest.mark.parametrize(
    ("provider", "model", "rate"),
    [
        ("aws", H100, 12.29),
        ("EC2", H100.lower(), 12.29),
        ("gcp", H100, 11.06),
        ("gcp", "NVIDIA L4", 0.85),
        ("gcp", "NVIDIA L40S", None),
        ("aws", "NVIDIA A100-SXM4-80GB", 4.10),
        ("aws", "NVIDIA A100", None),  # two entries have these words
        ("two", H100, None),  # two entries are within
        ("nowhere", H100, None),
        ("aws", "", None),
        ("", H100, None),
    ],
)
def test_a_price_is_found_by_name_or_not_at_all(provider, model, rate):
    assert Rates(parse_model(RatesConfig, {"providers": TABLE})).find_rate(provider, model) == rate
    with_fallback = parse_model(RatesConfig, {"providers": TABLE, "fallback_rate": 9.0})
    assert Rates(with_fallback).find_rate(provider, model) == (9.0 if rate is None else rate)


@pytest.mark.parametrize("rates", [{"fallback_rate": 0}, {"providers": {"aws": {"l4": -1}}}])
def test_a_price_of_nothing_is_refused(rates):
    with pytest.raises(ConfigError):
        parse_model(NcclConfig, {"rates": rates})
