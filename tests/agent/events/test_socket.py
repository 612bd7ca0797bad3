import os
import socket
import stat
import threading
import time

import pytest

from ingero.agent.events.socket import LocalEventServer, open_listener
from ingero.errors import ConfigError, IngeroError
from ingero.testing.open_files import no_more_files
from ingero.wire.uds import StragglerResolved, StragglerState, decode_message


def state(event_id="e1", node="n1", score=0.4):
    return StragglerState(
        node_id=node,
        cluster_id="c1",
        score=score,
        threshold=0.9,
        detection_mode="fleet",
        dominant_signal="throughput",
        timestamp="2026-01-01T00:00:00Z",
        event_id=event_id,
        rank=0,
        world_size=8,
    )


def resolved(event_id="e1", node="n1"):
    return StragglerResolved(
        node_id=node, cluster_id="c1", timestamp="2026-01-01T00:00:01Z", event_id=event_id
    )


class Reader:
    def __init__(self, path):
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connection.settimeout(30)
        self.connection.connect(str(path))
        self.file = self.connection.makefile("rb")

    def next(self):
        return decode_message(self.file.readline())

    def close(self):
        self.file.close()
        self.connection.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.sock"


@pytest.fixture
def served(path):
    with open_listener(path, -1) as (listener, warning):
        assert not warning
        stream = LocalEventServer(listener, queue_limit=8)
        thread = threading.Thread(target=stream.run)
        thread.start()
        yield stream
        stream.close()
        thread.join(120)
        assert not thread.is_alive()


def join(stream, path):
    """A reader that the stream knows of: a marker published after the connect must arrive."""
    reader = Reader(path)
    stream.publish(state("open"))
    while reader.next().event_id != "open":
        pass
    return reader


def test_every_reader_gets_every_message(served, path):
    readers = [Reader(path) for _ in range(3)]
    served.publish(state("e1"))
    for reader in readers:
        assert reader.next().event_id == "e1"  # live, or replayed to whoever was accepted later
    served.publish(state("e1", score=0.3))
    served.publish(resolved("e1"))
    for reader in readers:
        assert reader.next() == state("e1", score=0.3)
        assert reader.next() == resolved("e1")
        reader.close()


def test_a_late_reader_is_told_of_the_open_episodes_and_of_no_closed_one(served, path):
    served.publish(state("e1", node="n1"))
    served.publish(state("e1", node="n1", score=0.2))
    served.publish(state("e2", node="n2"))
    served.publish(resolved("e2", node="n2"))
    reader = Reader(path)
    assert reader.next() == state("e1", node="n1", score=0.2)
    served.publish(resolved("e1", node="n1"))
    assert reader.next() == resolved("e1", node="n1")
    reader.close()


def test_a_slow_reader_loses_its_own_messages_and_nobody_elses(served, path):
    slow, quick = join(served, path), Reader(path)
    quick.next()
    n_messages = 20_000  # more than any socket buffer holds
    for number in range(n_messages):
        served.publish(state(f"e{number}"))
        assert quick.next().event_id == f"e{number}"
    assert served.counts.n_dropped > 0
    served.publish(resolved())
    seen = []
    while len(seen) + served.counts.n_dropped < n_messages + 1:
        seen.append(slow.next().event_id)
    assert seen == sorted(seen, key=lambda name: int(name[1:]) if name[1:].isdigit() else -1)
    slow.close()
    quick.close()


def test_a_reader_that_goes_away_harms_nobody(served, path):
    gone, other = join(served, path), join(served, path)
    gone.close()
    for number in range(50):
        served.publish(state(f"e{number}"))
        while (seen := other.next().event_id) == "open":
            pass
        assert seen == f"e{number}"
    other.close()


def test_a_reader_for_whom_no_descriptor_is_left_waits_and_keeps_no_processor_busy(served, path):
    join(served, path).close()  # it has what it needs itself
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with no_more_files():
        began_s, used_s = time.monotonic(), time.process_time()
        connection.connect(str(path))
        while time.monotonic() < began_s + 1:
            time.sleep(0.1)
        used_s = time.process_time() - used_s
    assert used_s < 0.2
    connection.settimeout(30)
    served.publish(state("open"))
    with connection, connection.makefile("rb") as file:
        assert decode_message(file.readline()).event_id == "open"


def test_messages_without_a_reader_are_counted(served):
    served.publish(state())
    assert served.counts.n_without_reader == 1


def test_the_socket_is_private_and_goes_with_its_owner(path):
    umask = os.umask(0)
    try:
        with open_listener(path, -1):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
    finally:
        os.umask(umask)
    assert not path.exists()


def test_a_group_of_ours_may_read(path):
    with open_listener(path, os.getgid()) as (_, warning):
        assert not warning
        assert stat.S_IMODE(path.stat().st_mode) == 0o770
        assert path.stat().st_gid == os.getgid()


def test_a_leftover_socket_is_replaced(path):
    leftover = socket.socket(socket.AF_UNIX)
    leftover.bind(str(path))
    leftover.close()
    with open_listener(path, -1):
        Reader(path).close()


def test_a_living_socket_is_never_taken(path):
    with open_listener(path, -1):
        with pytest.raises(ConfigError, match="already listens"), open_listener(path, -1):
            pass
        Reader(path).close()


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_no_socket_is_refused_and_kept(path, kind, tmp_path):
    if kind == "file":
        path.write_text("mine")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a socket"), open_listener(path, -1):
        pass
    assert path.is_symlink() or path.exists()


def test_a_path_without_its_directory_says_so(tmp_path):
    with (
        pytest.raises(IngeroError, match="cannot listen"),
        open_listener(tmp_path / "no" / "s", -1),
    ):
        pass
