"""States that components of one id share, and that outlive a reload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, cast, runtime_checkable
from weakref import WeakSet

from ingero.fleet.component import ComponentKind, SharedT
from ingero.fleet.config import FleetConfig

StateKey = tuple[str, str]
"""A component's id, and the name of one of its states."""


@runtime_checkable
class Discardable(Protocol):
    """A shared state that has something to do when it is forgotten."""

    def discard(self) -> None:
        """Count or release what it holds."""
        ...


@runtime_checkable
class Unfinished(Protocol):
    """A shared state that may hold data until the service ends, even after it was forgotten."""

    def end(self) -> None:
        """Count what it holds as lost."""
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
        self._states: dict[StateKey, object] = {}
        self._forgotten: WeakSet[Unfinished] = WeakSet()

    def get(self, key: StateKey, build: Callable[[], SharedT]) -> SharedT:
        """The state of this key, built if there is none yet."""
        if key not in self._states:
            self._states[key] = build()
        return cast("SharedT", self._states[key])

    def set_aside_changed(self, old: FleetConfig, new: FleetConfig) -> Mapping[StateKey, object]:
        """No longer hand out the states of components whose settings differ between the two, unless they can go on.

        Returns:
            Every state there was, for `restore` where the new configuration does not start, and for `discard_unused`
            where it does.
        """
        before = dict(self._states)
        for key, state in before.items():
            wanted = _settings_of(new, key[0])
            is_same = _settings_of(old, key[0]) == wanted
            if not is_same and not (
                isinstance(state, Adjustable) and any(map(state.accepts, wanted.values()))
            ):
                del self._states[key]
        return before

    def restore(self, before: Mapping[StateKey, object]) -> None:
        """Hand out these states again, and forget those that were built since."""
        built, self._states = self._states, dict(before)
        self.discard_unused(built)

    def discard_unused(self, states: Mapping[StateKey, object]) -> None:
        """Forget those of these states that are no longer handed out."""
        for key, state in states.items():
            if self._states.get(key) is state:
                continue
            if isinstance(state, Discardable):
                state.discard()
            if isinstance(state, Unfinished):
                self._forgotten.add(state)

    def end(self) -> None:
        """The service ends: what states still hold is lost."""
        for state in (*self._states.values(), *self._forgotten):
            if isinstance(state, Unfinished):
                state.end()


def _settings_of(config: FleetConfig, component: str) -> dict[ComponentKind, object]:
    return {kind: model for (kind, one), model in config.settings.items() if str(one) == component}
