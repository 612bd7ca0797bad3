"""Pushes that wait for the next scrape: one replaces another only when it shows the same series."""

import math

import pytest
from tests.fleet.exporters.scraped import NODE, WALL, Scraped, gauge_export, sample, series

from ingero.fleet.exporters.prometheus.exporter import says_all
from ingero.otlp.codec import (
    build_gauge,
    build_metrics,
    build_number,
    decode_export,
    decode_protobuf,
    encode_json,
    encode_protobuf,
    structs,
)
from ingero.otlp.names import Signal
from ingero.wire.push import build_export


def test_repeated_pushes_of_one_agent_wait_as_one_and_show_the_last():
    scraped = Scraped()
    first, last = _health(0.27), _health(0.94)

    def push_many():
        for export in [first, *[last] * 50]:
            scraped.push(export, node_id="n1", cluster_id="prod a")
        scraped.push(sample("straggler_event_1.json"), node_id="n1", cluster_id="prod a")
        assert len(scraped.exporter._pending) == 2

    found = series(scraped.scrape(push_many))
    scores = [
        value for (name, _), value in found.items() if name == "ingero_node_health_score_ratio"
    ]
    assert scores == [0.94]
    assert "ingero_node_straggler_event_ratio" in {name for name, _ in found}


def test_too_many_waiting_exports_are_walked_in_the_push():
    scraped = Scraped()

    def push_many():
        for index in range(3000):
            scraped.push(gauge_export(value=float(index), x=str(index)))
        assert len(scraped.exporter._pending) <= 256

    assert len(series(scraped.scrape(push_many))) == 3000


def as_protobuf(export):
    return decode_protobuf(encode_protobuf(export), Signal.METRICS)


ENCODINGS = pytest.mark.parametrize("encode", [lambda export: export, as_protobuf])


def health_push(*metrics):
    first = build_gauge("ingero.node.health_score", [build_number(0.9, WALL)])
    return build_metrics(NODE, [first, *metrics], "s")


def delta_sum(value):
    points = [build_number(value, WALL)]
    return structs.Metric(name="d", sum=structs.Sum(points, aggregation_temporality=1))


def push_twice(older, newer, encode):
    scraped = Scraped()
    return scraped.scrape(
        lambda: scraped.push(encode(older), "n1", "c1"),
        lambda: scraped.push(encode(newer), "n1", "c1"),
    )


@pytest.mark.parametrize(
    "encode", [lambda one: one, lambda one: decode_protobuf(encode_protobuf(one), Signal.METRICS)]
)
def test_a_later_push_that_lacks_a_metric_does_not_hide_the_earlier_one(encode):
    earlier = health_push(build_gauge("gone", [build_number(1.0, WALL)]))
    later = health_push(build_gauge("new", [build_number(2.0, WALL)]))
    text = push_twice(earlier, later, encode)
    assert {"gone_ratio", "new_ratio"} <= {line.partition("{")[0] for line in text.splitlines()}


@pytest.mark.parametrize(
    "encode", [lambda one: one, lambda one: decode_protobuf(encode_protobuf(one), Signal.METRICS)]
)
def test_deltas_of_pushes_that_wait_together_add_up(encode):
    text = push_twice(health_push(delta_sum(2.0)), health_push(delta_sum(3.0)), encode)
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("d{")] == ["5.0"]


def push_deltas(encode, *points):
    """The page after deltas of one sum."""
    scraped = Scraped()

    def push():
        for point in points:
            data = structs.Sum([point], aggregation_temporality=1, is_monotonic=True)
            scraped.push(encode(health_push(structs.Metric(name="d", sum=data))))

    text = scraped.scrape(push)
    shown = [line.split()[-1] for line in text.splitlines() if line.startswith("d_total{")]
    name = "ingero_fleet_prometheus_unsupported_points_total"
    return shown, scraped.host.read(name, exporter="prometheus")


ENDED = structs.NumberDataPoint(time_unix_nano=WALL, flags=1)


@ENCODINGS
def test_a_sum_of_deltas_that_ended_begins_again_at_its_next_point(encode):
    five, seven = build_number(5, WALL), build_number(7, WALL)
    assert push_deltas(encode, five, ENDED) == ([], 0)
    assert push_deltas(encode, five, ENDED, seven, seven) == (["14.0"], 0)


@ENCODINGS
@pytest.mark.parametrize("given", [{}, {"as_double": math.nan}, {"as_double": math.inf}])
def test_a_delta_that_is_no_number_is_counted_and_leaves_the_sum(encode, given):
    bad = structs.NumberDataPoint(time_unix_nano=WALL, **given)
    five = build_number(5, WALL)
    assert push_deltas(encode, five, bad, five) == (["10.0"], 1)


@ENCODINGS
def test_a_histogram_of_deltas_that_ended_begins_again_at_its_next_point(encode):
    def build(flags, **given):
        point = structs.HistogramDataPoint(
            time_unix_nano=WALL, explicit_bounds=[1.0], flags=flags, **given
        )
        data = structs.Histogram([point], aggregation_temporality=1)
        return encode(health_push(structs.Metric(name="h", histogram=data)))

    some = build(0, count=3, sum=2.5, bucket_counts=[2, 1])
    ended = build(1, count=0, bucket_counts=[0, 0])
    scraped = Scraped()
    text = scraped.scrape(lambda: [scraped.push(one) for one in (some, ended, some, some)])
    shown = [line.split()[-1] for line in text.splitlines() if line.startswith("h_")]
    assert shown == ["4.0", "6.0", "5.0", "6.0"]


def _health(score, as_json=False, **resource):
    export = build_metrics(
        NODE | resource,
        [build_gauge("ingero.node.health_score", [build_number(score, WALL, {"state": "active"})])],
        "ingero",
    )
    body = encode_json(export) if as_json else encode_protobuf(export)
    kind = "application/json" if as_json else "application/x-protobuf"
    return decode_export(body, Signal.METRICS, kind)


@pytest.mark.parametrize("as_json", [False, True])
def test_two_cohorts_of_one_node_are_both_shown_however_often_they_push(as_json):
    page = Scraped()
    steps = []
    for round_ in range(5):
        for cohort, score in (("aaaa", 0.9), ("bbbb", 0.8)):
            export = _health(score + round_ / 100, as_json, **{"ingero.cgroup_path_hash": cohort})
            steps.append(lambda export=export: page.push(export, "n1", "c1"))
    text = page.scrape(*steps)
    found = {
        dict(labels)["ingero_cgroup_path_hash"]: value
        for (name, labels), value in series(text).items()
        if name.startswith("ingero_node_health_score")
    }
    assert found == {"aaaa": pytest.approx(0.94), "bbbb": pytest.approx(0.84)}


@pytest.mark.parametrize("as_json", [False, True])
def test_push_that_waits_is_replaced_by_one_with_the_same_series(as_json):
    assert says_all(_health(0.8, as_json), _health(0.9, as_json))
    assert not says_all(_health(0.8, as_json, **{"ingero.node.rank": 1}), _health(0.9, as_json))


def score_push(value, *more):
    gauge = build_gauge("ingero.node.health_score", [build_number(value, WALL)])
    return build_metrics(NODE, [gauge, *more], "s")


def read_scores(text):
    return [value for (name, _), value in series(text).items() if "health_score" in name]


@ENCODINGS
def test_a_push_that_repeats_is_stored_at_once(encode):
    scraped = Scraped()

    def push_and_drain(value):
        scraped.push(encode(score_push(value)), "n1", "c1")
        scraped.exporter._drain_slice()

    def push_again():
        for value in (0.3, 0.4):
            scraped.push(encode(score_push(value)), "n1", "c1")
            assert not scraped.exporter._pending

    text = scraped.scrape(lambda: push_and_drain(0.1), lambda: push_and_drain(0.2), push_again)
    assert read_scores(text) == [0.4]


@ENCODINGS
def test_a_push_that_repeats_does_not_overtake_one_that_waits(encode):
    scraped = Scraped()

    def push(export):
        scraped.push(encode(export), "n1", "c1")

    def learn():
        for value in (0.1, 0.2, 0.3):
            push(score_push(value))
            scraped.exporter._drain_slice()

    def push_other_and_repeat():
        push(score_push(0.5, build_gauge("another", [build_number(1.0, WALL)])))
        assert len(scraped.exporter._pending) == 1
        push(score_push(0.9))

    assert read_scores(scraped.scrape(learn, push_other_and_repeat)) == [0.9]


@ENCODINGS
def test_a_push_of_many_nodes_that_repeats_waits_for_slices_of_time(encode):
    scraped = Scraped()

    def push(value, n_nodes):
        entries = [
            build_metrics(
                NODE | {"ingero.node.id": f"n{number}"},
                [build_gauge("a", [build_number(value, WALL)])],
                "s",
            ).tree.resource_metrics[0]
            for number in range(n_nodes)
        ]
        scraped.push(encode(build_export(Signal.METRICS, entries)))
        n_waiting = len(scraped.exporter._pending)
        scraped.exporter._drain_slice()
        return n_waiting

    def push_all():
        assert [push(value, 16) for value in (0.1, 0.2, 0.3)] == [1, 1, 0]
        assert [push(value, 17) for value in (0.4, 0.5, 0.6)] == [1, 1, 1]

    assert set(series(scraped.scrape(push_all)).values()) == {0.6}


def test_pushes_that_were_walked_in_the_push_are_soon_stored_at_once_again():
    scraped = Scraped()

    def push_many():
        for index in range(257):
            scraped.push(gauge_export(value=float(index), x=str(index)))
        n_waiting = [len(scraped.exporter._pending)]
        for index in range(1000):
            scraped.push(gauge_export(value=float(index)))
            n_waiting.append(len(scraped.exporter._pending))
        assert n_waiting[0] > 200
        assert n_waiting[300:] == [0] * len(n_waiting[300:])

    scraped.scrape(push_many)


def test_a_push_that_another_exporter_has_converted_is_shown():
    scraped = Scraped()

    def push(value):
        export = score_push(value)
        scraped.push(export, "n1", "c1")
        assert encode_protobuf(
            export
        )  # as an exporter over OTLP does, before this one has looked at it

    assert read_scores(
        scraped.scrape(*(lambda value=value: push(value) for value in (0.1, 0.2)))
    ) == [0.2]
