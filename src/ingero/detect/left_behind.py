"""Workers that their jobs went on without: what is known of them says nothing of now."""

from __future__ import annotations

from collections.abc import Iterator

from ingero.detect.facts import Facts
from ingero.detect.groups import PeerGroup


def find_left_behind(facts: Facts) -> frozenset[int]:
    """Workers that are left behind.

    Most of a worker's peers are compared with others by now, as after a restart without it. Or it reported nothing for
    `Facts.patience_ns` while those went on that its job has since: peers that are compared with others, as where a job
    shrank to half, or workers that came after its last report, as where its rank has another node. The latter needs an
    id of the job, by which its workers are known.
    """
    groups = {id(known.group): known.group for known in facts.workers if known.group is not None}
    left = {worker for group in groups.values() for worker in _find_in_group(facts, group)}
    return frozenset(left.union(_find_in_jobs(facts)))


def _find_in_group(facts: Facts, group: PeerGroup) -> Iterator[int]:
    here = [at for at in group.members if facts.workers[at].group is group]
    if 2 * len(here) < len(group.members):
        yield from here
        return
    moved = [facts.workers[at] for at in group.members if facts.workers[at].group is not group]
    if moved:
        until_ns = max(known.seen_ns[1] for known in moved)
        yield from (worker for worker in here if facts.is_silent(worker, until_ns))


def _find_in_jobs(facts: Facts) -> Iterator[int]:
    newest: dict[tuple[str, str], tuple[int, int]] = {}
    for known in facts.workers:
        key, seen_ns = (known.rank.cluster_id, known.rank.job), known.seen_ns
        came_ns, until_ns = newest.get(key, seen_ns)
        newest[key] = max(came_ns, seen_ns[0]), max(until_ns, seen_ns[1])
    for worker, known in enumerate(facts.workers):
        came_ns, until_ns = newest[known.rank.cluster_id, known.rank.job]
        has_come = bool(known.rank.job) and came_ns > known.seen_ns[1]
        if has_come and facts.is_silent(worker, until_ns):
            yield worker
