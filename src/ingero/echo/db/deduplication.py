"""`KeyWindow`: which rows were written lately, so that a sender's retry is dropped and counted.

A key is a 64-bit hash, so a new row is mistaken for a duplicate with probability n / 2⁶⁴ for n keys held: 10⁻¹² at
the default of 16 million. Pure NumPy; the writer alone uses it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

from ingero.model.arrays import BoolArray, IntArray

Keys = npt.NDArray[np.uint64]

_FANOUT: Final = 4
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_A: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B: Final = np.uint64(0x94D049BB133111EB)


def build_keys(series: Keys, time_ns: IntArray, secret: int = 0) -> Keys:
    """One key per row from the hash of what the row is about and its time.

    Args:
        series: Hash of (resource, name, attributes), shape (n,).
        time_ns: The sender's time as sent, shape (n,).
        secret: What no sender knows, so that none can choose a time that gives another's key; 64 bits.

    Returns:
        Keys, shape (n,).
    """
    return mix(mix(series ^ np.uint64(secret)) + time_ns.astype(np.uint64) * _GOLDEN)


def mix(values: Keys) -> Keys:
    """Every bit of a value spread over all bits of the result, shape (n,).

    Source: the finaliser of splitmix64 (Steele, Lea, Flood 2014).
    """
    mixed = values ^ (values >> np.uint64(30))
    mixed *= _MIX_A
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MIX_B
    mixed ^= mixed >> np.uint64(31)
    return mixed


def stable_hash(*parts: bytes) -> int:
    """64 bits that are the same in every process."""
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


class KeyGeneration:
    """Keys added between two rotations: a few sorted runs of growing size; the caller adds each key once."""

    __slots__ = ("n_keys", "opened_ns", "runs")

    def __init__(self, opened_ns: int) -> None:
        self.opened_ns = opened_ns
        self.runs: list[Keys] = []
        self.n_keys = 0

    def add(self, keys: Keys) -> None:
        """Take further keys."""
        self.n_keys += len(keys)
        self.runs.append(np.sort(keys))
        while len(self.runs) > 1 and len(self.runs[-2]) < _FANOUT * len(self.runs[-1]):
            last = self.runs.pop()
            self.runs[-1] = np.sort(np.concatenate((self.runs[-1], last)), kind="stable")

    def is_member(self, keys: Keys) -> BoolArray:
        """Mask of the keys that are here, shape (n,)."""
        found = np.zeros(len(keys), dtype=np.bool_)
        for run in self.runs:
            at = np.searchsorted(run, keys)
            at[at == len(run)] = 0
            found |= run[at] == keys
        return found


class KeyWindow:
    """The keys of at least the last ``window_ns``, in at most ``max_keys``.

    Two generations: when the newer is half full or half a window old, the older is forgotten.

    Args:
        window_ns: How long a key is remembered, on the monotonic clock.
        max_keys: Bound on memory, 8 bytes each; above it the window gets shorter.
    """

    def __init__(self, window_ns: int, max_keys: int) -> None:
        self._window_ns = window_ns
        self._max_keys = max_keys
        self._newer = KeyGeneration(0)
        self._older = KeyGeneration(0)

    def __len__(self) -> int:
        """Keys held."""
        return self._newer.n_keys + self._older.n_keys

    def find_new(self, keys: Keys) -> BoolArray:
        """Mask of the rows to write: first of their key here and not seen in the window."""
        if not len(keys):
            return np.zeros(0, dtype=np.bool_)
        is_new = ~(self._newer.is_member(keys) | self._older.is_member(keys))
        _, first_idx = np.unique(keys, return_index=True)
        is_first = np.zeros(len(keys), dtype=np.bool_)
        is_first[first_idx] = True
        return is_new & is_first

    def add(self, keys: Keys, mono_ns: int) -> None:
        """Remember keys that were written."""
        newer = self._newer
        if newer.n_keys >= self._max_keys // 2 or mono_ns - newer.opened_ns > self._window_ns:
            self._older, self._newer = newer, KeyGeneration(mono_ns)
        if len(keys):
            self._newer.add(keys)
