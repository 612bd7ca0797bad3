"""Why a process is slow that sends over RDMA: RoCE in software, over a cable that loses packets when it is asked to."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Final

from scripts.machines.guest.running import ENVIRONMENT, LIMIT_S, CheckError, compare, run, shorten

from ingero.agent.diagnosis.connections import look_at_traffic
from ingero.agent.diagnosis.rdma import look_at_ports
from ingero.recording.causal.conclusions import ExcessCauses
from ingero.recording.causal.transfers import find_link_causes
from ingero.testing.waiting import wait_until

_ENDS: Final = (("veth0", "192.0.2.1"), ("veth1", "192.0.2.2"))
_RXE: Final = ("rxe0", "rxe1")
_PORT: Final = 18515
_DEVICES: Final = Path("/sys/class/infiniband")
# 1 s until a timer runs out: emulated, an answer may take longer than the usual 67 ms.
_TALK: Final = ("--run_infinitely", "--CPU-freq", "--size=4096", "--tx-depth=1", "--qp-timeout=18")
_LOSS_PCT: Final = 2
# With many lost packets Linux 7.2's RoCE in software now and then gives up a connection by itself (flush error).
_TRIES: Final = 5
_LOST: Final = "packets are lost on their way"
_TOLD: Final = "completer_retry_err"
_COUNT: Final = re.compile(rf"(\d+) {_TOLD}")


class _GaveUpError(Exception):
    """One of the two that talk ended."""


@cache
def _lay_cable() -> None:
    """Both ends in this host, and packets from the one address to the other do go over it."""
    run("ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
    run("ip", "rule", "add", "pref", 100, "lookup", "local")
    run("ip", "rule", "del", "pref", 0)
    for table, (end, address), (_, other) in zip((101, 102), _ENDS, _ENDS[::-1], strict=True):
        settings = Path("/proc/sys/net/ipv4/conf", end)
        run("ip", "address", "add", f"{address}/24", "dev", end)
        run("ip", "link", "set", end, "up")
        for name, value in (("accept_local", 1), ("rp_filter", 0), ("arp_ignore", 1)):
            (settings / name).write_text(f"{value}\n", encoding="ascii")
        run("ip", "route", "add", other, "dev", end, "src", address, "table", table)
        pair = ("from", address, "to", other, "iif", "lo", "lookup", table)
        run("ip", "rule", "add", "pref", 10, *pair)
    for device, (end, _) in zip(_RXE, _ENDS, strict=True):
        run("rdma", "link", "add", device, "type", "rxe", "netdev", end)


def _find_gid(device: str, address: str) -> int:
    """Which of a device's addresses is that of RoCE's second version over this one of IPv4."""
    port = _DEVICES / device / "ports/1"
    wanted = "ffff" + "".join(f"{int(part):02x}" for part in address.split("."))
    for gid in sorted((port / "gids").iterdir(), key=lambda path: int(path.name)):
        try:
            version = (port / "gid_attrs/types" / gid.name).read_text(encoding="ascii")
            is_it = gid.read_text(encoding="ascii").strip().replace(":", "").endswith(wanted)
        except OSError:  # there is none of this number
            continue
        if is_it and "v2" in version:
            return int(gid.name)
    raise CheckError(f"{device} has no address of RoCE for {address}")


def _count(end: str) -> int:
    """Packets that an end of the cable has sent."""
    return int(Path("/sys/class/net", end, "statistics/tx_packets").read_text(encoding="ascii"))


@contextmanager
def _talking() -> Iterator[tuple[int, int]]:
    """Two processes of which the first sends to the second without end; their ids.

    Raises:
        _GaveUpError: One of them ended.
    """
    _lay_cable()
    gids = [_find_gid(device, address) for device, (_, address) in zip(_RXE, _ENDS, strict=True)]
    with tempfile.TemporaryFile("w+") as said, ExitStack() as stack:

        def start(end: int, *more: str) -> subprocess.Popen[str]:
            command = ["ib_send_bw", f"--ib-dev={_RXE[end]}", f"--gid-index={gids[end]}", *_TALK]
            process = subprocess.Popen(
                [*command, *more], stdout=said, stderr=said, text=True, env=ENVIRONMENT
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        def check(process: subprocess.Popen[str]) -> None:
            if process.poll() is not None:
                said.seek(0)
                raise _GaveUpError(f"ib_send_bw ended with {process.returncode}: {said.read()}")

        def is_listening() -> bool:
            check(receiver)
            return _is_listening()

        def is_talking() -> bool:
            check(sender)
            return _count("veth0") > began + 1000

        receiver = start(1)
        wait_until(is_listening, LIMIT_S)
        sender, began = start(0, "127.0.0.1"), _count("veth0")
        wait_until(is_talking, LIMIT_S)
        yield sender.pid, receiver.pid
        check(sender)


def _is_listening() -> bool:
    """Whether a program waits on perftest's port. Source: proc_pid_net(5): the second field, and 0A in the fourth."""
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()
    ]
    return any(fields[1].endswith(f":{_PORT:04X}") and fields[3] == "0A" for fields in lines)


@contextmanager
def _losing(end: str) -> Iterator[None]:
    """What an end of the cable sends is lost in part."""
    run("tc", "qdisc", "add", "dev", end, "root", "netem", "loss", f"{_LOSS_PCT}%")
    try:
        yield
    finally:
        run("tc", "qdisc", "del", "dev", end, "root")


def _diagnose(pid: int) -> ExcessCauses:
    """As the agent's examiner does."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as beside:
        rdma = beside.submit(look_at_ports, pid, stop)
        traffic = look_at_traffic(pid, stop)
    return find_link_causes(traffic, rdma.result())


def _read_lost(device: str) -> int:
    path = _DEVICES / device / "ports/1/hw_counters" / _TOLD
    return int(path.read_text(encoding="ascii"))


def _tell(found: ExcessCauses) -> str:
    return "; ".join(
        f"{cause.kind} {cause.share:.0%} ({', '.join(cause.evidence)})" for cause in found.causes
    )


def _check_clean() -> str:
    """Without loss nothing is named, and lost packets are ruled out by counters that did not rise.

    Raises:
        CheckError: It is not so.
    """
    with _talking() as (pid, _):
        found = _diagnose(pid)
    compare(f"causes {_tell(found)}", [cause.kind for cause in found.causes], ["unexplained"])
    why = {one.name: one.why for one in found.ruled_out}.get(_LOST, "")
    if "over rxe0 port 1 (ACTIVE" not in why or _TOLD not in why:
        raise CheckError(f"lost packets are not ruled out: {found.ruled_out}; {_tell(found)}")
    return why


def _check_loss() -> str:
    """What the sender's way loses is named, with the counts that its device has.

    Raises:
        CheckError: It is not.
    """
    with _talking() as (pid, _), _losing("veth0"):
        before = _read_lost("rxe0")
        found = _diagnose(pid)
        after = _read_lost("rxe0")
    first = found.causes[0]
    compare(f"first cause of {_tell(found)}", first.kind, "network-loss")
    counts = [
        int(at[1])
        for fact in first.evidence
        if not fact.startswith("before that ") and (at := _COUNT.search(fact))
    ]
    if not first.evidence[0].startswith("over rxe0 port 1 ") or not counts:
        raise CheckError(f"device and counter are not in the evidence: {_tell(found)}")
    if not 0 < counts[0] <= after - before:
        raise CheckError(f"{counts[0]} {_TOLD}, and the device counted {after - before}")
    return _tell(found)


def _check_receiver() -> str:
    """The other end sees packets that came after a lost one.

    Raises:
        CheckError: It does not.
    """
    with _talking() as (_, pid), _losing("veth0"):
        found = _diagnose(pid)
    compare(f"first cause of {_tell(found)}", found.causes[0].kind, "network-loss")
    if "out_of_seq_request" not in _tell(found):
        raise CheckError(f"not by what it received: {_tell(found)}")
    return _tell(found)


def _check_others() -> str:
    """A process beside that has no device open is not explained by one that loses packets.

    Raises:
        CheckError: It is.
    """
    command = [sys.executable, "-c", "import time; time.sleep(3600)"]
    with (
        _talking(),
        _losing("veth0"),
        subprocess.Popen(command, env=ENVIRONMENT) as other,
    ):
        try:
            found = _diagnose(other.pid)
        finally:
            other.kill()
    compare(f"causes {_tell(found)}", [cause.kind for cause in found.causes], ["unexplained"])
    compare("ruled out", found.ruled_out, ())
    return _tell(found)


def _check_uncounted() -> str:
    """Of a device without counters, as siw is one, what is lost is not known, and not ruled out.

    Raises:
        CheckError: It is.
    """
    empty = Path("/run/empty")
    empty.mkdir(exist_ok=True)
    folders = [_DEVICES / "rxe0/ports/1" / name for name in ("counters", "hw_counters")]
    with _talking() as (pid, _), _losing("veth0"), ExitStack() as stack:
        for folder in filter(Path.exists, folders):
            place = str(folder.resolve())
            run("mount", "--bind", str(empty), place)
            stack.callback(run, "umount", place)
        found = _diagnose(pid)
    compare(f"causes {_tell(found)}", [cause.kind for cause in found.causes], ["unexplained"])
    if "lost packets on rxe0 port 1 not known" not in _tell(found):
        raise CheckError(f"not said to be unknown: {_tell(found)}")
    if _LOST in {one.name for one in found.ruled_out if "rxe0" in one.why}:
        raise CheckError(f"ruled out: {found.ruled_out}")
    return _tell(found)


CHECKS: Final[Mapping[str, Callable[[], str]]] = {
    "clean": _check_clean,
    "loss": _check_loss,
    "receiver": _check_receiver,
    "others": _check_others,
    "uncounted": _check_uncounted,
}


def check_causes(name: str) -> str:
    """The check of that name, again where the connection was given up.

    Raises:
        CheckError: It fails, or each connection was given up.
    """
    reason = ""
    for _ in range(_TRIES):
        try:
            return CHECKS[name]()
        except _GaveUpError as error:
            reason = str(error)
    raise CheckError(shorten(reason))
