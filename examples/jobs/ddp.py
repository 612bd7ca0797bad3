"""Data-parallel training with PyTorch's DDP, on the CPU (Gloo) or a GPU (NCCL): a small network on random data.

Run it by `torchrun --nproc-per-node 4 examples/jobs/ddp.py`, or on four hosts with agents and a Fleet by
`sudo ingero up --ranks 4 --job examples/jobs/ddp.py --fault cpu-quota:2:50%`.
"""

import argparse
import os

import torch
import torch.distributed as dist
from inside import Faults
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def build_model(width: int, depth: int) -> nn.Module:
    """Layers of one width with a nonlinearity between them."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=0, help="0 trains until it is stopped")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--bucket-mb", type=float, default=1.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())  # noqa: TID251 - an example
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(
        build_model(options.width, options.depth).to(device), bucket_cap_mb=options.bucket_mb
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data, faults = torch.Generator(device).manual_seed(rank), Faults()
    step = 0
    while not options.steps or step < options.steps:
        n_rows = faults.rows(options.batch)
        inputs = torch.randn(n_rows, options.width, generator=data, device=device)
        labels = torch.randint(10, (n_rows,), generator=data, device=device)
        loss = nn.functional.cross_entropy(model(inputs), labels)
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
