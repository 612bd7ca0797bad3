"""``ingero trace``: watch GPU processes, or run one and watch it."""

from __future__ import annotations

from dataclasses import replace

import click

from ingero.cli.commands.trace.config import TraceConfig
from ingero.cli.options import with_config
from ingero.cli.settings_file import ConfiguredCommand, find_precedence


@click.command("trace", cls=ConfiguredCommand)
@with_config(TraceConfig)
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[-- PROGRAM [ARG]...]")
@click.pass_context
def command(context: click.Context, /, *, config: TraceConfig) -> int:
    r"""Watch every call of the CUDA runtime, driver, graphs and NCCL, and the host around them.

    Needs root. Processes that start later are found within milliseconds of loading a library. A PROGRAM is run as the
    user who called sudo, is ended when the time is over, and its exit status is not ours.

    \b
    Examples:
      sudo ingero trace
      sudo ingero trace --pid 4711 --duration 30s
      sudo ingero trace --duration 5s --json -- python train.py
      sudo ingero trace --stack -- python train.py
      sudo ingero trace --no-record -- ingero sim run ranks slow_rank=2 slow_us=3000
      sudo ingero trace --prometheus --otlp http://collector:4318
      sudo ingero trace --annotate --fleet https://fleet:4318 --fleet-cluster-id prod
    """
    from ingero.cli.commands.trace.run import run_trace

    if config.rollover_bytes:
        cap, rollover = (find_precedence(context, name) for name in ("max_db", "rollover_bytes"))
        if cap == rollover:
            raise click.UsageError("--max-db and --db-rollover-size exclude each other")
        config = replace(config, max_db=0) if cap < rollover else replace(config, rollover_bytes=0)
    return run_trace(config)
