"""A node that was booted again: its clock begins anew, and its rank is judged on like any other."""

import numpy as np
import pytest
from tests.fleet.processors.collectives.judged import job

from ingero.fleet.processors.collectives.config import NcclConfig
from ingero.fleet.processors.collectives.engine import DetectionEngine
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S

UPTIME_NS = 30 * 86_400 * NS_PER_S
BOOTED = 3


def go_on(engine, at_s, parts=range(6), *, uptime_ns, comm, slow=None):
    """A job's pushes, one each ten seconds; its conclusion."""
    for part in parts:
        runs = job(comm=comm, seed=part, slow=slow)
        for run in runs:
            booted_ns = 0 if run.rank.rank == BOOTED else UPTIME_NS + at_s * NS_PER_S
            run.ops["seq"] += 200 * part
            run.ops["entry_ns"] += 10 * part * NS_PER_S + max(uptime_ns, booted_ns)
        assert engine.add(runs, (at_s + 10 * part) * NS_PER_S) == (0, "")
        engine.judge((at_s + 10 * part + 1) * NS_PER_S)
    engine.judge((at_s + 10 * part + 7) * NS_PER_S)
    conclusion = engine.conclusions()["c"]
    return {verdict.rank.rank: verdict for verdict in conclusion.judgement.verdicts}


@pytest.mark.parametrize("slow_again", [None, BOOTED, 5])
def test_a_rank_whose_node_was_booted_is_judged_in_its_next_job(slow_again):
    engine = DetectionEngine(NcclConfig(), MeterRegistry())
    slow = None if slow_again == BOOTED else BOOTED
    before = go_on(engine, 0, uptime_ns=UPTIME_NS, comm="00000000000000aa", slow=slow)
    assert [at for at, one in before.items() if one.kind == "culprit"] == ([slow] if slow else [])
    after = go_on(engine, 600, uptime_ns=0, comm="00000000000000bb", slow=slow_again)
    culprits = {at for at, one in after.items() if one.kind == "culprit"}
    assert culprits == ({slow_again} if slow_again else set())
    assert after[BOOTED].n_ops == before[BOOTED].n_ops + 6 * 200
    if slow_again == BOOTED:
        onset = after[BOOTED].onset
        assert onset.comm == "00000000000000bb"
        assert onset.entry_ns < 60 * NS_PER_S, "on the clock that its agent is asked by"
    if slow_again == 5:
        waited = [one.wait_ns - before[at].wait_ns for at, one in after.items() if at != 5]
        assert max(waited) < 1.1 * min(waited), "the booted one waited as long as the others"


@pytest.mark.parametrize("late_s", [1, 4])
def test_a_push_that_was_overtaken_is_in_its_place_though_it_brings_another_communicator(late_s):
    engine = DetectionEngine(NcclConfig(), MeterRegistry())
    first = go_on(engine, 0, uptime_ns=UPTIME_NS, comm="00000000000000aa")
    overtaken = job(comm="00000000000000cc", seed=9)
    for run in overtaken:
        run.ops["entry_ns"] += UPTIME_NS + 62 * NS_PER_S
        run.ops["n_bytes"] = 8
    go_on(engine, 70, [6], uptime_ns=UPTIME_NS, comm="00000000000000aa")
    assert engine.add(overtaken, (130 + late_s) * NS_PER_S) == (0, "")
    second = go_on(engine, 130, [7], uptime_ns=UPTIME_NS, comm="00000000000000aa")
    assert {one.kind for one in second.values()} == {"ordinary"}
    assert first.keys() == second.keys()


def test_times_at_the_end_of_their_type_break_nothing():
    engine = DetectionEngine(NcclConfig(), MeterRegistry())
    for at, comm in enumerate(("aa", "bb", "cc")):
        runs = job(comm=comm.rjust(16, "0"), seed=at)
        for run in runs:
            run.ops["entry_ns"] = np.iinfo(np.int64).max - (1000 if at == 0 else 10**18)
        assert engine.add(runs, 100 * at * NS_PER_S) == (0, "")
        conclusion = engine.judge((100 * at + 50) * NS_PER_S)["c"]
        assert len(conclusion.judgement.verdicts) == 8
