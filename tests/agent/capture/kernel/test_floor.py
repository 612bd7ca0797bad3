"""Nothing in a BPF object is newer than the oldest kernel it is for.

Releases are those of the tables in https://docs.ebpf.io (helper functions, map types, program types, kfuncs), each from
the kernel commit that added the name to include/uapi/linux/bpf.h, or the kfunc to its set.
"""

import ctypes

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile

from ingero.agent.capture.kernel._libbpf import get_libbpf
from ingero.agent.capture.kernel.objects import OBJECTS, preallocate, read_map_layouts
from ingero.agent.capture.probes.host import PROBES
from ingero.agent.capture.probes.modes import WAYS

FLOOR = (5, 15)
HELPERS = {
    1: ("map_lookup_elem", (3, 19)),
    2: ("map_update_elem", (3, 19)),
    3: ("map_delete_elem", (3, 19)),
    5: ("ktime_get_ns", (4, 1)),
    8: ("get_smp_processor_id", (4, 1)),
    12: ("tail_call", (4, 2)),
    14: ("get_current_pid_tgid", (4, 2)),
    15: ("get_current_uid_gid", (4, 2)),
    16: ("get_current_comm", (4, 2)),
    67: ("get_stack", (4, 18)),
    80: ("get_current_cgroup_id", (4, 18)),
    107: ("sk_storage_get, of tracing programs", (5, 11)),
    112: ("probe_read_user", (5, 5)),
    113: ("probe_read_kernel", (5, 5)),
    130: ("ringbuf_output", (5, 8)),
    131: ("ringbuf_reserve", (5, 8)),
    132: ("ringbuf_submit", (5, 8)),
    156: ("task_storage_get, of tracing programs", (5, 12)),
    158: ("get_current_task_btf", (5, 11)),
    164: ("for_each_map_elem", (5, 13)),
    174: ("get_attach_cookie", (5, 15)),
    181: ("loop", (5, 17)),
}
KFUNCS = {"bpf_session_is_return": (6, 13)}
MAP_TYPES = {
    1: ("hash", (3, 19)),
    2: ("array", (3, 19)),
    5: ("percpu_hash", (4, 6)),
    6: ("percpu_array", (4, 6)),
    9: ("lru_hash", (4, 10)),
    24: ("sk_storage", (5, 2)),
    27: ("ringbuf", (5, 8)),
    29: ("task_storage", (5, 11)),
}
PROGRAM_TYPES = {
    2: ("kprobe, which uprobes are too", (4, 1)),
    7: ("perf_event", (4, 9)),
    26: ("tracing: tp_btf, fentry, fexit", (5, 5)),
}
ATTACH_TYPES = {
    0: ("none", (3, 19)),
    23: ("trace_raw_tp", (5, 5)),
    24: ("trace_fentry", (5, 5)),
    25: ("trace_fexit", (5, 5)),
    41: ("perf_event, of a link", (5, 15)),
    48: ("trace_uprobe_multi", (6, 6)),
    57: ("trace_uprobe_session", (6, 13)),
}
SINCE = {
    way.probe: tuple(map(int, way.since.split(".")))
    for way in sorted(WAYS, key=lambda way: tuple(map(int, way.since.split("."))), reverse=True)
}
CALL, WIDE_LOAD = 0x85, 0x18
SK_STORAGE, TASK_STORAGE, BPF_F_NO_PREALLOC = 24, 29, 1
PATHS = sorted(OBJECTS.glob("*/*.bpf.o"))


def release_for(path):
    """The oldest kernel that an object is loaded on."""
    return SINCE.get(path.name.removesuffix(".bpf.o"), FLOOR)


def find_helpers(path):
    """Numbers of the helpers that the programs call, and names of the kfuncs."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        sections = [
            section.data()
            for section in elf.iter_sections()
            if section["sh_type"] == "SHT_PROGBITS" and section["sh_flags"] & 4
        ]
        kfuncs = {
            symbol.name
            for symbol in elf.get_section_by_name(".symtab").iter_symbols()
            if symbol["st_shndx"] == "SHN_UNDEF" and symbol.name
        }
    numbers = set()
    for section in sections:
        rows = np.frombuffer(
            section, np.dtype([("op", "u1"), ("reg", "u1"), ("off", "<i2"), ("imm", "<i4")])
        )
        is_second = np.zeros(len(rows), bool)
        is_second[1:] = rows["op"][:-1] == WIDE_LOAD
        is_helper = (rows["op"] == CALL) & (rows["reg"] >> 4 == 0) & ~is_second
        numbers |= set(rows["imm"][is_helper].tolist())
    return numbers, kfuncs


def read_kinds(path):
    """Types of the object's maps, programs and attachments, as libbpf reads them."""
    calls = get_libbpf().calls
    for name in ("bpf_program__type", "bpf_program__expected_attach_type"):
        getattr(calls, name).argtypes = (ctypes.c_void_p,)
    handle = calls.bpf_object__open_file(bytes(path), None)
    assert handle
    found = {"map": set(), "program": set(), "attach": set()}
    pointer = calls.bpf_object__next_map(handle, None)
    while pointer:
        found["map"].add(calls.bpf_map__type(pointer))
        pointer = calls.bpf_object__next_map(handle, pointer)
    pointer = calls.bpf_object__next_program(handle, None)
    while pointer:
        found["program"].add(calls.bpf_program__type(pointer))
        found["attach"].add(calls.bpf_program__expected_attach_type(pointer))
        pointer = calls.bpf_object__next_program(handle, pointer)
    calls.bpf_object__close(handle)
    return found


def newer(names, limit):
    return {name: release for name, release in names if release > limit}


def test_there_are_objects_of_both_machines_for_every_probe():
    stems = {probe.name for probe in PROBES} | {way.probe for way in WAYS}
    found = {(path.parent.name, path.name.removesuffix(".bpf.o")) for path in PATHS}
    assert found >= {(machine, stem) for machine in ("x86_64", "aarch64") for stem in stems}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_no_helper_and_no_kfunc_is_newer_than_the_oldest_kernel_for_the_object(path):
    numbers, kfuncs = find_helpers(path)
    assert numbers
    assert numbers <= HELPERS.keys()
    assert kfuncs <= KFUNCS.keys()
    used = [HELPERS[number] for number in numbers] + [(name, KFUNCS[name]) for name in kfuncs]
    assert not newer(used, release_for(path))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_no_map_program_or_attach_type_is_newer_than_the_oldest_kernel_for_the_object(path):
    found = read_kinds(path)
    used = [
        *(MAP_TYPES[number] for number in found["map"]),
        *(PROGRAM_TYPES[number] for number in found["program"]),
        *(ATTACH_TYPES[number] for number in found["attach"]),
    ]
    assert found["program"]
    assert not newer(used, release_for(path))


@pytest.mark.parametrize("probe", sorted({path.name.removesuffix(".bpf.o") for path in PATHS}))
def test_no_hash_allocates_entries_where_the_kernel_may_not_do_so_in_a_probe(probe):
    for layout in map(preallocate, read_map_layouts(probe)):
        is_storage = layout.map_type in {SK_STORAGE, TASK_STORAGE}  # which must have the flag
        assert bool(layout.flags & BPF_F_NO_PREALLOC) == is_storage, layout.name


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.mode.value)
def test_a_way_sets_no_attach_type_that_came_after_it(way):
    used = [ATTACH_TYPES[number or 0] for number in way.programs.values()]
    assert not newer(used, tuple(map(int, way.since.split("."))))


def test_every_symbol_that_an_object_without_a_kfunc_needs_is_in_it():
    """libbpf looks for a kfunc in all modules, which older kernels allow CAP_SYS_ADMIN only."""
    with_kfuncs = {path.name for path in PATHS if find_helpers(path)[1]}
    assert with_kfuncs == {"calls_session.bpf.o", "calls_session_ctx.bpf.o"}
