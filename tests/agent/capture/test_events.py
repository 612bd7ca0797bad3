"""Records become the model's rows as a slow, obvious loop would make them. No root."""

import errno

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingero.agent.capture.events import BUILDERS, build_call_events
from ingero.agent.capture.kernel.abi import get_dtype
from ingero.agent.capture.symbols.libraries import FUNCTIONS
from ingero.model.events import OP_NAMES, CudaOp, DriverOp, Source, op_name

COLLECTIVES = {Source.NCCL, Source.GLOO}
OPERATIONS = sorted({(int(f.source), int(f.op)) for f in FUNCTIONS if f.source not in COLLECTIVES})
WORD = st.integers(0, 2**47)
calls = st.lists(
    st.tuples(
        st.sampled_from(OPERATIONS), WORD, WORD, WORD, st.integers(0, 4), st.integers(0, 255)
    ),
    min_size=1,
    max_size=40,
)
OFFSET = 1_000_000_007


def build_records(rows):
    records = np.zeros(len(rows), get_dtype("call"))
    for record, ((source, op), n_bytes, handle, stream, aux, flags) in zip(
        records, rows, strict=True
    ):
        record["source"], record["op"], record["bytes"] = source, op, n_bytes
        record["handle"], record["stream"], record["aux"], record["flags"] = (
            handle,
            stream,
            aux,
            flags,
        )
        record["header"]["mono_ns"], record["grid_x"], record["grid_y"], record["grid_z"] = (
            5,
            7,
            3,
            2,
        )
        record["block_x"], record["block_y"], record["block_z"], record["device"] = 32, 4, 2, -1
    return records


def expected_kind(source, name, aux):
    if ("memset" in name or "prefetch" in name) and source == Source.CUDA:
        return 5
    if source == Source.DRIVER and ("2d" in name or "3d" in name):
        return 5
    by_name = {"peer": 3, "dtod": 3, "htod": 1, "dtoh": 2}
    if name in {"cumemcpy", "cumemcpyasync"}:
        return 4
    return next((kind for part, kind in by_name.items() if part in name), aux)


def expected_arguments(source, op, n_bytes, handle, stream, aux):
    name = op_name(source, op).lower()
    if "launchkernel" in name:
        return [handle, stream, 7 * 3 * 2, 32 * 4 * 2]
    if "memcpy" in name or "memset" in name or "prefetch" in name:
        kind = expected_kind(source, name, aux)
        return [n_bytes, kind, stream, 0]
    if "free" in name or "release" in name or "unmap" in name:
        return [handle, n_bytes, 0, 0]
    if "alloc" in name or name in {"cumemcreate", "cumemmap"}:
        return [n_bytes, handle, 0, 0]
    if name == "graphinstantiate":
        return [handle or stream, aux, 0, 0]
    return [handle or stream, stream, 0, 0]


@given(calls)
def test_a_call_s_arguments_mean_what_the_model_says(rows):
    events = build_call_events(build_records(rows), OFFSET)
    for event, ((source, op), n_bytes, handle, stream, aux, flags) in zip(
        events, rows, strict=True
    ):
        got = [int(event[f"arg{i}"]) for i in range(4)]
        assert got == expected_arguments(source, op, n_bytes, handle, stream, aux), op_name(
            source, op
        )
        assert int(event["start_ns"]) == 5 + OFFSET
        assert int(event["gpu_id"]) == 0
        is_exemplar = flags & (2 | 8 | 16 | 64) and not flags & 128
        slow = 8 if flags & 8 else 0
        assert int(event["flags"]) == (flags & 1) | (2 if is_exemplar else 0) | slow


def test_a_handle_with_its_top_bit_set_keeps_its_64_bits():
    records = build_records([((Source.CUDA, CudaOp.EVENT_SYNC), 0, 0, 0, 0, 0)])
    records["handle"] = 2**64 - 2
    assert int(build_call_events(records, 0)["arg0"][0]) == -2


def test_every_ring_has_a_builder_and_no_rows_make_no_rows():
    layouts = {"calls": "call", "collectives": "collective", "off_cpus": "off_cpu", "blocks": "block",
               "processes": "process", "retransmits": "tcp"}  # fmt: skip
    for ring, layout in layouts.items():
        assert len(BUILDERS[ring](np.zeros(0, get_dtype(layout)), 0)) == 0


def test_operations_fit_the_tables():
    assert max(op for ops in OP_NAMES.values() for op in ops) < 64
    assert DriverOp.MEMCPY_HTOD in OP_NAMES[Source.DRIVER]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (0, 0),
        (-errno.EIO, -errno.EIO),
        (-errno.ENOSPC, -errno.ENOSPC),
        (1, -errno.EOPNOTSUPP),
        (3, -errno.ENOSPC),
        (7, -errno.ENODATA),
        (10, -errno.EIO),
        (13, -errno.EBUSY),
        (16, -errno.EIO),
        (255, -errno.EIO),
    ],
)
def test_a_failed_request_has_an_errno_whichever_number_the_kernel_gave(error, code):
    records = np.zeros(1, get_dtype("block"))
    records["error"] = error
    assert BUILDERS["blocks"](records, 0)["ret_code"].tolist() == [code]
