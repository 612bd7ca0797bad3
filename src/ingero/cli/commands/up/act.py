"""``ingero up --slurm``: its options, and the run that they ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from ingero.cli.options import FiniteRange, option
from ingero.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from ingero.sim.cluster.result import UpSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmUpConfig:
    """A Slurm of its own, and what is done about the node of a culprit."""

    slurm: bool = option(
        "Run --job in a Slurm of its own, with an ingero-remediator; until the job ends.",
        default=False,
    )
    spares: int = option(
        "Hosts of --slurm beyond those that the job takes.",
        default=1,
        type=click.IntRange(min=0, max=8),
    )
    act: str = option(
        "What the remediator of --slurm does: say what it would do, wait for a person, or act.",
        default="dry-run",
        type=click.Choice(["dry-run", "ask", "auto"]),
    )
    twins: tuple[str, ...] = option(
        "Run the job of --slurm once more without the fault, or without the action, and say how far the estimate was"
        " off; takes as long again. May be given twice.",
        "--twin",
        default=(),
        type=click.Choice(["without-fault", "without-action"]),
    )
    gpu_rate: float | None = option(
        "Price of a rank's hour in --slurm, for what the action saved.",
        default=None,
        type=FiniteRange(min=0, min_open=True),
        metavar="PRICE",
    )
    currency: str = option("Of --gpu-rate.", default="USD")
    with_echo: bool = option(
        "Keep what Fleet and the remediator of --slurm tell in an Echo, and ask that one what the action saved.",
        "--echo",
        default=False,
    )


_OWN: Final = {
    "spares": "--spares",
    "act": "--act",
    "twins": "--twin",
    "gpu_rate": "--gpu-rate",
    "currency": "--currency",
    "with_echo": "--echo",
}
"""Options that mean nothing without ``--slurm``."""


def check_asked(config: SlurmUpConfig, context: click.Context) -> None:
    """Refuse options that mean nothing without ``--slurm``.

    Raises:
        ConfigError: One was given.
    """
    given = [flag for name, flag in _OWN.items() if _is_given(context, name)]
    if given and not config.slurm:
        names = " and ".join(given)
        raise ConfigError(f"{names} without --slurm", hint="sudo ingero up --slurm --job FILE ...")


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def run_in_slurm(
    config: SlurmUpConfig, up: UpSettings, context: click.Context, console: Console
) -> dict[str, Any]:
    """Run the whole story; its result.

    Raises:
        ConfigError: It was given no job.
        UnsupportedError: There is no Slurm here, or a fault is none that a host can have.
        IngeroError: A part did not start, or the job failed.
    """
    from ingero.cli.commands.up.show_act import ActLines, draw
    from ingero.cli.progress import show_progress
    from ingero.sim.cluster.act import check_act, run_act
    from ingero.sim.cluster.act_result import MODES, ActSettings
    from ingero.sim.cluster.twin import TWINS

    if up.job is None:
        raise ConfigError(
            "--slurm runs a job of yours: give --job FILE",
            hint="sudo ingero up --slurm --job examples/jobs/ddp_checkpoint.py --fault cpu-quota:2:50% --act auto",
        )
    check_act(up.faults)
    is_limited = _is_given(context, "watch_ns") or _is_given(context, "seconds")
    settings = ActSettings(
        up,
        config.spares,
        next(mode for mode in MODES if mode == config.act),
        up.duration_ns if is_limited else None,
        config.gpu_rate,
        config.currency,
        has_echo=config.with_echo,
    )
    twins = [kind for kind in TWINS if kind in config.twins]
    with show_progress(console, draw, ActLines().describe) as follow:
        return run_act(settings, follow, twins)
