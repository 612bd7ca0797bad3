"""The data sets: AR as recorded, and jobs made from a healthy AR by slowing something down and replaying the graph.

A data set is a function from a `Source` to its cases and one line in ``DATASETS``. Each case says what is true of
it; no method sees that.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from benchmarks.detect.graph import COMPUTE, Graph
from tests.support.synthetic_jobs import follow

from ingero.job_traces.convert import build_job_trace
from ingero.job_traces.model import TraceRows
from ingero.job_traces.readers import find_packaged, read_straggler_rows


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        dataset: Name of the data set.
        trace: What agents would report.
        slow: Workers (dp, stage) that are slower, and by what factor.
        onset_s: When that begins on the trace's timeline.
        expect: "culprit", "drag", "none", or the verdict that should stand instead of an alarm.
        is_compared: Every method is asked; else only the winner, whose figures deserve the narrower intervals.
    """

    dataset: str
    trace: object
    slow: dict = field(default_factory=dict)
    onset_s: float = 0.0
    expect: str = "none"
    is_compared: bool = True


@dataclass(frozen=True)
class Change:
    """What happens to a job: the factors of compute by row, and seconds added to its meetings."""

    dataset: str
    factor: object  # shape (n_rows,)
    slow: dict = field(default_factory=dict)
    onset: int = -1  # row of the recording at which it begins
    expect: str = "none"
    slower: object = None  # shape (n_meetings,)
    first_step: int = 0
    n_steps: int = 12
    keep: object = None  # mask of rows that are reported
    unsliced: bool = False
    is_compared: bool = True


class Source:
    """AR, and AR as it would have been without its slow worker.

    Args:
        settings: The pre-registered settings.
    """

    def __init__(self, settings):
        self.settings = settings
        self.recorded = read_straggler_rows(find_packaged("AR"))
        graph = Graph(self.recorded)
        self.replay_error = graph.check()
        self.rows = self._heal(graph)
        self.graph = Graph(self.rows)
        self.healthy_error = self.graph.check()
        rows = self.rows
        self.mean_step_s = self._step_s(rows)
        self.saved_s_per_step = self._step_s(self.recorded) - self.mean_step_s
        self.steps, self.step_idx = np.unique(rows.step, return_inverse=True)
        kinds = [rows.optypes.index(name) for name in COMPUTE]
        self.is_compute = np.isin(rows.optype, kinds)
        self.is_backward = rows.optype == kinds[1]
        self.workers = sorted(set(zip(rows.dp.tolist(), rows.stage.tolist(), strict=True)))
        self.n_dp, self.n_stages = int(rows.dp.max()) + 1, int(rows.stage.max()) + 1
        self.microbatch = self._number_microbatches()

    def _heal(self, graph):
        """Scale the slow worker's compute to its peers' median, kind by kind, and replay."""
        rows = self.recorded
        extra = np.zeros((rows.dp.size, 1))
        for name in COMPUTE:
            of_kind = (rows.optype == rows.optypes.index(name)) & (rows.stage == 0)
            mine, theirs = of_kind & (rows.dp == 0), of_kind & (rows.dp != 0)
            ratio = np.median(rows.duration_s[theirs]) / np.median(rows.duration_s[mine])
            extra[mine, 0] = (ratio - 1.0) * rows.duration_s[mine]
        start, duration = graph.replay(extra)
        return rows_with(rows, start[:, 0], duration[:, 0])

    @staticmethod
    def _step_s(rows):
        """Mean length of a step."""
        steps, idx = np.unique(rows.step, return_inverse=True)
        ends = np.zeros(steps.size)
        np.maximum.at(ends, idx, rows.start_s + rows.duration_s)
        return float(ends.mean())

    def _number_microbatches(self):
        """Which microbatch each compute row works on: its ordinal of the kind within worker and step."""
        rows = self.rows
        order = np.lexsort((rows.start_s, rows.optype, rows.stage, rows.dp, rows.step))
        keys = np.stack([rows.step[order], rows.dp[order], rows.stage[order], rows.optype[order]])
        is_new = np.ones(order.size, bool)
        is_new[1:] = (np.diff(keys, axis=1) != 0).any(axis=0)
        first = np.maximum.accumulate(np.where(is_new, np.arange(order.size), 0))
        number = np.empty(order.size, np.int64)
        number[order] = np.arange(order.size) - first
        return number

    def at(self, dp=None, stage=None):
        """Mask of the compute rows of workers."""
        mask = self.is_compute.copy()
        if dp is not None:
            mask &= self.rows.dp == dp
        if stage is not None:
            mask &= self.rows.stage == stage
        return mask

    def build(self, changes):
        """Replay changes, a few at a time; yields cases."""
        rows = self.rows
        for at in range(0, len(changes), 8):
            part = changes[at : at + 8]
            extra = np.stack([(c.factor - 1.0) * rows.duration_s for c in part], axis=1)
            extra[~self.is_compute] = 0.0
            slower = None
            if any(c.slower is not None for c in part):
                none = np.zeros(len(self.graph.meetings))
                slower = np.stack([none if c.slower is None else c.slower for c in part], axis=1)
            start, duration = self.graph.replay(extra, slower)
            for run, change in enumerate(part):
                yield self._cut(change, start[:, run], duration[:, run])

    def _cut(self, change, start, duration):
        rows = rows_with(self.rows, start, duration)
        is_kept = np.ones(rows.dp.size, bool)
        if not change.unsliced:
            is_kept = (self.step_idx >= change.first_step) & (
                self.step_idx < change.first_step + change.n_steps
            )
        if change.keep is not None:
            is_kept &= change.keep
        trace = build_job_trace(rows.where(is_kept), change.dataset, n_gpus_per_worker=4)
        onset_s = 0.0
        if change.onset >= 0:
            step = int(np.searchsorted(trace.steps["step"], rows.step[change.onset]))
            of_step = is_kept & (rows.step == rows.step[change.onset])
            onset_s = float(trace.steps["begin_ns"][step]) / 1e9
            onset_s += float(start[change.onset] - start[of_step].min())
        return Case(change.dataset, trace, change.slow, onset_s, change.expect, change.is_compared)


def rows_with(rows, start_s, duration_s):
    """The same rows at other times."""
    return TraceRows(rows.dp, rows.stage, rows.step, rows.optype, start_s, duration_s, rows.optypes)


# ── Data sets ───────────────────────────────────────────────────────────────


def recorded(source, _rng):
    """AR as its authors published it."""
    yield Case("AR", build_job_trace(source.recorded, "AR", 4), {(0, 0): 2.38}, 0.0, "culprit")


def healthy(source, _rng):
    """AR without its slow worker: all of it, and every slice."""
    one = np.ones(source.rows.dp.size)
    changes = [Change("healthy", one, unsliced=True)]
    changes += [
        Change("healthy", one, first_step=first) for first in range(0, source.steps.size - 12, 4)
    ]
    yield from source.build(changes)


def place(source, rng):
    """A slice of steps and an onset within it: any of its first four steps, at its start or in its middle."""
    n = source.settings["slice_steps"]
    first = int(rng.integers(0, source.steps.size - n + 1))
    return first, first + int(rng.integers(0, 4)), float(rng.choice([0.0, rng.random()]))


def since(source, mask, step, share):
    """The rows of a mask from this share of a step on, and the first of them."""
    rows = source.rows
    here = np.flatnonzero(mask & (source.step_idx == step))
    here = here[np.argsort(rows.start_s[here], kind="stable")]
    first = int(here[int(share * here.size)])
    later = mask & (source.step_idx > step)
    later[here[int(share * here.size) :]] = True
    return later, first


FACTORS = (1.02, 1.05, 1.10, 1.20, 1.30, 1.50, 2.00)
ALARMED = tuple(f"one ×{factor:.2f}" for factor in FACTORS if factor > 1.1)
"""Data sets of one slow worker that has to be alarmed."""


def one_slow(factor):
    """A data set: one healthy worker slower by a factor, from various onsets."""
    expect = "culprit" if factor > 1.1 else "drag" if factor > 1.03 else "none"

    def build(source, rng):
        changes = []
        for run in range(source.settings["runs_per_factor"]):
            first, step, share = place(source, rng)
            worker = source.workers[int(rng.integers(len(source.workers)))]
            mask, onset = since(source, source.at(*worker), step, share)
            changes.append(
                Change(
                    f"one ×{factor:.2f}",
                    np.where(mask, factor, 1.0),
                    {worker: factor},
                    onset,
                    expect,
                    first_step=first,
                    is_compared=run < source.settings["compared_per_factor"],
                )
            )
        yield from source.build(changes)

    return build


def several(name, pick, sizes=(1.2, 1.3, 1.5)):
    """A data set with several slow workers: ``pick(rng)`` says which."""

    def build(source, rng):
        changes = []
        for run in range(source.settings["runs_per_scenario"]):
            factor = sizes[run % len(sizes)]
            first, step, share = place(source, rng)
            if run % 2:
                step, share = first, 0.0
            workers = pick(rng)
            mask = np.zeros(source.rows.dp.size, bool)
            for worker in workers:
                mask |= source.at(*worker)
            mask, onset = since(source, mask, step, share)
            slow = dict.fromkeys(workers, factor)
            factors = np.where(mask, factor, 1.0)
            changes.append(Change(name, factors, slow, onset, "culprit", first_step=first))
        yield from source.build(changes)

    return build


def _two_peers(rng):
    stage, dps = int(rng.integers(4)), rng.permutation(4)[:2]
    return [(int(dp), stage) for dp in dps]


def _adjacent_dp(rng):
    stage, dp = int(rng.integers(4)), int(rng.integers(3))
    return [(dp, stage), (dp + 1, stage)]


def _adjacent_stages(rng):
    stage, dp = int(rng.integers(3)), int(rng.integers(4))
    return [(dp, stage), (dp, stage + 1)]


def fleet_wide(name, expect, draw, keep=None):
    """A data set without a slow worker: ``draw(source, rng)`` gives the factor of every row."""

    def build(source, rng):
        changes = []
        for _ in range(source.settings["runs_per_scenario"]):
            first, _, _ = place(source, rng)
            kept = None if keep is None else keep(source)
            changes.append(
                Change(name, draw(source, rng), expect=expect, first_step=first, keep=kept)
            )
        yield from source.build(changes)

    return build


def _per_microbatch(source, rng):
    factor = rng.lognormal(0, 0.3, (source.n_dp, source.steps.size, 256))
    return factor[source.rows.dp, source.step_idx, np.minimum(source.microbatch, 255)]


def _per_step(source, rng):
    factor = rng.lognormal(0, 0.3, (source.n_dp, source.steps.size))
    return factor[source.rows.dp, source.step_idx]


def _replica(source, rng):
    return np.where(source.rows.dp == rng.integers(4), 1.3, 1.0)


def _stage(source, rng):
    return np.where(source.rows.stage == rng.integers(4), 1.4, 1.0)


def _lasting(source, rng):
    factor = 1.0 + 0.03 * rng.standard_normal((source.n_dp, source.n_stages))
    return factor[source.rows.dp, source.rows.stage]


def _drift(source, rng):
    slope = 0.05 * rng.standard_normal((source.n_dp, source.n_stages))
    share = source.step_idx / source.steps.size
    return 1.0 + np.maximum(slope[source.rows.dp, source.rows.stage], -0.5) * share


def _autocorrelated(source, rng):
    rows = source.rows
    factor = np.ones(rows.dp.size)
    for dp, stage in source.workers:
        here = np.flatnonzero(source.at(dp, stage))
        here = here[np.lexsort((rows.start_s[here], rows.step[here]))]
        noise, value = rng.standard_normal(here.size), 0.0
        for at in range(here.size):
            value = 0.9 * value + np.sqrt(1 - 0.81) * noise[at]
            noise[at] = value
        factor[here] = np.exp(0.05 * noise)
    return factor


def _odd_steps(source, rng):
    """First step twice as long for all (warm-up), and one in seven with a stall of a single worker (a checkpoint)."""
    factor = np.ones(source.rows.dp.size)
    for step in range(0, source.steps.size, 7):
        of_step = source.step_idx == step
        factor[of_step] *= 2.0
        who = source.workers[int(rng.integers(len(source.workers)))]
        last = np.flatnonzero(source.at(*who) & of_step)
        factor[last[np.argmax(source.rows.start_s[last])]] *= 20
    return factor


def _one_stage(source):
    """Rows of stage 1 without its links: a job of four replicas and no pipeline."""
    rows = source.rows
    is_link = np.array([name.endswith(("-send", "-recv")) for name in rows.optypes])
    return (rows.stage == 1) & ~is_link[rows.optype]


def missing_records(source, rng):
    """A slow worker ×1.5 while a tenth of all records, and all of another worker's last steps, never arrive."""
    changes = []
    for _ in range(source.settings["runs_per_scenario"]):
        first, step, _ = place(source, rng)
        who, silent = (source.workers[at] for at in rng.permutation(len(source.workers))[:2])
        mask, onset = since(source, source.at(*who), step, 0.0)
        keep = rng.random(mask.size) > 0.1
        gone = (source.rows.dp == silent[0]) & (source.rows.stage == silent[1])
        keep &= ~(gone & (source.step_idx >= first + 8))
        keep[onset] = True
        factor = np.where(mask, 1.5, 1.0)
        changes.append(
            Change(
                "missing records", factor, {who: 1.5}, onset, "culprit", first_step=first, keep=keep
            )
        )
    yield from source.build(changes)


def slow_link(source, rng):
    """One replica's link between two stages is slower by 30 ms a transfer, both ways."""
    rows, changes = source.graph.rows, []
    for _ in range(source.settings["runs_per_scenario"]):
        first, _, _ = place(source, rng)
        dp, stage = int(rng.integers(4)), int(rng.integers(3))
        slower = np.zeros(len(source.graph.meetings))
        for at, members in enumerate(source.graph.meetings):
            if len(members) != 2:
                continue
            row, other = members[0][1], members[1][1]
            if not rows.optypes[rows.optype[row]].endswith(("-send", "-recv")):
                continue
            ends = {int(rows.stage[row]), int(rows.stage[other])}
            if rows.dp[row] == dp and ends == {stage, stage + 1}:
                slower[at] = 0.03
        one = np.ones(source.rows.dp.size)
        slow = {(dp, stage): 1.0, (dp, stage + 1): 1.0}
        changes.append(Change("slow link", one, slow, -1, "network", slower, first_step=first))
    yield from source.build(changes)


def restarts(source, rng):
    """A slow worker ×1.3 through a restart: new communicators, and in every other run a spare in a healthy peer's place."""
    one = np.ones(source.rows.dp.size)
    for run in range(source.settings["runs_per_scenario"] // 2):
        who, other = (source.workers[at] for at in rng.permutation(len(source.workers))[:2])
        slowed = np.where(source.at(*who), 1.3, one)
        lives = [
            Change("restart", slowed, {who: 1.3}, -1, "culprit", first_step=first, n_steps=n)
            for first, n in ((0, 12), (12, 24))
        ]
        first, second = source.build(lives)
        spare = {f"dp{other[0]}-stage{other[1]}": "spare"} if run % 2 else {}
        yield replace(first, trace=follow(first.trace, second.trace, spare))


def one_in_bursts(source, rng):
    """One worker takes three times as long for a tenth of its microbatches: 20 % more in the sum, nothing in the median."""
    changes = []
    for _ in range(source.settings["runs_per_scenario"]):
        first, step, share = place(source, rng)
        worker = source.workers[int(rng.integers(len(source.workers)))]
        mask, onset = since(source, source.at(*worker), step, share)
        factor = np.where(mask & (rng.random(mask.size) < 0.1), 3.0, 1.0)
        changes.append(
            Change("one in bursts", factor, {worker: 1.2}, onset, "culprit", first_step=first)
        )
    yield from source.build(changes)


def _small_bursts(source, rng):
    """One worker does a little more now and then, as a rank that writes a log does: 2.5 % in the sum."""
    is_here = source.at(*source.workers[int(rng.integers(len(source.workers)))])
    return np.where(is_here & (rng.random(is_here.size) < 0.05), 1.5, 1.0)


DATASETS = (
    recorded,
    healthy,
    *(one_slow(factor) for factor in FACTORS),
    several("two peers at once", _two_peers),
    several("slow node, same stage", _adjacent_dp),
    several("slow node, adjacent stages", _adjacent_stages),
    missing_records,
    restarts,
    slow_link,
    fleet_wide("uneven batches", "imbalance:data", _per_microbatch),
    fleet_wide("uneven steps", "imbalance:data", _per_step),
    fleet_wide("uneven steps, no pipeline", "imbalance:data", _per_step, _one_stage),
    fleet_wide("slow replica ×1.3", "imbalance:data", _replica),
    fleet_wide("heavy stage ×1.4", "imbalance:stage", _stage),
    fleet_wide("lasting differences 3 %", "none", _lasting),
    fleet_wide("drift to 5 %", "none", _drift),
    fleet_wide("autocorrelated 0.9, 5 %", "none", _autocorrelated),
    fleet_wide("warm-up and checkpoints", "none", _odd_steps),
    one_in_bursts,
    fleet_wide("small bursts of one", "none", _small_bursts),
)
"""Every labelled data set, in the order of the table."""
NOBODY = (
    "healthy",
    "lasting differences 3 %",
    "drift to 5 %",
    "autocorrelated 0.9, 5 %",
    "warm-up and checkpoints",
    "uneven batches",
    "uneven steps",
    "uneven steps, no pipeline",
    "slow replica ×1.3",
    "heavy stage ×1.4",
    "small bursts of one",
)
"""Data sets without a slow worker."""
