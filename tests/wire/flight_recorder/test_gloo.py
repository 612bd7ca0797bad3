"""Dumps of Gloo jobs name no communicator's members; what they leave out is taken from each other."""

import json
import os

import pytest

from ingero.detect.hang import find_hang
from ingero.errors import BadDataError
from ingero.model.hang import Whereabouts
from ingero.wire.flight_recorder.job import read_job

NS_PER_S = 1_000_000_000
ENTERED_NS = 1_795_000_000 * NS_PER_S
STACK = 'Thread 0x00007f (most recent call first):\n  File "{file}", line 7 in {name}\n'
INSIDE = STACK.format(file="/site-packages/torch/distributed/distributed_c10d.py", name="recv")
OUTSIDE = STACK.format(file="/home/me/train.py", name="load_batch")


def entry(seq, *, retired, group=("0", "default_pg"), kind="all_reduce", op=None, sizes=((4,),)):
    return {
        "record_id": seq - 1, "pg_id": 0, "process_group": list(group), "collective_seq_id": seq, "p2p_seq_id": 0,
        "op_id": op or seq, "profiling_name": f"gloo:{kind}", "time_created_ns": ENTERED_NS + seq * 1000,
        "input_sizes": list(sizes), "input_dtypes": ["Float"], "output_sizes": list(sizes), "output_dtypes": ["Float"],
        "state": "scheduled", "retired": retired, "timeout_ms": 1_800_000, "is_p2p": False,
    }  # fmt: skip


def dump(*entries):
    """What ``_dump_fr_trace_json`` of PyTorch 2.13 writes for a Gloo job: one group without a name or members."""
    document = {
        "version": "2.10",
        "comm_lib_version": "",
        "pg_config": {"": {"name": "", "desc": "", "ranks": "[]"}},
        "pg_status": {},
    }
    return json.dumps({**document, **({"entries": entries} if entries else {})})


def write(folder, bodies, *, seconds=10):
    for name, body in bodies.items():
        path = folder / name
        path.write_text(body)
        wall_ns = ENTERED_NS + seconds * NS_PER_S
        os.utime(path, ns=(wall_ns, wall_ns))
    return folder


WAITS = dump(entry(1, retired=True), entry(2, retired=False))
LATE = dump(entry(1, retired=True))


def test_the_rank_that_did_not_enter_is_named(tmp_path):
    report = find_hang(
        read_job(write(tmp_path, {"dump_0": WAITS, "dump_1": LATE, "dump_2": WAITS}))
    )
    (root,) = report.roots
    assert (root.rank, root.cause, root.missing_seq, root.last_left) == (1, "absent", 2, 1)
    assert root.blocks == (0, 2)
    assert root.group.description == "default_pg"


def test_a_rank_that_entered_nothing_at_all_is_missed(tmp_path):
    waits = dump(entry(1, retired=False))
    report = find_hang(
        read_job(write(tmp_path, {"dump_0": waits, "dump_1": waits, "dump_2": dump()}))
    )
    assert report.missing_ranks == (2,)


def test_a_gap_among_the_dumps_is_a_silent_rank(tmp_path):
    report = find_hang(read_job(write(tmp_path, {"dump_0": WAITS, "dump_2": WAITS})))
    assert [(root.rank, root.cause) for root in report.roots] == [(1, "silent")]


def test_a_last_rank_without_a_dump_is_named_when_the_size_is_said(tmp_path):
    write(tmp_path, {"dump_0": WAITS, "dump_1": WAITS})
    assert find_hang(read_job(tmp_path)).verdict == "unknown"
    assert find_hang(read_job(tmp_path, 3)).missing_ranks == (2,)


def test_an_all_gather_says_how_many_ranks_there_are(tmp_path):
    gathered = entry(1, retired=True, kind="all_gather") | {"output_sizes": [[3, 4]]}
    waits = dump(gathered, entry(2, retired=False))
    write(tmp_path, {"dump_0": waits, "dump_1": waits})
    assert find_hang(read_job(tmp_path)).missing_ranks == (2,)


def test_two_that_did_not_enter_are_named_only_when_stacks_say_that_neither_waits(tmp_path):
    write(tmp_path, {"dump_0": WAITS, "dump_1": LATE, "dump_2": LATE, "dump_3": WAITS})
    report = find_hang(read_job(tmp_path))
    assert (report.missing_ranks, report.suspects, report.verdict) == ((), (1, 2), "unknown")
    write(tmp_path, {"dump_1.txt": INSIDE, "dump_2.txt": OUTSIDE})
    report = find_hang(read_job(tmp_path))
    assert (report.missing_ranks, report.hidden_waits) == ((2,), (1,))
    write(tmp_path, {"dump_1.txt": OUTSIDE})
    assert find_hang(read_job(tmp_path)).missing_ranks == (1, 2)


def test_own_code_may_be_a_wait_in_a_job_that_sends_messages(tmp_path):
    sent = dump(entry(1, retired=True, op=3))
    write(tmp_path, {"dump_0": WAITS, "dump_1": sent, "dump_2": LATE, "dump_3": WAITS})
    write(tmp_path, {f"dump_{rank}.txt": OUTSIDE for rank in (1, 2)})
    assert all(state.whereabouts is None for state in read_job(tmp_path))
    assert find_hang(read_job(tmp_path)).suspects == (1, 2)


def test_a_wait_of_less_than_three_seconds_is_no_hang(tmp_path):
    report = find_hang(read_job(write(tmp_path, {"dump_0": WAITS, "dump_1": LATE}, seconds=1)))
    assert (report.verdict, report.missing_ranks, report.waits) == ("nobody", (), ())


def test_an_operation_that_ended_in_its_timeout_was_a_wait(tmp_path):
    gave_up = dump(entry(1, retired=True), entry(2, retired=True))
    write(tmp_path, {"dump_0": gave_up, "dump_1": LATE, "dump_2": gave_up}, seconds=1801)
    report = find_hang(read_job(tmp_path))
    assert (report.missing_ranks, report.roots[0].blocks) == ((1,), (0, 2))


def test_dumps_of_different_moments_name_nobody(tmp_path):
    later = dump(*(entry(seq, retired=True) for seq in range(1, 30)))
    write(tmp_path, {"dump_0": later, "dump_2": later})
    write(tmp_path, {"dump_1": WAITS}, seconds=0)
    report = find_hang(read_job(tmp_path))
    assert (report.verdict, report.missing_ranks) == ("nobody", ())


def test_a_contradiction_without_a_proof_of_movement_is_unknown(tmp_path):
    later = dump(entry(1, retired=True), entry(2, retired=True))
    report = find_hang(read_job(write(tmp_path, {"dump_0": later, "dump_1": LATE})))
    assert (report.verdict, report.missing_ranks) == ("unknown", ())
    assert "rank 0 left operation 2 of group 0, which rank 1 had not entered" in report.note


def test_the_one_that_entered_another_operation_is_named(tmp_path):
    other = dump(entry(1, retired=True), entry(2, retired=False, kind="barrier", sizes=()))
    write(tmp_path, {"dump_0": WAITS, "dump_1": other, "dump_2": WAITS})
    (root,) = find_hang(read_job(tmp_path)).roots
    assert (root.rank, root.cause, root.missing_seq) == (1, "mismatched", 2)


def test_of_two_that_differ_neither_is_named(tmp_path):
    other = dump(entry(1, retired=True), entry(2, retired=False, kind="broadcast"))
    report = find_hang(read_job(write(tmp_path, {"dump_0": WAITS, "dump_1": other})))
    assert (report.missing_ranks, report.deadlocks) == ((), ((0, 1),))


def page(answers):
    parts = [
        f"<h2>Rank {rank}: http://h:1/handler/x?</h2>\n"
        + ("" if body else "<p>Failed to fetch: status=408</p>\n")
        + f"<pre>{body or 'Timeout'}</pre>\n"
        for rank, body in answers.items()
    ]
    return "<!doctype html>\n<h1>FlightRecorder</h1>\n" + "".join(parts)


def test_a_saved_page_of_the_debug_server_holds_every_rank(tmp_path):
    write(tmp_path, {"fr_trace_json.html": page({0: WAITS, 1: LATE, 2: WAITS})})
    assert find_hang(read_job(tmp_path)).missing_ranks == (1,)


def test_a_rank_that_did_not_answer_the_debug_server_is_silent(tmp_path):
    write(tmp_path, {"page.html": page({0: WAITS, 1: WAITS, 2: None})})
    (root,) = find_hang(read_job(tmp_path)).roots
    assert (root.rank, root.cause) == (2, "silent")


def test_the_last_stacks_that_the_debug_server_wrote_count(tmp_path):
    def stacks(first, second):
        return f"=== Rank 1: http://h:1/x? ===\n{first}\n=== Rank 2: http://h:2/x? ===\n{second}\n"

    write(tmp_path, {"p.html": page({0: WAITS, 1: LATE, 2: LATE, 3: WAITS})})
    write(tmp_path, {"stacks_20261123_004941.txt": stacks(OUTSIDE, INSIDE)})
    assert find_hang(read_job(tmp_path)).missing_ranks == (1,)
    write(tmp_path, {"stacks_20261123_005041.txt": stacks(INSIDE, OUTSIDE)})
    assert find_hang(read_job(tmp_path)).missing_ranks == (2,)
    assert [state.whereabouts for state in read_job(tmp_path)][1] is Whereabouts.INSIDE


@pytest.mark.parametrize("body", ["", "<html>", page({0: None})])
def test_a_page_without_a_recorder_is_refused(tmp_path, body):
    write(tmp_path, {"page.html": body})
    with pytest.raises(BadDataError, match="no Flight Recorder dump"):
        read_job(tmp_path)


def test_a_broken_recorder_in_a_page_is_refused_with_the_pages_name(tmp_path):
    write(tmp_path, {"page.html": page({0: '{"pg_config": {}'})})
    with pytest.raises(BadDataError, match=r"page\.html"):
        read_job(tmp_path)


def test_a_dump_that_is_still_being_written_is_waited_for(tmp_path):
    write(tmp_path, {"dump_0": WAITS, "dump_1.partial": ""})
    with pytest.raises(BadDataError, match=r"dump_1\.partial is still being written"):
        read_job(tmp_path)


def test_a_rank_that_entered_nothing_is_missed_beside_one_that_entered_less(tmp_path):
    waits = dump(entry(1, retired=True, kind="broadcast"), entry(2, retired=False))
    less = dump(entry(1, retired=True, kind="broadcast"))
    write(tmp_path, {"dump_0": waits, "dump_1": less, "dump_2": dump(), "dump_3": waits})
    write(tmp_path, {f"dump_{rank}.txt": OUTSIDE for rank in (1, 2)})
    assert find_hang(read_job(tmp_path)).missing_ranks == (1, 2)
