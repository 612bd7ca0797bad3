"""The parts of a remediator, from its policy."""

from __future__ import annotations

from pathlib import Path

from ingero.errors import StoreError, UnsupportedError
from ingero.remediation.actuators.actuator import Actuator
from ingero.remediation.actuators.command import CommandActuator
from ingero.remediation.actuators.slurm import SlurmActuator
from ingero.remediation.actuators.slurm_pair import SlurmPairActuator
from ingero.remediation.actuators.webhook import WebhookActuator
from ingero.remediation.config import ActuatorConfig, RemediatorConfig
from ingero.remediation.records import Moment
from ingero.telemetry.clock import Clock

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Another one after each boot. Source: random(4)."""


def build_actuator(config: RemediatorConfig, clock: Clock) -> Actuator:
    """Who takes a node out of service, by the one section of ``action``.

    Raises:
        ConfigError: A file that it names cannot be used.
        UnsupportedError: What it needs is not installed.
    """
    action = config.action
    if action.command is not None:
        return CommandActuator(action.command)
    if action.webhook is not None:
        return WebhookActuator(action.webhook, clock.wall_ns)
    if action.slurm is None:
        return _build_of_an_extra(action, clock)
    if config.confirm is not None and config.confirm.pair_test is not None:
        return SlurmPairActuator(action.slurm, config.confirm.pair_test)
    return SlurmActuator(action.slurm)


def _build_of_an_extra(action: ActuatorConfig, clock: Clock) -> Actuator:
    kind = action.kind
    try:
        if action.kubernetes is not None:
            from ingero.remediation.actuators.kubernetes import KubernetesActuator  # noqa: PLC0415

            return KubernetesActuator(action.kubernetes, clock)
        if action.kubernetes_device is not None:
            from ingero.remediation.actuators.kubernetes_device import (  # noqa: PLC0415
                KubernetesDeviceActuator,
            )

            return KubernetesDeviceActuator(action.kubernetes_device, clock)
        assert action.nvsentinel is not None
        from ingero.remediation.actuators.nvsentinel import NvsentinelActuator  # noqa: PLC0415

        return NvsentinelActuator(action.nvsentinel, clock.wall_ns)
    except ModuleNotFoundError as error:
        extra = "agent" if action.nvsentinel is not None else "kubernetes"
        raise UnsupportedError(
            f"action.{kind} needs {error.name}", hint=f"pip install 'ingero[{extra}]'"
        ) from error


def read_boot() -> str:
    """The id of this boot."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def read_moment(clock: Clock, boot: str) -> Moment:
    """Now."""
    return Moment(clock.mono_ns(), clock.wall_ns(), boot)


def prepare_folder(journal: Path) -> None:
    """Make the journal's folder.

    Raises:
        StoreError: It cannot be made.
    """
    try:
        journal.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make {journal.parent}: {error.strerror}") from error
