"""What the processor is set to: budgets in time and per operation, tiers, and settings that make no sense."""

from dataclasses import replace

import pytest
from tests.fleet.processors.collectives.judged import Judged, job, judge_after

from ingero.config import parse_model
from ingero.errors import ConfigError
from ingero.fleet.processors.collectives.config import NcclConfig
from ingero.fleet.processors.collectives.settings import build_settings
from ingero.units import NS_PER_S


@pytest.mark.parametrize(
    ("config", "pushes", "reason"),
    [
        ({"max_clusters": 1}, [{"cluster": "a"}, {"cluster": "b"}], "cluster_cap"),
        (
            {"max_communicators": 1},
            [{"comm": "00000000000000aa"}, {"comm": "00000000000000bb"}],
            "communicator_cap",
        ),
        ({"max_pending_ops": 300}, [{}, {"comm": "00000000000000bb"}], "pending_cap"),
        ({"max_communicator_ops": 300}, [{}, {"seed": 2}], "communicator_ops_cap"),
    ],
)
def test_what_exceeds_a_cap_is_refused_counted_and_told(config, pushes, reason):
    judged = Judged(**config)
    batches = [judged.push(job(n_ranks=1, **push)) for push in pushes]
    assert [batch.push.n_rejected for batch in batches] == [0, 1]
    assert reason in batches[1].push.rejected_why
    assert judged.host.read("ingero_fleet_nccl_refused_total", reason=reason) == 1


def test_budget_in_time_becomes_alpha_by_the_measured_rate():
    judged = Judged(alarms_per_worker_day=0.01)
    judged.push(job())
    judge_after(judged)
    (page,) = judged.page("verdicts")["clusters"]
    # An operation takes about 11 ms, so a day has about 7.8 million.
    assert page["alpha"] == pytest.approx(0.01 / (86_400 / 0.0113), rel=0.1)


def test_budget_in_time_is_not_that_of_the_first_operations_which_take_long():
    judged = Judged(alarms_per_worker_day=0.01)
    for part in range(20):
        runs = job(seed=part)
        for run in runs:
            run.ops["seq"] += 200 * part
            run.ops["entry_ns"] += (part > 0) * 60 * NS_PER_S + part * 3 * NS_PER_S
        if part == 0:  # the first step compiles
            runs = [replace(run, ops=run.ops[:2].copy()) for run in runs]
            for run in runs:
                run.ops["entry_ns"][1] += 60 * NS_PER_S
        judged.push(runs)
        judge_after(judged)
    (page,) = judged.page("verdicts")["clusters"]
    ops_per_day = 86_400 * (19 * 200 + 2) / (60 + 20 * 3)
    assert page["alpha"] == pytest.approx(0.01 / ops_per_day, rel=0.05)


@pytest.mark.parametrize("alpha", [1e-6, 1e-4])
def test_budget_per_operation_is_as_it_is_set(alpha):
    judged = Judged(alpha=alpha)
    judged.push(job())
    judge_after(judged)
    assert [page["alpha"] for page in judged.page("verdicts")["clusters"]] == [alpha]


@pytest.mark.parametrize(
    "config",
    [
        {"alarm_slowdown": 0.02},
        {"alpha": 0},
        {"judge_interval": "10ms"},
        {"alarms_per_worker_day": 0},
    ],
)
def test_setting_that_makes_no_sense_is_refused(config):
    with pytest.raises(ConfigError):
        parse_model(NcclConfig, config)


def test_detector_works_with_the_tiers_that_are_set():
    config = NcclConfig(alarm_slowdown=0.2, notice_slowdown=0.05, notice_spread=2.0, alpha=1e-5)
    detector = build_settings(config).detector
    assert (detector.alarm_slowdown, detector.notice_slowdown) == (0.2, 0.05)
    assert (detector.notice_spread, detector.alpha) == (2.0, 1e-5)
