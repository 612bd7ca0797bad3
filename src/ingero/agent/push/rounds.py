"""The pushing thread's work, round by round."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from ingero.agent.collectives.push import CollectivePusher
from ingero.agent.diagnosis.history import CounterHistory
from ingero.faults import FaultPlace, find_place
from ingero.telemetry.clock import Clock

PUSH_CHECK_S: Final = 0.2
"""Between two checks of the pushing thread for operations that are complete."""
_MAX_NOTED: Final = 16
"""Places of faults that are written; faults of others are counted alone."""
_MAX_NAMED: Final = 8


class PushRounds:
    """Pushes what is due until it is to stop; a fault costs the round in which it happens.

    Args:
        pusher: Pushes collectives.
        history: Reads counters.
        clock: Both clocks.
        notify: Gets a sentence for the first fault of each place, and for processes that cannot be compared.

    Attributes:
        n_faults: Rounds that failed since the start.
    """

    def __init__(
        self,
        pusher: CollectivePusher,
        history: CounterHistory,
        clock: Clock,
        notify: Callable[[str], None],
    ) -> None:
        self.n_faults = 0
        self._pusher = pusher
        self._history = history
        self._clock = clock
        self._notify = notify
        self._noted: set[FaultPlace] = set()

    def run(self, stop: threading.Event) -> None:
        """Body of the thread."""
        while not stop.wait(PUSH_CHECK_S):
            self._try(self._pusher.push_due)
            self._try(self._read_counters)
            self._try(self._note_unknown)
        self._try(self._pusher.finish)

    def _read_counters(self) -> None:
        self._history.read_due(self._clock.mono_ns())

    def _note_unknown(self) -> None:
        names = self._pusher.take_unknown()
        if names:
            more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            self._notify(
                f"the collectives of {', '.join(names[:_MAX_NAMED])}{more} are not compared: NCCL made their"
                " communicators before this agent looked. Restart the job, or give it our plug-in for NCCL"
                " (ingero nccl-plugin --help), with which an agent may come later"
            )

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - what one process wrote must not end the pushes of all others
            self.n_faults += 1
            place = find_place(error)
            if place not in self._noted and len(self._noted) < _MAX_NOTED:
                self._noted.add(place)
                self._notify(f"a round of pushing failed, the next one runs: {error!r} in {place}")
