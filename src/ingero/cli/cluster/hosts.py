"""Hosts of a cluster on one machine: network namespaces on a bridge, or nothing but names where the tools are missing.

Every name holds our process id, so that what a killed run left behind can be told and is removed by the next.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingero.errors import UnsupportedError

MAX_HOSTS: Final = 250
_NAMESPACES: Final = Path("/run/netns")
_NAME: Final = re.compile(r"ingero-(\d+)-\d+")
_NET: Final = "198.18"  # RFC 2544: set aside for tests between devices


@dataclass(frozen=True, slots=True)
class Host:
    """One host.

    Attributes:
        name: Its node id.
        prefix: What a command line begins with to run there.
        link: Our end of its cable; empty without namespaces.
    """

    name: str
    prefix: tuple[str, ...] = ()
    link: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts that reach each other and us.

    Attributes:
        hosts: By rank.
        address: Ours, as the hosts see it.
        isolation: ``network namespaces`` or ``processes``.
        note: Why there is no isolation; empty when there is.
    """

    hosts: tuple[Host, ...]
    address: str
    isolation: str
    note: str = ""


@contextmanager
def open_cluster(n_hosts: int) -> Iterator[Cluster]:
    """Make the hosts, and remove them at the end."""
    names = [f"host-{i}" for i in range(n_hosts)]
    why_not = _find_obstacle()
    if why_not:
        yield Cluster(tuple(map(Host, names)), "127.0.0.1", "processes", why_not)
        return
    _sweep()
    with ExitStack() as stack:
        token, net = os.getpid(), f"{_NET}.{os.getpid() % 250}"
        bridge = f"igb{token}"
        stack.callback(_try, "ip", "link", "del", bridge)
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{net}.1/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        hosts = [_add_host(stack, i, (bridge, net), name) for i, name in enumerate(names)]
        yield Cluster(tuple(hosts), f"{net}.1", "network namespaces")


def _find_obstacle() -> str:
    missing = [tool for tool in ("ip", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"without {' and '.join(missing)}: the ranks are plain processes on this host"
    return ""


def _add_host(stack: ExitStack, i: int, place: tuple[str, str], name: str) -> Host:
    bridge, net = place
    namespace, link = f"ingero-{os.getpid()}-{i}", f"ig{os.getpid()}v{i}"
    stack.callback(_try, "ip", "netns", "del", namespace)
    _run("ip", "netns", "add", namespace)
    _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    _run("ip", "link", "set", link, "master", bridge, "up")
    _run("ip", "-n", namespace, "link", "set", "lo", "up")
    _run("ip", "-n", namespace, "addr", "add", f"{net}.{i + 2}/24", "dev", "eth0")
    _run("ip", "-n", namespace, "link", "set", "eth0", "up")
    return Host(name, ("nsenter", f"--net={_NAMESPACES / namespace}", "--"), link)


def slow_link(host: Host, delay_ms: int) -> None:
    """Delay every packet that leaves for the host.

    Raises:
        UnsupportedError: There is no cable of its own, or the kernel has no netem.
    """
    if not host.link:
        raise UnsupportedError(
            "slow-link needs network namespaces", hint="run it as root, with `ip` and `nsenter`"
        )
    _run("tc", "qdisc", "replace", "dev", host.link, "root", "netem", "delay", f"{delay_ms}ms")


def _sweep() -> None:
    """Remove namespaces of runs that were killed; their cables go with them."""
    if not _NAMESPACES.is_dir():
        return
    pids = set()
    for entry in _NAMESPACES.iterdir():
        found = _NAME.fullmatch(entry.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            _try("ip", "netns", "del", entry.name)
            pids.add(found[1])
    for pid in pids:
        _try("ip", "link", "del", f"igb{pid}")


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise UnsupportedError(
            f"`{' '.join(command)}` failed: {result.stderr.strip()}",
            hint="hosts need root and the kernel's bridge and veth; slow-link needs its sch_netem",
        )


def _try(*command: str) -> None:
    with suppress(UnsupportedError):
        _run(*command)


def in_host(host: Host, command: Sequence[str]) -> list[str]:
    """A command line that runs in the host."""
    return [*host.prefix, *command]
