"""Who was named stays so for as long as something can be compared, and not for ever where nothing can."""

from dataclasses import replace

import pytest
from tests.detect.test_first_reports import N_OPS, build_ops, build_run

from ingero.detect.judge import Judge, JudgeSettings
from ingero.model.collectives import ClockKind
from ingero.model.verdicts import VerdictKind
from ingero.units import NS_PER_S

EVERY_S, STALE_S = 20, 300


class Job:
    """Six ranks of which one is slow; `go_on` with what they report once the job was started again."""

    def __init__(self):
        settings = JudgeSettings(stale_ns=STALE_S * NS_PER_S, patience_ns=10 * NS_PER_S)
        self.judge, self.now_s, self.n_parts = Judge(settings), 1000, 0
        self.go_on(5, slow=2)
        assert self.kind() is VerdictKind.CULPRIT

    def go_on(self, n_parts, comm="aa", slow=(), clock=ClockKind.DEVICE, *, is_known=True):
        ops = build_ops(6, n_parts * N_OPS, slow, seed=self.n_parts)
        ops["entry_ns"] += self.now_s * NS_PER_S
        ops["seq"] += self.n_parts * N_OPS
        if not is_known:
            ops["own_ns"] = -1
        for part in range(n_parts):
            self.now_s += EVERY_S
            for rank in range(6):
                run = build_run(rank, 6, ops[rank, N_OPS * part : N_OPS * (part + 1)], comm)
                self.judge.observe([replace(run, clock=clock)], self.now_s * NS_PER_S)
            self.judge.settle(self.now_s * NS_PER_S)
        self.n_parts += n_parts

    def kind(self, **how):
        (judgement,) = self.judge.judgements(**how)
        (kind,) = [one.kind for one in judgement.verdicts if one.rank.rank == 2]
        return kind


@pytest.mark.parametrize(
    "how", [{"is_known": False}, {"clock": ClockKind.ENQUEUE}, {"is_known": False, "comm": "bb"}]
)
def test_one_of_which_nothing_can_be_compared_any_more_is_named_no_longer(how):
    job = Job()
    job.go_on(STALE_S // EVERY_S - 2, **how)
    assert job.kind() is VerdictKind.CULPRIT
    job.go_on(6, **how)
    assert job.kind() is VerdictKind.UNKNOWN
    assert job.kind(with_history=True) is VerdictKind.CULPRIT, "what it cost stands"
    job.go_on(4, slow=2)
    assert job.kind() is VerdictKind.CULPRIT, "it is compared again, and still slow"


def test_one_whose_job_pauses_stays_named():
    """What was reported last could not be compared, as where it was stopped by an error."""
    job = Job()
    job.go_on(2, slow=2, is_known=False)
    job.now_s += 4 * STALE_S
    job.go_on(1, comm="bb", slow=2)
    assert job.kind() is VerdictKind.CULPRIT


def test_one_that_has_long_been_named_and_is_compared_stays_named():
    job = Job()
    for _ in range(3):
        job.go_on(STALE_S // EVERY_S, slow=2)
        assert job.kind() is VerdictKind.CULPRIT
