"""What maps and rings may take is bounded, on a machine of 256 processors with 64 GPU processes too."""

import mmap

import pytest

from ingero.agent.capture.kernel.map_memory import reckon, reckon_all
from ingero.agent.capture.kernel.maps import RINGBUF_TYPE, parse_cpus
from ingero.agent.capture.kernel.objects import MapLayout, read_map_layouts
from ingero.agent.capture.kernel.perf import choose_ring_bytes
from ingero.agent.capture.probes.host import PROBES
from ingero.agent.checks import machine
from ingero.agent.checks.machine import describe_memory

MIB = 1 << 20
OBJECTS = ("calls", *(probe.name for probe in PROBES))
# Of each of 64 processes: kinds of calls and of the host's events, threads that call, live allocations, communicators, contexts.
USED = {
    "counts": 64 * 100,
    "threads": 64 * 64,
    "allocations": 64 * 2048,
    "communicators": 64 * 16,
    "contexts": 64 * 16,
}


def test_a_big_machine_with_many_processes_takes_little_more_than_a_small_one():
    small, big = reckon_all(OBJECTS, 2), reckon_all(OBJECTS, 256)
    for costs, most in ((small, 50), (big, 56)):
        assert sum(cost.fixed_bytes for cost in costs.values()) < most * MIB
        assert sum(cost.max_bytes for cost in costs.values()) < 256 * MIB
    used = sum(big[name].entry_bytes * n for name, n in USED.items())
    assert used < 40 * MIB
    assert all(n <= big[name].max_entries for name, n in USED.items())
    # Nothing that grows has a value for each processor.
    assert {n: c.entry_bytes for n, c in small.items()} == {
        n: c.entry_bytes for n, c in big.items()
    }
    assert 256 * (choose_ring_bytes(256) + mmap.PAGESIZE) <= 17 * MIB


def test_an_entry_costs_what_the_allocator_gives_for_it():
    grows = MapLayout("a", map_type=1, key_bytes=8, value_bytes=1120, max_entries=1000, flags=1)
    cost = reckon(grows, 256)
    assert (cost.fixed_bytes, cost.entry_bytes) == (512 + 16 * 1024, 2048)
    assert cost.max_bytes == 512 + 16 * 1024 + 2048 * 1000
    # As it was with a value for each processor, of those that could be online.
    of_each = MapLayout("a", map_type=5, key_bytes=8, value_bytes=1120, max_entries=1000, flags=1)
    assert reckon(of_each, 256).entry_bytes == 1120 * 256 + 96
    has_place = MapLayout("a", map_type=1, key_bytes=8, value_bytes=16, max_entries=1000, flags=0)
    assert reckon(has_place, 256).max_bytes == 512 + 16 * 1024 + (56 + 8 + 16) * 1256
    ring = MapLayout("a", map_type=27, key_bytes=0, value_bytes=0, max_entries=1 << 20, flags=0)
    assert reckon(ring, 256).max_bytes == 512 + MIB + 16 * MIB // mmap.PAGESIZE + 3 * mmap.PAGESIZE


@pytest.mark.parametrize("page_bytes", [4096, 16_384, 65_536])
def test_every_ring_is_whole_pages_whatever_their_size(page_bytes):
    for probe in OBJECTS:
        rings = [layout for layout in read_map_layouts(probe) if layout.map_type == RINGBUF_TYPE]
        assert rings or probe != "calls"
        for ring in rings:
            assert ring.max_entries.bit_count() == 1, ring.name
            assert ring.max_entries % page_bytes == 0, ring.name
    for n_cpus in (1, 2, 72, 256):
        n_bytes = choose_ring_bytes(n_cpus, page_bytes)
        assert n_bytes.bit_count() == 1
        assert n_bytes % page_bytes == 0


def test_large_pages_cost_three_of_them_a_ring_and_no_more_than_that():
    ring = MapLayout("a", map_type=27, key_bytes=0, value_bytes=0, max_entries=1 << 20, flags=0)
    assert reckon(ring, 2, 65_536).max_bytes == 512 + MIB + 256 + 3 * 65_536
    small, large = reckon_all(OBJECTS, 72, 4096), reckon_all(OBJECTS, 72, 65_536)
    n_rings = sum(
        layout.map_type == RINGBUF_TYPE for p in OBJECTS for layout in read_map_layouts(p)
    )
    more = sum(cost.max_bytes for cost in large.values()) - sum(
        cost.max_bytes for cost in small.values()
    )
    assert 0 < more < n_rings * 3 * (65_536 - 4096)
    # Of perf's rings for new mappings: each is its data and a page.
    assert 72 * (choose_ring_bytes(72, 65_536) + 65_536) <= 14 * MIB


def test_maps_whose_entries_have_their_place_from_the_start_are_no_larger_than_full_ones():
    full, preallocated = (
        reckon_all(OBJECTS, 256, allocates=allocates) for allocates in (True, False)
    )
    assert {cost.entry_bytes for cost in preallocated.values()} == {0}
    assert sum(cost.max_bytes for cost in preallocated.values()) < 128 * MIB
    assert {
        n: c.max_entries for n, c in preallocated.items() if c.max_entries < full[n].max_entries
    } == {"threads": 16384}
    assert all(n <= preallocated[name].max_entries for name, n in USED.items())


def test_check_says_what_it_takes_in_one_line(monkeypatch):
    monkeypatch.setattr(machine, "allocates_entries", lambda: True)
    told = describe_memory(256)
    assert "2 KiB for each operation of each process (256 possible processors)" in told
    assert "MiB at most" in told


def test_check_says_that_nothing_is_added_later(monkeypatch):
    monkeypatch.setattr(machine, "allocates_entries", lambda: False)
    told = describe_memory(256)
    assert "MiB at the start, and nothing is added (256 possible processors)" in told


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0\n", [0]), ("0-3\n", [0, 1, 2, 3]), ("0-1,8,10-11\n", [0, 1, 8, 10, 11])],
)
def test_processors_are_counted_where_some_numbers_are_missing(text, numbers):
    assert parse_cpus(text) == numbers
