"""What the site of the fault runs does to its parts, done to real ones."""

import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest
from tests.chaos.site import Site

CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1.0)"


@pytest.mark.kernel
def test_a_cut_takes_the_network_of_one_host_away_and_gives_it_back(tmp_path):
    with ExitStack() as stack:
        site = Site(tmp_path, stack)
        assert site.is_isolated
        ours = site.cluster.address
        listener = stack.enter_context(socket.create_server((ours, 0)))

        def reaches(at):
            command = (sys.executable, "-I", "-S", "-c", CONNECT, ours, listener.getsockname()[1])
            command = [*site.cluster.hosts[at].prefix, *map(str, command)]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0

        assert [reaches(0), reaches(1)] == [True, True]
        site.cut(0, is_cut=True)
        assert [reaches(0), reaches(1)] == [False, True]
        site.cut(0, is_cut=False)
        assert [reaches(0), reaches(1)] == [True, True]
