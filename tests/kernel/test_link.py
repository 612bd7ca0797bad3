"""The link whose delay can be turned up, between two real network namespaces."""

import os
import socket
import subprocess
import time
from contextlib import contextmanager

import pytest

from ingero.sim.cluster.cleanup import open_cleanup
from ingero.sim.cluster.hosts import open_cluster
from ingero.units import NS_PER_MS

pytestmark = pytest.mark.kernel
ECHO = (
    "import socket; s = socket.create_server(('', 7)); print(flush=True); c, _ = s.accept()\n"
    "while data := c.recv(64): c.sendall(data)"
)


@contextmanager
def echo_in(host, address):
    """A connection to a process in the host that sends back what it gets."""
    with subprocess.Popen([*host.prefix, "python3", "-c", ECHO], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        with socket.create_connection((address, 7)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield connection


def round_trip_ns(connection):
    began_ns = time.monotonic_ns()
    connection.sendall(b"hello")
    assert connection.recv(64) == b"hello"
    return time.monotonic_ns() - began_ns


def test_frames_take_as_long_as_the_link_was_set_to_each_way():
    with open_cleanup() as cleanup, open_cluster(2, cleanup, slowable={1}) as cluster:
        net = f"198.18.{os.getpid() % 250}"
        with echo_in(cluster.hosts[1], f"{net}.3") as slow, echo_in(cluster.hosts[0], f"{net}.2"):
            quick_ns = min(round_trip_ns(slow) for _ in range(10))
            cluster.hosts[1].link.delay(30)
            round_trip_ns(slow)  # frames on their way know nothing of it
            late_ns = min(round_trip_ns(slow) for _ in range(3))
    assert quick_ns < late_ns
    assert late_ns >= 60 * NS_PER_MS
