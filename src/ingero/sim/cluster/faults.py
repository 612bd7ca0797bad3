"""Faults that ``ingero up`` injects: what the user types, what it does, what it must come to."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Final

from ingero.errors import ConfigError
from ingero.model.verdicts import VerdictKind
from ingero.sim.cluster.hosts import Cluster, SimulatedHost
from ingero.sim.cluster.load import ReservedDisk, ReservedProcessor, ReservedResources
from ingero.sim.cluster.shares import find_least_part
from ingero.sim.cluster.torch_job import TorchJob
from ingero.sim.job import Job

KINDS: Final = {
    "slow-rank": "slow-rank:R:1.3x  its own work takes 1.3 times as long",
    "imbalance": "imbalance[:1.6x]  another rank has more work in each step",
    "pause": "pause:R           stopped where it is",
    "kill": "kill:R            gone",
    "cpu-hog": "cpu-hog:R         neighbours want its processor all the time",
    "io-hog": "io-hog:R          neighbours read from its disk all the time",
    "slow-link": "slow-link:R[:20ms] packets to and from its host are late",
}


JOB_KINDS: Final = {
    "cpu-quota": "cpu-quota:R:50%   its host has half of its processor time",
    "cpu-hog": "cpu-hog:R         neighbours want its host's processor time all the time",
    "stop-pulses": "stop-pulses:R:30% it stands still for 30 % of every tenth of a second",
    "slow-rank": "slow-rank:R:1.3x  its own work takes 1.3 times as long: its host has less processor time",
    "disk": "disk:R:5MB/s      its host reads no more than this from its disks in a second",
    "link": "link:R:20ms       packets to and from its host are late; link:R:50Mbit/s: no more than this each way",
    "pause": "pause:R           stopped where it is",
    "kill": "kill:R            gone",
    "slow-python": "slow-python:R:20ms its program computes so much longer in Python in each step",
    "slow-loader": "slow-loader:R:1ms its data loader takes so much longer for each row",
    "garbage": "garbage:R:200000  it keeps so many objects, and collects garbage in each step",
    "first-use": "first-use:R:2s    one of its steps takes so much longer, once",
    "uneven": "uneven:R:1.5x     its batches have 1.5 times as many rows",
    "imbalance": "imbalance[:1.6x]  another rank's batch has more rows in each step",
}
"""What can be done to a real job."""
INSIDE: Final = frozenset({
    "slow-python",
    "slow-loader",
    "garbage",
    "first-use",
    "uneven",
    "imbalance",
})
"""What a program does to itself when it is asked to, as those in ``examples/jobs`` are."""
_NONE: Final = "none"
_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)([kMG])(B|bit)/s")
_PREFIXES: Final = {"k": 1_000, "M": 1_000_000, "G": 1_000_000_000}
MIN_RATE: Final = 10_000
"""Bytes a second of a disk, below which one read of a page lasts about half a second; bits a second of a link."""
_TIME: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")
_SECONDS: Final = {"ms": 0.001, "s": 1.0}
MAX_INSIDE_S: Final = 10.0
MAX_OBJECTS: Final = 10_000_000
_DELAY: Final = re.compile(r"(\d+)ms")
MAX_DELAY_MS: Final = 1_000
"""Of a link, each way: beyond it connections are given up."""


MIN_LINKED: Final = 6
"""Fewest ranks whose links can be compared: three links."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: One of `KINDS` or `JOB_KINDS`.
        rank: Whom it hits; None for everybody.
        amount: Factor of slow-rank and imbalance, milliseconds of slow-link, part of cpu-quota and stop-pulses,
            bytes a second of disk, what ``unit`` says of link;
            seconds of slow-python, slow-loader and first-use, objects of garbage, factor of uneven.
        unit: ``ms`` of delay or ``bit/s``, of link.
    """

    kind: str
    rank: int | None = None
    amount: float = 0.0
    unit: str = ""

    @property
    def is_network(self) -> bool:
        """Whether it is in what connects hosts, so that no rank is its culprit."""
        return self.kind in {"slow-link", "link"}

    @property
    def is_hang(self) -> bool:
        """Whether it stops the job."""
        return self.kind in {"pause", "kill"}

    @property
    def verdict(self) -> str:
        """What must be said of its ranks."""
        if self.is_hang:
            return "hang"
        return VerdictKind.NETWORK if self.is_network else VerdictKind.CULPRIT

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of which it must be said: for a link both of its ends, and nobody for what happens once."""
        if self.rank is None or self.kind == "first-use":
            return ()
        return (self.rank, self.rank ^ 1) if self.kind == "slow-link" else (self.rank,)


def parse_faults(texts: Sequence[str], n_ranks: int, *, is_job: bool = False) -> tuple[Fault, ...]:
    """What a user wants injected; the word ``none`` is no fault.

    Raises:
        ConfigError: As `parse_fault`; or one rank's program is to make two faults.
    """
    faults = tuple(parse_fault(text, n_ranks, is_job=is_job) for text in texts if text != _NONE)
    inside = [fault.rank for fault in faults if is_job and fault.kind in INSIDE]
    for rank in set(inside):
        if inside.count(rank) > 1 or (rank is None and len(inside) > 1):
            who = "each rank" if rank is None else f"rank {rank}"
            raise ConfigError(
                f"--fault: {who}'s program makes one fault at a time",
                hint="give the second to another rank, or from outside: cpu-quota, disk, link",
            )
    return faults


def parse_fault(text: str, n_ranks: int, *, is_job: bool = False) -> Fault:
    """``slow-rank:3:1.3x`` as a fault.

    Args:
        text: What the user wrote.
        n_ranks: Ranks of the job.
        is_job: Whether the job is a real one, to which other things can be done.

    Raises:
        ConfigError: It is none of `KINDS` (of `JOB_KINDS`), or its rank or amount is wrong.
    """
    kind, *rest = text.split(":")
    kinds = JOB_KINDS if is_job else KINDS
    try:
        fault = _build(kind, rest, kinds)
    except (ValueError, IndexError, KeyError) as error:
        known = "\n  ".join(kinds.values())
        raise ConfigError(f"--fault {text!r} is not a fault", hint=f"one of\n  {known}") from error
    if fault.rank is not None and not 0 <= fault.rank < n_ranks:
        raise ConfigError(f"--fault {text!r}: ranks are 0 to {n_ranks - 1}")
    if kind == "slow-link" and (n_ranks % 2 or n_ranks < MIN_LINKED):
        raise ConfigError(
            f"--fault {text!r}: {n_ranks} ranks do not make links to compare it with",
            hint=f"an even number of ranks, {MIN_LINKED} or more: ranks 2k and 2k + 1 share a link",
        )
    if is_job:
        _check_quota(text, fault, n_ranks)
    return fault


def _check_quota(text: str, fault: Fault, n_ranks: int) -> None:
    """Refuse a fault that leaves its host less processor time than the kernel can give."""
    parts = {"cpu-quota": fault.amount, "slow-rank": 1 / (fault.amount or 1)}
    percent = math.ceil(round(1000 * find_least_part(n_ranks), 6)) / 10
    if round(100 * parts.get(fault.kind, 1.0), 6) < percent:
        raise ConfigError(
            f"--fault {text!r}: with {n_ranks} ranks on this machine a host keeps at least {percent:g}% of its"
            " processor time",
            hint="give the host more, or the job fewer ranks",
        )


def _build(kind: str, rest: list[str], kinds: Container[str]) -> Fault:
    if kind not in kinds:
        raise KeyError(kind)
    if kind == "imbalance":
        (amount,) = rest or ("1.6x",)
        return Fault(kind, None, _parse_factor(amount))
    if kind == "slow-link":
        rank, amount = rest if len(rest) > 1 else (rest[0], "20ms")
        return Fault(kind, int(rank), _parse_delay(amount))
    if kind == "link":
        rank, amount = rest
        return _build_link(int(rank), amount)
    if kind in _AMOUNTS:
        rank, amount = rest
        return Fault(kind, int(rank), _AMOUNTS[kind](amount))
    (rank,) = rest
    return Fault(kind, int(rank))


def _build_link(rank: int, amount: str) -> Fault:
    if _DELAY.fullmatch(amount) is None:
        return Fault("link", rank, _parse_rate(amount, "bit"), "bit/s")
    return Fault("link", rank, _parse_delay(amount), "ms")


def _parse_delay(text: str) -> int:
    """Milliseconds of ``20ms``."""
    delay = _DELAY.fullmatch(text)
    if delay is None or not 0 < int(delay[1]) <= MAX_DELAY_MS:
        raise ValueError(text)
    return int(delay[1])


def _parse_rate(text: str, of: str = "B") -> int:
    """Bytes a second of ``5MB/s``; with ``of="bit"`` bits a second of ``50Mbit/s``."""
    found = _RATE.fullmatch(text)
    if found is None or found[3] != of:
        raise ValueError(text)
    rate = round(float(found[1]) * _PREFIXES[found[2]])
    if rate < MIN_RATE:
        raise ValueError(text)
    return rate


def _parse_part(text: str) -> float:
    part = float(text.removesuffix("%")) / 100
    if not 0.0 < part < 1.0:
        raise ValueError(text)
    return part


def _parse_seconds(text: str) -> float:
    """Seconds of ``20ms`` or ``2s``."""
    found = _TIME.fullmatch(text)
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not 0.0 < seconds <= MAX_INSIDE_S:
        raise ValueError(text)
    return seconds


def _parse_count(text: str) -> float:
    if not 0 < int(text) <= MAX_OBJECTS:
        raise ValueError(text)
    return int(text)


def _parse_factor(text: str) -> float:
    factor = float(text.removesuffix("x"))
    if not 1.0 < factor <= 100.0:
        raise ValueError(text)
    return factor


_AMOUNTS: Final[dict[str, Callable[[str], float]]] = {
    "slow-rank": _parse_factor,
    "cpu-quota": _parse_part,
    "stop-pulses": _parse_part,
    "disk": _parse_rate,
    "slow-python": _parse_seconds,
    "slow-loader": _parse_seconds,
    "garbage": _parse_count,
    "first-use": _parse_seconds,
    "uneven": _parse_factor,
}
"""How the amount of a fault that hits one rank is read."""


def inject(fault: Fault, job: Job, cluster: Cluster, reserved: ReservedResources) -> None:
    """Turn a fault on.

    Args:
        fault: Which.
        job: Whom it hits.
        cluster: Where that runs.
        reserved: Kept free for the ranks whose processor or disk will be loaded.
    """
    rank = fault.rank if fault.rank is not None else -1
    actions: dict[str, Callable[[], None]] = {
        "slow-rank": lambda: job.slow(rank, fault.amount),
        "imbalance": lambda: job.unbalance(fault.amount),
        "pause": lambda: job.pause(rank),
        "kill": lambda: job.kill(rank),
        "cpu-hog": lambda: _start_load(reserved.processor),
        "io-hog": lambda: _start_load(reserved.disk),
        "slow-link": lambda: _slow_link(cluster.hosts[rank], int(fault.amount)),
    }
    actions[fault.kind]()


def inject_into_job(fault: Fault, job: TorchJob, cluster: Cluster) -> None:
    """Turn a fault of a real job on.

    Args:
        fault: Which.
        job: Whom it hits.
        cluster: Where that runs.
    """
    if fault.kind in INSIDE:
        job.begin_inside(range(len(cluster.hosts)) if fault.rank is None else (fault.rank,))
        return
    assert fault.rank is not None, "what is done to a real job from outside is done to one rank"
    rank, amount = fault.rank, fault.amount
    actions: dict[str, Callable[[], None]] = {
        "cpu-quota": lambda: job.limit(rank, amount),
        "cpu-hog": lambda: job.crowd(rank),
        "stop-pulses": lambda: job.pulse(rank, amount),
        "slow-rank": lambda: job.limit(rank, 1 / amount),
        "disk": lambda: job.limit_reading(rank, int(amount)),
        "link": lambda: _hold_up(cluster.hosts[rank], fault),
        "pause": lambda: job.pause(rank),
        "kill": lambda: job.kill(rank),
    }
    actions[fault.kind]()


def _start_load(resource: ReservedProcessor | ReservedDisk | None) -> None:
    assert resource is not None, "it was reserved before the job began"
    resource.start_load()


def _hold_up(host: SimulatedHost, fault: Fault) -> None:
    if fault.unit == "ms":
        _slow_link(host, int(fault.amount))
    else:
        host.limit_link(int(fault.amount))


def _slow_link(host: SimulatedHost, delay_ms: int) -> None:
    assert host.link is not None, "open_cluster was given the links to make slowable"
    host.link.delay(delay_ms)
