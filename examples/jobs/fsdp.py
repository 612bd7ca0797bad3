"""Sharded training with PyTorch's FSDP2 (`fully_shard`) on the CPU (Gloo): a small network on random data.

Run it by `torchrun --nproc-per-node 4 examples/jobs/fsdp.py`, or on four hosts with agents and a Fleet by
`sudo ingero up --ranks 4 --job examples/jobs/fsdp.py --fault none --seconds 120`.
"""

import argparse

import torch
import torch.distributed as dist
from inside import Faults
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    """A layer that is gathered, used and let go of as one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """As in a transformer's feed-forward part."""
        return inputs + self.down(nn.functional.gelu(self.up(inputs)))


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=0, help="0 trains until it is stopped")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--batch", type=int, default=256)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(Block(options.width) for _ in range(options.depth)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data, faults = torch.Generator().manual_seed(rank), Faults()
    step = 0
    while not options.steps or step < options.steps:
        inputs = torch.randn(faults.rows(options.batch), options.width, generator=data)
        loss = nn.functional.mse_loss(model(inputs), inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        faults.step()
        if rank == 0 and step % 100 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
        step += 1
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
