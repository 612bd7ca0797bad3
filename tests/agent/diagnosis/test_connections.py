"""Connections of real processes on loopback: what of them is a process's own doing."""

import socket
import subprocess
import sys

from ingero.agent.diagnosis.connections import look_at_traffic

N_BEFORE = 200
TAKE = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as giver:
    _, (fd,), _, _ = socket.recv_fds(giver, 1, 1)
    with socket.socket(fileno=fd) as taken:
        taken.sendall(b"x")
        taken.recv(1)
        giver.sendall(b"x")
        giver.recv(1)
"""


def talk(one, other, times):
    for _ in range(times):
        one.sendall(b"x")
        other.sendall(other.recv(1))
        one.recv(1)


class Handover:
    """Between the two readings a connection is handed to a process."""

    def __init__(self, giver, client, server):
        self._giver, self._client, self._server = giver, client, server

    def wait(self, _seconds):
        socket.send_fds(self._giver, [b"x"], [self._client.fileno()])
        self._server.sendall(self._server.recv(1))
        self._giver.recv(1)


def test_of_a_connection_that_another_process_began_only_what_came_since_counts():
    listener = socket.create_server(("127.0.0.1", 0))
    giver, taker = socket.socketpair()
    with listener, giver, taker, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        command = [sys.executable, "-c", TAKE, str(taker.fileno())]
        with server, subprocess.Popen(command, pass_fds=[taker.fileno()]) as child:
            talk(client, server, N_BEFORE)
            traffic = look_at_traffic(child.pid, Handover(giver, client, server))
            giver.sendall(b"x")
    assert traffic.reason == ""
    assert traffic.hosts["127.0.0.1"].n_segments == 1
