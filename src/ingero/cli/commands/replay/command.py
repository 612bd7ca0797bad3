"""``ingero replay``: what the detection says about a recorded training job, through a Fleet or alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ingero.cli.options import (
    FiniteRange,
    duration,
    header_values,
    json_switch,
    option,
    with_config,
)
from ingero.cli.signals import unwind_on_end
from ingero.units import NS_PER_S

PIPE_WIDTH = 120
"""Columns of output that no terminal bounds."""
COMPRESSED = ("processors.nccl.reorder_window=1s", "processors.nccl.judge_interval=250ms")
"""Settings of our own Fleet: a replay's pushes come in order and its time runs faster than a job's."""

if TYPE_CHECKING:
    from ingero.job_traces.model import JobTrace
    from ingero.model.verdicts import Judgement
    from ingero.sim.local_echo import LocalEcho
    from ingero.sim.replay import FleetTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """How a recorded job is judged."""

    offline: bool = option("Judge here, without network; the answer is the same.", default=False)
    fleet: str | None = option(
        "Push to this Fleet's OTLP/HTTP receiver; without it a Fleet is started for the replay.",
        default=None,
        metavar="URL",
    )
    admin: str = option(
        "That Fleet's admin endpoint, which is asked for the verdicts.",
        default="http://127.0.0.1:8081",
        metavar="URL",
    )
    headers: Mapping[str, str] = header_values()
    cluster_id: str | None = option(
        "Report under this name; default: the recording's and a number.", default=None
    )
    speed: float = option(
        "Seconds of recorded time per second.",
        default=120.0,
        type=FiniteRange(min=0, min_open=True),
    )
    interval: int = duration(
        "Recorded time between two pushes of an agent.", default="10s", at_least="100ms"
    )
    with_echo: bool = option(
        "Keep it in an Echo of our own too, and ask that one.", "--echo", default=False
    )
    gpu_rate: float | None = option(
        "Price of a GPU-hour, for what Echo says of the cost; without it, GPU-hours only.",
        default=None,
        type=FiniteRange(min=0, min_open=True),
        metavar="PRICE",
    )
    currency: str = option("Of --gpu-rate.", default="USD")
    as_json: bool = json_switch()

    @property
    def rates(self) -> tuple[str, ...]:
        """Settings of our own Fleet that price every GPU alike."""
        if self.gpu_rate is None:
            return ()
        return (
            f"processors.nccl.rates.fallback_rate={self.gpu_rate}",
            f"processors.nccl.rates.currency={self.currency}",
        )


@click.command("replay")
@click.argument("trace")
@with_config(ReplayConfig)
@unwind_on_end()
def command(trace: str, config: ReplayConfig) -> int:
    r"""Judge a recorded training job and name its slow workers.

    TRACE is a Parquet file of per-operation timings, or the name of a recording that ships with ingero (AR). A file
    meta-NAME.yaml beside trace-NAME.parquet tells how many GPUs a worker has; without it, one.

    One agent per worker pushes real OTLP to a Fleet, which names the culprit. Trace time is kept in the records.

    Exit status: 0 when the recording was judged, whatever the verdict; 1 when it cannot be read or pushed.

    \b
    Examples:
      ingero replay AR
      ingero replay AR --fleet http://127.0.0.1:4318 --speed 60
      ingero replay AR --offline
      ingero replay AR --echo --gpu-rate 2.50
      ingero replay job/trace-X.parquet --offline --json | jq '.verdicts[] | select(.verdict == "culprit")'
    """
    from ingero.cli.commands.replay.offline import judge_trace
    from ingero.cli.commands.replay.render import render_result
    from ingero.cli.commands.replay.result import build_result
    from ingero.job_traces.readers import find_packaged, read_trace

    path = Path(trace)
    job = read_trace(path if path.exists() else find_packaged(trace) or path)
    if config.offline and config.fleet:
        raise click.UsageError("--offline pushes to nobody: leave it out, or --fleet")
    if config.with_echo and (config.offline or config.fleet):
        raise click.UsageError(
            "--echo goes with a Fleet of the replay's own, without --offline and --fleet"
        )
    if config.gpu_rate and not config.with_echo:
        raise click.UsageError("--gpu-rate goes with --echo, which tells the cost")
    kept: dict[str, Any] = {}
    judgements = judge_trace(job) if config.offline else [_ask_fleet(job, config, kept)]
    result = {**build_result(job, judgements), **kept}
    if config.as_json:
        click.echo(json.dumps(result, indent=2))
        return 0
    from ingero.cli.progress import OutputConsole

    console = OutputConsole()
    console = console if console.is_terminal else OutputConsole(width=PIPE_WIDTH)
    render_result(result, console)
    if kept:
        from ingero.cli.commands.replay.echo import describe_echo

        for line in describe_echo(kept["echo"]):
            console.print(f"Echo: {line}", highlight=False)
    return 0


def _ask_fleet(job: JobTrace, config: ReplayConfig, kept: dict[str, Any]) -> Judgement:
    from ingero.cli.commands.replay.live import ReplayLines, draw
    from ingero.cli.progress import OutputConsole, show_progress
    from ingero.sim.replay import name_cluster, replay_to_fleet

    console = OutputConsole(stderr=True)
    with ExitStack() as stack:
        echo = _start_echo(stack, console) if config.with_echo else None
        overrides = (*echo.fleet_overrides, *config.rates) if echo else ()
        target = _find_target(config, stack, console, overrides)
        cluster_id = config.cluster_id or f"{job.name}-{os.getpid()}"
        judgement = replay_to_fleet(
            name_cluster(job, cluster_id),
            target,
            speed=config.speed,
            interval_ns=config.interval,
            follow=stack.enter_context(show_progress(console, draw, ReplayLines().describe)),
        )
        if echo is not None:
            from ingero.cli.commands.replay.echo import ask_echo

            lost_s = sum(verdict.lost_gpu_ns for verdict in judgement.culprits) / NS_PER_S
            kept["echo"] = ask_echo(echo, cluster_id, lost_s)
        return judgement


def _start_echo(stack: ExitStack, console: Any) -> LocalEcho:  # noqa: ANN401 - rich's
    from ingero.sim.local_echo import run_local_echo

    echo = stack.enter_context(run_local_echo())
    console.print(f"an Echo of our own listens on {echo.url}", highlight=False)
    return echo


def _find_target(
    config: ReplayConfig,
    stack: ExitStack,
    console: Any,  # noqa: ANN401 - rich's
    overrides: Sequence[str],
) -> FleetTarget:
    from ingero.otlp.client.endpoint import parse_endpoint
    from ingero.sim.local_fleet import ADMIN, OTLP_HTTP, run_local_fleet
    from ingero.sim.replay import FleetTarget

    url, admin_url = config.fleet, config.admin.rstrip("/")
    if url is None:
        fleet = stack.enter_context(run_local_fleet((*COMPRESSED, *overrides)))
        url = fleet.url(OTLP_HTTP)
        admin_url = fleet.url(ADMIN)
        console.print(
            f"a Fleet of our own listens on {url} (verdicts on {admin_url})", highlight=False
        )
    endpoint = parse_endpoint(url, is_insecure=True, option="--fleet")
    return FleetTarget(endpoint, admin_url, dict(config.headers))
