"""Runs ``ingero trace``: options to settings, observers to outputs, signals to a clean end."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ingero.agent.capture.delivery import Observer
from ingero.agent.capture.discover.cgroups import seen_cgroups
from ingero.agent.capture.discover.library_paths import iter_installed
from ingero.agent.capture.discover.processes import find_family
from ingero.agent.capture.gpu.nvml import Nvml
from ingero.agent.capture.gpu.readings import find_throttles
from ingero.agent.capture.kernel.abi import Stacks
from ingero.agent.capture.kernel.perf import PerfEvents
from ingero.agent.capture.privileges import Duties, check_privileges, drop_privileges
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.capture.probes.host import PROBES, find_software_events
from ingero.agent.capture.probes.modes import choose_way
from ingero.agent.capture.program import HeldProgram, ProgramSettings
from ingero.agent.capture.session import DRAIN_MS, TraceSession, TraceSettings
from ingero.agent.metrics.gpus import GpuWatch
from ingero.agent.metrics.hardware import iter_hardware_series
from ingero.agent.metrics.health import HealthSeries
from ingero.agent.metrics.nccl import NcclProcesses
from ingero.agent.metrics.series import Series
from ingero.agent.trace.host_sampler import HostSampler
from ingero.agent.trace.recorder import Recorder, build_session, check_complete
from ingero.agent.trace.selection import Selection
from ingero.cli.commands.trace.config import TraceConfig
from ingero.cli.commands.trace.incidents import (
    build_command,
    build_verdict_line,
    describe_incident,
    describe_verdict,
)
from ingero.cli.commands.trace.inference import InferenceConfig
from ingero.cli.commands.trace.output import JsonLines, LiveTable
from ingero.cli.live import print_missing, print_notes
from ingero.cli.progress import OutputConsole
from ingero.cli.signals import catch_stop
from ingero.config.environment import ProbeMode, default_database, read_kubelet_socket
from ingero.config.invoker import Invoker, build_child_environment, find_invoker
from ingero.errors import ConfigError, UnsupportedError
from ingero.model.incidents import Incident
from ingero.recording.store.settings import WriterSettings
from ingero.serving.ready import report_ready
from ingero.sim.runner import get_program
from ingero.telemetry.clock import SystemClock

# What only some options need is imported where they ask for it: a trace starts in two thirds of the time.
if TYPE_CHECKING:
    from ingero.agent.health.service import HealthAgent, OnSample
    from ingero.agent.inference.messages import OutlierMessages
    from ingero.agent.inference.watch import InferenceWatch, StepOutlier
    from ingero.agent.push.live import FindCollectiveCounts
    from ingero.agent.trace.incidents import IncidentSummary, IncidentWatch

_STDERR: Final = 2
_PIPE_WIDTH: Final = 110
_STACKS: Final = {None: Stacks.NOTABLE, True: Stacks.ALL, False: Stacks.NONE}
_TABLE_DRAIN_MS: Final = 250
"""A table shows no single events."""


def run_trace(options: TraceConfig) -> int:
    """Trace as the options say.

    Returns:
        0; 130 after Ctrl-C; 143 after SIGTERM.

    Raises:
        UnsupportedError: The privileges are missing, or the kernel refuses.
        ConfigError: Options that contradict each other.
        StoreError: The recording cannot be written, or is incomplete at the end of an otherwise successful trace.
    """
    settings = _build_settings(options)
    mode = choose_way(settings.engine.probe_mode).mode
    check_privileges()
    invoker = find_invoker()
    with contextlib.ExitStack() as stack:
        # Before any thread: the child is a fork of this process until it is released.
        program = _hold(options, invoker)
        if program is not None:
            stack.callback(program.end)
        # Kernels of Debian and Ubuntu may ask for CAP_SYS_ADMIN here, which is given up next.
        events = PerfEvents(find_software_events(settings.engine.host_probes))
        stack.callback(events.close)
        drop_privileges(
            Duties(
                owns_files=options.record,
                opens_sockets=options.annotate.annotate or options.remediate.remediate,
                runs_program=program is not None,
                serves=bool(options.metrics.prometheus),
                probes_by_events=mode is ProbeMode.EVENT,
            )
        )
        stop = stack.enter_context(catch_stop())
        built = _build_observers(options, invoker, stack)
        table, recorder, watch = built.table, built.recorder, built.watch
        notify = _print if table is None or not table.is_live else _print_nothing
        session = stack.enter_context(
            TraceSession(settings, built.observers, program, events=events, notify=notify)
        )
        if table is not None:
            table.session = session
        print_missing(session)
        report_ready("ingero-trace", {})
        try:
            session.run(stop)
        except BrokenPipeError:  # the reader of our output has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if session.has_lost_all:
            _print("every process that was to be watched has ended")
        for reason in session.refused_interpreters:
            click.echo(f"without Python frames: {reason}", err=True)
    if program is not None and program.was_killed:
        _print(f"{program.name} did not end by SIGTERM within 10 s and was killed")
    if watch is not None:
        _print_summary(options, watch.verdict, recorder)
    if recorder is not None:
        check_complete(recorder.stored())
    return 128 + stop.first if stop.first else 0


def _build_settings(options: TraceConfig) -> TraceSettings:
    chosen = [options.pids, options.user, options.cgroup, options.program]
    if sum(map(bool, chosen)) > 1:
        raise ConfigError(
            "--pid, --user, --cgroup and a PROGRAM exclude each other", hint="give one of them"
        )
    uid = None
    if options.user:
        try:
            uid = pwd.getpwnam(options.user).pw_uid
        except KeyError as error:
            raise ConfigError(f"there is no user {options.user!r}") from error
    for pid in options.pids:
        if not Path(f"/proc/{pid}").exists():
            raise ConfigError(f"there is no process {pid}", hint="see `ps -e`")
    cgroup_ids = seen_cgroups().find_ids(options.cgroup) if options.cgroup else ()
    if options.cgroup and not cgroup_ids:
        raise ConfigError(
            f"there is no cgroup {options.cgroup!r} of version 2",
            hint="give the path after 0:: in /proc/PID/cgroup",
        )
    left_out = {
        name
        for name, flag in (("block", "no_io"), ("tcp", "no_tcp"), ("net", "no_net"))
        if getattr(options, flag)
    }
    names = tuple(probe.name for probe in PROBES if probe.name not in left_out)
    return TraceSettings(
        engine=EngineSettings(
            host_probes=names,
            ring_bytes=options.ring_bytes,
            stacks=_STACKS[options.stack],
            keeps_copies=options.inference.inference,
        ),
        duration_ns=options.duration,
        pids=options.pids,
        uid=uid,
        cgroup_ids=cgroup_ids,
        keep_one_in=options.sampling_rate or int(options.record_all),
        files=tuple(_iter_files(options)),
        kubelet=read_kubelet_socket(),
        drain_ms=DRAIN_MS if options.as_json else _TABLE_DRAIN_MS,
    )


def _iter_files(options: TraceConfig) -> Iterator[Path]:
    """Libraries to probe at once: those named, those installed, and the simulator's."""
    yield from options.libraries
    yield from iter_installed(options.program[0] if options.program else "")
    with contextlib.suppress(UnsupportedError):  # not built here
        yield from sorted(get_program().parent.glob("lib*"))


def _hold(options: TraceConfig, invoker: Invoker) -> HeldProgram | None:
    if not options.program:
        return None
    return HeldProgram(
        ProgramSettings(
            arguments=options.program,
            environment=build_child_environment(invoker),
            uid=invoker.uid,
            gid=invoker.gid,
            user=invoker.name,
            stdout_fd=_STDERR if options.as_json else 1,
        )
    )


@dataclass(frozen=True, slots=True)
class _Built:
    """What gets the results of a trace; ``observers`` has all, in their order."""

    observers: list[Observer]
    table: LiveTable | None
    recorder: Recorder | None
    watch: IncidentWatch | None


def _build_observers(options: TraceConfig, invoker: Invoker, stack: contextlib.ExitStack) -> _Built:
    observers: list[Observer] = []
    table = None
    recorder = _open_recorder(options, invoker, stack)
    if recorder is not None:  # before the output, which says what the recording holds
        observers.append(recorder)
    stored = recorder.stored if recorder is not None else None
    output: JsonLines | LiveTable
    if options.as_json:
        output = JsonLines(sys.stdout, stored)
    else:
        console = OutputConsole(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
        output = table = LiveTable(console, _describe_target(options), stored)
        stack.callback(table.close)
    selection, watch = _open_watch(options, recorder, output, stack)
    observers += [one for one in (selection, watch) if one is not None]  # before the output
    gpus = _open_gpus(recorder.selection if recorder is not None else selection, stack)
    inference, messages = _open_inference(options, gpus, output, stack)
    observers += [one for one in (inference, output) if one is not None]
    host = HostSampler(recorder, gpus, selection=selection)
    observers.append(host)
    if table is not None:
        table.host = host
    nccl, health = NcclProcesses(), HealthSeries()
    metrics = options.metrics.open(
        (_node_of(options), options.fleet.fleet_cluster_id),
        SystemClock(),
        lambda: (
            *host.iter_series(),
            *(iter_hardware_series(host.gpu_readings) if options.metrics.hw_metrics else ()),
            *nccl.iter_series(),
            *health.iter_series(),
            *(watch.iter_series() if watch is not None else ()),
            *_iter_inference(output),
        ),
        stack,
    )
    if metrics is not None:
        nccl.start()
        stack.callback(nccl.close)
        observers += [nccl, metrics]
    _add_live(options, recorder, (observers, health, messages), stack)
    return _Built(observers, table, recorder, watch)


def _open_watch(
    options: TraceConfig,
    recorder: Recorder | None,
    output: JsonLines | LiveTable,
    stack: contextlib.ExitStack,
) -> tuple[Selection | None, IncidentWatch | None]:
    """What searches for incidents, and what chooses rows for it where no recorder does."""
    if not options.incidents:
        return None, None
    from ingero.agent.trace.incidents import IncidentWatch
    from ingero.agent.trace.recent_recording import RecentRecording

    clock = SystemClock()
    session = recorder.session if recorder else build_session(_node_of(options), clock, "")
    recent = RecentRecording(session)
    is_plain = isinstance(output, LiveTable) and not output.is_live

    def report(incident: Incident, start_ns: int) -> None:
        output.on_incident(incident, start_ns)
        if is_plain:
            click.echo(describe_incident(incident), err=True)

    watch = stack.enter_context(IncidentWatch(recent, report))
    if recorder is not None:
        recorder.selection.add(recent)
        return None, watch
    keep_all = options.record_all
    return Selection(clock, [recent], keep_all=keep_all, find_family=find_family), watch


def _open_inference(
    options: TraceConfig,
    gpus: GpuWatch | None,
    output: JsonLines | LiveTable,
    stack: contextlib.ExitStack,
) -> tuple[InferenceWatch | None, OutlierMessages | None]:
    """What watches programs that serve and reads the metrics of engines, and its messages; None where not wanted."""
    if not options.inference.inference:
        if options.inference != InferenceConfig():
            _print("warning: --inference-…: no effect without --inference")
        return None, None
    from ingero.agent.inference.messages import OutlierMessages, open_outlier_socket
    from ingero.agent.inference.watch import InferenceWatch

    messages = OutlierMessages(_node_of(options), options.fleet.fleet_cluster_id)
    if options.remediate.remediate and not options.fleet.fleet_endpoint:
        messages.stream, warning = stack.enter_context(
            open_outlier_socket(options.remediate.remediate_socket, options.remediate.remediate_gid)
        )
        if warning:
            _print(f"note: {warning}")

    def report(outlier: StepOutlier) -> None:
        output.on_outlier(outlier)
        messages.publish(outlier)

    def is_throttled() -> bool:
        return gpus is not None and any(
            one.reasons and find_throttles(one.reasons) for one in gpus.readings
        )

    watch = InferenceWatch(options.inference.build(), report, is_throttled)
    output.inference = watch
    is_torn = isinstance(output, LiveTable) and output.is_live
    output.engines = options.inference.open_scraper(stack, _print_nothing if is_torn else _print)
    return watch, messages


def _iter_inference(output: JsonLines | LiveTable) -> Iterator[Series]:
    """Series of programs that serve and of engines, where they are watched."""
    if output.inference is not None:
        from ingero.agent.inference.series import iter_inference_series

        yield from iter_inference_series(output.inference, output.engines)
    if output.engines is not None:
        yield from output.engines.iter_series()


def _print_summary(
    options: TraceConfig, verdict: IncidentSummary, recorder: Recorder | None
) -> None:
    """How many incidents there are, and the command that shows them."""
    path = recorder.writer.path if recorder is not None else None
    command = build_command(path, has_rolled=bool(options.rollover_bytes))
    if options.as_json:
        with contextlib.suppress(BrokenPipeError):
            click.echo(json.dumps(build_verdict_line(verdict, command), separators=(",", ":")))
    else:
        click.echo(describe_verdict(verdict, command), err=True)


def _describe_target(options: TraceConfig) -> str:
    """What is traced, for people."""
    if options.program:
        return " ".join(options.program)[:60]
    if options.user:
        return f"every process of {options.user}"
    if options.cgroup:
        return f"cgroup {options.cgroup}"
    if options.pids:
        return ", ".join(f"{_name_of(pid)} (pid {pid})" for pid in options.pids) + " with children"
    return "every process"


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended"


def _node_of(options: TraceConfig) -> str:
    node = options.node or socket.gethostname()
    if ":" in node:
        raise ConfigError(
            f"the node name {node!r} holds a colon", hint="choose another with --node"
        )
    return node


def _open_recorder(
    options: TraceConfig, invoker: Invoker, stack: contextlib.ExitStack
) -> Recorder | None:
    if not options.record:
        return None
    recorder = Recorder(
        options.db or default_database(),
        _node_of(options),
        SystemClock(),
        invoker=invoker,
        keep_all=options.record_all,
        limits=WriterSettings(
            max_bytes=options.max_db,
            rollover_bytes=options.rollover_bytes,
            rollover_keep=options.rollover_keep,
        ),
    )
    stack.callback(recorder.close)
    if recorder.writer.warning:
        click.echo(f"warning: {recorder.writer.warning}", err=True)
    return recorder


def _open_gpus(selection: Selection | None, stack: contextlib.ExitStack) -> GpuWatch | None:
    """Start to sample the devices; prints why when none can be read."""
    clock = SystemClock()
    try:
        nvml = Nvml(clock)
    except UnsupportedError as error:
        click.echo(f"without {error.message} (no memory, clocks, throttling or errors)", err=True)
        return None
    stack.callback(nvml.close)
    watch = GpuWatch(nvml, clock)
    stack.callback(watch.close)
    watch.start()
    if selection is not None:
        selection.put_gpu_model(watch.model)
    return watch


def _add_live(
    options: TraceConfig,
    recorder: Recorder | None,
    watching: tuple[list[Observer], HealthSeries, OutlierMessages | None],
    stack: contextlib.ExitStack,
) -> None:
    """Take annotations and push to a Fleet, where that is wanted."""
    observers, series, messages = watching
    clock = SystemClock()

    def follow(agent: HealthAgent, find_counts: FindCollectiveCounts) -> OnSample:
        if messages is not None:
            messages.stream = agent.stream
        return print_notes(agent, find_counts, series)

    workload = stack.enter_context(options.annotate.open(clock, recorder))
    health = options.build_push()
    if health is not None:
        from ingero.agent.push.live import LiveCallbacks, open_live

        callbacks = LiveCallbacks(
            follow,
            workload.latest.current if workload else None,
            notify=_print,
        )
        observers.append(stack.enter_context(open_live(health, clock, callbacks)))


def _print(text: str) -> None:
    click.echo(text, err=True)


def _print_nothing(_text: str) -> None:
    """A table on a terminal shows it, and would be torn by a line between."""
