"""BPF maps as Python and NumPy see them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Final

import numpy as np

from ingero.agent.capture.kernel import syscalls
from ingero.model.arrays import Records

PERCPU_TYPES: Final = frozenset({5, 6, 10})  # hash, array, lru hash
RINGBUF_TYPE: Final = 27


@functools.cache
def count_possible_cpus() -> int:
    """CPUs that could ever be online: the number of values in a per-CPU map entry."""
    return len(parse_cpus(Path("/sys/devices/system/cpu/possible").read_text(encoding="ascii")))


def parse_cpus(text: str) -> list[int]:
    """The numbers in a list of CPUs as the kernel writes it, such as ``0-3,8``."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


class BpfMap:
    """One map of a loaded object, which owns the descriptor.

    Args:
        name: Its name in the C source.
        fd: Its descriptor.
        sizes: Bytes of a key and of a value.
        max_entries: Its capacity; bytes for a ring.
        map_type: ``enum bpf_map_type``.
    """

    def __init__(
        self, name: str, fd: int, sizes: tuple[int, int], max_entries: int, map_type: int
    ) -> None:
        self.name = name
        self.fd = fd
        self.key_bytes, self.value_bytes = sizes
        self.max_entries = max_entries
        self.map_type = map_type
        self.n_values = count_possible_cpus() if map_type in PERCPU_TYPES else 1
        self.entry_bytes = -(-self.value_bytes // 8) * 8 if self.n_values > 1 else self.value_bytes

    def read_memory(self) -> int:
        """Bytes that the kernel holds for it now.

        It is ``memlock`` of fdinfo, which Linux before 6.4 does not fill for every type.
        """
        text = Path(f"/proc/self/fdinfo/{self.fd}").read_text(encoding="ascii")
        fields = (line.partition(":") for line in text.splitlines())
        return next((int(value) for name, _, value in fields if name == "memlock"), 0)

    def update(self, key: bytes, value: bytes) -> None:
        """Write one entry."""
        syscalls.update(self.fd, key, value)

    def delete(self, key: bytes) -> bool:
        """Remove one entry; False when it was not there."""
        return syscalls.delete(self.fd, key)

    def lookup(self, key: bytes, dtype: np.dtype[Any]) -> Records | None:
        """The value (one per CPU in a per-CPU map) as an array, or None."""
        raw = syscalls.lookup(self.fd, key, self.entry_bytes * self.n_values)
        return None if raw is None else np.frombuffer(raw, _padded(dtype, self.entry_bytes))

    def read_all(
        self, key_dtype: np.dtype[Any], value_dtype: np.dtype[Any]
    ) -> tuple[Records, Records]:
        """Every entry of a hash map.

        Returns:
            Keys of shape (n,) and values of shape (n,), or (n, CPUs) for a per-CPU map.
        """
        sizes = (self.key_bytes, self.entry_bytes * self.n_values)
        keys, values, _ = syscalls.lookup_batch(self.fd, sizes, self.max_entries)
        shape: tuple[int, ...] = (-1, self.n_values) if self.map_type in PERCPU_TYPES else (-1,)
        decoded = np.frombuffer(values, _padded(value_dtype, self.entry_bytes))
        return np.frombuffer(keys, key_dtype), decoded.reshape(shape)


def _padded(dtype: np.dtype[Any], n_bytes: int) -> np.dtype[Any]:
    """The dtype with its item size raised to the stride that the kernel uses."""
    if dtype.itemsize == n_bytes:
        return dtype
    if dtype.fields is None:
        return np.dtype({"names": ["value"], "formats": [dtype], "itemsize": n_bytes})
    names = list(dtype.names or ())
    return np.dtype({
        "names": names,
        "formats": [dtype.fields[name][0] for name in names],
        "offsets": [dtype.fields[name][1] for name in names],
        "itemsize": n_bytes,
    })
