"""The Judge on a whole recording, without network."""

from __future__ import annotations

from ingero.detect.judge import Judge, JudgeSettings
from ingero.job_traces.model import JobTrace
from ingero.model.verdicts import Judgement


def judge_trace(trace: JobTrace, settings: JudgeSettings | None = None) -> list[Judgement]:
    """Judge everything that a recording's agents would have reported.

    Pushes are skipped on purpose: how operations are cut into them cannot change a verdict.
    """
    judge = Judge(settings)
    for runs in trace.runs:
        judge.observe(runs, 0)
    judge.settle(0, final=True)
    return judge.judgements(with_history=True)
