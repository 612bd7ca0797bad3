"""What an action on a culprit's node saved: the operations after it, against the pace that the job had before it.

Before the action the job went at the pace of its culprit, which is measured from the onset to the action; the first
quarter of that is left out, because a detected onset can lie some operations before the fault. After it the same rank
does operations somewhere else, or still there. Without the action they would have taken as long as they did before:
that is assumed, and all that is. What they took instead, with all of stopping, queueing and starting, is measured. The
difference is time of every GPU of the job, which costs whether it works or waits.

Not seen here are steps that were done twice because the checkpoint was older: operations have no numbers that last over
a restart. Somebody who knows them gives `ActedEpisode.n_repeated`.

All times are nanoseconds since the epoch as the receiver of the reports has them, but for ``entry_ns``, which is the
rank's own clock and is compared with itself alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from ingero.units import NS_PER_S

ASSUMPTION: Final = (
    "without it the later operations would have taken as long as those from onset to action,"
    " the first quarter of that time left out"
)
NOT_SEEN: Final = "steps done twice because the checkpoint was older, which lessen it"
_MIN_OPS: Final = 8
"""Fewer say nothing about a pace."""
_UNSETTLED: Final = 0.25
"""The part of the time from onset to action, at its beginning, that says nothing about the pace of the fault."""
_N_PIECES: Final = 6
"""Pieces of equal time, of the rest, whose paces give the error of their mean."""
PACE_PARTS: Final = 24
"""Parts of equal time for operations before the action; the beginning and the pieces are made of whole ones."""
_ENDING_NS: Final = 120 * NS_PER_S
"""How long after an action a run that it ends may still be reported; one that goes on longer was not ended."""
_CHARGE_LAG_NS: Final = 15 * NS_PER_S
"""How late a charge is reported: Fleet's `cost_interval` (10 s) and its way."""
_LAST_CHARGE_LAG_NS: Final = 90 * NS_PER_S
"""The same of a run that was ended: Fleet waits for ranks that do not report any more, too (`patience_ns`, 60 s)."""


class JobMember(NamedTuple):
    """A rank on a communicator.

    Attributes:
        comm: The communicator.
        worker: Who: the node with the rank's number or labels.
        node_id: Where.
        n_gpus: GPUs that wait when it waits; None where it was not said.
    """

    comm: str
    worker: str
    node_id: str
    n_gpus: int | None


class JobExtent(NamedTuple):
    """A job: its nodes, and its GPUs; None where a rank did not say them."""

    nodes: frozenset[str]
    n_gpus: int | None


def find_job(members: Iterable[JobMember], worker: str) -> JobExtent:
    """Everybody who shares a communicator with a worker, or with somebody who does, and so on."""
    comms: dict[str, set[str]] = defaultdict(set)
    workers: dict[str, set[str]] = defaultdict(set)
    nodes: dict[str, str] = {}
    gpus: dict[str, int] = {}
    for one in members:
        comms[one.worker].add(one.comm)
        workers[one.comm].add(one.worker)
        nodes[one.worker] = one.node_id
        if one.n_gpus is not None:
            gpus[one.worker] = max(one.n_gpus, gpus.get(one.worker, 0))
    found: set[str] = set()
    waiting = [worker] if worker in nodes else []
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [other for comm in comms[name] for other in workers[comm]]
    n_gpus = sum(gpus[name] for name in found) if found and found <= gpus.keys() else None
    return JobExtent(frozenset(nodes[name] for name in found), n_gpus)


@dataclass(frozen=True, slots=True)
class OpStretch:
    """Operations of one rank on one communicator within a stretch of time.

    Attributes:
        comm: The communicator.
        n_ranks: Its size.
        nodes: Nodes of its members.
        wall_ns: When the first and the last of them were reported.
        entry_ns: When the rank entered the first and the last, on its own clock.
        seq: Their numbers; what lies between counts, reported or not.
    """

    comm: str
    n_ranks: int
    nodes: frozenset[str]
    wall_ns: tuple[int, int]
    entry_ns: tuple[int, int]
    seq: tuple[int, int]


class Charge(NamedTuple):
    """A cost record of the node: when it was reported, GPU time that others waited, money where a price is known."""

    wall_ns: int
    gpu_s: float
    amount: float | None
    currency: str


@dataclass(frozen=True, slots=True)
class ActedEpisode:
    """What the records tell of a culprit, an action on its node, and its job.

    Attributes:
        done_ns: When the action took effect.
        job: The job at that time.
        before: The culprit's operations from its onset to the action, in parts (`PACE_PARTS`) or whole.
        after: Operations of the rank with the same number after the action, in the whole cluster.
        charges: Of the culprit, since its onset.
        n_repeated: Operations of ``after`` that had been done before; None where nobody knows.
    """

    done_ns: int
    job: JobExtent
    before: Sequence[OpStretch]
    after: Sequence[OpStretch]
    charges: Sequence[Charge] = ()
    n_repeated: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingsEstimate:
    """What an action was worth. GPU time in seconds; None is not known.

    Attributes:
        n_gpus: Of the job.
        lost_gpu_s: What others waited for the culprit until the action took effect, by Fleet's cost records.
        lost_gpu_s_per_s: The same for each second from the onset to the action.
        still_lost_gpu_s: What they waited for it afterwards.
        would_have_lost_gpu_s: What they would have waited for it afterwards.
        until_ns: The last operation that was reported: the job's end, or how far it is.
        standstill_gpu_s: Time of the job's GPUs from the last operation before to the first one after a restart.
        took_s: From the last operation before the action to the last that is known.
        would_have_taken_s: The same operations at the pace before the action.
        saved_gpu_s: The difference, of all GPUs of the job; negative where the action cost more than it saved.
        saved_error_gpu_s: Its standard error, as far as it comes from a pace that varied before the action.
        amount: The same in money, at the price of the GPUs that waited.
        currency: Of ``amount``.
        unknown: Why what was saved is not known; empty where it is.
    """

    n_gpus: int | None = None
    lost_gpu_s: float | None = None
    lost_gpu_s_per_s: float | None = None
    still_lost_gpu_s: float | None = None
    would_have_lost_gpu_s: float | None = None
    until_ns: int | None = None
    standstill_gpu_s: float | None = None
    took_s: float | None = None
    would_have_taken_s: float | None = None
    saved_gpu_s: float | None = None
    saved_error_gpu_s: float | None = None
    amount: float | None = None
    currency: str = ""
    unknown: str = ""


class _Pace(NamedTuple):
    """Operations from the onset to the action, or to the end of the run that it ended.

    Attributes:
        n_ops: Without those of the beginning; not whole, because it may end between two.
        span_ns: Their time.
        whole_ns: The same, with the beginning.
        error: Standard error of their number in that time, as a part of it.
    """

    n_ops: float
    span_ns: float
    whole_ns: int
    error: float


class _Afterwards(NamedTuple):
    """The job after the action.

    Attributes:
        n_ops: New operations.
        passed_ns: What they took, with all that stood still.
        standstill_ns: The part that stood still.
        resumed_ns: When the first of them was reported.
        until_ns: When the last of them was.
    """

    n_ops: int
    passed_ns: int
    standstill_ns: int
    resumed_ns: int
    until_ns: int


def estimate_savings(acted: ActedEpisode) -> SavingsEstimate:
    """What an action saved, as far as the records tell."""
    ended, run = _split_runs(acted)
    afterwards = _start_again(acted, ended, run) if run else _go_on(acted, ended)
    pace = _find_pace([*acted.before, *ended] if run else acted.before)
    resumed_ns = acted.done_ns if afterwards is None else afterwards.resumed_ns
    lag_ns = _LAST_CHARGE_LAG_NS if run else _CHARGE_LAG_NS
    lost_s, still_s = _sum_charges(acted, resumed_ns + lag_ns)
    has_pace = pace.n_ops >= _MIN_OPS
    rate = lost_s * NS_PER_S / pace.whole_ns if lost_s is not None and has_pace else None
    known = SavingsEstimate(
        n_gpus=acted.job.n_gpus,
        lost_gpu_s=lost_s,
        lost_gpu_s_per_s=rate,
        still_lost_gpu_s=still_s,
        unknown=_say_what_is_missing(acted, pace, afterwards),
    )
    if known.unknown or afterwards is None or acted.job.n_gpus is None:
        return known
    n_new = afterwards.n_ops - (acted.n_repeated or 0)
    would_s = n_new * pace.span_ns / pace.n_ops / NS_PER_S
    took_s = afterwards.passed_ns / NS_PER_S
    saved_s = acted.job.n_gpus * (would_s - took_s)
    amount, currency = _price(acted.charges, saved_s)
    return replace(
        known,
        would_have_lost_gpu_s=None if rate is None else rate * would_s,
        until_ns=afterwards.until_ns,
        standstill_gpu_s=acted.job.n_gpus * afterwards.standstill_ns / NS_PER_S,
        took_s=took_s,
        would_have_taken_s=would_s,
        saved_gpu_s=saved_s,
        saved_error_gpu_s=acted.job.n_gpus * would_s * pace.error,
        amount=amount,
        currency=currency,
    )


def _say_what_is_missing(acted: ActedEpisode, pace: _Pace, afterwards: _Afterwards | None) -> str:
    if acted.job.n_gpus is None:
        return "the GPUs of the job are not known: no operations of it were kept from before the action"
    if pace.n_ops < _MIN_OPS:
        known = (
            f"{pace.n_ops:.0f} operations of the culprit are known between its onset and the action"
        )
        return f"{known}, the first quarter of that time left out: too few for a pace"
    if afterwards is None:
        return "no operation of the job is known after the action"
    return ""


def _sum_charges(acted: ActedEpisode, until_ns: int) -> tuple[float | None, float | None]:
    """GPU-seconds charged until the job went on, and afterwards.

    Nobody waits while the job stands still: what is charged then was waited before.
    """
    if not acted.charges:
        return None, None
    lost_s = sum(one.gpu_s for one in acted.charges if one.wall_ns < until_ns)
    return lost_s, sum(one.gpu_s for one in acted.charges if one.wall_ns >= until_ns)


def _price(charges: Sequence[Charge], gpu_s: float) -> tuple[float | None, str]:
    """GPU time in money at the price that waiting was charged with; None without one, or with two currencies."""
    priced = [one for one in charges if one.amount is not None]
    paid_s = sum(one.gpu_s for one in priced)
    if paid_s <= 0 or len({one.currency for one in priced}) != 1:
        return None, ""
    return gpu_s * sum(one.amount or 0.0 for one in priced) / paid_s, priced[0].currency


def _find_pace(stretches: Sequence[OpStretch]) -> _Pace:
    if not stretches:
        return _Pace(0, 0, 0, 0)
    begin_ns = min(one.entry_ns[0] for one in stretches)
    whole_ns = max(one.entry_ns[1] for one in stretches) - begin_ns
    edges = np.linspace(_UNSETTLED * whole_ns, whole_ns, _N_PIECES + 1)
    reached = np.zeros(len(edges))
    for comm in {one.comm for one in stretches}:
        own = [one for one in stretches if one.comm == comm]
        moments = sorted(ns - begin_ns for one in own for ns in one.entry_ns)
        reached += np.interp(edges, moments, sorted(seq for one in own for seq in one.seq))
    n_ops = reached[-1] - reached[0]
    deviation = np.diff(reached).std(ddof=1) * _N_PIECES**0.5
    return _Pace(
        float(n_ops),
        float(edges[-1] - edges[0]),
        whole_ns,
        float(deviation / n_ops) if n_ops else 0.0,
    )


def _split_runs(acted: ActedEpisode) -> tuple[list[OpStretch], list[OpStretch]]:
    """What the run before the action still did after it, and the run that came next; that is empty where it went on.

    The next run is the first one that has as many ranks and other communicators, some of them on nodes of the job.
    """
    if not acted.before:
        return [], []
    known = {one.comm for one in acted.before}
    old = [one for one in acted.after if one.comm in known]
    if max((one.wall_ns[1] for one in old), default=0) > acted.done_ns + _ENDING_NS:
        return old, []
    n_ranks = max(one.n_ranks for one in acted.before)
    fresh = [one for one in acted.after if one.comm not in known and one.nodes & acted.job.nodes]
    begin_ns, end_ns = min(
        (one.wall_ns for one in fresh if one.n_ranks == n_ranks), default=(0, -1)
    )
    return old, [one for one in fresh if one.wall_ns[0] <= end_ns and one.wall_ns[1] >= begin_ns]


def _start_again(
    acted: ActedEpisode, ended: Sequence[OpStretch], run: Sequence[OpStretch]
) -> _Afterwards:
    here_ns = max(one.wall_ns[1] for one in (*acted.before, *ended))
    end_ns = max(one.wall_ns[1] for one in run)
    worked_ns = max(one.entry_ns[1] for one in run) - min(one.entry_ns[0] for one in run)
    return _Afterwards(
        n_ops=sum(one.seq[1] - one.seq[0] + 1 for one in run),
        passed_ns=end_ns - here_ns,
        standstill_ns=max(0, end_ns - here_ns - worked_ns),
        resumed_ns=min(one.wall_ns[0] for one in run),
        until_ns=end_ns,
    )


def _go_on(acted: ActedEpisode, old: Sequence[OpStretch]) -> _Afterwards | None:
    """The job that nobody ended: the same communicators, on the same clock."""
    if not old:
        return None
    last: dict[str, int] = {}
    for one in acted.before:
        last[one.comm] = max(one.seq[1], last.get(one.comm, 0))
    here_ns = max(one.entry_ns[1] for one in acted.before)
    return _Afterwards(
        n_ops=sum(one.seq[1] - last[one.comm] for one in old),
        passed_ns=max(one.entry_ns[1] for one in old) - here_ns,
        standstill_ns=0,
        resumed_ns=acted.done_ns,
        until_ns=max(one.wall_ns[1] for one in old),
    )
