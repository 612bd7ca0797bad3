"""A replay's result for a person: one table, then the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ingero.cli.progress import build_table, get_style
from ingero.cli.render import plural
from ingero.units import NS_PER_S, format_duration

if TYPE_CHECKING:
    from rich.console import Console


def worker_name(worker: dict[str, Any]) -> str:
    """``dp 0, stage 3``, or ``rank 2 on host-2``."""
    if "rank" in worker:
        return f"rank {worker['rank']} on {worker['node']}"
    return f"dp {worker['dp_rank']}, stage {worker['stage']}"


def _duration(seconds: float | None) -> str:
    return "" if seconds is None else format_duration(seconds * NS_PER_S)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def render_result(result: dict[str, Any], console: Console) -> None:
    """Print the table of workers and the conclusion."""
    numbers = ("slowdown", "evidence", "onset", "own", "waited", "GPU lost")
    table = build_table("worker", "verdict", *numbers, right=numbers)
    for verdict in result["verdicts"]:
        kind = verdict["verdict"]
        style = get_style(kind)
        table.add_row(
            worker_name(verdict["worker"]),
            f"[{style}]{kind}[/]",
            _number(verdict["slowdown"], ".2f") + ("×" if verdict["slowdown"] else ""),
            f"1e{verdict['evidence']:.0f}" if verdict["evidence"] >= 1 else "",
            "" if verdict["onset_step"] is None else f"step {verdict['onset_step']}",
            _duration(verdict["own_s"]),
            _duration(verdict["wait_s"]),
            _duration(verdict["lost_gpu_s"]) if verdict["lost_gpu_s"] else "",
        )
    console.print(table)
    console.print()
    for line in conclude(result):
        console.print(line, highlight=False, soft_wrap=True)


def conclude(result: dict[str, Any]) -> list[str]:
    """The answer in words: who, since when, what it cost, where to look next."""
    cost = result["cost"]
    size = f"{plural(result['steps'], 'step')}, {plural(result['workers'], 'worker')}, {plural(result['gpus'], 'GPU')}"
    lines = [f"{result['trace']}: {size}, {_duration(result['duration_s'])}"]
    named = [v for v in result["verdicts"] if v["verdict"] in {"culprit", "network", "drag"}]
    for verdict in named:
        lines.append(f"{verdict['verdict']}: {worker_name(verdict['worker'])}: {verdict['reason']}")
        if verdict["onset_step"] is not None:
            lines.append(
                f"  since step {verdict['onset_step']}; found after {plural(verdict['ops_to_detection'], 'operation')}"
                f" ({_duration(verdict['time_to_detection_s'])}); {plural(len(verdict['victims']), 'worker')} "
                f"waited for"
                f" it, {_duration(verdict['lost_gpu_s'])} of GPU time lost"
            )
    if not named:
        lines.append("no slow worker: " + _explain(result))
    lines.append(
        f"waiting: {_duration(cost['waited_gpu_s'])} of GPU time, {_duration(cost['charged_gpu_s'])} charged, "
        f"{_duration(cost['unattributed_gpu_s'])} unattributed"
    )
    lines += [f"next: {step}" for step in _next_steps(named)]
    return lines


def _next_steps(named: list[dict[str, Any]]) -> list[str]:
    """Where to look next, per kind of finding."""
    steps = {
        "culprit": "on the node of {who}: `sudo ingero trace`, then `ingero explain`, say why it is slow",
        "drag": "{who} costs little: look when its node is drained anyway",
        "network": "the links of {who}: its NIC, cable and switch port",
    }
    return [steps[v["verdict"]].format(who=worker_name(v["worker"])) for v in named]


def _explain(result: dict[str, Any]) -> str:
    reasons: dict[str, str] = {}
    for verdict in result["verdicts"]:
        if verdict["verdict"] != "ordinary":
            reasons.setdefault(verdict["verdict"], verdict["reason"])
    if not reasons:
        return "everybody works like its peers"
    return "; ".join(f"{kind}: {reason}" for kind, reason in reasons.items())
