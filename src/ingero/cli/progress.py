"""Progress of a command on its console: redrawn on a terminal, plain lines elsewhere; and what verdicts look like."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typing_extensions import override

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ingero.model.verdicts import Verdict

ProgressT = TypeVar("ProgressT")
STYLES: Final = {
    "culprit": "bold red",
    "hang": "bold red",
    "network": "bold magenta",
    "drag": "yellow",
    "victim": "cyan",
    "ordinary": "green",
    "unknown": "dim",
}
BAR_CELLS: Final = 30
BAR_SLOWDOWN: Final = 3.0
"""A bar is full at this slowdown."""


class OutputConsole(Console):
    """A console that raises when its reader goes away, as every other output of ours, where rich ends the process."""

    @override
    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 - rich calls this where it has caught the error


@contextmanager
def show_progress(
    console: Console,
    draw: Callable[[ProgressT], RenderableType],
    describe: Callable[[ProgressT], Iterable[str]],
) -> Iterator[Callable[[ProgressT], None]]:
    """A callback that shows progress on this console while the context lasts.

    Args:
        console: A terminal or not.
        draw: One frame, which replaces the one before; used on a terminal.
        describe: Lines for what is new; used elsewhere.
    """
    if not console.is_terminal:

        def show_lines(progress: ProgressT) -> None:
            for line in describe(progress):
                console.print(line, highlight=False, soft_wrap=True)

        yield show_lines
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda progress: live.update(draw(progress), refresh=True)


def build_table(*names: str, right: Iterable[str] = ()) -> Table:
    """A table without lines.

    Args:
        names: Heads of its columns, whose cells are not wrapped.
        right: Those whose cells are aligned to the right.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, no_wrap=True, justify="right" if name in right else "left")
    return table


def get_style(kind: str) -> str:
    """The style of a kind of verdict."""
    return STYLES.get(kind, "yellow")


def describe_slowdown(verdict: Verdict, style: str) -> tuple[Text, str]:
    """A verdict's slowdown as a bar, whose third is the median of the peers, and as a number; empty when unknown."""
    if verdict.slowdown is None:
        return Text(""), ""
    slowdown = verdict.slowdown.median
    cells = min(slowdown, BAR_SLOWDOWN) / BAR_SLOWDOWN * BAR_CELLS
    bar = "█" * int(cells) + ("▌" if cells % 1 >= 0.5 else "")
    return Text(bar, style=style), f"{slowdown:.2f}×"
