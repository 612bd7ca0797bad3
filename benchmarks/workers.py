"""What `service.workers: 2` gives over one process: two Fleets side by side, loaded in turn, each free on every core.

Over hundreds of connections, as agents have: what arrives together is handed over, and answered, together.

The load has no core of its own, so on two cores a rate says what is left after the load took its part. The CPU time of
a push does not: the judge's share of it is what bounds any number of workers.

Environment: ``INGERO_BENCH_SECONDS`` (10) for each rate, ``INGERO_BENCH_ROUNDS`` (3) for each protocol.
"""

import os
import shutil
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

import psutil
from benchmarks.push import (
    build_load,
    build_nodes,
    core_s,
    open_fleet,
    warm,
)

SAYS = "pushes a second with two receiving processes, over those of one process in the same run"
WORKERS = (1, 2)
N_CONNECTIONS = 256
"""Over gRPC an eighth, with eight calls each."""


def measure(process, load):
    """Rate, slowest hundredth, errors, and the CPU time of a push: all processes, and the judge alone."""
    found = [process, *process.children()]
    before = [core_s(one)[0] for one in found]
    rate, p99_ms, n_bad = load()
    used = [core_s(one)[0] - then for one, then in zip(found, before, strict=True)]
    n_pushes = rate * int(os.environ.get("INGERO_BENCH_SECONDS", "10"))
    return rate, p99_ms, n_bad, sum(used) / n_pushes * 1e6, used[0] / n_pushes * 1e6


def compare(name, loads, rounds):
    """Lines: every Fleet's median, and the ratio of each round."""
    seen = {n: [] for n in WORKERS}
    for _ in range(rounds):
        for n, (process, load) in loads.items():
            seen[n].append(measure(process, load))
    for n in WORKERS:
        rate, p99_ms, _, all_us, judge_us = map(statistics.median, zip(*seen[n], strict=True))
        n_bad = sum(one[2] for one in seen[n])
        yield (
            f"   {name:<14} workers {n}: {rate:>6.0f}/s  p99 {p99_ms:6.2f} ms  errors {n_bad}  {all_us:5.1f} µs of CPU a"
            f" push, {judge_us:5.1f} of them in the judge, which bounds it at {1e6 / judge_us:.0f}/s"
        )
    ratios = [two[0] / one[0] for one, two in zip(seen[1], seen[2], strict=True)]
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    yield f"   {name:<14} two over one: {statistics.median(ratios):.2f} × (rounds: {each})"


def run():
    seconds = int(os.environ.get("INGERO_BENCH_SECONDS", "10"))
    rounds = int(os.environ.get("INGERO_BENCH_ROUNDS", "3"))
    nodes = build_nodes()
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        fleets = {}
        for n in WORKERS:
            folder = Path(root) / str(n)
            folder.mkdir()
            cores = os.sched_getaffinity(0)
            ports, process = stack.enter_context(open_fleet(folder, n, cores))
            warm(ports["http"])
            fleets[n] = (folder, ports, psutil.Process(process.pid))
        yield f"   {os.cpu_count()} cores, load of the machine {os.getloadavg()[0]:.1f}, {rounds} rounds of {seconds} s"
        for name, tool in (("http json", "wrk"), ("http protobuf", "wrk"), ("grpc", "h2load")):
            if shutil.which(tool) is None:
                yield f"   {name}: left out, {tool} is not installed"
                continue
            n_connections = N_CONNECTIONS // 8 if name == "grpc" else N_CONNECTIONS
            how = {"seconds": seconds, "n_connections": n_connections}
            loads = {
                n: (process, build_load(name, folder, ports, nodes, **how))
                for n, (folder, ports, process) in fleets.items()
            }
            yield from compare(name, loads, rounds)
        yield f"   load of the machine at the end {os.getloadavg()[0]:.1f}"
