"""Label texts by small integers: kept once for all series that have them. Below the series; knows nothing of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ingero.fleet.helpers.prometheus_names import format_labels, read_labels

_MAX_NAME_SETS: Final = 1024


class LabelSets:
    """Label sets by small integers, which are used again when `keep_only` has freed them.

    A set is known by its text, so that the order in which attributes arrive makes no second series; ``_aliases`` finds
    it by what arrived, and starts over when a sender makes up ever-new spellings of the same labels.
    """

    __slots__ = ("_aliases", "_free", "_idx_of_text", "_name_sets", "names", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.names: list[frozenset[str]] = []
        self._aliases: dict[object, int] = {}
        self._idx_of_text: dict[str, int] = {}
        self._free: list[int] = []
        self._name_sets: dict[frozenset[str], frozenset[str]] = {}

    def find(self, alias: object) -> int | None:
        """The set that arrived so before; None when this spelling is new."""
        return self._aliases.get(alias)

    def add(self, alias: object, labels: Mapping[str, str]) -> int:
        """Remember a set, found from now on by ``alias`` too."""
        index = self.take(labels)
        if len(self._aliases) > 4 * len(self._idx_of_text) + 1024:
            self._aliases.clear()
        self._aliases[alias] = index
        return index

    def take(self, labels: Mapping[str, str]) -> int:
        """The index of a set, which is new or not."""
        text = format_labels(labels)
        index = self._idx_of_text.get(text)
        if index is None:
            names = self._share(frozenset(name for name, value in labels.items() if value))
            index = self._idx_of_text[text] = self._take(text, names)
        return index

    def read(self, index: int) -> dict[str, str]:
        """The set as names and values."""
        return dict(read_labels(self.texts[index]))

    def _share(self, names: frozenset[str]) -> frozenset[str]:
        """One object for all sets of these names: a set takes more memory than all else that is kept of a node."""
        if len(self._name_sets) >= _MAX_NAME_SETS:
            self._name_sets.clear()
        return self._name_sets.setdefault(names, names)

    def _take(self, text: str, names: frozenset[str]) -> int:
        if self._free:
            index = self._free.pop()
            self.texts[index], self.names[index] = text, names
            return index
        self.texts.append(text)
        self.names.append(names)
        return len(self.texts) - 1

    def keep_only(self, live: set[int]) -> None:
        """Forget the others."""
        self._aliases = {alias: index for alias, index in self._aliases.items() if index in live}
        for text, index in list(self._idx_of_text.items()):
            if index not in live:
                del self._idx_of_text[text]
                self.texts[index], self.names[index] = "", frozenset()
                self._free.append(index)
