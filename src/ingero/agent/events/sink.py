"""The sink: local straggler events as Prometheus metrics.

Source of names, help texts and order: a page of the existing ``straggler-sink``, ``tests/data/wire_samples``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_MS, NS_PER_S
from ingero.wire.names import UdsType

RESYNC_NS: Final = 60 * NS_PER_S
"""After a reconnect, a straggler that the agent does not mention again within this time is well.

It recovered meanwhile.
"""
MAX_TYPES: Final = 64
OTHER_TYPE: Final = "other"
ACTIVE_HELP: Final = (
    "1 when a straggler_state has been received without a matching straggler_resolved. "
    "Entries are removed on resolve."
)


class _Event(msgspec.Struct):
    type: str = ""
    node_id: str = ""
    cluster_id: str = ""


class SinkNode(NamedTuple):
    """The node of an event."""

    cluster_id: str
    node_id: str


class SinkState:
    """Everything the sink knows. Safe from any thread.

    Args:
        clock: Stamps events.
        max_nodes: Stragglers tracked at once; the oldest makes room for a new one, counted.
    """

    def __init__(self, clock: Clock, max_nodes: int) -> None:
        self._clock = clock
        self._max_nodes = max_nodes
        self._lock = threading.Lock()
        self._events: dict[str, int] = {}
        self._n_errors = 0
        self._n_evicted = 0
        self._last_wall_ns: int | None = None
        self._last_mono_ns: int | None = None
        self._active: dict[SinkNode, EventStream] = {}
        self._streams: list[EventStream] = []

    def open_stream(self) -> EventStream:
        """A listener for the reader of one more agent."""
        with self._lock:
            self._streams.append(EventStream(self))
            return self._streams[-1]

    def connected(self, stream: EventStream) -> None:
        """A connection is open: stragglers known from it are in doubt until the agent sends them again."""
        with self._lock:
            stream.is_connected = True
            stream.connected_ns = self._clock.mono_ns()
            stream.doubtful = {node for node, source in self._active.items() if source is stream}

    def disconnected(self, stream: EventStream) -> None:
        """It ended; stragglers stay as they were last received."""
        with self._lock:
            stream.is_connected = False

    def line(self, line: bytes, stream: EventStream) -> None:
        """Count one line and follow its episode."""
        try:
            event = msgspec.json.decode(line, type=_Event)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            event = _Event()
        with self._lock:
            if not event.type:
                self._n_errors += 1
                return
            self._count(event.type)
            self._last_wall_ns, self._last_mono_ns = self._clock.wall_ns(), self._clock.mono_ns()
            if event.node_id:
                self._follow(event.type, SinkNode(event.cluster_id, event.node_id), stream)

    def overlong(self) -> None:
        """A line was too long to read."""
        with self._lock:
            self._n_errors += 1

    def render(self) -> str:
        """The page that Prometheus scrapes, text format 0.0.4."""
        with self._lock:
            self._settle()
            dropped = {"cap_reached": self._n_evicted} if self._n_evicted else {}
            wall_ns = self._last_wall_ns
            families = (
                ("events_total", "counter", "Total remediation events received by type.",
                 _by("type", self._events)),
                ("parse_errors_total", "counter", "Lines that failed NDJSON parsing.",
                 [("", str(self._n_errors))]),
                ("connected", "gauge", "1 if connected to the UDS, 0 otherwise.",
                 [("", str(int(self._is_connected())))]),
                ("last_event_timestamp_seconds", "gauge",
                 "Unix timestamp of the most recent event (0 if none).",
                 [("", "0" if wall_ns is None else _seconds(wall_ns))]),
                ("active_stragglers", "gauge",
                 ACTIVE_HELP,
                 [(_labels(node._asdict()), "1") for node in sorted(self._active)]),
                ("dropped_total", "counter", "Events dropped by the sink, labeled by reason.",
                 _by("reason", dropped)),
            )  # fmt: skip
        return "".join(
            render_family(f"ingero_sink_{name}", kind, description, samples)
            for name, kind, description, samples in families
        )

    def readiness(self, window_ns: int) -> tuple[bool, str]:
        """Whether the sink can be relied on, and why; an event within the window makes up for a lost connection."""
        with self._lock:
            if self._is_connected():
                return True, "ready"
            last_ns = self._last_mono_ns
            if last_ns is not None and self._clock.mono_ns() - last_ns < window_ns:
                return True, "ready (recent event)"
            return False, "not ready: uds_disconnected"

    def _is_connected(self) -> bool:
        """Whether every stream is, and there is one."""
        return bool(self._streams) and all(stream.is_connected for stream in self._streams)

    def _count(self, kind: str) -> None:
        if kind not in self._events and len(self._events) >= MAX_TYPES:
            kind = OTHER_TYPE
        self._events[kind] = self._events.get(kind, 0) + 1

    def _follow(self, kind: str, node: SinkNode, stream: EventStream) -> None:
        if kind == UdsType.STRAGGLER_RESOLVED:
            self._forget(node)
        elif kind == UdsType.STRAGGLER_STATE:
            before = self._active.get(node)
            if before is not None:
                before.doubtful.discard(node)
            elif len(self._active) >= self._max_nodes:
                self._forget(next(iter(self._active)))
                self._n_evicted += 1
            self._active[node] = stream

    def _forget(self, node: SinkNode) -> None:
        stream = self._active.pop(node, None)
        if stream is not None:
            stream.doubtful.discard(node)

    def _settle(self) -> None:
        """Forget stragglers that an agent did not mention again after a reconnect."""
        now_ns = self._clock.mono_ns()
        for stream in self._streams:
            if stream.is_connected and now_ns - stream.connected_ns >= RESYNC_NS:
                for node in stream.doubtful:
                    self._active.pop(node, None)
                stream.doubtful.clear()


@dataclass(slots=True, eq=False)
class EventStream:
    """One agent's events, as an `EventReader` delivers them. `SinkState.open_stream` makes it and guards its state.

    Attributes:
        state: Receives the events.
        is_connected: Whether a connection is open.
        connected_ns: Since when, on the monotonic clock.
        doubtful: Stragglers received on an earlier connection and not again.
    """

    state: SinkState
    is_connected: bool = False
    connected_ns: int = 0
    doubtful: set[SinkNode] = field(default_factory=set)

    def connected(self) -> None:
        """A connection is open."""
        self.state.connected(self)

    def disconnected(self) -> None:
        """The connection ended."""
        self.state.disconnected(self)

    def line(self, line: bytes) -> None:
        """One line."""
        self.state.line(line, self)

    def overlong(self) -> None:
        """A line was skipped."""
        self.state.overlong()


def _by(label: str, counts: Mapping[str, int]) -> list[tuple[str, str]]:
    return [(_labels({label: name}), str(count)) for name, count in sorted(counts.items())]


def _labels(labels: Mapping[str, str]) -> str:
    escaped = (
        (name, value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\""))
        for name, value in labels.items()
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"


def _seconds(wall_ns: int) -> str:
    milliseconds = wall_ns // NS_PER_MS
    return f"{milliseconds // 1000}.{milliseconds % 1000:03d}"


def render_family(
    name: str, kind: str, description: str, samples: Iterable[tuple[str, str]]
) -> str:
    """A metric in Prometheus' text format 0.0.4; samples are labels in braces (or none) and a value."""
    lines = [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{labels} {value}" for labels, value in samples]
    return "\n".join(lines) + "\n"
