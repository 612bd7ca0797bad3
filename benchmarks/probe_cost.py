"""What a probe adds to a call: entry only, and entry with return, beside the bare call in the same run."""

import statistics

SAYS = "cost of a probed call, beside the bare one"
ROUNDS = 5
LAUNCHES = 50_000


def run():
    from benchmarks.ring import _attach

    from ingero.agent.probes.engine import Engine, EngineSettings
    from ingero.errors import UnsupportedError

    bare, probed, attach_s = [], [], []
    for _ in range(ROUNDS):  # interleaved, so that a busy machine disturbs both alike
        bare.append(_measure())
        try:
            took, account = _measure_probed(Engine, EngineSettings, _attach)
        except UnsupportedError as error:
            yield f"   not measured: {error.message}"
            return
        attach_s.append(took)
        probed.append(account)
    for name, says, calls in (
        ("record_ns", "entry only (cudaEventRecord, with the driver call inside)", 1),
        ("launch_ns", "entry and return, of the runtime and of the driver call inside", 2),
    ):
        before = statistics.median(account[name] for account in bare)
        after = statistics.median(account[name] for account in probed)
        yield (
            f"   {says}: {before:.0f} → {after:.0f} ns, {(after - before) / calls:.0f} ns per probed call,"
            f" {after / before:.0f} × the bare call"
        )
    yield f"   load and attach: {statistics.median(attach_s):.3f} s (bar 1)"


def _measure():
    from ingero.gpusim.runner import SimSettings, Simulation

    with Simulation(SimSettings("cost", {"launches": LAUNCHES})) as simulation:
        return simulation.wait()[0]


def _measure_probed(engine_type, settings_type, attach):
    import time

    began = time.monotonic()
    with engine_type(settings_type(keep_one_in=1000)) as engine:
        engine.start_host_probes()
        attach(engine)
        took = time.monotonic() - began
        return took, _measure()
