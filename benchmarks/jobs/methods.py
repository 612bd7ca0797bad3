"""The methods: ours, those of `benchmarks.detect` that a job without pipeline stages can be asked with, and others' rules.

Each is a function from (trace, settings) to an `Answer` whose alarms are keyed (rank, 0) and dated in seconds of the trace.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from benchmarks.detect import methods as detect
from benchmarks.detect.methods import Answer, own_table, step_table

from ingero.units import NS_PER_S

DETECT = json.loads((Path(detect.__file__).parent / "settings.json").read_text())


def relabel(trace):
    """The same trace with each rank as a data-parallel rank of one stage, which is what these jobs are."""
    workers = tuple(
        replace(worker, labels=(("dp", str(worker.rank)), ("stage", "0")))
        for worker in trace.workers
    )
    runs = tuple(
        tuple(replace(run, rank=worker) for run in of_worker)
        for worker, of_worker in zip(workers, trace.runs, strict=True)
    )
    return replace(trace, workers=workers, runs=runs)


def windows(trace, settings):
    """(first step, one past the last, end in seconds) of each reporting interval."""
    size, n = settings["report_steps"], trace.steps.size
    for first in range(0, n - size + 1, size):
        yield first, first + size, float(trace.steps["end_ns"][first + size - 1]) / NS_PER_S


def nvrx(is_relative):
    """NVRx's scores: a section's median in an interval against the best rank's, or against the rank's own best.

    Source: nvidia-resiliency-ext, docs "Usage guide" of straggler detection: a score is the ratio to the reference,
    and under 0.75 a rank is a straggler.
    """

    def judge(trace, settings):
        places, sums, _ = step_table(trace)
        answer, best = Answer(), np.full(len(places), np.inf)
        for first, last, end_s in windows(trace, settings):
            middle = np.nanmedian(sums[first:last], axis=0)
            best = np.fmin(best, middle)
            reference = np.nanmin(middle) if is_relative else best
            with np.errstate(invalid="ignore", divide="ignore"):
                low = np.flatnonzero(reference / middle < settings["nvrx"]["score"])
            for at in low.tolist():
                answer.alarms.setdefault(places[at], end_s)
        return answer

    return judge


def megatron(trace, settings):
    """Megatron-LM's report: the ranks of least throughput in each logging interval, whatever the difference.

    Source: Megatron-LM, ``StragglerDetector`` of megatron/core/utils.py; ``--straggler-minmax-count``, and
    ``--log-interval`` of 100.
    """
    places, sums, _ = step_table(trace)
    answer = Answer()
    for first, last, end_s in windows(trace, settings):
        spent = np.nansum(sums[first:last], axis=0)
        for at in np.argsort(-spent)[: settings["megatron"]["minmax_count"]].tolist():
            answer.alarms.setdefault(places[at], end_s)
    return answer


def longest_collective(trace, settings):
    """The rank that was longest inside collectives in an interval, when it is well over the median rank."""
    places, _ = own_table(trace)
    answer = Answer()
    inside = np.zeros((trace.steps.size, len(places)))
    for at, runs in enumerate(trace.runs):
        for run in runs:
            step = np.searchsorted(trace.steps["begin_ns"], run.ops["entry_ns"], side="right") - 1
            known = (step >= 0) & (run.ops["inside_ns"] >= 0)
            np.add.at(inside[:, at], step[known], run.ops["inside_ns"][known])
    for first, last, end_s in windows(trace, settings):
        spent = inside[first:last].sum(axis=0)
        at = int(np.argmax(spent))
        if spent[at] > settings["longest_collective"]["factor"] * np.median(spent):
            answer.alarms.setdefault(places[at], end_s)
    return answer


def step_time_mad(trace, settings):
    """A rank's step times against its own earlier ones: median + k·1.4826·MAD, several steps in a row."""
    options = settings["step_time_mad"]
    answer, size = Answer(), options["history_steps"]
    for worker, runs in zip(trace.workers, trace.runs, strict=True):
        entries = np.sort(np.concatenate([run.ops["entry_ns"] for run in runs]))
        first = np.searchsorted(entries, trace.steps["begin_ns"])
        begin = entries[np.minimum(first, entries.size - 1)]
        times, in_row = np.diff(begin) / NS_PER_S, 0
        for step in range(size, times.size):
            history = times[step - size : step]
            middle = np.median(history)
            spread = 1.4826 * np.median(np.abs(history - middle))
            in_row = in_row + 1 if times[step] > middle + options["k"] * spread else 0
            if in_row >= options["persistence_steps"]:
                answer.alarms.setdefault(detect.place_of(worker), float(begin[step + 1]) / NS_PER_S)
    return answer


def with_settings(method, **changes):
    """A method of `benchmarks.detect` with the settings of that benchmark."""
    return lambda trace, _: method(trace, {**DETECT, **changes})


AS_PUSHED = {**DETECT["seed_mad"], "push_interval_s": 5}
METHODS = (
    ("ingero, on the records", with_settings(detect.edetector())),
    ("seeds' rule (flat MAD of scores)", with_settings(detect.seed_mad, seed_mad=AS_PUSHED)),
    ("MAD of own time, 5 %, 3 steps", with_settings(detect.stage_mad)),
    ("best-relative < 0.75, each step", with_settings(detect.best_relative)),
    ("NVRx relative < 0.75", nvrx(is_relative=True)),
    ("NVRx individual < 0.75", nvrx(is_relative=False)),
    ("Megatron, slowest of 100 steps", megatron),
    ("longest collective", longest_collective),
    ("step-time MAD", step_time_mad),
    ("CUSUM on log-ratio", with_settings(detect.cusum)),
)
"""Name and function of every method, in the order of the table."""
