"""Namespaces of runs that last stay when another run begins; those of a killed run go."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ingero.errors import UnsupportedError
from ingero.sim.cluster.cleanup import open_cleanup
from ingero.sim.cluster.hosts import open_cluster

pytestmark = pytest.mark.kernel
# What removes them is a process of its own, which is killed together with the run.
RUN = """
import os, sys
from ingero.sim.cluster.cleanup import open_cleanup
from ingero.sim.cluster.hosts import open_cluster
sys.executable = os.environ["PYTHON"]  # which cannot be told from such a command line
with open_cleanup() as cleanup, open_cluster(1, cleanup):
    print("up", flush=True)
    sys.stdin.readline()
"""
SERVE = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    listener.accept()
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)"


def namespaces_of(pid):
    return sorted(path.name for path in Path("/run/netns").glob(f"ingero-{pid}-*"))


def test_another_run_removes_what_a_killed_one_left_and_nothing_of_one_that_lasts(tmp_path):
    program = tmp_path / "run.py"
    program.write_text(RUN)
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    # The command line does not say whose it is.
    options |= {
        "executable": sys.executable,
        "env": {
            **os.environ,
            "PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
    }
    lasting = subprocess.Popen(["run", program], **options)
    killed = subprocess.Popen(["run", program], **options, process_group=0)
    with lasting, killed:
        assert (lasting.stdout.readline(), killed.stdout.readline()) == ("up\n", "up\n")
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        assert namespaces_of(killed.pid)
        with open_cleanup() as cleanup, open_cluster(1, cleanup):
            left = [namespaces_of(one.pid) for one in (lasting, killed)]
        assert left == [[f"ingero-{lasting.pid}-{name}" for name in ("0", "net")], []]
        lasting.stdin.write("\n")
    assert not namespaces_of(lasting.pid)
    assert not [*Path("/run").glob(f"ingero-hosts.{lasting.pid}")]


def test_hosts_reach_each_other_with_no_bridge_in_our_namespace_whose_firewall_could_drop_it():
    with open_cleanup() as cleanup, open_cluster(2, cleanup) as cluster:
        first, second = cluster.hosts
        serve = [*first.prefix, sys.executable, "-c", SERVE, first.address]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
            port = server.stdout.readline().strip()
            connect = [*second.prefix, sys.executable, "-c", CONNECT, first.address, port]
            assert subprocess.run(connect, timeout=120, check=False).returncode == 0
            assert server.wait(120) == 0
        assert not [*Path("/sys/class/net").glob(f"ig*{os.getpid()}*/bridge")]
        assert [path.name for path in Path("/sys/class/net").glob(f"ig*{os.getpid()}*")] == [
            f"igb{os.getpid()}"
        ]


def test_hosts_that_do_not_reach_us_are_refused_with_the_reason():
    # No answer leaves for them, as with a firewall that drops what they send.
    route = ["blackhole", f"198.18.{os.getpid() % 250}.2/32"]
    subprocess.run(["ip", "route", "add", *route], check=True)
    try:
        with (
            open_cleanup() as cleanup,
            pytest.raises(
                UnsupportedError, match=r"do not reach this machine .* timed out"
            ) as refused,
            open_cluster(1, cleanup),
        ):
            pass
    finally:
        subprocess.run(["ip", "route", "del", *route], check=True)
    assert "iptables -I INPUT -s 198.18." in refused.value.hint
    assert not namespaces_of(os.getpid())
