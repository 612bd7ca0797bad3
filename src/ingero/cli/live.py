"""What ``ingero trace`` and ``ingero fleet-push`` share.

A Fleet to push to, local readers, and annotations of workloads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import click

from ingero.cli.options import HEADER, duration, option, read_optional_duration, size
from ingero.wire.names import DEFAULT_REMEDIATE_GID, DEFAULT_REMEDIATE_SOCKET

if TYPE_CHECKING:
    from ingero.agent.capture.session import TraceSession
    from ingero.agent.health.loop import HealthSample
    from ingero.agent.health.service import HealthAgent, OnSample
    from ingero.agent.metrics.health import HealthSeries
    from ingero.agent.push.live import FindCollectiveCounts
    from ingero.agent.trace.recorder import Recorder
    from ingero.agent.trace.workload import Workload
    from ingero.telemetry.clock import Clock


# Where an agent of root keeps something, another user is asked for root, not refused a path that is there by default.
_OWN_PATH: Final = click.Path(path_type=Path, readable=False)
MAX_GID: Final = 2**32 - 2
"""Of a gid_t, whose last number stands for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushConfig:
    """How a node pushes its health to a Fleet and judges itself by the answer."""

    section: ClassVar = "fleet"

    fleet_endpoint: str = option(
        "Fleet: host:port or a full URL; of several that share storage.nats a list with commas.",
        metavar="HOST:PORT",
    )
    fleet_cluster_id: str = option("Name of the cluster.")
    fleet_node_id: str = option(
        "Name of this node.  [default: the host's name]",
        default="",
        keys=("fleet.node_id", "agent.node"),
    )
    fleet_workload_type: str = option("Kind of work, such as training.", default="unknown")
    fleet_push_interval: int = duration("Between regular pushes; at least 1s.", default="10s")
    fleet_timeout: int | None = option(
        "Longest wait for one answer.  [default: 5s, or the push interval if that is shorter]",
        default=None,
        type=str,
        callback=read_optional_duration,
    )
    fleet_insecure: bool = option("Speak http where the endpoint does not say.", default=False)
    fleet_tls_ca: str = option(
        "Authorities to trust instead of the system's.", default="", metavar="FILE"
    )
    fleet_tls_cert: str = option(
        "Client certificate chain, with --fleet-tls-key.", default="", metavar="FILE"
    )
    fleet_tls_key: str = option(
        "Its private key, readable by its owner only.", default="", metavar="FILE"
    )
    fleet_protocol: str = option(
        "Encoding and transport of OTLP.",
        default="http/json",
        type=click.Choice(["http/json", "http/protobuf", "grpc"]),
    )
    fleet_compression: str = option(
        "Compression of pushes.", default="none", type=click.Choice(["none", "gzip"])
    )
    fleet_header: tuple[str, ...] = option(
        "A header to send along; may be repeated.", default=(), type=HEADER, metavar="NAME=VALUE"
    )
    fleet_bearer_token_file: Path | None = option(
        "Bearer token; read again for each push.", default=None
    )
    fleet_persist_path: Path = option(
        "Where the baseline is kept.",
        default=Path("/var/lib/ingero/health-baseline.json"),
        type=_OWN_PATH,
    )
    fleet_persist_stale_age: int = duration("Oldest baseline to start from.", default="10m")
    fleet_spill_dir: Path = option(
        "Where collectives wait while no Fleet takes them; one agent's alone.",
        default=Path("/var/lib/ingero/spill"),
        type=_OWN_PATH,
    )
    fleet_spill_size: int = size(
        "Most that they take of the disk, beyond which the oldest go; 0 keeps them in memory alone.",
        default="256MiB",
    )
    fleet_spill_age: int = duration("What waited longer is not sent any more.", default="6h")
    fleet_world_size: int = option(
        "Ranks of the distributed job; 0 is none.", default=0, show_default=True
    )
    fleet_node_rank: int = option("This node's rank in it.", default=0, show_default=True)
    fleet_provider: str = option(
        "Cloud provider, such as aws, gcp or azure.", default="", metavar="NAME"
    )
    fleet_threshold_url: str = option(
        "Where to ask for the threshold while answers to pushes carry none.",
        default="",
        metavar="URL",
    )
    fleet_poll_interval: int = duration("Between two such questions.", default="10s")
    fleet_classifier_hysteresis: float = option(
        "How far above the threshold a straggler must come back.", default=0.02
    )
    fleet_classifier_confirm: int = option(
        "Looks in a row under the threshold that make a straggler.", default=2
    )
    fleet_peers_wait: int | None = option(
        "Time under Fleet's threshold after which Fleet is asked once more and the node is a straggler, unless its"
        " peers fell too; the push interval when left out, or two of them up to 5s.",
        default=None,
        type=str,
        callback=read_optional_duration,
    )
    fleet_early_push_delta: float = option(
        "A score that moved by more is pushed at once; 1 never.", default=0.05
    )
    sample_interval: int = duration("Between two looks at the node.", default="1s")
    warmup_samples: int = option("Push intervals of calibration.", default=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemediateConfig:
    """The socket on which local readers receive episodes."""

    section: ClassVar = "remediate"

    remediate: bool = option("Tell local readers of episodes on a Unix socket.", default=False)
    remediate_socket: Path = option(
        "Its path.", default=Path(DEFAULT_REMEDIATE_SOCKET), type=_OWN_PATH
    )
    remediate_gid: int = option(
        "Group that may read it; -1 for none.",
        default=DEFAULT_REMEDIATE_GID,
        type=click.IntRange(-1, MAX_GID),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpansConfig:
    """A collector that receives a span of each episode."""

    section: ClassVar = "otlp"

    otlp_enabled: bool = option("Trace detections, one span per episode.", default=False)
    otlp_endpoint: str = option("Where to: host:port or a URL.", default="", metavar="HOST:PORT")
    otlp_insecure: bool = option(
        "Speak http there where the endpoint does not say.",
        "--otlp-insecure/--otlp-secure",
        default=True,
        is_flag=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotateConfig:
    """The socket on which workloads annotate what they do."""

    section: ClassVar = "annotate"

    annotate: bool = option(
        "Take what workloads say of themselves, by `ingero annotate` or a callback.", default=False
    )
    annotate_socket: Path | None = option(
        "Where.  [default: /run/ingero/annotate.sock, else ~/.ingero/annotate/annotate.sock]",
        default=None,
    )
    annotate_gid: int | None = option(
        "Group that may speak there; -1 for none.  [default: that of the user who called sudo]",
        default=None,
        type=click.IntRange(-1, MAX_GID),
    )

    @contextmanager
    def open(self, clock: Clock, recorder: Recorder | None = None) -> Iterator[Workload | None]:
        """Take annotations until the context ends; None when they are not wanted.

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
        from ingero.agent.annotations.socket_path import choose_socket
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


def print_missing(session: TraceSession) -> None:
    """Print what cannot be probed and what that costs."""
    for part in session.missing:
        click.echo(f"without {part.name}: {part.reason} ({part.costs})", err=True)
    for note in session.notes:
        click.echo(note, err=True)


def print_notes(
    agent: HealthAgent, find_counts: FindCollectiveCounts, series: HealthSeries
) -> OnSample:
    """Print changes of the health loop, and note every sample in the series."""
    for note in agent.first_notes:
        click.echo(f"note: {note}", err=True)

    def show(sample: HealthSample, notes: list[str]) -> None:
        series.note(agent, sample, find_counts())
        for note in notes:
            click.echo(f"note: {note}", err=True)

    return show
