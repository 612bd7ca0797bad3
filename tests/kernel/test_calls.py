"""Every probed function, by value: counts, bytes, errors, times, geometry, handles, device. Real uprobes."""

import numpy as np
import pytest

from ingero.agent.capture.kernel.abi import Flag
from ingero.agent.capture.symbols.libraries import FUNCTIONS
from ingero.model.events import CopyKind, CudaOp, DriverOp, GraphOp, Source
from ingero.model.operations import OpKind, find_kinds

pytestmark = pytest.mark.kernel

BY_NAME = {name: function for function in FUNCTIONS for name in function.names()}
GRID, BLOCK, KERNEL = (61, 2, 3), (32, 4, 2), 0x401000


def sum_by_operation(account):
    """The workload's own account, added up over the functions that share an operation."""
    sums = {}
    for name, numbers in account["calls"].items():
        key = BY_NAME[name].source, BY_NAME[name].op
        into = sums.setdefault(key, dict.fromkeys(("calls", "bytes", "errors", "total_ns"), 0))
        for what in into:
            into[what] += numbers[what]
    return sums


def test_every_call_is_counted_exactly_with_its_bytes_and_errors(primes):
    (account,) = primes.accounts
    for (source, op), own in sum_by_operation(account).items():
        count = primes.count(account["pid"], source, op)
        where = f"source {source} op {op}"
        assert count["seen"] - count["nested"] == own["calls"], where
        assert count["entered"] == count["seen"] == count["emitted"], where
        if source is Source.DRIVER:  # the runtime's own calls into the driver are in there too
            continue
        assert count["bytes"] == own["bytes"], where
        assert count["errors"] == own["errors"], where
    assert set(primes.losses)
    assert not any(np.ravel(list(primes.losses.values())))


def test_time_inside_a_call_is_never_more_than_the_caller_s_clock_says(primes):
    (account,) = primes.accounts
    for (source, op), own in sum_by_operation(account).items():
        count = primes.count(account["pid"], source, op)
        if count["nested"]:
            continue
        assert count["total_ns"] <= own["total_ns"]
        assert count["max_ns"] <= count["total_ns"]
        if source is Source.CUDA and op in {CudaOp.EVENT_RECORD, CudaOp.STREAM_WAIT_EVENT}:
            assert count["total_ns"] == 0
        else:
            assert 0 < count["min_ns"] <= count["total_ns"] // count["seen"] <= count["max_ns"]
            assert count["hist"].sum() == count["seen"]


def test_a_launch_carries_geometry_function_stream_and_device(primes):
    (account,) = primes.accounts
    launches = primes.calls(account["pid"], Source.CUDA, CudaOp.LAUNCH_KERNEL)
    usual = launches[launches["grid_x"] == GRID[0]]
    assert len(usual) == 102 + 19 + 23 + 29
    for axis, grid, block in zip("xyz", GRID, BLOCK, strict=True):
        assert set(usual[f"grid_{axis}"]) == {grid}
        assert set(usual[f"block_{axis}"]) == {block}
    by_config = launches[launches["grid_x"] == 5]
    assert len(by_config) == 31
    assert [int(by_config[0][f"{d}_{a}"]) for d in ("grid", "block") for a in "xyz"] == [
        5, 6, 7, 8, 9, 10,
    ]  # fmt: skip
    assert set(launches["handle"]) == {KERNEL}
    assert set(launches["stream"]) == {account["stream"]}
    assert set(launches["device"]) == {3}
    assert set(launches["comm"]) == {b"workload"}


def test_a_thread_s_device_is_that_of_its_context_where_no_call_of_the_runtime_names_it(primes):
    (account,) = primes.accounts
    waits = primes.calls(account["pid"], Source.DRIVER, DriverOp.CTX_SYNC)
    devices = waits["device"][np.argsort(waits["header"]["mono_ns"])].tolist()
    # Of the runtime's choice; of a context, and still when another is refused; of one that nobody saw opened.
    assert devices[-49:] == [5] * 30 + [-1] * 19
    assert set(devices[:-49]) == {3}
    (opened,) = primes.calls(account["pid"], Source.DRIVER, DriverOp.PRIMARY_CTX_RETAIN)
    assert (opened["aux"], opened["device"]) == (5, 3)


def test_a_driver_launch_carries_geometry_by_registers_stack_and_structure(primes):
    (account,) = primes.accounts
    launches = primes.calls(account["pid"], Source.DRIVER, DriverOp.LAUNCH_KERNEL)
    own = launches[(launches["flags"] & Flag.NESTED) == 0]
    direct, by_config = own[own["grid_x"] == 3], own[own["grid_x"] == 11]
    assert (len(direct), len(by_config), len(own)) == (103, 107, 210)
    dims = [f"{d}_{a}" for d in ("grid", "block") for a in "xyz"]
    assert [int(direct[0][name]) for name in dims] == [3, 5, 7, 11, 13, 2]
    assert [int(by_config[0][name]) for name in dims] == [11, 12, 13, 14, 3, 2]
    assert set(own["stream"]) == {account["stream"]}


def test_a_runtime_call_s_own_driver_call_is_marked_nested(primes):
    (account,) = primes.accounts
    launches = primes.count(account["pid"], Source.DRIVER, DriverOp.LAUNCH_KERNEL)
    assert launches["nested"] == 102 + 19 + 23 + 29 + 31
    nested = primes.calls(account["pid"], Source.DRIVER, DriverOp.MEM_ALLOC)
    nested = nested[(nested["flags"] & Flag.NESTED) != 0]
    outer = primes.calls(account["pid"], Source.CUDA, CudaOp.MALLOC)
    assert set(nested["depth"]) == {1}
    assert set(outer["depth"]) == {0}
    # The one inside begins later and is over sooner.
    assert nested["duration_ns"].sum() < outer["duration_ns"].sum()


def test_linking_of_code_that_is_compiled_at_run_time_is_seen(primes):
    (account,) = primes.accounts
    links = primes.calls(account["pid"], Source.DRIVER, DriverOp.LINK)
    assert len(links) == 22
    assert set(links["handle"]) == {0x11}
    assert set(find_kinds(links["source"], links["op"]).tolist()) == {OpKind.MODULE}


def test_copies_carry_bytes_direction_and_stream(primes):
    (account,) = primes.accounts
    expected = {
        CudaOp.MEMCPY: (37, 4099, 1, 0),
        CudaOp.MEMCPY_ASYNC: (41, 5003, 2, account["stream"]),
        CudaOp.MEMCPY_2D: (43, 63 * 11, 3, 0),
        CudaOp.MEMCPY_2D_ASYNC: (47, 31 * 17, 1, account["stream"]),
        CudaOp.MEMCPY_3D: (53, 16 * 5 * 3, 3, 0),
    }
    for op, (n_calls, n_bytes, kind, stream) in expected.items():
        records = primes.calls(account["pid"], Source.CUDA, op)
        assert len(records) == n_calls, op
        assert set(records["bytes"]) == {n_bytes}, op
        assert set(records["aux"]) == {kind}, op
        assert set(records["stream"]) == {stream}, op
        assert set(records["rc"]) == {0}, op


def test_copies_are_counted_by_direction_and_the_driver_s_inside_the_runtime_s_only_once(primes):
    (account,) = primes.accounts
    made = {
        CopyKind.HOST_TO_HOST: (),
        CopyKind.HOST_TO_DEVICE: (
            ("cudaMemcpy", 37), ("cudaMemcpy2DAsync", 47), ("cuMemcpyHtoD_v2", 127), ("cuMemcpyHtoDAsync_v2", 131),
        ),
        CopyKind.DEVICE_TO_HOST: (("cudaMemcpyAsync", 41),),
        CopyKind.DEVICE_TO_DEVICE: (
            ("cudaMemcpy2D", 43), ("cudaMemcpy3D", 53), ("cudaMemcpyPeer", 59), ("cudaMemcpyPeerAsync", 61),
        ),
        CopyKind.DEFAULT: (),
        CopyKind.UNKNOWN: (),
    }  # fmt: skip
    for kind, functions in made.items():
        count = primes.copies[kind]
        assert count["seen"] == sum(n_good for _, n_good in functions)
        assert count["bytes"] == sum(account["calls"][name]["bytes"] for name, _ in functions)
        assert count["hist"].sum() == count["seen"]
        assert count["total_ns"] <= sum(account["calls"][name]["total_ns"] for name, _ in functions)


def test_a_free_knows_what_the_allocation_was_and_a_failed_one_counts_nothing(primes):
    (account,) = primes.accounts
    allocated = primes.calls(account["pid"], Source.CUDA, CudaOp.MALLOC)
    freed = primes.calls(account["pid"], Source.CUDA, CudaOp.FREE)
    sizes = {int(r["handle"]): int(r["bytes"]) for r in allocated[:211]}
    assert [sizes[int(r["handle"])] for r in freed] == [1000 + i for i in range(211)]
    failed = primes.calls(account["pid"], Source.CUDA, CudaOp.MALLOC, "failed_calls")
    assert failed["rc"].tolist() == [2, 2, 2]
    assert set(failed["bytes"]) == {1 << 40}
    bad_free = primes.calls(account["pid"], Source.CUDA, CudaOp.FREE, "failed_calls")
    assert bad_free["rc"].tolist() == [1, 1]
    assert bad_free["handle"].tolist() == [0xDEAD, 0xDEAD]
    assert bad_free["bytes"].tolist() == [0, 0]


def test_a_query_that_is_not_ready_is_no_error(primes):
    (account,) = primes.accounts
    queries = primes.calls(account["pid"], Source.CUDA, CudaOp.STREAM_QUERY)
    assert len(queries) == 83
    assert set(queries["rc"]) <= {0, 600}
    assert primes.count(account["pid"], Source.CUDA, CudaOp.STREAM_QUERY)["errors"] == 0
    events = primes.calls(account["pid"], Source.CUDA, CudaOp.EVENT_QUERY)
    assert set(events["handle"]) == {account["event"]}


def test_a_wait_lasts_at_least_as_long_as_the_kernel_it_waits_for(trace_sim):
    traced = trace_sim("sync", steps=23, device={"KERNEL_NS": 3_000_000})
    (account,) = traced.accounts
    waits = traced.calls(account["pid"], Source.CUDA, CudaOp.DEVICE_SYNC)
    launches = traced.calls(account["pid"], Source.CUDA, CudaOp.LAUNCH_KERNEL)
    assert len(waits) == len(launches) == 23
    # The stream is free again 3 ms after some moment inside the launch.
    ends = waits["header"]["mono_ns"] + waits["duration_ns"]
    assert (ends >= launches["header"]["mono_ns"] + 3_000_000).all()
    own = account["calls"]["cudaDeviceSynchronize"]
    assert waits["duration_ns"].sum() <= own["total_ns"]
    assert waits["duration_ns"].max() <= own["max_ns"]


def test_a_graph_keeps_its_handles_from_capture_to_launch(trace_sim):
    traced = trace_sim("graph", kernels=13, launches=17)
    (account,) = traced.accounts

    def of(op):
        return traced.calls(account["pid"], Source.CUDA_GRAPH, op)

    (begun,), (ended,), (made,) = (
        of(GraphOp.BEGIN_CAPTURE),
        of(GraphOp.END_CAPTURE),
        of(GraphOp.INSTANTIATE),
    )
    assert (int(begun["stream"]), int(begun["aux"])) == (account["stream"], 1)
    assert int(made["aux"]) == int(ended["handle"])
    assert int(made["handle"]) == account["exec"]
    launches = of(GraphOp.LAUNCH)
    assert len(launches) == 17
    assert set(launches["handle"]) == {account["exec"]}
    assert set(launches["stream"]) == {account["stream"]}
    assert int(of(GraphOp.DESTROY)[0]["handle"]) == int(ended["handle"])
    assert int(of(GraphOp.EXEC_DESTROY)[0]["handle"]) == account["exec"]
