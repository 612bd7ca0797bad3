"""What the reader makes of a ring: its own process's, another's, a spoiled one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ingero.agent.capture.kernel import libc
from ingero.agent.collectives.plugin_ring import HEADER, PLACE, RECORD, find_ring, find_rings_of

N_COMMS = 128
RECORDS_AT = HEADER.itemsize + N_COMMS * PLACE.itemsize
WRITING = 1 << 63


@pytest.fixture
def ring_file(join, rings):
    """A communicator, the path of the process's ring, and the ring."""
    comm = join()
    (path,) = rings.glob("*/*.ring")
    ring = find_ring(path, os.geteuid())
    yield comm, path, ring
    ring.close()


def patch(path, at, data):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def set_stamp(path, position, stamp):
    patch(path, RECORDS_AT + position * RECORD.itemsize, np.uint64(stamp).tobytes())


def test_a_ring_belongs_to_the_process_that_made_it(ring_file, rings):
    assert len(find_rings_of(os.getpid(), rings)) == 1
    assert find_rings_of(os.getppid(), rings) == {}
    assert find_rings_of(2**22 + 1, rings) == {}


OTHER = """
import sys
from tests.ncclprof.nccl import Plugin
comm = Plugin().init()
print(flush=True)
sys.stdin.read()
"""


def test_a_ring_of_a_process_that_has_the_same_pid_in_another_container_is_not_taken(rings):
    # With --ipc=host containers share /dev/shm, and the process of each sees itself as number 1.
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with other:
        other.stdout.readline()
        assert len(find_rings_of(other.pid, rings)) == 1
        (path,) = rings.glob("*/*.ring")
        path.rename(path.with_name(f"{os.getpid()}-1.ring"))
        assert find_rings_of(os.getpid(), rings) == {}
        other.stdin.close()


def test_no_folder_but_that_of_the_process_s_user_is_looked_into(ring_file, rings):
    # Everybody may make folders in /dev/shm: the agent would spend its time in them.
    _, path, _ = ring_file
    path.parent.rename(rings / f"ingero-nccl-{os.geteuid() + 1}")
    assert find_rings_of(os.getpid(), rings) == {}


def test_a_user_who_has_another_number_in_a_container_has_its_folder_by_that(rings):
    in_namespace = "unshare", "--user", "--map-user=5"
    if subprocess.run([*in_namespace, "true"], check=False).returncode:
        pytest.skip("this machine lets nobody make user namespaces")
    with subprocess.Popen(
        [*in_namespace, sys.executable, "-c", OTHER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        other.stdout.readline()
        assert [path.name for path in rings.iterdir()] == ["ingero-nccl-5"]
        assert len(find_rings_of(other.pid, rings)) == 1
        other.stdin.close()


IN_ROOT = """
import os, sys
from tests.ncclprof.nccl import Plugin
plugin = Plugin()
os.chroot(sys.argv[1])
os.chdir("/")
comm = plugin.init()
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the root directory")
def test_a_link_on_the_way_to_a_ring_leads_where_it_leads_the_process(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "rings").symlink_to("/scratch")
    with subprocess.Popen(
        [sys.executable, "-c", IN_ROOT, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"INGERO_NCCL_DIR": "/rings"},
    ) as other:
        assert other.stdout.readline() == b"\n"
        assert len(list(tmp_path.glob("scratch/*/*.ring"))) == 1
        rings = find_rings_of(other.pid, Path("/rings"))
        assert len(rings) == 1
        for ring in rings.values():
            ring.close()
        other.stdin.close()


def test_names_that_are_known_are_not_opened_again(ring_file, rings):
    _, path, _ = ring_file
    assert find_rings_of(os.getpid(), rings, frozenset({path.name})) == {}


def test_a_file_of_another_user_is_not_believed(ring_file):
    _, path, _ = ring_file
    assert find_ring(path, os.geteuid() + 1) is None


def test_a_dead_process_s_file_is_not_read(join, rings, tmp_path):
    join()
    (path,) = rings.glob("*/*.ring")
    copy = tmp_path / "copy.ring"
    copy.write_bytes(path.read_bytes())
    assert find_ring(copy, os.geteuid()) is None  # nobody holds its lock


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("magic", 1),
        ("version", 2),
        ("record_bytes", 96),
        ("n_records", 0),
        ("n_records", 1 << 20),
        ("n_comms", 1 << 13),
        ("head", (1 << 40) + 1),
        ("n_crowded", (1 << 64) - 1),
    ],
)
def test_a_file_that_is_no_ring_of_ours_is_left_alone(ring_file, name, value):
    _, path, _ = ring_file
    kind, at = HEADER.fields[name][:2]
    patch(path, at, np.array(value, kind).tobytes())
    assert find_ring(path, os.geteuid()) is None


@pytest.mark.parametrize("name", ["head", "n_crowded", "n_unended", "n_untimed"])
def test_numbers_that_cannot_be_true_are_no_loss_of_so_many(ring_file, name):
    # What is told of the node must still fit the 64 bits of a metric.
    comm, path, ring = ring_file
    kind, at = HEADER.fields[name][:2]
    for _ in range(3):
        comm.play(100, 200)
    true = path.read_bytes()[at : at + 8]
    patch(path, at, np.array((1 << 64) - 1, kind).tobytes())
    assert [len(ring.read()) for _ in range(3)] == [0, 0, 0]
    assert ring.count() == 0
    assert ring.counts.n_lost == 1
    patch(path, at, true)
    assert len(ring.read()) == 3


def test_what_is_no_file_is_left_alone(tmp_path, ring_file):
    _, path, _ = ring_file
    os.mkfifo(tmp_path / "fifo.ring")
    (tmp_path / "link.ring").symlink_to(path)
    (tmp_path / "short.ring").write_bytes(b"INGNCCL1")
    for name in ("fifo.ring", "link.ring", "short.ring", "none.ring"):
        assert find_ring(tmp_path / name, os.geteuid()) is None, name


IN_OPEN = 0x20


def test_what_is_no_file_is_not_even_opened(tmp_path):
    # Whose container may make devices could have us open a watchdog, which then restarts the machine.
    path = tmp_path / "1-1.ring"
    os.mkfifo(path)
    opens = libc.call("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        libc.call("inotify_add_watch", opens, os.fsencode(path), IN_OPEN)
        assert find_ring(path, os.geteuid()) is None
        with pytest.raises(BlockingIOError):
            os.read(opens, 4096)
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        assert os.read(opens, 4096)
    finally:
        os.close(opens)


def test_a_file_that_its_owner_cuts_short_gives_nothing(ring_file):
    comm, path, ring = ring_file
    comm.play(100, 200)
    os.truncate(path, RECORDS_AT)
    assert len(ring.read()) == 0
    os.truncate(path, 50)
    assert len(ring.read()) == 0
    assert len(ring.read_communicators()) == 0
    # The plug-in has it mapped: give it its pages back before it touches them.
    os.truncate(path, RECORDS_AT + 4096 * RECORD.itemsize)


def test_a_record_that_is_still_being_written_is_waited_for(ring_file):
    comm, path, ring = ring_file
    for i in range(4):
        comm.play(100 + i, 200)
    set_stamp(path, 2, 3 | WRITING)
    assert ring.read()["seq"].tolist() == [1, 2]
    set_stamp(path, 2, 3)
    assert ring.read()["seq"].tolist() == [3, 4]
    assert ring.counts.n_lost == 0


def test_a_record_that_is_never_finished_is_given_up_and_counted(ring_file):
    comm, path, ring = ring_file
    for i in range(4):
        comm.play(100 + i, 200)
    set_stamp(path, 2, 3 | WRITING)
    assert ring.read()["seq"].tolist() == [1, 2]
    assert ring.read()["seq"].tolist() == [4]
    assert ring.counts.n_broken == 1
    comm.play(100, 200)
    assert ring.read()["seq"].tolist() == [5]


def test_a_thread_held_up_for_a_round_neither_is_waited_for_nor_spoils_a_later_record(ring_file):
    comm, path, ring = ring_file
    set_stamp(path, 0, 1 | WRITING)  # as if it stood between claiming and publishing
    for i in range(4097):
        comm.play(100 + i, 200 + i, n_channels=1)
    assert np.fromfile(path, RECORD, 1, offset=RECORDS_AT)["stamp"].tolist() == [1 | WRITING]
    set_stamp(path, 0, 1)
    rows = ring.read()
    assert rows["seq"].tolist() == list(range(2, 4097))
    assert ring.counts.n_overwritten == 1
    assert len(ring.read()) == 0
    assert ring.counts.n_broken == 1  # the 4097th found no room


def test_reading_follows_the_writer_round_and_round(ring_file):
    comm, _, ring = ring_file
    seen = []
    for n in (3000, 3000, 1, 4096, 100):
        for i in range(n):
            comm.play(100 + i, 200 + i, n_channels=1)
        seen += ring.read()["seq"].tolist()
    assert seen == list(range(1, 3000 + 3000 + 1 + 4096 + 100 + 1))
    assert ring.counts.n_lost == 0


def test_what_was_written_over_before_anybody_read_is_no_loss(join, rings):
    comm = join()
    for i in range(4100):
        comm.play(100 + i, 200 + i)
    (path,) = rings.glob("*/*.ring")
    with find_ring(path, os.geteuid()) as ring:
        assert ring.read()["seq"].tolist() == list(range(5, 4101))
        assert ring.counts.n_lost == 0
        for i in range(4097):
            comm.play(100 + i, 200 + i)
        assert len(ring.read()) == 4096
        assert ring.counts.n_overwritten == 1


def test_what_a_ring_that_is_younger_than_its_reader_lost_before_it_was_found_is_counted(
    join, rings
):
    since_ns = time.monotonic_ns()
    comm = join()
    for i in range(4100):
        comm.play(100 + i, 200 + i)
    (path,) = rings.glob("*/*.ring")
    with find_ring(path, os.geteuid(), since_ns) as ring:
        assert ring.read()["seq"].tolist() == list(range(5, 4101))
        assert ring.counts.n_overwritten == 4
    with find_ring(path, os.geteuid(), time.monotonic_ns()) as ring:
        ring.read()
        assert ring.counts.n_lost == 0
