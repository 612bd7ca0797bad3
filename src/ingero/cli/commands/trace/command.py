"""``ingero trace``: watch GPU processes, or run one and watch it."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from ingero.cli.commands.trace.exporting import METRIC_OPTIONS
from ingero.cli.live import ANNOTATE_OPTIONS, FLEET_OPTIONS
from ingero.cli.options import PROBE_MODE_OPTION, CheckedCommand, read_duration, read_pids
from ingero.cli.serving import add_options


def _read_size(_context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Option callback: ``8m`` as bytes."""
    from ingero.units import parse_size

    try:
        return parse_size(value) if value.strip() else 0
    except ValueError as error:
        raise click.BadParameter(str(error), param=parameter) from error


def _read_ring(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Option callback: a power of two from 4 KiB to 4 GiB, or 0."""
    size = _read_size(context, parameter, value)
    if size and (size & (size - 1) or not 4096 <= size <= 1 << 32):
        raise click.BadParameter("use a power of two from 4k to 4g", param=parameter)
    return size


@click.command("trace", cls=CheckedCommand)
@click.option(
    "--pid",
    "-p",
    "pids",
    multiple=True,
    callback=read_pids,
    metavar="PID[,PID]",
    help="Watch these processes and their children.  [default: all]",
)
@click.option("--user", "-u", help="Watch the processes of this user.")
@click.option(
    "--cgroup",
    default="",
    metavar="PATH",
    help="Watch the processes of this cgroup of version 2 and of those below it now, such as a pod's.",
)
@click.option(
    "--duration",
    "-d",
    default="0",
    callback=read_duration,
    metavar="TIME",
    help="Stop after this time; 0 waits for Ctrl-C or the program's end.  [default: 0]",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print JSON lines on stdout; the program's own output goes to stderr.",
)
@click.option(
    "--db",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Recording to write.  [default: $INGERO_DB or ~/.ingero/ingero.db]",
)
@click.option(
    "--record/--no-record", default=True, help="Whether to write a recording.  [default: record]"
)
@click.option(
    "--incidents/--no-incidents",
    default=True,
    help="Whether to look for incidents meanwhile, and to say at the end how many there are.  [default: incidents]",
)
@click.option("--record-all", is_flag=True, help="Store every record, not only the telling ones.")
@click.option(
    "--max-db",
    default="10g",
    callback=_read_size,
    metavar="SIZE",
    help="Size cap of the recording.  [default: 10g]",
)
@click.option(
    "--db-rollover-size",
    "rollover_bytes",
    default="0",
    callback=_read_size,
    metavar="SIZE",
    help="Set the recording aside at this size and go on in a new one; instead of --max-db.",
)
@click.option(
    "--db-rollover-keep",
    "rollover_keep",
    default=6,
    show_default=True,
    type=click.IntRange(1),
    help="Recordings set aside that are kept.",
)
@click.option("--node", default="", help="This node's name.  [default: host name]")
@click.option(
    "--sampling-rate",
    default=0,
    type=click.IntRange(0),
    help="Record one call in N of the kinds that are sampled, such as launches; 0 adapts to loss and to 2000 records a second. Counts stay exact.  [default: 0]",
)
@click.option(
    "--ringbuf-size",
    "ring_bytes",
    default="0",
    callback=_read_ring,
    metavar="SIZE",
    help="Size of the calls ring.  [default: 8m]",
)
@click.option(
    "--stack/--no-stack",
    default=None,
    help="Record the native and Python stack of every recorded call, or of none.  [default: of slow, failed and unreturned calls]",
)
@click.option("--no-io", is_flag=True, help="Leave out disk requests.")
@click.option("--no-tcp", is_flag=True, help="Leave out TCP retransmits.")
@click.option("--no-net", is_flag=True, help="Leave out bytes on sockets.")
@click.option(
    "--cuda-lib",
    "--nccl-lib",
    "libraries",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A library to probe before it is loaded; others are found when a process loads them.",
)
@PROBE_MODE_OPTION
@add_options(METRIC_OPTIONS)
@add_options(ANNOTATE_OPTIONS)
@add_options(FLEET_OPTIONS)
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[-- PROGRAM [ARG]...]")
@click.pass_context
def command(context: click.Context, /, **_: object) -> int:
    r"""Watch every call of the CUDA runtime, driver, graphs and NCCL, and the host around them.

    Needs root. Processes that start later are found within milliseconds of loading a library. A PROGRAM is run as the user
    who called sudo, is ended when the time is over, and its exit status is not ours.

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
    from ingero.cli.commands.trace.exporting import MetricsChoice
    from ingero.cli.commands.trace.run import TraceOptions, run_trace
    from ingero.cli.live import AnnotateChoice, FleetChoice

    given = dict(context.params)
    if given["rollover_bytes"]:
        if context.get_parameter_source("max_db") is ParameterSource.COMMANDLINE:
            raise click.UsageError("--max-db and --db-rollover-size exclude each other")
        given["max_db"] = 0
    metrics = MetricsChoice.take(given)
    annotate, fleet = AnnotateChoice.take(given), FleetChoice.take(given)
    return run_trace(TraceOptions(**given, metrics=metrics, annotate=annotate, fleet=fleet))
