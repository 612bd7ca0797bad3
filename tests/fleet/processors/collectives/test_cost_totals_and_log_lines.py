"""What waiting cost as metrics, prices that change, and what the log says of verdicts, hangs and caps."""

import asyncio
from dataclasses import replace

import pytest
from tests.fleet.processors.collectives.judged import Judged, gauge_push, job, judge_after
from tests.fleet.processors.collectives.test_costs import (
    H100,
    costs,
    next_bill,
    seconds,
    tell_hardware,
)
from tests.fleet.processors.collectives.test_hangs import hung, told

from ingero.config import parse_model
from ingero.fleet.component import ComponentId, Hardware
from ingero.fleet.processors.collectives.config import NcclConfig
from ingero.fleet.processors.collectives.cost_totals import MAX_PARTIES, CostTotals
from ingero.fleet.processors.collectives.costs import CostDelta, CostParties
from ingero.fleet.processors.collectives.processor import FACTORY
from ingero.fleet.processors.collectives.rates import Rates, RatesConfig
from ingero.fleet.processors.peer_threshold.config import IngeroConfig
from ingero.fleet.processors.peer_threshold.processor import FACTORY as INGERO
from ingero.otlp.codec import Export, build_gauge, build_number, iter_points, structs
from ingero.otlp.names import Signal
from ingero.testing.host import KeptBatches, ManualHost
from ingero.units import NS_PER_S

PRICED = {"currency": "USD", "providers": {"aws": {H100: 12.0}}}


def with_hardware(judged):
    judged.peer_threshold = INGERO.create(
        ComponentId("ingero"), parse_model(IngeroConfig, {}), Signal.METRICS, KeptBatches()
    )
    asyncio.run(judged.peer_threshold.start(judged.host))
    for node in range(8):
        tell_hardware(judged, f"node{node}", "aws", H100)


def total(judged, name, **labels):
    return sum(
        point.value for point in judged.points(name) if labels.items() <= point.attributes.items()
    )


def test_sums_agree_with_the_records_and_are_cumulative():
    judged = Judged(rates=PRICED)
    with_hardware(judged)
    told_s = 0.0
    for part in range(2):
        runs = job(slow=3)
        for run in runs:
            run.ops["seq"] += 200 * part
            run.ops["entry_ns"] += part * 10_000 * NS_PER_S
        judged.push(runs)
        judge_after(judged)
        told_s += seconds(costs(judged), "charged") + seconds(next_bill(judged), "charged")
        charged = {"attributed": "charged", "node_id": "node3", "rank": "3"}
        name = "ingero_fleet_waiting_gpu_seconds_total"
        assert total(judged, name, **charged) == pytest.approx(told_s)
    assert told_s > 1
    labels = {"provider": "aws", "gpu_model": H100, "currency": "USD", **charged}
    money = total(judged, "ingero_fleet_waiting_cost_total", **labels)
    assert money == pytest.approx(told_s / 3600 * 12.0)
    (point,) = [p for p in judged.points(name) if p.attributes["attributed"] == "charged"]
    assert point.is_monotonic
    assert point.attributes["cluster_id"] == "c"


def test_a_finding_costs_what_it_cost_and_not_what_its_rank_number_ever_has():
    judged = Judged(rates=PRICED)
    with_hardware(judged)
    judged.push(job(slow=3))
    judge_after(judged)
    next_bill(judged)
    later = job(slow=3, n_ops=400, comm="00000000000000bb")
    judged.push([replace(run, rank=replace(run.rank, job="next")) for run in later])
    judge_after(judged)
    next_bill(judged)
    found = judged.page("findings", cluster_id="c")["findings"]
    assert len(found) == len({one["lost_gpu_s"] for one in found}) == 2
    for one in found:
        assert one["amount"] == pytest.approx(one["lost_gpu_s"] / 3600 * 12.0, rel=1e-6)
    assert {one["currency"] for one in found} == {"USD"}


def test_a_finding_without_a_price_has_no_amount():
    judged = Judged()
    judged.push(job(slow=3))
    judge_after(judged)
    (found,) = judged.page("findings", cluster_id="c")["findings"]
    assert (found["amount"], found["currency"]) == (None, None)


def test_what_is_taken_back_is_counted_apart_and_nothing_falls():
    totals = CostTotals("c", 1)
    rates = Rates(parse_model(RatesConfig, {"fallback_rate": 3600.0}))
    account = CostParties("node3", 3, "", Hardware("aws", H100))
    for gpu_s in (10, -4, 1):
        totals.add([CostDelta(account, gpu_s * NS_PER_S)], rates)
    found = {point.name: point.value for point in iter_points(totals.build(2))}
    assert found == {
        "ingero_fleet_waiting_gpu_seconds_total": 11.0,
        "ingero_fleet_waiting_gpu_seconds_taken_back_total": 4.0,
        "ingero_fleet_waiting_cost_total": pytest.approx(11.0),
        "ingero_fleet_waiting_cost_taken_back_total": pytest.approx(4.0),
    }


def test_accounts_are_bounded_and_their_sum_is_whole():
    totals = CostTotals("c", 1)
    rates = Rates(parse_model(RatesConfig, {}))
    charges = [
        CostDelta(CostParties(f"n{index}", index, "", Hardware("", "")), NS_PER_S)
        for index in range(MAX_PARTIES + 50)
    ]
    totals.add(charges, rates)
    points = [p for p in iter_points(totals.build(2)) if p.name.endswith("gpu_seconds_total")]
    assert len(points) == MAX_PARTIES + 1
    assert sum(point.value for point in points) == MAX_PARTIES + 50


def test_verdicts_lags_and_lost_time_say_the_hardware():
    judged = Judged()
    with_hardware(judged)
    judged.push(job(slow=3))
    judge_after(judged)
    for name in ("ingero_fleet_verdict", "ingero_fleet_lost_gpu_seconds"):
        (point,) = [p for p in judged.points(name) if p.attributes["node_id"] == "node3"]
        assert (point.attributes["provider"], point.attributes["gpu_model"]) == ("aws", H100)
    judged.push(job(n_ops=10, comm="00000000000000bb"))
    judged.round()
    lags = judged.points("nccl.collective.peer_lag_ms")
    assert {point.attributes["provider"] for point in lags} == {"aws"}
    for rank, duration in enumerate((10.0, 10.5, 2.0)):
        judged.send(Signal.METRICS, gauge_push(f"node{rank}", duration, rank=rank))
    judged.round()
    lags = judged.points("nccl.collective.peer_lag_ms")
    assert {point.attributes["gpu_model"] for point in lags} == {H100}


def reload(judged, **config):
    """The same processor under a new host, as after SIGHUP."""
    host = ManualHost()
    shared = judged.pipe._state
    settings = parse_model(NcclConfig, config)
    host.clock = judged.host.clock
    if shared.accepts(settings):
        host._shared = judged.host._shared
    pipe = FACTORY.create(ComponentId("nccl"), settings, Signal.LOGS, judged.out[Signal.LOGS])
    asyncio.run(pipe.start(host))
    return pipe


def test_a_changed_price_keeps_the_verdicts_and_counts_from_then_on():
    judged = Judged(rates=PRICED)
    judged.push(job(slow=3))
    judge_after(judged)
    pipe = reload(judged, rates={"fallback_rate": 7.0})
    assert [
        v.rank.node_id
        for v in pipe._state.engine.conclusions()["c"].judgement.verdicts
        if v.is_alarm
    ] == ["node3"]
    assert pipe._evaluation._reports._rates.find_rate("any", "thing") == 7.0
    assert reload(judged, alarm_slowdown=0.5)._state.engine.conclusions() == {}


def test_a_reload_tells_no_hang_twice():
    judged = hung()
    assert told(judged)
    pipe = reload(judged)
    judged.out[Signal.LOGS].batches.clear()
    pipe._evaluation.run()
    assert judged.records("ingero.hang") == []


def lines(caplog):
    return [(record.getMessage(), record.fields) for record in caplog.records]


def test_a_verdict_is_a_line_when_it_begins_and_one_when_it_ends(caplog):
    caplog.set_level("INFO", "ingero.fleet.processors.nccl")
    judged = Judged()
    judged.push(job(slow=3))
    judge_after(judged)
    judged.round().round()
    assert {text for text, _ in lines(caplog)} == {"verdict began"}
    (fields,) = [fields for _, fields in lines(caplog) if fields["verdict"] != "victim"]
    assert len(lines(caplog)) == 8, "the victims once each"
    assert (fields["cluster"], fields["node"], fields["rank"]) == ("c", "node3", 3)
    assert (fields["verdict"], fields["victims"]) == ("culprit", 7)
    assert fields["slowdown"] == pytest.approx(1.5, abs=0.05)
    assert [r.fields["node"] for r in caplog.records if r.levelname == "WARNING"] == ["node3"]
    healthy = job(n_ops=3000, seed=2)
    for run in healthy:
        run.ops["seq"] += 200
        run.ops["entry_ns"] += 100 * NS_PER_S
    judged.push(healthy)
    judge_after(judged)
    ended = [fields for text, fields in lines(caplog) if text == "verdict ended"]
    assert ("node3", "culprit") in [(one["node"], one["before"]) for one in ended]


def test_a_hang_is_a_line_when_it_begins_and_one_when_it_ends(caplog):
    caplog.set_level("INFO", "ingero.fleet.processors.nccl")
    judged = hung()
    assert len(told(judged)) == 1
    told(judged)
    ((text, fields),) = lines(caplog)
    assert text == "hang began: a rank never arrived"
    assert (fields["cluster"], fields["rank"], fields["blocks"]) == ("c", 2, 3)
    judged.host.clock.advance(60 * NS_PER_S)
    told(judged)
    assert [text for text, _ in lines(caplog)][1:] == ["hang ended"]


def test_a_cap_is_a_line_when_it_begins_to_refuse_and_one_when_it_ends(caplog):
    caplog.set_level("INFO", "ingero.fleet.processors.nccl")
    judged = Judged(max_communicators=1)
    for index in range(20):
        judged.push(job(n_ranks=1, n_ops=5, comm=f"{index:016x}"))
        judged.round()
    caps = [(text, f["cap"], f["cluster"]) for text, f in lines(caplog) if "cap" in f]
    assert caps == [("cap reached: collective records are refused", "communicator_cap", "c")]
    judged.host.clock.advance(60 * NS_PER_S)
    judged.round()
    text, fields = lines(caplog)[-1]
    assert (text, fields["refused"]) == ("cap refuses nothing any more", 19)


def test_gauges_behind_a_health_score_in_one_scope_are_read():
    judged = Judged()
    for rank, duration in enumerate((10.0, 10.5, 2.0, 10.2)):
        gauges = gauge_push(f"n{rank}", duration, rank=rank).tree.resource_metrics[0]
        score = build_gauge("ingero.node.health_score", [build_number(0.9, 1)])
        gauges.scope_metrics[0].metrics.insert(0, score)
        export = Export.from_tree(Signal.METRICS, structs.MetricsRequest([gauges]))
        judged.send(Signal.METRICS, export)
    judged.round()
    lags = {p.attributes["node_id"]: p.value for p in judged.points("nccl.collective.peer_lag_ms")}
    assert lags["n2"] == pytest.approx(8.2)
