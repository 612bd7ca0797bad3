"""What slow transfers of a process went into, from what the kernel counted of its TCP connections for some seconds.

The host is looked at to which data were not acknowledged for longest beyond what is usual. Usual is what a round trip
to the other hosts takes. Where these take as long, or there are none, it is `VARIES` times its own least of five
minutes.

A round trip counts less `DEVIATIONS` times its mean deviation: an acknowledgement that is delayed now and then (RFC
1122), as by a host that waits for another one before it answers, is no packet that was on its way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import median
from typing import Final

from ingero.model.counters import HostTraffic, Traffic
from ingero.model.diagnosis import CauseKind
from ingero.recording.causal.conclusions import CausePart, ExcessCauses, conclude
from ingero.units import format_duration

MIN_SEGMENTS: Final = 10
"""With data, below which a host is not looked at."""
VARIES: Final = 4
"""Round trip by the least of five minutes, up to which nothing is said of it: queues of a job's own make that much."""
DEVIATIONS: Final = 2
"""Seen: 17 ms for 23 ms to a host that waited for a slow one, 0 for 41 ms to that one."""
STANDS_OUT: Final = 2
"""Round trip to one host by that to others, from which these are the reference."""
_SENT_NOTHING: Final = (
    "it sent next to nothing over TCP meanwhile; InfiniBand and RoCE are not looked at"
)
_BITS: Final = 8
_MEGA: Final = 1_000_000


def find_link_causes(traffic: Traffic) -> ExcessCauses:
    """Share out the time for which data to the host that lost most were not acknowledged.

    Args:
        traffic: Of the process, in some seconds.
    """
    hosts = {host: one for host, one in traffic.hosts.items() if one.n_segments >= MIN_SEGMENTS}
    errors = [f"{count} {name}" for name, count in sorted(traffic.errors.items())]
    if not hosts:
        return conclude([], 0, traffic.reason or _SENT_NOTHING, *errors)
    parts = {
        host: _find_parts(one, [hosts[other] for other in hosts if other != host])
        for host, one in hosts.items()
    }
    worst = max(sorted(hosts), key=lambda host: sum(part.extra_ns for part in parts[host]))
    where = _describe(worst, hosts[worst])
    found = [replace(part, evidence=(where, *part.evidence, *errors)) for part in parts[worst]]
    return conclude(found, hosts[worst].busy_ns, where, *errors)


def _find_parts(one: HostTraffic, others: list[HostTraffic]) -> list[CausePart]:
    """Times that were lost to one host, in comparison with the other hosts."""
    limited_ns = one.window_ns + one.buffer_ns
    timeout_ns = min(one.timeout_ns, max(one.busy_ns - limited_ns, 0))
    left_ns = max(one.busy_ns - limited_ns - timeout_ns, 0)
    again_ns = min(one.n_again * one.rtt_ns, left_ns)
    left_ns -= again_ns
    took_ns = _typical(one)
    slower = max(took_ns - _find_usual(took_ns, one, others), 0) / max(took_ns, 1)
    return [
        CausePart(CauseKind.NETWORK_DELAY, left_ns * slower, _describe_delay(one, others)),
        CausePart(CauseKind.NETWORK_LOSS, timeout_ns + again_ns, _describe_loss(one)),
        CausePart(
            CauseKind.WINDOW_LIMITED,
            max(limited_ns - one.busy_ns * _limited(others), 0.0) if others else 0.0,
            _describe_limits(one),
        ),
    ]


def _typical(one: HostTraffic) -> int:
    return max(one.rtt_ns - DEVIATIONS * one.rtt_var_ns, one.min_rtt_ns)


def _find_usual(took_ns: int, one: HostTraffic, others: list[HostTraffic]) -> float:
    of_others_ns = median(map(_typical, others)) if others else took_ns
    return of_others_ns if took_ns >= STANDS_OUT * of_others_ns else VARIES * one.min_rtt_ns


def _limited(others: Iterable[HostTraffic]) -> float:
    """The part of the time in which sending to other hosts was limited, the median."""
    return median((one.window_ns + one.buffer_ns) / max(one.busy_ns, 1) for one in others)


def _describe(host: str, one: HostTraffic) -> str:
    return (
        f"to {host}: {one.n_bytes / _MEGA:.3g} MB over {one.n_connections} connections, "
        f"{format_duration(one.busy_ns)} until they were acknowledged"
    )


def _describe_delay(one: HostTraffic, others: list[HostTraffic]) -> tuple[str, ...]:
    fastest = f"{format_duration(one.min_rtt_ns)} the least of five minutes"
    rtts = [other.rtt_ns for other in others]
    usual = f"{format_duration(round(median(rtts)))} to others, " if rtts else ""
    rate = one.rate * _BITS / _MEGA
    return (
        f"{format_duration(one.rtt_ns)} there and back, {usual}{fastest}",
        f"{rate:.3g} Mbit/s acknowledged of late",
    )


def _describe_loss(one: HostTraffic) -> tuple[str, ...]:
    again = f"{one.n_again} of {one.n_segments} segments were sent again"
    if not one.timeout_ns:
        return (again,)
    return (again, f"{format_duration(one.timeout_ns)} until a timer ran out")


def _describe_limits(one: HostTraffic) -> tuple[str, ...]:
    window, buffer, busy = map(format_duration, (one.window_ns, one.buffer_ns, one.busy_ns))
    return (f"of {busy} the receiver's window full for {window}, the send buffer for {buffer}",)
