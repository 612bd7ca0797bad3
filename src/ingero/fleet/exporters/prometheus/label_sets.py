"""Label texts by small integers: kept once for all series that have them. Below the series; knows nothing of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from ingero.fleet.helpers.prometheus_names import format_labels, read_labels

_MAX_NAME_SETS: Final = 1024
_MAX_ALIASES: Final = 4
"""For each set, as the next; both with a thousand sets more."""
_MAX_ALIAS_CHARS: Final = 4 << 10
_MORE_SETS: Final = 1024

Spelling: TypeAlias = str | bytes | tuple[str, str | bytes]
"""What attributes are known again by."""


class LabelSets:
    """Label sets by small integers, which are used again when `keep_only` has freed them.

    A set is known by its text, so that the order in which attributes arrive makes no second series; ``_aliases`` finds
    it by what arrived, and starts over when a sender makes up ever-new spellings of the same labels, or long ones.

    Attributes:
        texts: Of each set, as `format_labels` writes it; empty for a free number.
        names: Of its labels.
        n_unused: Sets of which nothing said that it uses them.
    """

    __slots__ = (
        "_aliases",
        "_free",
        "_idx_of_text",
        "_is_used",
        "_n_alias_chars",
        "_name_sets",
        "n_unused",
        "names",
        "texts",
    )

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.names: list[frozenset[str]] = []
        self.n_unused = 0
        self._is_used = bytearray()
        self._aliases: dict[Spelling, int] = {}
        self._n_alias_chars = 0
        self._idx_of_text: dict[str, int] = {}
        self._free: list[int] = []
        self._name_sets: dict[frozenset[str], frozenset[str]] = {}

    def __len__(self) -> int:
        return len(self._idx_of_text)

    def find(self, alias: Spelling) -> int | None:
        """The set that arrived so before; None when this spelling is new."""
        return self._aliases.get(alias)

    def add(self, alias: Spelling, labels: Mapping[str, str], *, is_full: bool) -> int | None:
        """Remember a set, found from now on by ``alias`` too; None, and nothing kept, as for `take`."""
        index = self.take(labels, is_full=is_full)
        if index is not None:
            n_sets = len(self._idx_of_text) + _MORE_SETS
            is_many = len(self._aliases) > _MAX_ALIASES * n_sets
            if is_many or self._n_alias_chars > _MAX_ALIAS_CHARS * n_sets:
                self._aliases.clear()
                self._n_alias_chars = 0
            self._aliases[alias] = index
            self._n_alias_chars += _count_chars(alias)
        return index

    def take(self, labels: Mapping[str, str], *, is_full: bool) -> int | None:
        """The index of a set; None when it is new and none is taken any more."""
        text = format_labels(labels)
        index = self._idx_of_text.get(text)
        if index is None and not is_full:
            names = self._share(frozenset(name for name, value in labels.items() if value))
            index = self._idx_of_text[text] = self._take(text, names)
        return index

    def read(self, index: int) -> dict[str, str]:
        """The set as names and values."""
        return dict(read_labels(self.texts[index]))

    def note_use(self, index: int) -> None:
        """A series has this set."""
        if not self._is_used[index]:
            self._is_used[index] = True
            self.n_unused -= 1

    def _share(self, names: frozenset[str]) -> frozenset[str]:
        """One object for all sets of these names: a set takes more memory than all else that is kept of a node."""
        if len(self._name_sets) >= _MAX_NAME_SETS:
            self._name_sets.clear()
        return self._name_sets.setdefault(names, names)

    def _take(self, text: str, names: frozenset[str]) -> int:
        self.n_unused += 1
        if self._free:
            index = self._free.pop()
            self.texts[index], self.names[index] = text, names
            return index
        self.texts.append(text)
        self.names.append(names)
        self._is_used.append(False)
        return len(self.texts) - 1

    def keep_only(self, live: set[int]) -> None:
        """Forget the others."""
        self._aliases = {alias: index for alias, index in self._aliases.items() if index in live}
        self._n_alias_chars = sum(map(_count_chars, self._aliases))
        for text, index in list(self._idx_of_text.items()):
            is_live = index in live
            self._is_used[index] = is_live
            if not is_live:
                del self._idx_of_text[text]
                self.texts[index], self.names[index] = "", frozenset()
                self._free.append(index)
        self.n_unused = 0


def _count_chars(alias: Spelling) -> int:
    return sum(map(len, alias)) if isinstance(alias, tuple) else len(alias)
