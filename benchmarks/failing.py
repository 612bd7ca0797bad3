"""A training step beside an agent to which everything happens at once: its disk is full and Fleet does not answer.

Interleaved: each round runs the workload bare and then beside each agent. Healthy agents of the same settings stand
beside the failing ones, so that the price of the probes, of recording every call and of failing can be told apart.
Needs root.
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
ROUNDS = 4
SHAPES = (
    ("long steps of 40 launches", 100, {"KERNEL_NS": 500_000}),
    ("short steps of 40 launches, bound by launching", 600, {"KERNEL_NS": 2_000}),
)
ALL = ("--record-all",)
AGENTS = (
    ("failing", True, ()),
    ("healthy", False, ()),
    ("failing, every call recorded", True, ALL),
    ("healthy, every call recorded", False, ALL),
)
"""What it is called, whether it fails, its options."""
_READY_S = 60


def run():
    from ingero.errors import UnsupportedError

    if os.geteuid():
        yield "   not measured: probes and a small disk need root"
        return
    try:
        for description, steps, device in SHAPES:
            yield from _compare(description, steps, device)
    except UnsupportedError as error:
        yield f"   not measured: {error.message}"


def _compare(description, steps, device):
    _measure(steps // 4, device)
    bare_ns, beside_ns, notes = [], {name: [] for name, _, _ in AGENTS}, {}
    for _ in range(ROUNDS):
        bare_ns.append(_measure(steps, device))
        for name, fails, options in AGENTS:
            with _open_agent(fails=fails, options=options) as told:
                beside_ns[name].append(_measure(steps, device))
            notes[name] = told[-1]
    yield f"   {description}: {statistics.median(bare_ns) / steps / 1e6:.3f} ms bare"
    for name, times_ns in beside_ns.items():
        ratios = [beside / bare for beside, bare in zip(times_ns, bare_ns, strict=True)]
        spread = f"{min(ratios):.4f} to {max(ratios):.4f}"
        yield (
            f"     × {statistics.median(ratios):.4f} beside one {name}"
            f" ({spread} over {ROUNDS} pairs; bar 1.01); {notes[name]}"
        )


def _measure(steps, device):
    from ingero.sim.runner import SimSettings, Simulation

    knobs = {"steps": steps, "kernels": 40, "loader_us": 200, "batch_bytes": 1 << 16, "wait_us": 0}
    with Simulation(SimSettings("train", knobs, device=device)) as simulation:
        return simulation.wait()[0]["elapsed_ns"]


@contextlib.contextmanager
def _open_agent(*, fails, options):
    """An agent that records, to a full disk and pushing into a partition where it fails; yields what was seen of it."""
    from tests.support.relay import Network, Relay

    told = []
    with (
        _open_disk("1m" if fails else "1g") as folder,
        socket.create_server(("127.0.0.1", 0)) as nobody,
        Relay(f"127.0.0.1:{nobody.getsockname()[1]}") as relay,
    ):
        relay.network = Network.PARTITION
        command = [sys.executable, "-m", "ingero", "trace", "--db", f"{folder}/trace.db"]
        command += ["--annotate", "--annotate-socket", f"{folder}/a/a.sock", *options]
        if fails:
            command += ["--fleet", f"http://{relay.address}", "--fleet-cluster-id", "c"]
            command += ["--fleet-push-interval", "1s"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as agent:
            try:
                _await_ready(agent, folder)
                if fails:
                    _fill(folder)
                yield told
            finally:
                agent.send_signal(signal.SIGINT)
                agent.communicate(timeout=60)
        free = os.statvfs(folder).f_bavail
        told.append(f"ended with status {agent.returncode}, {free} blocks free on its disk")


@contextlib.contextmanager
def _open_disk(size):
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
        try:
            yield Path(folder)
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
