"""How long `up` waits for its job to be compared."""

import pytest

from ingero.config.environment import DEFAULT_START_TIMEOUT_S, START_TIMEOUT
from ingero.errors import IngeroError
from ingero.model.collectives import Rank
from ingero.model.verdicts import Judgement, Verdict, VerdictKind
from ingero.sim.cluster.warm_up import HANG_S, STEADY_OPS, WarmUp
from ingero.units import NS_PER_S

STANDSTILL_NS = int(DEFAULT_START_TIMEOUT_S * NS_PER_S)


def said(*n_ops):
    """What Fleet says when each rank has so many compared operations."""
    return Judgement(
        "c",
        tuple(
            Verdict(Rank("c", f"n{rank}", rank), VerdictKind.ORDINARY, "", n_ops=count)
            for rank, count in enumerate(n_ops)
        ),
    )


def test_it_is_over_when_every_rank_was_compared_often_enough():
    warm_up = WarmUp(2, 0)
    assert not warm_up.is_over(None, 1)
    assert not warm_up.is_over(said(STEADY_OPS), 2)
    assert not warm_up.is_over(said(STEADY_OPS, STEADY_OPS - 1), 3)
    assert warm_up.is_over(said(STEADY_OPS, STEADY_OPS), 4)


def test_a_slow_machine_is_waited_for_as_long_as_it_goes_on():
    warm_up = WarmUp(2, 0)
    for number in range(1, 50):
        now_ns = number * (STANDSTILL_NS - NS_PER_S)
        assert not warm_up.is_over(said(number, number), now_ns)


@pytest.mark.parametrize(
    ("judgement", "description"),
    [(None, "compared the ranks for 180 s"), (said(3, 4), "more than 7 operations for 180 s")],
)
def test_a_standstill_ends_it(judgement, description):
    warm_up = WarmUp(2, 5)
    assert not warm_up.is_over(judgement, 5)
    assert not warm_up.is_over(judgement, 5 + STANDSTILL_NS)
    with pytest.raises(IngeroError, match=description):
        warm_up.is_over(judgement, 6 + STANDSTILL_NS)


def test_an_emulated_machine_is_given_longer(monkeypatch):
    monkeypatch.setenv(START_TIMEOUT, "1200")
    warm_up = WarmUp(2, 0)
    assert not warm_up.is_over(None, 1200 * NS_PER_S)
    with pytest.raises(IngeroError, match="for 1200 s"):
        warm_up.is_over(None, 1201 * NS_PER_S)


def test_a_job_that_hangs_by_itself_is_told_with_its_rank_and_what_it_does():
    diagnosis = {"summary": "asleep (100%)", "causes": [{"evidence": ["waiting: train.py:5 load"]}]}
    root = {"rank": 1, "cause": "absent", "diagnosis": diagnosis}
    hang = {"roots": [root], "standing_s": HANG_S - 0.1}
    warm_up = WarmUp(2, 0)
    assert not warm_up.is_over(said(3, 3), 1, hang)
    assert not warm_up.is_over(said(3, 3), 1, {"roots": [], "standing_s": HANG_S})
    with pytest.raises(IngeroError, match=r"rank 1 never arrived \(absent\), asleep .*py:5 load"):
        warm_up.is_over(said(3, 3), 1, hang | {"standing_s": HANG_S})
    unexplained = {"roots": [root | {"diagnosis": None}], "standing_s": HANG_S}
    with pytest.raises(IngeroError, match=r"evenly: rank 1 never arrived \(absent\)$"):
        warm_up.is_over(said(3, 3), 1, unexplained)
