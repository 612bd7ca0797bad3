"""Workers of which something was said that this judge has not met: another judged them, or it started over."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final

from ingero.fleet.processors.collectives.conclusions import QUIET, VerdictChange
from ingero.model.collectives import Rank, Worker
from ingero.model.verdicts import Verdict, VerdictKind

SILENT: Final = "it reported nothing any more: its job has ended, or its agent is away"


class UnmetWorkers:
    """Those of one cluster, and since when each is missed."""

    def __init__(self) -> None:
        self._since_ns: dict[Worker, int] = {}

    def take(
        self,
        cluster_id: str,
        kinds: Mapping[Worker, VerdictKind],
        met: Container[Worker],
        timeout_ns: int,
        now_ns: int,
    ) -> tuple[dict[Worker, VerdictKind], tuple[VerdictChange, ...]]:
        """What stays of their verdicts, and what ends.

        Such a worker may only be late, so its verdict stays; but for no longer than that of one that fell silent.

        Args:
            cluster_id: Whose they are.
            kinds: What was said last, of anybody.
            met: Whom the judge knows.
            timeout_ns: For how long a verdict stays.
            now_ns: Monotonic time; who is missed for the first time is missed since then.

        Returns:
            Verdicts that stay, and the ends of the others.
        """
        said = {
            worker: kind
            for worker, kind in kinds.items()
            if kind not in QUIET and worker not in met
        }
        self._since_ns = {worker: self._since_ns.get(worker, now_ns) for worker in said}
        over = [
            worker for worker, since_ns in self._since_ns.items() if now_ns - since_ns >= timeout_ns
        ]
        return said, tuple(_end(cluster_id, worker, said.pop(worker)) for worker in over)


def _end(cluster_id: str, worker: Worker, kind: VerdictKind) -> VerdictChange:
    rank = Rank(cluster_id, worker.node_id, worker.rank, job=worker.job)
    return VerdictChange(kind, Verdict(rank, VerdictKind.UNKNOWN, reason=SILENT))
