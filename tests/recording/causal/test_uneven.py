"""What operations took beyond their usual is laid over what the thread did meanwhile, exactly."""

import numpy as np
import pytest

from ingero.model.counters import OFF_SPAN, CodeLines
from ingero.model.events import OffCpuReason
from ingero.recording.causal.uneven import WatchedOps, find_places, find_uneven_causes
from ingero.units import NS_PER_MS, NS_PER_S

OP = np.dtype([("entry_ns", "<i8"), ("own_ns", "<i8")])
START_NS = 10 * NS_PER_S
PLACES_MS = (40, 10, 10, 5)
"""A step's four operations: the first has the way forward in it."""


class Watched:
    """A thread that works and then waits 2 ms for others, again and again; some steps take it longer."""

    def __init__(self, n_steps=40, seed=1, turn=0.25, places=PLACES_MS, wait_ms=2):
        self.rng = np.random.default_rng(seed)
        self.now_ns, self.ops, self.spans = START_NS, [], []
        self.n_steps, self.turn, self.places = n_steps, turn, places
        self.wait_ms = wait_ms

    def away(self, ms, reason, wait_ms=0.0):
        self.spans.append((self.now_ns, ms * NS_PER_MS, wait_ms * NS_PER_MS, reason))
        self.now_ns += round(ms * NS_PER_MS)

    def run(self, **longer):
        """Steps of which about one in four is longer by the part that each way of spending it takes of the usual."""
        for _ in range(self.n_steps):
            is_long = self.rng.random() < self.turn
            for usual_ms in self.places:
                began_ns = self.now_ns
                self.now_ns += round(usual_ms * NS_PER_MS * self.rng.normal(1.0, 0.01))
                self.away(usual_ms / 10, OffCpuReason.PREEMPTED, usual_ms / 10)
                for how, part in longer.items() if is_long else ():
                    self._spend(how, part * usual_ms)
                self.ops.append((self.now_ns, self.now_ns - began_ns))
                self.away(self.wait_ms, OffCpuReason.SLEEP)
        return self

    def _spend(self, how, ms):
        if how == "computing":
            self.now_ns += round(ms * NS_PER_MS)
        elif how == "ready":
            self.away(ms, OffCpuReason.PREEMPTED, ms)
        else:
            reason = {"asleep": OffCpuReason.SLEEP, "blocked": OffCpuReason.BLOCKED_IO}
            self.away(ms, reason.get(how, OffCpuReason.STOPPED))

    def explain(self, lines=None, **more):
        return find_uneven_causes(
            WatchedOps(np.array(self.ops, OP), np.array(self.spans, OFF_SPAN), START_NS, **more),
            lines,
        )


def causes(found):
    return {one.kind: one.share for one in found.causes}


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("computing", "more-computing"),
        ("ready", "cpu-contention"),
        ("blocked", "blocked-io"),
        ("stopped", "stopped"),
        ("asleep", "unexplained"),
    ],
)
def test_what_long_steps_spend_more_of_is_their_cause(how, kind):
    watched = Watched().run(**{how: 0.6})
    found = watched.explain()
    assert causes(found) == {kind: pytest.approx(1.0, abs=0.06)}
    own_ns = np.array(watched.ops, OP)["own_ns"].sum()
    assert found.excess_ns == pytest.approx(0.13 * own_ns, rel=0.5)


def test_two_causes_share_the_excess_as_they_took_it():
    found = Watched(n_steps=60).run(computing=0.4, ready=0.2).explain()
    shares = causes(found)
    assert list(shares) == ["more-computing", "cpu-contention"]
    assert shares["more-computing"] == pytest.approx(0.66, abs=0.04)
    assert shares["cpu-contention"] == pytest.approx(0.33, abs=0.04)


def test_time_ready_is_the_quotas_by_the_part_in_which_it_held_the_process_back():
    watched = Watched().run(ready=0.6)
    ready_ns = sum(wait_ns for _, _, wait_ns, _ in watched.spans)
    shares = causes(watched.explain(throttled_ns=round(ready_ns * 0.7)))
    assert shares["cpu-quota"] == pytest.approx(0.7, abs=0.05)
    assert shares["cpu-contention"] == pytest.approx(0.3, abs=0.05)


def test_a_quota_that_holds_back_one_that_computes_more_is_no_cause_of_its_own():
    watched = Watched().run(computing=0.2, ready=0.6)
    ready_ns = sum(wait_ns for _, _, wait_ns, _ in watched.spans)
    (cause,) = watched.explain(throttled_ns=ready_ns, n_processors=0.25).causes
    assert (cause.kind, cause.share) == ("more-computing", pytest.approx(1.0, abs=0.02))
    assert cause.evidence[1].startswith("held back for it by its quota ")
    shares = causes(watched.explain(throttled_ns=ready_ns, n_processors=0.5))
    assert shares["more-computing"] == pytest.approx(0.5, abs=0.05)
    assert shares["cpu-quota"] == pytest.approx(0.5, abs=0.05), "beyond what it needs"


def test_a_thread_that_is_woken_and_does_not_run_is_ready_for_that_part():
    watched = Watched()
    watched._spend = lambda how, ms: watched.away(ms, OffCpuReason.SLEEP, ms / 2)
    shares = causes(watched.run(asleep=0.6).explain())
    assert shares["cpu-contention"] == pytest.approx(0.5, abs=0.04)
    assert shares["unexplained"] == pytest.approx(0.5, abs=0.04)


def test_operations_of_a_step_differ_and_that_is_nothing_uneven():
    found = Watched(turn=0.0).run().explain()
    assert causes(found) == {"unexplained": 1.0}
    assert "operations were alike" in found.causes[0].evidence[0]


def test_where_it_waits_for_others_is_no_part_of_its_own_time():
    assert causes(Watched(wait_ms=90).run(computing=0.6).explain()) == {
        "more-computing": pytest.approx(1.0, abs=0.06)
    }


def test_evidence_names_the_lines_and_says_how_many_operations_were_long():
    lines = CodeLines(100, {"train.py:9 main → pad": 90}, {"train.py:3 next": 10})
    found = Watched().run(computing=0.6).explain(lines, n_lost=3)
    (cause,) = found.causes
    assert " of 160 operations took " in cause.evidence[0]
    assert cause.evidence[0].endswith(" of it on a processor")
    assert cause.evidence[1:] == (
        "running, of 100 looks: train.py:9 main → pad (90%)",
        "3 switches were not seen",
    )


@pytest.mark.parametrize("how", ["computing", "asleep"])
def test_host_that_waits_for_its_gpu_by_spinning_or_asleep_does_not_compute(how):
    found = Watched().run(**{how: 0.6}).explain(device_share=0.9)
    assert causes(found) == {"gpu-computing": pytest.approx(0.9, abs=0.02)}
    half = causes(Watched().run(computing=0.6).explain(device_share=0.5))
    assert half == {
        "gpu-computing": pytest.approx(0.5, abs=0.02),
        "more-computing": pytest.approx(0.5, abs=0.02),
    }


def test_too_few_operations_and_those_that_began_unseen_explain_nothing():
    watched = Watched(n_steps=4).run(computing=2.0)
    assert "16 operations were watched" in watched.explain().causes[0].evidence[0]
    watched = Watched().run(computing=0.6)
    some = WatchedOps(
        np.array(watched.ops, OP), np.array(watched.spans, OFF_SPAN), watched.ops[-5][0]
    )
    assert "4 operations were watched" in find_uneven_causes(some).causes[0].evidence[0]


def test_without_any_switch_all_own_time_was_on_a_processor():
    watched = Watched().run(computing=0.6)
    watched.spans = []
    assert causes(watched.explain()) == {"more-computing": pytest.approx(1.0)}


@pytest.mark.parametrize("n_places", [1, 2, 4, 7, 12])
def test_places_of_a_step_are_found(n_places):
    rng = np.random.default_rng(5)
    usual = rng.permutation(np.linspace(10, 50, n_places))
    own = np.tile(usual, 300 // n_places) * rng.normal(1.0, 0.05, n_places * (300 // n_places))
    assert find_places(own) == n_places


def test_steps_in_turns_at_random_do_not_hide_the_places():
    watched = Watched(n_steps=50).run(computing=1.0)
    assert find_places(np.array(watched.ops, OP)["own_ns"].astype(float)) == len(PLACES_MS)
