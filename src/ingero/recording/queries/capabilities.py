"""What a recording can show and what it cannot, with what would be needed."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from ingero.model.events import Source
from ingero.model.recording import Recording


class RecordedCapability(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing a dashboard could show."""

    id: str
    label: str
    available: bool
    source: str = ""
    required_tool: str = ""
    tooltip: str = ""


_SOURCES: Final = (
    ("cuda_ops", "CUDA runtime calls", Source.CUDA),
    ("driver_ops", "CUDA driver calls", Source.DRIVER),
    ("host_events", "Thread switches and memory", Source.HOST),
    ("block_io", "Disk requests", Source.IO),
    ("tcp_retransmit", "TCP retransmits", Source.TCP),
    ("net_io", "Socket calls", Source.NET),
    ("cuda_graph", "CUDA graphs", Source.CUDA_GRAPH),
    ("collectives", "Collectives", Source.NCCL),
    ("gpu_facts", "Throttling, Xid, ECC", Source.GPU),
)
_MACHINE: Final = (
    ("cpu_util", "CPU utilisation"),
    ("mem_util", "Memory utilisation"),
    ("load_avg", "Load average"),
    ("swap", "Swap"),
)
_ELSEWHERE: Final = (
    ("gpu_util", "GPU utilisation", "NVML"),
    ("hbm_occupancy", "Device memory occupancy", "NVML"),
    ("sm_efficiency", "SM efficiency", "DCGM or CUPTI"),
    ("nvlink_util", "NVLink throughput", "NVML or DCGM"),
    ("ib_util", "InfiniBand throughput", "port counters of the adapter"),
    ("power_draw", "Power", "NVML"),
    ("pcie_util", "PCIe throughput", "NVML or DCGM"),
    ("stall_breakdown", "Warp stalls", "CUPTI"),
    ("nvtx_phases", "NVTX phases", "probes on libnvToolsExt"),
    ("what_if", "What-if", "a model of the job"),
    ("pipeline_flow", "Pipeline schedule", "annotations of the job"),
    ("cost_waste", "Cost", "Fleet, which knows who waited"),
    ("storage_io", "Storage throughput", "counters of the storage system"),
)


def list_capabilities(recording: Recording) -> list[RecordedCapability]:
    """Everything a dashboard could show, with whether this recording has it."""
    present = set(np.unique(recording.events["source"]).tolist())
    has_snapshots = len(recording.snapshots) > 0
    has_stacks = bool((recording.events["stack_hash"] != 0).any())
    return [
        *(_local(name, label, has_snapshots, "system_snapshots") for name, label in _MACHINE),
        *(_local(name, label, source in present, "events") for name, label, source in _SOURCES),
        _local("causal_chains", "Incidents", True, "events"),  # noqa: FBT003 -- always: rules look at what there is
        _local("stack_traces", "Stacks", has_stacks, "stack_traces"),
        *(
            RecordedCapability(
                name,
                label,
                available=False,
                required_tool=tool,
                tooltip=f"not recorded; needs {tool}",
            )
            for name, label, tool in _ELSEWHERE
        ),
    ]


def _local(name: str, label: str, is_there: bool, source: str) -> RecordedCapability:  # noqa: FBT001
    return RecordedCapability(
        name, label, is_there, source=source if is_there else "",
        tooltip="" if is_there else "this recording holds none",
    )  # fmt: skip
