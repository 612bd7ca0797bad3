"""``ingero up`` on a screen: the ranks while it runs, the verdict at the end.

Plain lines where there is no terminal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ingero.cli.progress import build_table, describe_slowdown, get_style
from ingero.model.verdicts import VerdictKind
from ingero.sim.cluster.result import Progress
from ingero.units import NS_PER_S

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class UpLines:
    """A line per stage and per rank that is named."""

    def __init__(self) -> None:
        self._said: set[object] = set()

    def describe(self, progress: Progress) -> Iterator[str]:
        """Lines that were not there before."""
        where = f"hosts are {progress.isolation}" if progress.isolation else ""
        for key, line in (
            ("note", progress.note),
            ("where", where),
            (progress.stage, progress.stage),
            *(((who, _describe_named(who, at))) for who, at in progress.named.items()),
            *((line, line) for line in describe_causes(progress)),
        ):
            if line and key not in self._said:
                self._said.add(key)
                yield line


def _describe_named(who: tuple[int, str], at_ns: int | None) -> str:
    when = "before the fault" if at_ns is None else f"{at_ns / NS_PER_S:.1f} s after the fault"
    return f"rank {who[0]}: {who[1]}, {when}"


def describe_causes(progress: Progress) -> list[str]:
    """Why ranks are slow or stand, and why those that nobody is blamed for are slow, a line each."""
    verdicts = progress.judgement.verdicts if progress.judgement else ()
    stages = {one.rank.rank for one in verdicts if one.kind is VerdictKind.IMBALANCE_STAGE}
    lines = [_describe_cause(f"rank {rank}", why) for rank, (why, _) in progress.diagnoses.items()]
    for rank, (why, _) in progress.uneven.items():
        lines.append(_describe_cause(_name_together(rank, is_stage=rank in stages), why))
    return lines


def _name_together(rank: int, *, is_stage: bool) -> str:
    slow = "all of its stage are slow" if is_stage else "its peers are slow in turns"
    return f"rank {rank} and {slow}"


def _describe_cause(who: str, diagnosis: dict[str, Any]) -> str:
    return f"{who}, why: {diagnosis['summary']}"


def draw(progress: Progress) -> RenderableType:
    """One frame."""
    since = progress.since_fault_ns
    clock = "" if since is None else f", {since / NS_PER_S:.1f} s"
    head = Text(f"{progress.stage}{clock}   ({progress.isolation})", style="bold")
    if progress.judgement is None:
        return Group(head, Text("Fleet has nothing to compare yet", style="dim"))
    missing = set(progress.hang["missing_ranks"]) if progress.hang else set()
    table = build_table("host", "rank", "own work against its peers", "slowdown", "verdict")
    for verdict in progress.judgement.verdicts:
        kind = "hang" if verdict.rank.rank in missing else verdict.kind.value
        style = get_style(kind)
        table.add_row(
            verdict.rank.node_id,
            str(verdict.rank.rank),
            *describe_slowdown(verdict, style),
            Text(kind, style=style),
        )
    named = [_describe_named(who, at) for who, at in progress.named.items()]
    named += describe_causes(progress)
    return Group(head, Text(), table, Text("\n" + "\n".join(named)))


def render_result(result: dict[str, Any], console: Console) -> None:
    """The verdict at the end."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("rank", "verdict", "why"):
        table.add_column(column)
    for verdict in result["verdicts"]:
        kind = verdict["verdict"]
        table.add_row(str(verdict["rank"]), Text(kind, style=get_style(kind)), verdict["reason"])
    console.print(table)
    for line in _describe_result(result):
        console.print(line, highlight=False, soft_wrap=True)


def _describe_diagnoses(result: dict[str, Any]) -> Iterator[str]:
    stage = VerdictKind.IMBALANCE_STAGE
    stages = {one["rank"] for one in result["verdicts"] if one["verdict"] == stage}
    for rank, diagnosis in result["diagnoses"].items():
        who = f"rank {rank}"
        if not diagnosis["is_named"]:
            who = _name_together(int(rank), is_stage=int(rank) in stages)
        yield _describe_cause(who, diagnosis)
        for cause in diagnosis["causes"]:
            yield from (f"    {fact}" for fact in cause["evidence"])
        yield from (f"    to do: {step}" for step in diagnosis["todo"])


def _describe_result(result: dict[str, Any]) -> Iterator[str]:
    if result["note"]:
        yield result["note"]
    if result["hang"]:
        for root in result["hang"]["roots"]:
            yield (
                f"rank {root['rank']} never arrived ({root['cause']});"
                f" {len(root['blocks'])} ranks wait for it"
            )
    yield from _describe_diagnoses(result)
    if result["takeover_s"] is not None:
        yield f"another Fleet judged {result['takeover_s']:.1f} s after one was killed"
    alerts = result["alerts"]
    if alerts["after_s"]:
        hosts = ", ".join(alerts["after_s"])
        n_events = sum(alerts["events"].values())
        yield f"the sink counted {n_events} events of the agents' own, of {hosts}"
    named = result["culprits"] + result["network"] + result["missing_ranks"]
    if not named:
        yield f"nobody named in {result['watched_s']:.0f} s"
    elif result["detection_s"] is not None:
        yield f"named {result['detection_s']:.1f} s after the fault"
