"""Ring buffers, decoded in place: one NumPy view per batch, no per-record Python.

The kernel maps the data pages twice in a row, so a batch that wraps is still contiguous. Every record of one ring has
the same size, which makes the ring an array with a stride. Source: kernel/bpf/ringbuf.c and
Documentation/bpf/ringbuf.rst of Linux 6.13.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ingero.agent.capture.kernel.maps import BpfMap
from ingero.model.arrays import Records

BUSY: Final = np.uint32(1 << 31)
DISCARDED: Final = np.uint32(1 << 30)
_PAGE: Final = mmap.PAGESIZE


class Ring:
    """The consumer of one ring buffer whose records all have one layout.

    Args:
        ring: The map.
        dtype: The record's layout, a multiple of eight bytes.
    """

    def __init__(self, ring: BpfMap, dtype: np.dtype[Any]) -> None:
        self.name = ring.name
        self.fd = ring.fd
        self.size_bytes = ring.max_entries
        self._slot = np.dtype([("length", "<u4"), ("page", "<u4"), ("record", dtype)])
        self._consumer_page = mmap.mmap(
            ring.fd, _PAGE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
        self._pages = mmap.mmap(
            ring.fd,
            _PAGE + 2 * self.size_bytes,
            flags=mmap.MAP_SHARED,
            prot=mmap.PROT_READ,
            offset=_PAGE,
        )
        self._consumer: npt.NDArray[np.uint64] = np.frombuffer(self._consumer_page, "<u8", 1)
        self._producer: npt.NDArray[np.uint64] = np.frombuffer(self._pages, "<u8", 1)

    def empty(self) -> Records:
        """No records, in this ring's layout."""
        return np.empty(0, self._slot["record"])

    def fill(self) -> float:
        """Share of the ring that is waiting to be read, 0 to 1."""
        return (int(self._producer[0]) - int(self._consumer[0])) / self.size_bytes

    def drain(self, consume: Callable[[Records], None]) -> int:
        """Hand all finished records to ``consume`` as one read-only view, then give their space back.

        The view is into the ring: what must live longer is copied by ``consume``. A record still being written ends the
        batch; the next call goes on from it.

        Returns:
            How many records were handed over.
        """
        start = int(self._consumer[0])
        n_slots = (int(self._producer[0]) - start) // self._slot.itemsize
        if n_slots <= 0:
            return 0
        slots = np.frombuffer(
            self._pages, self._slot, n_slots, _PAGE + (start & (self.size_bytes - 1))
        )
        lengths = slots["length"]
        is_busy = (lengths & BUSY) != 0
        n_ready = int(is_busy.argmax()) if is_busy.any() else n_slots
        if not n_ready:
            return 0
        records = slots["record"][:n_ready]
        is_discarded = (lengths[:n_ready] & DISCARDED) != 0
        if is_discarded.any():
            records = records[~is_discarded]
        consume(records)
        self._consumer[0] = start + n_ready * self._slot.itemsize
        return len(records)

    def close(self) -> None:
        """Unmap the ring. A view that an error on its way still holds keeps the pages until it is gone."""
        self._consumer = self._producer = np.empty(0, "<u8")
        for pages in (self._consumer_page, self._pages):
            with contextlib.suppress(BufferError):
                pages.close()
