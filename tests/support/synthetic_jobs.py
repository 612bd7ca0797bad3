"""Synthetic training jobs: a one-forward-one-backward pipeline whose waits follow from its dependencies.

A job is described by what each worker needs for each microbatch; when everything starts and who waits for whom is
computed through the dependency graph, so that an injected slowdown delays exactly those whom it would delay. The
result is rows as a recording has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from ingero.job_traces.model import JobTrace, TraceRows
from ingero.model.arrays import FloatArray
from ingero.units import NS_PER_S

Noise = Callable[[np.random.Generator, tuple[int, ...]], FloatArray]

OPTYPES: Final = (
    "forward-compute",
    "backward-compute",
    "forward-send",
    "forward-recv",
    "backward-send",
    "backward-recv",
    "params-all-gather",
    "grads-reduce-scatter",
    "optimizer",
)
_RESTART_NS: Final = 30 * NS_PER_S
_OPTYPE: Final = {name: at for at, name in enumerate(OPTYPES)}


def normal_noise(sigma: float) -> Noise:
    """Factors around 1 with a normal spread."""
    return lambda rng, shape: np.maximum(1.0 + sigma * rng.standard_normal(shape), 0.05)


def heavy_noise(sigma: float) -> Noise:
    """Factors around 1 with Student's tails (3 degrees of freedom)."""
    return lambda rng, shape: np.maximum(1.0 + sigma * rng.standard_t(3, shape), 0.05)


def skewed_noise(sigma: float) -> Noise:
    """Factors from 1 upwards, exponentially rare."""
    return lambda rng, shape: 1.0 + sigma * rng.exponential(1.0, shape)


@dataclass(frozen=True, slots=True)
class JobShape:
    """What a healthy job looks like.

    Attributes:
        n_dp: Data-parallel replicas.
        n_stages: Pipeline stages.
        n_microbatches: Per replica and step.
        n_steps: Steps to run.
        forward_s: Of one microbatch; backward takes twice as long.
        transfer_s: Of one send.
        collective_s: Of the parameters' all-gather and the gradients' reduce-scatter.
    """

    n_dp: int = 4
    n_stages: int = 4
    n_microbatches: int = 16
    n_steps: int = 10
    forward_s: float = 0.1
    transfer_s: float = 0.001
    collective_s: float = 0.05

    @property
    def work_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of a table of work: (step, dp, stage, direction, microbatch); direction 0 is forward."""
        return (self.n_steps, self.n_dp, self.n_stages, 2, self.n_microbatches)


def build_work(shape: JobShape, noise: Noise, rng: np.random.Generator) -> FloatArray:
    """Seconds of compute of each microbatch on each worker, shape ``shape.work_shape``: healthy and noisy."""
    work = shape.forward_s * noise(rng, shape.work_shape)
    work[:, :, :, 1] *= 2.0
    return work


def rotate_heavy_sequences(work: FloatArray, sigma: float, rng: np.random.Generator) -> FloatArray:
    """The same job with sequences of uneven length: a microbatch is heavy on every stage, there and back."""
    n_steps, n_dp, _, _, n_microbatches = work.shape
    weight = np.exp(sigma * rng.standard_normal((n_steps, n_dp, 1, 1, n_microbatches)))
    return work * weight


def schedule_1f1b(stage: int, n_stages: int, n_microbatches: int) -> list[tuple[int, int]]:
    """The order in which a stage works: (direction, microbatch), warm-up, steady state, cool-down."""
    n_warm = min(n_stages - 1 - stage, n_microbatches)
    order = [(0, mb) for mb in range(n_warm)]
    for mb in range(n_microbatches - n_warm):
        order += [(0, mb + n_warm), (1, mb)]
    return order + [(1, mb) for mb in range(n_microbatches - n_warm, n_microbatches)]


class _Recorder:
    """Rows in the making."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, float, float]] = []

    def add(self, where: tuple[int, int, int], name: str, start_s: float, end_s: float) -> None:
        """One operation of worker (dp, stage) in a step; ``where`` is (dp, stage, step)."""
        self.rows.append((*where, _OPTYPE[name], start_s, end_s - start_s))

    def build(self) -> TraceRows:
        """Everything recorded, in the order of a file."""
        dp, stage, step, optype = np.array([row[:4] for row in self.rows], np.int64).T
        start_s, duration_s = np.array([row[4:] for row in self.rows], np.float64).T
        return TraceRows(dp, stage, step, optype, start_s, duration_s, OPTYPES)


def run_job(
    shape: JobShape, work: FloatArray, link_factor: FloatArray | None = None, first_step: int = 0
) -> TraceRows:
    """Run the job and record it.

    Args:
        shape: See `JobShape`.
        work: Seconds of compute, shape ``shape.work_shape``.
        link_factor: How many times slower than usual each replica's link between stage s and s + 1 is, shape
            (n_dp, n_stages − 1); None is all ones.
        first_step: Number of the first step.
    """
    recorder = _Recorder()
    links = np.ones((shape.n_dp, shape.n_stages - 1)) if link_factor is None else link_factor
    for step in range(shape.n_steps):
        gathered = shape.collective_s
        ends = np.zeros((shape.n_dp, shape.n_stages))
        for dp in range(shape.n_dp):
            for stage in range(shape.n_stages):
                recorder.add((dp, stage, first_step + step), "params-all-gather", 0.0, gathered)
            ends[dp] = _run_replica(
                shape,
                work[step, dp],
                links[dp] * shape.transfer_s,
                (recorder, dp, first_step + step, gathered),
            )
        for stage in range(shape.n_stages):
            done = ends[:, stage].max() + shape.collective_s
            for dp in range(shape.n_dp):
                where = (dp, stage, first_step + step)
                recorder.add(where, "grads-reduce-scatter", float(ends[dp, stage]), done)
                recorder.add(where, "optimizer", done, done + 0.01)
    return recorder.build()


def _run_replica(
    shape: JobShape,
    work: FloatArray,
    transfer_s: FloatArray,
    place: tuple[_Recorder, int, int, float],
) -> FloatArray:
    """One step of one replica; returns when each stage is done, shape (n_stages,)."""
    replica = _Replica(shape, work, transfer_s, place)
    while any(replica.advance(stage) for stage in range(shape.n_stages)):
        pass
    return replica.now


class _Replica:
    """One replica's pipeline during one step: what each stage does next, and what has been sent to it."""

    def __init__(
        self,
        shape: JobShape,
        work: FloatArray,
        transfer_s: FloatArray,
        place: tuple[_Recorder, int, int, float],
    ) -> None:
        self._recorder, self._dp, self._step, begin = place
        self._work, self._transfer_s, self._n_stages = work, transfer_s, shape.n_stages
        self.now = np.full(shape.n_stages, begin)
        self._sent: dict[tuple[int, int, int], float] = {}
        self._todo = [
            schedule_1f1b(stage, shape.n_stages, shape.n_microbatches)[::-1]
            for stage in range(shape.n_stages)
        ]

    def advance(self, stage: int) -> bool:
        """Work a stage off until it lacks input; returns whether it did anything."""
        has_worked = False
        while self._todo[stage]:
            direction, mb = self._todo[stage][-1]
            if not self._receive(stage, direction, mb):
                break
            name = ("forward-compute", "backward-compute")[direction]
            self._spend(stage, name, float(self._work[stage, direction, mb]))
            target = stage - 1 if direction else stage + 1
            if 0 <= target < self._n_stages:
                self._sent[target, direction, mb] = float(self.now[stage])
                name = ("forward-send", "backward-send")[direction]
                self._spend(stage, name, float(self._transfer_s[min(stage, target)]))
            self._todo[stage].pop()
            has_worked = True
        return has_worked

    def _receive(self, stage: int, direction: int, mb: int) -> bool:
        """Take the input of a microbatch; False when it has not been sent yet."""
        source = stage + 1 if direction else stage - 1
        if not 0 <= source < self._n_stages:
            return True
        sent = self._sent.get((stage, direction, mb))
        if sent is None:
            return False
        wait_s = max(sent - float(self.now[stage]), 0.0)
        name = ("forward-recv", "backward-recv")[direction]
        self._spend(stage, name, wait_s + float(self._transfer_s[min(stage, source)]))
        return True

    def _spend(self, stage: int, name: str, duration_s: float) -> None:
        begin = float(self.now[stage])
        self._recorder.add((self._dp, stage, self._step), name, begin, begin + duration_s)
        self.now[stage] = begin + duration_s


def follow(first: JobTrace, second: JobTrace, nodes: Mapping[str, str] | None = None) -> JobTrace:
    """A job that is restarted: again half a minute after its end, on new communicators from sequence number 0.

    Args:
        first: Its life before.
        second: Its life after; workers that it does not have are gone.
        nodes: Other nodes that stand in for some of the second life, by the name of the node they replace.
    """
    gap_ns = int(first.steps["end_ns"][-1]) + _RESTART_NS
    runs = {
        worker: list(of_worker) for worker, of_worker in zip(first.workers, first.runs, strict=True)
    }
    for of_worker in second.runs:
        for run in of_worker:
            node = run.rank.node_id
            rank = replace(run.rank, node_id=(nodes or {}).get(node, node))
            ops = run.ops.copy()
            ops["entry_ns"] += gap_ns
            again = replace(run, rank=rank, comm=f"{run.comm} again", ops=ops)
            runs.setdefault(rank, []).append(again)
    steps = second.steps.copy()
    steps["begin_ns"] += gap_ns
    steps["end_ns"] += gap_ns
    return replace(
        first,
        workers=tuple(runs),
        runs=tuple(map(tuple, runs.values())),
        steps=np.concatenate([first.steps, steps]),
    )


def write_trace(rows: TraceRows, path: Path) -> None:
    """Write rows as a StragglerAnalysis recording: the six columns that a reader needs, typed as there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({
        "dp_rank": pa.array(rows.dp, pa.int8()),
        "stage": pa.array(rows.stage, pa.int8()),
        "step": pa.array(rows.step, pa.int64()),
        "optype": pa.DictionaryArray.from_arrays(
            pa.array(rows.optype, pa.int8()), pa.array(rows.optypes)
        ),
        "start_ts": pa.array(rows.start_s.astype(np.float32)),
        "duration": pa.array(rows.duration_s.astype(np.float32)),
    })
    pq.write_table(table, path)
