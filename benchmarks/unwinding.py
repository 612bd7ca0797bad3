"""What native frames by unwind tables cost: the traced thread per recorded call, and the agent per copied stack.

A C program without frame pointers calls ``cudaStreamQuery`` from under so many functions; every call is recorded.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SAYS = "cost of native stacks by unwind tables, beside frame pointers"
ROUNDS = 3
CALLS = 4000
BATCHES = 8  # the fastest counts: others run on this machine
DEPTHS = (5, 30)
PROGRAM = """
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
int cudaStreamQuery(void *);
static double run(long calls)
{
	struct timespec begin, end;
	clock_gettime(CLOCK_MONOTONIC, &begin);
	for (long i = 0; i < calls; i++)
		cudaStreamQuery(0);
	clock_gettime(CLOCK_MONOTONIC, &end);
	return ((end.tv_sec - begin.tv_sec) * 1e9 + (end.tv_nsec - begin.tv_nsec)) / calls;
}
__attribute__((noinline)) double deep(int depth, long calls)
{
	volatile long here = calls;
	double took = depth ? deep(depth - 1, calls) : run(calls);
	return here ? took : 0;
}
int main(int argc, char **argv)
{
	char line[64];
	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		printf("%f\\n", deep(atoi(argv[1]) - 3, atol(line)));
		fflush(stdout);
	}
	return argc - 2;
}
"""


def run():
    from ingero.agent.capture.probes.engine import Engine, EngineSettings
    from ingero.errors import UnsupportedError

    with tempfile.TemporaryDirectory() as folder:
        program = _build(Path(folder))
        try:
            Engine(EngineSettings(host_probes=())).close()
        except UnsupportedError as error:
            yield f"   not measured: {error.message}"
            return
        for depth in DEPTHS:
            yield from _compare(program, depth)


def _build(folder):
    from ingero.sim.runner import get_program

    source, program = folder / "deep.c", folder / "deep"
    source.write_text(PROGRAM)
    library = get_program().parent / "libcudart.so.12"
    subprocess.run(
        [
            *(sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu.2.28", "-O2"),
            *("-fomit-frame-pointer", "-fno-optimize-sibling-calls", source, library),
            *(f"-Wl,-rpath,{library.parent}", "-o", program),
        ],
        check=True,
    )
    return program


def _compare(program, depth):
    taken = {name: [] for name in ("bare", "recorded", "frame pointers", "rules")}
    agent = []
    for _ in range(ROUNDS):  # interleaved, so that a busy machine disturbs all alike
        for name, ns in taken.items():
            took, unwound = _measure(program, depth, name)
            ns.append(took)
            agent += unwound
    bare, recorded, by_pointer, by_rules = (statistics.median(ns) for ns in taken.values())
    yield (
        f"   {depth} functions: {bare:.0f} ns bare → {recorded:.0f} recorded → {by_pointer:.0f} with frame pointers, which find 1 or 2 →"
        f" {by_rules:.0f} by rules: a stack costs {by_pointer - recorded:.0f} and {by_rules - recorded:.0f} ns"
    )
    first, again = (statistics.median(times) for times in zip(*agent, strict=True))
    yield f"   the agent per copied stack: {first:.2f} ms CPU the first of a process, {again:.2f} ms a later one"


def _measure(program, depth, name):
    """ns per call; CPU milliseconds of the agent for a first copy and for one of a later process, when rules are asked for."""
    from ingero.agent.capture.kernel.abi import Stacks
    from ingero.agent.capture.probes.engine import Engine, EngineSettings

    if name == "bare":
        with _start(program, depth) as process:
            return min(_ask(process, CALLS) for _ in range(BATCHES)), []
    stacks = Stacks.NONE if name == "recorded" else Stacks.ALL
    settings = EngineSettings(host_probes=(), keep_one_in=1, stacks=stacks)
    with Engine(settings) as engine:
        _attach(engine)
        if name != "rules":
            with _start(program, depth) as process:
                return min(_ask(process, CALLS) for _ in range(BATCHES)), []
        return _measure_rules(engine, program, depth)


def _attach(engine):
    from benchmarks.ring import _attach

    _attach(engine)


def _measure_rules(engine, program, depth):
    from ingero.agent.capture.probes.stacks import RecordedStacks

    stacks, milliseconds = RecordedStacks(engine.maps, engine.stack_copies), []
    for _ in range(2):
        with _start(program, depth) as process:
            _ask(process, 1)
            began = time.process_time()
            engine.rings["stacks"].drain(stacks.take)
            milliseconds.append((time.process_time() - began) * 1e3)
            took = min(_ask(process, CALLS) for _ in range(BATCHES))
    stacks.close()
    unwinding = engine.state.read_unwinding()
    assert unwinding["copied"] == 2, unwinding
    return took, [milliseconds]


def _start(program, depth):
    process = subprocess.Popen(
        [program, str(depth)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    return process


def _ask(process, calls):
    print(calls, file=process.stdin, flush=True)
    return float(process.stdout.readline())
