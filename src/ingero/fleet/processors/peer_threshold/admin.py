"""What the registry knows, as JSON for people: pages of the admin endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from ingero.fleet.component import WITHHELD, AdminRoute
from ingero.fleet.helpers.admin_pages import ADMIN_ROOT, build_page, get_cluster_id
from ingero.fleet.processors.peer_threshold.cluster import ClusterState
from ingero.fleet.processors.peer_threshold.episodes import Episode, StragglerEvent
from ingero.fleet.processors.peer_threshold.notifications import ClusterEvent
from ingero.fleet.processors.peer_threshold.registry import ClusterRegistry
from ingero.fleet.processors.peer_threshold.report import cluster_values, iter_cohorts
from ingero.fleet.processors.peer_threshold.scores import ReportedState
from ingero.wire.push import UNKNOWN_RANK


class AdminPages:
    """Read-only pages about scores, thresholds and episodes. Each holds the registry's lock for one page at most."""

    def __init__(self, registry: ClusterRegistry) -> None:
        self._registry = registry

    def admin_routes(self) -> Sequence[AdminRoute]:
        """Clusters, nodes, cohorts, episodes and events."""
        pages = {
            "clusters": (self._clusters, "Every cluster with its threshold."),
            "nodes": (
                self._nodes,
                "Nodes of ?cluster_id= with score and state; ?offset= ?limit=, ?straggling=true.",
            ),
            "cohorts": (self._cohorts, "Cohorts of ?cluster_id= with their thresholds."),
            "episodes": (
                self._episodes,
                "Straggler episodes, open ones first; ?cluster_id= ?offset= ?limit=.",
            ),
            "events": (
                self._events,
                "Quorum, panic and caps as they turned, newest first; ?cluster_id= ?offset= ?limit=.",
            ),
        }
        return [
            AdminRoute(f"{ADMIN_ROOT}/{name}", description, read)
            for name, (read, description) in pages.items()
        ]

    def _clusters(self, query: Mapping[str, str]) -> dict[str, Any]:
        def render(cluster: ClusterState) -> dict[str, Any]:
            with self._registry.lock:
                return {
                    "cluster_id": cluster.cluster_id,
                    "known_nodes": cluster.scores.n_nodes,
                    "cohorts": len(cluster.scores.cohorts),
                    "open_episodes": cluster.episodes.n_open,
                    "panic_since_unix_ns": cluster.panic_wall_ns,
                    "is_waiting": cluster.is_waiting,
                    **_numbers_json(cluster_values(cluster)),
                }

        return build_page("clusters", list(self._registry.clusters.values()), query, render)

    def _nodes(self, query: Mapping[str, str]) -> dict[str, Any]:
        with self._registry.lock:
            cluster = self._get_cluster(query)
            n_nodes = cluster.scores.n_nodes
            flagged = cluster.active_rows[cluster.state.is_straggler]
            stragglers = set(flagged[flagged < n_nodes].tolist())
            is_all = query.get("straggling") != "true"
            rows = range(n_nodes) if is_all else sorted(stragglers)
            return build_page(
                "nodes", rows, query, lambda row: self._node_json(cluster, row, row in stragglers)
            )

    def _node_json(self, cluster: ClusterState, row: int, is_straggler: bool) -> dict[str, Any]:  # noqa: FBT001
        scores = cluster.scores
        node_id = scores.nodes[row]
        resource = cluster.nodes.resources.get(node_id)
        cohort = scores.find_cohort_of(node_id)
        now_ns = self._registry.now_ns()
        answer = cluster.find_answer(node_id, "", now_ns)
        threshold = None if answer is None or answer is WITHHELD else answer.threshold
        state = ReportedState(int(scores.states[row])).name.lower()
        has_rank = resource is not None and resource.rank != UNKNOWN_RANK
        return {
            "node_id": node_id,
            "score": float(scores.scores[row]),
            "state": state,
            "state_as_sent": cluster.nodes.other_states.get(node_id, state),
            "cgroup_path_hash": cohort.cgroup_path_hash if cohort else "",
            "workload_type": cluster.nodes.workloads.get(node_id, ""),
            "rank": resource.rank if resource is not None and has_rank else None,
            "world_size": (resource.world_size or None) if resource else None,
            "provider": (resource.provider or None) if resource else None,
            "threshold": threshold,
            "is_straggler": is_straggler,
            "in_episode": cluster.episodes.is_open(node_id),
            "age_s": round((now_ns - int(scores.seen_ns[row])) / 1e9, 3),
        }

    def _cohorts(self, query: Mapping[str, str]) -> dict[str, Any]:
        with self._registry.lock:
            cluster = self._get_cluster(query)
            cohorts = cluster.scores.cohorts
            counts = np.bincount(cluster.scores.cohort_idx, minlength=len(cohorts))
            values = dict(iter_cohorts(cluster))

            def render(row: int) -> dict[str, Any]:
                cohort = cohorts[row]
                return {
                    "cgroup_path_hash": cohort.cgroup_path_hash,
                    "workload_type": cohort.workload_type,
                    "known_nodes": int(counts[row]),
                    "bar_of": "cohort" if cohort in values else "cluster",
                    **_numbers_json(values.get(cohort, {})),
                }

            return build_page("cohorts", range(len(cohorts)), query, render)

    def _episodes(self, query: Mapping[str, str]) -> dict[str, Any]:
        registry = self._registry
        with registry.lock:
            is_one = "cluster_id" in query
            clusters = [self._get_cluster(query)] if is_one else registry.clusters.values()
            episodes = [one for cluster in clusters for one in cluster.episodes.list_episodes()]
            episodes.sort(key=lambda one: (one.outcome is not None, -one.opened_wall_ns))
            return build_page("episodes", episodes, query, _episode_json)

    def _events(self, query: Mapping[str, str]) -> dict[str, Any]:
        wanted = query.get("cluster_id")
        with self._registry.lock:
            events = list(reversed(self._registry.notifications.events))
        events = [event for event in events if wanted is None or event.cluster_id == wanted]
        return build_page("events", events, query, _cluster_event_json)

    def _get_cluster(self, query: Mapping[str, str]) -> ClusterState:
        return self._registry.clusters[get_cluster_id(query)]


_FRACTIONS: Final = ("threshold", "median", "mad")
_FLAGS: Final = ("coverage_low", "panic_mode", "quorum_met")


def _numbers_json(values: Mapping[str, float]) -> dict[str, float | int | bool | None]:
    """Values by the rest of their name: shares as they are, flags as such, counts as whole numbers."""
    found: dict[str, float | int | bool | None] = {}
    for name, value in values.items():
        short = name.removeprefix("ingero_fleet_").removeprefix("cohort_")
        if value != value:  # noqa: PLR0124 - only NaN differs from itself
            found[short] = None
        elif short in _FLAGS:
            found[short] = bool(value)
        else:
            found[short] = value if short in _FRACTIONS else int(value)
    return found


def _event_json(event: StragglerEvent) -> dict[str, Any]:
    return {
        "event_id": event.event_id,
        "score": event.score,
        "threshold": event.threshold,
        "detection_mode": event.mode,
        "dominant_signal": event.dominant_signal,
    }


def _cluster_event_json(event: ClusterEvent) -> dict[str, Any]:
    return {
        "kind": event.kind.value,
        "cluster_id": event.cluster_id,
        "state": "began" if event.is_on else "ended",
        "unix_ns": event.wall_ns,
        "began_unix_ns": event.began_wall_ns,
        **event.values,
    }


def _episode_json(episode: Episode) -> dict[str, Any]:
    return {
        "cluster_id": episode.cluster_id,
        "node_id": episode.node_id,
        "outcome": episode.outcome,
        "opened_unix_ns": episode.opened_wall_ns,
        "last_event_unix_ns": episode.last_wall_ns,
        "closed_unix_ns": episode.closed_wall_ns,
        "events": episode.n_events,
        "in_panic": episode.in_panic,
        "is_told": episode.is_announced,
        "first": _event_json(episode.first),
        "last": _event_json(episode.last),
    }
