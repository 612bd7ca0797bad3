"""A pipeline on the CPU (Gloo): each rank has one stage of the network, by PyTorch's `torch.distributed.pipelining`.

Run it by `torchrun --nproc-per-node 4 examples/jobs/pipeline.py`. Its ranks send to their neighbours only, which agents
see as waits without a number: nobody's own time is compared, and no rank of it is named.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=0, help="0 trains until it is stopped")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    width = options.width
    model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
    stage = PipelineStage(model, rank, n_ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2 * n_ranks, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(1)
    step = 0
    while not options.steps or step < options.steps:
        inputs = torch.randn(options.batch, width, generator=data)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        elif rank == n_ranks - 1:
            schedule.step(target=inputs, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        if losses and step % 100 == 0:
            print(f"step {step} loss {torch.stack(losses).mean().item():.3f}", flush=True)
        step += 1
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
