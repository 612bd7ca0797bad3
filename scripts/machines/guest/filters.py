"""Checks of `--pid`, `--user` and `--cgroup`: one watched and one other process, three tracers at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, Final

from scripts.machines.guest.running import (
    ENVIRONMENT,
    INGERO,
    LIMIT_S,
    CheckError,
    compare,
    shorten,
)

from ingero.sim.runner import get_program

_NOBODY: Final = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
_GROUP: Final = Path("/sys/fs/cgroup/watched")
_STEPS: Final = 11
FILTERS: Final = ("pid", "user", "cgroup")


def _start(stack: ExitStack, errors: int, *command: str | Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [str(word) for word in command],
        text=True,
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _read_until(tracer: subprocess.Popen[str], pid: int, errors: IO[bytes]) -> None:
    assert tracer.stdout is not None
    for line in tracer.stdout:
        if json.loads(line).get("pid") == pid:
            return
    errors.seek(0)
    said = shorten(errors.read().decode(errors="replace"))
    raise CheckError(f"a tracer ended before it saw the process, with {tracer.wait()}: {said}")


@cache
def _trace() -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The watched process, and the counts of each tracer."""
    _GROUP.mkdir(exist_ok=True)
    with ExitStack() as stack, tempfile.TemporaryFile() as errors:
        start = partial(_start, stack, errors.fileno())
        program = (get_program(), "train", "gate=1", f"steps={_STEPS}")
        stranger = start(*program)
        ours = start(*_NOBODY, *program)
        (_GROUP / "cgroup.procs").write_text(str(ours.pid), encoding="ascii")
        values = {"pid": str(ours.pid), "user": "nobody", "cgroup": f"/{_GROUP.name}"}
        tracers = {
            name: start(
                *INGERO,
                "trace",
                "--json",
                "--no-record",
                "--no-incidents",
                f"--{name}",
                value,
            )
            for name, value in values.items()
        }
        for tracer in tracers.values():
            _read_until(tracer, ours.pid, errors)
        for process in (stranger, ours):
            process.communicate("go\n", timeout=LIMIT_S)
        told = {}
        for name, tracer in tracers.items():
            os.kill(tracer.pid, signal.SIGINT)  # --pid may have ended by itself
            out, _ = tracer.communicate(timeout=LIMIT_S)
            lines = [json.loads(line) for line in out.splitlines()]
            told[name] = [line for line in lines if line["type"] == "counts"]
        return ours.pid, told


def check_filter(name: str) -> str:
    """The tracer counts what it was told to watch, exactly, and nothing else."""
    pid, told = _trace()
    compare("processes counted", {line["pid"] for line in told[name]}, {pid})
    launches = [line["seen"] for line in told[name] if line["op"] == "cudaLaunchKernel"]
    compare("launches counted", launches, [_STEPS * 40])
    return f"{launches[0]} launches of the watched process, none of the other"
