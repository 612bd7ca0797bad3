"""What a pair test runs on its two nodes. The standard library alone: its text goes there, where ``python3`` must be.

As ``coordinate`` it runs in the batch job, on the first node of the two. It starts one worker on each by ``srun``,
asks them in turn for rounds of a fixed piece of work, so that neither disturbs the other and what drifts meets both,
and then for exchanges between them. It prints a JSON object per node, and one for the exchange; times in seconds.

What it measures: the processors that the job was given and their caches and memory; the network between both, which
says nothing about which of the two is slow. It does not touch a GPU or a disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

HASHES = 400_000
"""Of one round: about 0.15 s on a server of 2024."""
COPIED_BYTES = 8 << 20
N_COPIES = 16
EXCHANGED_BYTES = 1 << 20
TIMEOUT_S = 60.0
_EACH_NODE = ("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1")
_START = 'exec python3 -c "$0" work "$SLURMD_NODENAME" "${SLURM_CPUS_ON_NODE:-1}" "$1" "$2"'


def work() -> None:
    """The same instructions each time."""
    hashlib.pbkdf2_hmac("sha256", b"ingero", b"pair test", HASHES)
    block = bytes(COPIED_BYTES)
    for _ in range(N_COPIES):
        block = bytes(bytearray(block))


def time_round(n_processors: int) -> float:
    """Seconds until each processor has done the work."""
    begin = time.perf_counter()
    children = []
    for _ in range(n_processors - 1):
        child = os.fork()
        if not child:
            work()
            os._exit(0)
        children.append(child)
    work()
    for child in children:
        os.waitpid(child, 0)
    return time.perf_counter() - begin


class Line:
    """A connection that carries lines of text, and blocks of bytes.

    Args:
        connection: Open.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = connection.makefile("rwb")

    def send(self, *words: object) -> None:
        """A line."""
        self._file.write(" ".join(map(str, words)).encode() + b"\n")
        self._file.flush()

    def receive(self) -> list[str]:
        """The words of a line. Raises EOFError when the other side has ended."""
        line = self._file.readline(1000)
        if not line.endswith(b"\n"):
            raise EOFError("a worker has ended")
        return line.decode("ascii", "replace").split()

    def send_block(self) -> None:
        """A block of bytes."""
        self._file.write(bytes(EXCHANGED_BYTES))
        self._file.flush()

    def receive_block(self) -> None:
        """The same. Raises EOFError when the other side has ended."""
        if len(self._file.read(EXCHANGED_BYTES)) < EXCHANGED_BYTES:
            raise EOFError("the other worker has ended")


def run_worker(node: str, n_processors: int, address: str, port: int) -> None:
    """Do what the coordinator says, until it says no more."""
    token = sys.stdin.readline().strip()
    coordinator = Line(socket.create_connection((address, port), TIMEOUT_S))
    coordinator.send(token, node)
    while words := coordinator.receive():
        if words[0] == "round":
            coordinator.send(time_round(n_processors))
        elif words[0] == "listen":
            with socket.create_server((address, 0)) as server:
                server.settimeout(TIMEOUT_S)
                coordinator.send(server.getsockname()[1])
                other = Line(server.accept()[0])
                for _ in range(int(words[1])):
                    other.receive_block()
                    other.send_block()
        elif words[0] == "exchange":
            other = Line(socket.create_connection((address, int(words[1])), TIMEOUT_S))
            for _ in range(int(words[2])):
                begin = time.perf_counter()
                other.send_block()
                other.receive_block()
                coordinator.send(time.perf_counter() - begin)
        else:
            return


def find_address(node: str) -> str:
    """How others reach this node, as Slurm has it."""
    shown = subprocess.run(
        ["scontrol", "-o", "show", "node", node], capture_output=True, text=True, check=True
    ).stdout
    return shown.partition(" NodeAddr=")[2].split()[0]


def coordinate(program: str, here: str, n_rounds: int) -> None:
    """Start the workers, ask both, print what they say.

    Args:
        program: The text of this file.
        here: This node.
        n_rounds: Rounds of each node that count; one before them does not.
    """
    address, token = find_address(here), secrets.token_hex()
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server((address, 0)))
        server.settimeout(TIMEOUT_S)
        port = str(server.getsockname()[1])
        srun = subprocess.Popen(
            ["srun", *_EACH_NODE, "sh", "-c", _START, program, address, port],
            stdin=subprocess.PIPE,
        )
        stack.callback(srun.wait)
        stack.callback(srun.terminate)
        assert srun.stdin is not None
        srun.stdin.write(f"{token}\n".encode())
        srun.stdin.close()
        workers = greet(server, token)
        measure(workers, here, n_rounds)
        for worker in workers.values():
            worker.send("end")
        srun.wait(TIMEOUT_S)


def greet(server: socket.socket, token: str) -> dict[str, Line]:
    """Both workers by node; a connection without the token is dropped."""
    workers: dict[str, Line] = {}
    while len(workers) < 2:
        line = Line(server.accept()[0])
        message = line.receive()
        if len(message) == 2 and secrets.compare_digest(message[0], token):
            workers[message[1]] = line
    return workers


def measure(workers: dict[str, Line], here: str, n_rounds: int) -> None:
    """Each node alone, in turn; then both together."""
    times: dict[str, list[float]] = {node: [] for node in workers}
    for number in range(n_rounds + 1):
        for node, worker in workers.items():
            worker.send("round")
            seconds = float(worker.receive()[0])
            if number:
                times[node].append(round(seconds, 6))
    for node, of_node in times.items():
        tell({"node": node, "rounds_s": of_node})
    (other,) = (worker for node, worker in workers.items() if node != here)
    workers[here].send("listen", n_rounds)
    port = workers[here].receive()[0]
    other.send("exchange", port, n_rounds)
    exchanges = [round(float(other.receive()[0]), 6) for _ in range(n_rounds)]
    tell({"exchange_s": exchanges, "exchange_bytes": 2 * EXCHANGED_BYTES})


def tell(message: dict[str, object]) -> None:
    """One object on a line of its own."""
    sys.stdout.write(json.dumps(message, separators=(",", ":")) + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    """``work NODE PROCESSORS ADDRESS PORT`` or ``coordinate TEXT NODE ROUNDS``."""
    if arguments[0] == "work":
        run_worker(arguments[1], int(arguments[2]), arguments[3], int(arguments[4]))
    else:
        coordinate(arguments[1], arguments[2], int(arguments[3]))


if __name__ == "__main__":
    main(sys.argv[1:])
