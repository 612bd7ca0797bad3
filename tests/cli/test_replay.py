"""``ingero replay``: the real 64-GPU recording, injections into it, and what a user sees."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tests.support.synthetic_jobs import JobShape, build_work, normal_noise, run_job, write_trace

from ingero.cli.commands.replay.offline import judge_trace
from ingero.cli.commands.replay.render import conclude
from ingero.cli.commands.replay.result import build_result
from ingero.cli.main import cli, run_program
from ingero.detect.judge import Judge
from ingero.job_traces.convert import build_job_trace
from ingero.job_traces.model import iter_pushes
from ingero.job_traces.readers import find_packaged, read_straggler_rows, read_trace
from ingero.model.verdicts import VerdictKind
from ingero.units import NS_PER_S

AR = find_packaged("AR")
RECORDED = Path(__file__).parents[1] / "data" / "gpu_jobs"


@pytest.fixture(scope="module")
def ar_rows():
    return read_straggler_rows(AR)


@pytest.fixture(scope="module")
def ar_trace():
    return read_trace(AR)


def named(result, *kinds):
    return {
        (v["worker"]["dp_rank"], v["worker"]["stage"])
        for v in result["verdicts"]
        if v["verdict"] in kinds
    }


def slow_down(rows, dp, stage, factor, since_step):
    hit = (rows.dp == dp) & (rows.stage == stage) & (rows.step >= since_step)
    hit &= np.isin(
        rows.optype,
        [rows.optypes.index(name) for name in ("forward-compute", "backward-compute")],
    )
    return rows.with_durations(np.where(hit, factor, 1.0) * rows.duration_s)


def without_the_culprit(rows):
    """AR as it would be recorded had (0, 0) been healthy: its compute replaced by its neighbour's."""
    healthy = rows.duration_s.copy()
    for name in ("forward-compute", "backward-compute"):
        of_kind = rows.optype == rows.optypes.index(name)
        mine = np.flatnonzero(of_kind & (rows.dp == 0) & (rows.stage == 0))
        theirs = np.flatnonzero(of_kind & (rows.dp == 1) & (rows.stage == 0))
        rng = np.random.default_rng(0)
        healthy[mine] = rng.permutation(rows.duration_s[theirs])[: mine.size]
    return rows.with_durations(healthy)


def test_the_real_trace_has_one_culprit_found_in_its_first_step():
    answer = CliRunner().invoke(cli, ["replay", "AR", "--offline", "--json"])
    assert answer.exit_code == 0
    result = json.loads(answer.stdout)
    assert named(result, "culprit") == {(0, 0)}
    assert named(result, "network", "drag") == set()
    assert len(result["verdicts"]) == 16
    (culprit,) = [v for v in result["verdicts"] if v["verdict"] == "culprit"]
    assert (culprit["onset_step"], culprit["detected_step"]) == (16, 16)
    assert culprit["ops_to_detection"] <= 30
    assert culprit["slowdown"] == pytest.approx(2.38, abs=0.05)
    assert culprit["evidence"] > 6
    assert len(culprit["victims"]) == 15


def test_the_bill_of_the_real_trace_adds_up_and_agrees_with_its_authors():
    """The authors' simulation saves 22.9 s of a 46.3 s step without the worker (mw-AR.json, tori − trem)."""
    trace = read_trace(AR)
    result = build_result(trace, judge_trace(trace))
    cost = result["cost"]
    assert cost["charged_gpu_s"] + cost["unattributed_gpu_s"] == pytest.approx(
        cost["waited_gpu_s"], rel=1e-3
    )
    (culprit,) = [v for v in result["verdicts"] if v["verdict"] == "culprit"]
    assert culprit["excess_s"] / trace.steps.size == pytest.approx(22.9, rel=0.15)


@pytest.mark.parametrize(
    ("dp", "stage", "factor"), [(1, 0, 1.2), (2, 3, 1.3), (3, 1, 1.5), (0, 2, 2.0), (3, 0, 1.5)]
)
def test_a_second_worker_slowed_in_the_real_trace_is_named_too(ar_rows, dp, stage, factor):
    trace = build_job_trace(slow_down(ar_rows, dp, stage, factor, since_step=415), "AR")
    result = build_result(trace, judge_trace(trace))
    assert named(result, "culprit") == {(0, 0), (dp, stage)}
    (second,) = [v for v in result["verdicts"] if v["worker"] == {"dp_rank": dp, "stage": stage}]
    assert (second["onset_step"], second["detected_step"]) == (415, 415)
    assert second["slowdown"] == pytest.approx(factor, rel=0.05)


def test_without_its_culprit_the_real_trace_alarms_nobody(ar_rows):
    trace = build_job_trace(without_the_culprit(ar_rows), "AR")
    result = build_result(trace, judge_trace(trace))
    assert named(result, "culprit", "network", "drag", "victim") == set()
    assert any("no slow worker" in line for line in conclude(result))


def test_a_twentieth_is_noticed_within_three_steps_and_alarms_nobody(ar_rows):
    healthy = without_the_culprit(ar_rows)
    trace = build_job_trace(slow_down(healthy, 2, 1, 1.05, since_step=415), "AR")
    result = build_result(trace, judge_trace(trace))
    assert named(result, "drag") == {(2, 1)}
    assert named(result, "culprit", "network") == set()
    (drag,) = [v for v in result["verdicts"] if v["verdict"] == "drag"]
    assert drag["detected_step"] <= 419, "415, 416, 419 are three consecutive recorded steps"


def test_no_step_of_the_real_trace_alarms_anybody_else(ar_trace):
    judge = Judge()
    last = 0
    for push in iter_pushes(ar_trace, 5 * NS_PER_S):
        if push.at_ns != last:
            judge.settle(push.at_ns)
            alarmed = {
                dict(v.rank.labels).values().__iter__().__next__() + dict(v.rank.labels)["stage"]
                for j in judge.judgements(with_history=True)
                for v in j.verdicts
                if v.kind in {VerdictKind.CULPRIT, VerdictKind.NETWORK}
            }
            assert alarmed <= {"00"}
            last = push.at_ns
        judge.observe(push.runs, push.at_ns)
    assert alarmed == {"00"}


def test_a_trace_that_is_not_ours_is_judged_and_shown(tmp_path):
    shape = JobShape(n_dp=4, n_stages=2, n_microbatches=8, n_steps=4)
    work = build_work(shape, normal_noise(0.02), np.random.default_rng(0))
    work[:, 3, 1] *= 1.5
    write_trace(run_job(shape, work), tmp_path / "t.parquet")
    answer = CliRunner().invoke(cli, ["replay", str(tmp_path / "t.parquet"), "--offline"])
    assert answer.exit_code == 0
    assert "culprit: dp 3, stage 1" in answer.output


def test_what_cannot_be_read_is_said_on_one_line(tmp_path, capsys):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    assert run_program(cli, ["replay", str(tmp_path / "bad.parquet"), "--offline"]) == 1
    assert "cannot be read as Parquet" in capsys.readouterr().err


def test_workers_without_replicas_and_stages_are_named_by_rank_and_node_and_steps_are_whole():
    path = str(RECORDED / "ddp.uneven-2-2x.first.parquet")
    said = CliRunner().invoke(cli, ["replay", path, "--offline"]).output
    assert "culprit: rank 2 on host-2: own time 1.99× that of its 3 peers" in said
    assert "None" not in said
    assert 310 < int(re.search(r"first: (\d+) steps, 4 workers", said)[1]) < 330
    result = json.loads(CliRunner().invoke(cli, ["replay", path, "--offline", "--json"]).output)
    assert result["culprits"] == [{"rank": 2, "node": "host-2"}]
