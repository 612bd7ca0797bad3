"""NVIDIA's own binding on the simulator's libnvidia-ml: what it tells, what a device lacks, and no library at all.

The simulator stands in for the devices only; binding, decoding and rows are the real ones.
"""

import ctypes.util
import subprocess
import sys

import pytest

from ingero.agent.app.exporting import PrometheusPage
from ingero.agent.app.gpus import GpuWatch
from ingero.agent.gpu.nvml import Nvml
from ingero.agent.gpu.readings import GpuReading, build_gpu_events, find_throttles
from ingero.gpusim.runner import get_program
from ingero.model.events import GpuOp, Source
from ingero.telemetry.clock import SystemClock
from ingero.testing.clock import ManualClock

GIB = 1 << 30
MS = 1_000_000


@pytest.fixture
def nvml(monkeypatch):
    """NVML of two simulated devices: the loader takes a library whose name is loaded already."""
    monkeypatch.setenv("GPUSIM_THROTTLE_NS", str(3 * MS))
    monkeypatch.setenv("GPUSIM_XID", "79")
    ctypes.CDLL(str(get_program().parent / "libnvidia-ml.so.1"))
    opened = Nvml(SystemClock())
    assert opened.driver == "gpusim"
    yield opened
    opened.close()


def test_two_devices_are_read_and_what_one_lacks_is_absent(nvml):
    whole, plain = nvml.read()
    assert whole == GpuReading(
        index=0, uuid="GPU-sim-0", name="Simulated GPU 0",
        memory_used=7 * GIB, memory_free=73 * GIB, memory_total=80 * GIB,
        gpu_pct=97, memory_pct=41, sm_mhz=1410, memory_mhz=1593, temperature_c=61, power_mw=399_000,
        reasons=0x44, power_violation_ns=whole.power_violation_ns, thermal_violation_ns=0,
        hardware_violation_ns=0, ecc_corrected=5, ecc_uncorrected=0, nvlinks_active=2, nvlink_errors=21,
        pcie_generation=5, pcie_width=16, pcie_replays=0, is_mig=False, process_bytes={4711: 3 * GIB},
    )  # fmt: skip
    assert plain == GpuReading(
        index=1, uuid="GPU-sim-1", name="Simulated GPU 1",
        memory_used=8 * GIB, memory_free=72 * GIB, memory_total=80 * GIB,
        gpu_pct=96, memory_pct=41, sm_mhz=1410, memory_mhz=1593, temperature_c=62, power_mw=399_001,
        reasons=1, pcie_generation=4, pcie_width=8, pcie_replays=11, process_bytes={4712: None},
    )  # fmt: skip


def test_a_watch_makes_rows_of_throttling_and_errors_and_series_of_the_rest(nvml, monkeypatch):
    clock = ManualClock()
    watch = GpuWatch(nvml, clock)
    watch.look()
    watch.take_events()  # the simulator's one Xid, unless an earlier test's NVML took it
    clock.advance(5 * 10**9)
    monkeypatch.setenv("GPUSIM_ECC", "2")
    watch.look()
    rows = watch.take_events()
    assert rows["source"].tolist() == [Source.GPU] * 2
    assert rows["op"].tolist() == [GpuOp.THROTTLE_POWER, GpuOp.ECC_UNCORRECTED]
    assert rows["duration_ns"].tolist() == [3 * MS, 0]
    assert rows["arg0"].tolist() == [0x44, 2]
    assert rows["gpu_id"].tolist() == [0, 0]
    assert rows["start_ns"].tolist() == [clock.wall_ns() - 3 * MS, clock.wall_ns()]
    assert len(watch.take_events()) == 0

    page = PrometheusPage()
    page.take(tuple(watch.iter_series()), 0)
    told = dict(line.rsplit(" ", 1) for line in page.render().splitlines() if line[0] != "#")
    assert float(told['gpu_memory_used_bytes{uuid="GPU-sim-1"}']) == 8 * GIB
    assert float(told['gpu_throttle_power_active{uuid="GPU-sim-0"}']) == 1
    assert float(told['gpu_throttle_power_active{uuid="GPU-sim-1"}']) == 0
    assert float(told['gpu_throttle_hw_active{uuid="GPU-sim-0"}']) == 1
    assert float(told['gpu_memory_process_allocated_bytes{pid="4711",uuid="GPU-sim-0"}']) == 3 * GIB
    assert float(told['gpu_ecc_uncorrected_total{uuid="GPU-sim-0"}']) == 2
    assert not any("gpu_ecc" in name and "sim-1" in name for name in told)
    assert watch.model == "Simulated GPU 0, Simulated GPU 1"


def test_a_critical_error_is_told_once_with_its_number_and_device():
    code = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1])\n"
        "from ingero.agent.gpu.nvml import Nvml\n"
        "from ingero.telemetry.clock import SystemClock\n"
        "nvml = Nvml(SystemClock())\n"
        "print([(e.index, e.number) for e in nvml.take_errors()], nvml.take_errors())\n"
    )
    library = str(get_program().parent / "libnvidia-ml.so.1")
    result = subprocess.run(
        [sys.executable, "-c", code, library],
        capture_output=True, text=True, check=True, env={"GPUSIM_XID": "79"},
    )  # fmt: skip
    assert result.stdout == "[(1, 79)] []\n"


def test_without_the_library_one_error_says_where_it_comes_from():
    code = (
        "from ingero.agent.gpu.nvml import Nvml\n"
        "from ingero.errors import UnsupportedError\n"
        "from ingero.telemetry.clock import SystemClock\n"
        "try:\n    Nvml(SystemClock())\n"
        "except UnsupportedError as error:\n    print(error.message, '|', error.hint)\n"
    )
    if ctypes.util.find_library("nvidia-ml"):
        pytest.skip("this machine has NVIDIA's driver")
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "NVML" in result.stdout
    assert "libnvidia-ml.so.1" in result.stdout


@pytest.mark.parametrize(
    ("reasons", "groups"),
    [
        (0x0, set()),
        (0x1, set()),  # idle
        (0x2, {"sw"}),
        (0x4, {"power", "sw"}),
        (0x8, {"hw"}),
        (0x20, {"thermal", "sw"}),
        (0x40, {"thermal", "hw"}),
        (0x80, {"power", "hw"}),
        (1 << 40, {"hw"}),  # not known yet
        (0x24, {"power", "thermal", "sw"}),
    ],
)
def test_reasons_are_grouped_as_documented(reasons, groups):
    assert find_throttles(reasons) == groups


def test_a_counter_that_went_back_or_was_absent_makes_no_row():
    before = GpuReading(0, power_violation_ns=9 * MS, thermal_violation_ns=None, ecc_uncorrected=4)
    now = GpuReading(0, power_violation_ns=2 * MS, thermal_violation_ns=5 * MS, ecc_uncorrected=1)
    assert len(build_gpu_events(before, now, 10**18, 10**9)) == 0
    assert len(build_gpu_events(None, now, 10**18, 10**9)) == 0
