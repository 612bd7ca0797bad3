"""A replay while it runs: workers against their peers, or a line now and then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ingero.cli.progress import BAR_CELLS, build_table, describe_slowdown, get_style
from ingero.model.verdicts import Verdict, describe_rank
from ingero.sim.replay import ReplayProgress
from ingero.units import NS_PER_S, format_duration

if TYPE_CHECKING:
    from rich.console import RenderableType

_LINE_EVERY: Final = 0.1
MAX_ROWS: Final = 32
"""Workers shown while it runs: the slowest of them; the final table has all."""


class ReplayLines:
    """A line for every tenth of the recording, and one when a worker is first named."""

    def __init__(self) -> None:
        self._shown = -1.0
        self._named: set[str] = set()

    def describe(self, progress: ReplayProgress) -> Iterator[str]:
        """The line, when it is time for one."""
        verdicts = progress.judgement.verdicts if progress.judgement else ()
        named = {describe_rank(v.rank): v for v in verdicts if v.is_alarm}
        is_new = bool(named.keys() - self._named)
        share = progress.at_ns / progress.end_ns
        if not is_new and share < self._shown + _LINE_EVERY and share < 1.0:
            return
        self._shown, self._named = share, set(named)
        who = "; ".join(f"{v.kind.value} {name}" for name, v in named.items()) or "nobody named"
        whole = format_duration(progress.end_ns)
        yield f"{share:4.0%} of {whole}, {progress.n_pushes} pushes: {who}"


def draw(progress: ReplayProgress) -> RenderableType:
    """One frame: how far, and each worker's own time against the median of its peers."""
    head = Table.grid(padding=(0, 1))
    head.add_row(
        ProgressBar(total=100, completed=100 * progress.at_ns / progress.end_ns, width=BAR_CELLS),
        f"{format_duration(progress.at_ns)} of {format_duration(progress.end_ns)} of training",
        f"{progress.n_pushes} pushes taken",
    )
    if progress.judgement is None or not progress.judgement.verdicts:
        return Group(head, Text("\nFleet has nothing to compare yet", style="dim"))
    table = build_table(
        *("worker", "own time against its peers", "slowdown", "evidence", "verdict"),
        right=("slowdown", "evidence"),
    )
    verdicts = progress.judgement.verdicts
    if len(verdicts) > MAX_ROWS:
        verdicts = tuple(sorted(verdicts, key=_slowness, reverse=True)[:MAX_ROWS])
    for verdict in verdicts:
        style = get_style(verdict.kind.value)
        table.add_row(
            describe_rank(verdict.rank),
            *describe_slowdown(verdict, style),
            f"1e{verdict.evidence:.0f}" if verdict.evidence >= 1 else "",
            Text(verdict.kind.value, style=style),
        )
    lost_s = progress.judgement.charged_gpu_ns / NS_PER_S
    foot = Text(f"\n{lost_s / 3600:.1f} GPU hours lost to slow workers so far", style="bold")
    return Group(head, Text(), table, foot)


def _slowness(verdict: Verdict) -> float:
    return 0.0 if verdict.slowdown is None else verdict.slowdown.median
