"""Samples of the machine and its devices during a trace, for the recording and the metrics."""

from __future__ import annotations

from collections.abc import Iterator

from ingero.agent.capture.discover.identity import ProcessIdentity
from ingero.agent.capture.gpu.readings import GpuReading
from ingero.agent.capture.totals import Totals
from ingero.agent.metrics.gpus import GpuWatch
from ingero.agent.metrics.machine import Machine, MachineState, build_snapshot
from ingero.agent.metrics.series import Series
from ingero.agent.trace.recorder import Recorder
from ingero.agent.trace.selection import Selection
from ingero.model.arrays import Records
from ingero.model.events import Events


class HostSampler:
    """Takes a sample with each totals. Put it before the observers that read its series.

    Args:
        recorder: The recording, where there is one; its selection gets snapshots and rows.
        gpus: The devices, where NVML is there.
        selection: Gets snapshots and rows without a recorder.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        gpus: GpuWatch | None = None,
        selection: Selection | None = None,
    ) -> None:
        self._recorder = recorder
        self._selection = recorder.selection if recorder is not None else selection
        self._gpus = gpus
        self._machine = Machine()
        self._machine.sample()

    def on_process(self, identity: ProcessIdentity) -> None:
        """Not used: a sample is of the whole machine."""

    def on_events(self, ring: str, records: Records, events: Events) -> None:
        """Not used: a sample comes with the totals."""

    def on_totals(self, totals: Totals) -> None:
        """Take a sample and keep it."""
        state = self._machine.sample()
        if self._selection is None:
            return
        if state is not None and state.cpu_share is not None:
            self._selection.put_snapshots(build_snapshot(state, totals.wall_ns))
        if self._gpus is not None:
            self._selection.put_facts(self._gpus.take_events())

    @property
    def machine_state(self) -> MachineState | None:
        """The last sample of the machine."""
        return self._machine.state

    @property
    def gpu_readings(self) -> tuple[GpuReading, ...]:
        """The last sample of the devices; none without NVML."""
        return self._gpus.readings if self._gpus is not None else ()

    def iter_series(self) -> Iterator[Series]:
        """The last samples."""
        yield from self._machine.iter_series()
        if self._gpus is not None:
            yield from self._gpus.iter_series()
        if self._recorder is not None:
            yield from self._recorder.iter_series()
