"""What to say, beside a cause, of what a worker did and of what that is compared with: evidence for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ingero.model.counters import QuotaMember, Work, WorkRates
from ingero.recording.causal.work_rates import find_throttled
from ingero.units import NS_PER_US, format_duration

_MAX_NAMES: Final = 3
_FAULT_NS: Final = NS_PER_US
"""A page fault without a disk, roughly: 0.5 µs on bare metal, 3 µs were seen on a virtual machine."""
_MIN_SHARE: Final = 0.1
"""Of what is computed more that is in the kernel, and of that in page faults, below which they are not mentioned."""


def describe_then(then: WorkRates, was: str) -> str:
    """A figure of the reference."""
    return f"its peers {was}" if then.is_of_peers else f"{was} before"


def describe_neighbours(neighbours: Mapping[QuotaMember, float], now: WorkRates) -> tuple[str, ...]:
    """Who uses most of a quota beyond what it used then."""
    worst = sorted(neighbours, key=lambda one: (-neighbours[one], one.label))[:_MAX_NAMES]
    of = "" if now.n_processors is None else f" of {now.n_processors:.3g}"
    return tuple(f"{one.label} uses {neighbours[one]:.2g}{of} processors" for one in worst)


def describe_unknown(now: WorkRates, n_grown: int) -> tuple[str, ...]:
    """What is not known of the others of a quota."""
    facts = []
    if now.n_unknown_others:
        facts.append(f"what {now.n_unknown_others} others of its cgroup use is not known")
    if n_grown:
        facts.append(f"what {n_grown} others of its cgroup used before is not known")
    return tuple(facts)


def name_worst(takers: Mapping[str, float]) -> str:
    """Who takes most, shortly: ``job`` for ``job (12)`` and ``job (13)``."""
    totals: dict[str, float] = {}
    for name, rate in takers.items():
        short = name.rpartition(" (")[0] or name
        totals[short] = totals.get(short, 0.0) + rate
    worst = sorted(totals, key=lambda name: (-totals[name], name))
    return ", ".join(worst[:_MAX_NAMES])


def describe_quota(then: WorkRates, now: WorkRates, after: Work) -> tuple[str, ...]:
    """The quota that held a process back, and in how many of its periods."""
    if not now.cgroup:
        return ("no cgroup above it has a quota",)
    throttled = find_throttled(after, now.cgroup)
    limit = "its cgroup was held back by a limit that is gone by now"
    if now.n_processors is not None:
        was = "none" if then.n_processors is None else f"{then.n_processors:.3g}"
        limit = f"its cgroup may use {now.n_processors:.3g} processors, {describe_then(then, was)}"
        at_end = [one.n_processors for one in after.last.quotas if one.cgroup == now.cgroup]
        if not at_end:
            limit += ", without a limit by now"
        elif at_end[0] > now.n_processors:
            limit += f", {at_end[0]:.3g} by now"
    if throttled is None:
        return (limit, "how long it was held back is not known")
    return (limit, f"held back in {throttled.n_periods} periods since it is slow")


def describe_place(then: WorkRates, now: WorkRates) -> tuple[str, ...]:
    """Differences of where and how urgently it may run."""
    facts = []
    if now.n_processors_allowed < then.n_processors_allowed:
        was = describe_then(then, str(then.n_processors_allowed))
        facts.append(f"it may run on {now.n_processors_allowed} processors, {was}")
    if now.nice > then.nice:
        facts.append(f"its nice value is {now.nice}, {describe_then(then, str(then.nice))}")
    return tuple(facts)


def describe_faults(then: WorkRates, now: WorkRates) -> tuple[str, ...]:
    """Page faults without a disk, and time in the kernel, where more of them is a part of what is computed more.

    Known of the process itself only, not of peers. Source: glibc, mallopt(3), `M_TRIM_THRESHOLD`: what is freed at the
    end of the heap goes back to the kernel, and is faulted in again after the next allocation.
    """
    if then.minor_faults is None or now.minor_faults is None:
        return ()
    if then.kernel_ns is None or now.kernel_ns is None:
        return ()
    computed_ns = now.computing_ns - then.computing_ns
    kernel_ns = now.kernel_ns - then.kernel_ns
    faults_ns = (now.minor_faults - then.minor_faults) * _FAULT_NS
    if kernel_ns < _MIN_SHARE * max(computed_ns, 0.0) or faults_ns <= _MIN_SHARE * kernel_ns:
        return ()
    took, was = format_duration(round(now.kernel_ns)), format_duration(round(then.kernel_ns))
    n_now, n_then = round(now.minor_faults), round(then.minor_faults)
    return (
        f"in the kernel {took} an operation, {describe_then(then, was)}",
        f"{n_now} page faults without a disk an operation, {describe_then(then, str(n_then))}",
    )
