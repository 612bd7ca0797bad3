"""The whole path of a push: socket, decode, score map, nccl, threshold on the answer.

Fleet runs as users run it, pinned to core 0; the load comes from core 1. Over HTTP it is of 1000 nodes in turn: a node
that pushes again before its last push was looked at costs less. h2load sends one body, so over gRPC it is of one node.
Each rate is printed with its ratio to the bare decode of the same body, timed in the same run on core 0 while nothing
else runs.

A rate on a machine that is busy with other things says little, so each line also says how much of its core Fleet got,
the rate that its CPU time makes on a whole core, and how long its threads waited for the core, for each other included.

Environment: ``INGERO_BENCH_SECONDS`` (10) for each rate, ``INGERO_BENCH_FLEET_SECONDS`` (30) for the 10 000 agents:
120 for the run that was asked for, 0 to leave them out.
"""

import asyncio
import gc
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import timeit
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import uvloop
import yaml

from ingero.otlp.codec import decode_export, encode_protobuf
from ingero.otlp.names import Signal
from ingero.sim.cluster.ports import find_free_ports

SAYS = "pushes a second through the whole Fleet on one core; the floor is the bare decode of the same body"
BODY = Path(__file__).parents[1] / "tests/data/wire_samples/push_active.json"
FLEET = Path(sys.executable).parent / "ingero-fleet"
SERVER_CORE, LOAD_CORE = 0, 1
N_LOADING = 1000
"""Nodes in turn, over HTTP."""
N_NODES, INTERVAL_S = 10_000, 5.0
LEAD_S = 2.0
"""For the agents to be made before the first of them is due."""
TYPES = {"json": "application/json", "protobuf": "application/x-protobuf"}
GRPC_PATH = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
FLOORS = {"http json": 15_000, "http protobuf": 15_000, "grpc": 3_500}


def build_bodies(node="n1", score=0.94):
    """The recorded push, compact, from another node or with another score when asked."""
    document = json.loads(BODY.read_text())
    entry = document["resourceMetrics"][0]
    entry["resource"]["attributes"][0]["value"]["stringValue"] = node
    points = entry["scopeMetrics"][0]["metrics"][0]["gauge"]["dataPoints"]
    points[0]["asDouble"] = score
    compact = json.dumps(document, separators=(",", ":")).encode()
    export = decode_export(compact, Signal.METRICS, TYPES["json"])
    return {"json": compact, "protobuf": encode_protobuf(export)}


def build_nodes():
    """Its bodies of many nodes, by encoding."""
    built = [build_bodies(f"node-{number:05}") for number in range(N_LOADING)]
    return {kind: [one[kind] for one in built] for kind in TYPES}


def decode_us(kind, body):
    """Bare decode of one body, best of five, on the server's core."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {SERVER_CORE})
    try:
        timer = timeit.Timer(lambda: decode_export(body, Signal.METRICS, TYPES[kind]))
        n_runs, _ = timer.autorange()
        return min(timer.repeat(5, n_runs)) / n_runs * 1e6
    finally:
        os.sched_setaffinity(0, mine)


@contextmanager
def open_fleet(folder, workers=1, cores=(SERVER_CORE,)):
    """A Fleet with both processors and the threshold on its answers; yields its ports and process."""
    names = ("http", "grpc", "agent", "admin", "prometheus", "own")
    ports = dict(zip(names, find_free_ports(len(names)), strict=True))
    at = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    config = {
        "receivers": {
            "otlp": {
                "protocols": {"http": {"endpoint": at["http"]}, "grpc": {"endpoint": at["grpc"]}}
            }
        },
        "processors": {
            "ingero": {"push_interval": "5s", "quorum": {"settle_time": "0s"}},
            "nccl": {},
        },
        "extensions": {
            "ingero_threshold": {"agent_endpoint": at["agent"], "admin_endpoint": at["admin"]}
        },
        "exporters": {"prometheus": {"endpoint": at["prometheus"]}},
        "service": {
            "extensions": ["ingero_threshold"],
            "workers": workers,
            "telemetry": {"metrics": {"address": at["own"]}},
            "pipelines": {
                "metrics": {
                    "receivers": ["otlp"],
                    "processors": ["ingero", "nccl"],
                    "exporters": ["prometheus"],
                }
            },
        },
    }
    path = Path(folder) / "fleet.yaml"
    path.write_text(yaml.safe_dump(config))
    with (Path(folder) / "fleet.log").open("wb") as log:
        process = subprocess.Popen(
            [FLEET, "--config", path],
            stdout=log,
            stderr=log,
            preexec_fn=lambda: os.sched_setaffinity(0, set(cores)),  # noqa: PLW1509 -- Linux only
        )
    try:
        wait_until_listening(process, ports["http"], Path(folder) / "fleet.log")
        yield ports, psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def wait_until_listening(process, port, log):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"ingero-fleet ended:\n{log.read_text()}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"ingero-fleet does not listen:\n{log.read_text()}")


def post(port, body, kind="json"):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/metrics?cluster_id=prod+a",
        body,
        {"Content-Type": TYPES[kind]},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return dict(answer.headers)


def warm(port):
    """Seven nodes, so that there is a quorum and every answer carries a threshold."""
    for i in range(7):
        post(port, build_bodies(f"warm-{i}", 0.90 + i / 100)["json"])
    time.sleep(1)
    headers = {name.lower() for name in post(port, build_bodies()["json"])}
    if "x-ingero-threshold" not in headers:
        raise SystemExit("no threshold on the answer; the benchmark would measure another path")


def on_load_core(command):
    return ["taskset", "-c", str(LOAD_CORE), *map(str, command)]


def write_load(folder, kind, bodies):
    """A script for wrk that sends these bodies in turn."""
    payload = Path(folder) / f"push.{kind}"
    payload.write_bytes(b"".join(bodies))
    script = Path(folder) / f"{kind}.lua"
    script.write_text(
        f'local f = io.open("{payload}", "rb")\nlocal sizes = {{{",".join(str(len(body)) for body in bodies)}}}\n'
        f'local headers = {{["Content-Type"] = "{TYPES[kind]}"}}\n'
        """local requests, at = {}, 0
function init(args)
  for i, size in ipairs(sizes) do requests[i] = wrk.format("POST", nil, headers, f:read(size)) end
  f:close()
end
function request()
  at = at % #requests + 1
  return requests[at]
end
"""
    )
    return script


def measure_http(folder, port, kind, bodies, seconds, n_connections=16):
    script = write_load(folder, kind, bodies)
    url = f"http://127.0.0.1:{port}/v1/metrics?cluster_id=prod+a"
    command = ["wrk", "-t1", f"-c{n_connections}", f"-d{seconds}s", "--latency", "-s", script, url]
    said = subprocess.run(on_load_core(command), capture_output=True, text=True, check=True).stdout
    rate = float(re.search(r"Requests/sec:\s+([\d.]+)", said)[1])
    p99 = re.search(r"99%\s+([\d.]+)(us|ms|s)", said)
    p99_ms = float(p99[1]) * {"us": 1e-3, "ms": 1, "s": 1e3}[p99[2]]
    bad = re.search(r"Non-2xx or 3xx responses: (\d+)", said)
    return rate, p99_ms, int(bad[1]) if bad else 0


def measure_grpc(folder, port, body, seconds, n_connections=4):
    payload = Path(folder) / "push.grpc"
    payload.write_bytes(b"\0" + len(body).to_bytes(4, "big") + body)
    log = Path(folder) / "h2load.log"
    log.unlink(missing_ok=True)
    command = [
        "h2load",
        "-t1",
        f"-c{n_connections}",
        "-m8",
        f"-D{seconds}",
        f"--log-file={log}",
        "-d",
        payload,
    ]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    command += [f"http://127.0.0.1:{port}{GRPC_PATH}"]
    said = subprocess.run(on_load_core(command), capture_output=True, text=True, check=True).stdout
    rate = float(re.search(r"finished in [\d.]+m?s, ([\d.]+) req/s", said)[1])
    lines = [line.split("\t") for line in log.read_text().splitlines()]
    latencies_us = sorted(int(line[2]) for line in lines)
    n_bad = sum(line[1] != "200" for line in lines)
    return rate, latencies_us[int(len(latencies_us) * 0.99)] / 1e3, n_bad


def core_s(process):
    """Seconds that a process has run, and that it was ready to run and had to wait for its core."""
    ran_ns = waited_ns = 0
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        ran, waited, _ = (thread / "schedstat").read_text().split()
        ran_ns, waited_ns = ran_ns + int(ran), waited_ns + int(waited)
    return ran_ns / 1e9, waited_ns / 1e9


def build_load(name, folder, ports, bodies, **how):
    """Of a protocol's name, such as ``http json``: what measures it; ``bodies`` of each node, ``how`` as for both below."""
    transport, _, kind = name.partition(" ")
    if transport == "grpc":
        return partial(measure_grpc, folder, ports["grpc"], bodies["protobuf"][0], **how)
    return partial(measure_http, folder, ports["http"], kind, bodies[kind], **how)


def measure(process, seconds, action):
    """What ``action`` returns, and the shares of the time in which Fleet ran and in which it waited for its core."""
    before = core_s(process)
    found = action()
    return found, *(
        (now - then) / seconds for now, then in zip(core_s(process), before, strict=True)
    )


def show(name, measured, floor_us):
    """One line."""
    (rate, p99_ms, n_bad), share, waited = measured
    took_us = share * 1e6 / rate
    floor = FLOORS[name]
    if rate >= floor and p99_ms < 10 and not n_bad:
        mark = "ok"
    elif took_us * floor <= 1e6 and not n_bad:
        mark = "CPU time is enough; the core or the load was busy"
    else:
        mark = "BELOW"
    return (
        f"   {name:<14} {rate:>6.0f}/s with {share:4.0%} of the core (waited {waited:.0%})  p99 {p99_ms:6.2f} ms  "
        f"errors {n_bad}  {took_us:5.1f} µs of CPU a push, {1e6 / took_us:.0f}/s on a whole core, "
        f"= {took_us / floor_us:4.1f} × the {floor_us:.1f} µs decode  [asked {floor}/s: {mark}]"
    )


def run():
    seconds = int(os.environ.get("INGERO_BENCH_SECONDS", "10"))
    fleet_seconds = int(os.environ.get("INGERO_BENCH_FLEET_SECONDS", "30"))
    if os.cpu_count() < 2:
        yield "   left out: needs two cores, one for Fleet and one for the load"
        return
    bodies, nodes = build_bodies(), build_nodes()
    floors = {kind: decode_us(kind, body) for kind, body in bodies.items()}
    sizes = ", ".join(f"{kind} {len(body)} B" for kind, body in bodies.items())
    yield f"   body: {sizes}"
    with tempfile.TemporaryDirectory() as folder, open_fleet(folder) as (ports, process):
        time.sleep(2)
        idle = process.memory_info().rss / 1e6
        yield f"   RSS idle {idle:.1f} MB [asked ≤ 80 MB: {'ok' if idle <= 80 else 'ABOVE'}]"
        warm(ports["http"])
        for kind in bodies:
            if shutil.which("wrk") is None:
                yield f"   http {kind}: left out, wrk is not installed (apt-get install wrk)"
                continue
            load = partial(measure_http, folder, ports["http"], kind, nodes[kind], seconds)
            yield show(f"http {kind}", measure(process, seconds, load), floors[kind])
        if shutil.which("h2load") is None:
            yield "   grpc: left out, h2load is not installed (apt-get install nghttp2-client)"
        else:
            load = partial(measure_grpc, folder, ports["grpc"], bodies["protobuf"], seconds)
            yield show("grpc", measure(process, seconds, load), floors["protobuf"])
    if fleet_seconds:
        yield from run_agents(fleet_seconds)


def run_agents(seconds):
    """Ten thousand agents, each on its own connection, each pushing every five seconds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = N_NODES + 1000
    if hard != resource.RLIM_INFINITY and hard < wanted:
        yield f"   {N_NODES} agents: left out, the limit of open files is {hard}"
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    with tempfile.TemporaryDirectory() as folder, open_fleet(folder) as (ports, process):
        mine = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {LOAD_CORE})
        try:
            seen, used, waited = measure(
                process, seconds, partial(push_all, ports["http"], seconds)
            )
        finally:
            os.sched_setaffinity(0, mine)
        latencies_ms, n_bad = sorted(seen.latencies_ms), len(seen.failures)
        p99 = latencies_ms[int(len(latencies_ms) * 0.99)]
        rss = process.memory_info().rss / 1e6
        mark = "ok" if p99 < 10 and not n_bad and rss <= 150 else "BELOW"
        yield (
            f"   {N_NODES} agents every {INTERVAL_S:.0f} s for {seconds} s: {len(latencies_ms)} pushes, errors {n_bad}, "
            f"p99 {p99:.2f} ms, {used:.0%} of the core (waited {waited:.0%}), RSS {rss:.0f} MB "
            f"[asked p99 < 10 ms, ≤ 150 MB: {mark}]"
        )


def push_all(port, seconds):
    """The agents, without pauses of their own: a collection over ten thousand tasks would be told as Fleet's latency."""
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(push_for(port, seconds))
    finally:
        gc.enable()


@dataclass(slots=True)
class Seen:
    """What the agents saw."""

    latencies_ms: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


async def push_for(port, seconds):
    template = build_bodies("NODE_ID_PLACEHOLDER")["json"]
    seen = Seen()
    began = time.monotonic() + LEAD_S
    async with asyncio.TaskGroup() as agents:
        for number in range(N_NODES):
            body = template.replace(b"NODE_ID_PLACEHOLDER", f"node-{number:05}".encode())
            first = began + INTERVAL_S * number / N_NODES
            agents.create_task(agent(port, body, first, began + seconds, seen))
    return seen


async def agent(port, body, due, end, seen):
    head = (
        "POST /v1/metrics?cluster_id=prod+a HTTP/1.1\r\nHost: fleet\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    request = head.encode() + body
    await asyncio.sleep(due - time.monotonic())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while due < end:
            sent = time.monotonic()
            writer.write(request)
            answer = await reader.readuntil(b"}")
            seen.latencies_ms.append((time.monotonic() - sent) * 1e3)
            if not answer.startswith(b"HTTP/1.1 200"):
                seen.failures.append(answer.decode())
                return
            await reader.readuntil(b"}")
            due += INTERVAL_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
    except (OSError, asyncio.IncompleteReadError) as error:
        seen.failures.append(str(error))
    finally:
        writer.close()
