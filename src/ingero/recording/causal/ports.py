"""What slow transfers over RDMA went into, from the counters of the ports that a process has open.

The counters tell packets and no times. Each start over costs what was on its way (`IN_FLIGHT`), so that the part of the
packets that went in vain is the part of the time; only stalls until a timer ran out are measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ingero.model.diagnosis import CauseKind
from ingero.model.port_counters import COUNTERS, NOTED, RECEIVED, SENT, PortTrouble
from ingero.model.ports import ACTIVE, RdmaPort, find_packets
from ingero.recording.causal.attribution import NAMED_SHARE
from ingero.recording.causal.conclusions import CausePart
from ingero.units import format_duration

MIN_PACKETS: Final = 10
"""Sent and received, below which a port is not looked at."""
_KINDS: Final = {
    PortTrouble.LOSS: CauseKind.NETWORK_LOSS,
    PortTrouble.NOT_READY: CauseKind.WINDOW_LIMITED,
    PortTrouble.CONGESTION: CauseKind.NETWORK_DELAY,
}
_NAMES: Final = {
    PortTrouble.LOSS: "",
    PortTrouble.NOT_READY: "the receiver has no buffer ready (RNR)",
    PortTrouble.CONGESTION: "queues on the way slow the senders down (CNP)",
}
_TODO: Final = {
    PortTrouble.LOSS: (
        (
            "look for errors on both ends' ports, cables and transceivers, and for drops on the switches between them "
            "(`ibqueryerrors`; of RoCE `ethtool -S`)"
        ),
        "of RoCE, look whether every switch on the way has flow control for NCCL's traffic class (NCCL_IB_TC)",
    ),
    PortTrouble.NOT_READY: ("look at what the process at the other end does: it posts no buffers",),
    PortTrouble.CONGESTION: (
        "look for several senders to one port, and for paths of the fabric that share a cable (routing)",
        "compare settings of ECN and flow control on both ends and on the switches between them",
    ),
}
_SLOW_PORT_TODO: Final = (
    "look at this port's cable and transceiver, and at the switch's port (`ibstat`, `mlxlink -d DEVICE`)",
)


def is_looked_at(port: RdmaPort) -> bool:
    """Whether a port carried enough to tell of, or broke down, or does not tell what it carried."""
    if port.n_sent is None or port.n_received is None:
        return True
    return port.n_sent + port.n_received >= MIN_PACKETS or has_failed(port)


def has_failed(port: RdmaPort) -> bool:
    """Whether a port went down meanwhile; one that was down before carries nothing as a rule."""
    return (port.was_active and port.state != ACTIVE) or port.counts.get("link_downed", 0) > 0


def find_port_parts(port: RdmaPort) -> tuple[list[CausePart], int]:
    """Times that were lost on a port, of those troubles of which it tells; and the time in which they were lost."""
    whole_ns = port.window_ns if has_failed(port) else port.busy_ns
    parts = [_find_slowness(port)] if port.state or has_failed(port) else []
    left_ns = port.busy_ns - port.stalled_ns
    for trouble in PortTrouble:
        cost = find_cost(port, trouble)
        if cost is None:
            continue
        lost_ns, stalled_ns = cost * left_ns, 0
        left_ns -= round(lost_ns)
        if trouble is PortTrouble.LOSS:
            stalled_ns = port.stalled_ns
        evidence = (
            *_describe_counts(port, trouble),
            *_describe_stall(stalled_ns),
            *_describe_before(port, trouble),
            *_list_noted(port),
        )
        parts.append(
            CausePart(
                _KINDS[trouble], lost_ns + stalled_ns, evidence, _NAMES[trouble], _TODO[trouble]
            )
        )
    return parts, whole_ns


def find_cost(port: RdmaPort, trouble: PortTrouble) -> float | None:
    """The part of a port's packets that went in vain, 0 to 1; None where its counters do not tell.

    Several counters may count the same start over: the one that tells most counts.
    """
    sure, unsure = list[float](), [0.0]
    for name, counter in COUNTERS.items():
        n_packets = port.n_sent if counter.is_sent else port.n_received
        if counter.trouble is trouble and name in port.counts and n_packets is not None:
            cost = port.counts[name] * counter.n_packets / max(n_packets, 1)
            (sure if counter.is_sure else unsure).append(cost)
    cost = min(max(sure, default=0.0), 1.0)
    is_known = bool(sure) and max(unsure) < NAMED_SHARE and not _list_unknown(port, trouble)
    return cost if is_known or cost >= NAMED_SHARE else None


def describe_port(port: RdmaPort) -> str:
    """What a port is and carried."""
    rate = f", {port.rate_gbps:g} Gbit/s" if port.rate_gbps else ""
    where = f"over {port.name} ({port.state or 'its state is not known'}{rate})"
    if port.n_sent is None or port.n_received is None:
        return f"{where}: it is not known what it carried"
    return (
        f"{where}: {port.n_sent} packets sent, {port.n_received} received, busy for "
        f"{format_duration(port.busy_ns)} of {format_duration(port.window_ns)}"
    )


def describe_unknown(port: RdmaPort) -> Iterator[str]:
    """Which troubles of a port are not known; nothing of those that its device does not count, but of lost packets."""
    for trouble in PortTrouble:
        if find_cost(port, trouble) is not None:
            continue
        unknown = _list_unknown(port, trouble)
        unsure = [
            f"{port.counts[name]} {name}"
            for name, counter in COUNTERS.items()
            if counter.trouble is trouble and not counter.is_sure and port.counts.get(name)
        ]
        if unsure:
            counted = f"{', '.join(unsure)}, of {port.n_received} packets received"
            yield f"{trouble} on {port.name} not known: {counted}, which adaptive routing makes too"
        elif unknown:
            names = ", ".join(unknown)
            yield f"{trouble} on {port.name} not known: no reading, or none that goes on, of {names}"
        elif any(name in port.counts and one.trouble is trouble for name, one in COUNTERS.items()):
            yield f"{trouble} on {port.name} not known: nothing counts its packets"
        elif trouble is PortTrouble.LOSS:
            yield f"{trouble} on {port.name} not known: its device does not count them"


def _list_unknown(port: RdmaPort, trouble: PortTrouble) -> list[str]:
    return [name for name in port.unknown if name in COUNTERS and COUNTERS[name].trouble is trouble]


def _find_slowness(port: RdmaPort) -> CausePart:
    """A port below its like, and one that went down: nothing is sent then."""
    slower, down_ns = 0.0, 0
    evidence = [f"{port.rate_gbps:g} Gbit/s"] if port.rate_gbps else []
    if 0 < port.rate_gbps < port.best_gbps:
        slower = 1 - port.rate_gbps / port.best_gbps
        evidence = [f"{port.rate_gbps:g} Gbit/s, another port of the same board {port.best_gbps:g}"]
    if has_failed(port):
        down_ns = port.window_ns - port.busy_ns
        evidence.append(
            f"it went down meanwhile: {port.state or 'gone'} {port.phys_state}".rstrip()
        )
    evidence += _list_noted(port)
    return CausePart(
        CauseKind.SLOW_PORT, slower * port.busy_ns + down_ns, tuple(evidence), todo=_SLOW_PORT_TODO
    )


def _describe_counts(port: RdmaPort, trouble: PortTrouble) -> Iterator[str]:
    for is_sent, n_packets, what in (
        (True, port.n_sent, "sent"),
        (False, port.n_received, "received"),
    ):
        names = [
            name
            for name, counter in COUNTERS.items()
            if counter.trouble is trouble and counter.is_sent is is_sent and name in port.counts
        ]
        rose = [f"{port.counts[name]} {name}" for name in names if port.counts[name]]
        if rose:
            yield f"{', '.join(rose)}, of {n_packets} packets {what}"
        elif names:
            yield f"0 {', '.join(names)}"


def _describe_before(port: RdmaPort, trouble: PortTrouble) -> Iterator[str]:
    """What was counted before the look, since nobody knows when: whether a trouble is new."""
    for is_sent, names, what in ((True, SENT, "sent"), (False, RECEIVED, "received")):
        n_packets = find_packets(port.totals, port.unknown, names)
        counts = [
            f"{port.totals[name]} {name}"
            for name, counter in COUNTERS.items()
            if counter.trouble is trouble and counter.is_sent is is_sent and port.totals.get(name)
        ]
        if counts and n_packets is not None:
            yield f"before that {', '.join(counts)}, of {n_packets} packets {what}"


def _describe_stall(stalled_ns: int) -> tuple[str, ...]:
    if not stalled_ns:
        return ()
    return (f"nothing was sent for {format_duration(stalled_ns)} until a timer ran out",)


def _list_noted(port: RdmaPort) -> tuple[str, ...]:
    rose = [f"{port.counts[name]} {name}" for name in NOTED if port.counts.get(name)]
    return (", ".join(rose),) if rose else ()
