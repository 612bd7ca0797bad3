"""Ring decode: records a second and CPU per record, beside a memcpy of the same bytes."""

import time

import numpy as np

SAYS = "records out of the kernel's ring, beside a memcpy of their bytes"
LAUNCHES = 400_009
BAR_US = 0.1
BATCH = 1000


def run():
    from ingero.agent.capture.kernel.abi import get_dtype
    from ingero.agent.capture.probes.engine import Engine, EngineSettings
    from ingero.errors import UnsupportedError
    from ingero.sim.runner import SimSettings, Simulation

    try:
        engine = Engine(EngineSettings(host_probes=(), ring_bytes=128 << 20))
    except UnsupportedError as error:
        yield f"   not measured: {error.message}"
        return
    with engine:
        _attach(engine)
        with Simulation(SimSettings("storm", {"launches": LAUNCHES})) as simulation:
            simulation.wait()
        yield from _decode(engine, get_dtype("call").itemsize)


def _attach(engine):
    from ingero.agent.capture.discover.processes import open_file
    from ingero.agent.capture.probes.targets import find_target
    from ingero.sim.runner import get_program

    for path in sorted(get_program().parent.glob("lib*")):
        with open_file(path) as opened:
            target = find_target(opened, str(path))
        if target is not None:  # the simulator's libnvidia-ml has nothing to probe
            engine.attach(target)


def _decode(engine, record_bytes):
    from ingero.agent.capture.events import build_call_events

    sums = []

    def consume(view):
        sums.append((len(view), int(view["duration_ns"].sum()), int(view["weight"].sum())))

    began = time.process_time_ns()
    n_records = engine.rings["calls"].drain(consume)
    decode_ns = time.process_time_ns() - began
    _, counts = engine.state.read_counts()
    lost = int(counts["lost"].sum())
    block = np.ones(n_records * record_bytes, np.uint8)
    into = block.copy()  # touched once: a page fault is no copying
    began = time.process_time_ns()
    np.copyto(into, block)
    copy_ns = max(time.process_time_ns() - began, 1)
    per_record_us = decode_ns / n_records / 1000
    yield f"   {n_records} records read and two columns summed, {lost} lost"
    yield (
        f"   {per_record_us:.3f} µs CPU per record (bar {BAR_US}), {1e3 / per_record_us / 1e3:.1f} M/s;"
        f" {decode_ns / copy_ns:.1f} × a memcpy of the same bytes"
    )
    rows = np.zeros(BATCH, engine.rings["calls"].empty().dtype)
    rows["source"], rows["op"] = 1, 3
    began = time.process_time_ns()
    for _ in range(n_records // BATCH):
        build_call_events(rows, 0)
    spent_ns = time.process_time_ns() - began
    yield f"   into the model's rows, by {BATCH}: {spent_ns / (n_records // BATCH * BATCH) / 1000:.3f} µs each"
