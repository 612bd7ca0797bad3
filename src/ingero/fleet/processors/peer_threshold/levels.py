"""Health scores of nodes, for the heat map of the live page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from ingero.fleet.component import TOP_LEVEL, UNKNOWN_LEVEL, RankColumn, RankMeasure
from ingero.fleet.processors.peer_threshold.registry import ClusterRegistry
from ingero.fleet.processors.peer_threshold.scores import ReportedState

_MEASURE: Final = RankMeasure("score", "Health score", best=1.0, worst=0.0, rows="nodes")


class ScoreLevels:
    """Scores of active nodes; what an idle or calibrating node sends is no judgement of it, so it is unknown."""

    measure = _MEASURE

    def __init__(self, registry: ClusterRegistry) -> None:
        self._registry = registry

    def read_levels(self) -> Mapping[str, RankColumn]:
        """Every cluster's nodes. Holds the registry's lock for one cluster at a time."""
        found = {}
        for cluster_id, cluster in list(self._registry.clusters.items()):
            with self._registry.lock:
                names = list(cluster.scores.nodes)
                scores = cluster.scores.scores.copy()
                is_active = cluster.scores.states == ReportedState.ACTIVE
            levels = np.full(len(names), UNKNOWN_LEVEL, np.uint8)
            levels[is_active] = np.rint((1 - scores[is_active].clip(0, 1)) * TOP_LEVEL)
            found[cluster_id] = RankColumn(names, levels.tobytes())
        return found
