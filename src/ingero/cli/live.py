"""What ``ingero trace`` and ``ingero fleet-push`` share: a Fleet to tell, and workloads to listen to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import click

from ingero.cli.options import read_duration
from ingero.errors import ConfigError
from ingero.units import NS_PER_S
from ingero.wire.names import DEFAULT_REMEDIATE_GID, DEFAULT_REMEDIATE_SOCKET

if TYPE_CHECKING:
    from ingero.agent.health.loop import Look
    from ingero.agent.health.service import AgentSettings, HealthAgent, OnLook
    from ingero.agent.metrics.health import HealthSeries
    from ingero.agent.push.live import FindAccount
    from ingero.agent.trace.recorder import Recorder
    from ingero.agent.trace.workload import Workload
    from ingero.telemetry.clock import Clock

FILE: Final = click.Path(path_type=Path)
_TIMEOUT_NS: Final = 5 * NS_PER_S

REMEDIATE_OPTIONS: Final = (
    click.option(
        "--remediate", is_flag=True, help="Tell local readers of episodes on a Unix socket."
    ),
    click.option(
        "--remediate-socket",
        type=FILE,
        default=DEFAULT_REMEDIATE_SOCKET,
        show_default=True,
        help="Its path.",
    ),
    click.option(
        "--remediate-gid",
        type=int,
        default=DEFAULT_REMEDIATE_GID,
        show_default=True,
        help="Group that may read it; -1 for none.",
    ),
)
ANNOTATE_OPTIONS: Final = (
    click.option(
        "--annotate",
        is_flag=True,
        help="Take what workloads say of themselves, by `ingero annotate` or a callback.",
    ),
    click.option(
        "--annotate-socket",
        type=FILE,
        help="Where.  [default: /run/ingero/annotate.sock, else ~/.ingero/annotate/annotate.sock]",
    ),
    click.option(
        "--annotate-gid",
        type=int,
        help="Group that may speak there; -1 for none.  [default: that of the user who called sudo]",
    ),
)
FLEET_OPTIONS: Final = (
    click.option(
        "--fleet",
        "fleet_endpoint",
        default="",
        metavar="URL",
        help="Push health and collectives to this Fleet meanwhile, as `ingero fleet-push` does.",
    ),
    click.option(
        "--fleet-cluster-id", default="", help="Name of the cluster, for --fleet and --otlp."
    ),
    click.option(
        "--fleet-workload-type",
        default="unknown",
        show_default=True,
        help="Kind of work, such as training; with --fleet.",
    ),
    click.option(
        "--fleet-push-interval",
        callback=read_duration,
        default="5s",
        show_default=True,
        help="Between regular pushes; a change is pushed at once.",
    ),
    click.option(
        "--fleet-bearer-token-file", type=FILE, help="Bearer token; read again for each push."
    ),
    click.option(
        "--fleet-tls-ca",
        default="",
        metavar="FILE",
        help="Authorities to trust. All three of --fleet-tls-* or none.",
    ),
    click.option("--fleet-tls-cert", default="", metavar="FILE", help="Client certificate chain."),
    click.option(
        "--fleet-tls-key",
        default="",
        metavar="FILE",
        help="Its private key, readable by its owner only.",
    ),
    *REMEDIATE_OPTIONS,
)


@dataclass(frozen=True, slots=True)
class AnnotateChoice:
    """What ANNOTATE_OPTIONS were given."""

    annotate: bool
    annotate_socket: Path | None
    annotate_gid: int | None

    @classmethod
    def take(cls, options: dict[str, Any]) -> Self:
        """Take our options out of a command's."""
        return cls(*(options.pop(name) for name in cls.__slots__))

    @contextmanager
    def open(self, clock: Clock, recorder: Recorder | None = None) -> Iterator[Workload | None]:
        """Listen to workloads until the context ends; None when not wanted.

        Raises:
            ConfigError: A path that cannot be used.
        """
        if not self.annotate:
            if self.annotate_socket is not None or self.annotate_gid is not None:
                click.echo(
                    "warning: --annotate-socket, --annotate-gid: no effect without --annotate",
                    err=True,
                )
            yield None
            return
        from ingero.agent.annotations.place import choose_socket
        from ingero.agent.trace.workload import WorkloadSettings, open_workload
        from ingero.config.invoker import find_invoker

        invoker = find_invoker()
        path = self.annotate_socket or choose_socket(invoker.home)
        gid = invoker.gid if self.annotate_gid is None else self.annotate_gid
        with open_workload(WorkloadSettings(path, gid), clock, recorder) as workload:
            if workload.listener.note:
                click.echo(f"note: {workload.listener.note}", err=True)
            yield workload
        counts = workload.listener.counts
        if counts.n_rejected + counts.n_throttled + counts.n_overlong + counts.n_refused:
            click.echo(
                f"note: {counts.n_rejected + counts.n_overlong} annotations were not believed,"
                f" {counts.n_throttled} came too fast,"
                f" {counts.n_refused} connections were turned away",
                err=True,
            )


@dataclass(frozen=True, slots=True)
class FleetChoice:
    """What FLEET_OPTIONS were given."""

    fleet_endpoint: str
    fleet_cluster_id: str
    fleet_workload_type: str
    fleet_push_interval: int
    fleet_bearer_token_file: Path | None
    fleet_tls_ca: str
    fleet_tls_cert: str
    fleet_tls_key: str
    remediate: bool
    remediate_socket: Path
    remediate_gid: int

    @classmethod
    def take(cls, options: dict[str, Any]) -> Self:
        """Take our options out of a command's."""
        return cls(*(options.pop(name) for name in cls.__slots__))

    def build(self, node: str) -> AgentSettings | None:
        """The agent that is wanted; None without --fleet.

        Raises:
            ConfigError: Lists every problem.
        """
        if not self.fleet_endpoint:
            if self.remediate:
                click.echo(
                    "warning: --remediate: no effect without --fleet URL; episodes are found by comparing nodes",
                    err=True,
                )
            return None
        from ingero.agent.health.options import PushOptions, build_settings
        from ingero.agent.health.signals.facts import find_gpus

        if "://" not in self.fleet_endpoint:
            raise ConfigError(
                f"--fleet {self.fleet_endpoint!r} is not a URL",
                hint="write http:// or https:// before it",
            )
        given: Mapping[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        options = PushOptions(
            **given,
            fleet_node_id=node,
            fleet_timeout=min(_TIMEOUT_NS, self.fleet_push_interval),
            fleet_protocol="http/protobuf",
        )
        return build_settings(options, find_gpus())


def say_notes(agent: HealthAgent, find_account: FindAccount, series: HealthSeries) -> OnLook:
    """Tell what turned, and nothing of quiet looks; the series are told of all."""
    for note in agent.first_notes:
        click.echo(f"note: {note}", err=True)

    def show(look: Look, notes: list[str]) -> None:
        series.note(agent, look, find_account())
        for note in notes:
            click.echo(f"note: {note}", err=True)

    return show
