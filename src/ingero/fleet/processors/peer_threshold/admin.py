"""What the board knows, as JSON for people: pages of the admin endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np

from ingero.errors import BadDataError
from ingero.fleet.component import WITHHELD, AdminRoute
from ingero.fleet.processors.peer_threshold.cluster import ClusterState
from ingero.fleet.processors.peer_threshold.episodes import Episode, StragglerEvent
from ingero.fleet.processors.peer_threshold.notifications import ClusterEvent
from ingero.fleet.processors.peer_threshold.registry import ClusterRegistry
from ingero.fleet.processors.peer_threshold.report import cluster_values, iter_cohorts
from ingero.fleet.processors.peer_threshold.scores import ReportedState
from ingero.wire.push import UNKNOWN_RANK

PAGE_LIMIT: Final = 1000
"""Most rows of one page."""


class AdminPages:
    """Read-only pages about scores, bars and episodes. Each holds the board's lock for one page of rows at most."""

    def __init__(self, board: ClusterRegistry) -> None:
        self._board = board

    def admin_routes(self) -> Sequence[AdminRoute]:
        """Clusters, nodes, cohorts and episodes."""
        root = "/api/v1/admin"
        return (
            AdminRoute(f"{root}/clusters", "Every cluster with its bar.", self._clusters),
            AdminRoute(
                f"{root}/nodes",
                "Nodes of ?cluster_id= with score and state; ?offset= ?limit=, ?straggling=true.",
                self._nodes,
            ),
            AdminRoute(
                f"{root}/cohorts", "Cohorts of ?cluster_id= with their bars.", self._cohorts
            ),
            AdminRoute(
                f"{root}/episodes",
                "Straggler episodes, open ones first; ?cluster_id= ?offset= ?limit=.",
                self._episodes,
            ),
            AdminRoute(
                f"{root}/events",
                "Quorum, panic and caps as they turned, newest first; ?cluster_id= ?offset= ?limit=.",
                self._events,
            ),
        )

    def _clusters(self, query: Mapping[str, str]) -> dict[str, Any]:
        offset, limit = read_page(query)
        books = list(self._board.books.values())
        rows = []
        for book in books[offset : offset + limit]:
            with self._board.lock:
                values = cluster_values(book)
                rows.append({
                    "cluster_id": book.cluster_id,
                    "known_nodes": book.scores.n_nodes,
                    "cohorts": len(book.scores.cohorts),
                    "open_episodes": book.episodes.n_open,
                    "panic_since_unix_ns": book.panic_wall_ns,
                    "is_waiting": book.is_waiting,
                    **_numbers_json(values),
                })
        return {"total": len(books), "offset": offset, "clusters": rows}

    def _nodes(self, query: Mapping[str, str]) -> dict[str, Any]:
        offset, limit = read_page(query)
        with self._board.lock:
            book = self._get_book(query)
            scores = book.scores
            flagged = book.active_rows[book.state.is_straggler]
            is_straggler = np.zeros(scores.n_nodes, bool)
            is_straggler[flagged[flagged < scores.n_nodes]] = True
            rows = np.arange(scores.n_nodes)
            if query.get("straggling") == "true":
                rows = rows[is_straggler]
            found = [
                self._node_json(book, int(row), bool(is_straggler[row]))
                for row in rows[offset : offset + limit]
            ]
        return {"total": int(rows.size), "offset": offset, "nodes": found}

    def _node_json(self, book: ClusterState, row: int, is_straggler: bool) -> dict[str, Any]:  # noqa: FBT001
        scores = book.scores
        node_id = scores.nodes[row]
        resource = book.resources.get(node_id)
        cohort = scores.find_cohort_of(node_id)
        now_ns = self._board.now_ns()
        answer = book.find_answer(node_id, "", now_ns)
        threshold = None if answer is None or answer is WITHHELD else answer.threshold
        state = ReportedState(int(scores.states[row])).name.lower()
        has_rank = resource is not None and resource.rank != UNKNOWN_RANK
        return {
            "node_id": node_id,
            "score": float(scores.scores[row]),
            "state": state,
            "state_as_sent": book.other_states.get(node_id, state),
            "cgroup_path_hash": cohort.cgroup_path_hash if cohort else "",
            "workload_type": book.workloads.get(node_id, ""),
            "rank": resource.rank if resource is not None and has_rank else None,
            "world_size": (resource.world_size or None) if resource else None,
            "provider": (resource.provider or None) if resource else None,
            "threshold": threshold,
            "is_straggler": is_straggler,
            "in_episode": book.episodes.is_open(node_id),
            "age_s": round((now_ns - int(scores.seen_ns[row])) / 1e9, 3),
        }

    def _cohorts(self, query: Mapping[str, str]) -> dict[str, Any]:
        offset, limit = read_page(query)
        with self._board.lock:
            book = self._get_book(query)
            counts = np.bincount(book.scores.cohort_idx, minlength=len(book.scores.cohorts))
            scopes = dict(iter_cohorts(book))
            found = [
                {
                    "cgroup_path_hash": cohort.cgroup_path_hash,
                    "workload_type": cohort.workload_type,
                    "known_nodes": int(counts[index]),
                    "bar_of": "cohort" if cohort in scopes else "cluster",
                    **(_numbers_json(scopes[cohort]) if cohort in scopes else {}),
                }
                for index, cohort in islice(enumerate(book.scores.cohorts), offset, offset + limit)
            ]
            return {"total": len(book.scores.cohorts), "offset": offset, "cohorts": found}

    def _episodes(self, query: Mapping[str, str]) -> dict[str, Any]:
        offset, limit = read_page(query)
        with self._board.lock:
            books = [self._get_book(query)] if "cluster_id" in query else self._board.books.values()
            episodes = [episode for book in books for episode in book.episodes.iter_episodes()]
            episodes.sort(key=lambda e: (e.outcome is not None, -e.opened_wall_ns))
            page = [_episode_json(episode) for episode in episodes[offset : offset + limit]]
        return {"total": len(episodes), "offset": offset, "episodes": page}

    def _events(self, query: Mapping[str, str]) -> dict[str, Any]:
        offset, limit = read_page(query)
        wanted = query.get("cluster_id")
        with self._board.lock:
            events = [
                event
                for event in reversed(self._board.desk.events)
                if wanted is None or event.cluster_id == wanted
            ]
        page = [_cluster_event_json(event) for event in events[offset : offset + limit]]
        return {"total": len(events), "offset": offset, "events": page}

    def _get_book(self, query: Mapping[str, str]) -> ClusterState:
        cluster_id = query.get("cluster_id", "")
        if not cluster_id:
            raise BadDataError("cluster_id is missing; add ?cluster_id=NAME")
        return self._board.books[cluster_id]


def read_page(query: Mapping[str, str]) -> tuple[int, int]:
    """``offset`` and ``limit`` of a page.

    Raises:
        BadDataError: One of them is not a number in its range.
    """
    numbers = []
    for name, default, most in (("offset", 0, 2**31), ("limit", 100, PAGE_LIMIT)):
        text = query.get(name, str(default))
        if not text.isascii() or not text.isdigit() or len(text) > 10 or int(text) > most:
            raise BadDataError(f"{name} is {text[:40]!r}; it must be a number up to {most}")
        numbers.append(int(text))
    return numbers[0], numbers[1]


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
        "is_told": episode.is_told,
        "first": _event_json(episode.first),
        "last": _event_json(episode.last),
    }
