"""Planted counters of RDMA ports: which cause is named, with which share, what is ruled out and what is not known."""

from dataclasses import replace

import pytest

from ingero.model.counters import HostTraffic, Traffic
from ingero.model.ports import RdmaPort, RdmaTraffic
from ingero.recording.causal.transfers import find_link_causes
from ingero.units import NS_PER_MS, NS_PER_S

CLEAN = RdmaPort(
    name="mlx5_0 port 1",
    state="ACTIVE",
    phys_state="LinkUp",
    rate_gbps=400.0,
    best_gbps=400.0,
    window_ns=5 * NS_PER_S,
    busy_ns=4 * NS_PER_S,
    stalled_ns=0,
    counts={
        "port_xmit_packets": 100_000,
        "port_rcv_packets": 50_000,
        "packet_seq_err": 0,
        "local_ack_timeout_err": 0,
        "out_of_sequence": 0,
        "rnr_nak_retry_err": 0,
        "rp_cnp_handled": 0,
    },
)
WHERE = "over mlx5_0 port 1 (ACTIVE, 400 Gbit/s): 100000 packets sent, 50000 received, busy for 4 s of 5 s"
OVER_TCP = HostTraffic(
    n_connections=1,
    rtt_ns=NS_PER_MS // 5,
    rtt_var_ns=NS_PER_MS // 20,
    min_rtt_ns=NS_PER_MS // 10,
    n_segments=2000,
    n_again=0,
    n_bytes=2_000_000,
    rate=125_000_000,
    busy_ns=NS_PER_S,
)


SILENT = {"port_xmit_packets": 0, "port_rcv_packets": 0}
UNTOLD = replace(
    CLEAN, counts={name: count for name, count in CLEAN.counts.items() if "packets" not in name}
)


def change(counts=(), port=CLEAN, **changes):
    return replace(port, counts={**port.counts, **dict(counts)}, **changes)


NOTHING = Traffic()


def find(*ports, traffic=NOTHING):
    return find_link_causes(traffic, RdmaTraffic(ports))


def shares(found):
    return {cause.kind: cause.share for cause in found.causes}


def ruled_out(found):
    return {one.name: one.why for one in found.ruled_out}


def test_packets_sent_again_are_loss_with_device_port_counter_and_count():
    """Each start over costs 100 packets on their way: 500 of 100 000 are half of them."""
    found = find(change({"packet_seq_err": 500, "local_ack_timeout_err": 2, "symbol_error": 3}))
    assert shares(found) == {"network-loss": 0.5, "unexplained": 0.5}
    assert found.causes[0].evidence == (
        WHERE,
        "500 packet_seq_err, 2 local_ack_timeout_err, of 100000 packets sent",
        "0 out_of_sequence",
        "3 symbol_error",
    )
    assert found.excess_ns == 4 * NS_PER_S
    assert any("ibqueryerrors" in step for step in found.todo)


def test_what_was_counted_before_stands_beside_it():
    lossy = change({"packet_seq_err": 500})
    totals = {"packet_seq_err": 7, "out_of_sequence": 0, "port_xmit_packets": 10**9}
    (loss, *_) = find(replace(lossy, totals=totals)).causes
    assert loss.evidence[3] == "before that 7 packet_seq_err, of 1000000000 packets sent"


def test_packets_that_came_in_vain_count_as_they_are():
    assert shares(find(change({"oos_drop_count": 20_000})))["network-loss"] == 0.4
    assert shares(find(change({"oos_drop_count": 5_000}))) == {"unexplained": 1.0}


def test_many_packets_out_of_order_are_loss_only_where_another_counter_tells_of_it():
    """Adaptive routing changes their order, and devices put them in their place."""
    found = find(change({"duplicate_request": 0, "out_of_sequence": 20_000}))
    assert shares(found) == {"unexplained": 1.0}
    assert (
        "lost packets on mlx5_0 port 1 not known: 20000 out_of_sequence, of 50000 packets received, "
        "which adaptive routing makes too"
    ) in found.causes[0].evidence
    assert "packets are lost on their way" not in ruled_out(found)
    found = find(change({"packet_seq_err": 900, "out_of_sequence": 20_000}))
    assert shares(found)["network-loss"] == 0.9
    found = find(change({"out_of_sequence": 5_000}))
    assert "5000 out_of_sequence" in ruled_out(found)["packets are lost on their way"]


def test_stall_until_a_timer_ran_out_is_loss_by_its_time():
    found = find(change({"local_ack_timeout_err": 1}, stalled_ns=2 * NS_PER_S))
    assert shares(found) == {"network-loss": 0.5, "unexplained": 0.5}
    assert "nothing was sent for 2 s until a timer ran out" in found.causes[0].evidence


def test_few_losses_of_many_packets_take_no_part_that_counts():
    found = find(change({"packet_seq_err": 20}))
    assert shares(found) == {"unexplained": 1.0}
    assert "20 packet_seq_err" in ruled_out(found)["packets are lost on their way"]


def test_receiver_without_a_buffer_and_queues_have_their_own_causes_and_words():
    found = find(change({"rnr_nak_retry_err": 400, "rp_cnp_handled": 500}))
    assert [(cause.kind, cause.name, cause.share) for cause in found.causes] == [
        ("window-limited", "the receiver has no buffer ready (RNR)", 0.4),
        ("network-delay", "queues on the way slow the senders down (CNP)", 0.3),
        ("unexplained", "unexplained", 0.3),
    ]
    assert not any("tcp" in step for step in found.todo)


def test_port_below_its_like_takes_as_much_longer():
    found = find(change(rate_gbps=100.0))
    assert shares(found) == {"slow-port": 0.75, "unexplained": 0.25}
    assert "100 Gbit/s, another port of the same board 400" in found.causes[0].evidence


@pytest.mark.parametrize(
    "down", [change(state="DOWN", phys_state="Polling"), change({"link_downed": 1})]
)
def test_port_that_went_down_takes_the_time_in_which_it_carried_nothing(down):
    found = find(replace(down, busy_ns=NS_PER_S))
    assert shares(found) == {"slow-port": 0.8, "unexplained": 0.2}
    assert found.excess_ns == 5 * NS_PER_S


def test_port_that_was_down_before_is_not_looked_at():
    idle = change(SILENT, state="DOWN", was_active=False, busy_ns=0)
    assert find(idle).causes[0].evidence == (
        "it sent next to nothing over TCP meanwhile",
        "it sent next to nothing over mlx5_0 port 1 (DOWN)",
    )


def test_clean_ports_are_ruled_out_with_the_counters_that_did_not_rise():
    found = find(CLEAN)
    assert shares(found) == {"unexplained": 1.0}
    assert ruled_out(found) == {
        "a port that is down, or slower than its like": f"{WHERE}; 400 Gbit/s",
        "packets are lost on their way": (
            f"{WHERE}; 0 packet_seq_err, local_ack_timeout_err; 0 out_of_sequence"
        ),
        "a full window or send buffer": f"{WHERE}; 0 rnr_nak_retry_err",
        "packets take long on their way": f"{WHERE}; 0 rp_cnp_handled",
    }


def test_port_that_lost_most_is_the_one_that_is_told_of():
    lossy = change({"packet_seq_err": 900}, name="mlx5_7 port 1")
    found = find(CLEAN, lossy)
    assert found.causes[0].evidence[0].startswith("over mlx5_7 port 1 ")


@pytest.mark.parametrize(
    ("port", "why"),
    [
        (
            replace(CLEAN, counts={}),
            "lost packets on mlx5_0 port 1 not known: its device does not count them",
        ),
        (
            replace(CLEAN, unknown=("packet_seq_err",)),
            "lost packets on mlx5_0 port 1 not known: no reading, or none that goes on, of packet_seq_err",
        ),
        (
            UNTOLD,
            "lost packets on mlx5_0 port 1 not known: nothing counts its packets",
        ),
    ],
    ids=["no counters", "one that wrapped", "no packets"],
)
def test_what_is_not_known_is_said_and_never_ruled_out(port, why):
    found = find(port)
    assert shares(found) == {"unexplained": 1.0}
    assert why in found.causes[0].evidence
    assert "packets are lost on their way" not in ruled_out(found)


def test_loss_that_some_counters_tell_is_named_though_another_is_not_known():
    found = find(change({"packet_seq_err": 900}, unknown=("local_ack_timeout_err",)))
    assert shares(found)["network-loss"] == 0.9


def test_what_a_device_does_not_count_is_not_ruled_out():
    rxe = replace(CLEAN, counts={"sent_pkts": 9, "rcvd_pkts": 9, "completer_retry_err": 0})
    assert ruled_out(find(rxe)).keys() == {
        "a port that is down, or slower than its like",
        "packets are lost on their way",
    }


def test_unknown_port_beside_a_clean_one_is_said_too():
    unknown = replace(CLEAN, name="siw0 port 1", counts={})
    assert any("siw0" in fact for fact in find(CLEAN, unknown).causes[0].evidence)


def test_clean_ports_are_ruled_out_beside_a_loss_over_tcp_and_the_other_way_round():
    hosts = {"10.0.0.1": replace(OVER_TCP, timeout_ns=800 * NS_PER_MS)}
    found = find(CLEAN, traffic=Traffic(hosts))
    assert found.causes[0].evidence[0].startswith("to 10.0.0.1:")
    assert shares(found)["network-loss"] == 0.8
    assert [one.why.split(";")[0] for one in found.ruled_out].count(WHERE) == 4
    found = find(change({"packet_seq_err": 900}), traffic=Traffic({"10.0.0.1": OVER_TCP}))
    assert found.causes[0].evidence[0] == WHERE
    assert any(one.why.startswith("to 10.0.0.1:") for one in found.ruled_out)


def test_loss_of_either_way_is_not_ruled_out_by_the_other():
    hosts = {"10.0.0.1": replace(OVER_TCP, timeout_ns=800 * NS_PER_MS)}
    found = find(change({"packet_seq_err": 900}), traffic=Traffic(hosts))
    assert "packets are lost on their way" not in ruled_out(found)


def test_files_that_may_not_be_read_are_the_reason():
    reason = "its open files cannot be read: Permission denied"
    found = find_link_causes(Traffic(reason="x"), RdmaTraffic(reason=reason))
    assert found.causes[0].evidence == ("x", reason)
