"""``ingero up``: a whole cluster on one machine, with faults to try it by."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ingero.cli.commands.up.act import SlurmUpConfig, check_asked, run_in_slurm
from ingero.cli.options import (
    PROBE_MODE_OPTION,
    check_output,
    duration,
    force_switch,
    group,
    json_switch,
    option,
    placed,
    with_config,
)
from ingero.cli.signals import unwind_on_end
from ingero.errors import ConfigError, UnsupportedError
from ingero.units import NS_PER_S

if TYPE_CHECKING:
    from ingero.sim.cluster.faults import Fault
    from ingero.sim.cluster.torch_job import JobFile


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """A cluster and what happens to it."""

    ranks: int = option(
        "Hosts, each with one rank and one agent.", default=8, type=click.IntRange(min=2, max=64)
    )
    faults: tuple[str, ...] = option(
        "A fault to inject once the job runs evenly; may be repeated.",
        "--fault",
        default=(),
        metavar="FAULT",
    )
    job_file: str | None = option(
        "A script that torchrun runs, in place of the simulated job; its arguments follow `--`.",
        "--job",
        default=None,
        metavar="FILE",
    )
    python: str = option(
        "Runs --job.  [default: $INGERO_TORCH_PYTHON, or the first found that has torch]",
        default="",
        metavar="PATH",
    )
    seed: int = option("Of the job's jitter.", default=0, show_default=True)
    watch_ns: int = duration(
        "How long to watch after the injection; ends sooner once every fault was named.",
        "--duration",
        default="30s",
    )
    seconds: int | None = option(
        "The same in seconds: `--seconds 120` is `--duration 120s`.",
        default=None,
        type=click.IntRange(min=1),
    )
    push_interval: int = duration(
        "Of the agents; a change is pushed at once.", default="5s", at_least="1s"
    )
    story: SlurmUpConfig = group()
    fleets: int = option(
        "Fleets that act as one over a nats-server, which must be installed; agents are spread over them.",
        default=1,
        show_default=True,
        type=click.IntRange(min=1, max=16),
    )
    kill_fleet: int = duration(
        "Kill the Fleet that judges this long after the injection; needs two --fleets. 0s: never.",
        default="0s",
    )
    no_probes: bool = option(
        "Load no probe: the simulated ranks report their own calls. Without root it is always so.",
        default=False,
    )
    probe_mode: None = placed(PROBE_MODE_OPTION)
    record: str | None = option(
        "Keep what the agents pushed, with the faults as labels; `ingero replay FILE` judges it again.",
        default=None,
        metavar="FILE",
    )
    force: bool = force_switch()
    as_json: bool = json_switch("Print one JSON object at the end.")


@click.command("up")
@with_config(UpConfig)
@click.argument("arguments", nargs=-1, metavar="[-- ARGS]")
@unwind_on_end()
def command(config: UpConfig, arguments: tuple[str, ...]) -> int:
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

    With --job the ranks are real: any script that torchrun runs, one rank on each host, over Gloo on the CPU, or over
    NCCL on this machine's GPU, which the ranks share. Each host has a share of the processors (a cgroup with a quota),
    agents probe the collectives, and faults come from outside. It needs root and PyTorch in an environment of its own:
    2.13 for Gloo. Faults of --job:

    \b
      cpu-quota:R:50%    rank R's host has half of its processor time
      cpu-hog:R          neighbours want rank R's host's processor time all the time
      stop-pulses:R:30%  rank R stands still for 30 % of every tenth of a second
      slow-rank:R:1.3x   less processor time, so that its work takes 1.3 times as long
      disk:R:5MB/s       rank R's host reads no more than this from its disks in a second
      link:R:20ms        packets to and from R's host are late; link:R:50Mbit/s: no more each way
      pause:R, kill:R    as above
      none               no fault

    Programs that ask for it, as those in examples/jobs, make faults themselves:

    \b
      slow-python:R:20ms so much more computing in Python in each step
      slow-loader:R:1ms  its data loader takes so much longer for each row
      garbage:R:200000   so many objects, and garbage collection in each step
      uneven:R:1.5x      batches with 1.5 times as many rows
      imbalance[:1.6x]   another rank's batch has more rows in each step: nobody's fault
      first-use:R:2s     one step takes so much longer, once: nobody is named

    With --slurm the job runs in a real Slurm on hosts of its own, started for this and removed again: a controller, a
    daemon on each host, spares. A real ingero-remediator reads what Fleet says, and with --act auto it drains the
    culprit's node and requeues the job, which goes on from its checkpoint on a spare. Lasts until the job ends. Needs
    Debian's slurmctld, slurmd, slurm-client and munge. Its fault: cpu-quota.

    \b
    Examples:
      ingero up --ranks 4 --fault slow-rank:2:1.5x
      sudo ingero up --ranks 4 --job examples/jobs/ddp.py --fault cpu-quota:2:50%
      sudo ingero up --ranks 4 --job train.py --python ~/torch/bin/python -- --batch 64
      sudo ingero up --ranks 4 --job examples/jobs/ddp.py --fault uneven:2:2x -- --device cuda --width 1024
      sudo ingero up --slurm --ranks 4 --job examples/jobs/ddp_checkpoint.py --fault cpu-quota:2:50% --act auto
      sudo ingero up
      sudo ingero up --ranks 8 --fault slow-rank:3:1.3x --json
      sudo ingero up --ranks 4 --fault pause:2 --duration 20s
      sudo ingero up --ranks 4 --job train.py --record run.parquet && ingero replay run.parquet --offline
      ingero up --ranks 8 --fleets 3 --fault slow-rank:3:1.3x --kill-fleet 5s
    """
    from ingero.sim.cluster.faults import parse_faults
    from ingero.sim.cluster.result import UpSettings

    context = click.get_current_context()
    check_asked(config.story, context)
    parsed: tuple[Fault, ...] = parse_faults(
        config.faults, config.ranks, is_job=config.job_file is not None
    )
    _check_together(config)
    has_probes = os.geteuid() == 0 and not config.no_probes
    job = _choose_job(config.job_file, arguments, config.python, has_probes=has_probes)
    from ingero.cli.commands.up.show import UpLines, draw, render_result
    from ingero.cli.commands.up.show_act import render_act_result
    from ingero.cli.progress import OutputConsole, show_progress
    from ingero.sim.cluster.run import run_up

    settings = UpSettings(
        config.ranks,
        parsed,
        config.seed,
        config.seconds * NS_PER_S if config.seconds else config.watch_ns,
        config.push_interval,
        has_probes=has_probes,
        job=job,
        record=Path(config.record) if config.record else None,
        n_fleets=config.fleets,
        kill_fleet_ns=config.kill_fleet or None,
    )
    console = OutputConsole(stderr=True)
    if config.story.slurm:
        result, render = run_in_slurm(config.story, settings, context, console), render_act_result
    else:
        with show_progress(console, draw, UpLines().describe) as follow:
            result, render = run_up(settings, follow), render_result
    if config.as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        render(result, OutputConsole())
    return 0


def _check_together(config: UpConfig) -> None:
    """Refuse options that do not go together, and a recording that would go nowhere or over another file.

    Raises:
        ConfigError: They do not.
        click.UsageError: The file of the recording exists, or is none.
    """
    if config.kill_fleet and config.fleets == 1:
        raise ConfigError("--kill-fleet leaves none of one Fleet", hint="add --fleets 3")
    if config.fleets > 1 and (config.record or config.story.slurm):
        raise ConfigError("--fleets is not for --record and --slurm, which use one Fleet")
    if not config.record:
        return
    if config.story.slurm:
        raise ConfigError("--slurm keeps no recording", hint="leave out --record or --slurm")
    check_output(Path(config.record), is_replaced=config.force)


def _choose_job(
    file: str | None, arguments: tuple[str, ...], python: str, *, has_probes: bool
) -> JobFile | None:
    """The real job that was asked for; None for the simulated one."""
    from ingero.sim.cluster.torch_job import choose_job

    if file is None:
        if arguments or python:
            raise ConfigError("--python and arguments are for a job of your own: give --job FILE")
        return None
    if not has_probes:
        raise UnsupportedError(
            "--job needs root: agents probe the job, which tells nothing of itself",
            hint="sudo ingero up --job ...; without root `ingero up` runs the simulated job",
        )
    return choose_job(file, arguments, python)
