"""Which events become alerts: the first one of an episode, and its end.

An agent repeats its open episodes on every tick and to every reader that connects. Each becomes one alert. A node has
one episode at a time, whatever ids its lines carry: the existing agent sends a new id with every tick and another with
the end. An episode that an agent does not mention again within `RESYNC_NS` of a new connection ended unseen,
and is resolved.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from ingero.errors import BadDataError
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S
from ingero.wire.uds import Straggle, StragglerResolved, StragglerState, decode_message, find_rank

RESYNC_NS: Final = 60 * NS_PER_S
LOCAL_NS: Final = 600 * NS_PER_S
"""A process that stalls on its own has no resolving message; after this long without another it counts as well."""
MAX_EPISODES: Final = 10_000
_LOG: Final = logging.getLogger("ingero.alerter")


class Action(StrEnum):
    """What became of an episode."""

    TRIGGER = "trigger"
    RESOLVE = "resolve"


@dataclass(frozen=True, slots=True)
class Alert:
    """The begin or the end of an episode, for people.

    Attributes:
        action: Whether it began or ended.
        key: The episode, the same for both: the first id received for it, or its node.
        node: Its node; empty for a process that stalls on its own.
        cluster: Its cluster; may be empty.
        title: One line for a person.
        details: What the agent sent, JSON-able.
    """

    action: Action
    key: str
    node: str
    cluster: str
    title: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Open:
    alert: Alert
    seen_ns: int
    is_local: bool
    is_doubtful: bool = False


class Episodes:
    """Reads lines, makes alerts: a listener of an `EventReader`.

    Args:
        clock: Ages episodes.
        send: Gets each alert, once.

    Attributes:
        n_bad: Lines that could not be read.
        n_evicted: Episodes forgotten because there were too many.
    """

    def __init__(self, clock: Clock, send: Callable[[Alert], None]) -> None:
        self.n_bad = 0
        self.n_evicted = 0
        self._clock = clock
        self._send = send
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._connected_ns: int | None = None

    def connected(self) -> None:
        """A connection is open: open episodes are in doubt until the agent sends them again."""
        with self._lock:
            self._connected_ns = self._clock.mono_ns()
            for known in self._open.values():
                known.is_doubtful = not known.is_local

    def disconnected(self) -> None:
        """It ended; episodes stay as they were last received."""
        with self._lock:
            self._connected_ns = None

    @property
    def is_connected(self) -> bool:
        """Whether an agent is connected."""
        return self._connected_ns is not None

    @property
    def n_open(self) -> int:
        """Episodes that are not over."""
        return len(self._open)

    def overlong(self) -> None:
        """A line was too long to read."""
        self._note_bad("it is too long")

    def line(self, line: bytes) -> None:
        """Follow one line; what is no straggler is passed over."""
        try:
            message = decode_message(line)
        except BadDataError as error:
            self._note_bad(error.message)
            return
        with self._lock:
            if isinstance(message, StragglerState):
                key = message.event_id or _node_of(message)
                alert = build_state_alert(message, key)
                self._begin(_node_of(message), alert, is_local=False)
            elif isinstance(message, StragglerResolved):
                self._end(_node_of(message))
            elif isinstance(message, Straggle):
                self._begin(f"pid-{message.pid}", build_local_alert(message), is_local=True)

    def _note_bad(self, reason: str) -> None:
        """Count a line; only the first is logged, because there may be many."""
        self.n_bad += 1
        if self.n_bad == 1:
            _LOG.warning("a line of the agent cannot be read: %s", reason)

    def settle(self) -> None:
        """End episodes that the agent does not send any more. Call it every second or so."""
        now_ns = self._clock.mono_ns()
        with self._lock:
            is_synced = self._connected_ns is not None and now_ns - self._connected_ns >= RESYNC_NS
            for subject, known in list(self._open.items()):
                is_over = known.is_local and now_ns - known.seen_ns >= LOCAL_NS
                if is_over or (known.is_doubtful and is_synced):
                    self._end(subject)

    def _begin(self, subject: str, alert: Alert, *, is_local: bool) -> None:
        now_ns = self._clock.mono_ns()
        known = self._open.get(subject)
        if known is not None:
            known.seen_ns, known.is_doubtful = now_ns, False
            return
        if len(self._open) >= MAX_EPISODES:
            forgotten = self._open.pop(next(iter(self._open)))
            self.n_evicted += 1
            _LOG.warning(
                "too many open episodes; %s is not followed to its end", forgotten.alert.key
            )
        self._open[subject] = _Open(alert, now_ns, is_local)
        self._send(alert)

    def _end(self, subject: str) -> None:
        known = self._open.pop(subject, None)
        if known is None:  # it began before the alerter, and has no alert
            return
        began = known.alert
        title = began.title.replace("straggler", "straggler resolved", 1)
        self._send(
            Alert(Action.RESOLVE, began.key, began.node, began.cluster, title, began.details)
        )


def _node_of(message: StragglerState | StragglerResolved) -> str:
    return f"{message.cluster_id}/{message.node_id}"


def build_state_alert(message: StragglerState, key: str) -> Alert:
    """A node's episode begins."""
    details = {
        "node_id": message.node_id,
        "cluster_id": message.cluster_id,
        "score": message.score,
        "threshold": message.threshold,
        "detection_mode": message.detection_mode,
        "dominant_signal": message.dominant_signal,
        "timestamp": message.timestamp,
        "rank": find_rank(message),
        "world_size": message.world_size,
        "event_id": message.event_id,
        "labels": message.labels,
    }
    title = f"Ingero straggler on {message.cluster_id}/{message.node_id}"
    return Alert(Action.TRIGGER, key, message.node_id, message.cluster_id, title, details)


def build_local_alert(message: Straggle) -> Alert:
    """A process stalls, found on its node alone."""
    details = {
        "pid": message.pid,
        "comm": message.comm,
        "throughput_drop_pct": message.throughput_drop_pct,
        "preempting_pids": list(message.preempting_pids or ()),
        "sustained": message.sustained,
        "event_id": message.event_id,
    }
    title = f"Ingero local straggler (PID {message.pid})"
    key = message.event_id or f"pid-{message.pid}"
    return Alert(Action.TRIGGER, key, "", "", title, details)
