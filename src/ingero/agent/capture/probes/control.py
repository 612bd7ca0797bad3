"""Whom the kernel's programs watch, and how many calls become records; both change while they run."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.agent.capture.kernel.abi import Stacks, get_dtype
from ingero.agent.capture.kernel.maps import BpfMap
from ingero.model.operations import OpKind, find_codes
from ingero.model.sampling import NEVER_SAMPLED

_KEY_0: Final = bytes(4)
FILTER_PIDS: Final = 1
FILTER_CGROUPS: Final = 2
FILTER_UID: Final = 4


@dataclass(slots=True)
class _Live:
    """Live settings as the kernel has them."""

    filter: int = 0
    uid: int = 0
    keep_one_in: int = 1
    keep_first: int = 64
    is_over: bool = False


class ProbeControl:
    """Writes the settings of an engine's programs.

    Args:
        maps: The kernel's maps.
        stacks: Which records of calls carry the stack they were made from.
        keep_one_in: Records kept among the calls of kinds that are sampled.
        keep_first: Records always kept per process and operation.
        keeps_copies: Whether copies are never sampled either.
    """

    def __init__(
        self,
        maps: Mapping[str, BpfMap],
        stacks: Stacks,
        keep_one_in: int,
        keep_first: int,
        *,
        keeps_copies: bool = False,
    ) -> None:
        self._maps = maps
        self._keeps_copies = keeps_copies
        self._stacks = stacks
        self._live = _Live(keep_one_in=keep_one_in, keep_first=keep_first)
        self._write()

    @property
    def is_filtered(self) -> bool:
        """Whether some processes are watched and not all."""
        return bool(self._live.filter)

    def watch_pid(self, pid: int) -> None:
        """Watch this process and its later children; the first call ends watching everything."""
        self._maps["filter_pids"].update(pid.to_bytes(4, "little"), b"\1")
        self._set(filter=self._live.filter | FILTER_PIDS)

    def watch_uid(self, uid: int) -> None:
        """Watch every process of a user."""
        self._set(filter=self._live.filter | FILTER_UID, uid=uid)

    def watch_cgroup(self, cgroup_id: int) -> None:
        """Watch every process directly in a cgroup."""
        self._maps["filter_cgroups"].update(cgroup_id.to_bytes(8, "little"), b"\1")
        self._set(filter=self._live.filter | FILTER_CGROUPS)

    def is_watched_pid(self, pid: int) -> bool:
        """Whether a process is watched by its pid: it was named, or it is a child of one that was."""
        return (
            self._maps["filter_pids"].lookup(pid.to_bytes(4, "little"), np.dtype("u1")) is not None
        )

    def read_watched_pids(self) -> frozenset[int]:
        """Processes that are watched by their pid and have not ended."""
        pids, _ = self._maps["filter_pids"].read_all(np.dtype("<u4"), np.dtype("u1"))
        return frozenset(pids.tolist())

    def forget_pid(self, pid: int) -> None:
        """Stop watching a process by its pid: it ended and no record said so."""
        self._maps["filter_pids"].delete(pid.to_bytes(4, "little"))

    @property
    def keep_one_in(self) -> int:
        """Of how many calls of a kind that is sampled one becomes a record."""
        return self._live.keep_one_in

    def set_keep_one_in(self, number: int) -> None:
        """Change the sampling of the kinds that are sampled; counts stay exact."""
        self._set(keep_one_in=number)

    def end(self) -> None:
        """Stop counting.

        What was counted has its record in a ring, and what has not returned stays in flight.
        """
        self._set(is_over=True)

    def _set(self, **changes: int | bool) -> None:
        for name, value in changes.items():
            setattr(self._live, name, value)
        self._write()

    def _write(self) -> None:
        settings = np.zeros(1, get_dtype("settings"))
        settings["stacks"] = self._stacks
        settings["page_log2"] = mmap.PAGESIZE.bit_length() - 1
        for source, op in NEVER_SAMPLED:
            settings["exact"][0, source] |= np.uint64(1 << op)
        for code in find_codes((OpKind.COPY,)) if self._keeps_copies else ():
            settings["exact"][0, code >> 8] |= np.uint64(1 << (code & 0xFF))
        for name in ("filter", "uid", "keep_one_in", "keep_first", "is_over"):
            settings[name] = getattr(self._live, name)
        self._maps["settings"].update(_KEY_0, settings.tobytes())
