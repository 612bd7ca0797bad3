"""Ports that the kernel gives to no connection while a program that was given their number starts."""

import socket
from pathlib import Path

import pytest

from ingero.errors import IngeroError
from ingero.sim.cluster.ports import find_free_ports


def test_ports_are_free_and_different_and_outside_of_what_the_kernel_gives_out():
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    first, last = map(int, given)
    ports = find_free_ports(50)
    assert len(set(ports)) == 50
    for port in ports:
        assert not first <= port <= last
        with socket.create_server(("127.0.0.1", port)):
            pass


@pytest.mark.parametrize(
    ("limits", "least", "most"),
    [
        ("32768 60999", 10_000, 32_767),
        ("10500\t32767", 32_768, 65_535),
        ("1024 65535", 10_000, 65_535),  # no room outside of it
    ],
)
def test_ports_lie_where_most_room_is_outside_of_the_kernel_s_range(tmp_path, limits, least, most):
    (tmp_path / "range").write_text(limits + "\n")
    assert all(least <= port <= most for port in find_free_ports(100, tmp_path / "range"))


def test_without_a_file_of_the_range_any_free_port_will_do(tmp_path):
    assert all(port >= 10_000 for port in find_free_ports(5, tmp_path / "none"))


def test_a_port_that_somebody_has_is_passed_over_and_too_many_are_an_error(tmp_path):
    (tmp_path / "range").write_text("11000 65535\n")
    ports = find_free_ports(900, tmp_path / "range")
    taken = [socket.create_server(("127.0.0.1", port)) for port in ports]
    try:
        rest = find_free_ports(50, tmp_path / "range")
        assert not set(rest) & set(ports)
        with pytest.raises(IngeroError, match=r"only \d+ of 200 ports of 127\.0\.0\.1 are free"):
            find_free_ports(200, tmp_path / "range")
    finally:
        for one in taken:
            one.close()
