"""What each cluster's ranks reported, waiting to be judged, and what was concluded.

Above the Judge, below the processor. Two threads meet here: pushes append under the lock, the judge thread takes
what waits under it and judges without it. Conclusions are replaced as a whole, so readers need no lock.

Workers that were silent for `NcclConfig.idle_timeout` have no verdict any more. What their waiting cost stands in the
history, until their cluster starts over.

Lossy: caps refuse whole batches and count them. A cluster starts over, which forgets evidence and is counted
(`telemetry.EVICTED`), when it is at its cap of communicators or near that of workers and most of these are silent, and
when its evidence cannot be judged.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeAlias

from ingero.detect.judge import Judge
from ingero.fleet.helpers.caps import CapWatch
from ingero.fleet.processors.collectives import telemetry
from ingero.fleet.processors.collectives.conclusions import (
    QUIET,
    Conclusion,
    VerdictChange,
    join_jobs,
    leave_out,
)
from ingero.fleet.processors.collectives.config import NcclConfig
from ingero.fleet.processors.collectives.cuts import CostCut, CostCuts, DueCut
from ingero.fleet.processors.collectives.lags import LagTracker, PeerLag
from ingero.fleet.processors.collectives.lateness import MIN_LATE_NS, Lateness
from ingero.fleet.processors.collectives.settings import build_settings
from ingero.fleet.processors.collectives.unmet import SILENT, UnmetWorkers
from ingero.model.collectives import CollectiveRun, Worker
from ingero.model.verdicts import Judgement, VerdictKind
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S
from ingero.wire.names import MAX_ID_LENGTH

CAP_QUIET_NS: Final = 20 * NS_PER_S
"""A cap that refused nothing for this long is over."""
_MAX_CAP_CHANGES: Final = 1024
_FAULT_LOG_NS: Final = 60 * NS_PER_S
"""Between two lines about evidence of one cluster that cannot be judged; all are counted."""
_log = logging.getLogger("ingero.fleet.processors.nccl")
_SETTLE_INTERVAL_NS: Final = 5 * NS_PER_S
MAX_HISTORY: Final = 1024
"""Workers of a cluster above which alarms that have cleared are looked for only as often as costs are reported."""
CROWDED: Final = 0.75
"""Part of `NcclConfig.max_workers` from which a cluster starts over once most of its workers are silent."""
_LOST_BY_JUDGE: Final = (
    "stale_ops",
    "unpaired_ops",
    "dropped_ops",
    "refused_workers",
    "late_members",
)


@dataclass(frozen=True, slots=True)
class CapChange:
    """A cap began or ceased to refuse.

    Attributes:
        reason: Which, as `telemetry.REFUSED` has it.
        cluster_id: Whose; empty for the cap on clusters.
        is_on: Whether it began to refuse; False when it ceased.
        n_refused: How often it had refused, at its end.
    """

    reason: str
    cluster_id: str
    is_on: bool
    n_refused: int = 0


class _ArrivedRun(NamedTuple):
    """What waits to be judged, when it arrived, and how long it had waited for this Fleet."""

    run: CollectiveRun
    at_ns: int
    late_ns: int


@dataclass(slots=True)
class _ClusterDetection:
    """One cluster."""

    cluster_id: str
    waiting: list[_ArrivedRun] = field(default_factory=list)
    n_waiting: int = 0
    comm_ops: dict[str, int] = field(default_factory=dict)
    comm_seen_ns: dict[str, int] = field(default_factory=dict)
    seen_ns: int = 0
    lags: LagTracker = field(default_factory=LagTracker)
    judge: Judge | None = None
    generation: int = 0
    lost: dict[str, int] | None = field(default_factory=dict)  # None: counted by the judge before
    kinds: dict[Worker, VerdictKind] = field(default_factory=dict)
    unmet: UnmetWorkers = field(default_factory=UnmetWorkers)
    conclusion: Conclusion | None = None
    history_ns: int = 0
    fault_logged_ns: int | None = None
    lateness: Lateness = field(default_factory=Lateness)
    late_ns: int = 0

    def is_due(self, now_ns: int) -> bool:
        """Whether to judge though nothing arrived: what waits for absent ranks runs out of patience.

        Also after a replay, of which nothing was concluded.
        """
        last = self.conclusion
        return last is None or now_ns - last.judged_ns >= _SETTLE_INTERVAL_NS

    @contextmanager
    def starting_over(self, count: Callable[[float], None], now_ns: int) -> Iterator[None]:
        """Where its evidence cannot be judged it is forgotten and counted, so that other clusters are judged."""
        try:
            yield
        except Exception:  # noqa: BLE001 - one cluster's evidence must not end the judging of all others
            last_ns = self.fault_logged_ns
            if last_ns is None or now_ns - last_ns >= _FAULT_LOG_NS:
                self.fault_logged_ns = now_ns
                _log.exception(
                    "cannot judge what cluster %r reports: it starts over", self.cluster_id
                )
            self.judge = None
            count(1)

    def find_history(
        self, judge: Judge, n_workers: int, now_ns: int, config: NcclConfig
    ) -> Judgement:
        """The verdicts of the whole time; of a large cluster the last ones while they are fresh."""
        last = self.conclusion
        is_kept = last is not None and last.generation == self.generation
        is_fresh = now_ns - self.history_ns < config.cost_interval
        if last is not None and is_kept and is_fresh and n_workers > MAX_HISTORY:
            return last.history
        self.history_ns = now_ns
        return join_jobs(self.cluster_id, judge.judgements(with_history=True))


_Taken: TypeAlias = tuple[_ClusterDetection, list[_ArrivedRun], list[DueCut]]
"""A cluster, what waited to be judged, and where in that its costs are cut."""


class DetectionEngine:
    """Every cluster that reports collectives. Shared by the pipelines that name the processor."""

    def __init__(self, config: NcclConfig, meter: MeterRegistry) -> None:
        self.config = config
        self._lock = threading.Lock()
        self._caps: CapWatch[tuple[str, str]] = CapWatch(CAP_QUIET_NS)
        self._cap_changes: list[CapChange] = []
        self._detections: dict[str, _ClusterDetection] = {}
        self.cuts: defaultdict[str, CostCuts] = defaultdict(CostCuts)
        self._replaying: set[str] = set()
        self._generations = itertools.count(1)  # a cluster that was forgotten comes back as another
        refused = meter.counter(telemetry.REFUSED)
        self.refuse = {
            reason: refused.bound(reason=reason)
            for reason in (
                "bad_record",
                "cluster_cap",
                "communicator_cap",
                "pending_cap",
                "communicator_ops_cap",
                "gauge_cap",
            )
        }
        evicted = meter.counter(telemetry.EVICTED)
        self._evict = {
            what: evicted.bound(what=what)
            for what in ("cluster", "communicators", "workers", "evidence")
        }
        lost = meter.counter(telemetry.JUDGE_LOST)
        self._count_lost = {reason: lost.bound(reason=reason) for reason in _LOST_BY_JUDGE}
        counted = {"all": telemetry.OPS, "late": telemetry.LATE_OPS}
        self._count = {name: meter.counter(spec).bound() for name, spec in counted.items()}

    def conclusions(self) -> dict[str, Conclusion]:
        """The newest conclusion of each cluster. Any thread."""
        return {
            cluster_id: detection.conclusion
            for cluster_id, detection in list(self._detections.items())
            if detection.conclusion is not None
        }

    def lags_of(self, cluster_id: str, comm: str) -> list[PeerLag]:
        """The lags on one communicator; raises KeyError for an unknown one, and for a cluster not judged here."""
        detection = self._get_judged(cluster_id)
        if comm not in detection.comm_seen_ns:
            raise KeyError(comm)
        with self._lock:
            return detection.lags.lags(comm)

    def comms_of(self, cluster_id: str) -> list[str]:
        """Communicators of a cluster; raises KeyError for one that is not judged here."""
        return list(self._get_judged(cluster_id).comm_seen_ns)

    def _get_judged(self, cluster_id: str) -> _ClusterDetection:
        if cluster_id in self._replaying:
            raise KeyError(cluster_id)
        return self._detections[cluster_id]

    def find_late_ns(self) -> dict[str, int]:
        """By cluster of which nothing is concluded for that, how late its evidence is. Any thread."""
        return {
            cluster_id: detection.late_ns
            for cluster_id, detection in list(self._detections.items())
            if detection.late_ns and cluster_id not in self._replaying
        }

    def add(
        self,
        runs: Sequence[CollectiveRun],
        now_ns: int,
        late_ns: Sequence[int] = (),
        *,
        is_replay: bool = False,
    ) -> tuple[int, str]:
        """Take runs to be judged; returns how many were refused and why the last of them was.

        Args:
            runs: From any ranks.
            now_ns: When they arrived.
            late_ns: By run, how long it had to wait for this Fleet; empty when none had to.
            is_replay: Another Fleet took them before, and counted them.
        """
        n_refused, n_ops, n_late_ops, why = 0, 0, 0, ""
        with self._lock:
            for run, late in zip(runs, late_ns or [0] * len(runs), strict=True):
                reason = self._add_one(run, now_ns, late)
                if not reason:
                    n_ops += run.ops.size
                    n_late_ops += run.ops.size if late >= MIN_LATE_NS else 0
                    continue
                n_refused, why = n_refused + 1, reason
                if not is_replay:
                    self.refuse[reason](1)
                    self._note_cap(reason, run.rank.cluster_id, now_ns)
        if not is_replay:
            self._count["all"](n_ops)
            self._count["late"](n_late_ops)
        return n_refused, why

    def begin_replay(self, cluster_id: str, mark_ns: int = 0) -> None:
        """Forget a cluster, and conclude nothing of it until `end_replay`; its evidence is gathered. Any thread.

        Args:
            cluster_id: The cluster.
            mark_ns: The last cut that was reported of its costs; 0 when that is not known.
        """
        with self._lock:
            self.cuts[cluster_id] = CostCuts(mark_ns)
            self._detections.pop(cluster_id, None)
            self._replaying.add(cluster_id)

    def note_stored(self, cluster_id: str, stored_wall_ns: int, now_ns: int) -> None:
        """What comes next of a cluster was stored in its log then. Any thread."""
        with self._lock:
            detection = self._detections.get(cluster_id)
            n_waiting = 0 if detection is None else len(detection.waiting)
            interval_ns = self.config.cost_interval
            self.cuts[cluster_id].note(stored_wall_ns, interval_ns, n_waiting, now_ns)

    def is_replaying(self, cluster_id: str) -> bool:
        """Whether nothing is to be said of a cluster. Any thread."""
        return cluster_id in self._replaying

    def is_behind(self, cluster_id: str) -> bool:
        """Whether half of what may wait to be judged does. Any thread."""
        config = self.config
        with self._lock:
            detection = self._detections.get(cluster_id)
            if detection is None:
                return False
            n_most = max(detection.comm_ops.values(), default=0)
            return (
                2 * detection.n_waiting > config.max_pending_ops
                or 2 * n_most > config.max_communicator_ops
            )

    def end_replay(self, cluster_id: str, kinds: Mapping[Worker, VerdictKind], now_ns: int) -> None:
        """Conclude again; what changed is reported against these verdicts. Any thread."""
        with self._lock:
            self._replaying.discard(cluster_id)
            detection = self._detections.get(cluster_id)
            if detection is not None:
                detection.kinds, detection.lost = dict(kinds), None
            elif kinds:  # without evidence yet; what was said may have to end without any
                self._detections[cluster_id] = _ClusterDetection(
                    cluster_id, kinds=dict(kinds), seen_ns=now_ns
                )

    def take_cap_changes(self, now_ns: int) -> list[CapChange]:
        """Caps that began or ceased to refuse since the last call."""
        with self._lock:
            changes, self._cap_changes = self._cap_changes, []
            changes += [
                CapChange(reason, cluster_id, is_on=False, n_refused=n_refused)
                for (reason, cluster_id), n_refused in self._caps.take_ended(now_ns)
            ]
        return changes

    def _note_cap(self, reason: str, cluster_id: str, now_ns: int) -> None:
        if reason == "bad_record":
            return
        where = "" if reason == "cluster_cap" else cluster_id
        is_new = self._caps.refuse((reason, where), now_ns)
        if is_new and len(self._cap_changes) < _MAX_CAP_CHANGES:
            self._cap_changes.append(CapChange(reason, where, is_on=True))

    def _add_one(self, run: CollectiveRun, now_ns: int, late_ns: int) -> str:
        config = self.config
        rank = run.rank
        if max(len(rank.cluster_id), len(rank.node_id), len(rank.job)) > MAX_ID_LENGTH:
            return "bad_record"
        detection = self._detections.get(run.rank.cluster_id)
        if detection is None:
            cluster_id = run.rank.cluster_id
            n_judged = sum(one not in self._replaying for one in self._detections)
            if cluster_id not in self._replaying and n_judged >= config.max_clusters:
                return "cluster_cap"
            detection = self._detections[cluster_id] = _ClusterDetection(cluster_id)
        if run.comm not in detection.comm_seen_ns and not self._has_room(detection, now_ns):
            return "communicator_cap"
        n_ops = int(run.ops.size)
        if detection.n_waiting + n_ops > config.max_pending_ops:
            return "pending_cap"
        if detection.comm_ops.get(run.comm, 0) + n_ops > config.max_communicator_ops:
            return "communicator_ops_cap"
        detection.comm_ops[run.comm] = detection.comm_ops.get(run.comm, 0) + n_ops
        detection.comm_seen_ns[run.comm] = detection.seen_ns = now_ns
        detection.waiting.append(_ArrivedRun(run, now_ns, late_ns))
        detection.n_waiting += n_ops
        detection.lateness.note(rank.worker, late_ns, now_ns)
        return ""

    def _has_room(self, detection: _ClusterDetection, now_ns: int) -> bool:
        """Whether a new communicator fits; a cluster whose communicators are mostly silent starts over."""
        if len(detection.comm_seen_ns) < self.config.max_communicators:
            return True
        cutoff_ns = now_ns - self.config.idle_timeout
        live = {comm: seen for comm, seen in detection.comm_seen_ns.items() if seen >= cutoff_ns}
        if 2 * len(live) > len(detection.comm_seen_ns):
            return False
        self._evict["communicators"](len(detection.comm_seen_ns) - len(live))
        detection.comm_seen_ns = live
        detection.judge, detection.lags = None, LagTracker()
        return True

    def judge(self, now_ns: int) -> dict[str, Conclusion]:
        """Judge what waits; the clusters that had something, with their conclusions. One thread at a time."""
        with self._lock:
            self._drop_silent(now_ns)
            taken: list[_Taken] = []
            replayed: list[_Taken] = []
            for detection in self._detections.values():
                detection.late_ns = detection.lateness.find_late_ns(now_ns)
                is_silent = detection.late_ns > 0 or detection.cluster_id in self._replaying
                if detection.late_ns and detection.conclusion is not None:
                    # Its changes were reported.
                    detection.conclusion = replace(detection.conclusion, changes=())
                if not is_silent:
                    self.cuts[detection.cluster_id].note_silence(
                        self.config.cost_interval, len(detection.waiting), now_ns
                    )
                if detection.waiting or (detection.is_due(now_ns) and not is_silent):
                    due = self.cuts[detection.cluster_id].take_due(
                        self.config.cost_interval, now_ns
                    )
                    (replayed if is_silent else taken).append((detection, detection.waiting, due))
                    detection.waiting, detection.n_waiting, detection.comm_ops = [], 0, {}
        for detection, waiting, due in replayed:
            with detection.starting_over(self._evict["evidence"], now_ns):
                # As of the log's own time: what comes next arrived right after it.
                self._observe(detection, waiting, due, waiting[-1].at_ns)
        found = {}
        for detection, waiting, due in taken:
            before = detection.conclusion
            with detection.starting_over(self._evict["evidence"], now_ns):
                conclusion = self._judge_one(detection, waiting, due, now_ns)
                # What arrived earlier is judged once its reorder window is over: a change without a push.
                if waiting or before is None or before.judgement != conclusion.judgement:
                    found[detection.cluster_id] = conclusion
        return found

    def _observe(
        self,
        detection: _ClusterDetection,
        waiting: Sequence[_ArrivedRun],
        due: Sequence[DueCut],
        now_ns: int,
    ) -> Judge:
        """Give a cluster's Judge what waits, and cut its costs where that is due."""
        judge = detection.judge
        if judge is not None and _is_crowded(judge, self.config, now_ns):
            judge = None
            self._evict["workers"](1)
        if judge is None:
            detection.lost = {}
            detection.generation = next(self._generations)
            judge = detection.judge = Judge(build_settings(self.config))
        cuts, at = self.cuts[detection.cluster_id], 0
        for place_ns, n_before, arrived_ns in due:
            _give(judge, waiting[at:n_before])
            at = n_before
            judge.settle(arrived_ns)
            history = join_jobs(detection.cluster_id, judge.judgements(with_history=True))
            cuts.add(CostCut(place_ns, history, detection.generation))
        _give(judge, waiting[at:])
        judge.settle(now_ns)
        return judge

    def _judge_one(
        self,
        detection: _ClusterDetection,
        waiting: Sequence[_ArrivedRun],
        due: Sequence[DueCut],
        now_ns: int,
    ) -> Conclusion:
        judge, cuts = (
            self._observe(detection, waiting, due, now_ns),
            self.cuts[detection.cluster_id],
        )
        with self._lock:
            changed = detection.lags.add(one.run for one in waiting)
            lags = tuple(lag for comm in sorted(changed) for lag in detection.lags.lags(comm))
        everybody = join_jobs(detection.cluster_id, judge.judgements())
        history = detection.find_history(judge, len(everybody.verdicts), now_ns, self.config)
        silent = judge.find_silent(now_ns - self.config.idle_timeout)
        judgement, ended = leave_out(everybody, {worker for _, worker in silent})
        lost = judgement.counts if detection.lost is None else detection.lost
        for reason, count in self._count_lost.items():
            count(judgement.counts.get(reason, 0) - lost.get(reason, 0))
        detection.lost = dict(judgement.counts)
        kinds = {v.rank.worker: v.kind for v in judgement.verdicts}
        changes = tuple(
            VerdictChange(detection.kinds.get(v.rank.worker), v)
            for v in judgement.verdicts
            if detection.kinds.get(v.rank.worker) is not v.kind
        ) + tuple(
            VerdictChange(before, replace(v, kind=VerdictKind.UNKNOWN, reason=SILENT))
            for v in ended
            if (before := detection.kinds.pop(v.rank.worker, None)) not in {None, *QUIET}
        )
        unmet, ends = detection.unmet.take(
            detection.cluster_id, detection.kinds, kinds, self.config.idle_timeout, now_ns
        )
        changes += ends
        detection.kinds = kinds | dict(list(unmet.items())[-self.config.max_workers :])
        detection.conclusion = Conclusion(
            judgement, history, lags, changes, now_ns, judge.alpha, detection.generation,
            cuts.is_dated, cuts.newest,
        )  # fmt: skip
        return detection.conclusion

    def _drop_silent(self, now_ns: int) -> None:
        """Forget clusters that are silent, once the ends of their verdicts are reported."""
        for cluster_id, detection in list(self._detections.items()):
            silent_ns = now_ns - detection.seen_ns
            has_open = any(kind not in QUIET for kind in detection.kinds.values())
            limit_ns = self.config.idle_timeout * (2 if has_open else 1)
            if silent_ns > limit_ns and cluster_id not in self._replaying:
                del self._detections[cluster_id]
                self.cuts.pop(cluster_id, None)
                self._evict["cluster"](1)


def _give(judge: Judge, waiting: Sequence[_ArrivedRun]) -> None:
    for run, at_ns, late_ns in waiting:
        judge.observe([run], at_ns, late_ns)


def _is_crowded(judge: Judge, config: NcclConfig, now_ns: int) -> bool:
    """Whether there is hardly room for new workers, because of workers that report no more."""
    if judge.n_workers < CROWDED * config.max_workers:
        return False
    return 2 * len(judge.find_silent(now_ns - config.idle_timeout)) > judge.n_workers
