"""Waits in the user's code, and those that leave no record or ended in a timeout."""

import os
import queue
import threading
import time
from datetime import timedelta

import torch.distributed as dist
from benchmarks.hangs.cases.registry import FOREVER_S, announce, case, ones, stand, warm_up

# ── in the user's code ──────────────────────────────────────────────────────


@case("user code", 4, 0)
def lock_taken_twice(rank, _n):
    warm_up()
    if rank == 0:
        announce()
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    dist.all_reduce(ones())


@case("user code", 3, 2)
def endless_loop(rank, _n):
    warm_up()
    if rank == 2:
        announce()
    while rank == 2:
        time.sleep(0.001)
    dist.all_reduce(ones())


@case("user code", 4, 1)
def loader_without_a_writer(rank, _n):
    reader, _writer = os.pipe()
    warm_up()
    if rank == 1:
        announce()
        os.read(reader, 1)
    dist.all_reduce(ones())


@case("user code", 4, 3)
def queue_that_nobody_fills(rank, _n):
    warm_up()
    if rank == 3:
        announce()
        queue.Queue().get()
    dist.barrier()


# ── waits that leave no record, and waits that ended in a timeout ───────────


@case("no record", 4, 2)
def monitored_barrier(rank, _n):
    warm_up()
    if rank == 2:
        stand()
    dist.monitored_barrier(timeout=timedelta(seconds=FOREVER_S))


@case("no record", 4, 3)
def group_that_one_rank_does_not_make(rank, _n):
    warm_up()
    if rank == 3:
        stand()
    dist.new_group([0, 1, 2, 3])


@case("timeout", 3, 1, timeout_s=2)
def timeout_of_an_all_reduce(rank, _n):
    warm_up()
    if rank == 1:
        stand()
    try:
        dist.all_reduce(ones())
    except RuntimeError:
        stand()


@case("timeout", 6, 4, timeout_s=2)
def timeout_of_an_all_gather(rank, n):
    warm_up()
    if rank == 4:
        stand()
    try:
        dist.all_gather([ones() for _ in range(n)], ones())
    except RuntimeError:
        stand()
