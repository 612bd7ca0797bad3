"""What ``ingero trace`` prints: one JSON object per line, or a live table."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from operator import attrgetter
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ingero.agent.capture.discover.identity import ProcessIdentity
from ingero.agent.capture.session import TraceSession
from ingero.agent.capture.stacks.resolver import Stack
from ingero.agent.capture.totals import Totals, count_coverage
from ingero.cli.commands.trace.incidents import STYLES, build_incident_line, describe_incident
from ingero.cli.commands.trace.inference import (
    build_engine_line,
    build_outlier_line,
    describe_engine,
    describe_memory,
    describe_outlier,
    draw_phases,
    iter_phase_lines,
)
from ingero.cli.commands.trace.live_view import TraceState, count_layers, draw, write_coverage
from ingero.model.arrays import Records
from ingero.model.events import (
    CopyKind,
    EventFlag,
    Events,
    OffCpuReason,
    op_name,
    source_name,
)
from ingero.model.incidents import Incident
from ingero.model.latency import quantiles_ns
from ingero.model.recording import describe_unprobed
from ingero.units import format_duration

if TYPE_CHECKING:
    from ingero.agent.inference.scrape import EngineScraper
    from ingero.agent.inference.watch import InferenceWatch, StepOutlier
    from ingero.agent.trace.host_sampler import HostSampler
    from ingero.agent.trace.recorder import Stored

_QUANTILES = (0.5, 0.95, 0.99)
_DIRECTIONS = {
    CopyKind.HOST_TO_HOST: "h2h",
    CopyKind.HOST_TO_DEVICE: "h2d",
    CopyKind.DEVICE_TO_HOST: "d2h",
    CopyKind.DEVICE_TO_DEVICE: "d2d",
    CopyKind.DEFAULT: "default",
}
_IDENTITY = {
    "launcher": "launcher", "job": "job", "container": "container",
    "pod_uid": "pod.uid", "pod_name": "pod.name", "namespace": "pod.namespace",
    "container_name": "assignment.container",
    "slurm_step": "slurm.step", "slurm_node": "slurm.node", "cgroup": "cgroup",
}  # fmt: skip
"""Keys of a process's line, and where `ProcessIdentity` has their values."""
_MAX_STACKS = 65_536
_MAX_INCIDENTS = 3
_FRAME_KEYS = {
    "i": "ip", "s": "symbol", "f": "file", "l": "line", "pf": "py_file", "pfn": "py_func", "pl": "py_line",
}  # fmt: skip
_REASONS = {reason.value: reason.name.lower() for reason in OffCpuReason}
# As plain numbers: a flag of an enumeration is slow to compare, and there may be many events.
_NESTED, _IN_FLIGHT = int(EventFlag.NESTED), int(EventFlag.IN_FLIGHT)
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def format_timestamp(wall_ns: int) -> str:
    """RFC 3339 in UTC with nanoseconds."""
    seconds, rest = divmod(wall_ns, 1_000_000_000)
    return f"{_format_second(seconds)}.{rest:09d}Z"


@functools.lru_cache(maxsize=16)
def _format_second(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"


def iter_rows(rows: np.ndarray[Any, np.dtype[np.void]]) -> Iterator[dict[str, Any]]:
    """Rows of an array with names, each as Python's own numbers and bytes by name: much quicker to read one by one."""
    names = rows.dtype.names or ()
    for values in rows.tolist():
        yield dict(zip(names, values, strict=True))


class JsonLines:
    """Events, processes and exact counts as JSON lines; each line has a ``type``.

    Args:
        out: Stream that the lines go to.
        stored: What the recording holds so far; None without one.

    Attributes:
        inference: Set later, where programs that serve are watched.
        engines: Set later, where the metrics of engines are read.
    """

    def __init__(self, out: IO[str], stored: Callable[[], Stored] | None = None) -> None:
        self._out = out
        self._stored = stored
        self._identities: dict[int, ProcessIdentity] = {}
        self._stacks: dict[int, list[dict[str, Any]]] = {}
        self.inference: InferenceWatch | None = None
        self.engines: EngineScraper | None = None

    def _write(self, line: dict[str, Any]) -> None:
        self._out.write(_ENCODER.encode(line) + "\n")

    def on_process(self, identity: ProcessIdentity) -> None:
        """A line of type ``process``."""
        self._identities[identity.pid] = identity
        line: dict[str, Any] = {
            "type": "process",
            "pid": identity.pid,
            "process_name": identity.name,
        }
        for name, path in _IDENTITY.items():
            if value := attrgetter(path)(identity):
                line[name] = value
        if identity.assignment.devices:
            line["devices"] = list(identity.assignment.devices)
        self._write(line | _place(identity))

    def on_stacks(self, stacks: Mapping[int, Stack]) -> None:
        """Keep them for the lines of their events."""
        if len(self._stacks) > _MAX_STACKS:
            self._stacks.clear()
        for key, stack in stacks.items():
            self._stacks[key] = [
                {_FRAME_KEYS[name]: value for name, value in frame.items()}
                for frame in stack.frames
            ]

    def on_events(self, ring: str, records: Records, events: Events) -> None:  # noqa: ARG002 - the protocol's signature
        """One line of type ``event`` per record."""
        names = records.dtype.names or ()
        for record, event in zip(iter_rows(records), iter_rows(events), strict=True):
            line = build_event_line(event)
            if "comm" in names and record["comm"]:
                line["process_name"] = record["comm"].decode("utf-8", "replace")
            identity = self._identities.get(event["pid"])
            if identity is not None:
                line |= _place(identity)
            if "grid_x" in names:
                line |= _call(record)
            elif "comm_hash" in names:
                line |= _collective(record)
            elif "off_ns" in names:
                line |= _off_cpu(record)
            if event["stack_hash"] in self._stacks:
                line["stack"] = self._stacks[event["stack_hash"]]
            self._write(line)

    def on_incident(self, incident: Incident, start_ns: int) -> None:
        """A line of type ``incident``."""
        self._write(build_incident_line(incident, start_ns))

    def on_outlier(self, outlier: StepOutlier) -> None:
        """A line of type ``inference_outlier``."""
        at = {"timestamp": format_timestamp(outlier.start_ns)}
        self._write(build_outlier_line(outlier) | at)

    def on_totals(self, totals: Totals) -> None:
        """At the end: one line of type ``counts`` per operation, then one of type ``coverage``."""
        if totals.is_last:
            if self.inference:
                for line in iter_phase_lines(self.inference, self.engines):
                    self._write(line)
            for state in self.engines.engines if self.engines else ():
                self._write(build_engine_line(state))
            for key, count in zip(totals.all_keys, totals.all_counts, strict=True):
                self._write(_count(key, count))
            self._write({
                "type": "coverage",
                "probe_mode": totals.probe_mode,
                **count_coverage(totals.all_counts),
                "by_layer": count_layers(totals.all_keys, totals.all_counts),
                "losses": totals.losses,
                "stacks": totals.unwinding,
                "in_flight": [_in_flight(call, totals.mono_ns) for call in totals.in_flight],
                "unprobed": [
                    {"pid": one.pid, "path": one.path, "reason": one.reason}
                    for one in totals.unprobed
                ],
                "keep_one_in": totals.keep_one_in,
                "elapsed_ns": totals.elapsed_ns,
                **({"recording": _recording(self._stored())} if self._stored else {}),
            })
        self._out.flush()


def _recording(stored: Stored) -> dict[str, Any]:
    return {
        "path": str(stored.path),
        "stored": stored.n_rows,
        "not_stored": [
            {
                "source": source_name(loss.source),
                "op": op_name(loss.source, loss.op),
                "rows": loss.n_rows,
                "cause": loss.cause,
            }
            for loss in stored.losses
        ],
        "counts_not_stored": stored.n_counts_lost,
    }


def _place(identity: ProcessIdentity) -> dict[str, int]:
    if not identity.launcher:
        return {}
    place = identity.place
    numbers = {"rank": place.rank, "local_rank": place.local_rank, "world_size": place.world_size}
    return {name: number for name, number in numbers.items() if number >= 0}


def build_event_line(event: Mapping[str, Any]) -> dict[str, Any]:
    """An event as a line of JSON; what only some operations have is added by its ring.

    Args:
        event: A row of EVENT, as `iter_rows` gives it.
    """
    source, op = event["source"], event["op"]
    line: dict[str, Any] = {
        "type": "event",
        "timestamp": format_timestamp(event["start_ns"]),
        "pid": event["pid"],
        "tid": event["tid"],
        "source": source_name(source),
        "op": op_name(source, op),
        "duration_ns": event["duration_ns"],
        "duration": format_duration(event["duration_ns"]),
        "gpu_id": event["gpu_id"],
        "args": [event["arg0"], event["arg1"]],
        "return_code": event["ret_code"],
        "weight": event["weight"],
        "anomaly": False,
    }
    if event["cgroup_id"] > 1:
        line["cgroup_id"] = event["cgroup_id"]
    if event["flags"] & _NESTED:
        line["nested"] = True
    if event["flags"] & _IN_FLIGHT:
        line["in_flight"] = True
    return line


def _call(record: Mapping[str, Any]) -> dict[str, Any]:
    line: dict[str, Any] = {
        "bytes": record["bytes"],
        "stream": f"{int(record['stream']):#x}",
        "handle": f"{int(record['handle']):#x}",
        "gpu_id": record["device"] if record["device"] >= 0 else None,
        "anomaly": bool(record["flags"] & (2 | 8)),
    }
    if record["grid_x"]:
        line["grid"] = [record[f"grid_{axis}"] for axis in "xyz"]
        line["block"] = [record[f"block_{axis}"] for axis in "xyz"]
    if "Memcpy" in op_name(record["source"], record["op"]):
        line["direction"] = _DIRECTIONS.get(CopyKind(min(record["aux"], 5)), "unknown")
    return line


def _collective(record: Mapping[str, Any]) -> dict[str, Any]:
    line: dict[str, Any] = {
        "bytes": record["bytes"],
        "count": record["count"],
        "stream": f"{int(record['stream']):#x}",
        "gpu_id": record["device"] if record["device"] >= 0 else None,
        "comm_hash": f"{int(record['comm_hash']):#018x}",
        "anomaly": bool(record["flags"] & (2 | 8)),
    }
    for name, field in (("comm_rank", "rank"), ("nranks", "nranks"), ("peer", "peer")):
        if record[field] >= 0:
            line[name] = int(record[field])
    for name in ("dtype", "redop"):
        if record[name] >= 0:
            line[name] = int(record[name])
    if record["seq"]:
        line["seq"] = record["seq"]
    if record["group_id"]:
        line["group"] = record["group_id"]
    return line


def _off_cpu(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "reason": _REASONS.get(record["reason"], "unknown"),
        "wait_ns": record["wait_ns"],
        "other_pid": record["other_pid"],
        "other_process": record["other_comm"].decode("utf-8", "replace"),
        "waker_pid": record["waker_pid"],
    }


def _count(key: np.void, count: np.void) -> dict[str, Any]:
    line: dict[str, Any] = {
        "type": "counts",
        "pid": int(key["pid"]),
        "source": source_name(int(key["source"])),
        "op": op_name(int(key["source"]), int(key["op"])),
    }
    for name in (
        "entered",
        "seen",
        "nested",
        "errors",
        "bytes",
        "total_ns",
        "max_ns",
        "emitted",
        "sampled",
        "lost",
    ):
        line[name] = int(count[name])
    if count["hist"].sum():
        for name, value in zip(
            ("p50_ns", "p95_ns", "p99_ns"), quantiles_ns(count["hist"], _QUANTILES), strict=True
        ):
            line[name] = round(min(float(value), float(count["max_ns"])))
    return line


def _in_flight(call: np.void, now_ns: int) -> dict[str, Any]:
    frame = call["frame"]
    return {
        "pid": int(call["pid"]),
        "tid": int(call["tid"]),
        "op": op_name(int(frame["source"]), int(frame["op"])),
        "age_ns": max(now_ns - int(frame["entry_ns"]), 0),
    }


class LiveTable:
    """Exact counts and latencies by operation, redrawn once a second.

    Args:
        console: Where to; without a terminal only the last table is printed.
        target: What is traced, for people.
        stored: What the recording holds so far; None without one.

    Attributes:
        session: Set later, because it needs its observers first.
        host: Set later, likewise.
        inference: Set later, where programs that serve are watched.
        engines: Set later, where the metrics of engines are read.
    """

    def __init__(
        self, console: Console, target: str = "", stored: Callable[[], Stored] | None = None
    ) -> None:
        self._console = console
        self._stored = stored
        self.target = target
        self.host: HostSampler | None = None
        self.inference: InferenceWatch | None = None
        self.engines: EngineScraper | None = None
        self._outliers: list[StepOutlier] = []
        self._incidents: list[Incident] = []
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self.session: TraceSession | None = None
        if console.is_terminal:
            self._live.start()

    @property
    def is_live(self) -> bool:
        """Whether it is drawn again and again, on a terminal."""
        return self._console.is_terminal

    def on_process(self, identity: ProcessIdentity) -> None:
        """Nothing: the table is by operation."""

    def on_events(self, ring: str, records: Records, events: Events) -> None:
        """Nothing: counts are exact without the events."""

    def on_incident(self, incident: Incident, _start_ns: int) -> None:
        """Show it below the table, with the newest few."""
        self._incidents = [incident, *self._incidents][:_MAX_INCIDENTS]

    def on_outlier(self, outlier: StepOutlier) -> None:
        """Show it below the table, with the newest few."""
        self._outliers = [outlier, *self._outliers][:_MAX_INCIDENTS]

    def on_totals(self, totals: Totals) -> None:
        """Draw the table; the last one stays."""
        if totals.is_last:
            self._live.stop()
            self._console.print(self._draw(totals))
        elif self._console.is_terminal:
            self._live.update(self._draw(totals), refresh=True)

    def close(self) -> None:
        """Give the terminal back."""
        self._live.stop()

    def _draw(self, totals: Totals) -> Group:
        footer = [Text(line, style=style) for line, style in self._footer(totals)]
        is_shown = self._console.is_terminal and not totals.is_last
        serving = list(draw_phases(self.inference)) if self.inference else []
        n_lines = len(footer) + sum(table.row_count + 1 for table in serving)
        height = self._console.height - n_lines - 1 if is_shown else None
        parts = draw(totals, self._read_state(), self._console.width, height)
        return Group(*parts, *serving, *footer)

    def _read_state(self) -> TraceState:
        session, host = self.session, self.host
        return TraceState(
            target=self.target,
            libraries=session.engine.targets if session else (),
            n_host_probes=len(session.settings.engine.host_probes) - len(session.missing)
            if session
            else 0,
            machine=host.machine_state if host else None,
            gpus=host.gpu_readings if host else (),
        )

    def _footer(self, totals: Totals) -> list[tuple[str, str]]:
        lines = [(describe_incident(one), STYLES[one.severity]) for one in self._incidents]
        lines += [(describe_outlier(one), "yellow") for one in self._outliers]
        if self.inference and (text := describe_memory(self.inference)):
            lines.append((text, ""))
        lines += [
            (describe_engine(one), "") for one in (self.engines.engines if self.engines else ())
        ]
        lines += write_coverage(totals.all_keys, totals.all_counts)
        for call in totals.in_flight:
            facts = _in_flight(call, totals.mono_ns)
            if facts["age_ns"] > 1_000_000_000:
                lines.append((
                    f"in {facts['op']} for {format_duration(facts['age_ns'])} (pid {facts['pid']})",
                    "yellow",
                ))
        if self._stored and (text := self._stored().describe_loss()):
            lines.append((text, "bold red"))
        lost = {name: number for name, number in totals.losses.items() if number}
        if lost:
            lines.append((f"also lost: {lost}", "bold red"))
        lines.extend((line, "bold red") for line in describe_unprobed(totals.unprobed))
        lines.extend(
            (f"off: {part.name}: {part.reason}", "yellow")
            for part in (self.session.missing if self.session else ())
        )
        return lines
