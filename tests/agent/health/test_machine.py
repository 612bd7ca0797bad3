from hypothesis import given
from hypothesis import strategies as st

from ingero.agent.health.signals.machine import (
    MachineSettings,
    State,
    StateMachine,
    advance,
    is_waking,
    reject_future,
)
from ingero.agent.health.signals.reading import Reading, Signals

SETTINGS = MachineSettings(warmup=4, idle_intervals=3, stale_intervals=3)
SIGNALS = Signals(100, 0.9, 0.9, 0.9)


def read(launches=10, **facts):
    return Reading(signals=SIGNALS, launches=launches, wall_ns=0, **facts)


def play(machine, readings, settings=SETTINGS):
    """The state after each reading, and whether it was pushed."""
    trail = []
    for reading in readings:
        step = advance(machine, reading, settings)
        machine = step.machine
        trail.append((step.machine.state.value, step.is_pushed, step.is_restart))
    return machine, trail


ACTIVE = StateMachine(state=State.ACTIVE)


def test_a_stub_agent_is_active_on_its_thirtieth_sample():
    _, trail = play(StateMachine(), [read()] * 30, MachineSettings())  # vector 13
    assert [state for state, _, _ in trail] == ["calibrating"] * 29 + ["active"]
    assert all(is_pushed for _, is_pushed, _ in trail)


def test_failed_reads_do_not_count_toward_the_warm_up():
    _, trail = play(StateMachine(), [read(), None, read(), None, read(), read()])
    assert [state for state, _, _ in trail] == ["calibrating"] * 5 + ["active"]
    assert [is_pushed for _, is_pushed, _ in trail] == [True, False, True, False, True, True]


def test_three_failed_reads_in_a_row_are_stale_and_one_good_read_calibrates_again():
    _, trail = play(ACTIVE, [None, None, read(), None, None, None, None, read(), read()])
    assert trail == [
        ("active", False, False),
        ("active", False, False),
        ("active", True, False),
        ("active", False, False),
        ("active", False, False),
        ("stale", False, False),
        ("stale", False, False),
        ("calibrating", False, True),
        ("calibrating", True, False),
    ]


def test_three_silent_intervals_are_idle_and_a_launch_calibrates_again():
    _, trail = play(
        ACTIVE, [read(0), read(0), read(1), read(0), read(0), read(0), read(0), read(5)]
    )
    assert [state for state, _, _ in trail] == (["active"] * 5 + ["idle", "idle", "calibrating"])
    assert trail[6] == ("idle", True, False)
    assert trail[7] == ("calibrating", False, True)


def test_a_hung_node_stays_active_however_long_it_hangs():
    _, trail = play(ACTIVE, [read(0, is_pending=True)] * 50)
    assert {state for state, _, _ in trail} == {"active"}


def test_a_node_that_hangs_out_of_idleness_wakes():
    assert is_waking(StateMachine(state=State.IDLE), read(0, is_pending=True))
    assert not is_waking(StateMachine(state=State.IDLE), read(0))


def test_launches_that_cannot_be_counted_make_nobody_idle():
    _, trail = play(ACTIVE, [read(None)] * 10)
    assert {state for state, _, _ in trail} == {"active"}


def test_another_workload_calibrates_again_and_the_first_does_not():
    machine, trail = play(
        ACTIVE, [read(workload="a"), read(workload="a"), read(), read(workload="b")]
    )
    assert [is_restart for _, _, is_restart in trail] == [False, False, False, True]
    assert machine.workload == "b"
    assert machine.n_warm == 1


def test_a_reading_from_the_future_is_a_failed_one():
    minute_ns = 60_000_000_000
    reading = Reading(signals=SIGNALS, launches=1, wall_ns=minute_ns)
    assert reject_future(reading, 0) is reading
    assert reject_future(reading, -1) is None


def _slow_machine(observations, settings):
    """The table of the specification, written as it reads."""
    state, warm, silent, failed = "calibrating", 0, 0, 0
    for good, launches in observations:
        if not good:
            failed += 1
            if failed >= settings.stale_intervals:
                state = "stale"
        elif state == "stale" or (state == "idle" and launches > 0):
            state, warm, silent, failed = "calibrating", 1, 0, 0
            if warm >= settings.warmup:
                state = "active"
        elif state == "calibrating":
            failed, warm = 0, warm + 1
            if warm >= settings.warmup:
                state = "active"
        else:
            failed = 0
            silent = 0 if launches > 0 else silent + 1
            if state == "active" and silent >= settings.idle_intervals:
                state = "idle"
        yield state


counts = st.integers(1, 5)


@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from([0, 0, 1])), max_size=60),
    st.builds(MachineSettings, warmup=counts, idle_intervals=counts, stale_intervals=counts),
)
def test_the_machine_agrees_with_the_table_written_out(observations, settings):
    readings = [read(launches) if good else None for good, launches in observations]
    _, trail = play(StateMachine(), readings, settings)
    assert [state for state, _, _ in trail] == list(_slow_machine(observations, settings))
    for (state, is_pushed, is_restart), reading in zip(trail, readings, strict=True):
        assert not (is_pushed and (reading is None or is_restart))
        assert not (is_pushed and state == "stale")
