"""Jobs over NCCL on a real GPU, recorded as their agents pushed them."""

from pathlib import Path

import pytest

from ingero.cli.commands.replay.offline import judge_trace
from ingero.job_traces.operations import read_labels
from ingero.job_traces.readers import read_trace

RECORDED = Path(__file__).parents[1] / "data" / "gpu_jobs"


def judge(name):
    path = RECORDED / f"{name}.parquet"
    (judgement,) = judge_trace(read_trace(path))
    return read_labels(path), {one.rank.rank: one for one in judgement.verdicts}


@pytest.mark.parametrize(
    ("name", "slowdown"),
    [
        ("ddp.uneven-2-2x", 1.99),
        ("ddp.uneven-2-2x.first", 1.99),
        ("ddp.slow-python-2-400ms", 11.5),
    ],
)
def test_the_slow_rank_is_named_after_a_few_steps_and_nobody_else(name, slowdown):
    """Three of four buckets are entered at once: their own times of 0.1 ms once hid the first one's for 134 steps."""
    labels, verdicts = judge(name)
    (fault,) = labels["faults"]
    assert {rank: one.kind for rank, one in verdicts.items()} == {
        rank: "culprit" if rank == fault["rank"] else "victim" for rank in range(labels["n_ranks"])
    }
    slow = verdicts[fault["rank"]]
    assert slow.n_ops_to_detect <= 10
    assert slow.slowdown.median == pytest.approx(slowdown, rel=0.02)


@pytest.mark.parametrize("name", ["ddp.none", "ddp.pause-2"])
def test_ranks_that_do_the_same_are_all_ordinary(name):
    labels, verdicts = judge(name)
    assert {one.kind for one in verdicts.values()} == {"ordinary"}
    assert len(verdicts) == labels["n_ranks"]
    for one in verdicts.values():
        assert one.slowdown.median == pytest.approx(1.0, abs=0.002)
