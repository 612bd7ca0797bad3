"""CPU and memory of the agent itself while a process makes ten thousand launches a second."""

import resource
import tempfile
import time
from pathlib import Path

SAYS = "the agent's own CPU and memory at about 10 000 launches a second"
SECONDS = 5
BAR_PCT = 2.0
KNOBS = {"steps": 1_000_000, "kernels": 10, "loader_us": 500, "slow_from": 1 << 32}


def run():
    from ingero.errors import UnsupportedError

    for says, with_recording in (("counting only", False), ("recording", True)):
        try:
            yield _measure(says, with_recording)
        except UnsupportedError as error:
            yield f"   not measured: {error.message}"
            return
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    yield f"   resident memory at most {peak_mib} MiB (this benchmark's Python and what it imported included)"


def _measure(says, with_recording):
    from ingero.agent.app.recorder import Recorder
    from ingero.agent.app.tracing import TraceSession, TraceSettings
    from ingero.config.invoker import find_invoker
    from ingero.gpusim.runner import SimSettings, Simulation, get_program
    from ingero.telemetry.clock import SystemClock

    class Last:
        def on_process(self, identity): ...

        def on_events(self, ring, records, events): ...

        def on_totals(self, totals):
            self.totals = totals

    last, observers = Last(), []
    with tempfile.TemporaryDirectory() as folder:
        observers.append(last)
        recorder = None
        if with_recording:
            recorder = Recorder(
                Path(folder) / "cpu.db", "bench", SystemClock(), invoker=find_invoker()
            )
            observers.append(recorder)
        files = tuple(sorted(get_program().parent.glob("lib*")))
        settings = TraceSettings(duration_ns=SECONDS * 10**9, files=files)
        with TraceSession(settings, observers) as session, Simulation(SimSettings("train", KNOBS)):
            began, began_cpu = time.monotonic(), time.process_time()
            session.run()
            share = (time.process_time() - began_cpu) / (time.monotonic() - began)
        if recorder is not None:
            recorder.close()
    totals = last.totals
    rate = totals.counts["seen"].sum() / totals.elapsed_ns * 1e9
    launches = totals.counts["seen"][(totals.keys["source"] == 1) & (totals.keys["op"] == 3)].sum()
    return (
        f"   {says}: {100 * share:.2f} % of a core (bar {BAR_PCT}) at {launches / totals.elapsed_ns * 1e9:.0f} launches/s,"
        f" {rate:.0f} records/s, {totals.counts['lost'].sum()} lost, one in {totals.keep_one_in} kept"
    )
