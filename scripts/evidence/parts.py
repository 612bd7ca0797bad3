"""The parts of the evidence: checks, the `gpu` tier, demos, NCCL's plug-in, a job of four ranks, what tracing costs."""

from __future__ import annotations

import functools
import json
import re
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from scripts.evidence.running import INGERO, ROOT, EvidenceError, Part, Setting

DEMOS: Final = (
    *("incident", "cold-start", "cpu-contention", "gpu-steal", "memcpy-bottleneck"),
    "periodic-spike",
)
_PROGRAMS: Final = ROOT / "benchmarks/gpu"
_ROUNDS: Final = 3
_N_TURNS: Final = {"calls": 300, "steps": 400}
"""Rounds of 1000 launches, and training steps, of one run."""
_JOB: Final = ROOT / "examples/jobs/ddp.py"
_JOB_SIZE: Final = ("--width", "1024", "--depth", "8", "--batch", "16384", "--bucket-mb", "8")
"""Of which a rank alone takes about 10 ms a step on an H200, and four that share it four times as long."""
_RECORDED: Final = ROOT / "build/evidence"
"""Where what the job's agents push is kept; `ingero replay FILE` judges it again."""
_N_RANKS: Final = 4
_SLOW: Final = 2
FAULTS: Final[dict[str, tuple[str, str]]] = {
    "none": ("", ""),
    f"uneven:{_SLOW}:2x": ("culprit", "gpu-computing"),
    f"slow-python:{_SLOW}:400ms": ("culprit", "more-computing"),
    f"pause:{_SLOW}": ("hang", "stopped"),
}
"""What is done to rank `_SLOW` of a job over NCCL, what must be said of it, and why."""
_N_OPERATIONS: Final = 200
_N_DRY: Final = 2


def run_check(setting: Setting) -> tuple[str, dict[str, Any]]:
    """What `ingero check` says of the machine."""
    report = json.loads(setting.call((*INGERO, "check", "--json")).stdout)
    missing = [one["name"] for one in report["checks"] if not one["pass"]]
    return ("missing: " + ", ".join(missing) if missing else "all checks pass"), report


def run_tier(setting: Setting) -> tuple[str, dict[str, Any]]:
    """The tests of real CUDA, PyTorch and NCCL; without a device only that they can be collected."""
    # The user's own options would change the lines that are read here.
    pytest = ("env", "--unset=PYTEST_ADDOPTS", INGERO[0], "-m", "pytest")
    command = (*pytest, "-q", "-n", "0", "tests/gpu/test_real_gpu.py")
    if setting.is_dry:
        listed = setting.call((*command, "--collect-only")).stdout
        n_tests = listed.count("::test_")
        if not n_tests:
            raise EvidenceError("no test was collected")
        return f"{n_tests} tests collected", {}
    ended = setting.call(("env", "INGERO_REQUIRE=gpu,kernel,torch", *command, "-rA"))
    passed = re.findall(r"^PASSED (\S+)", ended.stdout, re.MULTILINE)
    if not passed:
        raise EvidenceError("no test ran")
    return f"{len(passed)} tests pass", {"tests": passed}


def run_demo(name: str, setting: Setting) -> tuple[str, dict[str, Any]]:
    """A fault that really happens on the device is named first, as in the synthetic recording of the same demo."""
    wanted = _read_rules(setting, name, "--no-gpu")
    if setting.is_dry:
        return f"names {wanted[0]} in the synthetic recording", {}
    found = _read_rules(setting, name, "--gpu")
    if found[0] != wanted[0]:
        raise EvidenceError(f"{found[0]} is named first, not {wanted[0]}")
    return f"{found[0]} is named first", {"rules": found}


def run_plugin(setting: Setting) -> tuple[str, dict[str, Any]]:
    """NCCL loads the plug-in and tells it of every collective of every rank; without a device, that the file loads."""
    variable, _, path = setting.call((*INGERO, "nccl-plugin", "path")).stdout.strip().partition("=")
    if setting.is_dry:
        program = (
            "import ctypes, sys; lib = ctypes.CDLL(sys.argv[1]);"
            " print(sum(hasattr(lib, f'ncclProfiler_v{n}') for n in (4, 5, 6)))"
        )
        n_found = int(setting.call((INGERO[0], "-c", program, path)).stdout)
        if n_found != 3:
            raise EvidenceError(f"{path} has {n_found} of three versions of the interface")
        return "the plug-in loads, with versions 4, 5 and 6 of the interface", {}
    command = [setting.need_python(), str(_PROGRAMS / "collectives.py"), str(_N_OPERATIONS)]
    with subprocess.Popen(
        ["env", f"{variable}={path}", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, cwd=ROOT,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            status = setting.call((*INGERO, "nccl-plugin", "status", "--json")).stdout
            process.communicate("\n", timeout=setting.left_s())
        except subprocess.TimeoutExpired:
            raise EvidenceError("the ranks did not end") from None
        finally:
            process.kill()
    if process.returncode:
        raise EvidenceError(f"the ranks ended with status {process.returncode}")
    return _read_plugin(json.loads(said), json.loads(status))


def run_job(fault: str, setting: Setting) -> tuple[str, dict[str, Any]]:
    """A job of four ranks over NCCL that share a device: the slow one is named, with its cause, and nobody else."""
    wanted, cause = FAULTS[fault]
    command = [*INGERO, "up", "--json", "--ranks", str(_N_RANKS), "--job", str(_JOB)]
    command += ["--fault", fault, "--python", setting.need_python()]
    record = _RECORDED / f"{fault.replace(':', '-')}.parquet"
    if setting.is_dry:
        command += ["--seconds", "3", "--", "--device", setting.device]
    else:
        _RECORDED.mkdir(parents=True, exist_ok=True)
        command += ["--seconds", "40" if wanted else "20", "--record", str(record), "--force"]
        command += ["--", "--device", setting.device, *_JOB_SIZE]
    ended = setting.call(command)
    result = json.loads(ended.stdout)
    if setting.is_dry:
        return f"{result['watched_s']:.0f} s of the job were watched, on the processor", {}
    record.with_suffix(".json").write_text(ended.stdout)
    said = {one["rank"]: one["verdict"] for one in result["verdicts"]}
    named = {rank for rank, verdict in said.items() if verdict in {"culprit", "network"}}
    named |= set(result["missing_ranks"])
    if named != ({_SLOW} if wanted else set()):
        raise EvidenceError(f"named are {sorted(named)}: {said}")
    if not wanted:
        return f"nobody is named in {result['watched_s']:.0f} s", {"result": result}
    why = result["diagnoses"].get(str(_SLOW), {})
    line = f"rank {_SLOW}: {wanted} after {result['detection_s']} s, {why.get('summary') or 'no cause'}"
    if why.get("cause") != cause:
        raise EvidenceError(f"{line}; {cause} was done to it")
    return line, {"result": result}


def run_overhead(kind: str, setting: Setting) -> tuple[str, dict[str, Any]]:
    """A loop alone, under `ingero trace` with default options, and under PyTorch's profiler, in turns."""
    n_turns = _N_DRY if setting.is_dry else _N_TURNS[kind]
    program = [str(_PROGRAMS / "loop.py"), kind, setting.device, str(n_turns)]
    alone = [setting.need_python(), *program]
    rounds = []
    for _ in range(1 if setting.is_dry else _ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            trace = (*INGERO, "trace", "--db", str(Path(folder) / "r.db"), "--")
            commands = {
                "alone": alone,
                "traced": [*trace, *alone],
                "profiler": [*alone, "--profiler"],
            }
            rounds.append({name: _measure(setting, one) for name, one in commands.items()})
    ratios = {
        name: statistics.median(
            one[name]["median_ns"] / one["alone"]["median_ns"] for one in rounds
        )
        for name in ("traced", "profiler")
    }
    base_us = statistics.median(one["alone"]["median_ns"] for one in rounds) / 1000
    what = "a launch" if kind == "calls" else "a step"
    line = (
        f"{what} of {base_us:.2f} µs: × {ratios['traced']:.4f} traced,"
        f" × {ratios['profiler']:.3f} under PyTorch's profiler"
    )
    if setting.is_dry:
        line = f"all three ways run on the processor, {n_turns} turns each"
    return line, {"ratios": ratios, "rounds": rounds}


def _read_rules(setting: Setting, name: str, form: str) -> list[str]:
    lines = setting.call((*INGERO, "demo", name, form, "--json")).stdout.splitlines()
    rules = [one["rule"] for one in map(json.loads, lines) if one["type"] == "incident"]
    if not rules:
        raise EvidenceError(f"`ingero demo {name} {form}` names nothing")
    return rules


def _read_plugin(said: dict[str, Any], status: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    loaded = [one for one in status if one["pid"] in said["pids"]]
    seen = {**said, "status": loaded}
    if len(loaded) < said["n_ranks"]:
        raise EvidenceError(f"{len(loaded)} of {said['n_ranks']} ranks have the plug-in: {seen}")
    told = sum(one["n_ops"] for one in loaded)
    if told < said["n_ranks"] * _N_OPERATIONS:
        raise EvidenceError(f"{told} collectives told of {said['n_ranks']} × {_N_OPERATIONS}")
    return f"NCCL {said['nccl']}, {said['n_ranks']} ranks: {told} collectives told", seen


def _measure(setting: Setting, command: Sequence[str]) -> dict[str, Any]:
    ended = setting.call(command)
    found = re.search(r'^\{"kind".*\}$', ended.stderr, re.MULTILINE)
    if found is None:
        raise EvidenceError(f"the program said nothing: {ended.stderr[-300:]}")
    result: dict[str, Any] = json.loads(found[0])
    return result


PARTS: Final = (
    Part("check", 30, run_check),
    Part("tier", 120, run_tier),
    Part("overhead-calls", 120, functools.partial(run_overhead, "calls")),
    Part("overhead-steps", 120, functools.partial(run_overhead, "steps")),
    Part("nccl-plugin", 60, run_plugin),
    *(
        Part(f"job-{fault.partition(':')[0]}", 100, functools.partial(run_job, fault))
        for fault in FAULTS
    ),
    *(Part(f"demo-{name}", 40, functools.partial(run_demo, name)) for name in DEMOS),
)
"""In the order in which they run: a device may be at hand for minutes, and what is not known yet comes first."""
