"""How much slower than its peers each rank works, for the heat map of the live page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ingero.fleet.component import TOP_LEVEL, UNKNOWN_LEVEL, RankColumn, RankMeasure
from ingero.fleet.processors.collectives.engine import DetectionEngine
from ingero.model.verdicts import Slowdown, Verdict, describe_rank

_MEASURE: Final = RankMeasure("slowdown", "Own time against peers", 1.0, 1.5, rows="ranks")


class SlowdownLevels:
    """Each rank's own time against the median peer's, as the newest judgement has it."""

    measure = _MEASURE

    def __init__(self, engine: DetectionEngine) -> None:
        self._engine = engine

    def read_levels(self) -> Mapping[str, RankColumn]:
        """Every cluster's ranks."""
        return {
            cluster_id: _build_column(conclusion.judgement.verdicts)
            for cluster_id, conclusion in self._engine.conclusions().items()
        }


def name_row(verdict: Verdict) -> str:
    """The rank as a row is named: what it is, and where."""
    rank, node_id = describe_rank(verdict.rank), verdict.rank.node_id
    return rank if rank == node_id else f"{rank} on {node_id}"


def _build_column(verdicts: tuple[Verdict, ...]) -> RankColumn:
    rows = {name_row(verdict): _find_level(verdict.slowdown) for verdict in verdicts}
    return RankColumn(list(rows), bytes(rows.values()))


def _find_level(slowdown: Slowdown | None) -> int:
    if slowdown is None:
        return UNKNOWN_LEVEL
    share = (slowdown.median - _MEASURE.best) / (_MEASURE.worst - _MEASURE.best)
    return round(min(max(share, 0.0), 1.0) * TOP_LEVEL)
