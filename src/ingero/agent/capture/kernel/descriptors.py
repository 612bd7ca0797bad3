"""How many descriptors this process may have."""

from __future__ import annotations

import resource


def raise_descriptor_limit() -> None:
    """Take as many descriptors as this process may have: perf's events, and the memory of each process, take many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
