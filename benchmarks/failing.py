"""A training step beside an agent to which everything happens at once: its disk is full and Fleet does not answer.

Paired and interleaved: each round runs the workload bare and then traced. Needs root.
"""

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SAYS = "step time beside an agent with a full disk and a Fleet that swallows everything, over the bare step"
ROUNDS = 5
SHAPES = (
    ("long steps of 40 launches", 100, {"KERNEL_NS": 500_000}),
    ("short steps of 40 launches, bound by launching", 600, {"KERNEL_NS": 2_000}),
)
_READY_S = 60


def run():
    from ingero.errors import UnsupportedError

    if os.geteuid():
        yield "   not measured: probes and a small disk need root"
        return
    try:
        for says, steps, device in SHAPES:
            yield _compare(says, steps, device)
    except UnsupportedError as error:
        yield f"   not measured: {error.message}"


def _compare(says, steps, device):
    ratios, bare_ms, notes = [], [], ""
    for _ in range(ROUNDS):
        bare = _measure(steps, device)
        with _failing_agent() as told:
            beside = _measure(steps, device)
        notes = told[-1] if told else ""
        ratios.append(beside / bare)
        bare_ms.append(bare / steps / 1e6)
    ratio = statistics.median(ratios)
    spread = f"{min(ratios):.4f} to {max(ratios):.4f}"
    return (
        f"   {says}: {statistics.median(bare_ms):.3f} ms bare, × {ratio:.4f} beside it"
        f" ({spread} over {ROUNDS} pairs; bar 1.01); {notes}"
    )


def _measure(steps, device):
    from ingero.gpusim.runner import SimSettings, Simulation

    knobs = {"steps": steps, "kernels": 40, "loader_us": 200, "batch_bytes": 1 << 16, "wait_us": 0}
    with Simulation(SimSettings("train", knobs, device=device)) as simulation:
        return simulation.wait()[0]["elapsed_ns"]


@contextlib.contextmanager
def _failing_agent():
    """An agent that records to a full disk and pushes into a partition; yields what it was seen to fail at."""
    from ingero.testing.relay import Network, Relay

    told = []
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as nobody,
        Relay(f"127.0.0.1:{nobody.getsockname()[1]}") as relay,
    ):
        relay.network = Network.PARTITION
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
        try:
            command = [sys.executable, "-m", "ingero", "trace", "--db", f"{folder}/full.db"]
            command += ["--record-all", "--annotate", "--annotate-socket", f"{folder}/a/a.sock"]
            command += ["--fleet", f"http://{relay.address}", "--fleet-cluster-id", "c"]
            command += ["--fleet-push-interval", "1s"]
            with subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            ) as agent:
                try:
                    _await_ready(agent, Path(folder))
                    _fill(Path(folder))
                    yield told
                finally:
                    agent.send_signal(signal.SIGINT)
                    agent.communicate(timeout=60)
            free = os.statvfs(folder).f_bavail
            told.append(f"ended with status {agent.returncode}, {free} blocks free on its disk")
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def _await_ready(agent, folder):
    """The socket is there before the probes are; probes take under a second more."""
    deadline = time.monotonic() + _READY_S
    while not (folder / "a" / "a.sock").exists():
        if agent.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the agent did not start: {agent.stderr.read().decode()}")
        time.sleep(0.05)
    time.sleep(2.0)


def _fill(folder):
    with contextlib.suppress(OSError), (folder / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(b"x" * 4096)
