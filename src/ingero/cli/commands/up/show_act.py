"""``ingero up --slurm`` on a screen: the job, its nodes and what is done about one of them; plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.text import Text

from ingero.cli.commands.up.show import describe_causes
from ingero.cli.progress import build_table, describe_slowdown, get_style
from ingero.sim.cluster.act_result import ActProgress, find_step_times
from ingero.units import NS_PER_S, format_duration

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ingero.model.verdicts import Verdict

_LOOKED_AT: Final = (
    "findings.min_evidence",
    "findings.min_persistence",
    "findings.causes",
    "node in service",
    "brakes.max_nodes_at_once",
)
"""Clauses that the end names; all of them are in ``--json``."""


class ActLines:
    """A line per stage, and for each thing that is said or done."""

    def __init__(self) -> None:
        self._said: set[object] = set()

    def describe(self, progress: ActProgress) -> Iterator[str]:
        """Lines that were not there before."""
        clock = _clock(progress)
        for line in (progress.stage, *_say_events(progress)):
            if line and line not in self._said:
                self._said.add(line)
                yield f"{clock}{line}"


def _clock(progress: ActProgress) -> str:
    since_ns = progress.since("fault")
    return "" if since_ns is None else f"{since_ns / NS_PER_S:5.1f} s  "


def _say_events(progress: ActProgress) -> Iterator[str]:
    """What has happened by now, in the order in which it does."""
    watch = progress.watch
    yield from (f"Fleet names rank {rank}: {kind}" for rank, kind in watch.named)
    yield from describe_causes(watch)
    acted = {one.node_id for one in progress.actions}
    yield from (f"policy: {one.decision}" for one in progress.findings if one.node_id not in acted)
    for one in progress.actions:
        yield f"action {one.action_id} on {one.target}: {one.state.value}, {one.note}"
    if progress.approve:
        yield f"it waits for you: {progress.approve}"
    if progress.drained:
        yield f"Slurm shows {', '.join(progress.drained)} as drained"
    if progress.job.name == "RUNNING" or progress.job.is_over:
        again = f", restart {progress.job.n_restarts}" if progress.job.n_restarts else ""
        yield f"job {progress.job.name} on {progress.job.nodes}{again}"


def draw(progress: ActProgress) -> RenderableType:
    """One frame."""
    job = progress.job
    where = f" on {job.nodes}" if job.nodes else ""
    step = "" if progress.last_step is None else f", step {progress.last_step}"
    head = Text(f"{_clock(progress)}{progress.stage}", style="bold")
    line = Text(f"job {job.name}{where}{step}{_say_step_times(progress)}")
    by_node = find_verdicts(progress)
    table = build_table("node", "Slurm", "rank", "own work against its peers", "", "verdict")
    for name, state in sorted(progress.nodes.items(), key=_by_number):
        style = "bold red" if "DRAIN" in state else "green" if state != "IDLE" else "dim"
        table.add_row(name, Text(state, style=style), *_describe_rank(by_node.get(name)))
    events = "\n".join(_say_events(progress))
    return Group(head, line, Text(), table, Text(f"\n{events}"))


def find_verdicts(progress: ActProgress) -> dict[str, Verdict]:
    """What Fleet says of the rank that each node has now, or had last.

    A node has had two ranks where the job was requeued: Slurm numbers the nodes that it takes in their order.
    """
    nodes = sorted(progress.nodes.items(), key=_by_number)
    taken = [name for name, state in nodes if "DRAIN" not in state]
    judgement = progress.watch.judgement
    found: dict[str, Verdict] = {}
    for verdict in judgement.verdicts if judgement else ():
        name, rank = verdict.rank.node_id, verdict.rank.rank
        is_now = taken[rank : rank + 1] == [name]
        if is_now or name not in found:
            found[name] = verdict
    return found


def _by_number(node: tuple[str, str]) -> tuple[int, str]:
    """``host-10`` comes after ``host-9``."""
    return len(node[0]), node[0]


def _describe_rank(verdict: Verdict | None) -> tuple[str | Text, ...]:
    if verdict is None:
        return "", "", "", ""
    style = get_style(verdict.kind.value)
    slowdown = describe_slowdown(verdict, style)
    return str(verdict.rank.rank), *slowdown, Text(verdict.kind.value, style=style)


def _say_step_times(progress: ActProgress) -> str:
    steps = find_step_times(progress)
    known = (("before", steps.before), ("with the fault", steps.during), ("now", steps.after))
    parts = [f"{format_duration(ns)} {name}" for name, ns in known if ns is not None]
    return f"   a step: {', '.join(parts)}" if parts else ""


def render_act_result(result: dict[str, Any], console: Console) -> None:
    """The story in its last lines."""
    for line in _say_result(result):
        console.print(line, highlight=False, soft_wrap=True)


def _say_result(result: dict[str, Any]) -> Iterator[str]:
    culprits = ", ".join(f"rank {rank}" for rank in result["culprits"]) or "nobody"
    yield f"named: {culprits}"
    if result["diagnosis"]:
        yield f"why: {result['diagnosis']['summary']}"
    drained = ", ".join(result["drained"]) or "no node"
    yield f"drained: {drained} (mode {result['mode']})"
    for clause in result["policy_clauses"]:
        if clause["clause"] in _LOOKED_AT:
            yield f"    {clause['clause']}: {clause['says']}"
    if not result["policy_clauses"]:
        yield from (f"    {one['decision']}" for one in result["findings"])
    yield from _say_job(result)
    yield from _say_savings(result)
    yield from _say_checks(result)


def _say_checks(result: dict[str, Any]) -> Iterator[str]:
    """What others say of it: an Echo that received all, and the same job without the fault or the action."""
    answer = result.get("echo")
    if "echo" in result:
        unknown = "it received no action" if answer is None else answer["unknown"]
        saved = (
            ""
            if answer is None or unknown
            else f"{answer['saved_gpu_seconds']:.1f} ± {answer['saved_standard_error_gpu_seconds']:.1f} GPU seconds"
        )
        yield f"Echo: {saved or f'not known what it saved: {unknown}'}"
    for kind, twin in result.get("twins", {}).items():
        name = f"the same job {kind.replace('-', ' ')}"
        what = "lost" if kind == "without-fault" else "saved"
        measured = twin[f"{what}_gpu_seconds"]
        if measured is None:
            yield f"{name}: not known: too few steps were seen"
            continue
        yield (
            f"{name}: {measured} GPU seconds {what}, estimated {twin['estimated_gpu_seconds']}"
            f" (off by {twin['off_by_percent']} %); a step {twin['step_ms']} ms"
        )


def _say_job(result: dict[str, Any]) -> Iterator[str]:
    job = result["job"]
    again = f", requeued {job['restarts']} times" if job["restarts"] else ""
    yield f"job: {job['state']} on {job['nodes']} at step {result['last_step']}{again}"
    steps = {name: ms for name, ms in result["step_ms"].items() if ms is not None}
    if steps:
        yield "a step: " + ", ".join(f"{ms} ms {name}" for name, ms in steps.items())
    delays = {name: s for name, s in result["delays_s"].items() if s is not None}
    if delays:
        parts = (f"{name.replace('_', ' ')} {s} s" for name, s in delays.items())
        yield "delays: " + ", ".join(parts)


def _say_savings(result: dict[str, Any]) -> Iterator[str]:
    savings = result["savings"]
    if savings is None:
        return
    amount, currency = result["saved_amount"], result["currency"]
    money = "" if amount is None else f", {amount:.4g} {currency}"
    yield (
        f"saved: {savings['saved_gpu_seconds']} GPU seconds{money} ({result['ranks']} ranks):"
        f" {savings['steps_after_action']} steps took {savings['took_s']} s with the restart of"
        f" {savings['restart_s']} s, and would have taken {savings['would_have_taken_s']} s"
    )
    if savings["saved_gpu_seconds_per_further_hour"] is not None:
        yield (
            f"each further hour of the job saves {savings['saved_gpu_seconds_per_further_hour']}"
            " GPU seconds"
        )
