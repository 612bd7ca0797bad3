"""Runs ``ingero trace``: options to settings, observers to outputs, signals to a clean end."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import click
from rich.console import Console

from ingero.agent.app.gpus import GpuWatch
from ingero.agent.app.live import LiveTold, open_live
from ingero.agent.app.privileges import Duties, check_privileges, drop_privileges
from ingero.agent.app.program import HeldProgram, ProgramSettings
from ingero.agent.app.recorder import Recorder
from ingero.agent.app.surroundings import Surroundings
from ingero.agent.app.tracing import DRAIN_MS, Observer, TraceSession, TraceSettings
from ingero.agent.discover.identity import find_cgroup_ids
from ingero.agent.discover.places import iter_installed
from ingero.agent.gpu.nvml import Nvml
from ingero.agent.probes.engine import EngineSettings
from ingero.agent.probes.host import PROBES
from ingero.agent.store.writer import WriterSettings
from ingero.cli.exporting import MetricsChoice
from ingero.cli.live import AnnotateChoice, FleetChoice, say_notes
from ingero.cli.trace_output import JsonLines, LiveTable
from ingero.config.database import default_database
from ingero.config.invoker import Invoker, build_child_environment, find_invoker
from ingero.errors import ConfigError, UnsupportedError
from ingero.gpusim.runner import get_program
from ingero.telemetry.clock import SystemClock

_STDERR: Final = 2
_PIPE_WIDTH: Final = 110
_TABLE_DRAIN_MS: Final = 250
"""Nobody looks at single events of a table."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The command line of ``ingero trace``, parsed; one field per option or group of options."""

    pids: tuple[int, ...]
    user: str | None
    cgroup: str
    duration: int
    as_json: bool
    db: Path | None
    record: bool
    record_all: bool
    max_db: int
    rollover_bytes: int
    rollover_keep: int
    node: str
    sampling_rate: int
    ring_bytes: int
    stack: bool
    no_io: bool
    no_tcp: bool
    no_net: bool
    libraries: tuple[Path, ...]
    program: tuple[str, ...]
    metrics: MetricsChoice
    annotate: AnnotateChoice
    fleet: FleetChoice


class _Stop:
    """Remembers the first signal that asks us to end."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> bool:
        return self.number != 0

    def handle(self, number: int, _frame: FrameType | None) -> None:
        self.number = self.number or number


def run_trace(options: TraceOptions) -> int:
    """Trace as the options say.

    Returns:
        0; 130 after Ctrl-C; 143 after SIGTERM.

    Raises:
        UnsupportedError: The privileges are missing, or the kernel refuses.
        ConfigError: Options that contradict each other.
    """
    settings = _build_settings(options)
    check_privileges()
    stop = _Stop()
    invoker = find_invoker()
    with contextlib.ExitStack() as stack:
        # Before any thread: the child is a fork of this process until it is released.
        program = _hold(options, invoker)
        if program is not None:
            stack.callback(program.end)
        drop_privileges(
            Duties(
                owns_files=options.record,
                opens_sockets=options.annotate.annotate or options.fleet.remediate,
                runs_program=program is not None,
                serves=bool(options.metrics.prometheus),
            )
        )
        stack.enter_context(_signals(stop))
        observers, table = _build_observers(options, invoker, stack)
        session = stack.enter_context(TraceSession(settings, observers, program))
        if table is not None:
            table.session = session
        _say_what_is_missing(session)
        try:
            session.run(stop)
        except BrokenPipeError:  # whoever read our output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        for reason in session.refused_interpreters:
            click.echo(f"without Python frames: {reason}", err=True)
    return 128 + stop.number if stop.number else 0


def _build_settings(options: TraceOptions) -> TraceSettings:
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
    cgroup_ids = find_cgroup_ids(options.cgroup) if options.cgroup else ()
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
            host_probes=names, ring_bytes=options.ring_bytes, with_stacks=options.stack
        ),
        duration_ns=options.duration,
        pids=options.pids,
        uid=uid,
        cgroup_ids=cgroup_ids,
        keep_one_in=options.sampling_rate or int(options.record_all),
        files=tuple(_iter_files(options)),
        drain_ms=DRAIN_MS if options.as_json else _TABLE_DRAIN_MS,
    )


def _iter_files(options: TraceOptions) -> Iterator[Path]:
    """Libraries to probe at once: those named, those installed, and the simulator's."""
    yield from options.libraries
    yield from iter_installed(options.program[0] if options.program else "")
    with contextlib.suppress(UnsupportedError):  # not built here
        yield from sorted(get_program().parent.glob("lib*"))


def _hold(options: TraceOptions, invoker: Invoker) -> HeldProgram | None:
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


def _build_observers(
    options: TraceOptions, invoker: Invoker, stack: contextlib.ExitStack
) -> tuple[list[Observer], LiveTable | None]:
    observers: list[Observer] = []
    table = None
    if options.as_json:
        observers.append(JsonLines(sys.stdout))
    else:
        table = LiveTable(Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH))
        stack.callback(table.close)
        observers.append(table)
    recorder = _open_recorder(options, invoker, stack)
    if recorder is not None:
        observers.append(recorder)
    surroundings = Surroundings(recorder, _open_gpus(recorder, stack))
    observers.append(surroundings)
    metrics = options.metrics.open(
        (_node_of(options), options.fleet.fleet_cluster_id),
        SystemClock(),
        surroundings.iter_series,
        stack,
    )
    if metrics is not None:
        observers.append(metrics)
    _add_live(options, recorder, observers, stack)
    return observers, table


def _node_of(options: TraceOptions) -> str:
    node = options.node or socket.gethostname()
    if ":" in node:
        raise ConfigError(
            f"the node name {node!r} holds a colon", hint="choose another with --node"
        )
    return node


def _open_recorder(
    options: TraceOptions, invoker: Invoker, stack: contextlib.ExitStack
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
    return recorder


def _open_gpus(recorder: Recorder | None, stack: contextlib.ExitStack) -> GpuWatch | None:
    """Start to look at the devices; says so when nothing can be looked at."""
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
    if recorder is not None:
        recorder.writer.put_gpu_model(watch.model)
    return watch


def _add_live(
    options: TraceOptions,
    recorder: Recorder | None,
    observers: list[Observer],
    stack: contextlib.ExitStack,
) -> None:
    """Listen to workloads and tell a Fleet, where that is wanted."""
    clock = SystemClock()
    workload = stack.enter_context(options.annotate.open(clock, recorder))
    health = options.fleet.build(options.node)
    if health is not None:
        told = LiveTold(say_notes, workload.latest.current if workload else None)
        observers.append(stack.enter_context(open_live(health, clock, told)))


def _say_what_is_missing(session: TraceSession) -> None:
    for part in session.missing:
        click.echo(f"without {part.name}: {part.reason} ({part.costs})", err=True)
    for note in session.notes:
        click.echo(note, err=True)


@contextlib.contextmanager
def _signals(stop: _Stop) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, stop.handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
