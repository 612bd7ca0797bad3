"""The link whose delay can be turned up, between two real network namespaces."""

import os
import socket
import subprocess
import threading
import time
from contextlib import contextmanager

import pytest

from ingero.agent.diagnosis.connections import look_at_traffic
from ingero.recording.causal.transfers import find_link_causes
from ingero.sim.cluster.cleanup import open_cleanup
from ingero.sim.cluster.hosts import open_cluster
from ingero.units import NS_PER_MS, NS_PER_S

pytestmark = pytest.mark.kernel
ECHO = (
    "import socket; s = socket.create_server(('', 7)); print(flush=True); c, _ = s.accept()\n"
    "while data := c.recv(64): c.sendall(data)"
)


@contextmanager
def echoing_in(host):
    """A process in the host that sends back to one other what it gets."""
    with subprocess.Popen([*host.prefix, "python3", "-c", ECHO], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            yield
        finally:
            process.kill()


@contextmanager
def echo_in(host, address):
    """A connection to such a process."""
    with echoing_in(host), socket.create_connection((address, 7)) as connection:
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


TALK = """
import socket, sys, time
asked = [socket.create_connection((address, 7)) for address in sys.argv[1:]]
print(flush=True)
while True:
    for connection in asked:
        connection.sendall(b"x" * 64)
        connection.recv(64)
    time.sleep(0.01)
"""


@contextmanager
def talking_from(host, *addresses):
    """A process in a host that asks two others in turns and waits for their answers."""
    command = [*host.prefix, "python3", "-c", TALK, *addresses]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


def test_connections_of_a_process_tell_to_which_host_packets_are_late():
    with open_cleanup() as cleanup, open_cluster(3, cleanup, slowable={1}) as cluster:
        late, quick = (f"198.18.{os.getpid() % 250}.{n}" for n in (3, 4))
        with (
            echoing_in(cluster.hosts[1]),
            echoing_in(cluster.hosts[2]),
            talking_from(cluster.hosts[0], late, quick) as pid,
        ):
            cluster.hosts[1].link.delay(30)
            time.sleep(1)  # until round trips of before are forgotten
            traffic = look_at_traffic(pid, threading.Event())
    assert traffic.reason == ""
    assert traffic.hosts.keys() == {late, quick}
    assert traffic.hosts[late].rtt_ns >= 50 * NS_PER_MS > traffic.hosts[quick].rtt_ns
    assert traffic.hosts[late].busy_ns > 2 * NS_PER_S > traffic.hosts[quick].busy_ns
    (cause,) = find_link_causes(traffic).causes
    assert (cause.kind, cause.evidence[0].partition(":")[0]) == ("network-delay", f"to {late}")
    assert cause.share > 0.8
