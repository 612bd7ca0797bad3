"""The checker of histories finds each kind of violation where one is planted, and none where none is."""

from dataclasses import replace

import pytest
from hypothesis import given as given_any
from hypothesis import settings
from hypothesis import strategies as st
from tests.chaos.checker import check, tally
from tests.chaos.history import (
    Fault,
    History,
    Slowed,
    Threshold,
    Verdict,
    read_history,
    write_history,
)

END_S = 400.0


def given(*strategies):
    """As hypothesis' own, with few examples: a history is large, and each test plants one thing."""

    def decorate(test):
        return settings(max_examples=20, deadline=None)(given_any(*strategies)(test))

    return decorate


@st.composite
def sound(draw):
    """A history without a violation: ranks slow one after the other, each named and cleared, nothing lost."""
    history = History(start_s=0.0, end_s=END_S, n_nodes=draw(st.integers(1, 4)))
    at_s = 5.0
    last = {}
    for rank in draw(st.lists(st.integers(0, 7), min_size=1, max_size=5)):
        length_s = draw(st.floats(31.0, 40.0))
        slowed = Slowed(rank, at_s, at_s + length_s)
        history.slowed.append(slowed)
        named_s = at_s + draw(st.floats(1.0, 9.0))
        cleared_s = slowed.end_s + draw(st.floats(0.0, 29.0))
        for kind, when_s in (("culprit", named_s), ("ordinary", cleared_s)):
            history.verdicts.append(Verdict(rank, kind, last.get(rank, ""), when_s))
            last[rank] = kind
        at_s = slowed.end_s + 40.0
    for node in range(history.n_nodes):
        step_s = draw(st.floats(0.5, 5.0))
        history.thresholds += [
            Threshold(node, number * step_s, 0.9) for number in range(int(END_S / step_s) + 1)
        ]
    for writer in ("rank 0", "log"):
        numbers = draw(st.sets(st.integers(0, 999), min_size=1, max_size=30))
        history.acknowledged[writer] = sorted(numbers)
        history.stored[writer] = sorted(numbers | draw(st.sets(st.integers(0, 999), max_size=5)))
    return history


def kinds(history):
    return {violation.kind for violation in check(history)}


@given(sound())
def test_a_sound_history_has_no_violation(history):
    assert check(history) == []


@given(sound(), st.data())
def test_a_rank_that_was_slow_and_never_named_is_found(history, data):
    slowed = data.draw(st.sampled_from(history.slowed))
    history.verdicts = [
        one
        for one in history.verdicts
        if not (one.rank == slowed.rank and slowed.start_s <= one.at_s <= slowed.end_s + 30)
    ]
    assert "verdict lost" in kinds(history)


@given(sound(), st.data())
def test_a_record_that_is_missing_from_the_middle_is_found(history, data):
    rank = data.draw(st.sampled_from(history.slowed)).rank
    history.verdicts.append(Verdict(rank, "drag", "victim", END_S))
    assert kinds(history) == {"verdict lost"}


@given(sound())
def test_a_fleet_that_takes_over_does_not_know_what_a_verdict_was_before_it_ended(history):
    rank = history.slowed[0].rank
    history.verdicts = [
        replace(one, before="") if one.kind == "culprit" and one.rank == rank else one
        for one in history.verdicts
    ]
    assert check(history) == []


@given(sound(), st.data())
def test_a_record_that_came_twice_is_found(history, data):
    at = data.draw(st.integers(0, len(history.verdicts) - 1))
    again = history.verdicts[at]
    history.verdicts.insert(at + 1, replace(again, at_s=again.at_s + 0.1))
    assert "verdict doubled" in kinds(history)


@given(sound(), st.integers(0, 7))
def test_a_rank_that_was_named_while_it_was_not_slow_is_found(history, rank):
    last = [one.kind for one in history.verdicts if one.rank == rank]
    history.verdicts.append(Verdict(rank, "culprit", last[-1] if last else "", END_S))
    history.slowed = [one for one in history.slowed if one.end_s < END_S - 40]
    assert "false culprit" in kinds(history)


@given(sound(), st.data())
def test_an_acknowledged_row_that_is_not_there_is_found(history, data):
    writer = data.draw(st.sampled_from(sorted(history.acknowledged)))
    lost = data.draw(st.sampled_from(history.acknowledged[writer]))
    history.stored[writer].remove(lost)
    assert kinds(history) == {"acknowledged rows lost"}


@given(sound())
def test_a_writer_of_whom_nothing_was_stored_is_found(history):
    del history.stored["log"]
    assert kinds(history) == {"acknowledged rows lost"}


@given(sound(), st.data())
def test_a_node_that_got_no_threshold_for_too_long_is_found(history, data):
    node = data.draw(st.integers(0, history.n_nodes - 1))
    start_s = data.draw(st.floats(0.0, END_S - 6.0))
    history.thresholds = [
        one
        for one in history.thresholds
        if one.node != node or not start_s <= one.at_s <= start_s + 5.1
    ]
    assert kinds(history) == {"threshold gap"}


@pytest.mark.parametrize("keep", [True, False])
def test_a_node_that_never_got_a_threshold_is_found_and_one_that_does_not_ask_is_not(keep):
    history = History(end_s=10.0, n_nodes=int(keep))
    assert bool(check(history)) is keep


@given(sound())
def test_a_history_is_read_as_it_was_written_and_its_tally_says_what_was_seen(
    tmp_path_factory, history
):
    history.faults.append(Fault("kill judge", "fleet 1", 3.0, 4.0))
    path = tmp_path_factory.mktemp("history") / "history.json"
    write_history(history, path)
    assert read_history(path) == history
    lines = "\n".join(tally(history))
    assert "faults: 1 in 400 s (kill judge 1)" in lines
    assert f"{len(history.verdicts)} records" in lines
