"""Data-parallel training with DDP on the CPU (Gloo) that saves checkpoints and goes on from the last one.

Run it by `torchrun --nproc-per-node 4 examples/jobs/ddp_checkpoint.py` twice: the second run begins where the first
one stopped; or on four hosts of a real Slurm, with a fault and what is done about it, by
`sudo ingero up --slurm --ranks 4 --spares 1 --job examples/jobs/ddp_checkpoint.py --fault cpu-quota:2:50% --act auto`.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take up what was saved; the step to go on with."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write a checkpoint beside the last one and put it in its place, so that there is always a whole one."""
    written = path.with_suffix(".new")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, written
    )
    written.replace(path)


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--save-every", type=int, default=20, help="steps between two checkpoints")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, width = dist.get_rank(), options.width
    layers: list[nn.Module] = []
    for _ in range(options.depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    network = nn.Sequential(*layers, nn.Linear(width, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    first = load(options.checkpoint, network, optimizer)
    model = DistributedDataParallel(network, bucket_cap_mb=1.0)
    for step in range(first, options.steps):
        data = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        inputs = torch.randn(options.batch, width, generator=data)
        labels = torch.randint(10, (options.batch,), generator=data)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
        if rank == 0 and (step + 1) % options.save_every == 0:
            save(options.checkpoint, network, optimizer, step + 1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
