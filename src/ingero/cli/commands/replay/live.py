"""A replay while it runs: workers against their peers, redrawn on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ingero.cli.commands.replay.render import STYLES
from ingero.model.verdicts import Verdict, describe_rank
from ingero.sim.replay import ReplayProgress
from ingero.units import NS_PER_S, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console, RenderableType

BAR_CELLS: Final = 30
BAR_SLOWDOWN: Final = 3.0
"""A bar is full at this slowdown."""
_LINE_EVERY: Final = 0.1
MAX_ROWS: Final = 32
"""Workers shown while it runs: the slowest of them; the final table has all."""


@contextmanager
def follow_replay(console: Console) -> Iterator[Callable[[ReplayProgress], None]]:
    """A callback that shows progress on this console while the context lasts."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    from rich.live import Live

    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda progress: live.update(draw(progress), refresh=True)


class _Lines:
    """A line for every tenth of the recording, and one when somebody is first named."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = -1.0
        self._named: set[str] = set()

    def __call__(self, progress: ReplayProgress) -> None:
        verdicts = progress.judgement.verdicts if progress.judgement else ()
        named = {describe_rank(v.rank): v for v in verdicts if v.is_alarm}
        is_new = bool(named.keys() - self._named)
        share = progress.at_ns / progress.end_ns
        if not is_new and share < self._shown + _LINE_EVERY and share < 1.0:
            return
        self._shown, self._named = share, set(named)
        who = "; ".join(f"{v.kind.value} {name}" for name, v in named.items()) or "nobody named"
        self._console.print(
            f"{share:4.0%} of {format_duration(progress.end_ns)}, {progress.n_pushes} pushes: {who}",
            highlight=False,
        )


def draw(progress: ReplayProgress) -> RenderableType:
    """One frame: how far, and each worker's own time against the median of its peers."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(padding=(0, 1))
    head.add_row(
        ProgressBar(total=100, completed=100 * progress.at_ns / progress.end_ns, width=BAR_CELLS),
        f"{format_duration(progress.at_ns)} of {format_duration(progress.end_ns)} of training",
        f"{progress.n_pushes} pushes taken",
    )
    if progress.judgement is None or not progress.judgement.verdicts:
        return Group(head, Text("\nFleet has nothing to compare yet", style="dim"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("worker", no_wrap=True)
    table.add_column("own time against its peers", no_wrap=True)
    table.add_column("slowdown", justify="right")
    table.add_column("evidence", justify="right")
    table.add_column("verdict", no_wrap=True)
    verdicts = progress.judgement.verdicts
    if len(verdicts) > MAX_ROWS:
        verdicts = tuple(sorted(verdicts, key=_slowness, reverse=True)[:MAX_ROWS])
    for verdict in verdicts:
        style = STYLES.get(verdict.kind.value, "yellow")
        slowdown = verdict.slowdown
        table.add_row(
            describe_rank(verdict.rank),
            Text("" if slowdown is None else _bar(slowdown.median), style=style),
            "" if slowdown is None else f"{slowdown.median:.2f}×",
            f"1e{verdict.evidence:.0f}" if verdict.evidence >= 1 else "",
            Text(verdict.kind.value, style=style),
        )
    lost_s = progress.judgement.charged_gpu_ns / NS_PER_S
    foot = Text(f"\n{lost_s / 3600:.1f} GPU hours lost to slow workers so far", style="bold")
    return Group(head, Text(), table, foot)


def _slowness(verdict: Verdict) -> float:
    return 0.0 if verdict.slowdown is None else verdict.slowdown.median


def _bar(slowdown: float) -> str:
    """Cells in proportion; the peers' median stands at a third of the bar."""
    cells = min(slowdown, BAR_SLOWDOWN) / BAR_SLOWDOWN * BAR_CELLS
    return "█" * int(cells) + ("▌" if cells % 1 >= 0.5 else "")
