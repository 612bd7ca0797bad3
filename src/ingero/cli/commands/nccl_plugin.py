"""``ingero nccl-plugin``: device times of collectives, from NCCL itself."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.group("nccl-plugin")
def command() -> None:
    r"""Let NCCL tell when collectives ran on the device, through its profiler interface.

    The plug-in is loaded by NCCL 2.27 or newer where the job's environment says so, and by nothing else. `ingero
    trace --fleet` and `ingero fleet-push` find it by themselves. Set it on every rank of a job or on none.

    \b
    Examples:
      export $(ingero nccl-plugin path)
      sudo ingero nccl-plugin install /opt/ingero
      sudo ingero nccl-plugin status
    """


@command.command("path")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show_path(*, as_json: bool) -> None:
    r"""Print the variable to set in the environment of the job.

    \b
    Examples:
      export $(ingero nccl-plugin path)
      ingero nccl-plugin path --json
    """
    from ingero.agent.collectives.plugin import INTERFACES, VARIABLE, build_setting, find_plugin

    path = find_plugin()
    if as_json:
        facts = {"variable": VARIABLE, "path": str(path), "interfaces": INTERFACES}
        click.echo(json.dumps(facts))
        return
    click.echo(build_setting(path))


@command.command("install")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, resolve_path=True))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def install(*, folder: Path, as_json: bool) -> None:
    r"""Copy the plug-in to FOLDER, for jobs that do not see this installation, such as those in containers.

    It needs nothing else of ours. Mount FOLDER into the containers, read-only, and set the variable that is printed,
    with the folder's path there. An older copy is replaced; jobs that run keep what they have loaded.

    \b
    Examples:
      sudo ingero nccl-plugin install /opt/ingero
      docker run --rm -v /opt/ingero:/out ingero nccl-plugin install /out
    """
    from ingero.agent.collectives.plugin import VARIABLE, build_setting, install_plugin

    path = install_plugin(folder)
    if as_json:
        click.echo(json.dumps({"variable": VARIABLE, "path": str(path)}))
        return
    click.echo(build_setting(path))


@command.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def show_status(*, as_json: bool) -> None:
    r"""List the processes whose NCCL has loaded the plug-in; others' processes need root.

    \b
    Examples:
      sudo ingero nccl-plugin status
      ingero nccl-plugin status --json
    """
    from dataclasses import asdict

    from ingero.agent.collectives.plugin import find_plugins
    from ingero.config.environment import ring_parent

    found = find_plugins(ring_parent())
    if as_json:
        click.echo(json.dumps([asdict(one) for one in found]))
        return
    if not found:
        click.echo("no process that we may look at has the plug-in")
    for one in found:
        click.echo(
            f"pid {one.pid}: interface version {one.api}, {one.n_comms} communicators,"
            f" {one.n_ops} collectives, {one.n_lost} lost"
            + (
                f"; on {one.n_unplaced} more communicators no hang is seen"
                if one.n_unplaced
                else ""
            )
        )
