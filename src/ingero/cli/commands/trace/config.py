"""The options of ``ingero trace``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ingero.cli.commands.trace.exporting import MetricsConfig
from ingero.cli.commands.trace.inference import InferenceConfig
from ingero.cli.live import AnnotateConfig, PushConfig, RemediateConfig
from ingero.cli.options import (
    KUBELET_SOCKET_OPTION,
    PROBE_MODE_OPTION,
    duration,
    group,
    option,
    placed,
    read_pids,
)

if TYPE_CHECKING:
    from ingero.agent.health.service import AgentSettings


_MIN_LIMIT: Final = 1 << 20
"""Of a cap: tables without rows, and the log, take a good part of it."""


def _read_size(_context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Option callback: ``8m`` as bytes."""
    from ingero.units import parse_size

    try:
        return parse_size(value) if value.strip() else 0
    except ValueError as error:
        raise click.BadParameter(str(error), param=parameter) from error


def _read_limit(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Option callback: ``10g`` as bytes, or 0 for none."""
    size = _read_size(context, parameter, value)
    if 0 < size < _MIN_LIMIT:
        raise click.BadParameter(
            f"{value!r} would delete what was just recorded; use at least 1m (a number alone is bytes), or 0",
            param=parameter,
        )
    return size


def _read_ring(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Option callback: a power of two from 4 KiB to 4 GiB, or 0."""
    size = _read_size(context, parameter, value)
    if size and (size & (size - 1) or not 4096 <= size <= 1 << 32):
        raise click.BadParameter("use a power of two from 4k to 4g", param=parameter)
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """What is traced, and what becomes of it.

    Attributes:
        program: The program to run and its arguments; empty watches what runs.
    """

    pids: tuple[int, ...] = option(
        "Watch these processes and their children.  [default: all]",
        *("--pid", "-p"),
        default=(),
        callback=read_pids,
        metavar="PID[,PID]",
    )
    user: str | None = option("Watch the processes of this user.", "--user", "-u", default=None)
    cgroup: str = option(
        "Watch the processes of this cgroup of version 2 and of those below it now, such as a pod's.",
        default="",
        metavar="PATH",
    )
    duration: int = duration(
        "Stop after this time; 0 waits for Ctrl-C or the program's end.  [default: 0]",
        *("--duration", "-d"),
        default="0",
        show_default=False,
        metavar="TIME",
    )
    as_json: bool = option(
        "Print JSON lines on stdout; the program's own output goes to stderr.",
        "--json",
        default=False,
    )
    db: Path | None = option(
        "Recording to write.  [default: $INGERO_DB or ~/.ingero/ingero.db]",
        default=None,
        env="INGERO_DB",
        type=click.Path(path_type=Path, dir_okay=False),
    )
    record: bool = option(
        "Whether to write a recording.  [default: record]",
        "--record/--no-record",
        default=True,
        show_default=False,
    )
    incidents: bool = option(
        "Whether to look for incidents meanwhile, and to say at the end how many there are.  [default: incidents]",
        "--incidents/--no-incidents",
        default=True,
        show_default=False,
    )
    record_all: bool = option("Store every record, not only the telling ones.", default=False)
    max_db: int = option(
        "Size cap of the recording, 1m or more; 0 is none.  [default: 10g]",
        default="10g",
        type=str,
        callback=_read_limit,
        show_default=False,
        metavar="SIZE",
    )
    rollover_bytes: int = option(
        "Set the recording aside at this size and go on in a new one; instead of --max-db.",
        "--db-rollover-size",
        default="0",
        type=str,
        callback=_read_limit,
        show_default=False,
        metavar="SIZE",
    )
    rollover_keep: int = option(
        "Recordings set aside that are kept.",
        "--db-rollover-keep",
        default=6,
        type=click.IntRange(1),
    )
    node: str = option("This node's name.  [default: host name]", default="", keys=("agent.node",))
    sampling_rate: int = option(
        "Record one call in N of the kinds that are sampled, such as launches; 0 adapts to loss and to 2000 records a"
        " second. Counts stay exact.  [default: 0]",
        default=0,
        type=click.IntRange(0),
    )
    ring_bytes: int = option(
        "Size of the calls ring: a power of two, and a page of memory at least.  [default: 8m]",
        "--ringbuf-size",
        default="0",
        type=str,
        callback=_read_ring,
        show_default=False,
        metavar="SIZE",
    )
    stack: bool | None = option(
        "Record the native and Python stack of every recorded call, or of none.  [default: of slow, failed and"
        " unreturned calls]",
        "--stack/--no-stack",
        default=None,
    )
    no_io: bool = option("Leave out disk requests.", default=False)
    no_tcp: bool = option("Leave out TCP retransmits.", default=False)
    no_net: bool = option("Leave out bytes on sockets.", default=False)
    libraries: tuple[Path, ...] = option(
        "A library to probe before it is loaded; others are found when a process loads them.",
        *("--cuda-lib", "--nccl-lib"),
        default=(),
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
    )
    probe_mode: None = placed(PROBE_MODE_OPTION)
    inference: InferenceConfig = group()
    kubelet_socket: None = placed(KUBELET_SOCKET_OPTION)
    metrics: MetricsConfig = group()
    annotate: AnnotateConfig = group()
    fleet: PushConfig = group(
        fleet_endpoint={
            "names": ("--fleet",),
            "required": False,
            "default": "",
            "help": "Push health and collectives to this Fleet meanwhile, as `ingero fleet-push` does.",
        },
        fleet_cluster_id={
            "required": False,
            "default": "",
            "help": "Name of the cluster, for --fleet and --otlp.",
        },
        fleet_node_id={
            "help": "This node's name in Fleet.  [default: --node]",
            "keys": ("fleet.node_id",),
        },
        fleet_workload_type={"help": "Kind of work, such as training; with --fleet."},
        fleet_push_interval={
            "default": "5s",
            "help": "Between regular pushes; a change is pushed at once.",
        },
        fleet_protocol={"default": "http/protobuf"},
        sample_interval={"help": "Between two looks at the node's health."},
        warmup_samples={"help": "Push intervals of calibration of its health."},
    )
    remediate: RemediateConfig = group()
    program: tuple[str, ...] = ()

    def build_push(self) -> AgentSettings | None:
        """The agent that pushes to a Fleet; None without --fleet.

        Raises:
            ConfigError: Lists every problem.
        """
        fleet = self.fleet
        if not fleet.fleet_endpoint:
            if self.remediate.remediate and not self.inference.inference:
                click.echo(
                    "warning: --remediate: no effect without --fleet URL; episodes are found by comparing nodes",
                    err=True,
                )
            return None
        from ingero.agent.health.signals.node_facts import find_gpus
        from ingero.cli.push_settings import build_settings

        workload = fleet.fleet_workload_type
        if self.inference.inference and workload == "unknown":
            workload = "inference"
        push = replace(
            fleet,
            fleet_workload_type=workload,
            fleet_node_id=fleet.fleet_node_id or self.node,
        )
        return build_settings(push, self.remediate, find_gpus())
