"""How long device memory is held."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ingero.detect.inference.allocations import AllocationAges
from ingero.model.events import EVENT, CudaOp, DriverOp, Source

ALLOC, FREE = (Source.CUDA, CudaOp.MALLOC_ASYNC), (Source.CUDA, CudaOp.FREE_ASYNC)
HOST = (Source.CUDA, CudaOp.HOST_ALLOC)
CREATE, RELEASE = (Source.DRIVER, DriverOp.MEM_CREATE), (Source.DRIVER, DriverOp.MEM_RELEASE)
MS = 1_000_000


def events_of(*calls):
    """Rows of EVENT from (operation, pid, handle, start in ms, bytes); each takes no time."""
    rows = np.zeros(len(calls), EVENT)
    for row, ((source, op), pid, handle, at_ms, n_bytes) in zip(rows, calls, strict=True):
        row["source"], row["op"], row["pid"], row["start_ns"] = source, op, pid, at_ms * MS
        is_free = (source, op) in {FREE, RELEASE}
        row["arg0"], row["arg1"] = (handle, n_bytes) if is_free else (n_bytes, handle)
    return rows


def test_a_released_allocation_has_an_age_and_one_that_is_held_is_known():
    ages = AllocationAges(100)
    found = ages.take(events_of((ALLOC, 7, 1, 10, 64), (ALLOC, 7, 2, 20, 32), (FREE, 7, 1, 35, 64)))
    assert found.tolist() == [25 * MS]
    assert ages.held[["pid", "handle", "bytes"]].tolist() == [(7, 2, 32)]
    assert ages.find_oldest_ms(7, 50 * MS, 5) == (30,)
    assert ages.find_oldest_ms(7, 30 * MS, 5) == (20, 10)  # as of then: one was released later
    assert ages.find_oldest_ms(7, 30 * MS, 1) == (20,)
    assert ages.take(events_of((FREE, 7, 2, 60, 32))).tolist() == [40 * MS]
    assert len(ages.held) == 0


def test_the_same_address_in_two_processes_is_two_allocations():
    ages = AllocationAges(100)
    assert ages.take(events_of((ALLOC, 7, 1, 0, 8), (FREE, 8, 1, 5, 8))).tolist() == []
    assert ages.held["pid"].tolist() == [7]


def test_memory_of_the_host_and_failed_calls_are_not_held():
    rows = events_of((HOST, 7, 1, 0, 8), (ALLOC, 7, 2, 0, 8))
    rows["ret_code"][1] = 2
    ages = AllocationAges(100)
    ages.take(rows)
    assert len(ages.held) == 0


def test_handles_of_created_memory_are_another_kind_of_number():
    ages = AllocationAges(100)
    found = ages.take(events_of((ALLOC, 7, 1, 0, 8), (CREATE, 7, 1, 1, 8), (RELEASE, 7, 1, 9, 8)))
    assert found.tolist() == [8 * MS]


def test_what_is_over_the_limit_is_counted_and_the_oldest_stay():
    ages = AllocationAges(2)
    ages.take(events_of(*[(ALLOC, 7, i, i, 8) for i in range(1, 6)], (ALLOC, 8, 1, 9, 8)))
    assert ages.held[["pid", "handle"]].tolist() == [(7, 1), (7, 2), (8, 1)]
    assert ages.n_untracked == 3
    ages.forget({7})
    assert ages.held["pid"].tolist() == [8]


def ages_by_the_obvious_loop(rows):
    held, found = {}, []
    for row in rows:
        is_free = (row["source"], row["op"]) == FREE
        key = int(row["pid"]), int(row["arg0" if is_free else "arg1"])
        if not is_free:
            held[key] = int(row["start_ns"])
        elif key in held:
            found.append(int(row["start_ns"]) - held.pop(key))
    return sorted(found), held


CALLS = st.tuples(
    st.sampled_from([ALLOC, FREE]), st.sampled_from([7, 8]), st.integers(1, 3), st.just(0), st.just(8)
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(CALLS, max_size=30), st.data())
def test_ages_agree_with_the_obvious_loop_wherever_batches_end(calls, data):
    rows = events_of(*calls)
    rows["start_ns"] = np.arange(len(rows)) * MS
    cut = data.draw(st.integers(0, len(rows)))
    ages = AllocationAges(100)
    found = [*ages.take(rows[:cut]).tolist(), *ages.take(rows[cut:]).tolist()]
    expected, held = ages_by_the_obvious_loop(rows)
    assert sorted(found) == expected
    assert {(row["pid"], row["handle"]): row["start_ns"] for row in ages.held} == held
