"""All processors add to one count: nothing is lost when several threads of a process make the same call at once."""

import subprocess

import numpy as np
import pytest
from tests.support.compiler import CC

from ingero.agent.capture.kernel.map_memory import reckon_all
from ingero.agent.capture.kernel.maps import count_possible_cpus
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.capture.probes.host import PROBES
from ingero.model.events import CudaOp, Source
from ingero.sim.runner import get_program

pytestmark = pytest.mark.kernel

N_THREADS, N_CALLS = 4, 20_000
PROGRAM = """
#include <pthread.h>
#include <stdio.h>
extern int cudaStreamQuery(void *);
static pthread_barrier_t start;
static void *work(void *unused)
{
	pthread_barrier_wait(&start);
	for (int i = 0; i < N_CALLS; i++) {
		cudaStreamQuery(0);
	}
	return unused;
}
int main(void)
{
	pthread_t threads[N_THREADS];
	pthread_barrier_init(&start, 0, N_THREADS);
	for (int i = 0; i < N_THREADS; i++)
		pthread_create(&threads[i], 0, work, 0);
	for (int i = 0; i < N_THREADS; i++)
		pthread_join(threads[i], 0);
	return 0;
}
"""


@pytest.fixture
def crowd(tmp_path):
    """A program whose threads all make the same call, as often as N_CALLS says, at the same time."""
    source, program, folder = tmp_path / "crowd.c", tmp_path / "crowd", get_program().parent
    source.write_text(PROGRAM)
    subprocess.run(
        [
            *(*CC, "-O2", f"-DN_THREADS={N_THREADS}"),
            *(f"-DN_CALLS={N_CALLS}", str(source), str(folder / "libcudart.so.12")),
            *(f"-Wl,-rpath,{folder}", "-lpthread", "-o", str(program)),
        ],
        check=True,
    )
    return program


@pytest.mark.parametrize("keep_one_in", [1, 37])
def test_calls_of_many_threads_at_once_are_counted_exactly(start_engine, read, crowd, keep_one_in):
    settings = EngineSettings(host_probes=(), keep_one_in=keep_one_in, keep_first=5)
    engine = start_engine(settings)
    process = subprocess.Popen([crowd])
    assert process.wait() == 0
    traced = read(engine, [])
    count = traced.count(process.pid, Source.CUDA, CudaOp.STREAM_QUERY)
    assert count["entered"] == count["seen"] == count["hist"].sum() == N_THREADS * N_CALLS
    assert count["emitted"] + count["sampled"] + count["lost"] == count["seen"]
    records = traced.calls(process.pid, Source.CUDA, CudaOp.STREAM_QUERY)
    assert len(records) == count["emitted"]
    assert records["weight"].sum(dtype=np.int64) == count["seen"] - count["lost"] - count["pending"]
    # The extremes are those of a call: of all, where each has its record.
    if not count["lost"] and keep_one_in == 1:
        assert count["min_ns"] == records["duration_ns"].min()
        assert count["max_ns"] == records["duration_ns"].max()
        assert count["total_ns"] == records["duration_ns"].sum()


def test_the_kernel_holds_no_more_than_the_arithmetic_says(start_engine):
    engine = start_engine(EngineSettings(), attach=False)
    costs = reckon_all(("calls", *(probe.name for probe in PROBES)), count_possible_cpus())
    assert {"counts", "threads", "calls"} <= engine.maps.keys()
    for name, held in engine.maps.items():
        if (
            name == "stack_copies" or "." in name
        ):  # a page without stacks; the constants of the programs
            continue
        assert held.read_memory() <= costs[name].max_bytes, name
        # Not more than a third above what the kernel counts, where all of it has its place from the start.
        if not costs[name].entry_bytes and held.read_memory() > 1 << 16:
            assert costs[name].fixed_bytes < held.read_memory() * 4 / 3, name
