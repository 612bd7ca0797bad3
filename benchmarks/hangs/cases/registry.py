"""The table of cases, and what they have in common."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

FOREVER_S = 600


@dataclass(frozen=True)
class Case:
    """One job.

    Attributes:
        name: Unique, words joined by underscores.
        kind: The row of the table that it counts in.
        n_ranks: Size of the job.
        at_fault: Ranks that were made to hang it; empty for a job that does not hang.
        run: What rank r of n does.
        timeout_s: Timeout of the process group.
    """

    name: str
    kind: str
    n_ranks: int
    at_fault: tuple[int, ...]
    run: Callable[[int, int], None]
    timeout_s: float = 1800


CASES: dict[str, Case] = {}


def case(kind, n_ranks, *at_fault, timeout_s=1800):
    """Register a job under its function's name."""

    def register(run):
        CASES[run.__name__] = Case(run.__name__, kind, n_ranks, at_fault, run, timeout_s)
        return run

    return register


class Announcement:
    """Tells the maker that a rank is about to do what hangs the job; `make` gives it an event of the job."""

    event = None


def announce():
    """Say that from here on the job hangs."""
    if Announcement.event is not None:
        Announcement.event.set()


def stand():
    """What a late rank does: its own code, for ever."""
    announce()
    time.sleep(FOREVER_S)


def freeze():
    """Stop this process, so that it can answer nothing."""
    announce()
    os.kill(os.getpid(), signal.SIGSTOP)


def ones(n=64):
    return torch.ones(n)


def warm_up(n_steps=12):
    """Healthy steps before the fault."""
    for _ in range(n_steps):
        dist.all_reduce(ones())


def late(rank, culprit, operation, then=dist.barrier):
    """Healthy steps, then everyone but the culprit enters the operation and what follows it."""
    warm_up()
    if rank == culprit:
        stand()
    operation()
    then()
