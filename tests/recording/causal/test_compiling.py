"""Pauses until new code is loaded: which are compiling, which recur, and which are something else."""

from dataclasses import replace

import numpy as np
import pytest
from tests.recording.scenarios.faults import compile_for

from ingero.model.events import DriverOp, HostOp, Source
from ingero.model.recording import AGGREGATE
from ingero.recording.causal.engine import explain
from ingero.recording.scenarios.builder import RecordingBuilder
from ingero.recording.scenarios.loop import LAUNCH, Loop

PID = 4821
MS = 1_000_000
LOAD = (Source.DRIVER, DriverOp.MODULE_LOAD)
HOST = Source.HOST


def incidents(built):
    return {one.rule: one for one in explain(built.build()).incidents}


def running_loop():
    built = RecordingBuilder()
    loop = Loop(built)
    loop.steps(20)
    return built, loop


def compiling_loop(lengths_s, *, n_programs=1):
    built, loop = running_loop()
    for i, length_s in enumerate(lengths_s):
        compile_for(loop, length_s, 6000 + 10 * i, n_programs=n_programs)
        loop.steps(20)
    return built


def test_compiling_in_a_running_job_is_a_finding_with_its_pauses_and_their_time():
    found = incidents(compiling_loop([2.0, 1.5, 2.5, 2.0]))
    assert list(found) == ["repeated_compiling"]
    one = found["repeated_compiling"]
    assert (one.severity, one.n_cases, one.causes[0].name) == ("HIGH", 4, "compiling new code")
    assert one.lost_ns == pytest.approx(8e9, rel=0.01)
    assert one.title.startswith(
        "Repeated compiling: train launched nothing for 8 s in 4 pauses until new code was loaded (longest 2.5"
    )
    assert any("TORCH_LOGS=recompiles" in step for step in one.fix)


def test_a_compiler_inside_the_process_is_found_where_its_pauses_recur():
    one = incidents(compiling_loop([2.0] * 4, n_programs=0))["repeated_compiling"]
    assert one.causes[0].name == "preparing new code in the process"


@pytest.mark.parametrize("lengths_s", [[3.0], [2.0, 3.0], [9.0, 0.2, 0.2, 0.2]], ids=str)
def test_compiling_that_does_not_recur_is_part_of_the_cold_start(lengths_s):
    found = incidents(compiling_loop(lengths_s))
    assert list(found) == ["lazy_load"]
    assert found["lazy_load"].causes[0].name == "compiling"
    assert found["lazy_load"].lost_ns == pytest.approx(sum(lengths_s) * 1e9, rel=0.05)


def test_what_is_not_proven_to_be_compiling_and_does_not_recur_is_nothing():
    assert incidents(compiling_loop([3.0, 3.0], n_programs=0)) == {}


@pytest.mark.parametrize("how", ["exec", "fork", "context"])
def test_the_first_minute_of_a_program_is_its_start(how):
    built = compiling_loop([2.0] * 4)
    if how == "exec":
        built.call((HOST, HostOp.EXEC), 0, 0, PID)
    elif how == "fork":
        built.call((HOST, HostOp.FORK), 0, 0, 4000, arg1=PID)
    else:
        built.call((Source.DRIVER, DriverOp.PRIMARY_CTX_RETAIN), 0, MS, PID)
    found = incidents(built)
    assert list(found) == ["lazy_load"]
    assert found["lazy_load"].title.startswith("Cold start: train compiled for 8 s before")


def test_compiling_after_the_first_minute_is_told_apart_from_the_start():
    built = RecordingBuilder()
    loop = Loop(built)
    loop.call((Source.DRIVER, DriverOp.PRIMARY_CTX_RETAIN), MS)
    loop.steps(5)
    compile_for(loop, 20.0, 5900)
    for _ in range(50):
        loop.steps(1)
        loop.sleep(1_000 * MS)
    for i in range(4):
        compile_for(loop, 2.0, 6000 + i)
        loop.steps(5)
    found = incidents(built)
    assert found["repeated_compiling"].lost_ns == pytest.approx(8e9, rel=0.01)
    assert found["lazy_load"].lost_ns == pytest.approx(20e9, rel=0.01)


def test_workers_that_live_on_and_a_late_batch_are_no_compiling():
    built, loop = running_loop()
    for i in range(5):
        built.call((HOST, HostOp.FORK), loop.at_ns, 0, PID, arg1=6000 + i)
        built.call((HOST, HostOp.EXEC), loop.at_ns + MS, 0, 6000 + i)
        loop.sleep(2_000 * MS, other_pid=6000 + i)
        loop.call(LOAD, MS)
        loop.steps(20)
    assert not {"repeated_compiling", "lazy_load"} & set(incidents(built))


def test_slow_batches_of_which_some_use_a_kernel_for_the_first_time_are_no_compiling():
    built, loop = running_loop()
    for i in range(40):
        loop.sleep(MS)
        loop.rest(500 * MS)
        if i % 10 == 0:
            loop.call(LOAD, MS)
        loop.steps(1)
    assert not {"repeated_compiling", "lazy_load"} & set(incidents(built))


def test_a_short_program_in_a_long_silence_is_no_compiler():
    built, loop = running_loop()
    for i in range(2):
        built.call((HOST, HostOp.FORK), loop.at_ns, 0, PID, arg1=6000 + i)
        built.call((HOST, HostOp.EXEC), loop.at_ns + MS, 0, 6000 + i)
        built.call((HOST, HostOp.EXIT), loop.at_ns + 10 * MS, 0, 6000 + i)
        loop.sleep(MS)
        loop.rest(6_000 * MS)
        loop.call(LOAD, MS)
        loop.steps(20)
    assert incidents(built) == {}


def test_a_pid_that_another_program_has_by_now_is_no_child():
    built, loop = running_loop()
    built.call((HOST, HostOp.FORK), loop.at_ns, 0, PID, arg1=6000)
    built.call((HOST, HostOp.FORK), loop.at_ns + MS, 0, 77, arg1=6000)
    built.call((HOST, HostOp.EXEC), loop.at_ns + 2 * MS, 0, 6000)
    built.call((HOST, HostOp.EXIT), loop.at_ns + 1_500 * MS, 0, 6000)
    loop.sleep(MS)
    loop.rest(2_000 * MS)
    loop.call(LOAD, MS)
    loop.steps(20)
    assert incidents(built) == {}


@pytest.mark.parametrize(("n_launches", "is_found"), [(500, True), (400_000, False)])
def test_launches_without_a_row_may_fill_a_pause_or_not(n_launches, is_found):
    """The row after each pause stands for so many launches; they take a little time each."""
    recording = compiling_loop([2.0] * 4, n_programs=0).build()
    events = recording.events
    loads = events["start_ns"][events["source"] == Source.DRIVER]
    launches = np.flatnonzero((events["source"] == Source.CUDA) & (events["op"] == LAUNCH[1]))
    after = launches[np.searchsorted(events["start_ns"][launches], loads)]
    events["weight"][after] = n_launches
    counted = np.zeros(1, AGGREGATE)
    counted["pid"], counted["source"], counted["op"] = PID, *LAUNCH
    counted["bucket_ns"] = events["start_ns"][0] // 60_000_000_000 * 60_000_000_000
    counted["stored"] = len(launches)
    counted["count"] = len(launches) + 4 * (n_launches - 1)
    counted["sum_duration_ns"] = counted["count"] * 12_000
    explanation = explain(replace(recording, aggregates=counted))
    found = [one for one in explanation.incidents if one.rule == "repeated_compiling"]
    assert bool(found) is is_found
    if is_found:
        assert 7e9 < found[0].lost_ns < 8.1e9
    else:
        assert "repeated_compiling" in {name for one in explanation.unknown for name in one.rules}
