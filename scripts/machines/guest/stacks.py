"""Checks of stacks: one trace of a C program and of a Python program, each frame as the program has it."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, Final

from scripts.machines.guest.chain import OPERATIONS, PATHS, PROGRAM
from scripts.machines.guest.running import CheckError, Ended, trace_until_met

from ingero.sim.runner import get_program

_N_CALLS: Final = 20
_SCRIPT: Final = "scripts.machines.guest.calls"
_ENDED: Final = "[the process ended before its stack was read]"
_WANTED: Final = ["inner", "middle", "outer", "<module>"]


@cache
def trace_all() -> Ended:
    """A trace with the stack of every recorded call of three programs: starting one costs most of the time."""
    program = get_program()
    calls = f"{sys.executable} -m {_SCRIPT} {program.parent}/libcudart.so.12 {_N_CALLS}"
    # Stacks are read while the process lives: it pauses between calls.
    native = f"{program} infer requests={_N_CALLS} tokens=1 kernels=1 idle_us=300000"
    chain = f"{sys.executable} -m scripts.machines.guest.chain {PROGRAM}"
    return trace_until_met(
        "python", "--stack", "--", "/bin/sh", "-c", f"{calls}; {native}; {chain}"
    )


def _find_stacks(op: str, name: str) -> list[list[dict[str, Any]]]:
    """Stacks of an operation of processes of that name; an empty one for a call without."""
    return [
        line.get("stack", [])
        for line in trace_all().of_type("event")
        if line["op"] == op and line.get("process_name", "").startswith(name)
    ]


def check_native() -> str:
    """Each call of a C program has its functions, from the caller to where the program begins."""
    stacks = _find_stacks("cudaMemcpy", "workload")
    if len(stacks) != _N_CALLS:
        raise CheckError(f"{len(stacks)} calls of the C program were recorded, not {_N_CALLS}")
    symbols = [[_symbol(frame) for frame in one] for one in stacks]
    read = [one for one in symbols if one != [_ENDED]]
    bad = [one for one in read if not _is_whole(one)]
    if bad or len(read) < _N_CALLS // 2:
        raise CheckError(f"{len(bad)} of {len(read)} stacks are not whole, such as {bad[:1]}")
    return f"{len(read)} of {len(read)} stacks, from the caller to _start"


def _symbol(frame: dict[str, Any]) -> str:
    return str(frame.get("symbol", "")).partition("+")[0]


def _is_whole(symbols: list[str]) -> bool:
    return symbols[-1:] == ["_start"] and "main" in symbols and "infer" in symbols


def check_python() -> str:
    """Each call of a Python program has its Python functions, innermost first."""
    stacks = _find_stacks("cudaStreamSync", "python")
    found = [[frame["py_func"] for frame in one if "py_func" in frame] for one in stacks]
    # The first call is made before the tracer can know which Python this is.
    right = [one for one in found if one[: len(_WANTED)] == _WANTED]
    if len(right) < _N_CALLS:
        worst = next((one for one in reversed(stacks) if one), "no frames at all")
        raise CheckError(f"{len(right)} of {len(stacks)} stacks have the Python functions: {worst}")
    return f"{len(right)} of {len(stacks)} stacks have the program's functions"


def check_chain() -> str:
    """In its last round every call of a program without frame pointers has all functions of its path, by rules."""
    calls = [
        line
        for line in trace_all().of_type("event")
        if line["op"] in OPERATIONS and line.get("process_name") == "chain"
    ]
    calls = sorted(calls, key=lambda line: str(line["timestamp"]))[-len(PATHS) :]
    for (name, wanted), call in zip(PATHS.items(), calls, strict=True):
        found = [_symbol(frame) for frame in call.get("stack", ())]
        if [one for one in found if one in wanted] != wanted or found[-1].startswith("["):
            raise CheckError(f"the path {name!r} has the frames {found}")
    told = trace_all().of_type("coverage")[-1]["stacks"]
    return f"{len(calls)} of {len(PATHS)} paths, to their ends; of all stacks {told}"
