"""``python -m tests.chaos.soak --seconds N``: half the load that a Fleet takes, for long; 1 where anything creeps.

First a few seconds at full speed say what this machine's Fleet takes. Then nodes push at half that rate, each request
due at its own moment, while a job of eight ranks is judged. Memory may grow by 2 % between the second tenth of the time
and the last, no counter of loss may move, and the last tenth's latency must be the first's. What else runs on the machine
is taken off by a floor: requests to a bare server in the same moments.
"""

import argparse
import asyncio
import gc
import itertools
import re
import statistics
import sys
import time
from dataclasses import dataclass, field

import httpx
import psutil
import uvloop
from benchmarks.push import build_bodies
from tests.chaos.job import N_RANKS, Job

from ingero.otlp.codec import encode_protobuf
from ingero.testing.fleet import build_fleet_config, run_fleet
from ingero.wire.collectives import build_collectives

N_NODES = 1000
N_CONNECTIONS = 32
CALIBRATION_S = 5.0
MAX_GROWTH = 0.02
MAX_SLOWER = 1.25
"""Median latency of the last tenth against the first's. A tail says more of the machine than of a Fleet: it is printed."""
N_PARTS = 10
_LOSS = re.compile(
    r"(lost|refused|dropped|failed|failures|evicted|rejected|damaged|errors)[a-z_]*_total"
)
_FLOOR_GAP_S = 0.02
_JSON, _PROTOBUF = "application/json", "application/x-protobuf"


@dataclass
class Seen:
    """What the pushers and the watcher saw.

    Attributes:
        latencies_ms: By part of the time, from when a push was due to its answer.
        floors_ms: By part, of a request to a server that does nothing.
        rss_bytes: By part, of Fleet.
        n_failed: Pushes that were not answered with 200.
    """

    latencies_ms: list[list[float]] = field(default_factory=lambda: [[] for _ in range(N_PARTS)])
    floors_ms: list[list[float]] = field(default_factory=lambda: [[] for _ in range(N_PARTS)])
    rss_bytes: list[list[int]] = field(default_factory=lambda: [[] for _ in range(N_PARTS)])
    n_failed: int = 0


@dataclass(frozen=True)
class Target:
    """Where, from when until when."""

    host: str
    port: int
    began_s: float
    end_s: float

    def part_of(self, at_s):
        """Which tenth of the time a moment is in."""
        share = (at_s - self.began_s) / (self.end_s - self.began_s)
        return min(max(int(share * N_PARTS), 0), N_PARTS - 1)


def main():
    """Run once."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak")
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()
    config = build_fleet_config({"max_expected_nodes": N_NODES}, nccl={})
    with run_fleet(config) as fleet:
        host, _, port = fleet.address("receivers.otlp http").rpartition(":")
        process = psutil.Process(fleet.process.pid)

        job = Job(1)

        def measure(seconds, rate):
            began_s = time.monotonic() + 0.5
            target = Target(host, int(port), began_s, began_s + seconds)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_push_all(target, rate, process, job))

        gc.freeze()
        full = measure(CALIBRATION_S, None)
        rate = sum(map(len, full.latencies_ms)) / CALIBRATION_S / 2
        print(
            f"soak: {rate:.0f} pushes/s, half of what this Fleet takes here, for {options.seconds:.0f} s"
        )
        before = _read_losses(fleet)
        cpu = process.cpu_times()
        seen = measure(options.seconds, rate)
        used = sum(process.cpu_times()[:2]) - sum(cpu[:2])
        moved = {
            name: value - before.get(name, 0.0)
            for name, value in _read_losses(fleet).items()
            if value != before.get(name, 0.0)
        }
    return _judge(seen, moved, used / options.seconds)


def _judge(seen, moved, share):
    first, last = seen.latencies_ms[0], seen.latencies_ms[-1]
    n_pushes = sum(map(len, seen.latencies_ms))
    settled, ended = (statistics.median(seen.rss_bytes[part]) for part in (1, N_PARTS - 1))
    growth = ended / settled - 1
    floors = [statistics.median(seen.floors_ms[part]) for part in (0, N_PARTS - 1)]
    slower = statistics.median(last) / statistics.median(first) / max(floors[1] / floors[0], 1.0)
    print(f"pushes: {n_pushes} taken, {seen.n_failed} failed, {share:.0%} of a core")
    print(
        f"memory: {settled / 1e6:.1f} MB in the second tenth, {ended / 1e6:.1f} MB in the last ({growth:+.1%})"
    )
    print(
        f"latency: median {statistics.median(first):.2f} ms in the first tenth, {statistics.median(last):.2f} ms"
        f" in the last; p99 {_p99(first):.2f} and {_p99(last):.2f} ms; of a bare server {floors[0]:.2f} and"
        f" {floors[1]:.2f} ms"
    )
    print(f"counters of loss: {moved or 'none moved'}")
    problems = [
        what
        for what, is_so in (
            ("memory grew", growth > MAX_GROWTH),
            ("the last tenth was slower", slower > MAX_SLOWER),
            ("something was lost", bool(moved)),
            ("pushes failed", seen.n_failed > 0),
        )
        if is_so
    ]
    print("; ".join(problems) or "nothing crept")
    return 1 if problems else 0


def _p99(latencies_ms):
    return sorted(latencies_ms)[int(len(latencies_ms) * 0.99)]


def _read_losses(fleet):
    """Every series of a counter that says that something was lost."""
    text = httpx.get(fleet.url("service.telemetry.metrics", "/metrics"), timeout=30).text
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines if _LOSS.search(name)}


async def _push_all(target, rate, process, job):
    seen = Seen()
    bodies = [build_bodies(f"node-{number:04}")["json"] for number in range(N_NODES)]
    heads = [_build_request("/v1/metrics", _JSON, body) for body in bodies]
    gap_s = None if rate is None else N_CONNECTIONS / rate
    async with asyncio.TaskGroup() as tasks:
        for number in range(N_CONNECTIONS):
            mine = itertools.cycle(heads[number::N_CONNECTIONS])
            offset_s = 0.0 if gap_s is None else gap_s * number / N_CONNECTIONS
            tasks.create_task(_push(target, mine, gap_s, offset_s, seen))
        for rank in range(N_RANKS):
            tasks.create_task(_push(target, _iter_runs(job, rank), 1.0, rank / N_RANKS, seen))
        tasks.create_task(_watch(target, process, seen))
        tasks.create_task(_measure_floor(target, seen))
    return seen


def _iter_runs(job, rank):
    while True:
        run = job.take(rank)
        export = build_collectives([] if run is None else [run], time.time_ns())
        yield _build_request("/v1/logs", _PROTOBUF, encode_protobuf(export))


def _build_request(path, content_type, body):
    head = (
        f"POST {path}?cluster_id=prod+a HTTP/1.1\r\nHost: fleet\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _push(target, requests, gap_s, offset_s, seen):
    """Push on one connection: each when it is due, or at once without a gap."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    due_s = target.began_s + offset_s
    while due_s < target.end_s:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        writer.write(next(requests))
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        await reader.readexactly(int(length[1]))
        now_s = time.monotonic()
        seen.n_failed += not head.startswith(b"HTTP/1.1 200")
        seen.latencies_ms[target.part_of(due_s)].append((now_s - due_s) * 1e3)
        due_s = now_s if gap_s is None else due_s + gap_s
    writer.close()


async def _measure_floor(target, seen):
    """Requests to a server that answers a byte, as often as they say something."""

    async def answer(reader, writer):
        while await reader.read(1):
            writer.write(b".")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        due_s = target.began_s
        while due_s < target.end_s:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            writer.write(b".")
            await reader.readexactly(1)
            seen.floors_ms[target.part_of(due_s)].append((time.monotonic() - due_s) * 1e3)
            due_s += _FLOOR_GAP_S
        writer.close()


async def _watch(target, process, seen):
    while (now_s := time.monotonic()) < target.end_s:
        seen.rss_bytes[target.part_of(now_s)].append(process.memory_info().rss)
        await asyncio.sleep(0.25)


if __name__ == "__main__":
    sys.exit(main())
