"""Which operations have too little work before them to be compared."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ingero.detect.usual_work import UsualWork

LONG, SHORT = 37e6, 0.15e6


def find_least(typical_ns, cuts=()):
    usual = UsualWork()
    return np.concatenate([
        usual.find_least(part) for part in np.split(np.array(typical_ns, float), cuts)
    ])


def test_operations_of_a_step_with_next_to_no_work_are_below_it_and_all_others_above():
    typical_ns = np.tile([LONG, SHORT, SHORT, SHORT], 40)
    least = find_least(typical_ns)
    assert (least[:32] == 0).all()
    assert (typical_ns[32:] >= least[32:]).tolist() == [True, False, False, False] * 32


def test_a_start_that_took_very_long_leaves_nothing_out():
    typical_ns = np.array([60e9, *[LONG] * 200])
    assert (typical_ns >= find_least(typical_ns)).all()


def test_work_that_becomes_a_tenth_counts():
    typical_ns = np.array([*[LONG] * 100, *[LONG / 10] * 100])
    assert (typical_ns >= find_least(typical_ns)).all()


def test_operations_of_which_nothing_is_known_do_not_count():
    typical_ns = np.tile([LONG, np.nan, SHORT], 60)
    assert (find_least(typical_ns)[64:] > SHORT).all()
    assert (find_least(np.full(100, np.nan)) == 0).all()


@given(
    st.lists(st.sampled_from([LONG, SHORT, 1e6, np.nan]), min_size=1, max_size=200),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_how_operations_are_cut_changes_nothing(typical_ns, cuts):
    assert (find_least(typical_ns, sorted(cuts)) == find_least(typical_ns)).all()
