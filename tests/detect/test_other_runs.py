"""Dumps of an earlier run beside those of the present one: nobody is named for them, and nothing is called over."""

import os

import pytest
from tests.wire.flight_recorder.nccl_recorder import CREATED_NS, NcclRecorder

from ingero.detect.hang import find_hang
from ingero.units import NS_PER_S
from ingero.wire.flight_recorder.job import read_job

HOUR_NS = 3600 * NS_PER_S
DAY_NS = 24 * HOUR_NS


def write(folder, rank, n_ranks, n_done, *, waits, late_ns=0, first_id=0, stood_s=700):
    """A rank that finished so many all-reduces, the first so late, and may wait in one more."""
    one = NcclRecorder(rank, n_ranks, first_id=first_id, created_ns=CREATED_NS + late_ns)
    one.collective_seq = first_id
    for _ in range(n_done):
        one.all_reduce()
    if waits:
        one.all_reduce(is_done=False)
    one.write(folder)
    written_ns = CREATED_NS + late_ns + stood_s * NS_PER_S
    os.utime(folder / f"dump_{rank}", ns=(written_ns, written_ns))


@pytest.mark.parametrize(
    ("n_done", "waits", "n_old", "old_waits"),
    [
        (80, True, 50, True),  # it seemed that the job had moved on and that nobody hangs
        (50, True, 51, False),  # it seemed that the old one's peers had never left what it left
        (50, False, 50, True),  # it seemed that the old one's peers had never arrived
    ],
)
def test_a_rank_that_left_a_dump_of_an_earlier_run_alone_decides_nothing(
    tmp_path, n_done, waits, n_old, old_waits
):
    for rank in range(3):
        write(tmp_path, rank, 4, n_done, waits=waits, late_ns=DAY_NS)
    write(tmp_path, 3, 4, n_old, waits=old_waits)
    report = find_hang(read_job(tmp_path))
    assert (report.verdict, report.missing_ranks, report.suspects) == ("unknown", (), ())
    assert report.note.startswith("rank 3 entered operation ")
    assert (
        "1 d before rank 2 did: its dump is of an earlier run, then remove it, or its clock is off"
        in report.note
    )
    (tmp_path / "dump_3").unlink()
    report = find_hang(read_job(tmp_path))
    assert report.missing_ranks == ((3,) if waits else ())


def test_default_groups_of_other_members_are_of_other_runs(tmp_path):
    for rank in range(3):
        write(tmp_path, rank, 3, 20, waits=False)
    write(tmp_path, 3, 4, 50, waits=True)
    report = find_hang(read_job(tmp_path))
    assert (report.verdict, report.missing_ranks) == ("unknown", ())
    assert report.note == (
        "the default group of rank 3 has other members than that of rank 0: their dumps are of different runs or jobs, keep those of one"
    )
    (tmp_path / "dump_3").unlink()
    assert find_hang(read_job(tmp_path)).verdict == "nobody"


def test_a_rank_that_came_late_to_an_operation_or_whose_clock_is_off_is_of_the_same_run(tmp_path):
    for rank in (0, 2):
        write(tmp_path, rank, 3, 50, waits=True)
    write(tmp_path, 1, 3, 50, waits=False, late_ns=HOUR_NS // 2)
    assert find_hang(read_job(tmp_path)).missing_ranks == (1,)


def test_an_older_dump_does_not_say_of_ranks_that_stand_that_they_do_not(tmp_path):
    """The recorders keep no operation in common."""
    for rank in range(3):
        write(tmp_path, rank, 4, 80, waits=True, late_ns=DAY_NS, first_id=1000)
    write(tmp_path, 3, 4, 50, waits=False)
    report = find_hang(read_job(tmp_path))
    assert (report.verdict, report.missing_ranks, report.suspects) == ("unknown", (), (3,))
    assert (
        "rank 3 had not entered when it was looked at: its dump is older than what others wait in"
        in report.note
    )
