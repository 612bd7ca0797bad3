"""The ``nccl`` processor in its pipelines: reads records in pushes and passes everything on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from ingero.errors import RetryableError
from ingero.fleet.component import (
    AdminRoutes,
    ComponentId,
    Host,
    Learner,
    PushContext,
    QuestionSource,
    RankLevels,
    Stability,
)
from ingero.fleet.consumer import Batch, Consumer
from ingero.fleet.factory import ProcessorFactory
from ingero.fleet.processors.collectives import telemetry
from ingero.fleet.processors.collectives.config import NcclConfig
from ingero.fleet.processors.collectives.evaluation import Evaluation, EvaluationThread
from ingero.fleet.processors.collectives.gauges import date_by_arrival, has_gauges
from ingero.fleet.processors.collectives.lateness import MIN_LATE_NS
from ingero.fleet.processors.collectives.levels import SlowdownLevels
from ingero.fleet.processors.collectives.pages import CollectivesPages
from ingero.fleet.processors.collectives.state import CollectivesState
from ingero.model.collectives import Rank
from ingero.model.diagnosis import Diagnosis, PeerWork
from ingero.model.progress import RankProgress
from ingero.otlp.codec import read_log_entries
from ingero.otlp.names import Signal
from ingero.units import NS_PER_S
from ingero.wire.collectives import CollectiveRead
from ingero.wire.diagnosis import DIAGNOSIS_EVENT, build_diagnosis_read
from ingero.wire.log_records import RecordsRead
from ingero.wire.names import COLLECTIVE_EVENT, PROGRESS_EVENT
from ingero.wire.peer_work import WORK_EVENT, build_peer_work_read
from ingero.wire.progress import build_progress_read

_BEHIND_NS: Final = 2 * NS_PER_S
_AnswerT = TypeVar("_AnswerT", Diagnosis, PeerWork)


class CollectivesProcessor:
    """The processor in one pipeline."""

    def __init__(
        self, component: ComponentId, config: NcclConfig, signal: Signal, following: Consumer
    ) -> None:
        self._id = component
        self._config = config
        self._signal = signal
        self._following = following
        self._state: CollectivesState | None = None
        self._host: Host | None = None
        self._evaluation: Evaluation | None = None
        self._thread: EvaluationThread | None = None

    async def start(self, host: Host) -> None:
        """Join or make the shared state; the first instance under this host also evaluates."""
        state = host.shared((str(self._id), "state"), lambda: CollectivesState(self._config, host))
        self._state, self._host = state, host
        if state.host is not host:
            state.host = host
            state.downstream.begin(host, str(self._id))
            state.engine.config = self._config
            self._evaluation = Evaluation(state, host)
            self._thread = EvaluationThread(self._evaluation.run, host)
            host.offer(AdminRoutes, CollectivesPages(state, host))
            host.offer(RankLevels, SlowdownLevels(state.engine))
            host.offer(QuestionSource, state.diagnoses)
            host.offer(Learner, state)
            host.every(self._config.judge_interval, self._thread.kick)
        state.downstream.join(self._signal, self._following)

    async def stop(self) -> None:
        """Let an evaluation that is running finish."""
        if self._thread is not None and self._evaluation is not None:
            await self._thread.stop()
            self._evaluation.finish()

    def consume(self, batch: Batch) -> None:
        """Read what concerns this processor, and pass everything on."""
        state, host = self._state, self._host
        assert state is not None
        assert host is not None
        if batch.signal is Signal.LOGS:
            collectives = CollectiveRead()
            progress, diagnoses = build_progress_read(), build_diagnosis_read()
            work = build_peer_work_read()
            read_log_entries(
                batch.export,
                {
                    PROGRESS_EVENT: progress,
                    COLLECTIVE_EVENT: collectives,
                    DIAGNOSIS_EVENT: diagnoses,
                    WORK_EVENT: work,
                },
            )
            now_ns = host.clock.mono_ns()
            _give_way(collectives, state)
            if not batch.push.is_replay:  # who asked has taken the answer
                _take_answers(diagnoses, state.diagnoses.take, batch.push, state)
                _take_answers(work, state.diagnoses.take_work, batch.push, state)
            _take_progress(progress, batch.push, state, now_ns)
            _take_collectives(collectives, batch.push, state, now_ns)
        elif (
            batch.signal is Signal.METRICS and not batch.push.is_replay and has_gauges(batch.export)
        ):
            state.gauges.add(batch.export, batch.push.cluster_hint, host.clock.mono_ns())
            dated = date_by_arrival(batch.export, batch.received_wall_ns)
            if dated is not batch.export:
                batch = Batch(batch.signal, dated, batch.received_wall_ns, batch.push)
        self._following.consume(batch)


def _give_way(read: CollectiveRead, state: CollectivesState) -> None:
    """Late evidence waits at its agents while much of a cluster waits to be judged. Raises RetryableError."""
    late = {
        run.rank.cluster_id
        for run, ns in zip(read.runs, read.late_ns, strict=True)
        if ns >= MIN_LATE_NS
    }
    if any(state.engine.is_behind(cluster_id) for cluster_id in late):
        raise RetryableError(
            "late evidence waits for what came before it", retry_after_ns=_BEHIND_NS
        )


def _take_progress(
    read: RecordsRead[RankProgress], push: PushContext, state: CollectivesState, now_ns: int
) -> None:
    _note_bad(push, state, read.n_refused, read.first_problem)
    if read.found:
        _note_sender(push, read.found[0].rank)
        state.progress.add(read.found, now_ns)


def _take_answers(
    read: RecordsRead[_AnswerT],
    take: Callable[[Iterable[_AnswerT]], tuple[int, str]],
    push: PushContext,
    state: CollectivesState,
) -> None:
    """Hand answers to our questions on, and let the push's answer say what is refused."""
    if read.n_refused:
        state.diagnoses.count["refused"](read.n_refused)
        push.n_rejected += read.n_refused
        push.rejected_why = read.first_problem
    if read.found:
        _note_sender(push, read.found[0].rank)
        n_refused, why = take(read.found)
        if n_refused:
            push.n_rejected += n_refused
            push.rejected_why = why


def _take_collectives(
    read: CollectiveRead, push: PushContext, state: CollectivesState, now_ns: int
) -> None:
    _note_bad(push, state, read.n_refused, read.first_problem)
    if read.runs:
        _note_sender(push, read.runs[0].rank)
        moving = [
            (run, ns) for run, ns in zip(read.runs, read.late_ns, strict=True) if ns < MIN_LATE_NS
        ]
        state.progress.note_moving([run for run, _ in moving], now_ns, [ns for _, ns in moving])
        n_refused, why = state.engine.add(read.runs, now_ns, read.late_ns, is_replay=push.is_replay)
        if n_refused:
            push.n_rejected += n_refused
            push.rejected_why = f"collective batches not taken: {why}"


def _note_bad(push: PushContext, state: CollectivesState, n_refused: int, why: str) -> None:
    """Count records that cannot be read, and let the answer say so."""
    if n_refused:
        state.engine.refuse["bad_record"](0 if push.is_replay else n_refused)
        push.n_rejected += n_refused
        push.rejected_why = why


def _note_sender(push: PushContext, rank: Rank) -> None:
    push.cluster_id, push.node_id = rank.cluster_id, rank.node_id


FACTORY = ProcessorFactory(
    type="nccl",
    config=NcclConfig,
    description="Names the rank that others wait for, who waited, and what it cost, from collective records.",
    signals=frozenset({Signal.METRICS, Signal.LOGS}),
    stability=Stability.BETA,
    metrics=telemetry.METRICS,
    create=CollectivesProcessor,
)
