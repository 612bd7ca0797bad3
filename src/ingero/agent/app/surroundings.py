"""What is around a trace's calls, the machine and its devices: into the recording and the metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

from ingero.agent.app.gpus import GpuWatch
from ingero.agent.app.machine import Machine, build_snapshot
from ingero.agent.app.measures import Series
from ingero.agent.app.recorder import Recorder
from ingero.agent.app.tracing import Totals
from ingero.agent.discover.identity import Identity
from ingero.model.events import Events


class Surroundings:
    """Looks with each totals. Put it before the observers that read its series.

    Args:
        recorder: Where snapshots and rows go; None keeps them out of a recording.
        gpus: The devices, where NVML tells of them.
        machine: What looks at the machine.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        gpus: GpuWatch | None = None,
        machine: Machine | None = None,
    ) -> None:
        self._recorder = recorder
        self._gpus = gpus
        self._machine = machine or Machine()
        self._machine.look()

    def on_process(self, identity: Identity) -> None:
        """Nothing."""

    def on_events(self, ring: str, records: npt.NDArray[Any], events: Events) -> None:
        """Nothing."""

    def on_totals(self, totals: Totals) -> None:
        """Look, and record what was seen."""
        state = self._machine.look()
        if self._recorder is None:
            return
        if state.cpu_share is not None:
            self._recorder.writer.put_snapshots(build_snapshot(state, totals.wall_ns))
        if self._gpus is not None:
            self._recorder.put_facts(self._gpus.take_events())

    def iter_series(self) -> Iterator[Series]:
        """What was seen last."""
        yield from self._machine.iter_series()
        if self._gpus is not None:
            yield from self._gpus.iter_series()
        if self._recorder is not None:
            yield from self._recorder.iter_series()
