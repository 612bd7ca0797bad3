"""What ``ingero trace --json`` writes of single events."""

import io
import json

import numpy as np

from ingero.agent.capture.events import BUILDERS
from ingero.agent.capture.kernel.abi import get_dtype
from ingero.cli.commands.trace.output import JsonLines
from ingero.model.events import CudaOp, NcclOp, Source

START_NS = 1_795_230_276_386_542_555


def write_lines(ring, struct, rows):
    """The lines of records of a ring, which the kernel wrote with these values."""
    records = np.zeros(len(rows), get_dtype(struct))
    for record, values in zip(records, rows, strict=True):
        for name, value in values.items():
            record[name] = value
    out = io.StringIO()
    JsonLines(out).on_events(ring, records, BUILDERS[ring](records, START_NS))
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_call_has_its_times_its_names_and_what_its_record_says():
    launch = {
        "pid": 7, "tid": 8, "source": Source.CUDA, "op": CudaOp.LAUNCH_KERNEL, "duration_ns": 1500, "weight": 100,
        "grid_x": 3, "grid_y": 2, "grid_z": 1, "block_x": 64, "block_y": 1, "block_z": 1, "stream": 255, "device": -1,
        "comm": b"python3", "cgroup_id": 9,
    }  # fmt: skip
    copy = {
        "pid": 7, "tid": 8, "source": Source.CUDA, "op": CudaOp.MEMCPY, "bytes": 1 << 40, "aux": 1, "device": 3,
        "rc": 2, "weight": 1,
    }  # fmt: skip
    first, second = write_lines("calls", "call", [launch, copy])
    assert first == {
        "type": "event", "timestamp": "2026-11-21T03:04:36.386542555Z", "pid": 7, "tid": 8, "source": "cuda",
        "op": "cudaLaunchKernel", "duration_ns": 1500, "duration": "1.5 µs", "gpu_id": None, "args": [0, 255],
        "return_code": 0, "weight": 100, "anomaly": False, "cgroup_id": 9, "process_name": "python3", "bytes": 0,
        "stream": "0xff", "handle": "0x0", "grid": [3, 2, 1], "block": [64, 1, 1],
    }  # fmt: skip
    assert (second["op"], second["bytes"], second["direction"]) == ("cudaMemcpy", 1 << 40, "h2d")
    assert (second["gpu_id"], second["return_code"]) == (3, 2)
    assert "cgroup_id" not in second


def test_collective_has_its_communicator_and_its_place_there():
    (line,) = write_lines(
        "collectives",
        "collective",
        [
            {
                "source": Source.NCCL, "op": NcclOp.ALL_REDUCE, "comm_hash": (1 << 63) + 5, "rank": 2, "nranks": 4,
                "peer": -1, "seq": 11, "dtype": 7, "redop": -1, "count": 10, "bytes": 40,
            }
        ],
    )  # fmt: skip
    assert line["comm_hash"] == "0x8000000000000005"
    assert (line["comm_rank"], line["nranks"], line["seq"], line["dtype"]) == (2, 4, 11, 7)
    assert not {"peer", "redop", "group"} & line.keys()


def test_time_off_the_processor_has_its_reason_and_who_ran_instead():
    (line,) = write_lines(
        "off_cpus",
        "off_cpu",
        [{"off_ns": 5, "wait_ns": 3, "other_pid": 1, "other_comm": b"\xff", "waker_pid": 2}],
    )
    assert (line["wait_ns"], line["other_pid"], line["other_process"]) == (3, 1, "\ufffd")
    assert line["waker_pid"] == 2
    assert line["reason"]
