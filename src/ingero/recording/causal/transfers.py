"""What slow transfers of a process went into, from what was counted for some seconds of its TCP connections and ports.

What lost most time is looked at: a host, over TCP, or a port of an RDMA device (`ports`). The host is the one to which
data were not acknowledged for longest beyond what is usual. Usual is what a round trip to the other hosts takes. Where
these take as long, or there are none, it is `VARIES` times its own least of five minutes.

A round trip counts less `DEVIATIONS` times its mean deviation: an acknowledgement that is delayed now and then (RFC
1122), as by a host that waits for another one before it answers, is no packet that was on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from ingero.model.counters import HostTraffic, Traffic
from ingero.model.diagnosis import CauseKind
from ingero.model.ports import RdmaPort, RdmaTraffic
from ingero.recording.causal.conclusions import CausePart, ExcessCauses, conclude
from ingero.recording.causal.ports import (
    describe_port,
    describe_unknown,
    find_port_parts,
    is_looked_at,
)
from ingero.units import format_duration

MIN_SEGMENTS: Final = 10
"""With data, below which a host is not looked at."""
VARIES: Final = 4
"""Round trip by the least of five minutes, up to which nothing is said of it: queues of a job's own make that much."""
DEVIATIONS: Final = 2
"""Seen: 17 ms for 23 ms to a host that waited for a slow one, 0 for 41 ms to that one."""
STANDS_OUT: Final = 2
"""Round trip to one host by that to others, from which these are the reference."""
_SENT_NOTHING: Final = "it sent next to nothing over TCP meanwhile"
_NO_PORTS: Final = "it has no InfiniBand or RoCE device open"
_BITS: Final = 8
_MEGA: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class _Way:
    """A host or a port, and what was lost on the way there.

    Attributes:
        where: What it is and carried.
        parts: Times that were lost.
        whole_ns: Time in which they were.
        notes: What is to be said beside them.
    """

    where: str
    parts: list[CausePart]
    whole_ns: int
    notes: tuple[str, ...]

    @property
    def lost_ns(self) -> float:
        return sum(part.extra_ns for part in self.parts)

    @property
    def described(self) -> list[CausePart]:
        """The parts, each with what is to be said of the way."""
        return [
            replace(part, evidence=(self.where, *part.evidence, *self.notes)) for part in self.parts
        ]


def find_link_causes(traffic: Traffic, rdma: RdmaTraffic | None = None) -> ExcessCauses:
    """Share out the time for which data on the way that lost most were not acknowledged, or its port was busy.

    What was looked at on the other kind of way, TCP or RDMA, is ruled out where it took no part there.

    Args:
        traffic: Of the process, in some seconds.
        rdma: The ports that it had open meanwhile; None where these were not looked at.
    """
    over_tcp, over_rdma = _find_hosts(traffic), _find_ports(rdma or RdmaTraffic())
    worst = [_find_worst(ways) for ways in (over_tcp, over_rdma) if ways]
    reasons = [] if over_tcp else [traffic.reason or _SENT_NOTHING]
    if not over_rdma and rdma is not None:
        reasons.append(rdma.reason or _describe_idle(rdma.ports))
    if not worst:
        return conclude([], 0, *reasons, *_list_errors(traffic))
    first, *others = sorted(worst, key=_rate, reverse=True)
    facts = [fact for way in (first, *others) for fact in (way.where, *way.notes)]
    found = conclude(first.described, first.whole_ns, *facts, *reasons)
    ruled_out = [one for way in others for one in conclude(way.described, way.whole_ns).ruled_out]
    return replace(found, ruled_out=(*found.ruled_out, *ruled_out))


def _find_worst(ways: list[_Way]) -> _Way:
    return max(ways, key=_rate)


def _rate(way: _Way) -> tuple[float, int]:
    return way.lost_ns, way.whole_ns


def _list_errors(traffic: Traffic) -> tuple[str, ...]:
    return tuple(f"{count} {name}" for name, count in sorted(traffic.errors.items()))


def _find_hosts(traffic: Traffic) -> list[_Way]:
    hosts = {host: one for host, one in traffic.hosts.items() if one.n_segments >= MIN_SEGMENTS}
    errors = _list_errors(traffic)
    return [
        _Way(
            _describe(host, one),
            _find_parts(one, [hosts[other] for other in hosts if other != host]),
            one.busy_ns,
            errors,
        )
        for host, one in sorted(hosts.items())
    ]


def _find_ports(rdma: RdmaTraffic) -> list[_Way]:
    ports = [port for port in rdma.ports if is_looked_at(port)]
    unknown = tuple(note for port in ports for note in describe_unknown(port))
    return [_Way(describe_port(port), *find_port_parts(port), unknown) for port in ports]


def _describe_idle(ports: Sequence[RdmaPort]) -> str:
    names = ", ".join(f"{port.name} ({port.state or 'its state is not known'})" for port in ports)
    return f"it sent next to nothing over {names}" if names else _NO_PORTS


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
