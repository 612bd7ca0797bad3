"""Jobs that nobody hangs."""

import time

import torch.distributed as dist
from benchmarks.hangs.cases.registry import case, ones, stand, warm_up
from benchmarks.hangs.cases.training import Slow, ddp, fsdp, train

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
