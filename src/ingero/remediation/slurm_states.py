"""How Slurm shows a node, for programs that import little.

Source: scontrol(1); seen with Slurm 22.05: ``scontrol -o show node`` prints one line per node, its reason as
``Reason=TEXT [USER@TIME]`` or not at all.
"""

from __future__ import annotations

import re

STATE = re.compile(r"\sState=(\S+)")
REASON = re.compile(r"\sReason=(.*?) \[\S+@\S+\]")
_IN_SERVICE = frozenset({"IDLE", "ALLOCATED", "MIXED"})
_OUT_FLAGS = frozenset({
    "DRAIN", "DRAINING", "DRAINED", "DOWN", "FAIL", "FAILING", "MAINT", "INVALID_REG", "POWER_DOWN", "POWERED_DOWN",
    "POWERING_DOWN", "REBOOT_REQUESTED", "REBOOT_ISSUED", "REBOOT",
})  # fmt: skip


def is_in_service(state: str) -> bool:
    """Whether a node in this state takes jobs, such as ``MIXED+CLOUD`` or ``IDLE*``."""
    base, *flags = state.rstrip("*~#!%$@^-").split("+")
    return base in _IN_SERVICE and _OUT_FLAGS.isdisjoint(flags)
