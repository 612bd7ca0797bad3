"""What the kernel counts of processors: its own numbers, and those of a virtual machine that gets few of them."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ingero.agent.diagnosis.counters import CounterFiles
from ingero.agent.diagnosis.processors import TICK_NS, ProcessorCounters
from ingero.model.counters import ProcessorTimes
from ingero.units import NS_PER_S


def plant(proc, *stolen):
    """Processor N worked N+1 times 100 ticks: a hundred of each kind, idle and waiting for a disk not counted."""
    lines = ["cpu  9 9 9 9 9 9 9 9 9 9"]
    for number, ticks in enumerate(stolen):
        n = number + 1
        lines.append(
            f"cpu{number} {20 * n} {20 * n} {20 * n} 7000 900 {20 * n} {20 * n} {ticks} 3 3"
        )
    (proc / "stat").write_text("\n".join([*lines, "intr 77 1 2", "ctxt 5"]) + "\n")


def test_each_processor_has_what_it_did_and_what_was_taken_from_it(tmp_path):
    plant(tmp_path, 0, 30)
    assert ProcessorCounters(tmp_path).read_due(0) == {
        0: ProcessorTimes(100 * TICK_NS, 0, 1),
        1: ProcessorTimes(200 * TICK_NS, 30 * TICK_NS, 2),
    }


def test_a_machine_of_which_nothing_was_ever_taken_is_looked_at_seldom(tmp_path):
    processors = ProcessorCounters(tmp_path)
    plant(tmp_path, 0, 0)
    processors.read_due(5)
    plant(tmp_path, 0, 30)
    assert processors.read_due(29 * NS_PER_S)[1].stolen_ns == 0
    assert processors.read_due(31 * NS_PER_S)[1].stolen_ns == 30 * TICK_NS
    plant(tmp_path, 0, 50)
    assert processors.read_due(31 * NS_PER_S)[1].stolen_ns == 30 * TICK_NS, "one look at a time"
    assert processors.read_due(31 * NS_PER_S + 1)[1].stolen_ns == 50 * TICK_NS


@pytest.mark.parametrize("text", [None, "", "cpu0 1 2 3\n", "intr 5\n"])
def test_where_the_kernel_does_not_tell_nothing_is_known(tmp_path, text):
    if text is not None:
        (tmp_path / "stat").write_text(text)
    assert ProcessorCounters(tmp_path).read_due(0) == {}


def test_a_process_has_those_that_it_may_run_on(tmp_path):
    allowed = sorted(os.sched_getaffinity(0))
    plant(tmp_path, *range(10, 10 + allowed[-1] + 1))
    files = replace(CounterFiles(), processors=ProcessorCounters(tmp_path))
    os.sched_setaffinity(0, allowed[-1:])
    try:
        one = files.read(os.getpid(), 0)
    finally:
        os.sched_setaffinity(0, allowed)
    last = allowed[-1]
    assert one.processors == ProcessorTimes(
        (last + 1) * 100 * TICK_NS, (10 + last) * TICK_NS, 1 << last
    )
    (tmp_path / "stat").unlink()
    assert (
        replace(files, processors=ProcessorCounters(tmp_path)).read(os.getpid(), 0).processors
        is None
    )


def test_this_machine_says_it():
    """Of the real file: as many as there are, each of which has worked."""
    found = ProcessorCounters().read_due(0)
    assert len(found) == os.cpu_count()
    assert all(one.worked_ns > 0 for one in found.values())
    total = [int(field) for field in Path("/proc/stat").read_text().split()[1:9]]
    assert sum(one.worked_ns for one in found.values()) / TICK_NS == pytest.approx(
        sum(total) - total[3] - total[4] - total[7], rel=0.01
    )
