"""What an operation does, in one table."""

import itertools

import numpy as np
import pytest

from ingero.model.events import CopyKind, CudaOp, DriverOp, HostMemory, Source
from ingero.model.operations import _BY_OPERATION, OpKind, code_of, find_codes, find_kinds
from ingero.recording.causal.engine import explain
from ingero.recording.scenarios.builder import RecordingBuilder
from ingero.recording.scenarios.loop import LAUNCH, SYNC

MS = 1_000_000


def kind_of(op):
    source, code = divmod(code_of(op), 256)
    (kind,) = find_kinds(np.array([source], np.uint8), np.array([code], np.uint8)).tolist()
    return OpKind(kind)


def test_an_operation_stands_in_the_table_once():
    codes = [code_of(op) for ops in _BY_OPERATION.values() for op in ops]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize(
    ("prefix", "kind"),
    [("MEMCPY", OpKind.COPY), ("MEMSET", OpKind.FILL), ("LAUNCH", OpKind.LAUNCH)],
)
def test_runtime_and_driver_calls_of_one_name_are_of_one_kind(prefix, kind):
    named = [op for op in itertools.chain(CudaOp, DriverOp) if op.name.startswith(prefix)]
    assert {kind_of(op) for op in named} == {kind}
    assert find_codes((kind,)) >= {code_of(op) for op in named}


def test_an_operation_without_an_entry_is_what_its_source_says():
    kinds = find_kinds(np.array([Source.CUDA, Source.TCP, 99]), np.array([200, 200, 1]))
    assert kinds.tolist() == [OpKind.OTHER_CALL, OpKind.RETRANSMIT, OpKind.OTHER]


def test_copies_that_a_program_asks_of_the_driver_are_copies_to_the_rules():
    built, at = RecordingBuilder().name(5, "jax"), 0
    copy = (Source.DRIVER, DriverOp.MEMCPY_HTOD)
    for _ in range(50):
        at = built.call(
            copy, at, 10 * MS, 5,
            arg0=64 << 20, arg1=CopyKind.HOST_TO_DEVICE, arg3=HostMemory.PAGEABLE,
        )  # fmt: skip
        at = built.call(LAUNCH, at, 12_000, 5, arg0=1)
        at = built.call(SYNC, at, 5 * MS, 5)
    (incident,) = explain(built.build()).incidents
    assert (incident.rule, incident.op) == ("copy_bound", "cuMemcpyHtoD")
