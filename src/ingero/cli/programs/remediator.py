"""The ``ingero-remediator`` program: from a finding to a safe action, by a written policy."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click
from typing_extensions import override

from ingero import __version__
from ingero.cli.main import run_program

if TYPE_CHECKING:
    from ingero.remediation.config import RemediatorConfig
    from ingero.remediation.records import ActionRecord

_PROGRAM = "ingero-remediator"
_CONFIG = click.option(
    "--config",
    "file",
    default="/etc/ingero/remediator.yaml",
    show_default=True,
    metavar="FILE",
    help="The policy, which names the journal.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


class _FileOrCommand(click.Group):
    """A group whose first word may be the policy file of `run`, or one of its options."""

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {name for one in self.get_params(ctx) for name in one.opts}
        if args and args[0] not in self.commands and args[0] not in own:
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(
    _PROGRAM,
    cls=_FileOrCommand,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name=_PROGRAM, message="%(prog)s %(version)s")
def cli() -> None:
    r"""Take the node of a slow rank out of service, when a written policy allows it; and give it back.

    Reads verdicts from Fleet's admin endpoint. Only culprits are ever acted on. The default is to say what it would do.
    `ingero-remediator FILE` is short for `ingero-remediator run FILE`.

    \b
    Examples:
      ingero-remediator config --defaults > remediator.yaml
      ingero-remediator validate remediator.yaml
      ingero-remediator remediator.yaml --dry-run --once
      ingero-remediator remediator.yaml
    """


@cli.command("run")
@click.argument("file")
@click.option("--dry-run", is_flag=True, help="Say what it would do, whatever the file's mode is.")
@click.option(
    "--once", is_flag=True, help="Look once and end; in dry-run only. Nothing is written."
)
@_JSON
def run(file: str, *, dry_run: bool, once: bool, as_json: bool) -> int:
    r"""Watch Fleet and act by the policy FILE until SIGTERM or Ctrl-C.

    A second remediator of the same journal waits until the first one ends. What a killed one had begun is finished or
    undone by the next.

    Exit status: 0 after SIGTERM or --once, 130 after Ctrl-C, 2 when FILE is wrong.

    \b
    Examples:
      ingero-remediator run remediator.yaml
      ingero-remediator run remediator.yaml --dry-run
      ingero-remediator remediator.yaml --dry-run --once --json | jq '.findings[].decision'
    """
    from ingero.cli.programs import remediator_run
    from ingero.remediation.config import load_policy

    config = load_policy(file)
    if dry_run:
        config = config.model_copy(update={"mode": "dry-run"})
    if once and config.mode != "dry-run":
        raise click.UsageError(
            f"--once changes nothing, and the mode is {config.mode}: give --dry-run as well"
        )
    if as_json and not once:
        raise click.UsageError("--json is for --once; use `ingero-remediator journal --json`")
    if once:
        return remediator_run.poll_once(config, as_json=as_json)
    return remediator_run.watch(config)


@cli.command("validate")
@click.argument("file")
def validate(file: str) -> None:
    r"""Check FILE without starting anything; every problem is listed with its line.

    \b
    Examples:
      ingero-remediator validate remediator.yaml
    """
    from ingero.remediation.audit import check_audit
    from ingero.remediation.building import build_actuator
    from ingero.remediation.links import build_signer
    from ingero.remediation.messages import ProposalSender
    from ingero.telemetry.clock import SystemClock

    config = _load(file)
    build_actuator(config, SystemClock())  # which reads the files that it names
    check_audit(config.audit, SystemClock())
    signer = build_signer(config.approval)
    if signer is not None:
        ProposalSender(config, signer, SystemClock())
    click.echo(f"{file}: valid, mode {config.mode}, acts through {config.action.kind}")


@cli.command("config")
@click.option(
    "--defaults", is_flag=True, required=True, help="Print every setting with its default."
)
def config(*, defaults: bool) -> None:
    r"""Print a policy that is valid, with every key there is and what it does.

    \b
    Examples:
      ingero-remediator config --defaults > remediator.yaml
    """
    assert defaults
    from ingero.remediation.config import write_defaults

    click.echo(write_defaults(), nl=False)


@cli.command("explain")
@click.argument("episode", required=False)
@_CONFIG
@_JSON
def explain(episode: str | None, file: str, *, as_json: bool) -> None:
    r"""Say which clause let or stopped what, when the policy looked at EPISODE last; without one, list them all.

    EPISODE is an id such as e0123456789, a node, or an action's id.

    \b
    Examples:
      ingero-remediator explain
      ingero-remediator explain e0123456789 --config remediator.yaml
      ingero-remediator explain node17 --json
    """
    from ingero.cli.programs import remediator_answers

    click.echo(remediator_answers.explain(_load(file), episode, as_json=as_json))


@cli.command("journal")
@_CONFIG
@_JSON
def journal(file: str, *, as_json: bool) -> None:
    r"""Show every action, its evidence and what became of it.

    \b
    Examples:
      ingero-remediator journal --config remediator.yaml
      ingero-remediator journal --json | jq '.actions[] | select(.state == "done")'
    """
    from ingero.cli.programs import remediator_answers

    click.echo(remediator_answers.show_journal(_load(file), as_json=as_json))


@cli.command("approve")
@click.argument("action_id", metavar="ID")
@_CONFIG
def approve(action_id: str, file: str) -> None:
    r"""Agree to a proposed action; it is done at the next poll, if the policy still allows it then.

    \b
    Examples:
      ingero-remediator approve a0123456789
    """
    from ingero.cli.programs import remediator_answers

    _show(remediator_answers.approve(_load(file), action_id))


@cli.command("reject")
@click.argument("action_id", metavar="ID")
@_CONFIG
def reject(action_id: str, file: str) -> None:
    r"""Refuse a proposed action; it is not proposed again for the same episode.

    \b
    Examples:
      ingero-remediator reject a0123456789
    """
    from ingero.cli.programs import remediator_answers

    _show(remediator_answers.reject(_load(file), action_id))


@cli.command("undo")
@click.argument("action_id", metavar="ID")
@_CONFIG
def undo(action_id: str, file: str) -> None:
    r"""Reverse an action; what somebody else changed meanwhile is left alone.

    A running remediator does it at its next poll, also in dry-run and while its stop file is there; without one it is
    done here.

    \b
    Examples:
      ingero-remediator undo a0123456789
    """
    from ingero.cli.programs import remediator_answers

    _show(remediator_answers.undo(_load(file), action_id))


@cli.command("exclude")
@_CONFIG
def exclude(file: str) -> None:
    r"""Print the nodes that are out of service by an action, as an option of sbatch and srun; nothing for none.

    \b
    Examples:
      sbatch $(ingero-remediator exclude) job.sh
    """
    from ingero.cli.programs import remediator_answers

    names = remediator_answers.list_held(_load(file))
    if names:
        click.echo(f"--exclude={','.join(names)}")


@cli.command("version")
@_JSON
def version(*, as_json: bool) -> None:
    r"""Show the version.

    \b
    Examples:
      ingero-remediator version
    """
    click.echo(json.dumps({"version": __version__}) if as_json else f"{_PROGRAM} {__version__}")


def _load(file: str) -> RemediatorConfig:
    from ingero.remediation.config import load_policy

    return load_policy(file)


def _show(record: ActionRecord) -> None:
    click.echo(f"{record.action_id} on {record.target}: {record.state.value}, {record.note}")


def main() -> None:
    """Entry point of the ``ingero-remediator`` console script."""
    sys.exit(run_program(cli))
