"""Who a process is, asked by two threads while it becomes another program."""

import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.agent.capture.becoming import become_next, running_rank_0

from ingero.agent.capture import processes
from ingero.agent.capture.delivery import EventDelivery
from ingero.agent.capture.kernel.abi import ProcessEvent
from ingero.agent.capture.probes.stacks import RecordedStacks
from ingero.agent.capture.processes import TracedProcesses


def counted(pid):
    return np.array([(pid,)], dtype=[("pid", "<u4")])


def record(pid, event):
    return np.array([(pid, event)], dtype=[("pid", "<u4"), ("event", "<u4")])


class Held:
    """Reads as `read_identity` does, and keeps each answer of one thread back until it is let go."""

    def __init__(self, monkeypatch):
        self.has_read, self.let_go = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = None
        self._read = processes.read_identity
        monkeypatch.setattr(processes, "read_identity", self)

    def __call__(self, pid, **how):
        identity = self._read(pid, **how)
        if threading.current_thread().name == self.thread:
            self.has_read.release()
            self.let_go.acquire()
        return identity

    def start(self, target, *arguments):
        self.thread = "held"
        thread = threading.Thread(target=target, args=arguments, name=self.thread)
        thread.start()
        self.has_read.acquire()
        return thread


def ranks_of(traced):
    return [identity.place.rank for identity in traced.pop_met()]


def test_a_process_that_many_threads_meet_is_announced_once():
    traced = TracedProcesses(None, ())
    barrier = threading.Barrier(8)

    def meet():
        barrier.wait()
        traced.meet(os.getpid())
        traced.meet_counted(counted(os.getpid()))

    with ThreadPoolExecutor(8) as pool:
        for one in [pool.submit(meet) for _ in range(8)]:
            one.result()
    assert [identity.pid for identity in traced.pop_met()] == [os.getpid()]


def test_a_rank_read_before_execve_is_not_told_after_it(monkeypatch):
    traced, held = TracedProcesses(None, ()), Held(monkeypatch)
    with running_rank_0() as process:
        thread = held.start(traced.meet, process.pid)  # it has read rank 0
        become_next(process)
        traced.on_records(record(process.pid, ProcessEvent.EXEC))
        held.let_go.release()
        held.let_go.release()  # of the second answer
        thread.join()
        assert ranks_of(traced) == [1]


def test_a_process_that_chose_another_gpu_for_its_next_program_is_announced_again():
    traced = TracedProcesses(None, ())
    with running_rank_0(CUDA_VISIBLE_DEVICES="0") as process:
        traced.meet(process.pid)
        become_next(process)
        traced.on_records(record(process.pid, ProcessEvent.EXEC))
        shown = [identity.assignment.gpus.visible for identity in traced.pop_met()]
    assert shown == ["0", "1"]


def test_a_thread_with_an_old_answer_leaves_the_newer_question_alone(monkeypatch):
    traced, held = TracedProcesses(None, ()), Held(monkeypatch)
    with running_rank_0() as process:
        thread = held.start(traced.meet, process.pid)
        become_next(process)
        traced.on_records(record(process.pid, ProcessEvent.EXEC))
        traced.meet_counted(counted(process.pid))
        held.let_go.release()
        thread.join()
        assert ranks_of(traced) == [1]


def test_a_process_that_could_not_be_asked_once_is_asked_again(monkeypatch):
    traced, read = TracedProcesses(None, ()), processes.read_identity
    monkeypatch.setattr(processes, "read_identity", lambda _pid, **_how: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        traced.meet(os.getpid())
    monkeypatch.setattr(processes, "read_identity", read)
    traced.meet(os.getpid())
    assert [identity.pid for identity in traced.pop_met()] == [os.getpid()]


def test_a_process_that_ended_while_it_was_asked_is_not_remembered(monkeypatch):
    traced, held = TracedProcesses(None, ()), Held(monkeypatch)
    with running_rank_0() as process:
        thread = held.start(traced.meet, process.pid)
    traced.on_records(record(process.pid, ProcessEvent.EXIT))
    traced.pop_ended()
    held.let_go.release()
    held.let_go.release()
    thread.join()
    assert not ranks_of(traced)


@contextmanager
def sleeping():
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def meet_ended(traced):
    """Its pid: it was met, and has ended since."""
    with sleeping() as process:
        traced.meet(process.pid)
    return process.pid


def test_a_process_that_ended_without_a_record_is_missed_at_the_second_look_and_forgotten():
    traced = TracedProcesses(None, ())
    pid = meet_ended(traced)
    assert traced.find_unrecorded(()) == []
    assert traced.find_unrecorded(()) == [pid]
    assert traced.pop_ended() == [pid]
    assert pid not in traced._identities
    assert traced.find_unrecorded(()) == []


def test_a_process_that_nobody_waits_for_has_ended():
    traced = TracedProcesses(None, ())
    with sleeping() as process:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        traced.find_unrecorded([process.pid])
        assert traced.find_unrecorded([process.pid]) == [process.pid]


def test_a_process_whose_record_comes_late_ended_once():
    traced = TracedProcesses(None, ())
    pid = meet_ended(traced)
    assert traced.find_unrecorded(()) == []
    traced.on_records(record(pid, ProcessEvent.EXIT))
    assert traced.find_unrecorded([pid]) == []
    assert traced.pop_ended() == [pid]


def test_a_pid_that_another_process_has_by_now_is_not_taken_for_the_first(monkeypatch):
    traced, read = TracedProcesses(None, ()), processes.read_identity
    first = replace(read(os.getpid()), start_ticks=1, job="of the first")
    monkeypatch.setattr(processes, "read_identity", lambda _pid, **_how: first)
    traced.meet(os.getpid())
    monkeypatch.setattr(processes, "read_identity", read)
    traced.find_unrecorded(())
    assert traced.find_unrecorded(()) == [os.getpid()]
    traced.pop_ended()
    traced.meet_counted(counted(os.getpid()))
    assert [identity.job for identity in traced.pop_met()] == ["of the first", ""]


def test_the_kernel_and_what_runs_are_not_missed():
    traced = TracedProcesses(None, ())
    traced.meet(os.getpid())
    with sleeping() as process:
        for _ in range(3):
            assert traced.find_unrecorded([0, process.pid]) == []


def count_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_memory_of_processes_without_a_probed_call_is_let_go():
    class Map:
        def update(self, *_):
            pass

    traced = TracedProcesses(None, ())
    maps = dict.fromkeys(("seen_stacks", "pythons", "unwind_rules"), Map())
    stacks = RecordedStacks(maps, None)
    before = count_descriptors()
    for _ in range(5):
        with sleeping() as process:
            stacks.examine(process.pid)
    assert count_descriptors() == before + 5
    traced.find_unrecorded(stacks.pids)
    traced.find_unrecorded(stacks.pids)
    stacks.forget(traced.pop_ended())
    assert count_descriptors() == before


def test_observers_are_told_of_ends_that_no_record_tells():
    class Keeper:
        ended = ()

        def on_unrecorded_ends(self, pids):
            self.ended = pids

    traced, keeper = TracedProcesses(None, ()), Keeper()
    delivery = EventDelivery(SimpleNamespace(with_stacks=False), traced, [object(), keeper], 0)
    with sleeping() as process:
        keys = counted(process.pid)
        delivery.announce_ends(keys)
    for _ in range(2):
        assert not keeper.ended
        delivery.announce_ends(keys)
    assert keeper.ended == [process.pid]
