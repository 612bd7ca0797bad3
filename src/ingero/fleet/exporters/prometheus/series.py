"""The latest point of every series, ready to be written.

Above naming, below the exporter; knows nothing of OTLP's encodings. Most series of one node differ only in name, and
most nodes' series differ only in who sent them, so label text is kept once per resource and once per attribute set, and
a series is a pair of small integers, its value and two times: about 110 bytes. A point that is not newer than the
stored one replaces it all the same, since arrival order is what a scrape shows.

Lossy: at ``max_series`` new series are refused (`SeriesStore.n_refused`); a name that arrives with a second type is
refused (`n_conflicts`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from ingero.fleet.helpers.prometheus_histograms import NativeHistogram, SeriesExemplar
from ingero.fleet.helpers.prometheus_names import format_labels

_ATTRIBUTES_BITS: Final = 32
_MAX_NAME_SETS: Final = 1024
_MAX_ALTERNATIVES: Final = 64
LONG_AGO_NS: Final = -(1 << 62)
"""Last seen so long ago that the next scrape forgets it; also of a series that has no point yet."""
_ATTRIBUTES_MASK: Final = (1 << _ATTRIBUTES_BITS) - 1


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


class _Texts:
    """Label sets by small integers, which are used again when `keep_only` has freed them.

    A set is known by its text, so that the order in which attributes arrive makes no second series; ``_aliases`` finds
    it by what arrived, and starts over when a sender makes up ever-new spellings of the same labels.
    """

    __slots__ = ("_aliases", "_free", "_idx_of_text", "_name_sets", "names", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.names: list[frozenset[str]] = []
        self._aliases: dict[object, int] = {}
        self._idx_of_text: dict[str, int] = {}
        self._free: list[int] = []
        self._name_sets: dict[frozenset[str], frozenset[str]] = {}

    def find(self, alias: object) -> int | None:
        return self._aliases.get(alias)

    def add(self, alias: object, labels: dict[str, str]) -> int:
        text = format_labels(labels)
        index = self._idx_of_text.get(text)
        if index is None:
            index = self._idx_of_text[text] = self._take(text, self._share(frozenset(labels)))
        if len(self._aliases) > 4 * len(self._idx_of_text) + 1024:
            self._aliases.clear()
        self._aliases[alias] = index
        return index

    def _share(self, names: frozenset[str]) -> frozenset[str]:
        """One object for all sets of these names: a set takes more memory than all else that is kept of a node."""
        if len(self._name_sets) >= _MAX_NAME_SETS:
            self._name_sets.clear()
        return self._name_sets.setdefault(names, names)

    def _take(self, text: str, names: frozenset[str]) -> int:
        if self._free:
            index = self._free.pop()
            self.texts[index], self.names[index] = text, names
            return index
        self.texts.append(text)
        self.names.append(names)
        return len(self.texts) - 1

    def keep_only(self, live: set[int]) -> None:
        self._aliases = {alias: index for alias, index in self._aliases.items() if index in live}
        for text, index in list(self._idx_of_text.items()):
            if index not in live:
                del self._idx_of_text[text]
                self.texts[index], self.names[index] = "", frozenset()
                self._free.append(index)


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

    Attributes:
        n_expiries: How often series were taken away, so that the rows of others, and what is found by them, changed.
    """

    def __init__(self, max_series: int) -> None:
        self.n_expiries = 0
        self.n_series = 0
        self.n_refused = 0
        self.n_conflicts = 0
        self.families: dict[str, Family] = {}
        self._max_series = max_series
        self._resources = _Texts()
        self._attributes = _Texts()
        self._alternatives: dict[int, list[int]] = {}
        self._of_rest: dict[str, list[int]] = {}

    def find_resource(self, alias: object) -> int | None:
        """The index of a resource's labels, or None when this spelling is new."""
        return self._resources.find(alias)

    def add_resource(self, alias: object, labels: dict[str, str]) -> int:
        """Remember a resource's labels, found from now on by ``alias`` too."""
        return self._resources.add(alias, labels)

    def find_attributes(self, alias: object) -> int | None:
        """The index of an attribute set, or None when this spelling is new."""
        return self._attributes.find(alias)

    def add_attributes(self, alias: object, labels: dict[str, str], rest: str | None = None) -> int:
        """Remember an attribute set, found from now on by ``alias`` too.

        Args:
            alias: What arrived.
            labels: The set.
            rest: The set without the attributes of which a sender has one value at a time; None when it has none.
        """
        index = self._attributes.add(alias, labels)
        if rest is not None and index not in self._alternatives:
            alike = self._of_rest.setdefault(rest, [])
            if len(alike) < _MAX_ALTERNATIVES:
                alike.append(index)
                self._alternatives[index] = alike
        return index

    def find_alternatives(self, key: int) -> Sequence[int]:
        """Attribute sets of which a sender has one at a time, this series' own among them; none for an ordinary series.

        Lossy: beyond 64 values of one such attribute, a series of the others stays until it expires.
        """
        return self._alternatives.get(key & _ATTRIBUTES_MASK, ())

    @property
    def is_full(self) -> bool:
        """No new series is taken."""
        return self.n_series >= self._max_series

    def get_family(self, facts: FamilyFacts) -> Family | None:
        """The family of this name; None, counted, when its type differs from what came first."""
        family = self.families.get(facts.name)
        if family is None:
            family = self.families[facts.name] = Family(facts)
        if family.facts.kind is not facts.kind:
            self.n_conflicts += 1
            return None
        return family

    def get_row(self, family: Family, resource: int, attributes: int) -> int | None:
        """The row of one series, made when it is new; None, counted, when the store is full.

        A label that both the resource and the point have is the point's (the caller resolves it by adding a resource
        without that label, see `overlap`).
        """
        key = series_key(resource, attributes)
        row = family.rows.get(key)
        if row is None:
            if self.is_full:
                self.n_refused += 1
                return None
            row = len(family.keys)
            family.rows[key] = row
            family.keys.append(key)
            family.values.append(0.0)
            family.times_ms.append(0)
            family.seen_ns.append(LONG_AGO_NS)
            self.n_series += 1
        return row

    def overlap(self, resource: int, attributes: int) -> frozenset[str]:
        """Label names that both have."""
        return self._resources.names[resource] & self._attributes.names[attributes]

    def expire(self, cutoff_ns: int) -> int:
        """Forget series last seen before ``cutoff_ns``, and label sets that nothing uses; returns how many series."""
        n_dropped = 0
        for name, family in list(self.families.items()):
            n_dropped += family.drop_before(cutoff_ns)
            if not family.rows:
                del self.families[name]
        if n_dropped:
            self.n_expiries += 1
            self.n_series -= n_dropped
            keys = [
                np.array(family.keys, dtype=np.int64)
                for family in self.families.values()
                if family.keys
            ]
            live = np.concatenate(keys) if keys else np.zeros(0, np.int64)
            self._resources.keep_only(set((live >> _ATTRIBUTES_BITS).tolist()))
            kept = set((live & _ATTRIBUTES_MASK).tolist())
            self._attributes.keep_only(kept)
            self._keep_alternatives(kept)
        return n_dropped

    def _keep_alternatives(self, kept: set[int]) -> None:
        for alike in self._of_rest.values():
            alike[:] = [index for index in alike if index in kept]
        self._of_rest = {rest: alike for rest, alike in self._of_rest.items() if alike}
        self._alternatives = {index: alike for alike in self._of_rest.values() for index in alike}

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
