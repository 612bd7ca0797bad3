"""Roots, victims and circles on small jobs whose answer is known by construction."""

import time
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.detect.direct_hang import DirectHang
from tests.support.properties import draw_examples

from ingero.detect.hang import find_hang
from ingero.model.hang import HangCause, PendingOp, RankState, RecordedOp, StoppedGroup

WORLD = StoppedGroup("0", (0, 1, 2, 3), "WORLD")
LEFT = StoppedGroup("1", (0, 1), "TP")
RIGHT = StoppedGroup("2", (2, 3), "TP")
GROUPS = {group.name: group for group in (WORLD, LEFT, RIGHT)}


def state(rank, entered, left, *pending):
    groups = {name: group for name, group in GROUPS.items() if rank in group.ranks}
    ops = tuple(PendingOp(group, seq, "all_reduce") for group, seq in pending)
    return RankState(rank, groups, entered, left, ops)


def test_rank_that_never_entered_is_the_root_and_blocks_all_others():
    report = find_hang(
        [state(rank, {"0": 9}, {"0": 8}, ("0", 9)) for rank in (0, 1, 2)]
        + [state(3, {"0": 8}, {"0": 8})]
    )
    (root,) = report.roots
    assert (root.rank, root.cause, root.missing_seq, root.last_left) == (3, HangCause.ABSENT, 9, 8)
    assert root.blocks == (0, 1, 2)


def test_missed_rank_that_waits_elsewhere_is_a_victim():
    report = find_hang([
        state(0, {"0": 5, "1": 3}, {"0": 4, "1": 3}, ("0", 5)),
        state(1, {"0": 5, "1": 3}, {"0": 4, "1": 3}, ("0", 5)),
        state(2, {"0": 4, "2": 7}, {"0": 4, "2": 6}, ("2", 7)),
        state(3, {"0": 4, "2": 6}, {"0": 4, "2": 6}),
    ])
    assert report.missing_ranks == (3,)
    assert report.roots[0].blocks == (0, 1, 2)


def test_rank_that_cannot_leave_what_its_peers_left_is_stuck():
    report = find_hang([
        state(0, {"1": 9}, {"1": 4}, ("1", 5), ("1", 6)),
        state(1, {"1": 9}, {"1": 8}, ("1", 9)),
    ])
    (root,) = report.roots
    assert (root.rank, root.cause, root.missing_seq, root.last_left) == (0, HangCause.STUCK, 5, 4)
    assert root.blocks == (1,)


def test_rank_without_state_is_silent_when_it_is_missed():
    report = find_hang([state(rank, {"0": 2}, {"0": 1}, ("0", 2)) for rank in (0, 1, 3)])
    (root,) = report.roots
    assert (root.rank, root.cause, root.last_left) == (2, HangCause.SILENT, None)


def test_two_roots_are_both_named_when_one_also_waits_behind_the_other():
    # Rank 3 stands, like rank 2, in an operation that rank 1 never entered; rank 2 went on to enter the next one.
    report = find_hang([
        state(0, {"0": 5}, {"0": 4}, ("0", 5)),
        state(1, {"0": 4}, {"0": 4}),
        state(2, {"0": 5, "2": 8}, {"0": 4, "2": 7}, ("0", 5), ("2", 8)),
        state(3, {"0": 5, "2": 7}, {"0": 4, "2": 7}, ("0", 5)),
    ])
    assert report.missing_ranks == (1, 3)


def test_operations_entered_in_opposite_orders_are_a_circle_without_a_root():
    report = find_hang([
        state(0, {"1": 1, "0": 1}, {"1": 0, "0": 0}, ("1", 1), ("0", 1)),
        state(1, {"1": 1, "0": 1}, {"1": 0, "0": 0}, ("0", 1), ("1", 1)),
        state(2, {"0": 1}, {"0": 0}, ("0", 1)),
        state(3, {"0": 1}, {"0": 0}, ("0", 1)),
    ])
    assert report.missing_ranks == ()
    assert report.deadlocks == ((0, 1),)


def test_stopped_rank_is_the_root_wherever_it_was_stopped():
    everywhere = [state(rank, {"0": 9}, {"0": 8}, ("0", 9)) for rank in range(4)]
    in_it = replace(everywhere[2], is_stopped=True)
    before_it = replace(state(2, {"0": 8}, {"0": 8}), is_stopped=True)
    for stopped in (in_it, before_it):
        report = find_hang([*everywhere[:2], stopped, everywhere[3]])
        (root,) = report.roots
        assert (root.rank, root.cause, root.missing_seq) == (2, HangCause.STOPPED, 9)
        assert root.blocks == (0, 1, 3)


def test_rank_that_is_in_one_operation_with_a_stopped_one_waits_for_it_though_others_left():
    """A ring: what a rank needs of its neighbour the others may have had already."""
    report = find_hang([
        *(state(rank, {"0": 9}, {"0": 8}, ("0", 9)) for rank in (0, 1)),
        state(2, {"0": 8}, {"0": 7}, ("0", 8)),
        replace(state(3, {"0": 8}, {"0": 7}, ("0", 8)), is_stopped=True),
    ])
    (root,) = report.roots
    assert (root.rank, root.cause, root.missing_seq) == (3, HangCause.STOPPED, 8)
    assert root.blocks == (0, 1, 2)
    assert report.deadlocks == ()


def test_stopped_rank_that_left_what_others_wait_in_is_not_waited_for():
    ahead = replace(state(2, {"0": 9}, {"0": 9}), is_stopped=True)
    report = find_hang([
        *(state(rank, {"0": 9}, {"0": 8}, ("0", 9)) for rank in (0, 1)),
        ahead,
        state(3, {"0": 8}, {"0": 8}),
    ])
    assert report.missing_ranks == (3,)


def test_job_that_is_stopped_as_a_whole_names_nobody():
    states = [state(rank, {"0": 9}, {"0": 8}, ("0", 9)) for rank in range(4)]
    report = find_hang([replace(one, is_stopped=True) for one in states])
    assert report.roots == ()


def test_job_in_which_everybody_entered_names_nobody():
    report = find_hang([state(rank, {"0": 3}, {"0": 2}, ("0", 3)) for rank in range(4)])
    assert report.missing_ranks == ()
    assert report.deadlocks == ()


def test_point_to_point_chain_leads_to_its_end():
    pipe = StoppedGroup("9", (0, 1, 2))

    def at(rank, *pending):
        return RankState(rank, {"9": pipe}, {}, {}, pending)

    report = find_hang([
        at(0, PendingOp("9", 4, "recv 0<-1", peer=1)),
        at(1, PendingOp("9", 7, "recv 1<-2", peer=2)),
        at(2),
    ])
    assert report.missing_ranks == (2,)
    assert report.roots[0].blocks == (0, 1)
    assert report.roots[0].last_left is None  # its counters there are not comparable


@given(
    n_ranks=st.integers(2, 12),
    data=st.data(),
)
def test_any_set_of_absent_ranks_in_one_group_is_found_exactly(n_ranks, data):
    absent = data.draw(st.sets(st.integers(0, n_ranks - 1), min_size=1, max_size=n_ranks - 1))
    order = data.draw(st.permutations(range(n_ranks)))
    group = StoppedGroup("7", tuple(order))
    states = [
        RankState(rank, {"7": group}, {"7": 10}, {"7": 10})
        if rank in absent
        else RankState(rank, {"7": group}, {"7": 11}, {"7": 10}, (PendingOp("7", 11, "barrier"),))
        for rank in order
    ]
    report = find_hang(states)
    assert report.missing_ranks == tuple(sorted(absent))
    assert all(set(root.blocks) == set(range(n_ranks)) - absent for root in report.roots)


@st.composite
def jobs(draw):
    """States of up to seven ranks in up to three groups; what one rank says need not fit what another says."""
    n_ranks, numbers = draw(st.integers(2, 7)), st.integers(0, 3)
    everybody = range(n_ranks)
    groups = {
        name: StoppedGroup(name, tuple(ranks))
        for name in "abc"
        if (ranks := draw(st.lists(st.sampled_from(everybody), unique=True)))
    }
    kinds = st.sampled_from(["all_reduce", "all_reduce", "broadcast"])
    found = []
    for rank in draw(st.lists(st.sampled_from(everybody), unique=True)):
        mine = {name: group for name, group in groups.items() if rank in group.ranks}
        entered = {name: draw(numbers) for name in mine if draw(st.integers(0, 5))}
        left = {name: draw(numbers) for name in mine if draw(st.booleans())}
        peers = st.one_of(st.none(), st.none(), st.sampled_from(everybody))
        ops = st.builds(PendingOp, st.sampled_from(sorted(mine) or ["a"]), numbers, kinds, peers)
        recorded = {
            name: {seq: RecordedOp(draw(kinds), None, "", is_finished=False) for seq in range(2)}
            for name in mine
            if not draw(st.integers(0, 3))
        }
        pending = tuple(draw(st.lists(ops, max_size=4))) if mine else ()
        is_stopped = not draw(st.integers(0, 7))
        found.append(RankState(rank, mine, entered, left, pending, recorded, is_stopped=is_stopped))
    return found


@draw_examples(70, 200)
@given(jobs())
def test_what_is_found_for_all_ranks_of_an_operation_is_what_each_asked_alone_would_find(states):
    report, direct = find_hang(states), DirectHang(states)
    waits = {wait.rank: tuple(wait.waits_for) for wait in report.waits}
    assert waits == {rank: tuple(sorted(targets)) for rank, targets in direct.waits.items()}
    roots = {r.rank: (r.cause, r.group.name, r.missing_seq, r.blocks) for r in report.roots}
    assert roots == direct.roots
    assert set(report.deadlocks) == direct.deadlocks


def test_a_hang_of_ten_thousand_ranks_with_four_operations_in_flight_is_found_in_a_second():
    n_ranks, missing = 10_000, 4711
    everybody = {"0": StoppedGroup("0", tuple(range(n_ranks)))}
    pending = tuple(PendingOp("0", seq, "all_reduce") for seq in range(10, 14))
    states = [
        RankState(rank, everybody, {"0": 13}, {"0": 9}, pending)
        if rank != missing
        else RankState(rank, everybody, {"0": 9}, {"0": 9})
        for rank in range(n_ranks)
    ]
    began_s = time.process_time()
    (root,) = find_hang(states).roots
    assert time.process_time() - began_s < 1.0  # 0.1 s; asking each rank about each took a minute
    assert (root.rank, len(root.blocks)) == (missing, n_ranks - 1)
