"""``ingero fleet-push``: the health loop of one node."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ingero.cli.live import AnnotateConfig, PushConfig, RemediateConfig, SpansConfig, print_missing
from ingero.cli.metrics_page import serve_metrics
from ingero.cli.options import (
    KUBELET_SOCKET_OPTION,
    PROBE_MODE_OPTION,
    duration,
    group,
    option,
    placed,
    with_config,
)
from ingero.cli.settings_file import ConfiguredCommand
from ingero.cli.signals import catch_stop
from ingero.errors import ConfigError, UnsupportedError
from ingero.telemetry.clock import SystemClock

if TYPE_CHECKING:
    from ingero.agent.capture.session import TraceSession
    from ingero.agent.health.collective_counts import CollectiveCounts
    from ingero.agent.health.loop import HealthSample
    from ingero.agent.health.open_episodes import FindLabels
    from ingero.agent.health.service import AgentSettings, HealthAgent, OnSample
    from ingero.agent.health.signals.reading import SignalSource
    from ingero.agent.push.live import FindCollectiveCounts, Follow
    from ingero.agent.trace.workload import Workload

    NoteSample = Callable[[HealthAgent, HealthSample, CollectiveCounts | None], None]

DEFAULT_ADDRESS: Final = "127.0.0.1:9467"


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalConfig:
    """What is played or read instead of probing this node."""

    signal_db_path: Path | None = option(
        "Read the recording that `ingero trace` writes meanwhile, instead of probing; needs no root.",
        default=None,
        metavar="FILE",
    )
    signal_window: int = duration(
        "Over how long rates are taken from it.", default="10s", at_least="100ms"
    )
    signal_num_gpus: int = option(
        "GPUs whose work it holds.  [default: as many as processes]",
        default=0,
        type=click.IntRange(min=0),
    )
    stub: bool = option("Read constants instead of a GPU, to try a deployment.", default=False)
    script: Path | None = option(
        "Play a timeline of signals; see docs/guides/agent.md.", default=None, metavar="FILE"
    )

    def open(self) -> SignalSource | None:
        """What to play or read; None probes.

        Raises:
            ConfigError: More than one was given, or a file cannot be used.
        """
        from ingero.agent.health.signal_script import ScriptSource, load_script
        from ingero.agent.health.signals.reading import StubSource

        if self.stub + (self.script is not None) + (self.signal_db_path is not None) > 1:
            raise ConfigError("--stub, --script and --signal-db-path exclude each other")
        if self.signal_db_path is not None:
            from ingero.agent.push.recorded import RecordedSource

            return RecordedSource(
                self.signal_db_path,
                self.signal_window,
                self.signal_num_gpus,
                lambda text: click.echo(f"note: {text}", err=True),
            )
        if self.script is not None:
            return ScriptSource(load_script(self.script))
        return StubSource() if self.stub else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPushConfig:
    """The options of ``ingero fleet-push``."""

    push: PushConfig = group()
    signals: SignalConfig = group()
    probe_mode: None = placed(PROBE_MODE_OPTION)
    kubelet_socket: None = placed(KUBELET_SOCKET_OPTION)
    remediate: RemediateConfig = group()
    annotate: AnnotateConfig = group()
    spans: SpansConfig = group()
    prometheus: str = option(
        "Serve score, mode, reachability and what became of the collectives on /metrics;"
        f" {DEFAULT_ADDRESS} when no address is given.",
        default="",
        is_flag=False,
        flag_value=DEFAULT_ADDRESS,
        metavar="[HOST:PORT]",
    )
    as_json: bool = option(
        "Print one JSON object per look that ticked or pushed.", "--json", default=False
    )


@click.command("fleet-push", cls=ConfiguredCommand)
@with_config(FleetPushConfig)
def command(config: FleetPushConfig) -> int:
    r"""Score this node, push the score to a Fleet and judge it by the answer.

    Without --stub, --script and --signal-db-path it probes this node, which needs root: exact counts of every GPU
    call once a second, and each rank's collectives, which Fleet compares to name the slow one. Runs until it is
    stopped. Without Fleet it goes on judging: by the last threshold it received, then by the node's own past. SIGTERM
    and Ctrl-C save the baseline.

    \b
    Examples:
      sudo ingero fleet-push --fleet-endpoint https://fleet:4318 --fleet-cluster-id prod
      ingero fleet-push --fleet-endpoint localhost:4318 --fleet-insecure --fleet-cluster-id trial --stub
      ingero fleet-push --fleet-endpoint https://fleet:4318 --fleet-cluster-id prod --signal-db-path run.db
      ingero fleet-push --fleet-endpoint https://fleet:4318 --fleet-cluster-id prod --script day.yaml --json
      ingero fleet-push --fleet-endpoint fleet:4317 --fleet-protocol grpc --fleet-insecure \
        --fleet-cluster-id prod --stub --remediate --remediate-socket /run/ingero/remediate.sock
    """
    from ingero.agent.health.signals.node_facts import GpuFacts, find_gpus
    from ingero.cli.push_settings import build_settings

    source = config.signals.open()
    gpus = GpuFacts() if config.signals.stub else find_gpus()
    settings = build_settings(config.push, config.remediate, gpus, config.spans)
    with config.annotate.open(SystemClock()) as workload, _pages(config.prometheus) as note_sample:
        find_labels = workload.latest.current if workload else None

        def follow(agent: HealthAgent, find_counts: FindCollectiveCounts) -> OnSample:
            show = _printer(agent, find_counts, workload, as_json=config.as_json)

            def both(sample: HealthSample, notes: list[str]) -> None:
                show(sample, notes)
                note_sample(agent, sample, find_counts())

            return both

        if source is None:
            return _run_live(settings, find_labels, follow)
        return _run(settings, source, find_labels, follow)


@contextmanager
def _pages(prometheus: str) -> Iterator[NoteSample]:
    """Serve what a scraper may ask of the agent, where that is wanted; yields what notes each sample."""
    if not prometheus:
        yield lambda _agent, _sample, _counts: None
        return
    from ingero.agent.metrics.exporting import PrometheusPage
    from ingero.agent.metrics.health import HealthSeries

    page, series = PrometheusPage(), HealthSeries()

    def note_sample(
        agent: HealthAgent, sample: HealthSample, collective_counts: CollectiveCounts | None
    ) -> None:
        series.note(agent, sample, collective_counts)
        page.take(tuple(series.iter_series()), sample.wall_ns)

    with serve_metrics(page, prometheus, "--prometheus"):
        yield note_sample


def _run_live(settings: AgentSettings, find_labels: FindLabels | None, follow: Follow) -> int:
    import os

    from ingero.agent.capture.discover.library_paths import iter_installed
    from ingero.agent.capture.probes.engine import EngineSettings
    from ingero.agent.capture.session import TraceSettings
    from ingero.agent.push.live import LiveAgent, LiveCallbacks, LiveSettings
    from ingero.config.environment import read_kubelet_socket
    from ingero.serving.ready import report_ready

    if os.geteuid() != 0:
        raise UnsupportedError(
            "probing this node needs root", hint="run it with sudo, or give --stub or --script FILE"
        )
    trace = TraceSettings(
        engine=EngineSettings(host_probes=("process",)),
        files=tuple(iter_installed("")),
        kubelet=read_kubelet_socket(),
    )

    def report(session: TraceSession) -> None:
        print_missing(session)
        report_ready("ingero-fleet-push", {})

    live = LiveAgent(
        LiveSettings(trace, settings),
        LiveCallbacks(follow, find_labels, notify=functools.partial(click.echo, err=True)),
        on_ready=report,
    )
    with catch_stop() as stop:
        live.run(stop.event)
    return stop.exit_status


def _run(
    settings: AgentSettings,
    source: SignalSource,
    find_labels: FindLabels | None,
    follow: Follow,
) -> int:
    from ingero.agent.health.service import open_agent
    from ingero.serving.ready import report_ready

    with (
        catch_stop() as stop,
        open_agent(settings, source, SystemClock(), stop.event, find_labels) as agent,
    ):
        report_ready("ingero-fleet-push", {})
        agent.run(follow(agent, lambda: None))
    return stop.exit_status


def _printer(
    agent: HealthAgent,
    find_counts: FindCollectiveCounts,
    workload: Workload | None,
    *,
    as_json: bool,
) -> OnSample:
    from ingero.agent.health.output import build_record, write_line

    for note in agent.first_notes:
        click.echo(f"note: {note}", err=True)
    is_terminal = sys.stdout.isatty()

    def show(sample: HealthSample, notes: list[str]) -> None:
        for note in notes:
            click.echo(f"note: {note}", err=True)
        if not (sample.is_tick or sample.is_pushed):
            return
        collective_counts = find_counts()
        if as_json:
            record = build_record(sample, agent.cache, agent.queue, agent.stream)
            if collective_counts is not None:
                record["collectives"] = collective_counts.build_record()
            if workload is not None:
                record["annotations"] = workload.listener.counts.build_record()
            click.echo(json.dumps(record))
            return
        line = write_line(sample, agent.queue) + (
            collective_counts.describe_loss() if collective_counts else ""
        )
        click.echo(click.style(line, fg="red") if sample.is_straggler and is_terminal else line)

    return show
