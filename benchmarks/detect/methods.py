"""The methods: each looks at a job's reports and names workers.

A method is a function from (trace, settings) to an `Answer` and one line in ``METHODS``. What a method must know beyond
what agents report (nothing about the truth) comes from the settings file.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from ingero.cli.commands.replay.offline import judge_trace
from ingero.detect.judge import JudgeSettings
from ingero.detect.ranks.settings import EDetectorSettings
from ingero.detect.threshold import Scores, ThresholdSettings, ThresholdState, step_threshold
from ingero.job_traces.model import iter_pushes

NS = 1e9


@dataclass
class Answer:
    """What a method says.

    Attributes:
        alarms: Worker (dp, stage) → when it was first named, seconds of trace time.
        notices: Worker → when it was first reported at all, paged or not; empty for methods with one tier.
        n_ops: Worker → compared operations from onset to the naming, where the method counts them.
        verdicts: Every other answer that it gave, such as "imbalance:data".
    """

    alarms: dict = field(default_factory=dict)
    notices: dict = field(default_factory=dict)
    n_ops: dict = field(default_factory=dict)
    verdicts: set = field(default_factory=set)


def place_of(rank):
    labels = dict(rank.labels)
    return int(labels["dp"]), int(labels["stage"])


def own_table(trace):
    """Own time of each worker's operations that follow compute: workers, step, end (s) and cost (s) per worker."""
    places = [place_of(rank) for rank in trace.workers]
    table = []
    for runs in trace.runs:
        ops = np.concatenate([run.ops for run in runs])
        ops = ops[ops["own_ns"] >= 100_000]
        ops = ops[np.argsort(ops["entry_ns"], kind="stable")]
        step = np.searchsorted(trace.steps["begin_ns"], ops["entry_ns"], side="right") - 1
        table.append((step, ops["entry_ns"] / NS, ops["own_ns"] / NS))
    return places, table


def step_table(trace):
    """Own time per (step, worker), NaN where a worker reported nothing, and when each step ended."""
    places, table = own_table(trace)
    sums = np.zeros((trace.steps.size, len(places)))
    for at, (step, _, own) in enumerate(table):
        np.add.at(sums[:, at], step, own)
    return places, np.where(sums > 0, sums, np.nan), trace.steps["end_ns"] / NS


def seed_mad(trace, settings):
    """The seed's rule: scores of all nodes, median − 2·1.4826·MAD, EMA 0.2, every 10 s."""
    options = settings["seed_mad"]
    interval_ns = int(options["push_interval_s"] * NS)
    bar = ThresholdSettings(
        k=options["k"],
        ema_alpha=options["ema_alpha"],
        min_margin=options["min_margin"],
        push_interval_ns=interval_ns,
    )
    answer, state = Answer(), ThresholdState()
    at_ns, scores = -1, {}

    def decide():
        nonlocal state
        if not scores:
            return
        who = sorted(scores)
        values = Scores(np.array([scores[w] for w in who]), np.zeros(len(who), np.int64), ("",))
        state = step_threshold(state, values, at_ns, bar)
        for worker in np.flatnonzero(state.is_straggler).tolist():
            answer.alarms.setdefault(place_of(trace.workers[who[worker]]), at_ns / NS)

    for push in iter_pushes(trace, interval_ns):
        if push.at_ns != at_ns:
            decide()
            at_ns, scores = push.at_ns, {}
        if push.health_score is not None:
            scores[push.worker] = push.health_score
    decide()
    return answer


def stage_mad(trace, settings):
    """Own time of a step against the same stage's peers: median + 2·1.4826·MAD, at least 5 %, three steps in a row."""
    options = settings["stage_mad"]
    places, sums, ends = step_table(trace)
    answer, in_row = Answer(), np.zeros(len(places), int)
    for step, own in enumerate(sums):
        for stage in {stage for _, stage in places}:
            at = [i for i, (_, s) in enumerate(places) if s == stage and not np.isnan(own[i])]
            if len(at) < 3:
                continue
            middle = np.median(own[at])
            spread = 1.4826 * np.median(np.abs(own[at] - middle))
            bar = middle + max(options["k"] * spread, options["floor"] * middle)
            for i in at:
                in_row[i] = in_row[i] + 1 if own[i] > bar else 0
                if in_row[i] >= options["persistence_steps"]:
                    answer.alarms.setdefault(places[i], float(ends[step]))
    return answer


def best_relative(trace, settings):
    """A step's best own time over this worker's, under 0.75: as NVRx scores ranks, over all of them."""
    places, sums, ends = step_table(trace)
    answer = Answer()
    for step, own in enumerate(sums):
        with np.errstate(invalid="ignore"):
            low = np.flatnonzero(np.nanmin(own) / own < settings["best_relative"]["score"])
        for i in low.tolist():
            answer.alarms.setdefault(places[i], float(ends[step]))
    return answer


def cusum(trace, settings):
    """Page's CUSUM on the log-ratio of each operation to the same stage's peers."""
    options = settings["cusum"]
    places, table = own_table(trace)
    answer, sums = Answer(), np.zeros(len(places))
    for stage in {stage for _, stage in places}:
        at = [i for i, (_, s) in enumerate(places) if s == stage]
        for step in range(trace.steps.size):
            parts = [(t[1][t[0] == step], t[2][t[0] == step]) for t in (table[i] for i in at)]
            n = min(cost.size for _, cost in parts)
            if not n or len(at) < 3:
                continue
            costs = np.stack([cost[:n] for _, cost in parts])
            for k, i in enumerate(at):
                ratio = np.log(costs[k] / np.median(np.delete(costs, k, axis=0), axis=0))
                sums[i], op = page_sum(ratio, float(sums[i]), options)
                if op is not None and places[i] not in answer.alarms:
                    answer.alarms[places[i]] = float(parts[k][0][op])
    return answer


def page_sum(ratio, value, options):
    """Page's sum after these log-ratios, and the first at which it passed its limit."""
    found = None
    for op, gain in enumerate(
        np.clip(ratio - options["allowance"], -options["clip"], options["clip"])
    ):
        value = max(value + float(gain), 0.0)
        if value > options["limit"] and found is None:
            found = op
    return value, found


def seconds(at_ns):
    return np.nan if at_ns is None else at_ns / NS


def edetector(**changes):
    """The Judge, whole, with some bets left out."""

    def run(trace, settings):
        config = replace(EDetectorSettings(**settings["edetector"]), **changes)
        answer = Answer()
        for judgement in judge_trace(trace, JudgeSettings(detector=config)):
            for verdict in judgement.verdicts:
                place, kind = place_of(verdict.rank), verdict.kind.value
                if verdict.is_alarm:
                    answer.alarms[place] = seconds(verdict.detected_entry_ns)
                if kind in {"drag", "culprit"}:
                    answer.notices[place] = seconds(verdict.noticed_entry_ns)
                answer.verdicts.add(kind)
                if verdict.n_ops_to_detect is not None:
                    answer.n_ops[place] = verdict.n_ops_to_detect
        return answer

    return run


ONLY_BOTH = {"use_majority": False, "use_far": False, "use_sums": False}
"""The rank bet and the pooled bet, and no other."""

METHODS = (
    ("flat MAD (seed)", seed_mad),
    ("stage MAD, 5 %, 3 steps", stage_mad),
    ("best-relative < 0.75", best_relative),
    ("CUSUM on log-ratio", cusum),
    ("e: rank bet", edetector(use_pooled=False, use_majority=False)),
    ("e: pooled bet", edetector(use_rank=False, use_majority=False, use_far=False)),
    ("e: rank + pooled", edetector(**ONLY_BOTH)),
    ("e: rank + pooled, no peeling", edetector(**ONLY_BOTH, use_peeling=False)),
    ("e: all but the sums bet", edetector(use_sums=False)),
    ("e: all but the far bet", edetector(use_far=False)),
    ("e: all bets (ingero)", edetector()),
)
"""Name and function of every method, in the order of the table."""
WINNER = "e: all bets (ingero)"
