"""What workloads said of themselves, at the moment of an event."""

from __future__ import annotations

from collections.abc import Iterable

from ingero.recording.store.annotations import StoredAnnotation


class LabelsInTime:
    """Labels that hold at moments which are asked for in time order.

    An instant holds from when it was said, a span within its ends; of two values of one key the later said wins. Pid 0
    speaks of every process of its node.
    """

    def __init__(self, annotations: Iterable[StoredAnnotation]) -> None:
        self._later = sorted(annotations, key=lambda one: one.start_ns, reverse=True)
        self._instants: dict[tuple[str, int], dict[str, tuple[int, str]]] = {}
        self._spans: list[StoredAnnotation] = []

    def find(self, node: str, pid: int, time_ns: int) -> dict[str, str]:
        """The labels of a process at a moment that is not before the last one asked for."""
        while self._later and self._later[-1].start_ns <= time_ns:
            self._begin(self._later.pop())
        self._spans = [one for one in self._spans if one.end_ns >= time_ns]
        found = [
            (said_ns, key, value)
            for whose in {0, pid}
            for key, (said_ns, value) in self._instants.get((node, whose), {}).items()
        ]
        found += [
            (one.start_ns, key, value)
            for one in self._spans
            if one.node == node and one.pid in {0, pid}
            for key, value in one.labels.items()
        ]
        return {key: value for _, key, value in sorted(found)}

    def _begin(self, one: StoredAnnotation) -> None:
        if one.end_ns > one.start_ns:
            self._spans.append(one)
            return
        held = self._instants.setdefault((one.node, one.pid), {})
        held |= {key: (one.start_ns, value) for key, value in one.labels.items()}
