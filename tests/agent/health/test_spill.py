"""Batches that wait on disk: what is kept, what is given up, and that each of these is counted."""

import os
import subprocess

import pytest

from ingero.agent.health.spill import Spill, SpillSettings, open_spill
from ingero.errors import RetryableError
from ingero.testing.clock import ManualClock
from ingero.testing.open_files import no_more_files
from ingero.units import NS_PER_S

BLOCK = 4096


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def opened(tmp_path, clock):
    """Opens the spill of one folder, as one agent after the other does."""
    spills = []

    def open_one(
        max_bytes=100 * BLOCK, max_age_ns=3600 * NS_PER_S, folder=tmp_path / "var" / "spill"
    ):
        for earlier in spills:
            earlier.close()
        spills.append(Spill(SpillSettings(folder, max_bytes, max_age_ns), clock))
        return spills[-1]

    yield open_one
    for one in spills:
        one.close()


def take_all(spill):
    found = []
    while (batch := spill.peek()) is not None:
        found.append(batch.body)
        spill.pop()
    return found


def test_nothing_is_made_on_disk_before_something_waits(opened, tmp_path):
    spill = opened()
    assert spill.peek() is None
    assert not (tmp_path / "var").exists()


def test_the_next_agent_finds_what_waited_in_order_with_when_and_how_much(opened, clock):
    spill = opened()
    for number in range(12):
        clock.advance(NS_PER_S)
        assert spill.put(b"%d" % number, n_items=number)
    spill.pop()
    following = opened()
    first = following.peek()
    assert (first.body, first.n_items) == (b"1", 1)
    assert clock.wall_ns() - first.wall_ns == 10 * NS_PER_S
    assert (following.n_batches, following.n_bytes) == (11, 11 * BLOCK)
    assert take_all(following) == [b"%d" % number for number in range(1, 12)]
    assert (following.n_batches, following.n_bytes) == (0, 0)


def test_beyond_its_size_the_oldest_go_and_their_items_are_counted(opened):
    spill = opened(max_bytes=3 * BLOCK)
    for number in range(5):
        spill.put(b"%d" % number, n_items=10 + number)
    assert spill.n_bytes == 3 * BLOCK
    assert spill.counts.n_expired_items == 10 + 11
    assert take_all(spill) == [b"2", b"3", b"4"]


def test_a_batch_that_never_fits_is_refused_and_told(opened):
    spill = opened(max_bytes=BLOCK)
    assert not spill.put(b"x" * 2 * BLOCK, 1)
    assert spill.counts.n_write_failures == 1
    assert "larger than allowed" in spill.counts.problem


def test_what_grew_too_old_is_not_sent_and_counted(opened, clock):
    spill = opened(max_age_ns=60 * NS_PER_S)
    spill.put(b"old", 5)
    clock.advance(50 * NS_PER_S)
    spill.put(b"young", 7)
    clock.advance(11 * NS_PER_S)
    assert spill.peek().body == b"young"
    assert spill.counts.n_expired_items == 5


@pytest.mark.parametrize("n_bytes", [0, 5, 12, 20])
def test_a_torn_or_damaged_batch_is_set_aside_and_costs_only_itself(opened, tmp_path, n_bytes):
    spill = opened()
    for body in (b"a" * 100, b"b" * 100, b"c" * 100):
        spill.put(body, 1)
    places = sorted((tmp_path / "var" / "spill").glob("[0-9]*"))
    places[1].write_bytes(places[1].read_bytes()[:n_bytes])
    assert take_all(opened()) == [b"a" * 100, b"c" * 100]
    assert places[1].with_suffix(".damaged").exists()


def test_a_damaged_batch_is_counted_and_named(opened, tmp_path):
    spill = opened()
    spill.put(b"a", 1)
    (place,) = (tmp_path / "var" / "spill").glob("[0-9]*")
    place.write_bytes(b"")
    assert spill.peek() is None
    assert spill.counts.n_damaged == 1
    assert str(place) in spill.counts.problem


def test_what_cannot_be_read_for_now_stays_the_oldest_and_is_told(opened):
    spill = opened()
    spill.put(b"a", 1)
    spill.put(b"b", 1)
    with no_more_files():
        with pytest.raises(RetryableError, match="Too many open files"):
            spill.peek()
        assert "Too many open files" in spill.counts.problem
    assert (spill.counts.n_read_failures, spill.counts.n_damaged) == (1, 0)
    assert take_all(spill) == [b"a", b"b"]


def test_no_room_is_made_while_the_oldest_cannot_be_read(opened):
    spill = opened(max_bytes=2 * BLOCK)
    spill.put(b"a", 1)
    spill.put(b"b", 1)
    with no_more_files():
        assert not spill.put(b"c", 1)
    assert (spill.counts.n_write_failures, spill.counts.n_expired_items) == (1, 0)
    assert take_all(spill) == [b"a", b"b"]


def test_a_batch_whose_file_is_gone_is_counted_and_costs_only_itself(opened, tmp_path):
    spill = opened()
    spill.put(b"a", 1)
    spill.put(b"b", 1)
    min((tmp_path / "var" / "spill").glob("[0-9]*")).unlink()
    assert take_all(spill) == [b"b"]
    assert spill.counts.n_damaged == 1


def test_what_another_release_wrote_is_set_aside(opened, tmp_path):
    spill = opened()
    spill.put(b"of this release", 1)
    spill.pop()
    spill._folder.write(b"\x09" + b"x" * 40)
    assert opened().peek() is None
    assert list((tmp_path / "var" / "spill").glob("*.damaged"))


def test_two_agents_do_not_share_a_folder_and_the_second_goes_on_without(opened, tmp_path, clock):
    opened().put(b"mine", 1)
    second = Spill(SpillSettings(tmp_path / "var" / "spill"), clock)
    assert not second.put(b"other", 1)
    assert "another process" in second.counts.problem
    assert second.counts.n_write_failures == 1
    assert second.peek() is None


def test_a_folder_that_cannot_be_made_is_told_and_tried_again(opened, tmp_path):
    (tmp_path / "var").write_text("a file")
    spill = opened()
    assert not spill.put(b"a", 1)
    assert spill.counts.problem
    (tmp_path / "var").unlink()
    assert spill.put(b"a", 1)
    assert spill.peek().body == b"a"


def test_a_full_disk_takes_nothing_loses_nothing_and_can_be_emptied(opened, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine mounts no tmpfs")
    try:
        spill = opened(folder=disk / "spill")
        n_stored = 0
        while spill.put(b"x" * BLOCK, 1):
            n_stored += 1
        assert "No space left" in spill.counts.problem
        assert spill.counts.n_write_failures == 1
        assert take_all(spill) == [b"x" * BLOCK] * n_stored
        assert spill.put(b"again", 1)
        spill.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_without_settings_there_is_none(clock):
    with open_spill(None, clock) as spill:
        assert spill is None
