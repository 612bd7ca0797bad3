"""Fleet beside Rotel, a collector in Rust that receives and drops: the same pushes to one after the other, in rounds.

Both run on core 0, the load on core 1, and Fleet judges and answers with the threshold as its users have it. Over HTTP
the pushes are of 1000 nodes in turn, over gRPC of one node (see `benchmarks.push`).

Environment: ``INGERO_BENCH_SECONDS`` (10) for each rate, ``INGERO_BENCH_ROUNDS`` (3) for each protocol.
"""

import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
from benchmarks.push import (
    SERVER_CORE,
    build_load,
    build_nodes,
    core_s,
    open_fleet,
    wait_until_listening,
    warm,
)

from ingero.sim.cluster.ports import find_free_ports

SAYS = "pushes a second that Fleet takes on one core, over those of Rotel, which drops them"
ROTEL = Path(__file__).parents[1] / ".cache/rotel/rotel-agent"
ASKED = {"http json": 0.8, "http protobuf": 0.7, "grpc": 0.5}


@contextmanager
def open_rotel(folder):
    """A Rotel that drops all it takes; yields its ports and process."""
    ports = dict(zip(("grpc", "http"), find_free_ports(2), strict=True))
    command = [ROTEL, "start", "--pid-file", folder / "pid", "--log-file", folder / "rotel.log"]
    command += ["--exporter", "blackhole"]
    for name, port in ports.items():
        command += [f"--otlp-{name}-endpoint", f"127.0.0.1:{port}"]
    with (folder / "out").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: os.sched_setaffinity(0, {SERVER_CORE}),  # noqa: PLW1509 -- Linux only
        )
    try:
        wait_until_listening(process, ports["http"], folder / "out")
        yield ports, psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def run():
    seconds = int(os.environ.get("INGERO_BENCH_SECONDS", "10"))
    rounds = int(os.environ.get("INGERO_BENCH_ROUNDS", "3"))
    if os.cpu_count() < 2 or not ROTEL.exists():
        yield "   left out: needs two cores, and Rotel (scripts/install_rotel)"
        return
    nodes = build_nodes()
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        folders = {name: Path(root) / name for name in ("fleet", "rotel")}
        for folder in folders.values():
            folder.mkdir()
        servers = {
            "fleet": stack.enter_context(open_fleet(folders["fleet"])),
            "rotel": stack.enter_context(open_rotel(folders["rotel"])),
        }
        warm(servers["fleet"][0]["http"])
        yield f"   load of the machine {os.getloadavg()[0]:.1f}, {rounds} rounds of {seconds} s"
        for name, tool in (("http json", "wrk"), ("http protobuf", "wrk"), ("grpc", "h2load")):
            if shutil.which(tool) is None:
                yield f"   {name}: left out, {tool} is not installed"
                continue
            seen = {server: [] for server in servers}
            for _ in range(rounds):
                for server, (ports, process) in servers.items():
                    load = build_load(name, folders[server], ports, nodes, seconds=seconds)
                    seen[server].append(_measure(process, load))
            yield from _compare(name, seen)


def _measure(process, load):
    """Rate, slowest hundredth, errors, and the share of the core that was used."""
    began_s, before = time.monotonic(), core_s(process)[0]
    rate, p99_ms, n_bad = load()
    return rate, p99_ms, n_bad, (core_s(process)[0] - before) / (time.monotonic() - began_s)


def _compare(name, seen):
    for server, found in seen.items():
        rate, p99_ms, _, share = map(statistics.median, zip(*found, strict=True))
        n_bad = sum(one[2] for one in found)
        yield f"   {name:<14} {server}: {rate:>6.0f}/s  p99 {p99_ms:6.2f} ms  errors {n_bad}  {share:4.0%} of the core"
    ratios = [mine[0] / other[0] for mine, other in zip(seen["fleet"], seen["rotel"], strict=True)]
    ratio, asked = statistics.median(ratios), ASKED[name]
    each = ", ".join(f"{one:.2f}" for one in ratios)
    mark = "ok" if ratio >= asked else "BELOW"
    yield f"   {name:<14} fleet over rotel: {ratio:.2f} × (rounds: {each}) [asked {asked} ×: {mark}]"
