"""Subgroups, point to point, and two ranks at once."""

import torch.distributed as dist
from benchmarks.hangs.cases.registry import announce, case, freeze, ones, stand, warm_up

# ── subgroups ───────────────────────────────────────────────────────────────


@case("subgroup", 4, 1)
def late_in_a_pair_that_others_wait_for(rank, _n):
    pair = dist.new_group([0, 1])
    warm_up()
    if rank < 2:
        dist.all_reduce(ones(), group=pair)
    if rank == 1:
        stand()
    if rank == 0:
        dist.all_reduce(ones(), group=pair)
    dist.all_reduce(ones())


@case("subgroup", 4, 2)
def chain_of_two_groups(rank, _n):
    first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
    for _ in range(6):
        if rank in {0, 1}:
            dist.all_reduce(ones(), group=first)
        if rank in {1, 2}:
            dist.all_reduce(ones(), group=second)
    if rank == 2:
        stand()
    if rank == 1:
        dist.all_reduce(ones(), group=second)
    if rank < 2:
        dist.all_reduce(ones(), group=first)
    dist.all_reduce(ones())


def mesh_job(rank, shape, culprit):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    for step in range(8):
        if rank == culprit and step == 7:
            stand()
        dist.all_reduce(ones(), group=mesh["tp"].get_group())
        dist.all_reduce(ones(), group=mesh["dp"].get_group())
        dist.all_reduce(ones())


@case("subgroup", 4, 3)
def mesh_of_2_by_2(rank, _n):
    mesh_job(rank, (2, 2), 3)


@case("subgroup", 8, 6)
def mesh_of_2_by_4(rank, _n):
    mesh_job(rank, (2, 4), 6)


@case("subgroup", 6, 2)
def mesh_of_3_by_2(rank, _n):
    mesh_job(rank, (3, 2), 2)


@case("subgroup", 4, 1)
def first_operation_of_a_pair(rank, _n):
    pair = dist.new_group([0, 1])
    warm_up()
    if rank == 1:
        stand()
    if rank == 0:
        dist.all_reduce(ones(), group=pair)
    dist.all_reduce(ones())


@case("subgroup", 4, 1)
def first_operation_of_a_pair_that_no_other_waits_for(rank, _n):
    pair = dist.new_group([0, 1])
    warm_up()
    if rank == 0:
        dist.all_reduce(ones(), group=pair)
    stand()


@case("subgroup", 4, 2)
def group_named_by_its_ranks(rank, _n):
    mine = [0, 1] if rank < 2 else [2, 3]
    group = dist.new_group(mine, use_local_synchronization=True)
    for step in range(12):
        if rank == 2 and step == 11:
            stand()
        dist.all_reduce(ones(), group=group)
    dist.all_reduce(ones())


@case("subgroup", 3, 1)
def two_groups_in_opposite_order(rank, _n):
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    warm_up()
    announce()
    if rank < 2:
        for group in (first, second) if rank == 0 else (second, first):
            dist.all_reduce(ones(), group=group)
    dist.all_reduce(ones())


# ── point to point ──────────────────────────────────────────────────────────


@case("point to point", 4, 2)
def receives_from_a_late_rank_while_others_wait(rank, _n):
    warm_up()
    if rank == 2:
        stand()
    if rank == 1:
        dist.recv(ones(), 2)
    dist.all_reduce(ones())


@case("point to point", 4, 3)
def chain_of_receives(rank, n):
    warm_up()
    if rank == 3:
        stand()
    dist.recv(ones(), rank + 1)
    dist.send(ones(), (rank - 1) % n)


@case("point to point", 4, 1)
def ring_of_batches(rank, n):
    for step in range(12):
        if rank == 1 and step == 11:
            stand()
        ops = [
            dist.P2POp(dist.isend, ones(), (rank + 1) % n),
            dist.P2POp(dist.irecv, ones(), (rank - 1) % n),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        dist.all_reduce(ones())


@case("point to point", 2, 0, 1)
def both_receive(rank, _n):
    warm_up()
    announce()
    dist.recv(ones(), 1 - rank)


@case("point to point", 5, 4)
def sends_before_a_late_rank(rank, _n):
    for _ in range(6):
        if rank == 3:
            dist.send(ones(), 4)
        if rank == 4:
            dist.recv(ones(), 3)
        dist.all_reduce(ones())
    if rank == 4:
        stand()
    dist.all_reduce(ones())


# ── two at once ─────────────────────────────────────────────────────────────


@case("two at once", 6, 1, 4)
def two_late_in_one_operation(rank, _n):
    warm_up()
    if rank in {1, 4}:
        stand()
    dist.all_reduce(ones())


@case("two at once", 8, 1, 6)
def two_late_in_two_groups(rank, _n):
    groups = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7])]
    for step in range(8):
        if rank in {1, 6} and step == 7:
            stand()
        dist.all_reduce(ones(), group=groups[rank // 4])
    dist.all_reduce(ones())


@case("two at once", 5, 1, 3)
def one_frozen_and_one_late(rank, _n):
    warm_up()
    if rank == 1:
        freeze()
    if rank == 3:
        stand()
    dist.all_reduce(ones())


@case("two at once", 6, 2, 5)
def one_late_and_one_in_another_collective(rank, _n):
    warm_up()
    if rank == 2:
        stand()
    if rank == 5:
        dist.barrier()
    dist.all_reduce(ones())
