"""Ports of RDMA devices in a planted sysfs: whose they are, what they counted, and what cannot be known."""

import threading

import pytest

from ingero.agent.diagnosis.connections import LOOK_S
from ingero.agent.diagnosis.rdma import PACE_S, PortFiles
from ingero.model.counters import Traffic
from ingero.model.ports import RdmaTraffic
from ingero.recording.causal.transfers import find_link_causes
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S

PID = 5
PACE_NS = round(PACE_S * NS_PER_S)
N_PACES = round(LOOK_S / PACE_S) - 1
"""Readings between the first and the last."""


class Host:
    """A host whose devices count what a test plans, and the clock by which they are read."""

    def __init__(self, top):
        self.top = top
        self.clock = ManualClock()
        self.files = PortFiles(top / "devices", top / "verbs", top / "proc", self.clock)
        (top / "proc" / str(PID) / "fd").mkdir(parents=True)
        self.n_waits = 0
        self.plan = lambda n: None

    def add(self, device, number=0, *, state="4: ACTIVE", rate="400 Gb/sec (4X NDR)", **counters):
        """A device of one port, open in the process."""
        port = self.top / "devices" / device / "ports" / "1"
        for folder in ("counters", "hw_counters"):
            (port / folder).mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "phys_state").write_text("5: LinkUp\n")
        (port / "rate").write_text(f"{rate}\n")
        (port / "link_layer").write_text("InfiniBand\n")
        (self.top / "devices" / device / "board_id").write_text("MT_0000000838\n")
        (self.top / "verbs" / f"uverbs{number}").mkdir(parents=True)
        (self.top / "verbs" / f"uverbs{number}" / "ibdev").write_text(f"{device}\n")
        self.open(f"/dev/infiniband/uverbs{number}")
        self.port = port
        self.count(**counters)

    def open(self, name):
        folder = self.top / "proc" / str(PID) / "fd"
        (folder / str(len(list(folder.iterdir())))).symlink_to(name)

    def count(self, port=None, **counters):
        for name, value in counters.items():
            folder = "counters" if name.startswith(("port_", "symbol", "link_")) else "hw_counters"
            ((port or self.port) / folder / name).write_text(f"{value}\n")

    def wait(self, seconds):
        """What `threading.Event.wait` is, at once: the plan for the time of this wait is carried out."""
        self.clock.advance(round(seconds * NS_PER_S))
        self.n_waits += 1
        self.plan(self.n_waits)
        return False

    def look(self):
        return self.files.look(PID, self)

    def look_at_one(self):
        (port,) = self.look().ports
        return port


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


MLX5 = {
    "packet_seq_err": 7,
    "local_ack_timeout_err": 0,
    "port_xmit_packets": 100,
    "port_rcv_packets": 9,
}


def troubles(port):
    return {
        name: count for name, count in port.counts.items() if not name.endswith(("packets", "pkts"))
    }


def test_counters_are_told_by_how_much_they_rose_in_the_look(host):
    host.add("mlx5_3", **MLX5)

    def plan(n):
        host.count(port_xmit_packets=100 + 10 * n, packet_seq_err=7 + (n > 40))

    host.plan = plan
    port = host.look_at_one()
    assert (port.name, port.state, port.phys_state) == ("mlx5_3 port 1", "ACTIVE", "LinkUp")
    assert (port.n_sent, port.n_received) == (10 * (N_PACES + 1), 0)
    assert troubles(port) == {"packet_seq_err": 1, "local_ack_timeout_err": 0}
    assert port.totals == MLX5
    assert port.unknown == ()
    assert port.window_ns == round(LOOK_S * NS_PER_S)
    assert (port.busy_ns, port.stalled_ns) == (port.window_ns, 0)


def test_only_devices_that_the_process_has_open_are_read(host):
    host.add("mlx5_0", 0, **MLX5)
    host.add("mlx5_1", 1, **MLX5)
    fd = host.top / "proc" / str(PID) / "fd" / "1"
    fd.unlink()
    fd.symlink_to("socket:[7]")
    host.open("/dev/infiniband/rdma_cm")
    host.open("/tmp/dev/infiniband/uverbs1")
    assert host.look_at_one().name == "mlx5_0 port 1"


def test_name_that_the_process_made_up_is_no_path_on_this_host(host):
    host.add("mlx5_0", **MLX5)
    fd = host.top / "proc" / str(PID) / "fd" / "0"
    fd.unlink()
    for name in ("/dev/infiniband/uverbs7", "/dev/infiniband/uverbs0/../../devices", "uverbs0"):
        host.open(name)
    assert host.look() == RdmaTraffic()


def test_process_without_a_device_is_not_waited_for(host):
    host.open("socket:[7]")
    assert host.look() == RdmaTraffic()
    assert host.n_waits == 0


def test_process_that_has_ended_or_may_not_be_read_says_why_nothing_is_known(host):
    assert host.files.look(6, host).reason.startswith("its open files cannot be read: No such file")


@pytest.mark.parametrize(
    "then",
    [
        lambda host: host.count(packet_seq_err=3),  # it fell: it started anew, or wrapped
        lambda host: (host.port / "hw_counters/packet_seq_err").unlink(),
        lambda host: host.count(packet_seq_err="?"),
        lambda host: host.count(packet_seq_err=-1),
        lambda host: host.count(packet_seq_err=""),
    ],
    ids=["fell", "gone", "no number", "negative", "empty"],
)
def test_counter_that_wraps_vanishes_or_cannot_be_read_is_not_known_rather_than_zero(host, then):
    host.add("mlx5_0", **MLX5)
    host.plan = lambda n: n == 100 and then(host)
    port = host.look_at_one()
    assert port.unknown == ("packet_seq_err",)
    assert troubles(port) == {"local_ack_timeout_err": 0}


def test_counter_that_no_reading_can_be_had_of_is_not_known(host):
    host.add("mlx5_0", **MLX5)
    (host.port / "hw_counters/packet_seq_err").unlink()
    (
        host.port / "hw_counters/packet_seq_err"
    ).mkdir()  # as EIO or EINVAL: it is there and cannot be read
    assert host.look_at_one().unknown == ("packet_seq_err",)


def test_counter_at_its_greatest_value_stays_there_whatever_comes(host):
    host.add("mlx5_0", **MLX5, port_rcv_errors=0xFFFF, symbol_error=0xFFFF)
    host.plan = lambda n: n == 1 and host.count(symbol_error=0xFFFE)
    port = host.look_at_one()
    assert port.unknown == ("port_rcv_errors", "symbol_error")


def test_counter_that_a_device_lacks_is_none(host):
    host.add("rxe0", sent_pkts=5, rcvd_pkts=5, port_xmit_packets="N/A (no PMA)", link_downed=0)
    port = host.look_at_one()
    assert (port.n_sent, troubles(port), port.unknown) == (0, {"link_downed": 0}, ())


def test_port_without_counters_has_unknown_packets_and_not_none(host):
    host.add("siw0")
    port = host.look_at_one()
    assert (port.n_sent, port.n_received, port.counts) == (None, None, {})


def test_packet_counter_that_starts_anew_is_not_known(host):
    host.add("mlx5_0", **MLX5)
    host.plan = lambda n: n == 3 and host.count(port_xmit_packets=0)
    assert host.look_at_one().n_sent is None


def test_time_in_which_nothing_is_sent_counts_as_stalled_once_a_timer_runs_out(host):
    """Packets up to the tenth reading, silence up to the 50th, and on from there."""
    host.add("mlx5_0", **MLX5)

    def plan(n):
        n_sent = n if n <= 10 else 10 + max(n - 50, 0)
        host.count(port_xmit_packets=n_sent, local_ack_timeout_err=int(n >= 51))

    host.count(port_xmit_packets=0)
    host.plan = plan
    port = host.look_at_one()
    assert port.stalled_ns == 40 * PACE_NS
    assert port.busy_ns == port.window_ns


def test_a_port_that_receives_while_it_is_stalled_is_busy_once(host):
    """A link that went down for a moment: its time is not shared out twice, and no part of it is below zero."""
    host.add("mlx5_0", **MLX5, link_downed=0)

    def plan(n):
        n_sent = n if n <= 10 else 10 + max(n - 50, 0)
        came_back = int(n >= 51)
        host.count(port_xmit_packets=n_sent, port_rcv_packets=n)
        host.count(local_ack_timeout_err=came_back, link_downed=came_back)

    host.count(port_xmit_packets=0, port_rcv_packets=0)
    host.plan = plan
    port = host.look_at_one()
    assert (port.busy_ns, port.stalled_ns) == (port.window_ns, 40 * PACE_NS)
    found = find_link_causes(Traffic(), RdmaTraffic((port,)))
    shares = [one.share for one in (*found.causes, *found.ruled_out)]
    assert all(0 <= share <= 1 for share in shares)


def test_silence_without_a_timer_is_no_stall_and_not_busy(host):
    host.add("mlx5_0", **MLX5)
    host.count(port_xmit_packets=0)
    host.plan = lambda n: host.count(port_xmit_packets=min(n, 10) + max(n - 50, 0))
    port = host.look_at_one()
    assert port.stalled_ns == 0
    assert port.busy_ns == port.window_ns - 40 * PACE_NS


def test_start_over_of_rxe_for_a_packet_out_of_order_is_no_timer(host):
    host.add("rxe0", sent_pkts=0, rcvd_pkts=0, completer_retry_err=0, rcvd_seq_err=0)

    def plan(n):
        by_timer, by_order = int(n >= 51), int(n >= 81)
        n_sent = min(n, 10) + (n >= 51) + (n >= 81)
        host.count(sent_pkts=n_sent, completer_retry_err=by_timer + by_order, rcvd_seq_err=by_order)

    host.plan = plan
    assert host.look_at_one().stalled_ns == 40 * PACE_NS


def test_port_is_compared_with_active_ports_of_its_own_board_alone(host):
    host.add("mlx5_1", 1, rate="800 Gb/sec (4X XDR)")
    (host.port.parent.parent / "board_id").write_text("storage\n")
    host.add("mlx5_2", 2, rate="800 Gb/sec (4X XDR)", state="1: DOWN")
    host.add("mlx5_3", 3, rate="400 Gb/sec (4X NDR)")
    host.add("mlx5_0", 0, rate="2.5 Gb/sec (1X SDR)")
    rates = {port.name: (port.rate_gbps, port.best_gbps) for port in host.look().ports}
    assert rates["mlx5_0 port 1"] == (2.5, 400.0)
    assert rates["mlx5_3 port 1"] == (400.0, 2.5)
    assert rates["mlx5_1 port 1"] == (800.0, 0.0)


def test_port_that_goes_down_was_active(host):
    host.add("mlx5_0", **MLX5)
    host.plan = lambda n: n == 2 and (host.port / "state").write_text("1: DOWN\n")
    port = host.look_at_one()
    assert (port.was_active, port.state) == (True, "DOWN")


def test_look_ends_early_where_it_is_asked_to(host):
    host.add("mlx5_0", **MLX5)
    stop = threading.Event()
    stop.set()
    (port,) = host.files.look(PID, stop).ports
    assert port.window_ns == 0
