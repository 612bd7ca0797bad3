"""What this machine lets a container have."""

from pathlib import Path


def has_all_capabilities():
    """Whether this machine gives a container every capability; one that is itself a container may not."""
    status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines())
    n_known = int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1
    return int(status["CapBnd"], 16) == (1 << n_known) - 1
