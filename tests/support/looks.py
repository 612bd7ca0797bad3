"""Judging as Fleet does while a job runs: at every push, and a rank that is named at one look was named."""

from collections import defaultdict

from ingero.detect.judge import Judge
from ingero.job_traces.model import iter_pushes
from ingero.units import NS_PER_S

PUSH_INTERVAL_S = 5.0


def look_often(parts, every_s=PUSH_INTERVAL_S):
    """Who was named at any look, by rank: when first, in seconds.

    Args:
        parts: What arrived before each look.
        every_s: The time between two.
    """
    judge, named = Judge(), {}
    for at, runs in enumerate(parts):
        now_ns = round(at * every_s * NS_PER_S)
        judge.observe(list(runs), now_ns)
        judge.settle(now_ns)
        for judgement in judge.judgements():
            for verdict in judgement.culprits:
                named.setdefault(verdict.rank.rank, (at + 1) * every_s)
    return named


def cut_trace(trace, every_s=PUSH_INTERVAL_S):
    """What the agents of a recorded job pushed between two looks."""
    parts = defaultdict(list)
    for push in iter_pushes(trace, round(every_s * NS_PER_S)):
        parts[push.at_ns].extend(push.runs)
    return [parts[at] for at in sorted(parts)]
