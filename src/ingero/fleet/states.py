"""States that components of one id share, and that outlive a reload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast, runtime_checkable

from ingero.fleet.component import ComponentKind, SharedT
from ingero.fleet.config import FleetConfig


@runtime_checkable
class Discardable(Protocol):
    """A shared state that has something to do when it is forgotten."""

    def discard(self) -> None:
        """Count or release what it holds."""
        ...


@runtime_checkable
class Adjustable(Protocol):
    """A shared state that can go on under other settings, which its component gives it when it starts."""

    def accepts(self, settings: object) -> bool:
        """Whether it can under these."""
        ...


class SharedStates:
    """What `Host.shared` hands out: states by component and name, alive across reloads."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, str], Any] = {}

    def get(self, key: tuple[str, str], build: Callable[[], SharedT]) -> SharedT:
        """The state of this key, built if there is none yet."""
        if key not in self._states:
            self._states[key] = build()
        return cast("SharedT", self._states[key])

    def keep_unchanged(self, old: FleetConfig, new: FleetConfig) -> None:
        """Forget the states of components whose settings differ between the two, unless they can go on."""
        for key, state in list(self._states.items()):
            wanted = _settings_of(new, key[0])
            is_same = _settings_of(old, key[0]) == wanted
            if not is_same and not (
                isinstance(state, Adjustable) and any(map(state.accepts, wanted.values()))
            ):
                forgotten = self._states.pop(key)
                if isinstance(forgotten, Discardable):
                    forgotten.discard()


def _settings_of(config: FleetConfig, component: str) -> dict[ComponentKind, object]:
    return {kind: model for (kind, one), model in config.settings.items() if str(one) == component}
