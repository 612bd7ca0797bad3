"""Hosts of a cluster on one machine: network namespaces on a bridge, or nothing but names where the tools are missing.

The bridge is in a namespace of its own. In ours a firewall would drop what hosts send each other: Docker has the kernel
ask it for bridges too (``bridge-nf-call-iptables``), and forwards nothing by default.

Every name holds our process id, and each run holds a lock while it lasts, so that what a killed run left behind is
recognised and removed by the next.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingero.errors import UnsupportedError
from ingero.sim.cluster.cleanup import Cleanup
from ingero.sim.cluster.link import EmulatedLink, open_link

_NAMESPACES: Final = Path("/run/netns")
_NAME: Final = re.compile(r"ingero-(\d+)-(?:\d+|net)")
_LOCKS: Final = Path("/run")
_MIN_BURST: Final = 1 << 16
"""Bytes: the longest packet that a virtual device passes in one piece."""
_NET: Final = "198.18"  # RFC 2544: set aside for tests between devices
_BRIDGE: Final = "bridge"
_REACH_S: Final = 5.0
_CONNECT: Final = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3]))"


@dataclass(frozen=True, slots=True)
class SimulatedHost:
    """One host.

    Attributes:
        name: Its node id.
        prefix: What a command line begins with to run there.
        link: Its link where that can be slowed down; None for a plain one.
        address: How the other hosts reach it.
        port: The network device at the other end of its link, on the bridge; empty where it has none.
        bridge: What a command line begins with to run where the bridge is.
    """

    name: str
    prefix: tuple[str, ...] = ()
    link: EmulatedLink | None = None
    address: str = "127.0.0.1"
    port: str = ""
    bridge: tuple[str, ...] = ()

    @property
    def interface(self) -> str:
        """The network device of its address."""
        return "eth0" if self.prefix else "lo"

    def limit_link(self, bits_per_s: int) -> None:
        """From now on no more than this passes its link in a second, each way.

        Raises:
            UnsupportedError: The kernel has no token bucket filter, or there is no ``tc``.
        """
        burst = max(_MIN_BURST, bits_per_s // 8 // 100)
        shape = ("root", "tbf", "rate", f"{bits_per_s}bit", "burst", str(burst), "latency", "1s")
        for prefix, device in ((self.prefix, self.interface), (self.bridge, self.port)):
            _run(*prefix, "tc", "qdisc", "replace", "dev", device, *shape)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts that reach each other and us.

    Attributes:
        hosts: By rank.
        address: Ours, as the hosts see it.
        isolation: ``network namespaces`` or ``processes``.
        note: Why there is no isolation; empty when there is.
    """

    hosts: tuple[SimulatedHost, ...]
    address: str
    isolation: str
    note: str = ""


@contextmanager
def open_cluster(
    n_hosts: int, cleanup: Cleanup, slowable: Collection[int] = ()
) -> Iterator[Cluster]:
    """Make the hosts; ``cleanup`` removes them.

    Args:
        n_hosts: Hosts to make.
        cleanup: Takes the commands that remove them.
        slowable: Hosts whose link can be slowed down.

    Raises:
        UnsupportedError: A link can be slowed down only between namespaces, and they cannot be had.
    """
    names = [f"host-{i}" for i in range(n_hosts)]
    why_not = _find_obstacle()
    if why_not:
        if slowable:
            raise UnsupportedError(
                f"a link is slowed down between network namespaces; {why_not}",
                hint="run it as root, with `ip` and `nsenter`",
            )
        note = f"{why_not}, the ranks are plain processes on this host"
        yield Cluster(tuple(map(SimulatedHost, names)), "127.0.0.1", "processes", note)
        return
    _sweep()
    with ExitStack() as stack:
        token, net = os.getpid(), f"{_NET}.{os.getpid() % 250}"
        stack.enter_context(_hold_lock(token))
        address, bridge = f"{net}.1", f"ingero-{token}-net"
        cleanup.add("ip", "netns", "del", bridge)
        _make_bridge(bridge)
        # By name: with its namespace the kernel removes it some time later.
        cleanup.add("ip", "link", "del", f"igb{token}")
        _plug_us(bridge, f"igb{token}", f"{address}/24")
        hosts = []
        for i, name in enumerate(names):
            namespace, port = f"ingero-{token}-{i}", f"ig{token}v{i}"
            cleanup.add("ip", "netns", "del", namespace)
            _run("ip", "netns", "add", namespace)
            link = None
            if i in slowable:
                far = f"ig{token}f{i}"
                link = stack.enter_context(open_link(port, far))
                _run("ip", "link", "set", port, "netns", bridge)
                _run("ip", "link", "set", far, "netns", namespace, "name", "eth0")
            else:
                peer = ("peer", "name", "eth0", "netns", namespace)
                _run("ip", "-n", bridge, "link", "add", port, "type", "veth", *peer)
            _run("ip", "-n", bridge, "link", "set", port, "master", _BRIDGE, "up")
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
            _run("ip", "-n", namespace, "addr", "add", f"{net}.{i + 2}/24", "dev", "eth0")
            _run("ip", "-n", namespace, "link", "set", "eth0", "up")
            place = (_enter(namespace), link, f"{net}.{i + 2}", port, _enter(bridge))
            hosts.append(SimulatedHost(name, *place))
        _check_reach(hosts[0], address)
        yield Cluster(tuple(hosts), address, "network namespaces")


def _find_obstacle() -> str:
    if os.geteuid() != 0:
        return "without root"
    missing = [tool for tool in ("ip", "nsenter") if shutil.which(tool) is None]
    return f"without {' and '.join(missing)}" if missing else ""


def _enter(namespace: str) -> tuple[str, ...]:
    """What a command line begins with to run in a network namespace."""
    return ("nsenter", f"--net={_NAMESPACES / namespace}", "--")


def _make_bridge(namespace: str) -> None:
    """Make the bridge, in a namespace of its own."""
    _run("ip", "netns", "add", namespace)
    _run("ip", "-n", namespace, "link", "add", _BRIDGE, "type", "bridge")
    _run("ip", "-n", namespace, "link", "set", _BRIDGE, "up")


def _plug_us(namespace: str, device: str, address: str) -> None:
    """Put one end of a link on the bridge, and the other into our own namespace with our address."""
    peer = ("peer", "name", "uplink", "netns", namespace)
    _run("ip", "link", "add", device, "type", "veth", *peer)
    _run("ip", "-n", namespace, "link", "set", "uplink", "master", _BRIDGE, "up")
    _run("ip", "addr", "add", address, "dev", device)
    _run("ip", "link", "set", device, "up")


def _check_reach(host: SimulatedHost, address: str) -> None:
    """Connect from a host to us, as its agent will.

    Raises:
        UnsupportedError: Nothing arrives.
    """
    with socket.create_server((address, 0)) as listener:
        port = listener.getsockname()[1]
        connect = (sys.executable, "-I", "-S", "-c", _CONNECT, address, str(port), str(_REACH_S))
        done = subprocess.run([*host.prefix, *connect], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        net = f"{address.rpartition('.')[0]}.0/24"
        raise UnsupportedError(
            f"hosts do not reach this machine at {address}: {reason}",
            hint=f"let them in where a firewall drops it: `iptables -I INPUT -s {net} -j ACCEPT`, or likewise in ufw",
        )


def _sweep() -> None:
    """Remove namespaces of runs that were killed together with their cleanup; their veth pairs go with them."""
    if not _NAMESPACES.is_dir():
        return
    pids = set()
    for entry in _NAMESPACES.iterdir():
        found = _NAME.fullmatch(entry.name)
        if found and not _is_running(found[1]):
            _try("ip", "netns", "del", entry.name)
            pids.add(found[1])
    for pid in pids:
        _try("ip", "link", "del", f"igb{pid}")


def _get_lock_path(pid: int | str) -> Path:
    return _LOCKS / f"ingero-hosts.{pid}"


@contextmanager
def _hold_lock(pid: int) -> Iterator[None]:
    """Show other runs that this one lasts; the kernel lets go of a lock when its process dies."""
    path = _get_lock_path(pid)
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _is_running(pid: str) -> bool:
    """Whether the run of this process id still has its lock."""
    try:
        fd = os.open(_get_lock_path(pid), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        _get_lock_path(pid).unlink(missing_ok=True)
        return False
    finally:
        os.close(fd)


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise UnsupportedError(
            f"`{' '.join(command)}` failed: {result.stderr.strip()}",
            hint="hosts need root and the kernel's bridge, veth and tbf",
        )


def _try(*command: str) -> None:
    with suppress(UnsupportedError):
        _run(*command)
