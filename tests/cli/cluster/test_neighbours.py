"""A rank whose processor is crowded takes longer for its own work; its peer elsewhere does not hold it up."""

import os
import select

import numpy as np
import pytest

from ingero.cli.cluster.account import ReportReader
from ingero.cli.cluster.neighbours import reserve_processor
from ingero.errors import UnsupportedError
from ingero.gpusim.job import WAIT, Job, JobSettings
from ingero.units import NS_PER_MS

needs_two = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="needs two processors: one is crowded"
)


def own_times_ns(job, reader, n):
    """From the end of each wait to the end of the next one's collective entry: the rank's own part of a step."""
    told = reader.read()[:0]
    while len(told) < 2 * n:
        job.check()
        told = np.concatenate([told, reader.read()])
        select.select([], [], [], 0.001)
    is_wait = told["what"] == WAIT
    ends = (told["mono_ns"] + told["duration_ns"])[:-1][is_wait[:-1]]
    entries = told["mono_ns"][1:][is_wait[:-1]]
    return (entries - ends).astype(np.int64)


@needs_two
def test_crowded_rank_works_longer(tmp_path):
    allowed = os.sched_getaffinity(0)
    settings = JobSettings(
        2, tmp_path, step_ns=5 * NS_PER_MS, load_ns=2 * NS_PER_MS, has_reports=True
    )
    reader = ReportReader(settings.report_path(1))
    with reserve_processor() as processor, Job(settings) as job:
        processor.give(job.pids[1])
        assert os.sched_getaffinity(job.pids[0]) == allowed - {processor.number}
        assert os.sched_getaffinity(job.pids[1]) == {processor.number}
        job.release()
        before_ns = own_times_ns(job, reader, 30)
        processor.crowd()
        reader.read()
        after_ns = own_times_ns(job, reader, 30)
    assert np.median(after_ns) > np.percentile(before_ns, 90)
    assert os.sched_getaffinity(0) == allowed


def test_one_processor_is_not_enough(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    with pytest.raises(UnsupportedError, match="two processors"), reserve_processor():
        pass
