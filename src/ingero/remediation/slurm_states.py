"""How Slurm shows a node, for programs that import little.

Source: scontrol(1), the flags of ``show node``; sinfo(1), the suffixes of "NODE STATE CODES"; seen with Slurm 22.05:
``scontrol -o show node`` prints one line per node, its reason as ``Reason=TEXT [USER@TIME]`` or not at all. A node in a
maintenance reservation is ``IDLE+MAINTENANCE+RESERVED`` there; sinfo calls it ``maint``, or ``mixed$`` with jobs on it.
"""

from __future__ import annotations

import re

STATE = re.compile(r"\sState=(\S+)")
REASON = re.compile(r"\sReason=(.*?) \[\S+@\S+\]")
_IN_SERVICE = frozenset({"IDLE", "ALLOCATED", "MIXED"})
_OUT_FLAGS = frozenset({
    "DRAIN", "FAIL", "INVALID_REG", "MAINTENANCE", "POWER_DOWN", "POWERED_DOWN", "POWERING_DOWN", "REBOOT",
    "REBOOT_REQUESTED", "REBOOT_ISSUED",
})  # fmt: skip
_OUT_SUFFIXES = frozenset("~!%$@^")
"""Powered down, about to be, being so; maintenance; a reboot asked for, a reboot sent."""


def is_in_service(state: str) -> bool:
    """Whether a node in this state takes jobs, such as ``MIXED+CLOUD`` or ``IDLE*``, and nobody works on it.

    Args:
        state: As scontrol writes it, or sinfo's in capitals.
    """
    base, *flags = state.rstrip("*#-").split("+")
    return base in _IN_SERVICE and _OUT_FLAGS.isdisjoint(flags) and _OUT_SUFFIXES.isdisjoint(state)
