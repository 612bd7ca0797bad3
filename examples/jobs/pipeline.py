"""A pipeline on the CPU (Gloo): each rank has one stage of the network, by PyTorch's `torch.distributed.pipelining`.

Run it by `torchrun --nproc-per-node 4 examples/jobs/pipeline.py`. Its ranks send to their neighbours only, which agents
see as waits without a number: nobody's own time is compared, and no rank of it is named.

With `--replicas 3` three ranks have the same stage and add up their gradients (DDP): they are compared with each other,
and one stage with the others. `torchrun --nproc-per-node 6 examples/jobs/pipeline.py --replicas 3 --blocks 3,2` makes
two stages, the first with more work.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel


def build_stage(width: int, n_blocks: int) -> nn.Sequential:
    """The layers of one stage."""
    layers: list[nn.Module] = []
    for _ in range(n_blocks):
        layers += [nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)]
    return nn.Sequential(*layers)


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=0, help="0 trains until it is stopped")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--replicas", type=int, default=1, help="ranks that have the same stage")
    parser.add_argument("--blocks", default="", help="of each stage, such as 3,2; default: 1 each")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    n_stages, width = dist.get_world_size() // options.replicas, options.width
    mesh = init_device_mesh("cpu", (n_stages, options.replicas), mesh_dim_names=("pp", "dp"))
    at, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    blocks = [int(n) for n in options.blocks.split(",")] if options.blocks else [1] * n_stages
    model: nn.Module = build_stage(width, blocks[at])
    if options.replicas > 1:
        model = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    stage = PipelineStage(model, at, n_stages, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, 2 * n_stages, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(1 + replica)
    step = 0
    while not options.steps or step < options.steps:
        inputs = torch.randn(options.batch, width, generator=data)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if at == 0:
            schedule.step(inputs)
        elif at == n_stages - 1:
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
