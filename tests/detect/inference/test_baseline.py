"""What is usual, and what is far from it."""

import numpy as np

from ingero.detect.inference.baseline import BUCKETS, MIN_EXTRA_NS, DurationBaseline

MS = 1_000_000


def test_steps_are_judged_by_the_95th_percentile_of_those_before():
    baseline = DurationBaseline(warmup=20, ratio=3.0)
    usual = np.arange(1, 101) * MS / 10 + 10 * MS  # 10.1 to 20 ms
    assert baseline.take(usual[:20]).tolist() == [0] * 20
    baseline = DurationBaseline(warmup=100, ratio=3.0)
    baseline.take(usual)
    p95 = np.quantile(usual, 0.95)
    assert (baseline.p95_ns, baseline.median_ns, baseline.mean_ns) == (
        p95, np.median(usual), usual.mean(),
    )  # fmt: skip
    found = baseline.take(np.array([1.49, 1.5, 1.99, 2.0, 2.99, 3.0, 30.0]) * p95)
    assert [BUCKETS[bucket] for bucket in found] == ["", "1.5x", "1.5x", "2x", "2x", "3x", "3x"]


def test_another_ratio_moves_the_last_bucket_only():
    baseline = DurationBaseline(warmup=10, ratio=5.0)
    baseline.take(np.full(10, 10.0 * MS))
    assert baseline.take(np.array([16.0, 21, 31, 49, 50]) * MS).tolist() == [1, 2, 2, 2, 3]


def test_no_step_is_judged_before_the_warm_up():
    baseline = DurationBaseline(warmup=10, ratio=3.0)
    assert baseline.take(np.array([10.0 * MS] * 9 + [90.0 * MS])).tolist() == [0] * 10
    assert baseline.n_steps == 10


def test_outliers_do_not_become_usual_while_they_are_few():
    baseline = DurationBaseline(warmup=20, ratio=3.0)
    baseline.take(np.full(100, 10.0 * MS))
    for _ in range(50):
        assert baseline.take(np.array([10.0, 10.0, 60.0]) * MS).tolist() == [0, 0, 3]
    assert baseline.p95_ns == 10 * MS


def test_a_new_normal_is_learned():
    baseline = DurationBaseline(warmup=20, ratio=3.0)
    baseline.take(np.full(100, 10.0 * MS))
    judged = np.concatenate([baseline.take(np.full(1, 60.0 * MS)) for _ in range(30)])
    assert judged.tolist() == [3] * 11 + [0] * 19
    assert baseline.p95_ns == 60 * MS


def test_a_wake_up_more_is_no_outlier_however_short_the_steps():
    baseline = DurationBaseline(warmup=10, ratio=3.0)
    baseline.take(np.full(10, 0.1 * MS))
    judged = baseline.take(np.array([0.1 * MS + MIN_EXTRA_NS - 1, 0.1 * MS + MIN_EXTRA_NS]))
    assert judged.tolist() == [0, 3]
