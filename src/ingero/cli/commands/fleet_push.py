"""``ingero fleet-push``: the health loop of one node."""

from __future__ import annotations

import functools
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from ingero.cli.live import ANNOTATE_OPTIONS, FILE, REMEDIATE_OPTIONS, AnnotateChoice
from ingero.cli.options import (
    PROBE_MODE_OPTION,
    CheckedCommand,
    read_duration,
    read_optional_duration,
)
from ingero.cli.serving import add_options
from ingero.errors import ConfigError, UnsupportedError
from ingero.telemetry.clock import SystemClock

if TYPE_CHECKING:
    from types import FrameType

    from ingero.agent.health.account import CollectiveAccount
    from ingero.agent.health.book import FindLabels
    from ingero.agent.health.loop import Look
    from ingero.agent.health.service import AgentSettings, HealthAgent, OnLook
    from ingero.agent.health.signals.reading import SignalSource
    from ingero.agent.push.live import FindAccount, Follow
    from ingero.agent.trace.workload import Workload

    Tell = Callable[[HealthAgent, Look, CollectiveAccount | None], None]

DEFAULT_ADDRESS: Final = "127.0.0.1:9467"


@click.command("fleet-push", cls=CheckedCommand)
@click.option(
    "--fleet-endpoint", required=True, metavar="HOST:PORT", help="Fleet: host:port or a full URL."
)
@click.option("--fleet-cluster-id", required=True, help="Name of the cluster.")
@click.option("--fleet-node-id", default="", help="Name of this node.  [default: the host's name]")
@click.option(
    "--fleet-workload-type",
    default="unknown",
    show_default=True,
    help="Kind of work, such as training.",
)
@click.option(
    "--fleet-push-interval",
    callback=read_duration,
    default="10s",
    show_default=True,
    help="Between regular pushes; at least 1s.",
)
@click.option(
    "--fleet-timeout",
    callback=read_duration,
    default="5s",
    show_default=True,
    help="Longest wait for one answer; by default no longer than the push interval.",
)
@click.option("--fleet-insecure", is_flag=True, help="Speak http where the endpoint does not say.")
@click.option(
    "--fleet-tls-ca",
    default="",
    metavar="FILE",
    help="Authorities to trust. All three of --fleet-tls-* or none.",
)
@click.option("--fleet-tls-cert", default="", metavar="FILE", help="Client certificate chain.")
@click.option(
    "--fleet-tls-key",
    default="",
    metavar="FILE",
    help="Its private key, readable by its owner only.",
)
@click.option(
    "--fleet-protocol",
    type=click.Choice(["http/json", "http/protobuf", "grpc"]),
    default="http/json",
    show_default=True,
    help="Encoding and transport of OTLP.",
)
@click.option(
    "--fleet-compression",
    type=click.Choice(["none", "gzip"]),
    default="none",
    show_default=True,
    help="Compression of pushes.",
)
@click.option(
    "--fleet-header",
    multiple=True,
    metavar="NAME=VALUE",
    help="A header to send along; may be repeated.",
)
@click.option(
    "--fleet-bearer-token-file", type=FILE, help="Bearer token; read again for each push."
)
@click.option(
    "--fleet-persist-path",
    type=FILE,
    default="/var/lib/ingero/health-baseline.json",
    show_default=True,
    help="Where the baseline is kept.",
)
@click.option(
    "--fleet-persist-stale-age",
    callback=read_duration,
    default="10m",
    show_default=True,
    help="Oldest baseline to start from.",
)
@click.option(
    "--fleet-world-size",
    type=int,
    default=0,
    show_default=True,
    help="Ranks of the distributed job; 0 is none.",
)
@click.option(
    "--fleet-node-rank", type=int, default=0, show_default=True, help="This node's rank in it."
)
@click.option(
    "--fleet-provider",
    default="",
    metavar="NAME",
    help="Cloud provider, such as aws, gcp or azure.",
)
@click.option(
    "--fleet-threshold-url",
    default="",
    metavar="URL",
    help="Where to ask for the threshold while answers to pushes carry none.",
)
@click.option(
    "--fleet-poll-interval",
    callback=read_duration,
    default="10s",
    show_default=True,
    help="Between two such questions.",
)
@click.option(
    "--fleet-classifier-hysteresis",
    type=float,
    default=0.02,
    show_default=True,
    help="How far above the threshold a straggler must come back.",
)
@click.option(
    "--fleet-classifier-confirm",
    type=int,
    default=2,
    show_default=True,
    help="Looks in a row under the threshold that make a straggler.",
)
@click.option(
    "--fleet-peers-wait",
    callback=read_optional_duration,
    default=None,
    help="Time under Fleet's threshold after which Fleet is asked once more and the node is a straggler, unless its peers"
    " fell too; the push interval when left out, or two of them up to 5s.",
)
@click.option(
    "--fleet-early-push-delta",
    type=float,
    default=0.05,
    show_default=True,
    help="A score that moved by more is pushed at once; 1 never.",
)
@click.option(
    "--sample-interval",
    callback=read_duration,
    default="1s",
    show_default=True,
    help="Between two looks at the node.",
)
@click.option(
    "--warmup-samples",
    type=int,
    default=30,
    show_default=True,
    help="Push intervals of calibration.",
)
@click.option(
    "--signal-db-path",
    type=FILE,
    metavar="FILE",
    help="Read the recording that `ingero trace` writes meanwhile, instead of probing; needs no root.",
)
@click.option(
    "--signal-window",
    callback=read_duration,
    default="10s",
    show_default=True,
    help="Over how long rates are taken from it.",
)
@click.option(
    "--signal-num-gpus",
    type=click.IntRange(min=0),
    default=0,
    help="GPUs whose work it holds.  [default: as many as processes]",
)
@click.option("--stub", is_flag=True, help="Read constants instead of a GPU, to try a deployment.")
@click.option(
    "--script",
    type=FILE,
    metavar="FILE",
    help="Play a timeline of signals; see docs/guides/agent.md.",
)
@PROBE_MODE_OPTION
@add_options(REMEDIATE_OPTIONS)
@add_options(ANNOTATE_OPTIONS)
@click.option("--otlp-enabled", is_flag=True, help="Trace detections, one span per episode.")
@click.option(
    "--otlp-endpoint", default="", metavar="HOST:PORT", help="Where to: host:port or a URL."
)
@click.option(
    "--otlp-insecure/--otlp-secure",
    default=True,
    show_default=True,
    help="Speak http there where the endpoint does not say.",
)
@click.option(
    "--prometheus",
    is_flag=False,
    flag_value=DEFAULT_ADDRESS,
    default="",
    metavar="[HOST:PORT]",
    help=f"Serve score, mode, reachability and what became of the collectives on /metrics; {DEFAULT_ADDRESS} when no address is given.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object per look that ticked or pushed."
)
def command(
    *,
    stub: bool,
    script: Path | None,
    signal_db_path: Path | None,
    signal_window: int,
    signal_num_gpus: int,
    prometheus: str,
    as_json: bool,
    **options: Any,  # noqa: ANN401
) -> int:
    r"""Score this node, push the score to a Fleet and judge it by the answer.

    Without --stub, --script and --signal-db-path it probes this node, which needs root: exact counts of every GPU call once a second, and
    each rank's collectives, which Fleet compares to name the slow one. Runs until it is told to stop. Without Fleet it
    goes on judging: by the last threshold it heard, then by the node's own past. SIGTERM and Ctrl-C save the baseline.

    \b
    Examples:
      sudo ingero fleet-push --fleet-endpoint https://fleet:4318 --fleet-cluster-id prod
      ingero fleet-push --fleet-endpoint localhost:4318 --fleet-insecure --fleet-cluster-id trial --stub
      ingero fleet-push --fleet-endpoint https://fleet:4318 --fleet-cluster-id prod --signal-db-path run.db
      ingero fleet-push --fleet-endpoint https://fleet:4318 --fleet-cluster-id prod --script day.yaml --json
      ingero fleet-push --fleet-endpoint fleet:4317 --fleet-protocol grpc --fleet-insecure \
        --fleet-cluster-id prod --stub --remediate --remediate-socket /run/ingero/remediate.sock
    """
    from ingero.agent.health.options import PushOptions, build_settings
    from ingero.agent.health.signals.facts import GpuFacts, find_gpus

    annotate = AnnotateChoice.take(options)
    given = click.get_current_context().get_parameter_source("fleet_timeout")
    if given is ParameterSource.DEFAULT:
        options["fleet_timeout"] = min(options["fleet_timeout"], options["fleet_push_interval"])
    source = _find_source(script, (signal_db_path, signal_window, signal_num_gpus), is_stub=stub)
    settings = build_settings(PushOptions(**options), GpuFacts() if stub else find_gpus())
    with annotate.open(SystemClock()) as workload, _pages(prometheus) as tell:
        find_labels = workload.latest.current if workload else None

        def follow(agent: HealthAgent, find_account: FindAccount) -> OnLook:
            show = _printer(agent, find_account, workload, as_json=as_json)

            def both(look: Look, notes: list[str]) -> None:
                show(look, notes)
                tell(agent, look, find_account())

            return both

        if source is None:
            return _run_live(settings, find_labels, follow)
        return _run(settings, source, find_labels, follow)


@contextmanager
def _pages(prometheus: str) -> Iterator[Tell]:
    """Serve what a scraper may ask of the agent, where that is wanted; what is to be told of each look."""
    if not prometheus:
        yield lambda _agent, _look, _account: None
        return
    from ingero.agent.events.sink_server import serve_sink
    from ingero.agent.metrics.exporting import PrometheusPage
    from ingero.agent.metrics.health import HealthSeries
    from ingero.config import Endpoint

    try:
        endpoint = Endpoint.parse(prometheus)
    except ValueError as error:
        raise ConfigError(f"--prometheus {error}") from error
    page, series = PrometheusPage(), HealthSeries()

    def tell(agent: HealthAgent, look: Look, account: CollectiveAccount | None) -> None:
        series.note(agent, look, account)
        page.take(tuple(series.iter_series()), look.wall_ns)

    with serve_sink(endpoint, page, option="--prometheus") as bound:
        click.echo(f"serving http://{bound}/metrics", err=True)
        yield tell


def _find_source(
    script: Path | None, recorded: tuple[Path | None, int, int], *, is_stub: bool
) -> SignalSource | None:
    """What to play or read instead of probing; None probes."""
    from ingero.agent.health.script import ScriptSource, load_script
    from ingero.agent.health.signals.reading import StubSource

    path, window_ns, n_gpus = recorded
    if is_stub + (script is not None) + (path is not None) > 1:
        raise ConfigError("--stub, --script and --signal-db-path exclude each other")
    if path is not None:
        from ingero.agent.push.recorded import RecordedSource

        return RecordedSource(
            path, window_ns, n_gpus, lambda text: click.echo(f"note: {text}", err=True)
        )
    if script is not None:
        return ScriptSource(load_script(script))
    if is_stub:
        return StubSource()
    return None


def _run_live(settings: AgentSettings, find_labels: FindLabels | None, follow: Follow) -> int:
    import os

    from ingero.agent.capture.discover.places import iter_installed
    from ingero.agent.capture.probes.engine import EngineSettings
    from ingero.agent.capture.session import TraceSession, TraceSettings
    from ingero.agent.push.live import LiveAgent, LiveSettings, LiveTold

    if os.geteuid() != 0:
        raise UnsupportedError(
            "probing this node needs root", hint="run it with sudo, or give --stub or --script FILE"
        )
    trace = TraceSettings(
        engine=EngineSettings(host_probes=("process",)), files=tuple(iter_installed(""))
    )

    def say_missing(session: TraceSession) -> None:
        for part in session.missing:
            click.echo(f"without {part.name}: {part.reason} ({part.costs})", err=True)
        for note in session.notes:
            click.echo(note, err=True)

    told = LiveTold(follow, find_labels)
    live = LiveAgent(
        LiveSettings(trace, settings),
        told,
        on_ready=say_missing,
        tell=functools.partial(click.echo, err=True),
    )
    with _stopping() as (stop, received):
        live.run(stop)
    return 130 if signal.SIGINT in received else 0


@contextmanager
def _stopping() -> Iterator[tuple[threading.Event, list[int]]]:
    """Set an event at the first signal that asks us to end."""
    stop = threading.Event()
    received: list[int] = []

    def end(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        stop.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop, received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(
    settings: AgentSettings,
    source: SignalSource,
    find_labels: FindLabels | None,
    follow: Follow,
) -> int:
    from ingero.agent.health.service import open_agent

    with (
        _stopping() as (stop, received),
        open_agent(settings, source, SystemClock(), stop, find_labels) as agent,
    ):
        agent.run(follow(agent, lambda: None))
    return 130 if signal.SIGINT in received else 0


def _printer(
    agent: HealthAgent, find_account: FindAccount, workload: Workload | None, *, as_json: bool
) -> OnLook:
    from ingero.agent.health.narrate import build_record, write_line

    for note in agent.first_notes:
        click.echo(f"note: {note}", err=True)
    is_terminal = sys.stdout.isatty()

    def show(look: Look, notes: list[str]) -> None:
        for note in notes:
            click.echo(f"note: {note}", err=True)
        if not (look.is_tick or look.is_pushed):
            return
        account = find_account()
        if as_json:
            record = build_record(look, agent.cache, agent.lane, agent.stream)
            if account is not None:
                record["collectives"] = account.build_record()
            if workload is not None:
                record["annotations"] = workload.listener.counts.build_record()
            click.echo(json.dumps(record))
            return
        line = write_line(look, agent.lane) + (account.describe_loss() if account else "")
        click.echo(click.style(line, fg="red") if look.is_straggler and is_terminal else line)

    return show
