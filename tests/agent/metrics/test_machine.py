"""The whole machine from files as the kernel writes them."""

import pytest

from ingero.agent.metrics.machine import Machine, Processors

MEMINFO = (
    "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 250 kB\nSwapTotal: 80 kB\nSwapFree: 60 kB\n"
)


@pytest.fixture
def proc(tmp_path):
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "loadavg").write_text("1.50 1.00 0.50 1/100 42\n")
    return tmp_path


def write_stat(proc, *ticks):
    (proc / "stat").write_text(f"cpu  {' '.join(map(str, ticks))} 7 0\ncpu0 1 2 3\n")


def test_a_processor_that_waits_for_a_disk_is_idle_everywhere(proc):
    machine, processors = Machine(proc), Processors(proc)
    # user nice system idle iowait irq softirq steal
    write_stat(proc, 100, 0, 100, 700, 100, 0, 0, 0)
    assert (machine.sample().cpu_share, processors.read_idle()) == (None, None)
    write_stat(proc, 120, 0, 110, 750, 120, 0, 0, 0)
    assert machine.sample().cpu_share == pytest.approx(0.3)
    assert processors.read_idle() == pytest.approx(0.7)


def test_a_count_of_iowait_that_goes_back_does_not_make_more_than_all_busy(proc):
    processors = Processors(proc)
    write_stat(proc, 0, 0, 0, 0, 100, 0, 0, 0)
    processors.read()
    write_stat(proc, 50, 0, 0, 0, 60, 0, 0, 0)
    assert processors.read() == 1.0


@pytest.mark.parametrize("text", ["", "cpu  1 2 3\n", "cpu  a b c d e\n"])
def test_a_file_that_says_nothing_is_no_reading_and_the_next_one_is_taken(proc, text):
    processors = Processors(proc)
    assert processors.read() is None  # there is no file yet
    write_stat(proc, 10, 0, 0, 90, 0, 0, 0, 0)
    assert processors.read() is None
    (proc / "stat").write_text(text)
    assert processors.read() is None
    write_stat(proc, 60, 0, 0, 140, 0, 0, 0, 0)
    assert processors.read() == 0.5


def test_a_machine_that_cannot_be_read_for_a_moment_has_no_state_and_then_one_again(proc):
    machine = Machine(proc)
    write_stat(proc, 100, 0, 100, 700, 100, 0, 0, 0)
    assert machine.sample() is not None
    (proc / "meminfo").unlink()
    assert machine.sample() is None
    assert machine.state is None
    assert list(machine.iter_series()) == []
    (proc / "meminfo").write_text(MEMINFO)
    assert machine.sample().load1 == 1.5
