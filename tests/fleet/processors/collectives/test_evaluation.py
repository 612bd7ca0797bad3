"""Rounds of judging of which one fails."""

import asyncio
import logging
from dataclasses import replace

import numpy as np
import pytest
from tests.fleet.processors.collectives.judged import Judged, job
from tests.fleet.processors.collectives.test_hangs import hung

from ingero.errors import ConfigError
from ingero.fleet.processors.collectives.evaluation import EvaluationThread
from ingero.otlp.names import Signal
from ingero.testing.host import ManualHost
from ingero.units import NS_PER_S
from ingero.wire.hangs import HANG_EVENT

FAULTS = "ingero_fleet_nccl_judge_faults_total"


class Rounds:
    """An action on its thread; each of its first rounds raises what it is given."""

    def __init__(self, *faults):
        self.host = ManualHost()
        self.faults, self.n_run = list(faults), 0
        self.thread = EvaluationThread(self.act, self.host)

    def act(self):
        self.n_run += 1
        if self.faults:
            raise self.faults.pop(0)

    def kick(self, n_rounds):
        for _ in range(n_rounds):
            self.thread.kick()
            self.thread._running.result(timeout=10)
            self.host.clock.advance(NS_PER_S)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="ingero.fleet.processors.nccl")
    return caplog


def test_round_that_fails_is_counted_and_the_next_ones_run(log):
    rounds = Rounds(RuntimeError("a defect"))
    rounds.kick(3)
    assert rounds.n_run == 3
    assert rounds.host.read(FAULTS) == 1
    (line,) = log.records
    assert line.levelno == logging.ERROR
    assert line.exc_info[0] is RuntimeError
    asyncio.run(rounds.thread.stop())


def test_fault_of_every_round_is_logged_with_one_traceback_and_then_with_a_limit(log):
    rounds = Rounds(*(RuntimeError(f"a defect in round {n}") for n in range(120)))
    rounds.kick(60)
    assert rounds.host.read(FAULTS) == 60
    assert [line.exc_info is not None for line in log.records] == [True, False]
    assert log.records[1].fields["error"] == "RuntimeError('a defect in round 1')"
    rounds.kick(20)
    assert len(log.records) == 3
    assert log.records[2].fields["suppressed"] > 40
    asyncio.run(rounds.thread.stop())


class FailsAt:
    """Raises once, at the first export that a text is in; what it raises is no refusal."""

    def __init__(self, inner, text):
        self.inner, self.text = inner, text

    def consume(self, batch):
        if self.text and self.text in str(batch.export.tree):
            self.text = ""
            raise ConfigError("a defect")
        self.inner.consume(batch)


def test_fault_at_the_report_of_one_cluster_keeps_back_no_report_of_others():
    judged = Judged()
    runs = job(slow=3, cluster="a") + job(slow=5, cluster="b", comm="00000000000000bb")
    for run in runs:
        judged.push([run])
    judged.round()
    following = judged.pipe._state.downstream._following
    following[Signal.LOGS] = FailsAt(following[Signal.LOGS], "culprit")
    judged.host.clock.advance(6 * NS_PER_S)
    with pytest.raises(ConfigError):
        judged.round()
    assert not judged.records()
    judged.host.clock.advance(NS_PER_S)
    named = [row.attributes["ingero.cluster.id"] for row in judged.round().records()]
    assert set(named) == {"b"}


def test_evidence_that_cannot_be_judged_keeps_no_hang_back():
    judged = hung()
    (run, *_) = job(cluster="broken")
    judged.pipe._state.engine.add([replace(run, ops=np.zeros(3, [("seq", "<u8")]))], 0)
    judged.round()
    assert judged.host.read("ingero_fleet_nccl_evicted_total", what="evidence") == 1
    assert [row.event_name for row in judged.records(HANG_EVENT)] == [HANG_EVENT]
    assert judged.host.read("ingero_fleet_nccl_missing_ranks", cluster_id="c") == 1


AGE = "ingero_fleet_nccl_verdict_age_seconds"


def test_verdicts_of_a_judge_that_is_stuck_grow_older_and_go_with_their_cluster():
    judged = Judged()
    for run in job(slow=3):
        judged.push([run])
    judged.round()
    assert judged.host.read(AGE, cluster_id="c") == 0
    judged.host.clock.advance(70 * NS_PER_S)
    assert judged.host.read(AGE, cluster_id="c") == 70
    judged.host.clock.advance(3600 * NS_PER_S)
    judged.round()
    assert judged.host.read(AGE, cluster_id="c") is None


def test_verdicts_of_a_processor_that_was_stopped_have_no_age():
    judged = Judged()
    for run in job(slow=3):
        judged.push([run])
    judged.round()
    asyncio.run(judged.pipe.stop())
    assert judged.host.read(AGE, cluster_id="c") is None
