"""Counters of RDMA ports by the names that drivers give them, and what each tells of lost time.

A counter of events counts as `IN_FLIGHT` packets each: a receiver that misses a packet throws away what follows it, and
the sender sends all that was on its way once more. One of packets that were sent or came in vain counts as it is.

Sources: Linux 6.16, Documentation/ABI/stable/sysfs-class-infiniband; drivers/infiniband/core/sysfs.c (widths of
``counters``, which stay at their greatest value: InfiniBand Architecture Specification 1.3, 16.1.3.5);
drivers/infiniband/hw/mlx5/counters.c, hw/bnxt_re/hw_counters.c, hw/efa/efa_verbs.c, sw/rxe/rxe_hw_counters.c with
rxe_resp.c (one ``out_of_seq_request`` a gap); NVIDIA, "Understanding mlx5 Linux Counters and Status Parameters".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

IN_FLIGHT: Final = 100
"""Packets on their way: 400 Gbit/s for 10 µs, in packets of 4 KiB."""


class PortTrouble(StrEnum):
    """What a counter tells of."""

    LOSS = "lost packets"
    NOT_READY = "receivers without a buffer"
    CONGESTION = "congestion"


@dataclass(frozen=True, slots=True)
class PortCounter:
    """What a counter counts.

    Attributes:
        trouble: What it tells of.
        is_sent: Whether it is of what the port sends; else of what it receives.
        n_packets: Packets that one of it costs.
        is_sure: Whether it rises for no other reason.
    """

    trouble: PortTrouble
    is_sent: bool
    n_packets: int = IN_FLIGHT
    is_sure: bool = True


def _group(
    trouble: PortTrouble, names: str, *, is_sent: bool, n_packets: int = IN_FLIGHT
) -> dict[str, PortCounter]:
    return {name: PortCounter(trouble, is_sent, n_packets) for name in names.split()}


COUNTERS: Final[Mapping[str, PortCounter]] = {
    # In every line: mlx5, then bnxt_re, EFA, rxe; then what InfiniBand demands of every port.
    **_group(
        PortTrouble.LOSS,
        "packet_seq_err implied_nak_seq_err local_ack_timeout_err roce_adp_retrans req_transport_retries_exceeded"
        " seq_err_naks_rcvd to_retransmits max_retry_exceeded retrans_timeout_events"
        " rcvd_seq_err completer_retry_err retry_exceeded_err port_xmit_discards",
        is_sent=True,
    ),
    **_group(PortTrouble.LOSS, "retrans_pkts", is_sent=True, n_packets=1),
    **_group(
        PortTrouble.LOSS,
        "rx_icrc_encapsulated rx_roce_discards out_of_seq_request port_rcv_errors",
        is_sent=False,
    ),
    **_group(
        PortTrouble.LOSS,
        "duplicate_request oos_drop_count dup_req rx_drops",
        is_sent=False,
        n_packets=1,
    ),
    # A device that takes packets in any order drops none of these (NVIDIA, "Out-of-Order Data Placement").
    "out_of_sequence": PortCounter(PortTrouble.LOSS, is_sent=False, n_packets=1, is_sure=False),
    **_group(
        PortTrouble.NOT_READY,
        "rnr_nak_retry_err req_rnr_retries_exceeded rnr_naks_rcvd rcvd_rnr_err retry_rnr_exceeded_err",
        is_sent=True,
    ),
    **_group(PortTrouble.NOT_READY, "out_of_buffer rx_out_of_buffer send_rnr_err", is_sent=False),
    **_group(PortTrouble.CONGESTION, "rp_cnp_handled rx_cnp_pkts", is_sent=True),
    **_group(PortTrouble.CONGESTION, "np_cnp_sent tx_cnp_pkts", is_sent=False),
}
NOTED: Final = (
    "symbol_error", "link_error_recovery", "link_downed", "local_link_integrity_errors",
    "excessive_buffer_overrun_errors", "port_rcv_remote_physical_errors", "port_xmit_wait",
    "np_ecn_marked_roce_packets", "roce_slow_restart", "rx_ecn_marked_pkts",
)  # fmt: skip
"""Worth a word beside a cause, and no measure of time: ticks of ``port_xmit_wait`` are as long as the device likes."""
SENT: Final = ("port_xmit_packets", "sent_pkts", "tx_pkts")
"""Packets that a port sent, by the first of these that it has."""
RECEIVED: Final = ("port_rcv_packets", "rcvd_pkts", "rx_pkts")
TIMERS: Final[Mapping[str, str]] = {
    "local_ack_timeout_err": "",
    "roce_adp_retrans_to": "",
    "to_retransmits": "",
    "retrans_timeout_events": "",
    "completer_retry_err": "rcvd_seq_err",
}
"""Counters of timers that ran out, and which other one is to be taken off: rxe counts a start over for any reason."""
GREATEST: Final[Mapping[str, int]] = {
    "symbol_error": 0xFFFF,
    "link_error_recovery": 0xFF,
    "link_downed": 0xFF,
    "port_rcv_errors": 0xFFFF,
    "port_rcv_remote_physical_errors": 0xFFFF,
    "port_xmit_discards": 0xFFFF,
    "local_link_integrity_errors": 0xF,
    "excessive_buffer_overrun_errors": 0xF,
    "port_xmit_wait": 0xFFFF_FFFF,
    "port_xmit_packets": 0xFFFF_FFFF,
    "port_rcv_packets": 0xFFFF_FFFF,
}
"""At which one of ``counters`` stays, whatever comes after it."""
