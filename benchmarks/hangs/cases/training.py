"""Jobs of DDP, FSDP and pipelines."""

import torch
from benchmarks.hangs.cases.registry import case, freeze, stand

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
