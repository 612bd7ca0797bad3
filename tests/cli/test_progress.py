"""Progress on a terminal and elsewhere, for every command that shows some."""

import io

from rich.console import Console
from rich.text import Text

from ingero.cli.commands.up.show import UpLines
from ingero.cli.progress import show_progress
from ingero.sim.cluster.result import Progress


def show(*, is_terminal):
    output = io.StringIO()
    console = Console(file=output, force_terminal=is_terminal, width=60)
    with show_progress(
        console, lambda n: Text(f"frame {n}"), lambda n: [f"line {n}"] * (n % 2)
    ) as follow:
        for number in range(4):
            follow(number)
    return output.getvalue()


def test_a_terminal_gets_frames_and_a_pipe_only_what_is_new():
    assert show(is_terminal=False) == "line 1\nline 3\n"
    frames = show(is_terminal=True)
    assert [f"frame {n}" in frames for n in range(4)] == [True] * 4
    assert "line" not in frames


def test_up_says_each_stage_and_each_named_rank_once():
    lines, progress = UpLines(), Progress(stage="warming up", isolation="processes")
    assert list(lines.describe(progress)) == ["hosts are processes", "warming up"]
    assert list(lines.describe(progress)) == []
    progress.named = {(2, "culprit"): 1_500_000_000, (0, "hang"): None}
    assert list(lines.describe(progress)) == [
        "rank 2: culprit, 1.5 s after the fault", "rank 0: hang, before the fault",
    ]  # fmt: skip
