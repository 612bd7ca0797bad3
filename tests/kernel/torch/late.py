"""Two groups of a real PyTorch that exist, and are used, before anybody looks; then again, when a line comes on standard input."""

import os
import sys
import warnings

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")


def work(group):
    dist.all_reduce(torch.ones(1000))
    dist.barrier(group=group)
    dist.all_reduce(torch.ones(10), group=group)


def main():
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    work(group)
    print("ready", flush=True)
    sys.stdin.readline()
    work(group)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)
