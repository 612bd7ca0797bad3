"""Checks on one trace of every workload of the simulator: exact counts, and who is who in NCCL."""

from __future__ import annotations

import json
import sys
from functools import cache
from typing import Any

from scripts.machines.guest.running import CheckError, Ended, compare, shorten, sum_calls, trace
from scripts.machines.guest.workloads import KNOBS, N_RANKS

from ingero.agent.capture.symbols.libraries import FUNCTIONS
from ingero.model.events import op_name, source_name
from ingero.sim.workloads import WORKLOADS

_OPERATIONS = {
    name: (source_name(function.source), op_name(function.source, function.op))
    for function in FUNCTIONS
    for name in function.names()
}
# What "cost" calls: it keeps no account, so that nothing but the calls takes time.
_BARE = {
    name: {"calls": KNOBS["cost"]["launches"], "bytes": 0, "errors": 0}
    for name in ("cudaLaunchKernel", "cudaEventRecord")
}
WORKLOAD_NAMES = tuple(workload.name for workload in WORKLOADS)


@cache
def _run_all() -> Ended:
    # Counts are exact whatever is recorded, and a record takes long to print here.
    program = (sys.executable, "-m", "scripts.machines.guest.workloads")
    return trace("--sampling-rate", 100, "--", *program, is_checked=False)


def trace_all() -> tuple[Ended, dict[str, list[dict[str, Any]]]]:
    """The trace, and what each process said of its own calls, by workload.

    Raises:
        CheckError: Tracing failed.
    """
    traced = _run_all()
    if traced.status:
        raise CheckError(f"`ingero trace` ended with {traced.status}: {shorten(traced.err)}")
    told = [json.loads(line) for line in traced.err.splitlines() if line.startswith('{"workload"')]
    return traced, {one["workload"]: one["accounts"] for one in told}


def sum_account(account: dict[str, Any]) -> dict[tuple[str, str], dict[str, int]]:
    """The workload's own account, added up over the functions that are one operation."""
    sums: dict[tuple[str, str], dict[str, int]] = {}
    for name, numbers in (account["calls"] or _BARE).items():
        into = sums.setdefault(_OPERATIONS[name], {"calls": 0, "bytes": 0, "errors": 0})
        for what in into:
            into[what] += int(numbers[what])
    return sums


def check_counts(workload: str) -> str:
    """Every call of a workload is counted once, with its bytes and errors, and none is lost."""
    traced, accounts = trace_all()
    if workload not in accounts:
        raise CheckError("the workload did not end")
    n_calls = 0
    for account in accounts[workload]:
        counts = sum_calls(traced.of_type("counts"), [account["pid"]])
        for key, own in sum_account(account).items():
            if not own["calls"]:
                continue
            found = counts.get(key)
            if found is None:
                raise CheckError(f"{key[1]}: none of {own['calls']} calls was counted")
            compare(f"{key[1]} counted", found["seen"] - found["nested"], own["calls"])
            compare(f"{key[1]} entered", found["entered"], found["seen"])
            compare(f"{key[1]} lost", found["lost"], 0)
            if key[0] != "driver":  # the runtime's own calls into the driver are in there too
                compare(f"{key[1]} bytes", found["bytes"], own["bytes"])
                compare(f"{key[1]} errors", found["errors"], own["errors"])
            n_calls += own["calls"]
    return f"{n_calls} calls, each counted once"


def check_losses() -> str:
    """Nothing was lost anywhere, and every process was probed."""
    traced, _ = trace_all()
    (coverage,) = traced.of_type("coverage")
    compare("losses", {k: v for k, v in coverage["losses"].items() if v}, {})
    compare("processes that were not probed", coverage["unprobed"], [])
    compare("lost", coverage["lost"], 0)
    return f"{coverage['seen']} records, none lost"


def check_nccl() -> str:
    """Each rank's collectives carry its communicator, its rank there, and an unbroken sequence."""
    traced, accounts = trace_all()
    events = [line for line in traced.of_type("event") if "comm_hash" in line]
    for account in accounts["ranks"]:
        mine = [line for line in events if line["pid"] == account["pid"]]
        _compare_ranks(mine, account, ("comm_hash", "ncclAllReduce", account["rank"], N_RANKS))
        place = (account["split_rank"], account["split_nranks"])
        _compare_ranks(mine, account, ("split_hash", "ncclAllGather", *place))
    return f"{N_RANKS} ranks and their split communicators"


def _compare_ranks(
    events: list[dict[str, Any]], account: dict[str, Any], wanted: tuple[str, str, int, int]
) -> None:
    hash_name, op, rank, n_ranks = wanted
    calls = [line for line in events if line["op"] == op]
    told = {(line["comm_hash"], line["comm_rank"], line["nranks"]) for line in calls}
    compare(f"{op}: communicator", told, {(f"{account[hash_name]:#018x}", rank, n_ranks)})
    compare(f"{op}: sequence", [line["seq"] for line in calls], list(range(1, len(calls) + 1)))
