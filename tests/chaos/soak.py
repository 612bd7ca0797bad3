"""``python -m tests.chaos.soak --seconds N``: half the load that a Fleet takes, for long; 1 where anything creeps.

First a few seconds at full speed say what this machine's Fleet takes. Then nodes push at half that rate, each request
due at its own moment, while a job of eight ranks is judged. Memory may grow by 2 % between the second tenth of the time
and the last, no counter of loss may move, a push may not cost more processor time, and the last tenth's latency must be
the first's. What else runs on the machine is taken off by two floors of the same moments: requests to a bare server, and
the processor time of a piece of work that is always the same. Where the machine became so slow that its Fleet is full,
latency says nothing, and that is a failure too: run it again.
"""

import argparse
import asyncio
import gc
import itertools
import re
import sys
import time
from array import array
from dataclasses import dataclass, field

import numpy as np
import psutil
import uvloop
from benchmarks.push import build_bodies
from tests.chaos.job import N_RANKS, Job
from tests.support import local_http

from ingero.otlp.codec import encode_protobuf
from ingero.testing.fleet import build_fleet_config, run_fleet
from ingero.wire.collectives import build_collectives

N_NODES = 1000
N_CONNECTIONS = 32
CALIBRATION_S = 5.0
MAX_GROWTH = 0.02
MAX_SLOWER = 1.25
"""Median latency of the last tenth against the first's. A tail says more of the machine than of a Fleet: it is printed."""
MAX_COSTLIER = 1.1
"""Processor time of a push in the last tenth against the first's, less what the same work took more."""
MAX_BUSY = 0.9
"""Share of a core above which pushes wait for each other whatever one costs."""
N_PARTS = 10
LONG_S = 600.0
"""From this time on each tenth is printed when it is over."""
_LOSS = re.compile(
    r"(lost|refused|dropped|failed|failures|evicted|rejected|damaged|errors)[a-z_]*_total"
)
_FLOOR_GAP_S = 0.02
_JSON, _PROTOBUF = "application/json", "application/x-protobuf"


def _build_parts(code):
    return [array(code) for _ in range(N_PARTS)]


@dataclass
class Seen:
    """What the pushers and the watcher saw.

    Attributes:
        latencies_ms: By part of the time, from when a push was due to its answer.
        floors_ms: By part, of a request to a server that does nothing.
        rss_bytes: By part, of Fleet.
        work_s: By part, processor time of the same work.
        cpu_s: By part, processor time of Fleet until its end.
        n_failed: Pushes that were not answered with 200.
    """

    latencies_ms: list[array] = field(default_factory=lambda: _build_parts("f"))
    floors_ms: list[array] = field(default_factory=lambda: _build_parts("f"))
    rss_bytes: list[array] = field(default_factory=lambda: _build_parts("q"))
    work_s: list[array] = field(default_factory=lambda: _build_parts("d"))
    cpu_s: list[float] = field(default_factory=lambda: [0.0] * (N_PARTS + 1))
    n_failed: int = 0

    def cost_us(self, part):
        """Processor time of Fleet for each push of a part."""
        return (self.cpu_s[part + 1] - self.cpu_s[part]) / len(self.latencies_ms[part]) * 1e6


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
            f"soak: {rate:.0f} pushes/s, half of what this Fleet takes here, for {options.seconds:.0f} s",
            flush=True,
        )
        before = _read_losses(fleet)
        seen = measure(options.seconds, rate)
        moved = {
            name: value - before.get(name, 0.0)
            for name, value in _read_losses(fleet).items()
            if value != before.get(name, 0.0)
        }
    return _judge(seen, moved, options.seconds)


def _judge(seen, moved, seconds):
    first, last = seen.latencies_ms[0], seen.latencies_ms[-1]
    n_pushes = sum(map(len, seen.latencies_ms))
    settled, ended = (_median(seen.rss_bytes[part]) for part in (1, N_PARTS - 1))
    growth = ended / settled - 1
    floors = [_median(seen.floors_ms[part]) for part in (0, N_PARTS - 1)]
    slower = _median(last) / _median(first) / max(floors[1] / floors[0], 1.0)
    pace = _median(seen.work_s[-1]) / _median(seen.work_s[0])
    costs_us = [seen.cost_us(part) for part in (0, N_PARTS - 1)]
    costlier = costs_us[1] / costs_us[0] / max(pace, 1.0)
    busy = (seen.cpu_s[-1] - seen.cpu_s[-2]) / seconds * N_PARTS
    print(
        f"pushes: {n_pushes} taken, {seen.n_failed} failed, {costs_us[0]:.0f} µs of processor time each in the first"
        f" tenth, {costs_us[1]:.0f} in the last ({busy:.0%} of a core); the same work took {pace:.2f} times as long"
    )
    print(
        f"memory: {settled / 1e6:.1f} MB in the second tenth, {ended / 1e6:.1f} MB in the last ({growth:+.1%})"
    )
    print(
        f"latency: median {_median(first):.2f} ms in the first tenth, {_median(last):.2f} ms"
        f" in the last; p99 {_p99(first):.2f} and {_p99(last):.2f} ms; of a bare server {floors[0]:.2f} and"
        f" {floors[1]:.2f} ms"
    )
    print(f"counters of loss: {moved or 'none moved'}")
    problems = [
        what
        for what, is_so in (
            ("memory grew", growth > MAX_GROWTH),
            ("a push cost more", costlier > MAX_COSTLIER),
            ("the last tenth was slower", slower > MAX_SLOWER and busy <= MAX_BUSY),
            (
                "the machine became too slow to compare latency",
                slower > MAX_SLOWER and busy > MAX_BUSY,
            ),
            ("something was lost", bool(moved)),
            ("pushes failed", seen.n_failed > 0),
        )
        if is_so
    ]
    print("; ".join(problems) or "nothing crept")
    return 1 if problems else 0


def _median(values):
    return float(np.median(np.frombuffer(values, values.typecode)))


def _p99(values):
    return float(np.percentile(np.frombuffer(values, values.typecode), 99))


def _read_losses(fleet):
    """Every series of a counter that says that something was lost."""
    text = local_http.get(fleet.url("service.telemetry.metrics", "/metrics"), timeout=30).text
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
    """Sample the memory, and say how each tenth of a long time went as soon as it is over."""
    part = 0
    seen.cpu_s[0] = _read_cpu_s(process)
    while (now_s := time.monotonic()) < target.end_s:
        if target.part_of(now_s) != part:
            seen.cpu_s[part + 1] = _read_cpu_s(process)
            if target.end_s - target.began_s >= LONG_S:
                _print_part(seen, part)
            part = target.part_of(now_s)
        seen.rss_bytes[part].append(process.memory_info().rss)
        seen.work_s[part].append(_time_work_s())
        await asyncio.sleep(0.25)
    seen.cpu_s[-1] = _read_cpu_s(process)


def _read_cpu_s(process):
    return sum(process.cpu_times()[:2])


def _time_work_s():
    """Half a millisecond of a processor that nobody else uses."""
    began_s = time.thread_time()
    for _ in range(20_000):
        pass
    return time.thread_time() - began_s


def _print_part(seen, part):
    latencies_ms = seen.latencies_ms[part]
    print(
        f"tenth {part + 1}: {len(latencies_ms)} pushes, {seen.n_failed} failed so far,"
        f" median {_median(latencies_ms):.2f} ms, p99 {_p99(latencies_ms):.2f} ms, bare server"
        f" {_median(seen.floors_ms[part]):.2f} ms, {_median(seen.rss_bytes[part]) / 1e6:.1f} MB,"
        f" {seen.cost_us(part):.0f} µs of processor time each, the same work {_median(seen.work_s[part]) * 1e3:.2f} ms",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
