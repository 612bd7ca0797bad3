"""Pushes that show the series of an earlier one: only their numbers are read.

A sender pushes the same metrics with the same attributes again and again. Once such a push was walked, what it looked
like (its layout, which all senders of one kind share) and the rows of its series are kept, and the next one is compared
with it instead of being looked up point by point. Only what is equal in everything but times and values repeats.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeAlias

from ingero.fleet.exporters.prometheus.reading import DELTA
from ingero.fleet.exporters.prometheus.series import LONG_AGO_NS, Family, SeriesStore
from ingero.otlp.codec import PointKind
from ingero.otlp.codec.export import MetricEntry
from ingero.otlp.codec.structs import Proto
from ingero.units import NS_PER_MS
from ingero.wire.names import MIN_PLAUSIBLE_NS

_MAX_POINTS: Final = 256
"""Of one push: more are walked each time."""
_MAX_LAYOUT_POINTS: Final = 50_000
"""Of all layouts together, at some hundred bytes each; where every sender has attributes of its own, few are kept."""
_N_WALKS_BETWEEN: Final = 16
"""Pushes that are walked before a sender whose pushes do not repeat is tried again."""
_PROBE: Final = 0xA5C396B1 << 32
"""Numbers from here on are put into a message to see where it has them; as doubles they are numbers too."""


class PushedMetrics(NamedTuple):
    """What one sender pushed.

    Attributes:
        sender: The index of its resource.
        metrics: What it holds.
        is_message: In upb messages, not structs.
    """

    sender: int
    metrics: Sequence[MetricEntry]
    is_message: bool


class _Layout(Protocol):
    """What the pushes of many senders look like."""

    @property
    def key(self) -> Hashable:
        """Equal for equal layouts."""
        ...

    def store(
        self, metrics: Sequence[MetricEntry], rows: Sequence[int], now_ns: int, wall_ms: int
    ) -> bool:
        """Store the points of a push in these rows; False, and some of them stored, where it looks otherwise."""
        ...


class _Step(NamedTuple):
    """One metric of structs.

    Attributes:
        name: Its name, as it arrives; likewise the next three.
        kind: Gauge or sum.
        unit: Its unit.
        is_monotonic: Of a sum that only grows.
        attributes: Of each of its points.
        family: Where its series are.
    """

    name: str
    kind: str
    unit: str
    is_monotonic: bool
    attributes: tuple[Proto, ...]
    family: Family


class _TreeLayout:
    """Of structs: names and attributes are compared one by one."""

    def __init__(self, steps: Sequence[_Step], attributes: Hashable) -> None:
        self._steps = tuple(steps)
        self.key = (attributes, *((*step[:4], id(step.family)) for step in steps))

    def store(
        self, metrics: Sequence[MetricEntry], rows: Sequence[int], now_ns: int, wall_ms: int
    ) -> bool:
        """See `_Layout`."""
        at = 0
        for (_, metric, name, kind, points), step in zip(metrics, self._steps, strict=True):
            known_name, known_kind, unit, is_monotonic, known, family = step
            if name != known_name or kind != known_kind or metric.unit != unit:
                return False
            if len(points) != len(known):
                return False
            if kind == PointKind.SUM and not _is_cumulative(metric.sum, is_monotonic=is_monotonic):
                return False
            values, times_ms, seen_ns = family.values, family.times_ms, family.seen_ns
            for point, attributes in zip(points, known, strict=True):
                row = rows[at]
                at += 1
                if (
                    point.attributes != attributes
                    or point.flags
                    or point.exemplars
                    or seen_ns[row] == LONG_AGO_NS
                ):
                    return False
                value = point.as_double
                if value is None:
                    value = math.nan if point.as_int is None else point.as_int
                time_ns = point.time_unix_nano
                values[row] = value
                times_ms[row] = time_ns // NS_PER_MS if time_ns > MIN_PLAUSIBLE_NS else wall_ms
                seen_ns[row] = now_ns
        return True


class _Form(NamedTuple):
    """Where a serialised message has its numbers.

    Attributes:
        format: As `struct` takes it: constant bytes and numbers in turn.
        constants: Every other field, from the first.
        values_at: Which field is the value of each point.
        times_at: Which is its time; 0 where it has none.
    """

    format: str
    constants: tuple[bytes, ...]
    values_at: tuple[int, ...]
    times_at: tuple[int, ...]


class _MessageLayout:
    """Of upb messages, where reaching into one costs more than serialising it: all bytes but the numbers' are compared.

    Times and values have eight bytes each, wherever they are in the message, so that equal bytes around them mean an
    equal message but for its numbers.
    """

    def __init__(self, form: _Form, families: Sequence[Family]) -> None:
        self._form = form
        self._families = tuple(families)
        self._unpack = struct.Struct(form.format).unpack
        self._n_bytes = struct.calcsize(form.format)
        self.key = (*form, *map(id, families))

    def store(
        self, metrics: Sequence[MetricEntry], rows: Sequence[int], now_ns: int, wall_ms: int
    ) -> bool:
        """See `_Layout`."""
        data = _serialize(metrics)
        if len(data) != self._n_bytes:
            return False
        fields = self._unpack(data)
        form = self._form
        if fields[::2] != form.constants:
            return False
        for family, row, value_at, time_at in zip(
            self._families, rows, form.values_at, form.times_at, strict=True
        ):
            seen_ns = family.seen_ns
            if seen_ns[row] == LONG_AGO_NS:
                return False
            time_ns = fields[time_at] if time_at else 0
            family.values[row] = fields[value_at]
            family.times_ms[row] = time_ns // NS_PER_MS if time_ns > MIN_PLAUSIBLE_NS else wall_ms
            seen_ns[row] = now_ns
        return True


@dataclass(slots=True)
class _Known:
    """The last push of a sender that was walked.

    Attributes:
        layout: What it looked like; None while its pushes do not repeat.
        rows: Of its points in their families.
        n_hits: Pushes that were like it.
        n_walks_left: Before another is kept in its place.
    """

    layout: _Layout | None
    rows: array[int] = field(default_factory=lambda: array("I"))
    n_hits: int = 0
    n_walks_left: int = 0


_RowFinder: TypeAlias = Callable[[Proto, str, Proto], tuple[Family, int] | None]
"""Metric, kind and point → family and row; None where the point is not shown."""


class Repetitions:
    """What senders pushed last.

    Args:
        store: Has the rows; whenever they move, all is forgotten.
    """

    def __init__(self, store: SeriesStore) -> None:
        self._store = store
        self._n_expiries = store.n_expiries
        self._known: dict[tuple[int, int, bool], _Known] = {}
        self._layouts: dict[Hashable, _Layout] = {}
        self._n_layout_points = 0

    def apply(self, push: PushedMetrics, now_ns: int, wall_ms: int) -> bool:
        """Store the points of a push that looks like its sender's last; False when it has to be walked.

        Args:
            push: Of a push that is no repetition some numbers may be stored already.
            now_ns: Monotonic time of its arrival.
            wall_ms: Wall time of its arrival, for points whose own time cannot be true.
        """
        if self._n_expiries != self._store.n_expiries:
            self._forget()
        known = self._known.get((push.sender, len(push.metrics), push.is_message))
        if known is None or known.layout is None:
            return False
        if not known.layout.store(push.metrics, known.rows, now_ns, wall_ms):
            return False
        known.n_hits += 1
        return True

    def learn(self, push: PushedMetrics, find_row: _RowFinder) -> None:
        """Keep what a push looks like that was walked, and whose series were all there."""
        key = (push.sender, len(push.metrics), push.is_message)
        before = self._known.get(key)
        if before is not None and before.n_walks_left:
            before.n_walks_left -= 1
            return
        found = None
        if before is None or before.n_hits or before.layout is None:
            found = _read_layout(push, find_row)
        if found is None or not self._share(found):
            found = _Known(None, n_walks_left=_N_WALKS_BETWEEN)
        self._known[key] = found

    def _forget(self) -> None:
        self._n_expiries = self._store.n_expiries
        self._known.clear()
        self._layouts.clear()
        self._n_layout_points = 0

    def _share(self, known: _Known) -> bool:
        """Take the layout that other senders have, or keep a new one; False when there are too many."""
        assert known.layout is not None
        shared = self._layouts.get(known.layout.key)
        if shared is None:
            if self._n_layout_points + len(known.rows) > _MAX_LAYOUT_POINTS:
                return False
            self._n_layout_points += len(known.rows)
            shared = self._layouts[known.layout.key] = known.layout
        known.layout = shared
        return True


def _is_cumulative(data: Proto, *, is_monotonic: bool) -> bool:
    return bool(data.is_monotonic == is_monotonic and data.aggregation_temporality != DELTA)


def _serialize(metrics: Sequence[MetricEntry]) -> bytes:
    """The scopes of a sender's upb messages."""
    if metrics[0][0] is metrics[-1][0]:
        data: bytes = metrics[0][0].SerializeToString()
        return data
    scopes = {id(scope): scope for scope, *_ in metrics}
    return b"".join([scope.SerializeToString() for scope in scopes.values()])


def _read_layout(push: PushedMetrics, find_row: _RowFinder) -> _Known | None:
    """What a push looks like and its rows; None when its repetitions have to be walked."""
    steps: list[_Step] = []
    found: list[tuple[Family, int]] = []
    for _, metric, name, kind, points in push.metrics:
        if len(found) + len(points) > _MAX_POINTS or not points:
            return None
        is_monotonic = kind == PointKind.SUM and metric.sum.is_monotonic
        if kind == PointKind.SUM and not _is_cumulative(metric.sum, is_monotonic=is_monotonic):
            return None
        for point in points:
            place = find_row(metric, kind, point)
            if place is None or point.flags or point.exemplars:
                return None
            found.append(place)
        attributes = tuple(point.attributes for point in points)
        steps.append(_Step(name, kind, metric.unit, is_monotonic, attributes, found[-1][0]))
    if not steps:
        return None
    families, rows = [family for family, _ in found], array("I", [row for _, row in found])
    if push.is_message:
        form = _find_form(push.metrics)
        return None if form is None else _Known(_MessageLayout(form, families), rows)
    pairs = tuple(_read_pairs(attributes) for step in steps for attributes in step.attributes)
    return None if None in pairs else _Known(_TreeLayout(steps, pairs), rows)


def _read_pairs(attributes: Sequence[Proto]) -> tuple[Hashable, ...] | None:
    """Attributes of structs as they are compared; None where one is neither a text nor a whole number.

    Two doubles that are equal, 0 and -0, are written as different labels; lists and maps are rare.
    """
    pairs = []
    for item in attributes:
        value = item.value
        if value is None or (value.string_value is None and value.int_value is None):
            return None
        pairs.append((item.key, value.string_value, value.int_value))
    return tuple(pairs)


def _find_form(metrics: Sequence[MetricEntry]) -> _Form | None:
    """Where the numbers of upb messages are: probes replace them in a copy, whose bytes are searched."""
    copies = []
    codes: list[str] = []
    values: list[int] = []
    times: list[int | None] = []
    for scope in {id(scope): scope for scope, *_ in metrics}.values():
        copy = type(scope)()
        copy.CopyFrom(scope)
        copies.append(copy)
        for metric in copy.metrics:
            for point in getattr(metric, metric.WhichOneof("data")).data_points:
                which = point.WhichOneof("value")
                if which is None:
                    return None
                values.append(len(codes))
                times.append(len(codes) + 1 if point.time_unix_nano else None)
                names = [which, *(name for name in _TIMES if getattr(point, name))]
                for name in names:
                    code = _CODES[name]
                    (probe,) = struct.unpack(f"<{code}", _build_probe(len(codes)))
                    setattr(point, name, probe)
                    codes.append(code)
    probed = b"".join([copy.SerializeToString() for copy in copies])
    probes = [_build_probe(idx) for idx in range(len(codes))]
    if any(probed.count(probe) != 1 for probe in probes):
        return None
    places = [probed.find(probe) for probe in probes]
    order = sorted(range(len(codes)), key=places.__getitem__)
    ends = [0, *(places[idx] + _NUMBER_BYTES for idx in order)]
    starts = [*(places[idx] for idx in order), len(probed)]
    gaps = [start - end for start, end in zip(starts, ends, strict=True)]
    pieces = [f"{gap}s{codes[idx]}" for gap, idx in zip(gaps, order, strict=False)]
    layout = struct.Struct(f"<{''.join(pieces)}{gaps[-1]}s")
    field_of = {idx: 2 * at + 1 for at, idx in enumerate(order)}
    return _Form(
        layout.format,
        layout.unpack(probed)[::2],
        tuple(field_of[idx] for idx in values),
        tuple(0 if idx is None else field_of[idx] for idx in times),
    )


def _build_probe(idx: int) -> bytes:
    return (_PROBE + idx).to_bytes(_NUMBER_BYTES, "little")


_NUMBER_BYTES: Final = 8
_TIMES: Final = ("time_unix_nano", "start_time_unix_nano")
_CODES: Final = {"as_double": "d", "as_int": "q"} | dict.fromkeys(_TIMES, "Q")
