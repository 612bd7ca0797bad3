"""The node's state: calibrating, active, idle or stale; one step per push interval.

Pure: a state and an observation give the next state and what to do. A *hung* node (nothing launched although work is
outstanding) stays active, so that it is scored and named instead of being idle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple

from ingero.agent.health.signals.reading import Reading
from ingero.errors import ConfigError

FUTURE_TOLERANCE_NS: Final = 60_000_000_000
"""A reading stamped later than this after now is a failed one."""
MAX_IDLE_INTERVALS: Final = 1 << 20


class State(StrEnum):
    """The node's state. ``stale`` is never on the wire: a stale node pushes nothing."""

    CALIBRATING = "calibrating"
    ACTIVE = "active"
    IDLE = "idle"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """How many intervals each change takes.

    Attributes:
        warmup: Readings before a calibrating node is active.
        idle_intervals: Intervals in a row without a launch before an active node is idle.
        stale_intervals: Intervals in a row without a good reading before a node is stale.

    Raises:
        ConfigError: A count is out of range.
    """

    warmup: int = 30
    idle_intervals: int = 3
    stale_intervals: int = 3

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.stale_intervals < 1:
            raise ConfigError("warmup must not be negative and stale_intervals at least 1")
        if not 1 <= self.idle_intervals <= MAX_IDLE_INTERVALS:
            raise ConfigError(f"idle_intervals must be between 1 and {MAX_IDLE_INTERVALS}")


@dataclass(frozen=True, slots=True)
class StateMachine:
    """A state and the counts that lead out of it.

    Attributes:
        state: The node's state.
        n_warm: Readings seen while calibrating.
        n_silent: Intervals in a row without a launch.
        n_failed: Intervals in a row without a reading.
        workload: Identity of what ran last; empty when it was never known.
        is_restored: The baseline was learned before the agent's start: it is of ``workload`` and of no other, also
            where that is not known.
    """

    state: State = State.CALIBRATING
    n_warm: int = 0
    n_silent: int = 0
    n_failed: int = 0
    workload: str = ""
    is_restored: bool = False


class Step(NamedTuple):
    """Result of one step.

    Attributes:
        machine: The next state.
        is_pushed: Whether this interval is pushed.
        is_restart: Forget the baseline and seed it with this reading.
    """

    machine: StateMachine
    is_pushed: bool
    is_restart: bool = False


def advance(machine: StateMachine, reading: Reading | None, settings: MachineSettings) -> Step:
    """Take one interval.

    Args:
        machine: State and counts.
        reading: What was read, or None when every sample of the interval failed.
        settings: Counts.
    """
    if reading is None:
        n_failed = machine.n_failed + 1
        state = State.STALE if n_failed >= settings.stale_intervals else machine.state
        return Step(replace(machine, state=state, n_failed=n_failed), is_pushed=False)
    if is_waking(machine, reading):
        fresh = StateMachine(n_warm=1, workload=reading.workload or machine.workload)
        return Step(_warm_up(fresh, settings), is_pushed=False, is_restart=True)
    machine = replace(machine, n_failed=0, workload=reading.workload or machine.workload)
    if machine.state is State.CALIBRATING:
        warmer = replace(machine, n_warm=machine.n_warm + 1)
        return Step(_warm_up(warmer, settings), is_pushed=True)
    return Step(_watch_silence(machine, reading, settings), is_pushed=True)


def is_waking(machine: StateMachine, reading: Reading) -> bool:
    """True when this reading starts calibration again: it ends a sleep, or another workload runs now."""
    if machine.state is State.STALE:
        return True
    if machine.state is State.IDLE:
        return bool(reading.launches) or reading.is_hung
    is_bound = machine.is_restored or bool(machine.workload)
    return is_bound and bool(reading.workload) and reading.workload != machine.workload


def reject_future(reading: Reading | None, wall_ns: int) -> Reading | None:
    """Treat a reading from the future as failed: its clock cannot be trusted."""
    if reading is not None and reading.wall_ns > wall_ns + FUTURE_TOLERANCE_NS:
        return None
    return reading


def _warm_up(machine: StateMachine, settings: MachineSettings) -> StateMachine:
    is_warm = machine.n_warm >= settings.warmup
    return replace(machine, state=State.ACTIVE) if is_warm else machine


def _watch_silence(
    machine: StateMachine, reading: Reading, settings: MachineSettings
) -> StateMachine:
    if reading.launches is None:
        return machine
    if reading.launches > 0 or reading.is_hung:
        return replace(machine, n_silent=0)
    n_silent = machine.n_silent + 1
    if machine.state is State.ACTIVE and n_silent >= settings.idle_intervals:
        return replace(machine, state=State.IDLE, n_silent=n_silent)
    return replace(machine, n_silent=n_silent)
