"""Batches of NCCL: their end says whether their operations were left, and whom they wait for."""

import pytest
from tests.wire.flight_recorder.nccl_recorder import NcclRecorder

from ingero.detect.hang import find_hang
from ingero.wire.flight_recorder.job import read_job

N_STEPS = 5


@pytest.fixture(params=[False, True], ids=["end_is_collective", "end_is_p2p"])
def is_end_p2p(request):
    return request.param


def pipeline(n_ranks, is_end_p2p, **others):
    """Ranks of a pipeline after steps that all of them finished: forwards, backwards and a collective."""
    ranks = [
        NcclRecorder(rank, n_ranks, is_end_p2p=is_end_p2p, **others) for rank in range(n_ranks)
    ]
    for recorder in ranks:
        recorder.all_reduce()
        for _ in range(N_STEPS):
            recorder.batch(*_with_neighbours(recorder))
        recorder.all_reduce()
    return ranks


def _with_neighbours(recorder):
    rank, last = recorder.rank, recorder.n_ranks - 1
    before = [f"recv {rank - 1}", f"send {rank - 1}"] if rank > 0 else []
    after = [f"send {rank + 1}", f"recv {rank + 1}"] if rank < last else []
    return before + after


def report_of(ranks, directory):
    for recorder in ranks:
        recorder.write(directory)
    return find_hang(read_job(directory))


def test_a_job_that_finished_its_batches_does_not_hang(tmp_path, is_end_p2p):
    report = report_of(pipeline(3, is_end_p2p), tmp_path)
    assert (report.verdict, report.waits) == ("nobody", ())


def test_who_misses_a_collective_after_batches_is_named(tmp_path, is_end_p2p):
    ranks = pipeline(3, is_end_p2p)
    for recorder in (ranks[0], ranks[2]):
        recorder.all_reduce(is_done=False)
    report = report_of(ranks, tmp_path)
    (root,) = report.roots
    assert (root.rank, root.cause, root.missing_seq, root.last_left) == (1, "absent", 3, 2)
    assert root.blocks == (0, 2)


def test_who_never_comes_to_a_batch_is_named_and_who_sent_its_part_is_not(tmp_path, is_end_p2p):
    ranks = pipeline(3, is_end_p2p)
    ranks[0].batch("send 1")
    ranks[1].batch("recv 0", "send 2", is_done=False)
    report = report_of(ranks, tmp_path)
    assert report.missing_ranks == (2,)
    assert [(wait.rank, wait.waits_for) for wait in report.waits] == [(1, (2,))]


def test_a_chain_of_batches_leads_to_the_rank_that_holds_it(tmp_path, is_end_p2p):
    ranks = pipeline(4, is_end_p2p)
    ranks[0].batch("recv 1", is_done=False)
    ranks[1].batch("send 0", "recv 2", is_done=False)
    ranks[2].batch("send 1", "recv 3", is_done=False)
    assert report_of(ranks, tmp_path).missing_ranks == (3,)


def test_of_several_in_one_batch_none_is_named_where_the_recorder_forgot_the_first(
    tmp_path, is_end_p2p
):
    ranks = pipeline(3, is_end_p2p, first_id=90_000)
    ranks[0].batch("send 1")
    ranks[1].batch("recv 0", "send 2", is_done=False)
    report = report_of(ranks, tmp_path)
    assert (report.verdict, report.missing_ranks, report.suspects) == ("unknown", (), (0, 2))


def test_who_did_its_part_is_not_named_where_its_peer_is_held_by_another_rank(tmp_path, is_end_p2p):
    ranks = pipeline(4, is_end_p2p, first_id=90_000)
    ranks[0].batch("send 1")
    ranks[1].batch("recv 0", "send 2", is_done=False)
    ranks[2].batch("send 3", is_done=False)
    report = report_of(ranks, tmp_path)
    assert (report.missing_ranks, report.suspects, report.deadlocks) == ((3,), (0,), ())


def test_the_end_of_a_batch_that_was_forgotten_is_no_collective(tmp_path, is_end_p2p):
    ranks = pipeline(3, is_end_p2p, first_id=90_000)
    for recorder in ranks:
        recorder.batch(*_with_neighbours(recorder))
        recorder.all_reduce()
    del ranks[1].entries[:-2]
    report = report_of(ranks, tmp_path)
    assert (report.verdict, report.missing_ranks) == ("nobody", ())


def test_coalesced_collectives_have_the_state_of_their_end(tmp_path):
    ranks = [NcclRecorder(rank, 3) for rank in range(3)]
    for recorder in ranks:
        recorder.all_reduce()
        recorder.coalesced_collectives(3)
    assert report_of(ranks, tmp_path).verdict == "nobody"
    for recorder in ranks[:2]:
        recorder.coalesced_collectives(3, is_done=False)
    (root,) = report_of(ranks, tmp_path).roots
    assert (root.rank, root.missing_seq, root.last_left) == (2, 3, 2)


def test_coalesced_collectives_beside_batches_have_the_state_of_their_end(tmp_path, is_end_p2p):
    ranks = pipeline(3, is_end_p2p)
    for recorder in ranks:
        recorder.coalesced_collectives(3)
    assert report_of(ranks, tmp_path).verdict == "nobody"
    for recorder in ranks[:2]:
        recorder.coalesced_collectives(3, is_done=False)
    (root,) = report_of(ranks, tmp_path).roots
    assert (root.rank, root.missing_seq, root.last_left) == (2, 4, 3)
