"""NVIDIA's own binding on the simulator's libnvidia-ml: what it tells, what a device lacks, and no library at all.

The simulator stands in for the devices only; binding, decoding and rows are the real ones.
"""

import ctypes.util
import subprocess
import sys
import threading
from typing import ClassVar

import pytest

from ingero.agent.capture.gpu.nvml import Nvml
from ingero.agent.capture.gpu.readings import (
    GpuReading,
    MigInstance,
    PcieRate,
    Xid,
    build_gpu_events,
    find_throttles,
)
from ingero.agent.metrics import gpus
from ingero.agent.metrics.exporting import PrometheusPage, build_export
from ingero.agent.metrics.gpus import GpuWatch
from ingero.model.events import GpuOp, Source
from ingero.sim.runner import get_program
from ingero.telemetry.clock import SystemClock
from ingero.testing.clock import ManualClock

GIB = 1 << 30
MS = 1_000_000
HANG_S = 5
"""After which a test that would hang fails instead."""
PCIE_ERRORS = {
    "correctable": 4_000_000_000, "nak_received": 0, "receiver": 0, "bad_tlp": 3, "nak_sent": 0,
    "bad_dllp": 0, "non_fatal": 0, "fatal": 0, "unsupported_request": 0, "lcrc": 0,
}  # fmt: skip
"""Without those of the lanes, which the simulator refuses."""


class GatedPcie(Nvml):
    """The simulated devices, whose PCIe sample takes as long as the test wants."""

    def __init__(self, clock):
        super().__init__(clock)
        self.is_asked, self.gate = threading.Event(), threading.Event()
        self.n_looks, self.has_looked = 0, threading.Event()

    def read(self):
        self.n_looks += 1
        self.has_looked.set()
        return super().read()

    def read_pcie(self):
        self.is_asked.set()
        self.gate.wait(HANG_S)
        return super().read_pcie()


def read_page(watch):
    page = PrometheusPage()
    page.take(tuple(watch.iter_series()), 0)
    lines = page.render().splitlines()
    told = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    return {name: float(value) for name, value in told.items()}


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
        memory_used=7 * GIB, memory_free=73 * GIB, memory_total=80 * GIB, memory_reserved=GIB,
        gpu_pct=97, memory_pct=41, sm_mhz=1410, memory_mhz=1593, temperature_c=61, power_mw=399_000,
        reasons=0x44, power_violation_ns=whole.power_violation_ns, thermal_violation_ns=0,
        hardware_violation_ns=0, sync_boost_violation_ns=200, reliability_violation_ns=500,
        hw_thermal_violation_ns=5 * 10**9, power_brake_violation_ns=0,
        ecc_corrected=5, ecc_uncorrected=0, nvlinks_active=2,
        nvlink_errors={"replay": 8, "recovery": 9, "crc_flit": 10, "crc_data": 11},  # no ecc_data
        nvlink_sent_bytes=6_000_000_138 * 1024, nvlink_received_bytes=6_000_000_139 * 1024,
        pcie_generation=5, pcie_width=16, pcie_max_generation=5, pcie_max_width=16, pcie_replays=0,
        pcie_errors=PCIE_ERRORS, is_mig=False, process_bytes={4711: 3 * GIB, 4800: GIB},
    )  # fmt: skip
    assert plain == GpuReading(
        index=1, uuid="GPU-sim-1", name="Simulated GPU 1",
        memory_used=8 * GIB, memory_free=72 * GIB, memory_total=80 * GIB, memory_reserved=GIB,
        gpu_pct=96, memory_pct=41, sm_mhz=1410, memory_mhz=1593, temperature_c=62, power_mw=399_001,
        reasons=1, pcie_generation=4, pcie_width=8, pcie_max_generation=5, pcie_max_width=16,
        pcie_replays=11, process_bytes={4712: None},
    )  # fmt: skip


def test_a_watch_makes_rows_of_throttling_and_errors_and_series_of_the_rest(nvml, monkeypatch):
    clock = ManualClock()
    watch = GpuWatch(nvml, clock)
    watch.sample()
    watch.take_events()  # the simulator's one Xid, unless an earlier test's NVML took it
    clock.advance(5 * 10**9)
    monkeypatch.setenv("GPUSIM_ECC", "2")
    watch.sample()
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
    assert float(told['gpu_memory_used_bytes{gpu_uuid="GPU-sim-1"}']) == 8 * GIB
    assert float(told['gpu_throttle_power_active{gpu_uuid="GPU-sim-0"}']) == 1
    assert float(told['gpu_throttle_power_active{gpu_uuid="GPU-sim-1"}']) == 0
    assert float(told['gpu_throttle_hw_active{gpu_uuid="GPU-sim-0"}']) == 1
    assert (
        float(told['gpu_memory_process_allocated_bytes{gpu_uuid="GPU-sim-0",pid="4711"}'])
        == 3 * GIB
    )
    assert told['gpu_memory_total_bytes{gpu_uuid="GPU-sim-0"}'] == str(80 * GIB)
    assert float(told['gpu_memory_fragmentation_estimate{gpu_uuid="GPU-sim-0"}']) == 1 / 80
    assert float(told['gpu_ecc_uncorrected_total{gpu_uuid="GPU-sim-0"}']) == 2
    assert not any("gpu_ecc" in name and "sim-1" in name for name in told)
    assert watch.model == "Simulated GPU 0, Simulated GPU 1"


def test_a_newer_device_tells_violations_and_nvlink_errors_as_field_values(nvml, monkeypatch):
    monkeypatch.setenv("GPUSIM_NVML_NEW", "1")
    new, plain = nvml.read()
    assert (new.power_violation_ns, new.thermal_violation_ns) == (1074, 1075)
    assert (new.sync_boost_violation_ns, new.hardware_violation_ns) == (1076, 1077)
    assert new.reliability_violation_ns == 1079
    assert new.nvlink_errors == {"receive": 30, "link_recovery": 0}  # summed over links 0 to 2
    assert plain.nvlink_errors is None


def test_pcie_traffic_is_in_bytes_a_second_and_absent_where_refused(nvml):
    whole, plain = nvml.read_pcie()
    assert whole == PcieRate("GPU-sim-0", sent_bytes_s=12 * 10**9, received_bytes_s=0)
    assert plain == PcieRate("GPU-sim-1")


def test_the_instances_of_a_cut_device_have_their_ids_and_memory(nvml, monkeypatch):
    monkeypatch.setenv("GPUSIM_MIG", "1")
    parent, plain = nvml.read()
    assert parent.is_mig
    assert parent.instances == (
        MigInstance("MIG-sim-1-0", 1, 0, GIB, 39 * GIB, 40 * GIB, {4711: 2 * GIB}),
        MigInstance("MIG-sim-5-1", 5, 1, 5 * GIB, 15 * GIB, 20 * GIB, None),  # refuses processes
    )
    assert parent.process_bytes == {4711: 3 * GIB, 4800: GIB}  # 4711 is in both
    assert (plain.is_mig, plain.instances) == (None, None)


def test_what_a_device_counts_itself_does_not_count_since_tracing_began(nvml):
    watch = GpuWatch(nvml, ManualClock())
    watch.sample()
    export = build_export(watch.iter_series(), {}, 1, 2)
    (resource,) = export.tree.resource_metrics
    sums = [metric for metric in resource.scope_metrics[0].metrics if metric.sum]
    own = {metric.name for metric in sums if metric.sum.data_points[0].start_time_unix_nano == 1}
    assert own == {"gpu.xid.errors", "ingero.trace.gpu.dropped_rows"}
    others = [metric for metric in sums if metric.name not in own]
    assert {"gpu.nvlink.io", "gpu.nvlink.errors", "gpu.pcie.replays"} <= {
        one.name for one in others
    }
    starts = {point.start_time_unix_nano for one in others for point in one.sum.data_points}
    assert starts == {0}


def test_links_and_instances_become_series_and_no_byte_counts_twice(nvml, monkeypatch):
    monkeypatch.setenv("GPUSIM_MIG", "1")
    watch = GpuWatch(nvml, ManualClock())
    watch.sample()
    watch.sample_pcie()
    told = read_page(watch)
    links = {name: value for name, value in told.items() if "nvlink" in name or "pcie" in name}
    assert links == {
        'gpu_nvlink_active{gpu_uuid="GPU-sim-0"}': 2,
        'gpu_nvlink_errors_total{gpu_uuid="GPU-sim-0",type="replay"}': 8,
        'gpu_nvlink_errors_total{gpu_uuid="GPU-sim-0",type="recovery"}': 9,
        'gpu_nvlink_errors_total{gpu_uuid="GPU-sim-0",type="crc_flit"}': 10,
        'gpu_nvlink_errors_total{gpu_uuid="GPU-sim-0",type="crc_data"}': 11,
        'gpu_nvlink_io_bytes_total{direction="transmit",gpu_uuid="GPU-sim-0"}': 6_000_000_138
        * 1024,
        'gpu_nvlink_io_bytes_total{direction="receive",gpu_uuid="GPU-sim-0"}': 6_000_000_139 * 1024,
        'gpu_pcie_generation{gpu_uuid="GPU-sim-0"}': 5,
        'gpu_pcie_generation{gpu_uuid="GPU-sim-1"}': 4,
        'gpu_pcie_generation_max{gpu_uuid="GPU-sim-0"}': 5,
        'gpu_pcie_generation_max{gpu_uuid="GPU-sim-1"}': 5,
        'gpu_pcie_width{gpu_uuid="GPU-sim-0"}': 16,
        'gpu_pcie_width{gpu_uuid="GPU-sim-1"}': 8,
        'gpu_pcie_width_max{gpu_uuid="GPU-sim-0"}': 16,
        'gpu_pcie_width_max{gpu_uuid="GPU-sim-1"}': 16,
        'gpu_pcie_replays_total{gpu_uuid="GPU-sim-0"}': 0,
        'gpu_pcie_replays_total{gpu_uuid="GPU-sim-1"}': 11,
        'gpu_pcie_throughput_bytes_per_second{direction="transmit",gpu_uuid="GPU-sim-0"}': 12e9,
        'gpu_pcie_throughput_bytes_per_second{direction="receive",gpu_uuid="GPU-sim-0"}': 0,
        **{
            f'gpu_pcie_errors_total{{gpu_uuid="GPU-sim-0",type="{kind}"}}': count
            for kind, count in PCIE_ERRORS.items()
        },
    }
    first = (
        'compute_instance_id="0",gpu_instance_id="1",gpu_uuid="GPU-sim-0",mig_uuid="MIG-sim-1-0"'
    )
    second = (
        'compute_instance_id="1",gpu_instance_id="5",gpu_uuid="GPU-sim-0",mig_uuid="MIG-sim-5-1"'
    )
    assert {name: value for name, value in told.items() if "mig_memory" in name} == {
        f"gpu_mig_memory_used_bytes{{{first}}}": GIB,
        f"gpu_mig_memory_used_bytes{{{second}}}": 5 * GIB,
        f"gpu_mig_memory_free_bytes{{{first}}}": 39 * GIB,
        f"gpu_mig_memory_free_bytes{{{second}}}": 15 * GIB,
        f"gpu_mig_memory_total_bytes{{{first}}}": 40 * GIB,
        f"gpu_mig_memory_total_bytes{{{second}}}": 20 * GIB,
    }
    n_bytes = {name: value for name, value in told.items() if "process_allocated" in name}
    assert sorted(n_bytes.values()) == [GIB, 2 * GIB]
    assert any(first in name and 'pid="4711"' in name for name in n_bytes)
    assert told['gpu_throttle_hw_thermal_seconds_total{gpu_uuid="GPU-sim-0"}'] == 5


def test_a_pcie_sample_that_blocks_holds_up_neither_looks_nor_series(nvml):
    gated = GatedPcie(SystemClock())
    watch = GpuWatch(gated, ManualClock())
    sampler = threading.Thread(target=watch.sample_pcie)
    sampler.start()
    assert gated.is_asked.wait(HANG_S)
    watch.sample()
    told = read_page(watch)
    assert told['gpu_memory_used_bytes{gpu_uuid="GPU-sim-0"}'] == 7 * GIB
    assert not any("pcie_throughput" in name for name in told)
    gated.gate.set()
    sampler.join()
    assert sum("pcie_throughput" in name for name in read_page(watch)) == 2


def test_a_watch_samples_pcie_by_a_thread_of_its_own(nvml, monkeypatch):
    monkeypatch.setattr(gpus, "POLL_NS", 1)
    gated = GatedPcie(SystemClock())
    watch = GpuWatch(gated, ManualClock())
    watch.start()
    assert gated.is_asked.wait(HANG_S)  # the sampler is held; the other thread goes on
    before = gated.n_looks
    while gated.n_looks < before + 2:
        assert gated.has_looked.wait(HANG_S)
        gated.has_looked.clear()
    gated.gate.set()
    watch.close()
    assert not any(thread.name.startswith("ingero-nvml") for thread in threading.enumerate())


def test_a_library_without_a_function_makes_its_value_absent():
    code = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1])\n"
        "import pynvml\n"
        "real = pynvml._nvmlGetFunctionPointer\n"
        "def find(name):\n"
        "    return real('no' + name if 'RunningProcesses' in name or 'Field' in name else name)\n"
        "pynvml._nvmlGetFunctionPointer = find\n"
        "from ingero.agent.capture.gpu.nvml import Nvml\n"
        "from ingero.telemetry.clock import SystemClock\n"
        "one = Nvml(SystemClock()).read()[0]\n"
        "print(one.process_bytes, one.pcie_errors, one.nvlink_sent_bytes, one.gpu_pct)\n"
    )
    library = str(get_program().parent / "libnvidia-ml.so.1")
    result = subprocess.run(
        [sys.executable, "-c", code, library], capture_output=True, text=True, check=True
    )
    assert result.stdout == "None None None 97\n"


def test_a_critical_error_is_told_once_with_its_number_and_device():
    code = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1])\n"
        "from ingero.agent.capture.gpu.nvml import Nvml\n"
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
        "from ingero.agent.capture.gpu.nvml import Nvml\n"
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


class Failing:
    """A driver without devices that reports more errors than anybody takes."""

    def read(self):
        return []

    def read_pcie(self):
        return []

    def take_errors(self):
        return [Xid(0, 79, 0)] * 3000


class Healthy(Failing):
    """A driver with two devices and no error yet."""

    errors: ClassVar[list[Xid]] = []

    def read(self):
        return [GpuReading(0, uuid="GPU-a"), GpuReading(1, uuid="GPU-b")]

    def take_errors(self):
        return self.errors


def test_critical_errors_of_each_device_are_a_series_before_the_first_one():
    driver = Healthy()
    watch = GpuWatch(driver, ManualClock())

    def read():
        watch.sample()
        found = read_page(watch)
        return [found.get(f'gpu_xid_errors_total{{gpu_uuid="GPU-{one}"}}') for one in "ab"]

    assert read() == [0, 0]
    driver.errors = [Xid(1, 79, 0)]
    assert read() == [0, 1]


def test_rows_that_nobody_took_in_time_are_a_series():
    watch = GpuWatch(Failing(), ManualClock())
    watch.sample()
    assert read_page(watch)["ingero_trace_gpu_dropped_rows_total"] == 0
    watch.sample()
    assert read_page(watch)["ingero_trace_gpu_dropped_rows_total"] == 3000
    assert len(watch.take_events()) == 3000
