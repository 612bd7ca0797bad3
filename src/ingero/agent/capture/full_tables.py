"""What the kernel's side could not follow because a table was full, in words: each of it once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

_SENTENCES: Final[Mapping[str, str]] = {
    "uncounted": "the table of counts is full: calls of further processes are neither counted nor kept",
    "no_thread": "the table of threads is full: calls of further threads are neither counted nor kept",
    "pids_full": "a table of processes is full: host events, children or Python frames of further ones are missing",
    "comms_full": "the table of communicators is full: whose collectives on further ones are is not known",
    "allocs_full": "the table of allocations is full: how much memory is freed is not known of further ones",
    "contexts_full": "the table of contexts is full: which device calls in further ones are for is not known",
    "requests_full": "the table of disk requests is full: further ones, or their time in the queue, are missing",
    "too_deep": "calls are nested deeper than is followed: the innermost are neither counted nor kept",
}


class FullTables:
    """Notices the first loss of each kind."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def iter_new(self, losses: Mapping[str, int]) -> Iterator[str]:
        """A sentence for each kind of loss that was not there before.

        Args:
            losses: Losses that belong to no operation, by name: ``struct ig_losses``.
        """
        for name, sentence in _SENTENCES.items():
            if losses.get(name, 0) and name not in self._named:
                self._named.add(name)
                yield f'{sentence} (ingero_trace_losses_total{{what="{name}"}})'
