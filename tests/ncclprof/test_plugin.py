"""The built plug-in under a player of NCCL's side.

What it asks for, what it tells, and what it does when things go wrong.
"""

import ctypes
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from tests.ncclprof.nccl import COLL, COLL_API, GROUP, KERNEL_CH, P2P, Plugin

from ingero.agent.collectives.plugin import INTERFACES, build_setting, find_plugin
from ingero.agent.collectives.plugin_ring import HEADER, PLACE, RECORD
from ingero.model.collectives import CollectiveOp


def read_communicators(ring):
    return {int(row["comm"]): row for row in ring.read_communicators()}


def test_it_has_the_documented_symbols_and_its_name():
    library = ctypes.CDLL(str(find_plugin()))
    for version in INTERFACES:
        assert Plugin(version).interface.name == b"Ingero"
    with pytest.raises(ValueError, match="ncclProfiler_v3"):
        ctypes.c_void_p.in_dll(library, "ncclProfiler_v3")


def test_it_asks_for_collectives_and_kernel_channels_alone(join, plugin, open_ring):
    assert join(plugin).mask == COLL | KERNEL_CH
    assert open_ring().api == plugin.version


def test_a_collective_is_told_once_with_host_and_device_times(join, plugin, open_ring):
    comm = join(plugin, comm=0xFEED_0000_0000_0001, rank=3, n_ranks=8)
    before_ns = time.monotonic_ns()
    parent = comm.enqueue(
        n_channels=2, func=b"ReduceScatter", count=1 << 20, datatype=b"ncclBfloat16"
    )
    enqueued_ns = time.monotonic_ns()
    ring = open_ring()
    first = comm.begin_channel(parent, 0, 5_000)
    second = comm.begin_channel(parent, 1, 4_000)
    comm.end_channel(second, 9_000)
    assert len(ring.read()) == 0  # a channel is still running
    comm.end_channel(first, 8_000)
    (row,) = ring.read()
    assert (row["comm"], row["seq"], row["rank"], row["n_ranks"]) == (
        0xFEED_0000_0000_0001,
        1,
        3,
        8,
    )
    assert (row["n_bytes"], row["op"]) == (2 << 20, CollectiveOp.REDUCE_SCATTER)
    assert (row["gpu_start_ns"], row["gpu_stop_ns"], row["n_channels"]) == (4_000, 9_000, 2)
    assert before_ns <= row["host_start_ns"] <= row["host_stop_ns"] <= enqueued_ns
    assert enqueued_ns <= row["host_seen_ns"] <= time.monotonic_ns()
    assert len(ring.read()) == 0


def test_channels_may_end_before_nccl_has_enqueued_the_collective(join, open_ring):
    comm = join()
    coll = {"func": b"AllReduce", "count": 1, "datatype": b"ncclInt8", "nChannels": 1}
    parent = comm.start(COLL, coll=coll)
    comm.end_channel(comm.begin_channel(parent, 0, 100), 200)
    ring = open_ring()
    assert len(ring.read()) == 0
    comm.stop(parent)
    assert ring.read()["gpu_stop_ns"].tolist() == [200]


def test_sequence_numbers_count_every_collective_of_a_communicator(join, open_ring):
    one, other = join(comm=1), join(comm=2)
    for comm, func in (
        (one, b"AllReduce"),
        (one, b"AllGather"),
        (other, b"AllReduce"),
        (one, b"Reduce"),
    ):
        comm.play(100, 200, func=func)
    rows = open_ring().read()
    # NCCL's own number, which the player always gives as 7, counts each function for itself.
    assert list(zip(rows["comm"].tolist(), rows["seq"].tolist(), strict=True)) == [
        (1, 1), (1, 2), (2, 1), (1, 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("func", "op"),
    [
        (b"AllReduce", CollectiveOp.ALL_REDUCE),
        (b"AllGather", CollectiveOp.ALL_GATHER),
        (b"ReduceScatter", CollectiveOp.REDUCE_SCATTER),
        (b"Broadcast", CollectiveOp.BROADCAST),
        (b"Reduce", CollectiveOp.REDUCE),
        (b"AlltoAll", CollectiveOp.ALL_TO_ALL),
        (b"SomethingNew", CollectiveOp.UNKNOWN),
        (None, CollectiveOp.UNKNOWN),
    ],
)
def test_operations_have_the_models_numbers(join, open_ring, func, op):
    join().play(100, 200, func=func)
    assert open_ring().read()["op"].tolist() == [op]


@pytest.mark.parametrize(
    ("datatype", "size"),
    [
        (b"ncclInt8", 1),
        (b"ncclUint32", 4),
        (b"ncclFloat64", 8),
        (b"ncclFloat16", 2),
        (b"ncclFloat8e4m3", 1),
    ],
)
def test_bytes_are_elements_times_their_size(join, open_ring, datatype, size):
    join().play(100, 200, count=1000, datatype=datatype)
    assert open_ring().read()["n_bytes"].tolist() == [1000 * size]


@pytest.mark.parametrize("told", [{"datatype": b"Unknown"}, {"datatype": None}, {"count": 1 << 63}])
def test_bytes_that_cannot_be_known_are_told_as_such(join, open_ring, told):
    join().play(100, 200, **told)
    assert open_ring().read()["n_bytes"].tolist() == [2**64 - 1]


def test_what_was_not_asked_for_gets_no_handle_and_does_no_harm(join, plugin, open_ring):
    comm = join(plugin)
    group = comm.start(GROUP)
    # NCCL 2.27, whose newest version is 4, tells of a collective only where its group has a handle.
    assert (group is not None) == (plugin.version == 4)
    comm.stop(group)
    if plugin.version > 4:
        assert comm.start(COLL_API) is None
    send = comm.start(P2P)
    assert send is None
    assert comm.begin_channel(send, 0, 5) is None
    comm.stop(None)
    comm.record(None, 22)
    ring = open_ring()
    assert len(ring.read()) == 0
    assert ring.counts.n_lost == 0


def test_where_the_process_is_can_be_seen_while_a_collective_hangs(join, open_ring):
    comm = join(comm=5, rank=2, n_ranks=16)
    comm.play(100, 200)
    before_ns = time.monotonic_ns()
    hung = comm.enqueue(func=b"AllGather", n_channels=1)
    ring = open_ring()
    place = read_communicators(ring)[5]
    assert (place["rank"], place["n_ranks"], place["op"]) == (2, 16, CollectiveOp.ALL_GATHER)
    assert (place["entered"], place["left"]) == (2, 1)
    assert before_ns <= place["entry_ns"] <= time.monotonic_ns()
    comm.end_channel(comm.begin_channel(hung, 0, 300), 400)
    assert read_communicators(ring)[5]["left"] == 2


def test_collectives_without_channels_are_counted_and_have_no_times(join, open_ring):
    comm = join()
    comm.enqueue(n_channels=0)
    ring = open_ring()
    assert ring.count() == 0
    assert ring.counts.n_untimed == 1
    assert ring.read_communicators()["left"].tolist() == [0]


def test_handles_that_nccl_uses_too_late_are_refused_and_counted(join, open_ring, rings):
    comm = join()
    parent = comm.enqueue(n_channels=1)
    channel = comm.begin_channel(parent, 0, 100)
    comm.end_channel(channel, 200)
    for _ in range(2):
        comm.end_channel(channel, 999)
        comm.stop(parent)
    assert comm.begin_channel(parent, 0, 1) is None
    ring = open_ring()
    assert ring.read()["gpu_stop_ns"].tolist() == [200]
    (path,) = rings.glob("*/*.ring")
    assert np.fromfile(path, HEADER, 1)["n_stray"].tolist() == [5]


def test_what_an_aborted_communicator_left_is_counted(join, open_ring):
    stays, aborted = join(comm=1), join(comm=2)
    aborted.enqueue()
    aborted.begin_channel(aborted.enqueue(), 0, 5)
    ring = open_ring()
    aborted.finalize()
    aborted.context = None
    assert ring.count() == 0
    assert ring.counts.n_unended == 2
    assert set(read_communicators(ring)) == {1}
    stays.play(100, 200)
    assert ring.read()["comm"].tolist() == [1]


def test_a_collective_that_takes_long_is_told_whatever_ends_before_it(join, open_ring):
    comm = join()
    hung = comm.enqueue(n_channels=1)
    ring = open_ring()
    for _ in range(2):
        for _ in range(4096):
            comm.play(100, 200, n_channels=1)
        assert len(ring.read()) == 4096
    comm.end_channel(comm.begin_channel(hung, 0, 300), 400)
    (row,) = ring.read()
    assert (row["seq"], row["gpu_stop_ns"]) == (1, 400)
    assert ring.counts.n_lost == 0


def test_a_collective_that_never_ends_gives_its_entry_up_in_the_end(join, open_ring):
    comm = join()
    hung = comm.enqueue(n_channels=1)
    ring = open_ring()
    for _ in range(16 * 4096 - 16):  # and the entry is passed over fifteen times
        comm.enqueue(n_channels=0)
    ring.count()
    assert ring.counts.n_unended == 0
    comm.enqueue(n_channels=0)
    ring.count()
    assert ring.counts.n_unended == 1
    assert comm.begin_channel(hung, 0, 300) is None
    assert ring.counts.n_crowded == 0


def test_too_many_at_once_are_counted_and_those_that_are_followed_are_told(join, open_ring):
    comm = join()
    under_way = [comm.enqueue(n_channels=1) for _ in range(4096)]
    assert comm.enqueue(n_channels=1) is None
    ring = open_ring()
    assert ring.count() == 0
    assert ring.counts.n_crowded == 1
    for parent in under_way:
        comm.end_channel(comm.begin_channel(parent, 0, 100), 200)
    assert ring.read()["seq"].tolist() == list(range(1, 4097))
    assert ring.read_communicators()["entered"].tolist() == [4097]


def test_communicators_beyond_the_table_are_timed_all_the_same(join, open_ring):
    comms = [join(comm=1000 + i) for i in range(130)]
    comms[-1].play(100, 200)
    ring = open_ring()
    assert len(ring.read_communicators()) == 128
    assert ring.read()["comm"].tolist() == [1129]
    assert (ring.counts.n_unplaced, ring.counts.n_lost) == (2, 0)


N_EACH = 400


def enqueue_all(comm, number, handed):
    for i in range(N_EACH):
        handed.append((comm.enqueue(count=number), 1_000_000 * (number + 1) + 10 * i))


def end_all(comm, handed):
    done = 0
    while done < N_EACH:
        if done == len(handed):
            time.sleep(0)
            continue
        parent, at_ns = handed[done]
        channels = [comm.begin_channel(parent, i, at_ns + i) for i in range(2)]
        for i, channel in enumerate(channels):
            comm.end_channel(channel, at_ns + 5 + i)
        done += 1


def test_threads_lose_and_mix_up_nothing(join, open_ring):
    """Eight communicators, each with a thread that enqueues and one that ends, as NCCL has them."""
    threads = []
    for number in range(8):
        comm, handed = join(comm=100 + number, rank=number, n_ranks=8), []
        threads += [
            threading.Thread(target=enqueue_all, args=(comm, number, handed)),
            threading.Thread(target=end_all, args=(comm, handed)),
        ]
    ring = open_ring()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = ring.read()
    assert len(rows) == 8 * N_EACH
    for number in range(8):
        mine = rows[rows["comm"] == 100 + number]
        starts = 1_000_000 * (number + 1) + 10 * np.arange(N_EACH)
        assert mine["seq"].tolist() == list(range(1, N_EACH + 1))
        assert mine["gpu_start_ns"].tolist() == starts.tolist()
        assert mine["gpu_stop_ns"].tolist() == (starts + 6).tolist()
        assert set(mine["n_bytes"].tolist()) == {4 * number}
        assert set(mine["rank"].tolist()) == {number}
    assert ring.counts.n_lost == 0


def test_nobody_needs_to_read_and_what_was_written_over_is_counted(join, open_ring):
    comm = join()
    ring = open_ring()
    for i in range(10_000):
        comm.play(100 + i, 200 + i, n_channels=1)
    rows = ring.read()
    assert rows["seq"].tolist() == list(range(10_000 - 4096 + 1, 10_001))
    assert ring.counts.n_overwritten == 10_000 - 4096


def test_the_file_goes_with_the_last_communicator_and_a_reader_keeps_what_was_in_it(
    join, rings, open_ring
):
    one, other = join(comm=1), join(comm=2)
    ring = open_ring()
    one.play(100, 200)
    one.finalize()
    other.play(300, 400)
    assert len(list(rings.glob("*/*.ring"))) == 1
    other.finalize()
    one.context = other.context = None
    assert not list(rings.glob("*/*"))
    assert ring.read()["comm"].tolist() == [1, 2]


DIES = """
import resource, signal
from tests.ncclprof.nccl import Plugin
plugin = Plugin()
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
plugin.init()
"""


def test_what_a_process_left_that_died_before_its_ring_had_a_name_is_removed_once_it_is_old(
    join, rings
):
    for _ in range(3):
        dead = subprocess.run([sys.executable, "-c", DIES], check=False)
        assert dead.returncode == -signal.SIGXFSZ
    old, locked, fresh = rings.glob("*/.*.wing")
    for path in (old, locked):
        os.utime(path, (time.time() - 100,) * 2)
    with locked.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        join()
    assert set(rings.glob("*/.*.wing")) == {locked, fresh}


def test_its_file_is_for_its_owner_alone(join, rings):
    join()
    (path,) = rings.glob("*/*")
    assert path.name.startswith(f"{os.getpid()}-")
    assert path.parent.name == f"ingero-nccl-{os.geteuid()}"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_size == HEADER.itemsize + 128 * PLACE.itemsize + 4096 * RECORD.itemsize


@pytest.mark.parametrize("spoil", ["link", "open to others", "no folder", "no room"])
def test_without_a_place_it_may_trust_it_says_so_once_and_nccl_goes_on(
    join, rings, monkeypatch, spoil
):
    folder = rings / f"ingero-nccl-{os.geteuid()}"
    if spoil == "link":
        (rings / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(rings / "elsewhere")
    elif spoil == "open to others":
        folder.mkdir()
        folder.chmod(0o770)
    elif spoil == "no folder":
        monkeypatch.setenv("INGERO_NCCL_DIR", str(rings / "none"))
    plugin = Plugin()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if spoil == "no room":  # as on a file system that is full
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        comm = join(plugin)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (comm.context, comm.mask) == (None, 0)
    (said,) = plugin.said
    assert said.startswith(b"Ingero: collectives are not timed")
    assert not list(rings.rglob("*ing"))


PLAYER = """
import sys
from tests.ncclprof.nccl import Plugin
comm = Plugin().init(comm=int(sys.argv[1]))
comm.play(100, 200)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start_player(rings):
    players = []

    def start(comm):
        player = subprocess.Popen(
            [sys.executable, "-c", PLAYER, str(comm)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        players.append(player)
        assert player.stdout.readline() == "ready\n"
        return player

    yield start
    for player in players:
        player.kill()
        player.communicate()


def test_files_of_killed_processes_are_removed_and_those_of_living_ones_stay(
    start_player, join, rings
):
    dead, living = start_player(1), start_player(2)
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    assert len(list(rings.glob("*/*.ring"))) == 2
    join()
    names = {path.name.split("-")[0] for path in rings.glob("*/*.ring")}
    assert names == {str(living.pid), str(os.getpid())}


FORKER = """
import json, os, sys
from pathlib import Path
from tests.ncclprof.nccl import Plugin

def count():
    return len(list(Path(sys.argv[1]).glob("*/*.ring")))

parent = Plugin().init(comm=1)
counts = [count()]
pid = os.fork()
if not pid:
    child = Plugin().init(comm=2)
    child.play(100, 200)
    n_both = count()
    child.finalize()
    os._exit(10 * n_both + count())
counts.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
parent.play(300, 400)
parent.finalize()
print(json.dumps([*counts, count()]))
"""


def test_a_fork_makes_a_ring_of_its_own_and_leaves_its_parents(rings):
    told = subprocess.run(
        [sys.executable, "-c", FORKER, str(rings)], check=True, capture_output=True, text=True
    ).stdout
    # The parent's; both, then the parent's again; none.
    assert json.loads(told) == [1, 21, 0]


def test_a_lock_says_that_the_writer_lives(join, rings):
    comm = join()
    (path,) = rings.glob("*/*.ring")
    with path.open("rb") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        comm.finalize()
        comm.context = None
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_the_setting_names_the_library():
    assert build_setting(find_plugin()) == f"NCCL_PROFILER_PLUGIN={find_plugin()}"
