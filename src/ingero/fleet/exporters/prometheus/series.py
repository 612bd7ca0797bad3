"""The latest point of every series, ready to be written.

Above naming, below the exporter; knows nothing of OTLP's encodings. Most series of one node differ only in name, and
most nodes' series differ only in who sent them, so label text is kept once per resource and once per attribute set, and
a series is a pair of small integers, its value and two times: about 110 bytes. A point that is not newer than the
stored one replaces it all the same, since arrival order is what a scrape shows.

Lossy: at ``max_series`` new series are refused and nothing of them is kept (`SeriesStore.n_refused`); a name that
arrives with a second type is refused (`n_conflicts`).
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

import numpy as np

from ingero.fleet.exporters.prometheus.label_sets import LabelSets, Spelling
from ingero.fleet.helpers.prometheus_histograms import NativeHistogram, SeriesExemplar
from ingero.fleet.helpers.prometheus_labels import OWN_LABELS, SENDER_LABELS, settle_labels
from ingero.fleet.helpers.prometheus_names import format_labels, read_labels

_ATTRIBUTES_BITS: Final = 32
_MAX_ALTERNATIVES: Final = 64
_MAX_UNUSED: Final = 256
LONG_AGO_NS: Final = -(1 << 62)
"""Last seen so long ago that the next scrape forgets it; also of a series that has no point yet."""
_ATTRIBUTES_MASK: Final = (1 << _ATTRIBUTES_BITS) - 1
_Pair: TypeAlias = tuple[int, int, str]
"""Labels of a sender and of a point as they arrived, and the label that their family has itself."""


def series_key(resource: int, attributes: int) -> int:
    """What a family's rows are found by."""
    return resource << _ATTRIBUTES_BITS | attributes


class FamilyKind(StrEnum):
    """Prometheus' metric types; the value is what ``# TYPE`` says."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """What all series of one name share.

    Attributes:
        name: The Prometheus name, suffixes included.
        kind: Its type.
        help: One line for people.
    """

    name: str
    kind: FamilyKind
    help: str


@dataclass(frozen=True, slots=True)
class SeriesDistribution:
    """Value of a histogram or summary series.

    Attributes:
        count: Observations.
        sum: Their sum; None when the sender did not keep it.
        steps: For a histogram ``(upper bound, cumulative count)`` ascending without the infinite one; for a summary
            ``(quantile, value)``; empty where there are only exponential buckets.
        native: Exponential buckets; None for a histogram with bounds and for a summary.
    """

    count: float
    sum: float | None
    steps: tuple[tuple[float, float], ...]
    native: NativeHistogram | None = None

    def plus(self, delta: SeriesDistribution) -> SeriesDistribution:
        """This and a delta over it; the delta alone when their bounds differ."""
        if [bound for bound, _ in self.steps] != [bound for bound, _ in delta.steps]:
            return delta
        if (self.native is None) != (delta.native is None):
            return delta
        native = None
        if self.native is not None and delta.native is not None:
            native = self.native.plus(delta.native)
            if native is None:
                return delta
        return SeriesDistribution(
            self.count + delta.count,
            None if self.sum is None or delta.sum is None else self.sum + delta.sum,
            tuple(
                (bound, mine + more)
                for (bound, mine), (_, more) in zip(self.steps, delta.steps, strict=True)
            ),
            native,
        )


class Family:
    """The series of one name. Columns are parallel; row order is arrival order."""

    __slots__ = (
        "distributions",
        "exemplars",
        "facts",
        "keys",
        "rows",
        "seen_ns",
        "times_ms",
        "values",
    )

    def __init__(self, facts: FamilyFacts) -> None:
        self.facts = facts
        self.rows: dict[int, int] = {}
        self.keys = array("q")
        self.values = array("d")
        self.times_ms = array("q")
        self.seen_ns = array("q")
        self.distributions: dict[int, SeriesDistribution] = {}
        self.exemplars: dict[int, tuple[SeriesExemplar, ...]] = {}

    def add(self, key: int) -> int:
        """The row of a new series, which has no point yet."""
        row = len(self.keys)
        self.rows[key] = row
        self.keys.append(key)
        self.values.append(0.0)
        self.times_ms.append(0)
        self.seen_ns.append(LONG_AGO_NS)
        return row

    def end_others(self, key: int, alternatives: Sequence[int]) -> None:
        """A sender is in one of several states: forget, at the next scrape, its series of the others.

        Args:
            key: Of the series that just got a point.
            alternatives: From `SeriesStore.find_alternatives`.
        """
        sender = key & ~_ATTRIBUTES_MASK
        for attributes in alternatives:
            other = sender | attributes
            row = self.rows.get(other) if other != key else None
            if row is not None:
                self.seen_ns[row] = LONG_AGO_NS

    def drop_before(self, cutoff_ns: int) -> int:
        """Forget the series that were last seen before then; returns how many."""
        seen = np.array(self.seen_ns, np.int64)
        is_kept = seen >= cutoff_ns
        n_dropped = int(seen.size - is_kept.sum())
        if n_dropped == 0:
            return 0
        for name in ("keys", "values", "times_ms", "seen_ns"):
            column = getattr(self, name)
            kept = np.array(column)[is_kept]
            setattr(self, name, array(column.typecode, kept.tobytes()))
        self.rows = {key: row for row, key in enumerate(self.keys)}
        self.distributions = {
            key: value for key, value in self.distributions.items() if key in self.rows
        }
        self.exemplars = {key: value for key, value in self.exemplars.items() if key in self.rows}
        return n_dropped


class SeriesStore:
    """All families. Not thread-safe; the owner locks or stays on one thread.

    Args:
        max_series: Most series that are kept; a histogram counts as one.
        fixed_labels: Names of labels that a point does not replace; see `settle_labels`.

    Attributes:
        n_expiries: How often series or label sets were taken away, so that the rows of others, and what a number means,
            changed.
    """

    def __init__(self, max_series: int, fixed_labels: frozenset[str] = SENDER_LABELS) -> None:
        self.n_expiries = 0
        self.n_series = 0
        self.n_refused = 0
        self.n_conflicts = 0
        self.families: dict[str, Family] = {}
        self._max_series = max_series
        self._fixed_labels = fixed_labels
        self._resources = LabelSets()
        self._attributes = LabelSets()
        self._rests: dict[int, str] = {}
        self._of_rest: dict[str, list[int]] = {}
        self._settled: dict[_Pair, tuple[int, int]] = {}

    def find_resource(self, alias: Spelling) -> int | None:
        """The index of a resource's labels, or None when this spelling is new."""
        return self._resources.find(alias)

    def add_resource(self, alias: Spelling, labels: Mapping[str, str]) -> int | None:
        """Remember a resource's labels, found from now on by ``alias`` too; None when they are new and it is full."""
        return self._resources.add(alias, labels, is_full=self.is_full)

    def names_of_resource(self, index: int) -> frozenset[str]:
        """Of a resource's labels."""
        return self._resources.names[index]

    def find_attributes(self, alias: Spelling) -> int | None:
        """The index of an attribute set, or None when this spelling is new."""
        return self._attributes.find(alias)

    def add_attributes(
        self, alias: Spelling, labels: Mapping[str, str], rest: str | None = None
    ) -> int | None:
        """Remember an attribute set, found from now on by ``alias`` too; None when it is new and no series is taken.

        Args:
            alias: What arrived.
            labels: The set.
            rest: The set without the attributes of which a sender has one value at a time; None when it has none.
        """
        index = self._attributes.add(alias, labels, is_full=self.is_full)
        if rest is not None and index is not None:
            self._note_rest(index, rest)
        return index

    def _note_rest(self, index: int, rest: str) -> None:
        if index not in self._rests:
            alike = self._of_rest.setdefault(rest, [])
            if len(alike) < _MAX_ALTERNATIVES:
                alike.append(index)
                self._rests[index] = rest

    def find_alternatives(self, key: int) -> Sequence[int]:
        """Attribute sets of which a sender has one at a time, this series' own among them; none for an ordinary series.

        Lossy: beyond 64 values of one such attribute, a series of the others stays until it expires.
        """
        rest = self._rests.get(key & _ATTRIBUTES_MASK)
        return () if rest is None else self._of_rest[rest]

    @property
    def is_full(self) -> bool:
        """No new series is taken."""
        return self.n_series >= self._max_series

    def get_family(self, facts: FamilyFacts, n_points: int = 1) -> Family | None:
        """The family of this name; None, its points counted, when it is new and the store full, or of another type."""
        family = self.families.get(facts.name)
        if family is None:
            if self.is_full:
                self.n_refused += n_points
                return None
            family = self.families[facts.name] = Family(facts)
        if family.facts.kind is not facts.kind:
            self.n_conflicts += n_points
            return None
        return family

    def get_row(self, family: Family, resource: int, attributes: int) -> int | None:
        """The row of one series, made when it is new; None, counted, when the store is full.

        Args:
            family: Where it is.
            resource: Labels of its sender.
            attributes: Labels of its points; where a name stands in both, or is the family's own, see `settle_labels`.
        """
        pair = (resource, attributes, OWN_LABELS.get(family.facts.kind, ""))
        settled = self._settle(pair)
        row = None if settled is None else family.rows.get(series_key(*settled))
        if row is None:
            if settled is None or self.is_full:
                self.n_refused += 1
                return None
            for sender, own in ((resource, attributes), settled):
                self._resources.note_use(sender)
                self._attributes.note_use(own)
            row = family.add(series_key(*settled))
            self.n_series += 1
        if settled != pair[:2]:
            assert settled is not None
            self._settled[pair] = settled
        return row

    def _settle(self, pair: _Pair) -> tuple[int, int] | None:
        """Two sets that say the same and of which no name stands twice; None when they are new and it is full."""
        resource, attributes, own_label = pair
        of_sender, of_point = self._resources.names[resource], self._attributes.names[attributes]
        if (
            own_label not in of_sender
            and own_label not in of_point
            and of_sender.isdisjoint(of_point)
        ):
            return resource, attributes
        return self._settled.get(pair) or self._build_settled(pair)

    def _build_settled(self, pair: _Pair) -> tuple[int, int] | None:
        resource, attributes, own_label = pair
        sender = self._resources.read(resource)
        fixed = self._fixed_labels
        labels = settle_labels(sender, self._attributes.read(attributes), own_label, fixed)
        resource_then = self._resources.take(labels.sender, is_full=self.is_full)
        attributes_then = self._attributes.take(labels.point, is_full=self.is_full)
        if resource_then is None or attributes_then is None:
            return None
        rest = self._rests.get(attributes)
        if rest is not None:
            others = settle_labels(sender, dict(read_labels(rest)), own_label, fixed).point
            self._note_rest(attributes_then, format_labels(others))
        return resource_then, attributes_then

    def expire(self, cutoff_ns: int) -> int:
        """Forget series last seen before ``cutoff_ns``, and label sets that nothing uses; returns how many series."""
        n_dropped = 0
        for name, family in list(self.families.items()):
            n_dropped += family.drop_before(cutoff_ns)
            if not family.rows:
                del self.families[name]
        self.n_series -= n_dropped
        if n_dropped or self._has_unused:
            self._forget_unused()
        return n_dropped

    def drop_unused(self) -> None:
        """Forget label sets that no series has, once there are many. Their numbers are used again."""
        if self._has_unused:
            self._forget_unused()

    @property
    def _has_unused(self) -> bool:
        return any(
            sets.n_unused > _MAX_UNUSED + len(sets) // 4
            for sets in (self._resources, self._attributes)
        )

    def _forget_unused(self) -> None:
        self.n_expiries += 1
        keys = [np.array(one.keys, dtype=np.int64) for one in self.families.values() if one.keys]
        live = np.concatenate(keys) if keys else np.zeros(0, np.int64)
        senders = set((live >> _ATTRIBUTES_BITS).tolist())
        kept = set((live & _ATTRIBUTES_MASK).tolist())
        settled = np.array([series_key(*pair) for pair in self._settled.values()], np.int64)
        is_live = np.isin(settled, live).tolist()
        self._settled = dict(itertools.compress(self._settled.items(), is_live))
        self._resources.keep_only(senders.union(pair[0] for pair in self._settled))
        kept.update(pair[1] for pair in self._settled)
        self._attributes.keep_only(kept)
        self._keep_alternatives(kept)

    def _keep_alternatives(self, kept: set[int]) -> None:
        for alike in self._of_rest.values():
            alike[:] = [index for index in alike if index in kept]
        self._of_rest = {rest: alike for rest, alike in self._of_rest.items() if alike}
        self._rests = {index: rest for index, rest in self._rests.items() if index in kept}

    def texts_of(self, key: int) -> tuple[str, str]:
        """The label text of one series, without braces: what its sender has, and its own."""
        return (
            self._resources.texts[key >> _ATTRIBUTES_BITS],
            self._attributes.texts[key & _ATTRIBUTES_MASK],
        )

    def labels_of(self, key: int) -> str:
        """The labels of the resource and of the point, joined."""
        resource, attributes = self.texts_of(key)
        return f"{resource},{attributes}" if resource and attributes else resource or attributes
