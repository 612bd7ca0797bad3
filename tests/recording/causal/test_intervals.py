"""Set arithmetic on time agrees with marking every nanosecond by hand."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ingero.recording.causal.intervals import Intervals

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(-3, 20)), max_size=8)


def build(pairs):
    starts = np.array([start for start, _ in pairs], np.int64)
    return Intervals.of(starts, starts + np.array([length for _, length in pairs], np.int64))


def marked(pairs):
    return {t for start, length in pairs for t in range(start, start + length)}


def times(intervals):
    return {
        t
        for a, b in zip(intervals.starts.tolist(), intervals.ends.tolist(), strict=True)
        for t in range(a, b)
    }


@given(spans)
def test_union_holds_every_marked_moment_in_disjoint_ascending_spans(pairs):
    merged = build(pairs)
    assert times(merged) == marked(pairs)
    assert merged.total_ns == len(marked(pairs))
    assert (merged.starts[1:] > merged.ends[:-1]).all()


@given(spans, spans)
def test_two_sets_join_and_overlap_like_sets(a, b):
    assert times(build(a).union(build(b))) == marked(a) | marked(b)
    assert build(a).within(build(b)) == len(marked(a) & marked(b))


@given(spans, st.lists(st.tuples(st.integers(-5, 70), st.integers(0, 20)), max_size=5))
def test_cover_of_each_query_is_counted_alone(pairs, queries):
    starts = np.array([q for q, _ in queries], np.int64)
    ends = starts + np.array([n for _, n in queries], np.int64)
    expected = [len(marked(pairs) & marked([query])) for query in queries]
    assert build(pairs).covered_ns(starts, ends).tolist() == expected


@given(spans)
def test_gaps_are_what_is_not_covered(pairs):
    assert times(build(pairs).gaps(-5, 90)) == set(range(-5, 90)) - marked(pairs)
