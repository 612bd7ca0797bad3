"""What a probe adds to a call: entry only, and entry with return, beside the bare call in the same run."""

import statistics

SAYS = "cost of a probed call, beside the bare one"
ROUNDS = 5
LAUNCHES = 50_000


def run():
    from benchmarks.ring import _attach

    from ingero.agent.capture.kernel.abi import Stacks
    from ingero.agent.capture.probes.engine import Engine, EngineSettings
    from ingero.errors import UnsupportedError

    bare, every, stacked = [], [], []
    try:
        yield from _compare_ways()
    except UnsupportedError as error:
        yield f"   not measured: {error.message}"
        return
    for _ in range(ROUNDS):  # interleaved, so that a busy machine disturbs both alike
        bare.append(_measure())
        every.append(_measure_probed(Engine, EngineSettings, _attach, keep_one_in=1)[1])
        stacked.append(
            _measure_probed(Engine, EngineSettings, _attach, keep_one_in=1, stacks=Stacks.ALL)[1]
        )
    yield from _compare_stacks(bare, every, stacked)
    yield from _python_stacks()


def _compare_ways():
    """Each way to probe that this kernel has, beside the bare call and the others."""
    from benchmarks.ring import _attach

    from ingero.agent.capture.probes.engine import Engine, EngineSettings
    from ingero.agent.capture.probes.modes import WAYS, choose_way
    from ingero.errors import UnsupportedError

    ways = []
    for way in WAYS:
        try:
            ways.append(choose_way(way.mode))
        except UnsupportedError as error:
            yield f"   {way.mode}: not measured: {error.message}"
    bare = []
    runs = {way.mode: [] for way in ways}
    for _ in range(ROUNDS):
        bare.append(_measure())
        for mode, measured in runs.items():
            measured.append(_measure_probed(Engine, EngineSettings, _attach, probe_mode=mode))
    for name, description, calls in (
        ("record_ns", "entry only (cudaEventRecord, with the driver call inside)", 1),
        ("launch_ns", "entry and return, of the runtime and of the driver call inside", 2),
    ):
        before = statistics.median(account[name] for account in bare)
        for mode, measured in runs.items():
            after = statistics.median(account[name] for _, account in measured)
            yield (
                f"   {mode}: {description}: {before:.0f} → {after:.0f} ns, {(after - before) / calls:.0f} ns per probed call,"
                f" {after / before:.0f} × the bare call"
            )
    for mode, measured in runs.items():
        yield f"   {mode}: load and attach: {statistics.median(took for took, _ in measured):.3f} s (bar 1)"


def _measure():
    from ingero.sim.runner import SimSettings, Simulation

    with Simulation(SimSettings("cost", {"launches": LAUNCHES})) as simulation:
        return simulation.wait()[0]


def _compare_stacks(bare, every, stacked):
    """What a native stack adds to a launch that is recorded, when every launch is."""
    before, without, with_them = (
        statistics.median(account["launch_ns"] for account in accounts)
        for accounts in (bare, every, stacked)
    )
    yield (
        f"   every call recorded, without and with its native stack: {before:.0f} → {without:.0f} → {with_them:.0f} ns,"
        f" {(with_them - without) / 2:.0f} ns per recorded call, {with_them / before:.0f} × the bare call"
    )


PYTHON_CALLS = """
import ctypes, json, sys, time
call = ctypes.CDLL(sys.argv[1]).cudaStreamQuery
def deep(n, calls):
    if n:
        return deep(n - 1, calls)
    began = time.perf_counter_ns()
    for _ in range(calls):
        call(None)
    return (time.perf_counter_ns() - began) / calls
print("ready", flush=True)
input()
print(json.dumps([deep(n, 20000) for n in (8, 98)]))
"""


def _python_stacks():
    """The same from Python through ctypes, at ten and at a hundred frames."""
    from benchmarks.ring import _attach

    from ingero.agent.capture.kernel.abi import Stacks
    from ingero.agent.capture.probes.engine import Engine, EngineSettings

    runs = {"bare": [], "without": [], "with": []}
    chosen = {"without": Stacks.NONE, "with": Stacks.ALL}
    for _ in range(ROUNDS):
        runs["bare"].append(_call_from_python())
        for name in ("without", "with"):
            settings = EngineSettings(keep_one_in=1, stacks=chosen[name])
            with Engine(settings) as engine:
                engine.start_host_probes()
                _attach(engine)
                runs[name].append(_call_from_python(engine))
    for i, frames in enumerate((10, 100)):
        bare, without, with_them = (
            statistics.median(run[i] for run in runs[name]) for name in runs
        )
        yield (
            f"   from {frames} Python frames (ctypes, cudaStreamQuery): {bare:.0f} → {without:.0f} →"
            f" {with_them:.0f} ns, {with_them - without:.0f} ns per recorded call, {with_them / bare:.1f} × the bare call"
        )


def _call_from_python(engine=None):
    import json
    import subprocess
    import sys

    from ingero.agent.capture.probes.stacks import RecordedStacks
    from ingero.sim.runner import get_program

    library = get_program().parent / "libcudart.so.12"
    with subprocess.Popen(
        [sys.executable, "-c", PYTHON_CALLS, str(library)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.readline()
        if engine is not None and engine.with_stacks:
            stacks = RecordedStacks(engine.maps, engine.stack_copies)
            stacks.examine(process.pid)
            stacks.close()
        return json.loads(process.communicate("\n")[0])


def _measure_probed(engine_type, settings_type, attach, keep_one_in=1000, **settings):
    import time

    began = time.monotonic()
    with engine_type(settings_type(keep_one_in=keep_one_in, **settings)) as engine:
        engine.start_host_probes()
        attach(engine)
        took = time.monotonic() - began
        return took, _measure()
