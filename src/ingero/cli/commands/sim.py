"""``ingero sim``: run a workload on the GPU simulator, anywhere and without root."""

from __future__ import annotations

import json

import click

MAX_RANKS = 1024
"""More processes than a machine for trials holds."""


@click.group("sim")
def command() -> None:
    r"""Run workloads on the GPU simulator: no GPU, no root.

    The simulator is our own libcudart, libcuda and libnccl; probes fire on it as on NVIDIA's. Every workload prints
    its own account of every call at the end.

    \b
    Examples:
      ingero sim list
      ingero sim run train
      ingero sim run ranks --ranks 4 slow_rank=2 slow_us=3000
      sudo ingero trace -- ingero sim run leak
    """


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def list_workloads(*, as_json: bool) -> None:
    r"""List the workloads and what each shows.

    \b
    Examples:
      ingero sim list
      ingero sim list --json
    """
    from ingero.sim.workloads import WORKLOADS

    if as_json:
        click.echo(
            json.dumps([
                {"name": w.name, "says": w.description, "knobs": w.knobs, "ranks": w.n_ranks}
                for w in WORKLOADS
            ])
        )
        return
    for workload in WORKLOADS:
        click.echo(f"{workload.name:10} {workload.description}")
        if workload.knobs:
            click.secho(
                " " * 11 + " ".join(f"{k}={v}" for k, v in workload.knobs.items()), dim=True
            )


@command.command("run")
@click.argument("name")
@click.argument("knobs", nargs=-1, metavar="[KNOB=VALUE]...")
@click.option(
    "--ranks",
    type=click.IntRange(0, MAX_RANKS),
    default=0,
    help="Processes of a multi-rank workload; 0 takes the workload's own number.",
)
@click.option("--json", "as_json", is_flag=True, help="Print each rank's account as one JSON line.")
def run_workload(*, name: str, knobs: tuple[str, ...], ranks: int, as_json: bool) -> None:
    r"""Run one workload and print what it did, by its own account.

    \b
    Examples:
      ingero sim run sync steps=100
      ingero sim run ranks --ranks 8 slow_rank=5 slow_us=2000 --json
    """
    from ingero.sim.runner import SimSettings, Simulation

    with Simulation(SimSettings(name, _parse_knobs(knobs), ranks)) as simulation:
        reports = simulation.wait()
    for report in reports:
        if as_json:
            click.echo(json.dumps(report))
        else:
            _show(report)


def _parse_knobs(texts: tuple[str, ...]) -> dict[str, int]:
    from ingero.errors import ConfigError

    knobs = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not value.isdecimal():
            raise ConfigError(
                f"{text!r} is not a knob", hint="write NAME=NUMBER, such as steps=100"
            )
        knobs[name] = int(value)
    return knobs


def _show(report: dict[str, object]) -> None:
    from ingero.units import format_duration, format_size

    calls = report["calls"]
    assert isinstance(calls, dict)
    rank = f" rank {report['rank']}" if "rank" in report else ""
    click.secho(f"{report['workload']}{rank} (pid {report['pid']}), on the simulator", bold=True)
    for name, numbers in calls.items():
        click.echo(
            f"  {name:28} {numbers['calls']:>8} calls  {format_size(numbers['bytes']):>10}"
            f"  {format_duration(numbers['total_ns']):>8}  {numbers['errors']} errors"
        )
