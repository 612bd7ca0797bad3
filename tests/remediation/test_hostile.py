"""Whatever Fleet, the scheduler, the clock and kill -9 do: what a remediator must never do, and where it must end.

``INGERO_HOSTILE_RUNS=1000`` makes so many runs.
"""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.remediation.site import NODES, build_config

from ingero.model.verdicts import VerdictKind
from ingero.remediation.building import read_moment
from ingero.remediation.journal import Journal
from ingero.remediation.lock import JournalLock
from ingero.remediation.pair_tests import ALIVE, PairOutcome, PairTestState
from ingero.remediation.records import ActionState
from ingero.remediation.remediator import Remediator
from ingero.testing.clock import ManualClock
from ingero.testing.remediation import (
    CLUSTER,
    HandFleet,
    HandPairScheduler,
    SchedulerAnswer,
    build_verdict,
)
from ingero.units import NS_PER_S

RUNS = int(os.environ.get("INGERO_HOSTILE_RUNS", "40"))
HOUR_NS = 3600 * NS_PER_S
AT_ONCE, PER_HOUR = 1, 2
PROTECTED = "n4"
KINDS = [kind for kind in VerdictKind if kind is not VerdictKind.CULPRIT]
POINTS = ("apply", "reverse", "requeue", "add", "change", "submit_test", "cancel_test", "put")
CONFIRM = (
    "confirm: {pair_test: {max_wait: 20s, time_limit: 20s, retry_after: 10s, valid_for: 5m}}\n"
)


class Killed(BaseException):
    """What kill -9 does: nothing more of this process runs."""


class KillableTests:
    """The journal's pair tests, with the same."""

    def __init__(self, tests, reach):
        self.read, self.reach, self.write = tests.read, reach, tests.put

    def put(self, record):
        self.reach("before put")
        self.write(record)
        self.reach("after put")


class KillableJournal(Journal):
    """A journal that can be killed before and after each write."""

    def __init__(self, path, reach):
        self.reach = reach
        super().__init__(path)
        self.pair_tests = KillableTests(self.pair_tests, reach)

    def add(self, record):
        self.reach("before add")
        super().add(record)
        self.reach("after add")

    def change(self, before, after):
        self.reach("before change")
        super().change(before, after)
        self.reach("after change")


class Process:
    """One remediator of the two: it acts once it has the lock, and loses all when it is killed."""

    def __init__(self, world):
        self.world = world
        self.lock = JournalLock(world.path)
        self.remediator = self.journal = None

    def poll(self):
        if not self.lock.take():
            return
        world = self.world
        if self.remediator is None:
            self.journal = KillableJournal(world.path, world.reach)
            self.remediator = Remediator(
                world.config, world.fleet, world.slurm, self.journal,
                lambda: read_moment(world.clock, "boot"),
            )  # fmt: skip
        self.remediator.poll()

    def end(self):
        self.lock.close()
        if self.journal is not None:
            self.journal.close()


class World:
    """Everything around two remediators of one journal, and what is true."""

    def __init__(self, folder, mode, *, is_confirming=False):
        self.path, self.stop = folder / "journal.db", folder / "stop"
        limits = f"max_nodes_at_once: {AT_ONCE}, max_nodes_per_hour: {PER_HOUR}, cool_down: 60s, after_clock_jump: 20s"
        self.config = build_config(
            "undo: {when_retracted: true, retracted_for: 10s}\n" + CONFIRM * is_confirming,
            mode,
            f"{limits}, protected_nodes: [{PROTECTED}], stop_file: {self.stop}",
        )
        self.clock, self.fleet = ManualClock(), HandFleet()
        self.slurm = HandPairScheduler(NODES, self.clock.mono_ns, self.reach)
        self.slurm.late_ns = 3 * NS_PER_S  # within the settle time; what is later nobody can bound
        self.kill_at, self.n_ops, self.culprits = None, 0, set()
        self.slurm.jobs = {"7": 0}
        self.is_confirming, self.disagreed = is_confirming, set()
        self.processes = [Process(self), Process(self)]

    def reach(self, what):
        """A place to be killed at; and where it is checked that what is asked for may be asked."""
        if what == "before apply":
            self.check_request()
        if self.kill_at is not None:
            point, self.kill_at = self.kill_at, (self.kill_at[0], self.kill_at[1] - 1)
            if point[0] == what and point[1] <= 0:
                self.kill_at = None
                raise Killed

    def check_request(self):
        assert self.fleet.clusters is not None
        assert not self.fleet.clusters[CLUSTER].in_panic
        assert not self.stop.exists()
        (record,) = [
            one
            for one in self.read()
            if one.state is ActionState.BEGUN and one.note == "to be asked"
        ][-1:]
        assert record.node_id in self.culprits
        assert record.evidence["verdict"] == "culprit"
        assert all(clause["met"] for clause in record.clauses)
        assert record.node_id != PROTECTED
        if self.is_confirming:
            last = [one for one in self.read_tests() if one.episode == record.episode][-1]
            assert (last.suspect, last.outcome) == (record.target, PairOutcome.CONFIRMS)
            times = last.times
            assert min(times[last.suspect]) > 1.1 * max(times[last.peer])

    def read_tests(self):
        with Journal(self.path, read_only=True) as journal:
            return journal.pair_tests.read()

    def read(self):
        with Journal(self.path, read_only=True) as journal:
            return journal.actions()

    def poll(self, which=0):
        self.clock.advance(2 * NS_PER_S)
        self.slurm.catch_up()
        process = self.processes[which]
        try:
            process.poll()
        except Killed:
            process.end()
            self.processes[which] = Process(self)
        self.check()

    def check(self):
        """What holds at any time."""
        marked = [node.mark for node in self.slurm.nodes.values() if node.mark]
        assert len(marked) <= AT_ONCE
        records = {one.action_id: one for one in self.read()} if self.path.exists() else {}
        assert {mark for _, _, mark in self.slurm.drained} <= set(records)
        acted = {mark for _, _, mark in self.slurm.drained}
        assert len({records[mark].episode for mark in acted}) == len(acted)
        begun = sorted(
            records[mark].began.mono_ns for mark in {m for _, _, m in self.slurm.drained}
        )
        for at, first in enumerate(begun):
            assert sum(one - first < HOUR_NS for one in begun[at:]) <= PER_HOUR
        for _, node, mark in self.slurm.drained:
            assert records[mark].target == node != PROTECTED
        tests = self.read_tests() if self.path.exists() else ()
        assert sum(one.state in ALIVE for one in tests) <= 1
        assert len(set(self.slurm.submitted)) == len(self.slurm.submitted)
        assert {one.test_id for one in self.slurm.tests} <= {one.test_id for one in tests}
        assert all(PROTECTED not in {one.suspect, one.peer} for one in tests)

    def say(self, culprits, others=KINDS[0], *, in_panic=False):
        self.n_ops += 1
        self.culprits = set(culprits)
        self.slurm.slow = self.culprits ^ self.disagreed
        self.fleet.say(
            *(
                build_verdict(node, VerdictKind.CULPRIT if node in self.culprits else others, n_ops=self.n_ops)
                for node in NODES
            ),
            in_panic=in_panic,
        )  # fmt: skip

    def answer_people(self, which, state):
        """A person approves, or asks something back."""
        from dataclasses import replace

        wanted = {
            ActionState.APPROVED: {ActionState.PROPOSED},
            ActionState.UNDOING: {ActionState.BEGUN, ActionState.DONE},
        }
        if not self.path.exists():
            return
        found = [one for one in self.read() if one.state in wanted[state]]
        if found:
            record = found[which % len(found)]
            with Journal(self.path) as journal:
                journal.change(
                    record, replace(record, state=state, is_asked_back=state is ActionState.UNDOING)
                )

    def end_well(self):
        """All answer rightly again and nobody is a culprit: every action ends."""
        self.kill_at, self.slurm.answer, self.slurm.is_away = None, SchedulerAnswer.RIGHT, False
        self.slurm.n_lies, self.slurm.is_busy = 0, False
        self.stop.unlink(missing_ok=True)
        for process in self.processes:
            process.end()
        self.processes = [Process(self), Process(self)]
        for _ in range(12):
            self.say([], VerdictKind.UNKNOWN)
            self.poll(0)
        states = {one.action_id: one.state for one in self.read()}
        assert not {ActionState.BEGUN, ActionState.UNDOING} & set(states.values()), states
        marked = {node.mark for node in self.slurm.nodes.values() if node.mark}
        assert marked == {mark for mark, state in states.items() if state is ActionState.DONE}
        assert self.slurm.alive == []
        assert all(one.state is PairTestState.CLOSED for one in self.read_tests())
        for process in self.processes:
            process.end()


some_nodes = st.sets(st.sampled_from(NODES), max_size=4)
moments = st.integers(1, 6)
steps = st.one_of(
    st.tuples(st.just("lasting"), some_nodes, moments),
    st.tuples(st.just("lasting"), some_nodes, moments),
    st.tuples(st.just("retracted"), some_nodes, moments),
    st.tuples(st.just("other_verdict"), st.sampled_from(KINDS), moments),
    st.tuples(st.just("panic"), some_nodes, moments),
    st.tuples(st.just("fleet_away"), moments),
    st.tuples(st.just("fleet_starts_over"), some_nodes),
    st.tuples(st.just("answers"), st.sampled_from(SchedulerAnswer), some_nodes, moments),
    st.tuples(st.just("asked_back"), st.sampled_from(SchedulerAnswer), some_nodes),
    st.tuples(st.just("scheduler_away"), some_nodes, moments),
    st.tuples(st.just("scheduler_lies"), some_nodes),
    st.tuples(st.just("clock_jumps"), st.integers(-10_000, 10_000)),
    st.tuples(st.just("wait"), st.integers(1, 5000)),
    st.tuples(st.just("kill"), st.sampled_from(POINTS), st.booleans(), st.integers(0, 3)),
    st.tuples(st.just("other_remediator"), some_nodes, moments),
    st.tuples(st.just("stop"), st.booleans()),
    st.tuples(st.just("person"), st.integers(0, 3), st.sampled_from([ActionState.APPROVED, ActionState.UNDOING])),
    st.tuples(st.just("taken_over"), st.sampled_from(NODES), st.booleans()),
    st.tuples(st.just("tests_disagree"), some_nodes),
    st.tuples(st.just("nodes_busy"), some_nodes, moments),
)  # fmt: skip


def last(world, culprits, times, which=0):
    for _ in range(times):
        world.say(culprits)
        world.poll(which)


class Happenings:
    """What may happen, by name."""

    def __init__(self, world):
        self.world = world

    def lasting(self, nodes, times):
        last(self.world, nodes, times)

    def other_remediator(self, nodes, times):
        last(self.world, nodes, times, which=1)

    def retracted(self, nodes, times):
        for _ in range(times):
            self.world.say(nodes, VerdictKind.ORDINARY)
            self.world.poll()

    def other_verdict(self, kind, times):
        for _ in range(times):
            self.world.say([], kind)
            self.world.poll()

    def panic(self, nodes, times):
        for _ in range(times):
            self.world.say(nodes, in_panic=True)
            self.world.poll()

    def fleet_away(self, times):
        self.world.fleet.clusters, self.world.culprits = None, set()
        for _ in range(times):
            self.world.poll()

    def fleet_starts_over(self, nodes):
        self.world.n_ops = 0
        last(self.world, nodes, 1)

    def answers(self, kind, nodes, times):
        self.world.slurm.answer = kind
        last(self.world, nodes, times)
        self.world.slurm.answer = SchedulerAnswer.RIGHT

    def asked_back(self, kind, nodes):
        """A person wants a node back as soon as it is out, or before."""
        last(self.world, nodes, 2)
        self.answers(kind, nodes, 1)
        self.world.answer_people(0, ActionState.UNDOING)
        self.world.poll()

    def scheduler_away(self, nodes, times):
        self.world.slurm.is_away = True
        last(self.world, nodes, times)
        self.world.slurm.is_away = False

    def scheduler_lies(self, nodes):
        self.world.slurm.n_lies = 1
        last(self.world, nodes, 1)

    def clock_jumps(self, seconds):
        self.world.clock.step_wall(seconds * NS_PER_S)

    def wait(self, seconds):
        self.world.clock.advance(seconds * NS_PER_S)

    def kill(self, point, is_after, count):
        self.world.kill_at = (f"{'after' if is_after else 'before'} {point}", count)

    def stop(self, is_there):
        if is_there:
            self.world.stop.touch()
        else:
            self.world.stop.unlink(missing_ok=True)

    def person(self, which, state):
        self.world.answer_people(which, state)

    def tests_disagree(self, nodes):
        """From now on a test finds these slow where they are not, and the other way round."""
        self.world.disagreed = nodes

    def nodes_busy(self, nodes, times):
        self.world.slurm.is_busy = True
        last(self.world, nodes, times)
        self.world.slurm.is_busy = False

    def taken_over(self, node, is_down):
        taken = self.world.slurm.nodes[node]
        taken.mark, taken.is_down = "", is_down


def take(world, name, *values):
    """One thing happens."""
    getattr(Happenings(world), name)(*values)


@pytest.mark.slow
@settings(max_examples=RUNS, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    mode=st.sampled_from(["auto", "auto", "ask"]),
    is_confirming=st.booleans(),
    happenings=st.lists(steps, min_size=5, max_size=40),
)
def test_budgets_hold_only_culprits_are_acted_on_and_every_action_ends(
    mode, is_confirming, happenings
):
    memory = Path("/dev/shm")  # the journal is written to the disk each time
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        world = World(Path(folder), mode, is_confirming=is_confirming)
        for one in happenings:
            take(world, *one)
        world.end_well()


@pytest.mark.parametrize("is_confirming", [False, True])
def test_the_hostile_runs_do_act(tmp_path, is_confirming):
    world = World(tmp_path, "auto", is_confirming=is_confirming)
    for one in (
        ("lasting", {"n1", "n2", "n3", PROTECTED} if not is_confirming else {"n1"}, 8),
        ("kill", "change", True, 0),
        ("lasting", {"n3"}, 6),
    ):
        take(world, *one)
    drained = {node for _, node, _ in world.slurm.drained}
    assert len(drained) == AT_ONCE
    assert PROTECTED not in drained
    for node in world.slurm.nodes.values():
        node.mark = "a9999999999"
    with pytest.raises(AssertionError):
        world.check()
