"""When the ranks of a real job have loaded their libraries: they meet at their store."""

import os
import socket

from ingero.sim.cluster.rendezvous import has_met

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue\n"


def test_a_rank_has_met_with_a_connection_to_the_store_or_from_it():
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        assert not has_met(os.getpid(), port)
        with socket.create_connection(("127.0.0.1", port)):
            assert has_met(os.getpid(), port)
    assert not has_met(os.getpid(), port + 1)


def test_only_what_is_connected_counts_over_ipv6_too(tmp_path):
    folder = tmp_path / "7" / "net"
    folder.mkdir(parents=True)
    listens = "   0: 0100007F:733D 00000000:0000 0A 00000000:00000000\n"
    (folder / "tcp").write_text(HEAD + listens)
    assert not has_met(7, 29501, tmp_path)
    address = 24 * "0" + "0100007F"
    (folder / "tcp6").write_text(f"{HEAD}   0: {address}:C001 {address}:733D 01 0:0\n")
    assert has_met(7, 29501, tmp_path)
    assert not has_met(8, 29501, tmp_path)
