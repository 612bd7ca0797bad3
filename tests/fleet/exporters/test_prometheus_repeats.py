"""Pushes that repeat are stored without being walked, and a scrape must not be able to tell."""

import math
import struct

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.fleet.exporters.scraped import NODE, WALL, sample
from tests.support.properties import draw_examples

from ingero.config import parse_model
from ingero.fleet.exporters.prometheus.config import PrometheusConfig
from ingero.fleet.exporters.prometheus.intake import SeriesIntake
from ingero.fleet.exporters.prometheus.repeats import Repetitions
from ingero.fleet.exporters.prometheus.series import SeriesStore
from ingero.otlp.codec import (
    Export,
    build_gauge,
    build_metrics,
    build_number,
    decode_protobuf,
    encode_protobuf,
    structs,
)
from ingero.otlp.names import Signal

WALL_NS = WALL + 5


def as_protobuf(export):
    return decode_protobuf(encode_protobuf(export), Signal.METRICS)


ENCODINGS = {"structs": lambda export: export, "messages": as_protobuf}
BOTH = pytest.mark.parametrize("encoding", ENCODINGS)


class _Walked(Repetitions):
    """Knows no push again."""

    def apply(self, push, now_ns, wall_ms):
        del push, now_ns, wall_ms
        return False


class Site:
    """Series and what puts them there."""

    def __init__(self, repetitions):
        config = parse_model(PrometheusConfig, {"endpoint": "127.0.0.1:0"})
        self.store = SeriesStore(1000)
        self.intake = SeriesIntake(self.store, config)
        self.repetitions = self.intake._repetitions = repetitions(self.store)
        self.now_ns = 0

    def push(self, export):
        self.now_ns += 1
        self.intake.apply(export, self.now_ns, WALL_NS)

    def read(self):
        """All that is kept of a series, by its name and labels."""
        return {
            (name, self.store.labels_of(key)): (
                repr(family.values[row]),
                family.times_ms[row],
                family.seen_ns[row],
                family.exemplars.get(key),
            )
            for name, family in self.store.families.items()
            for key, row in family.rows.items()
        }

    def count(self):
        store, intake = self.store, self.intake
        return store.n_series, store.n_conflicts, intake.n_unsupported, intake.n_oversized

    def n_hits(self):
        return sum(known.n_hits for known in self.repetitions._known.values())


def attribute(key, **value):
    return structs.KeyValue(key, structs.AnyValue(**value))


KNOWN_AGAIN = [
    attribute("gpu", string_value="0"),
    attribute("gpu", int_value=8),
    attribute("ingero.node.state", string_value="active"),
    attribute("ingero.node.state", string_value="idle"),
]
ODD = [
    attribute("gpu", int_value=0),
    attribute("gpu", double_value=0.0),
    attribute("gpu", double_value=-0.0),
    attribute("gpu", bool_value=False),
    attribute("gpu", string_value=""),
    structs.KeyValue("nothing"),
]
EXEMPLAR = structs.Exemplar([], WALL, 3.0)
VALUES = st.sampled_from([
    {"as_double": 0.0},
    {"as_double": -0.0},
    {"as_double": 1.5},
    {"as_double": math.nan},
    {"as_int": 0},
    {"as_int": -7},
    {"as_int": 2**60},
    {},
])
DOUBLES = st.floats().map(lambda value: {"as_double": value})
TIMES = st.sampled_from([WALL, WALL + 10**9, WALL + 2 * 10**9])
GAUGE, COUNTER, TOTAL, DELTAS = (
    ("gauge", 0, False),
    ("sum", 2, True),
    ("sum", 2, False),
    ("sum", 1, True),
)


def plain_points():
    """Points that can be known again, as dictionaries of their fields."""
    attributes = st.lists(st.sampled_from(KNOWN_AGAIN), max_size=2)
    return st.fixed_dictionaries({"attributes": attributes})


def plain_metrics():
    """Name, unit, what kind, points."""
    kinds = st.sampled_from([GAUGE, COUNTER, TOTAL])
    found = st.lists(plain_points(), min_size=1, max_size=3)
    return st.tuples(st.sampled_from("abc"), st.sampled_from(["", "1"]), kinds, found)


@st.composite
def numbered(draw, metrics):
    """The same with times and values."""
    return [
        (*named, [point | draw(DOUBLES) | {"time_unix_nano": draw(TIMES)} for point in found])
        for *named, found in metrics
    ]


@st.composite
def changed(draw, metrics):
    """One metric, or one of its points, is otherwise."""
    at = draw(st.integers(0, len(metrics) - 1))
    name, unit, kind, found = metrics[at]
    point_at = draw(st.integers(0, len(found) - 1))
    of_metric = st.sampled_from([
        (name + "2", unit, kind, found),
        (name, unit + "1", kind, found),
        *((name, unit, other, found) for other in (GAUGE, COUNTER, TOTAL, DELTAS, DELTAS)),
        (name, unit, kind, found[1:]),
        (name, unit, kind, [*found, found[0] | {"attributes": [KNOWN_AGAIN[0]] * 2}]),
    ])
    point = found[point_at]
    bare = {key: value for key, value in point.items() if key != "as_double"}
    of_point = st.one_of(
        st.sampled_from([{"flags": 1}, {"exemplars": [EXEMPLAR]}, {"time_unix_nano": 0}]).map(
            lambda what: point | what
        ),
        st.sampled_from([{"time_unix_nano": 5}, {"start_time_unix_nano": WALL}]).map(
            lambda what: point | what
        ),
        VALUES.map(lambda what: bare | what),
        st.sampled_from(KNOWN_AGAIN + ODD).map(lambda item: point | {"attributes": [item]}),
    ).map(
        lambda other: (
            name,
            unit,
            kind,
            [other if idx == point_at else one for idx, one in enumerate(found)],
        )
    )
    one = draw(st.one_of(of_metric, of_point))
    return [one if idx == at else metric for idx, metric in enumerate(metrics)]


@st.composite
def pushes(draw):
    """The same push again and again with other numbers, some of them changed, and some changed twice in a row."""
    base = draw(st.lists(plain_metrics(), min_size=1, max_size=3))
    found = [draw(numbered(base)) for _ in range(3)]
    for _ in range(draw(st.integers(1, 3))):
        odd = draw(changed(found[0]))
        found += [odd] * draw(st.integers(1, 3))
        found += [draw(numbered(base)) for _ in range(draw(st.integers(1, 3)))]
    return found


def build(metrics):
    built = []
    for name, unit, (kind, temporality, is_monotonic), found in metrics:
        points = [structs.NumberDataPoint(**point) for point in found]
        data = (
            structs.Gauge(points)
            if kind == "gauge"
            else structs.Sum(points, temporality, is_monotonic)
        )
        built.append(structs.Metric(name=name, unit=unit, **{kind: data}))
    return build_metrics(NODE, built, "s")


@BOTH
@given(found=pushes(), expires_at=st.integers(3, 12))
@settings(draw_examples(150, 600), phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_what_repeats_is_stored_as_if_it_had_been_walked(encoding, found, expires_at):
    fast, walked = Site(Repetitions), Site(_Walked)
    for at, one in enumerate(found):
        for site in (fast, walked):
            if at == expires_at:
                site.store.expire(site.now_ns)
            site.push(ENCODINGS[encoding](build(one)))
        assert fast.read() == walked.read()
        assert fast.count() == walked.count()


def health_push(value, **attributes):
    first = build_gauge("ingero.node.health_score", [build_number(value, WALL, attributes)])
    return build_metrics(NODE, [first], "s")


@BOTH
def test_an_agents_push_is_walked_until_its_series_are_there_and_then_no_more(encoding):
    site = Site(Repetitions)
    for _ in range(5):
        site.push(ENCODINGS[encoding](sample("push_active.json")))
    assert site.n_hits() == 3  # the first makes the series, the second is kept


@BOTH
def test_nodes_whose_pushes_look_alike_share_what_is_kept_of_them(encoding):
    site = Site(Repetitions)
    for _ in range(3):
        for number in range(20):
            node = NODE | {"ingero.node.id": f"n{number}"}
            gauge = build_gauge("a", [build_number(1.0, WALL, {"gpu": "0"})])
            site.push(ENCODINGS[encoding](build_metrics(node, [gauge], "s")))
    assert site.n_hits() == 20
    assert len(site.repetitions._layouts) == 1


@BOTH
def test_a_sender_whose_pushes_do_not_repeat_is_tried_again_after_a_while(encoding):
    site = Site(Repetitions)
    encode = ENCODINGS[encoding]
    for number in range(60):
        site.push(encode(health_push(1.0, state="even" if number % 2 else "odd")))
    assert site.n_hits() == 0
    for _ in range(20):
        site.push(encode(health_push(1.0, state="odd")))
    assert site.n_hits() >= 1


@BOTH
def test_where_every_sender_looks_otherwise_few_are_kept_and_all_are_shown(encoding, monkeypatch):
    monkeypatch.setattr("ingero.fleet.exporters.prometheus.repeats._MAX_LAYOUT_POINTS", 10)
    site = Site(Repetitions)
    for value in (1.0, 2.0, 3.0):
        for number in range(30):
            node = NODE | {"ingero.node.id": f"n{number}"}
            point = build_number(value, WALL, {"uuid": f"GPU-{number}"})
            push = build_metrics(node, [build_gauge("a", [point])], "s")
            site.push(ENCODINGS[encoding](push))
    assert len(site.repetitions._layouts) == 10
    assert {value for value, *_ in site.read().values()} == {"3.0"}


@BOTH
def test_a_push_of_very_many_points_is_not_kept(encoding):
    site = Site(Repetitions)
    points_ = [build_number(1.0, WALL, {"at": str(at)}) for at in range(257)]
    for _ in range(4):
        site.push(ENCODINGS[encoding](build_metrics(NODE, [build_gauge("a", points_)], "s")))
    assert site.n_hits() == 0


@pytest.mark.parametrize("idx", range(5))
def test_bytes_that_look_like_a_probe_are_not_taken_for_a_number(idx):
    site, walked = Site(Repetitions), Site(_Walked)
    probe = ((0xA5C396B1 << 32) + idx).to_bytes(8, "little")
    (value,) = struct.unpack("<d", probe)
    for odd in (probe, probe, probe, b"8 others"):
        points_ = [
            structs.NumberDataPoint([attribute("odd", bytes_value=odd)], as_double=value),
            build_number(value, WALL),
        ]
        metrics_ = [build_gauge("b", points_), build_gauge("a", [build_number(value, WALL)])]
        for one in (site, walked):
            one.push(as_protobuf(build_metrics(NODE, metrics_, "s")))
    assert site.read() == walked.read()


@BOTH
def test_attributes_that_are_equal_and_written_otherwise_are_two_series(encoding):
    site = Site(Repetitions)
    for value in (0.0, 0.0, 0.0, -0.0):
        site.push(ENCODINGS[encoding](health_push(1.0, load=value)))
    assert site.count()[0] == 2


def test_the_scopes_of_one_sender_are_one_push():
    site, walked = Site(Repetitions), Site(_Walked)
    for value in (1.0, 2.0, 3.0):
        parts = [build_gauge(name, [build_number(value, WALL)]) for name in "ab"]
        scopes = [structs.ScopeMetrics(metrics=[part]) for part in parts]
        resource = build_metrics(NODE, parts, "s").tree.resource_metrics[0].resource
        entry = structs.ResourceMetrics(resource, scopes)
        for one in (site, walked):
            one.push(as_protobuf(Export.from_tree(Signal.METRICS, structs.MetricsRequest([entry]))))
    assert site.read() == walked.read()
    assert site.n_hits() == 1
