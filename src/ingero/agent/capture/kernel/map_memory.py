"""How much memory the maps and rings of the kernel's programs take, by arithmetic from what the objects declare.

Upper bounds: the kernel's own figures (``memlock`` in fdinfo) count what was asked for, and the allocator rounds up.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Final

from ingero.agent.capture.kernel.objects import MapLayout, preallocate, read_map_layouts

_HASH, _ARRAY, _PERCPU_HASH, _PERCPU_ARRAY, _LRU_HASH = 1, 2, 5, 6, 9  # enum bpf_map_type
_RINGBUF: Final = 27
_MAP_BYTES: Final = 512  # struct bpf_map and what its type adds to it
_HASHES: Final = frozenset({_HASH, _PERCPU_HASH, _LRU_HASH})
_NO_PREALLOC: Final = 1
_ENTRY_BYTES: Final = (
    56  # struct htab_elem (kernel/bpf/hashtab.c) and the list of free ones (kernel/bpf/memalloc.c)
)
_BUCKET_BYTES: Final = 16  # struct bucket
_SLABS: Final = (
    *(8, 16, 32, 64, 96, 128, 192, 256, 512),
    *(1 << n for n in range(10, 23)),
)  # kmalloc()'s
_RING_PAGES: Final = (
    3  # of a ring beside its data: the positions of writer and reader, and struct bpf_ringbuf
)


@dataclass(frozen=True, slots=True)
class MapCost:
    """What one map takes.

    Attributes:
        name: Its name in the C source.
        fixed_bytes: From the start on.
        entry_bytes: For each further entry; 0 where all have their place from the start.
        max_entries: The most entries that it can hold.
    """

    name: str
    fixed_bytes: int
    entry_bytes: int
    max_entries: int

    @property
    def max_bytes(self) -> int:
        """What it takes when it is full."""
        return self.fixed_bytes + self.entry_bytes * self.max_entries


def reckon(layout: MapLayout, n_cpus: int, page_bytes: int = mmap.PAGESIZE) -> MapCost:
    """What a map takes on a machine with so many possible processors, and pages of that size.

    A storage of sockets (``BPF_MAP_TYPE_SK_STORAGE``) has no entries of its own:
    each lies with its socket, and none is counted.
    """
    kind, n_entries = layout.map_type, layout.max_entries
    key, value = _round_up(layout.key_bytes), _round_up(layout.value_bytes)
    fixed, entry = 0, 0
    if kind == _RINGBUF:
        pointers = (
            2 * 8 * n_entries // page_bytes
        )  # each page is mapped twice, one behind the other
        fixed = n_entries + pointers + _RING_PAGES * page_bytes
    elif kind == _ARRAY:
        fixed = value * n_entries
    elif kind == _PERCPU_ARRAY:
        fixed = (value * n_cpus + 8) * n_entries
    elif kind in _HASHES:
        fixed = _BUCKET_BYTES << max(n_entries - 1, 1).bit_length()
        entry = _ENTRY_BYTES + key + (8 if kind == _PERCPU_HASH else value)
        per_cpu = value * n_cpus if kind == _PERCPU_HASH else 0
        if layout.flags & _NO_PREALLOC:
            entry = next(slab for slab in _SLABS if slab >= entry) + per_cpu
        else:  # and one to spare for each processor
            fixed += (entry + per_cpu) * (n_entries + n_cpus)
            entry = 0
    return MapCost(layout.name, _MAP_BYTES + fixed, entry, n_entries)


def reckon_all(
    probes: tuple[str, ...],
    n_cpus: int,
    page_bytes: int = mmap.PAGESIZE,
    *,
    allocates: bool = True,
) -> dict[str, MapCost]:
    """What all maps of these objects take, by name; one that several share counts once.

    Args:
        probes: Stems of the objects.
        n_cpus: Possible processors.
        page_bytes: Size of a page.
        allocates: Whether the kernel is one of `ingero.agent.capture.kernel.features.allocates_entries`.

    Raises:
        UnsupportedError: libbpf is missing, or an object was not built.
    """
    return {
        layout.name: reckon(layout if allocates else preallocate(layout), n_cpus, page_bytes)
        for probe in probes
        for layout in read_map_layouts(probe)
    }


def _round_up(n_bytes: int) -> int:
    return -(-n_bytes // 8) * 8
