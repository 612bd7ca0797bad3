"""A rank is late for a collective, enters fewer or other ones, or is dead."""

import itertools
import os
import signal

import torch.distributed as dist
from benchmarks.hangs.cases.registry import announce, case, freeze, late, ones, stand, warm_up

# ── late: a rank is in its own code while the others enter ──────────────────


@case("late", 2, 1)
def late_all_reduce_of_2(rank, _n):
    late(rank, 1, lambda: dist.all_reduce(ones()))


@case("late", 4, 2)
def late_all_reduce_of_4(rank, _n):
    late(rank, 2, lambda: dist.all_reduce(ones()))


@case("late", 4, 0)
def late_root_of_broadcast(rank, _n):
    late(rank, 0, lambda: dist.broadcast(ones(), 0))


@case("late", 4, 3)
def late_receiver_of_broadcast(rank, _n):
    late(rank, 3, lambda: dist.broadcast(ones(), 0))


@case("late", 8, 5)
def late_barrier_of_8(rank, _n):
    late(rank, 5, dist.barrier)


@case("late", 3, 1)
def late_all_gather(rank, n):
    late(rank, 1, lambda: dist.all_gather([ones() for _ in range(n)], ones()))


@case("late", 4, 0)
def late_reduce_scatter(rank, n):
    late(rank, 0, lambda: dist.reduce_scatter_tensor(ones(), ones(64 * n)))


@case("late", 4, 3)
def late_all_to_all(rank, n):
    late(rank, 3, lambda: dist.all_to_all_single(ones(n), ones(n)))


@case("late", 5, 4)
def late_gather(rank, n):
    outputs = [ones() for _ in range(n)] if rank == 0 else None
    late(rank, 4, lambda: dist.gather(ones(), outputs, 0))


@case("late", 4, 0)
def late_root_of_scatter(rank, n):
    inputs = [ones() for _ in range(n)] if rank == 0 else None
    late(rank, 0, lambda: dist.scatter(ones(), inputs, 0))


@case("late", 6, 2)
def late_reduce(rank, _n):
    late(rank, 2, lambda: dist.reduce(ones(), 0))


@case("late", 4, 3)
def late_at_first_operation(rank, _n):
    if rank == 3:
        stand()
    dist.all_reduce(ones())


@case("late", 3, 0)
def late_object_broadcast(rank, _n):
    late(rank, 0, lambda: dist.broadcast_object_list([{"epoch": 1}], 0))


@case("late", 7, 6)
def late_async_all_reduces(rank, _n):
    warm_up()
    works = [dist.all_reduce(ones(), async_op=True) for _ in range(2 if rank == 6 else 6)]
    if rank == 6:
        stand()
    for work in works:
        work.wait()


# ── early: a rank does less or more than the others ─────────────────────────


@case("early", 4, 1)
def early_one_operation_more(rank, _n):
    warm_up()
    if rank == 1:
        dist.all_reduce(ones())
    stand()


@case("early", 4, 2)
def early_skips_an_all_gather(rank, n):
    warm_up()
    announce()
    if rank != 2:
        dist.all_gather([ones() for _ in range(n)], ones())
    dist.all_reduce(ones())
    dist.barrier()


@case("early", 5, 3)
def early_leaves_the_loop(rank, _n):
    for _ in range(19 if rank == 3 else 20):
        dist.all_reduce(ones())
    stand()


@case("early", 3, 0)
def early_skips_an_equal_step(rank, _n):
    for step in range(20):
        if rank == 0 and step == 10:
            continue
        dist.all_reduce(ones())
    if rank == 0:
        stand()
    dist.all_reduce(ones())


# ── dead: a rank that cannot write a dump ───────────────────────────────────


@case("dead", 4, 1)
def frozen_in_the_middle(rank, _n):
    warm_up()
    if rank == 1:
        freeze()
    dist.all_reduce(ones())


@case("dead", 4, 2)
def interpreter_locked(rank, _n):
    warm_up()
    if rank == 2:
        announce()
        all(itertools.repeat(1))  # one call that never ends: no other thread of Python runs
    dist.all_reduce(ones())


@case("dead", 4, 3)
def frozen_last_rank_of_known_size(rank, n):
    warm_up()
    dist.all_gather([ones() for _ in range(n)], ones())
    if rank == 3:
        freeze()
    dist.all_reduce(ones())


@case("dead", 4, 3)
def frozen_last_rank_of_unknown_size(rank, _n):
    warm_up()
    if rank == 3:
        freeze()
    dist.all_reduce(ones())


@case("dead", 4, 1)
def killed_and_the_others_keep_the_error(rank, _n):
    warm_up()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(ones())
    except RuntimeError:
        stand()


@case("dead", 6, 0)
def frozen_root(rank, _n):
    warm_up()
    if rank == 0:
        freeze()
    dist.broadcast(ones(), 0)
    dist.barrier()


# ── another collective ──────────────────────────────────────────────────────


def split(rank, culprit, usual, other):
    warm_up()
    (other if rank == culprit else usual)()
    dist.all_reduce(ones())
    dist.barrier()


@case("another collective", 3, 1)
def broadcast_for_all_reduce(rank, _n):
    split(rank, 1, lambda: dist.all_reduce(ones()), lambda: dist.broadcast(ones(), 0))


@case("another collective", 5, 4)
def barrier_for_all_reduce(rank, _n):
    split(rank, 4, lambda: dist.all_reduce(ones()), dist.barrier)


@case("another collective", 4, 0)
def all_gather_for_all_reduce(rank, n):
    outputs = [ones() for _ in range(n)]
    split(rank, 0, lambda: dist.all_reduce(ones()), lambda: dist.all_gather(outputs, ones()))


@case("another collective", 2, 1)
def broadcast_for_all_reduce_of_2(rank, _n):
    split(rank, 1, lambda: dist.all_reduce(ones()), lambda: dist.broadcast(ones(), 0))


@case("another collective", 8, 3)
def reduce_for_all_gather_of_8(rank, n):
    outputs = [ones() for _ in range(n)]
    split(rank, 3, lambda: dist.all_gather(outputs, ones()), lambda: dist.reduce(ones(), 0))


# ── another size ────────────────────────────────────────────────────────────


@case("another size", 3, 1)
def all_reduce_of_one_element_more(rank, _n):
    warm_up()
    dist.all_reduce(ones(5 if rank == 1 else 4))
    dist.barrier()


@case("another size", 8, 6)
def all_reduce_of_one_element_less_of_8(rank, _n):
    warm_up()
    dist.all_reduce(ones(15 if rank == 6 else 16))
    dist.barrier()


@case("another size", 5, 0)
def all_reduce_of_one_element_less(rank, _n):
    warm_up()
    dist.all_reduce(ones(3 if rank == 0 else 4))
    dist.barrier()


@case("another size", 4, 3)
def reduce_of_one_element_more(rank, _n):
    warm_up()
    dist.reduce(ones(5 if rank == 3 else 4), 0)
    dist.barrier()
