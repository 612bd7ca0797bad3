"""Folded stacks: one line per code path, whatever process took it."""

import json

import numpy as np
import pytest

from ingero.errors import BadDataError
from ingero.model.events import EVENT, CudaOp, Source
from ingero.model.recording import AGGREGATE
from ingero.recording.queries.catalog import QUERIES
from ingero.recording.queries.recording_file import RecordingFile
from ingero.recording.queries.stacks import (
    StacksArgs,
    read_folded_stacks,
)
from ingero.recording.store.rows import BUCKET_NS
from ingero.recording.store.writer import RecordingWriter
from ingero.serving.query import get_query

TRAIN = '[{"s":"launch","f":"libtorch.so"},{"pf":"/job/train.py","pfn":"Net.step","pl":12}]'


@pytest.fixture
def recording(tmp_path):
    path = tmp_path / "stacks.db"
    events = np.zeros(4, EVENT)
    events["start_ns"] = np.arange(4) + 10**18
    events["source"], events["op"] = Source.CUDA, CudaOp.LAUNCH_KERNEL
    events["duration_ns"] = 1000, 2000, 4000, 9000
    events["weight"] = 1, 10, 1, 1
    events["stack_hash"] = 7, 8, 9, 0  # two ranks with one code path, one not known, one without
    events["pid"] = 100, 101, 100, 100
    writer = RecordingWriter(path, "n")
    writer.put_events(events)
    writer.put_stacks({7: TRAIN, 8: TRAIN})
    writer.close(1)
    return RecordingFile(path)


def test_stacks_that_read_alike_are_one_with_the_calls_they_stand_for(recording):
    known, unknown = read_folded_stacks(recording, StacksArgs()).stacks
    assert known.frames == (
        "Net.step (/job/train.py:12)", "launch (libtorch.so)", "cudaLaunchKernel",
    )  # fmt: skip
    assert (known.n_rows, known.n_calls, known.total_ns) == (2, 11, 1000 + 10 * 2000)
    assert unknown.frames == ("[unknown]", "cudaLaunchKernel")
    assert (unknown.n_rows, unknown.total_ns) == (1, 4000)


def test_folded_stacks_can_be_limited_to_processes_and_operations(recording):
    (one,) = read_folded_stacks(recording, StacksArgs(pids=(101,), op="cudaLaunchKernel")).stacks
    assert one.total_ns == 20000
    for same in (StacksArgs(pid=101, source="CUDA"), StacksArgs(pids=(101,), source="cuda")):
        assert read_folded_stacks(recording, same).stacks == [one]
    assert read_folded_stacks(recording, StacksArgs(pid=101, source="nccl")).stacks == []
    with pytest.raises(BadDataError, match="no source"):
        read_folded_stacks(recording, StacksArgs(source="cudart"))
    assert read_folded_stacks(recording, StacksArgs(op="cudaMalloc")).stacks == []
    with pytest.raises(BadDataError, match="no operation"):
        read_folded_stacks(recording, StacksArgs(op="cudaNothing"))


def test_stacks_say_how_many_of_the_calls_they_are_of(recording):
    def ask(**arguments):
        (share,) = json.loads(get_query(QUERIES, "get_stacks").ask(recording, arguments))["shares"]
        return share

    assert ask() == {"op": "cudaLaunchKernel", "calls_with_stack": 12, "calls": None}
    assert read_folded_stacks(recording, StacksArgs()).call_share is None
    writer = RecordingWriter(recording.path, "n")
    counted = np.zeros(2, AGGREGATE)
    counted["bucket_ns"] = 10**18 // BUCKET_NS * BUCKET_NS
    counted["source"], counted["op"] = Source.CUDA, CudaOp.LAUNCH_KERNEL
    counted["pid"], counted["count"] = (100, 101), (28, 20)
    writer.put_aggregates(counted)
    writer.close(1)
    assert ask()["calls"] == 48
    assert read_folded_stacks(recording, StacksArgs()).call_share == 12 / 48
    assert read_folded_stacks(recording, StacksArgs(pids=(101,))).call_share == 10 / 20
    assert (
        read_folded_stacks(recording, StacksArgs(since="1ns")).call_share == 1 / 48
    )  # of the whole minute


def test_a_recording_of_an_older_generation_is_folded_by_rows(data_dir):
    file = RecordingFile(data_dir / "agent_dbs/pytorch-dataloader-starvation.db")
    stacks = read_folded_stacks(file, StacksArgs(op="cudaMemcpyAsync")).stacks
    assert sum(stack.n_rows for stack in stacks) == sum(stack.n_calls for stack in stacks) == 14
    assert all(stack.frames[-1] == "cudaMemcpyAsync" for stack in stacks)
