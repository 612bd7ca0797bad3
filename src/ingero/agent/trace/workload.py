"""Annotations of workloads, for the recording and for events about the node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ingero.agent.annotations.admission import Admitted
from ingero.agent.annotations.labels import LatestLabels
from ingero.agent.annotations.listener import AnnotationListener, open_annotations
from ingero.agent.trace.recorder import Recorder
from ingero.telemetry.clock import Clock


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """Where workloads send annotations.

    Attributes:
        path: The socket.
        gid: Group whose members may; negative for this user only.
    """

    path: Path
    gid: int = -1


@dataclass(frozen=True, slots=True)
class Workload:
    """The annotations of the node's workloads.

    Attributes:
        latest: The latest of them.
        listener: Takes them; has the counters.
    """

    latest: LatestLabels
    listener: AnnotationListener


@contextmanager
def open_workload(
    settings: WorkloadSettings, clock: Clock, recorder: Recorder | None = None
) -> Iterator[Workload]:
    """Take annotations until the context ends; a recorder must outlive it.

    Raises:
        ConfigError: The socket's path cannot be used safely.
        IngeroError: The system refused the socket.
    """
    latest = LatestLabels(clock)

    def take(admitted: Sequence[Admitted]) -> None:
        latest.take(admitted)
        if recorder is not None:
            recorder.on_annotations(admitted)

    with open_annotations(settings.path, settings.gid, take, clock) as listener:
        yield Workload(latest, listener)
