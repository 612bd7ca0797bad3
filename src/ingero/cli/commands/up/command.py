"""``ingero up``: a whole cluster on one machine, with faults to try it by."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TYPE_CHECKING

import click

from ingero.cli.options import PROBE_MODE_OPTION, read_duration

if TYPE_CHECKING:
    from rich.console import Console

    from ingero.sim.cluster.faults import Fault


@click.command("up")
@click.option(
    "--ranks",
    type=click.IntRange(min=1, max=64),
    default=8,
    show_default=True,
    help="Hosts, each with one rank and one agent.",
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="FAULT",
    help="A fault to inject once the job runs evenly; may be repeated.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the job's jitter.")
@click.option(
    "--duration",
    callback=read_duration,
    default="30s",
    show_default=True,
    help="How long to watch after the injection; ends sooner once every fault was named.",
)
@click.option(
    "--push-interval",
    callback=read_duration,
    default="5s",
    show_default=True,
    help="Of the agents; a change is pushed at once.",
)
@click.option(
    "--no-probes",
    is_flag=True,
    help="Load no probe: the simulated ranks report their own calls. Without root it is always so.",
)
@PROBE_MODE_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def command(
    ranks: int,
    faults: tuple[str, ...],
    seed: int,
    duration: int,
    push_interval: int,
    no_probes: bool,
    as_json: bool,
) -> int:
    r"""Run a whole cluster on this machine and see whom it names.

    Hosts are network namespaces with a simulated GPU rank each. The agents' kernel probes, their pushes, the Fleet
    and its verdicts are the real ones. Without root the ranks are plain processes that report their own calls, as
    nobody may probe them, and it says so. Ctrl-C ends it and removes everything.

    Faults:

    \b
      slow-rank:R:1.3x   rank R's own work takes 1.3 times as long
      imbalance[:1.6x]   another rank has more work in each step: nobody's fault
      pause:R            rank R stops where it is
      kill:R             rank R is gone
      cpu-hog:R          neighbours want rank R's processor all the time; needs two
      io-hog:R           neighbours read from rank R's disk all the time
      slow-link:R[:20ms] packets to and from R's host are late; needs root

    \b
    Examples:
      ingero up --ranks 4 --fault slow-rank:2:1.5x
      sudo ingero up
      sudo ingero up --ranks 8 --fault slow-rank:3:1.3x --json
      sudo ingero up --ranks 4 --fault pause:2 --duration 20s
    """
    from ingero.cli.commands.up.show import UpLines, draw, render_result
    from ingero.cli.progress import show_progress
    from ingero.sim.cluster.faults import parse_fault
    from ingero.sim.cluster.result import UpSettings
    from ingero.sim.cluster.run import run_up

    parsed: tuple[Fault, ...] = tuple(parse_fault(text, ranks) for text in faults)
    has_probes = os.geteuid() == 0 and not no_probes
    from rich.console import Console

    def end(number: int, _frame: object) -> None:
        sys.exit(128 + number)  # unwinds, so that nothing is left behind

    signal.signal(signal.SIGTERM, end)
    settings = UpSettings(ranks, parsed, seed, duration, push_interval, has_probes=has_probes)
    console: Console = Console(stderr=True)
    with show_progress(console, draw, UpLines().describe) as follow:
        result = run_up(settings, follow)
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        render_result(result, Console())
    return 0
