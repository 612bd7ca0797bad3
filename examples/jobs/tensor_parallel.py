"""Tensor-parallel training on the CPU (Gloo): each rank has a slice of every layer, by PyTorch's `parallelize_module`.

Run it by `torchrun --nproc-per-node 4 examples/jobs/tensor_parallel.py`, or on four hosts with agents and a Fleet by
`sudo ingero up --ranks 4 --job examples/jobs/tensor_parallel.py --fault cpu-quota:2:50%`. With replicas it is
data-parallel too, so that links within replicas can be compared:
`sudo ingero up --ranks 6 --job examples/jobs/tensor_parallel.py --fault link:3:20ms -- --replicas 3`.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Block(nn.Module):
    """A transformer's feed-forward part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """One collective forward, one backward."""
        return inputs + self.down(nn.functional.gelu(self.up(inputs)))


def average_gradients(model: nn.Module, replicas: DeviceMesh) -> None:
    """Over the ranks that have the same slice."""
    for parameter in model.parameters():
        found = parameter.grad
        own = found.to_local() if isinstance(found, DTensor) else found
        dist.all_reduce(own, group=replicas.get_group())
        own /= replicas.size()


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=0, help="0 trains until it is stopped")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--replicas", type=int, default=1, help="the ranks are a multiple of it")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    shape = (options.replicas, dist.get_world_size() // options.replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "slice"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = nn.Sequential(*(Block(options.width) for _ in range(options.depth)))
    for block in model:
        parallelize_module(block, mesh["slice"], plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # the same on every rank of a replica
    data = torch.Generator().manual_seed(1 + mesh.get_local_rank("replica"))
    step = 0
    while not options.steps or step < options.steps:
        inputs = torch.randn(options.batch, options.width, generator=data)
        loss = nn.functional.mse_loss(model(inputs), inputs)
        optimizer.zero_grad()
        loss.backward()
        if options.replicas > 1:
            average_gradients(model, mesh["replica"])
        optimizer.step()
        if rank == 0 and step % 100 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
        step += 1
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
