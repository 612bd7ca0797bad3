"""A real engine on the simulator's libraries. Everything here needs root and BTF."""

import os
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest

from ingero.agent.capture.discover.processes import open_file
from ingero.agent.capture.probes.engine import Engine, EngineSettings
from ingero.agent.capture.probes.targets import find_target
from ingero.config.environment import ProbeMode
from ingero.sim.runner import SimSettings, Simulation, get_program


def target_of(path):
    """The probe target of a file."""
    with open_file(path) as opened:
        return find_target(opened, str(path))


@dataclass
class Traced:
    """What an engine saw of one run."""

    accounts: list
    keys: np.ndarray
    counts: np.ndarray
    copies: np.ndarray
    records: dict = field(default_factory=dict)
    losses: dict = field(default_factory=dict)

    def count(self, pid, source, op):
        is_it = (
            (self.keys["pid"] == pid) & (self.keys["source"] == source) & (self.keys["op"] == op)
        )
        assert is_it.sum() == 1, f"pid {pid} source {source} op {op}"
        return self.counts[is_it][0]

    def calls(self, pid, source, op, *rings):
        """Records of one operation of a process in order of time, out of all rings of calls that succeeded unless named."""
        records = np.concatenate([self.records[ring] for ring in rings or ("calls", "kept_calls")])
        records = records[np.argsort(records["header"]["mono_ns"], kind="stable")]
        return records[
            (records["pid"] == pid) & (records["source"] == source) & (records["op"] == op)
        ]


def read(engine, accounts):
    """Everything the engine holds now."""
    kept = {name: [] for name in engine.rings}
    engine.drain({
        name: lambda view, into=into: into.append(view.copy()) for name, into in kept.items()
    })
    keys, counts = engine.state.read_counts()
    records = {
        name: np.concatenate([engine.rings[name].empty(), *parts]) for name, parts in kept.items()
    }
    return Traced(
        accounts, keys, counts, engine.state.read_copies(), records, engine.state.read_losses()
    )


@contextmanager
def open_engines():
    """Start engines; they end with the context.

    With the simulator's libraries attached they watch this process's children only: others may run simulations too.
    """
    engines = []

    def start(settings=None, *, attach=True, watch_own=True, is_started=True):
        settings = settings or EngineSettings(host_probes=())
        if attach and "process" not in settings.host_probes:
            settings = replace(settings, host_probes=("process", *settings.host_probes))
        engine = Engine(settings)
        engines.append(engine)
        if is_started:  # otherwise the test says first whom to watch
            engine.start_host_probes()
            assert not engine.missing, engine.missing
        if attach and watch_own:  # before the first call of anybody else can be seen
            engine.control.watch_pid(os.getpid())
        folder = get_program().parent
        for name in ("libcudart.so.12", "libcuda.so.1", "libnccl.so.2") if attach else ():
            assert engine.attach(target_of(folder / name))
        return engine

    try:
        yield start
    finally:
        for engine in engines:
            engine.close()


def run_traced(start_engine, name, *, settings=None, n_ranks=0, device=None, **knobs):
    """Run a workload under an engine and read what it saw."""
    engine = start_engine(settings)
    with Simulation(SimSettings(name, knobs, n_ranks, device or {})) as simulation:
        accounts = simulation.wait()
    return read(engine, accounts)


@pytest.fixture
def start_engine():
    """`open_engines` for a test."""
    with open_engines() as start:
        yield start


@pytest.fixture
def trace_sim(start_engine):
    """`run_traced` for a test."""
    return partial(run_traced, start_engine)


@pytest.fixture(scope="module", params=[mode for mode in ProbeMode if mode is not ProbeMode.AUTO])
def primes(request):
    """What an engine saw of the workload that calls each function a number of times of its own, probed in each way."""
    settings = EngineSettings(host_probes=(), keep_first=1 << 20, probe_mode=request.param)
    with open_engines() as start:
        return run_traced(start, "primes", settings=settings)


@pytest.fixture(name="read")
def _read():
    return read


@pytest.fixture(name="target_of")
def _target_of():
    return target_of
