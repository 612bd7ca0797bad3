"""Jobs that hang, each with the ranks that were made to hang it. Run by `benchmarks.hangs.make` with an interpreter that has torch.

A case is what every rank runs after the process group exists. Its label is written beside it and says what was done on
purpose: ``late=(2,)`` and the like name the ranks whose code differs. Nothing here knows what `ingero hang` answers.
"""

import itertools
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

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


# ── DDP, FSDP, pipelines ────────────────────────────────────────────────────


class Slow(torch.nn.Module):
    """Passes its input on, and stands in one step of one rank."""

    def __init__(self, stands_at=None):
        super().__init__()
        self.step = 0
        self.stands_at = stands_at

    def forward(self, inputs):
        if self.step == self.stands_at:
            stand()
        self.step += 1
        return inputs


class StandInBackward(torch.autograd.Function):
    """Passes its input on and stands when its gradient is wanted."""

    @staticmethod
    def forward(_context, inputs):
        return inputs * 1.0

    @staticmethod
    def backward(_context, gradient):
        stand()
        return gradient


def model(middle):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 64),
        torch.nn.ReLU(),
        middle,
        torch.nn.Linear(64, 64),
        torch.nn.Linear(64, 8),
    )


def train(network, n_steps):
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for _ in range(n_steps):
        optimizer.zero_grad()
        network(torch.randn(4, 64)).sum().backward()
        optimizer.step()


def ddp(middle):
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model(middle), bucket_cap_mb=0.01)


def fsdp(middle):
    from torch.distributed.fsdp import fully_shard

    network = model(middle)
    for layer in (network[0], network[3], network[4]):
        fully_shard(layer)
    fully_shard(network)
    return network


@case("DDP, FSDP, pipeline", 4, 2)
def ddp_late_in_forward(rank, _n):
    train(ddp(Slow(8 if rank == 2 else None)), 20)


@case("DDP, FSDP, pipeline", 2, 1)
def ddp_late_in_backward(rank, _n):
    network = ddp(Slow())
    train(network, 6)
    outputs = network(torch.randn(4, 64))
    (StandInBackward.apply(outputs) if rank == 1 else outputs).sum().backward()


@case("DDP, FSDP, pipeline", 4, 3)
def ddp_with_uneven_batches(rank, _n):
    train(ddp(Slow()), 9 if rank == 3 else 12)
    stand()


@case("DDP, FSDP, pipeline", 4, 0)
def ddp_frozen(rank, _n):
    network = ddp(Slow())
    train(network, 6)
    if rank == 0:
        freeze()
    train(network, 6)


@case("DDP, FSDP, pipeline", 4, 1)
def fsdp_late_in_forward(rank, _n):
    train(fsdp(Slow(5 if rank == 1 else None)), 12)


@case("DDP, FSDP, pipeline", 3, 2)
def fsdp_frozen(rank, _n):
    network = fsdp(Slow())
    train(network, 6)
    if rank == 2:
        freeze()
    train(network, 6)


@case("DDP, FSDP, pipeline", 8, 4)
def hybrid_sharding_of_8(rank, _n):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    network = model(Slow(5 if rank == 4 else None))
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    fully_shard(network, mesh=mesh)
    train(network, 12)


@case("DDP, FSDP, pipeline", 3, 2)
def pipeline_with_a_late_stage(rank, n):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage_module = torch.nn.Sequential(torch.nn.Linear(64, 64), Slow(10 if rank == 2 else None))
    stage = PipelineStage(
        stage_module, rank, n, torch.device("cpu"), input_args=(torch.randn(4, 64),)
    )
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda outputs, _: outputs.sum())
    for _ in range(10):
        if rank == 0:
            schedule.step(torch.randn(8, 64))
        elif rank == n - 1:
            schedule.step(target=torch.randn(8, 64))
        else:
            schedule.step()


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


# ── nobody ──────────────────────────────────────────────────────────────────


def run_on(step):
    """Healthy steps until the job is ended."""
    while True:
        step()


@case("nobody", 4)
def healthy_all_reduces(_rank, _n):
    run_on(lambda: (dist.all_reduce(ones()), time.sleep(0.002)))


@case("nobody", 2)
def healthy_with_long_steps(_rank, _n):
    run_on(lambda: (time.sleep(0.4), dist.all_reduce(ones())))


@case("nobody", 4)
def healthy_with_a_slow_rank(rank, _n):
    run_on(lambda: (time.sleep(0.25 if rank == 1 else 0.01), dist.all_reduce(ones())))


@case("nobody", 3)
def healthy_and_done(_rank, _n):
    warm_up()
    stand()


@case("nobody", 4)
def healthy_ring(rank, n):
    def step():
        ops = [
            dist.P2POp(dist.isend, ones(), (rank + 1) % n),
            dist.P2POp(dist.irecv, ones(), (rank - 1) % n),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        dist.all_reduce(ones())
        time.sleep(0.005)

    run_on(step)


@case("nobody", 4)
def healthy_ddp(_rank, _n):
    network = ddp(Slow())
    run_on(lambda: (train(network, 1), time.sleep(0.01)))


@case("nobody", 3)
def healthy_fsdp(_rank, _n):
    network = fsdp(Slow())
    run_on(lambda: (train(network, 1), time.sleep(0.01)))


@case("nobody", 8)
def healthy_mesh(_rank, _n):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))

    def step():
        dist.all_reduce(ones(), group=mesh["tp"].get_group())
        dist.all_reduce(ones(), group=mesh["dp"].get_group())
        time.sleep(0.01)

    run_on(step)


@case("nobody", 5)
def healthy_rooted_collectives(rank, n):
    def step():
        dist.broadcast(ones(), 0)
        dist.reduce(ones(), 1)
        dist.gather(ones(), [ones() for _ in range(n)] if rank == 2 else None, 2)
        time.sleep(0.003)

    run_on(step)
