"""Every collective of Gloo once, on two ranks of a real PyTorch, in the default group and in one of its own."""

import os
import warnings

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")


def main():
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    one, two = torch.ones(4), [torch.ones(4), torch.ones(4)]
    for _ in range(3):
        dist.all_reduce(torch.ones(1000))
    group = dist.new_group([0, 1])
    dist.barrier(group=group)
    dist.broadcast(one, 1, group=group)
    dist.all_gather(two, one, group=group)
    dist.gather(one, two if rank == 0 else None, 0, group=group)
    dist.scatter(one, two if rank == 1 else None, 1, group=group)
    dist.reduce(one, 1, group=group)
    dist.all_to_all_single(torch.zeros(4), one, group=group)
    dist.all_to_all_single(torch.zeros(4), one, [2, 2], [2, 2], group=group)
    if rank == 0:
        dist.send(one, 1)
    else:
        dist.recv(one, 0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)
